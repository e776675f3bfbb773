"""`toolyard eval` as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from toolyard.cli.app import app
from toolyard.errors import ConfigError, MissingDependencyError
from toolyard.records.lines import to_line
from trajectory_samples import good_trajectory

TOOLYARD = str(Path(sys.executable).with_name("toolyard"))


def dump(folder: Path, scores: dict[str, list[float | None]], source: str = "math") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    base = good_trajectory(0, turns=1, tokens=3)
    lines = [
        to_line(replace(base, request_id=f"{task}-{at}", batch_data_id=task, score=score, data_source=source, step=0))
        for task, found in scores.items()
        for at, score in enumerate(found)
    ]
    (folder / "0.jsonl").write_bytes(b"".join(lines))
    return folder


def run(*arguments: object) -> str:
    done = CliRunner().invoke(app, ["eval", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def words(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_a_dump_is_a_table(tmp_path: Path) -> None:
    folder = dump(tmp_path / "a", {"x": [1.0, 0.0], "y": [1.0, 1.0], "z": [0.0, None]})
    shown = run(folder, "--resamples", 100)
    assert f"{folder}: 3 tasks, 6 samples (1 to 2 with a reward per task, most often 2)" in shown
    assert "1 sample without a reward left out: 1 stop" in shown
    table = {line[0]: line[1:] for line in words(shown) if line}
    assert table["pass@2"][0] == "1.0000"
    assert table["pass@2"][-1] == "2"
    assert next(line[:3] for line in words(shown) if line[:1] == ["mean"]) == ["mean", "reward", "0.5000"]


def test_json_has_all_numbers_and_is_the_same_each_time(tmp_path: Path) -> None:
    folder = dump(tmp_path / "a", {f"t{n}": [float(n % 3 == 0), float(n % 2)] for n in range(20)})
    first = run(folder, "--json")
    assert first == run(folder, "--json")
    found = json.loads(first)
    assert found["all"]["pass@2"]["tasks"] == found["all"]["tasks"] == 20
    assert found["k"] == [1, 2]
    low, high = found["all"]["mean"]["interval"]
    assert low < found["all"]["mean"]["value"] < high


def test_two_dumps_are_compared(tmp_path: Path) -> None:
    before = dump(tmp_path / "before", {f"t{n}": [0.0, float(n % 2)] for n in range(20)})
    after = dump(tmp_path / "after", {f"t{n}": [1.0, float(n % 2)] for n in range(21)})
    shown = run(before, after)
    assert f"20 tasks in both, 1 only in {after}" in shown
    mean = next(line for line in words(shown) if line[:2] == ["mean", "reward"])
    assert mean[2:5] == ["0.2500", "0.7500", "+0.5000"]
    assert mean[-5:] == ["<", "0.001", "20", "0", "20"]
    found = json.loads(run(before, after, "--json"))
    assert found["all"]["mean"]["difference"] == 0.5
    assert found["only_after"] == 1
    assert found["before"]["all"]["tasks"] == 20


def test_dumps_without_a_common_task_end_with_status_1(tmp_path: Path) -> None:
    folders = dump(tmp_path / "a", {"x": [1.0]}), dump(tmp_path / "b", {"y": [1.0]})
    done = CliRunner().invoke(app, ["eval", *map(str, folders)])
    assert done.exit_code == 1
    assert "no task is in both dumps" in done.stdout


def test_without_any_reward_it_ends_with_status_1(tmp_path: Path) -> None:
    scored, unscored = dump(tmp_path / "a", {"x": [1.0]}), dump(tmp_path / "b", {"x": [None]})
    for arguments in ([unscored], [unscored, "--json"], [scored, unscored]):
        assert CliRunner().invoke(app, ["eval", *map(str, arguments)]).exit_code == 1
    assert "1 task in both" in CliRunner().invoke(app, ["eval", str(scored), str(unscored)]).stdout


def test_three_dumps_need_pool(tmp_path: Path) -> None:
    folders = [dump(tmp_path / name, {"x": [1.0]}) for name in "abc"]
    with pytest.raises(ConfigError, match="--pool takes them as one run"):
        run(*folders)
    assert "1 task, 3 samples (3 per task)" in run(*folders, "--pool")
    assert "1 task, 3 samples (3 per task)" in run(tmp_path / "[abc]")


@pytest.mark.parametrize(
    ("count", "suffix", "magic"), [(1, "svg", b"<?xml"), (2, "png", b"\x89PNG"), (1, "pdf", b"%PDF")]
)
def test_a_picture_is_drawn(tmp_path: Path, count: int, suffix: str, magic: bytes) -> None:
    pytest.importorskip("matplotlib")
    folders = [dump(tmp_path / f"$x_{n}$", {"x": [1.0], "y": [0.5], "z": [None]}) for n in range(count)]
    target = tmp_path / f"out.{suffix}"
    target.write_text("old")
    run(*folders, "--by", "task", "--picture", target)
    assert target.read_bytes().startswith(magic)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == [target.name]


def test_a_picture_with_another_suffix_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = dump(tmp_path / "a", {"x": [1.0]})
    content = (folder / "0.jsonl").read_bytes()
    with pytest.raises(ConfigError, match="must end in"):
        run(folder, "--picture", folder / "0.jsonl")
    assert (folder / "0.jsonl").read_bytes() == content


def test_without_matplotlib_the_pip_command_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in [name for name in sys.modules if name.startswith(("matplotlib.", "toolyard.evaluation.picture"))]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(MissingDependencyError, match=r"pip install 'toolyard\[pictures\]'"):
        run(dump(tmp_path / "a", {"x": [1.0]}), "--picture", tmp_path / "out.png")


def test_a_threshold_that_is_no_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--threshold nan"):
        run(dump(tmp_path / "a", {"x": [1.0]}), "--threshold", "nan")


def test_names_in_a_dump_do_not_reach_the_terminal_as_codes(tmp_path: Path) -> None:
    base = good_trajectory(0, turns=1, tokens=3)
    hostile = "\x1b[31m[red]x\u202e"
    lines = [replace(base, request_id=f"{n}", data_source=name, step=0) for n, name in enumerate((hostile, "b"))]
    (tmp_path / "0.jsonl").write_bytes(b"".join(map(to_line, lines)))
    shown = run(tmp_path, "--by", "source")
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    assert "[red]x" in shown


def test_as_a_process_an_error_is_one_line(tmp_path: Path) -> None:
    done = subprocess.run([TOOLYARD, "eval", tmp_path / "no"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        f"toolyard: '{tmp_path / 'no'}' does not exist; `toolyard rollout --out DIR` writes a dump"
    ]
