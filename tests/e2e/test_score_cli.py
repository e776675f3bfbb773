"""`toolyard score` as a user runs it: dumps of Toolyard and verl rescored, with its output and files."""

from __future__ import annotations

import gzip
import io
import json
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from scoring_again import SECONDS, TOOLYARD, answered, changes, fill, function, lines_of, score, toolyard, verls

from patience import patient
from toolyard.cli.score.report import print_report
from toolyard.errors import ConfigError, RecordError
from toolyard.records.audit import audit
from toolyard.records.dump import read_dump
from toolyard.rewards.combination import Weights
from trajectory_samples import failed_trajectory

DEMO = gzip.decompress((Path(__file__).parents[1] / "data" / "embedded.jsonl.gz").read_bytes())

# The demo's dump ------------------------------------------------------------------------------------------------------


def test_scored_again_by_its_own_reward_the_recorded_dump_only_gains_the_reasons_and_then_stays_the_same(tmp_path):
    fill(tmp_path / "runs/0.jsonl", DEMO)
    done = toolyard(tmp_path, "runs", "--reward", "gsm8k", "--out", "again")
    assert done.returncode == 0, done.stderr
    assert "✔ 16 scored again with gsm8k in" in done.stdout
    assert "0 changed; mean 0.3125 → 0.3125." in done.stdout
    assert "written: again" in done.stdout
    explained = (tmp_path / "again/0.jsonl").read_bytes()
    lines = [json.loads(line) for line in explained.splitlines()]
    details = [line.pop("reward_details") for line in lines]
    assert lines == [json.loads(line) for line in DEMO.splitlines()]
    assert details[0] == {
        "final": {"expected": "9", "extracted": "9", "reason": "the answer 9 equals 9", "weight": 1.0},
        "tool/code_interpreter": {"weight": 0.0},
    }
    assert toolyard(tmp_path, "again", "--reward", "gsm8k", "--out", "more").returncode == 0
    assert (tmp_path / "more/0.jsonl").read_bytes() == explained


@pytest.mark.slow
def test_what_a_stricter_reward_changes_is_counted_and_shown(tmp_path):
    # Whoever does not mark the answer is right under `gsm8k`, and not under `gsm8k:strict`.
    unmarked = DEMO.replace(b'"#### ', b'"It is ')
    assert unmarked != DEMO
    fill(tmp_path / "runs/0.jsonl", unmarked)
    assert changes(score(tmp_path / "runs", "gsm8k")) == {"unchanged": 16}
    done = toolyard(tmp_path, "runs", "--reward", "gsm8k:strict", "--out", "strict", "--top", "2")
    assert done.returncode == 0, done.stderr
    assert "5 changed; mean 0.3125 → 0.0000." in done.stdout
    assert "0.jsonl:1   dcb8078ce6f905a093f486ef        1       0   no number after '#### '" in done.stdout
    assert "and 3 more; --top 5 shows all" in done.stdout
    before, after = lines_of(tmp_path / "runs/0.jsonl"), lines_of(tmp_path / "strict/0.jsonl")
    assert [line["score"] for line in after] == [0.0] * 16
    assert [line["rewards"]["final"] for line in after] == [0.0] * 16
    for one, other in zip(before, after, strict=True):
        assert [*one, "reward_details"] == list(other), "the order of the fields too"
        assert {key for key in one if one[key] != other[key]} <= {"score", "rewards"}


# Rewards --------------------------------------------------------------------------------------------------------------

MINE = """
    def compute_score(data_source, solution_str, ground_truth, extra_info, penalty=0.0):
        if "raise" in solution_str:
            raise ValueError("no such row")
        right = solution_str.endswith(f"#### {ground_truth}")
        return {"score": right - penalty, "asked": [data_source, ground_truth, extra_info], "said": solution_str}
"""


def test_a_function_of_the_users_gets_what_the_run_gave_it_and_its_options(tmp_path):
    mine = function(tmp_path, MINE)
    first = answered("#### 18", metrics={"reward": {"old": 1}, "turns": 2})
    fill(tmp_path / "runs/1.jsonl", first, answered("#### 17", seed=2))
    report = score(tmp_path / "runs", mine, options=["penalty=0.25"], out=tmp_path / "new")
    assert changes(report) == {"down": 2}
    found = lines_of(tmp_path / "new/1.jsonl")
    assert [line["score"] for line in found] == [0.75, -0.25]
    # Of the prompt's own assistant and of tools nothing, of the model everything.
    said = "\n".join(message.content for message in first.messages[4:] if message.role == "assistant")
    reward = {"asked": ["openai/gsm8k", "18", {}], "said": said}
    assert found[0]["metrics"] == {"reward": reward, "turns": 2}, "what the old reward said is gone"
    assert "2 lines have no extra_info: the reward got an empty one" in report.notes
    assert not any(audit(line.trajectory) for line in read_dump(tmp_path / "new"))


def test_what_cannot_be_scored_has_no_score_and_tells_why(tmp_path):
    fill(tmp_path / "1.jsonl", answered("raise"), answered("#### 18", seed=2), answered("raise", score=None, seed=3))
    function(tmp_path, MINE)
    done = toolyard(tmp_path, "1.jsonl", "--reward", "mine.py:compute_score", "--out", "new")
    assert done.returncode == 1, done.stderr
    assert "absent   reward 'mine.py:compute_score': raised ValueError: ValueError: no such row" in done.stdout
    assert "2 without a score: reward 'mine.py:compute_score': raised ValueError" in done.stdout
    assert "(first: 1.jsonl:1)" in done.stdout
    failed, good, _ = (line.trajectory for line in read_dump(tmp_path / "new"))
    assert (failed.state, failed.finish_reason, failed.score) == ("FAILED", "reward_failure", None)
    assert failed.rewards == {"final": None}
    assert "ValueError: no such row" in failed.failure.error
    assert (good.state, good.score) == ("COMPLETED", 1.0)
    assert not audit(failed)


@pytest.mark.slow
def test_a_ground_truth_that_the_reward_cannot_use_is_no_zero(tmp_path):
    fill(tmp_path / "1.jsonl", answered("#### 18", truth="Paris"))
    done = toolyard(tmp_path, "1.jsonl", "--reward", "gsm8k")
    assert done.returncode == 1
    assert "1 without a score: reward 'gsm8k': ground_truth 'Paris': expected a number" in done.stdout
    assert "mean 1.0000 → none" in done.stdout


def test_a_trajectory_that_lost_its_reward_gets_it_and_one_that_failed_otherwise_stays_as_it_is(tmp_path):
    lost = answered("#### 18", score=None)
    failure = replace(failed_trajectory().failure, stage="COMPLETED", error="the service was away")
    lost = replace(lost, state="FAILED", finish_reason="reward_failure", failure=failure)
    fill(tmp_path / "runs/1.jsonl", lost, failed_trajectory())
    report = score(tmp_path / "runs", "gsm8k", out=tmp_path / "new")
    assert changes(report) == {"newly scored": 1, "left": 1}
    found, other = (line.trajectory for line in read_dump(tmp_path / "new"))
    assert (found.state, found.score, found.failure) == ("COMPLETED", 1.0, None)
    assert not audit(found)
    assert other == failed_trajectory()


def test_a_reward_that_takes_too_long_is_absent_after_the_deadline(tmp_path):
    slow = function(
        tmp_path,
        """
        import asyncio
        async def compute_score(data_source, solution_str, ground_truth, extra_info):
            await asyncio.sleep(0 if "18" in solution_str else 60)
            return 1
        """,
    )
    fill(tmp_path / "1.jsonl", answered("#### 17"), *(answered("#### 18", seed=seed) for seed in range(2, 9)))
    began = time.monotonic()
    report = score(tmp_path / "1.jsonl", slow, deadline_seconds=0.3)
    assert time.monotonic() - began < patient(20)
    assert changes(report) == {"unchanged": 7, "newly absent": 1}
    assert [changed.why for changed in report.largest] == [f"reward {slow!r}: did not finish within 0.3 s"]


def test_no_reward_and_options_that_are_none_are_refused(tmp_path):
    fill(tmp_path / "1.jsonl", answered("#### 18"))
    with pytest.raises(ConfigError, match="--reward none: there would be nothing to score"):
        score(tmp_path / "1.jsonl", "none")
    with pytest.raises(ConfigError, match="reward 'gsm8k': takes no options, but was given x"):
        score(tmp_path / "1.jsonl", "gsm8k", options=["x=1"])
    with pytest.raises(ConfigError, match="'x': expected key=value"):
        score(tmp_path / "1.jsonl", "gsm8k", options=["x"])


# verl's lines ---------------------------------------------------------------------------------------------------------


def test_of_verls_lines_the_final_reward_is_the_score_and_they_stay_verls(tmp_path):
    mine = function(tmp_path, MINE)
    lines = [verls("#### 18", 0.0), verls("#### 17", 0.0, extra_info={"index": 3}), verls("raise", 1.0)]
    fill(tmp_path / "verl/20.jsonl", *lines)
    report = score(tmp_path / "verl", mine, data_source="openai/gsm8k", weights=["final=5"], out=tmp_path / "new")
    assert changes(report) == {"up": 1, "unchanged": 1, "newly absent": 1}
    found = lines_of(tmp_path / "new/20.jsonl")
    asked = ["openai/gsm8k", "18", {}]
    assert found[0] == lines[0] | {"score": 1.0, "asked": asked, "said": "#### 18"}
    assert found[1]["asked"][2] == {"index": 3}
    assert found[2]["score"] is None
    assert "no such row" in found[2].pop("reward_error")
    assert found[2] == lines[2] | {"score": None}
    assert [change.place for change in report.largest] == ["20.jsonl:1", "20.jsonl:3"]
    untold = score(tmp_path / "verl", mine)
    assert "3 lines have no data source: the reward got 'unknown' (set --data-source)" in untold.notes


# What is read ---------------------------------------------------------------------------------------------------------


def test_damaged_lines_are_named_and_counted_and_the_others_scored(tmp_path):
    fill(
        tmp_path / "runs/1.jsonl",
        answered("#### 18"),
        b"\x00\xff rubbish\n",
        b'{"input": 5, "output": "x"}\n',
        answered("#### 17", seed=2),
        b"[]\n" * 40,
        b'{"input": "being writ',
    )
    done = toolyard(tmp_path, "runs", "--reward", "gsm8k", "--out", "new")
    assert done.returncode == 1
    assert "damaged: runs/1.jsonl:2: not JSON: byte 1 (0xff) is not UTF-8" in done.stdout
    assert "damaged: runs/1.jsonl:3: input is 5, not text" in done.stdout
    assert "damaged: 22 more" in done.stdout
    assert "✘ 2 scored again with gsm8k" in done.stdout
    assert "written: new, without the 42 damaged lines" in done.stdout
    assert len(lines_of(tmp_path / "new/1.jsonl")) == 2


@pytest.mark.slow
def test_steps_are_told_apart_and_can_be_chosen_and_limited(tmp_path):
    for step in (3, 20, 100):
        fill(
            tmp_path / f"runs/{step}.jsonl",
            *(answered("#### 17", seed=seed, step=step, request_id=f"{step}-{seed}") for seed in range(step % 7 + 1)),
        )
    done = toolyard(tmp_path, "runs", "--reward", "gsm8k", "--json", "--top", "1")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert [(step["step"], step["trajectories"], step["down"]) for step in said["steps"]] == [
        (3, 4, 4),
        (20, 7, 7),
        (100, 3, 3),
    ]
    assert (said["trajectories"], said["changed"], said["mean_before"], said["mean_after"]) == (14, 14, 1.0, 0.0)
    assert said["changes"] == [
        {
            "file": "runs/3.jsonl",
            "line": 1,
            "request_id": "3-0",
            "step": 3,
            "before": 1.0,
            "after": 0.0,
            "why": "the answer 17 is not 18",
        }
    ]
    assert (said["reward"], said["weights"], said["unscored"], said["interrupted"]) == (
        "gsm8k",
        Weights().model_dump(),
        [],
        False,
    )
    some = score(tmp_path / "runs", "gsm8k", steps=[3, 100], limit=5, out=tmp_path / "new")
    assert {step: tally.trajectories for step, tally in some.steps.items()} == {3: 4, 100: 1}
    assert [line["request_id"] for line in lines_of(tmp_path / "new/100.jsonl")] == ["100-0"]
    assert not (tmp_path / "new/20.jsonl").exists()
    shown = io.StringIO()
    print_report(some, Console(file=shown, width=120))
    assert " all " in shown.getvalue()
    with pytest.raises(RecordError, match=r"has no <step>\.jsonl for steps 7"):
        score(tmp_path / "runs", "gsm8k", steps=[7])


@pytest.mark.slow
def test_what_is_no_dump_is_an_error_of_one_line(tmp_path):
    done = toolyard(tmp_path, "nowhere", "--reward", "gsm8k")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "nowhere: No such file or directory" in done.stderr
    (tmp_path / "0.jsonl").write_text("")
    with pytest.raises(RecordError, match="has no trajectories: its files are empty"):
        score(tmp_path, "gsm8k")


def test_what_a_dump_says_is_never_obeyed_by_the_terminal(tmp_path):
    evil = answered("#### 17", request_id="\x1b[31m[bold]x[/bold]\ud800")
    fill(tmp_path / "1.jsonl", evil, answered("x", truth="[red]\x1b[2J", seed=2))
    done = toolyard(tmp_path, "1.jsonl", "--reward", "gsm8k")
    assert done.returncode == 1, done.stderr
    assert "\x1b" not in done.stdout
    assert "[bold]x[/bold]" in done.stdout
    assert "ground_truth '[red]" in done.stdout


# What is written ------------------------------------------------------------------------------------------------------


def test_the_dump_itself_is_never_written_over(tmp_path):
    dump = fill(tmp_path / "runs/1.jsonl", answered("#### 17"))
    before = dump.read_bytes()
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    for source, out in (("runs", "runs"), ("runs", "link"), ("runs/1.jsonl", "runs"), ("link", "runs/../runs")):
        with pytest.raises(ConfigError, match="that is the dump itself, which is never overwritten"):
            score(tmp_path / source, "gsm8k", out=tmp_path / out)
    fill(tmp_path / "old/1.jsonl", b"precious\n")
    with pytest.raises(ConfigError, match=r"1\.jsonl already exists there"):
        score(tmp_path / "runs", "gsm8k", out=tmp_path / "old")
    assert (tmp_path / "old/1.jsonl").read_bytes() == b"precious\n"
    assert dump.read_bytes() == before
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["1.jsonl"]


def test_without_out_nothing_is_written(tmp_path):
    fill(tmp_path / "runs/1.jsonl", answered("#### 17"))
    score(tmp_path / "runs", "gsm8k")
    assert [path.name for path in tmp_path.rglob("*")] == ["runs", "1.jsonl"]


@pytest.mark.slow
def test_a_file_that_could_not_be_written_to_its_end_does_not_look_whole(tmp_path):
    lines = (answered("#### 18", seed=seed) for seed in range(300))
    fill(tmp_path / "runs/1.jsonl", *lines)
    code = """
        import resource, signal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        import sys
        sys.argv = ["toolyard", "score", "runs", "--reward", "gsm8k", "--out", "new"]
        from toolyard.cli.main import main
        main()
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("toolyard: cannot write to new/.1.jsonl.new: File too large")
    assert [path.name for path in (tmp_path / "new").iterdir()] == [".lock"]


def interrupted(place: Path, code: str, texts: list[str], *files: set[str]) -> tuple[str, str]:
    """What it printed and told, if Ctrl-C comes each time that all of the files are there."""
    function(place, code)
    fill(place / "runs/1.jsonl", answered("one"))
    fill(place / "runs/2.jsonl", *(answered(text, step=2, seed=seed) for seed, text in enumerate(texts)))
    command = [TOOLYARD, "score", "runs", "--reward", "mine.py:compute_score", "--json", "--out", "new"]
    process = subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for awaited in files:
        deadline = time.monotonic() + 60
        while not all((place / file).exists() for file in awaited) and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
    began = time.monotonic()
    said, told = process.communicate(timeout=60)
    assert time.monotonic() - began < patient(30)
    assert process.returncode == 130, told
    assert "Stopping: finished scores are kept" in told
    assert "Traceback" not in told
    return said, told


def test_ctrl_c_ends_it_cleanly_with_what_is_done(tmp_path):
    # What is awaited runs in the event loop: once its file is there, nothing comes between it and its score.
    slow = """
        import time
        async def done(name):
            open(name, "w").close()
            return 0.5
        def compute_score(data_source, solution_str, ground_truth, extra_info):
            if "wait" in solution_str:
                open("waiting", "w").close()
                time.sleep(60)
            return done(solution_str.split()[-1])
    """
    files = {"waiting", "one", "two", "three", "four"}
    said, _ = interrupted(tmp_path, slow, ["two", "wait", "three", "wait", "four"], files)
    report = json.loads(said)
    assert (report["interrupted"], report["trajectories"], report["scores_after"]) == (True, 4, 4)
    assert report["partial"] == "new/2.partial.jsonl"
    assert len(lines_of(tmp_path / "new/1.jsonl")) == 1, "a file that was finished"
    assert len(lines_of(tmp_path / "new/2.partial.jsonl")) == 3, "one that was not, by another name"
    assert len(list(read_dump(tmp_path / "new"))) == 1


@pytest.mark.slow
def test_a_second_ctrl_c_does_not_wait_for_a_reward_that_takes_its_time_to_end(tmp_path):
    stubborn = """
        import asyncio
        async def compute_score(data_source, solution_str, ground_truth, extra_info):
            try:
                open("waiting", "w").close()
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                open("ending", "w").close()
                await asyncio.sleep(60)
    """
    said, told = interrupted(tmp_path, stubborn, ["two"], {"waiting"}, {"ending"})
    assert said == ""
    assert told.endswith("interrupted\n")
    assert [path.name for path in (tmp_path / "new").iterdir()] == [".lock"]
