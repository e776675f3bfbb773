"""`toolyard audit` as a user runs it: real processes, exit codes, output."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from toolyard.cli.audit.findings import audit_dump
from toolyard.errors import ConfigError, RecordError
from toolyard.records.lines import to_line
from toolyard.records.trajectory import Trajectory
from trajectory_samples import failed_trajectory, good_trajectory

TOOLYARD = str(Path(sys.executable).parent / "toolyard")
SECONDS = 90


def toolyard(*args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [TOOLYARD, "audit", *map(str, args)], capture_output=True, text=True, timeout=SECONDS, check=False
    )


def fill(path: Path, *trajectories: Trajectory) -> None:
    path.write_bytes(b"".join(map(to_line, trajectories)))


def with_wrong_mask(trajectory: Trajectory) -> Trajectory:
    mask = [1] * len(trajectory.tokens.response_mask)
    return replace(trajectory, tokens=replace(trajectory.tokens, response_mask=mask))


def test_a_clean_dump_is_counted_and_exits_with_zero(tmp_path: Path) -> None:
    fill(tmp_path / "1.jsonl", *map(good_trajectory, range(20)))
    fill(tmp_path / "2.jsonl", failed_trajectory(), replace(good_trajectory(99), token_exact=False))
    with (tmp_path / "2.jsonl").open("ab") as file:
        file.write(b'{"input": "of", "output": "verl", "gts": "1", "score": 0.0, "step": 2}\n{"being": "writ')
    done = toolyard(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "23 trajectories in 2 files: 21 token-exact, 2 not token-exact, 0 with problems\n" in done.stdout
    assert "of the responses masked\n" in done.stdout
    assert done.stdout.endswith("no problems\n")


def test_problems_are_shown_with_their_lines_and_counted_and_exit_with_one(tmp_path: Path) -> None:
    good, path = good_trajectory(3), tmp_path / "4.jsonl"
    mute = replace(good_trajectory(4), request_id="mute \x1b[31m", messages=())
    fill(path, good, with_wrong_mask(good_trajectory(5)), mute)
    with path.open("ab") as file:
        file.write(b"\x00\xff rubbish\n[]\n")
    done = toolyard(tmp_path, "--limit", "3")
    assert done.returncode == 1
    assert f"{path}:2 · request-5\n  mask: tokens.response_mask[" in done.stdout
    assert f"{path}:3 · mute " in done.stdout
    assert f"{path}:4\n  unreadable: line: not JSON: byte 1 (0xff) is not UTF-8" in done.stdout
    assert "and 1 more; --limit 4 shows all" in done.stdout
    assert "3 trajectories in 1 file: 1 token-exact, 0 not token-exact, 2 with problems\n" in done.stdout
    assert done.stdout.endswith("2 unreadable lines\n")
    assert "\x1b" not in done.stdout


def test_as_json_it_is_for_scripts_and_the_limit_holds(tmp_path: Path) -> None:
    fill(tmp_path / "4.jsonl", good_trajectory(1), *(with_wrong_mask(good_trajectory(seed)) for seed in range(2, 9)))
    done = toolyard(tmp_path / "4.jsonl", "--json", "--limit", "2")
    assert done.returncode == 1
    said = json.loads(done.stdout)
    assert (said["trajectories"], said["bad_trajectories"], said["problems"]) == (8, 7, {"mask": 7})
    assert (said["token_exact"], said["not_token_exact"]) == (1, 0), "each trajectory is counted once"
    assert [(found["line"], found["request_id"], found["kind"]) for found in said["first"]] == [
        (2, "request-2", "mask"),
        (3, "request-3", "mask"),
    ]
    assert 0 < said["masked_share"] < 1


def test_what_is_no_dump_is_an_error_of_one_line(tmp_path: Path) -> None:
    done = toolyard(tmp_path / "nowhere")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert "nowhere: No such file or directory" in done.stderr


def test_what_there_is_nothing_to_audit_in_is_told(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"is not a dump: it has no <step>\.jsonl"):
        audit_dump(tmp_path, None, 10, Console())
    (tmp_path / "rollouts").mkdir()  # of a training run
    (tmp_path / "rollouts/0.jsonl").touch()
    with pytest.raises(RecordError, match=rf"; did you mean {tmp_path}/rollouts\?"):
        audit_dump(tmp_path, None, 10, Console())
    (tmp_path / "0.jsonl").write_text("")
    with pytest.raises(RecordError, match="has no trajectories"):
        audit_dump(tmp_path, None, 10, Console())
    with pytest.raises(ConfigError, match="no-model"):
        audit_dump(tmp_path, str(tmp_path / "no-model"), 10, Console())


def test_with_a_tokenizer_texts_are_checked_and_differences_are_shown_as_text(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({chr(code): code for code in range(128)}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    words.decoder = tokenizers.decoders.Fuse()
    (tmp_path / "model").mkdir()
    words.save(str(tmp_path / "model" / "tokenizer.json"))
    good = good_trajectory(1)
    other = good_trajectory(2)
    wrong = replace(other, output=other.output[:5] + "#" + other.output[6:])
    cut = good_trajectory(3)
    turns = (cut.turns[0], replace(cut.turns[1], sampled=replace(cut.turns[1].sampled, prompt_crc=7)), cut.turns[2])
    fill(tmp_path / "1.jsonl", good, wrong, replace(cut, turns=turns))
    done = toolyard(tmp_path, "--tokenizer", tmp_path / "model")
    assert done.returncode == 1
    assert f"1.jsonl:2 · request-2\n  text: output: differs from its tokens at character 5: '{wrong.output[:6]}" in (
        done.stdout
    )
    end = (cut.input + cut.output[: cut.turns[1].sampled.start])[-8:]
    assert f"ending in {end!r}" in done.stdout
    assert ", 2 with problems\n" in done.stdout
