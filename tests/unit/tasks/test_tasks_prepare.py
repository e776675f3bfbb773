"""GSM8K in verl's shape: the rows, and what becomes of the file when something goes wrong."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from toolyard.errors import ConfigError, TaskError
from toolyard.tasks.files import read_tasks
from toolyard.tasks.prepare import GSM8K_SYSTEM, prepare_gsm8k
from toolyard.tasks.rows import GSM8K_INSTRUCTION

ROWS = [{"question": f"What is {n} + 1?", "answer": f"{n} + 1 = {n + 1}\n#### {n + 1}"} for n in range(5)]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "test.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def lines(path: Path) -> list:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_have_verls_fields(source, tmp_path):
    done = prepare_gsm8k(source, tmp_path / "out.jsonl")
    assert (done.read, done.written, done.skipped) == (5, 5, [])
    assert lines(tmp_path / "out.jsonl")[3] == {
        "data_source": "openai/gsm8k",
        "prompt": [
            {"role": "system", "content": GSM8K_SYSTEM},
            {"role": "user", "content": f"What is 3 + 1? {GSM8K_INSTRUCTION}"},
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {
            "split": "test",
            "index": 3,
            "answer": "3 + 1 = 4\n#### 4",
            "question": "What is 3 + 1?",
            "need_tools_kwargs": True,
            "tools_kwargs": {
                "calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "4"}},
                "code_interpreter": {"create_kwargs": {"ground_truth": "4"}},
            },
        },
    }


def test_parquet_has_the_same_rows_and_makes_the_same_tasks(source, tmp_path):
    prepare_gsm8k(source, tmp_path / "out.jsonl")
    prepare_gsm8k(source, tmp_path / "out.parquet")
    assert pq.read_table(tmp_path / "out.parquet").to_pylist() == lines(tmp_path / "out.jsonl")
    assert list(read_tasks(tmp_path / "out.parquet")) == list(read_tasks(tmp_path / "out.jsonl"))


def test_many_rows_make_whole_row_groups(tmp_path):
    source = tmp_path / "many.jsonl"
    source.write_text("".join(json.dumps(ROWS[n % 5]) + "\n" for n in range(5000)))
    assert prepare_gsm8k(source, tmp_path / "many.parquet").written == 5000
    assert pq.ParquetFile(tmp_path / "many.parquet").metadata.num_row_groups == 2
    assert [task.id for task in read_tasks(tmp_path / "many.parquet")][-1] == "many-4999"


def test_options_are_followed(source, tmp_path):
    done = prepare_gsm8k(source, tmp_path / "deep" / "er" / "out.jsonl", system="", split="dev", limit=2)
    written = lines(tmp_path / "deep" / "er" / "out.jsonl")
    assert (done.read, done.written, len(written)) == (2, 2, 2)
    assert [message["role"] for message in written[0]["prompt"]] == ["user"]
    assert written[1]["extra_info"]["split"] == "dev"


def test_a_bundled_set_can_be_prepared(tmp_path):
    assert prepare_gsm8k("word-problems", tmp_path / "out.parquet").written == 60
    assert next(read_tasks(tmp_path / "out.parquet")).data_source == "toolyard/word-problems"


def test_bad_rows_stop_it_and_leave_nothing_behind(source, tmp_path):
    with source.open("a") as file:
        file.write('{"question": "b", "answer": "four"}\n')
    for name in ("out.jsonl", "out.parquet"):
        with pytest.raises(TaskError, match=r"test\.jsonl: line 6: answer: 'four'"):
            prepare_gsm8k(source, tmp_path / name)
    assert os.listdir(tmp_path) == ["test.jsonl"]


def test_bad_rows_can_be_skipped_and_keep_their_place(source, tmp_path):
    source.write_text('nonsense\n{"prompt": "a", "answer": "1"}\n' + source.read_text())
    done = prepare_gsm8k(source, tmp_path / "out.jsonl", skip_bad_rows=True)
    assert (done.read, done.written, [row.number for row in done.skipped]) == (7, 5, [1, 2])
    assert "expected GSM8K's own fields" in done.skipped[1].problem
    assert lines(tmp_path / "out.jsonl")[0]["extra_info"]["index"] == 2


def test_nothing_is_written_of_nothing(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    for name in ("out.jsonl", "out.parquet"):
        with pytest.raises(TaskError, match="it has no rows"):
            prepare_gsm8k(tmp_path / "empty.jsonl", tmp_path / name)
    with pytest.raises(TaskError, match="no such file"):
        prepare_gsm8k(tmp_path / "missing.jsonl", tmp_path / "new" / "out.jsonl")
    assert os.listdir(tmp_path) == ["empty.jsonl"]


def test_a_file_is_replaced_only_if_it_is_said(source, tmp_path):
    target = tmp_path / "out.jsonl"
    target.write_text("precious")
    with pytest.raises(ConfigError, match=r"out\.jsonl: already exists; --force replaces it"):
        prepare_gsm8k(source, target)
    assert target.read_text() == "precious"
    prepare_gsm8k(source, target, force=True)
    assert len(lines(target)) == 5


def test_a_failure_with_force_keeps_what_was_there(source, tmp_path):
    target = tmp_path / "out.jsonl"
    target.write_text("precious")
    source.write_text(source.read_text() + "nonsense\n")
    with pytest.raises(TaskError):
        prepare_gsm8k(source, target, force=True)
    assert target.read_text() == "precious"
    assert sorted(os.listdir(tmp_path)) == ["out.jsonl", "test.jsonl"]


def test_the_source_may_be_the_destination(source):
    prepare_gsm8k(source, source, force=True)
    assert len(lines(source)) == 5


def test_a_link_stays_a_link(source, tmp_path):
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "real.jsonl")
    prepare_gsm8k(source, tmp_path / "link.jsonl")
    assert (tmp_path / "link.jsonl").is_symlink()
    assert len(lines(tmp_path / "real.jsonl")) == 5


def test_the_file_has_the_mode_that_other_files_have(source, tmp_path):
    prepare_gsm8k(source, tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").stat().st_mode == source.stat().st_mode


@pytest.mark.parametrize("name", ["out.csv", "out", "out.jsonl.gz"])
def test_a_destination_of_another_kind_is_told(source, tmp_path, name):
    with pytest.raises(ConfigError, match=rf"{name}: its name must end in \.jsonl or \.parquet"):
        prepare_gsm8k(source, tmp_path / name)


def test_a_destination_that_cannot_be_is_told(source, tmp_path):
    with pytest.raises(ConfigError, match="cannot be written"):
        prepare_gsm8k(source, source / "out.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(ConfigError, match="cannot be written"):
        prepare_gsm8k(source, tmp_path / "folder.jsonl", force=True)
    with pytest.raises(ConfigError, match="limit 0"):
        prepare_gsm8k(source, tmp_path / "out.jsonl", limit=0)
    assert sorted(os.listdir(tmp_path)) == ["folder.jsonl", "test.jsonl"]
