"""`toolyard tasks` as a user runs it: real processes and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

TOOLYARD = str(Path(sys.executable).parent / "toolyard")
SECONDS = 90

GSM8K = '{"question": "What is 3 + 4?", "answer": "3 + 4 = 7\\n#### 7"}\n'
BAD = 'nonsense\n\n{"question": "Capital of France?", "answer": "Paris"}\n'


def toolyard(*args: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [TOOLYARD, "tasks", *map(str, args)], capture_output=True, text=True, timeout=SECONDS, cwd=cwd
    )


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "train.jsonl"
    path.write_text(GSM8K * 3)
    return path


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    path = tmp_path / "mixed.jsonl"
    path.write_text(GSM8K + BAD + '{"prompt": "[bold]a[/]", "answer": "b", "data_source": "mine"}\n')
    return path


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--help"], "Show, check and prepare the tasks"),
        (["prepare", "gsm8k", "--help"], "toolyard tasks prepare gsm8k test.jsonl test.parquet"),
    ],
)
def test_help_shows_how(args, words):
    done = toolyard(*args)
    assert done.returncode == 0
    assert words in done.stdout


class TestShow:
    def test_the_bundled_problems_are_shown_by_name(self):
        done = toolyard("show", "word-problems", "--limit", "2")
        assert done.returncode == 0
        assert "word-problem-01 · toolyard/word-problems · ground truth 9" in done.stdout
        assert done.stdout.count("user: ") == 2

    @pytest.mark.slow
    def test_as_json_all_fields_are_there(self, mixed):
        mixed.write_text(mixed.read_text().replace(BAD, ""))
        first, second = json.loads(toolyard("show", mixed, "--json").stdout)
        assert list(first) == [
            "id", "data_source", "messages", "ground_truth", "tools_kwargs", "interaction_kwargs", "extra_info",
        ]  # fmt: skip
        assert second["messages"] == [{"role": "user", "content": "[bold]a[/]"}]

    def test_good_tasks_are_shown_up_to_a_bad_row_which_is_told_in_one_line(self, mixed):
        mixed.write_text(mixed.read_text().replace(GSM8K, '{"prompt": "[bold]a[/]", "answer": 1}\n'))
        done = toolyard("show", mixed)
        assert done.returncode == 1
        assert "user: [bold]a[/]" in done.stdout  # what looks like markup is text
        assert done.stderr.startswith(f"toolyard: {mixed}: line 2: not valid JSON: ")
        assert done.stderr.count("\n") == 1

    @pytest.mark.slow
    def test_a_missing_file_names_the_bundled_sets(self):
        done = toolyard("show", "nowhere")
        assert (done.returncode, done.stdout) == (1, "")
        assert "nowhere: no such file; names of bundled sets: word-problems" in done.stderr


class TestCheck:
    def test_every_bad_row_is_told_by_its_line(self, mixed):
        done = toolyard("check", mixed)
        assert done.returncode == 1
        assert f"{mixed}: line 2: not valid JSON" in done.stdout
        assert f"{mixed}: line 4: answer: 'Paris' does not end in '#### number'" in done.stdout
        assert "4 rows, 2 of them bad" in done.stdout

    @pytest.mark.slow
    def test_as_json(self, mixed):
        done = toolyard("check", mixed, "--json")
        report = json.loads(done.stdout)
        assert done.returncode == 1
        assert (report["rows"], report["tasks"]) == (4, 2)
        assert report["shapes"] == {"gsm8k": 1, "plain": 1}
        assert report["data_sources"] == {"openai/gsm8k": 1, "mine": 1}
        assert [row["line"] for row in report["bad"]] == [2, 4]

    @pytest.mark.slow
    def test_a_file_of_bad_rows_only_is_reported_like_any_other(self, tmp_path):
        (tmp_path / "bad.jsonl").write_text(BAD)
        done = toolyard("check", tmp_path / "bad.jsonl")
        assert (done.returncode, done.stderr) == (1, "")
        assert "2 rows, 2 of them bad" in done.stdout


class TestPrepare:
    def test_from_gsm8k_to_parquet_and_back(self, good, tmp_path):
        (tmp_path / "system.txt").write_text("Be brief.\n")
        done = toolyard("prepare", "gsm8k", good, "new/out.parquet", "--system", "system.txt", cwd=tmp_path)
        assert (done.returncode, done.stdout) == (0, "")
        assert done.stderr == "3 rows read, 3 written: new/out.parquet\n"
        first = pq.read_table(tmp_path / "new" / "out.parquet").to_pylist()[0]
        assert first["prompt"][0] == {"role": "system", "content": "Be brief."}
        assert (first["reward_model"]["ground_truth"], first["extra_info"]["split"]) == ("7", "train")
        done = toolyard("check", tmp_path / "new" / "out.parquet")
        assert done.returncode == 0
        assert "3 rows, all valid" in done.stdout

    def test_bad_rows_stop_it_or_are_skipped_and_listed(self, mixed, tmp_path):
        target = tmp_path / "out.jsonl"
        done = toolyard("prepare", "gsm8k", mixed, target)
        assert done.returncode == 1
        assert "line 2: not valid JSON" in done.stderr
        assert not target.exists()
        done = toolyard("prepare", "gsm8k", mixed, target, "--skip-bad-rows", "--split", "dev", "--system", "")
        assert done.returncode == 0
        assert [f"line {n}: " in done.stderr for n in (2, 4, 5)] == [True] * 3
        assert f"4 rows read, 1 written, 3 skipped: {target}" in done.stderr
        (row,) = map(json.loads, target.read_text().splitlines())
        assert (row["extra_info"]["split"], len(row["prompt"])) == ("dev", 1)

    @pytest.mark.slow
    def test_nothing_is_overwritten_without_force(self, good, tmp_path):
        target = tmp_path / "out.jsonl"
        target.write_text("precious")
        done = toolyard("prepare", "gsm8k", good, target)
        assert done.returncode == 1
        assert "already exists; --force replaces it" in done.stderr
        assert target.read_text() == "precious"
        assert toolyard("prepare", "gsm8k", good, target, "--force", "--limit", "2").returncode == 0
        assert len(target.read_text().splitlines()) == 2
