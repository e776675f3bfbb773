"""Groups, changes between two selections, and calls: as a user would count them by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from viewer_dumps import small, verl_line, write

from toolyard.records.trajectory import CallRecord, Trajectory
from toolyard.viewer.library import Library
from toolyard.viewer.protocol import GroupKind
from toolyard.viewer.query import parse_query


def sample(number: int, task: str, score: float | None, *, step: int = 1, **changes: object) -> Trajectory:
    return small(number, batch_data_id=task, rollout_offset=number, score=score, step=step, **changes)


def calls(number: int, *records: CallRecord, **changes: object) -> Trajectory:
    base = small(number, **changes)
    return replace(base, turns=(replace(base.turns[0], tool_calls=records), *base.turns[1:]))


def call(tool: str = "run", seconds: float = 0.0, outcome: str = "ok", **changes: object) -> CallRecord:
    return CallRecord("c", tool, "{}", outcome, seconds=seconds, **{"response": "", **changes})


def test_a_group_is_a_task_in_a_step_of_a_run(tmp_path: Path) -> None:
    failed = sample(2, "mixed", None, state="FAILED")
    for run in ("a", "b"):
        write(
            tmp_path / run / "1.jsonl",
            sample(0, "mixed", 0.0),
            *(sample(at, "none", 0.0) for at in range(2)),
            sample(1, "mixed", 1.0),
            *(sample(at, "all", 1.0) for at in range(2)),
            failed,
            *(sample(at, "half", 0.5) for at in range(2)),
            sample(0, "lost", None, state="FAILED"),
        )
    with Library.open(tmp_path) as library:
        found = library.groups()
        assert [(one.run, one.task, one.kind) for one in found][:5] == [
            ("a", "mixed", GroupKind.MIXED),
            ("a", "none", GroupKind.ALL_0),
            ("a", "all", GroupKind.ALL_1),
            ("a", "half", GroupKind.EQUAL),
            ("a", "lost", GroupKind.UNSCORED),
        ]
        assert [one.run for one in found] == ["a"] * 5 + ["b"] * 5
        assert library.runs() == ["a", "b"]
        mixed, *_, lost = found[:5]
        assert (mixed.scores, mixed.mean, mixed.failed) == ((0.0, 1.0, None), 0.5, 1)
        assert mixed.std == pytest.approx(0.5**0.5)
        assert mixed.advantages == (pytest.approx(-(0.5**0.5)), pytest.approx(0.5**0.5), None)
        assert (lost.mean, lost.std, lost.advantages) == (None, None, (None,))
        assert found[1].advantages == (0.0, 0.0)
        assert [row.sample for row in library.fetch(mixed.numbers)] == [0, 1, 2]
        # What stands for a group in the list of trajectories.
        asked = parse_query(f"group:{mixed.group_id} step:1 run=a")
        assert [row.number for row in library.rows(asked)] == list(mixed.numbers)
        assert [one.task for one in library.groups(parse_query("score:1"))] == ["mixed", "all"] * 2


def test_lines_without_a_task_are_grouped_by_their_prompt(tmp_path: Path) -> None:
    lines = [verl_line(input="user\nq\n", score=score) for score in (0, 1)] + [verl_line(input="user\nr\n", score=1)]
    (tmp_path / "1.jsonl").write_bytes(b"\n".join(lines) + b"\nhalf a li\n")
    with Library.open(tmp_path) as library:
        assert [(len(one.scores), one.kind) for one in library.groups()] == [(2, GroupKind.MIXED), (1, GroupKind.ALL_1)]


def test_changes_between_two_steps_are_by_task(tmp_path: Path) -> None:
    scores = {
        "solved": ([0.0, 0.0], [0.0, 1.0]),
        "broken": ([1.0, 0.0], [0.0, 0.0]),
        "better": ([0.1, 0.1], [0.2, 0.2]),
        "worse": ([1.0, 1.0], [1.0, 0.0]),
        "same": ([0.0, 1.0], [1.0, 0.0]),
        "new": ([], [1.0]),
        "gone": ([1.0], [None]),
    }
    for step in (0, 1):
        lines = [
            sample(at, task, score, step=step + 3)
            for task, both in scores.items()
            for at, score in enumerate(both[step])
        ]
        write(tmp_path / f"{step + 3}.jsonl", *lines)
    with Library.open(tmp_path) as library:
        found = library.changes(parse_query("step:3"), parse_query("step:4"))
        assert {one.task: one.kind for one in found} == {task: task for task in scores}
        assert {found[0].task, found[1].task} == {"broken", "worse"}
        assert {one.task for one in found[-2:]} == {"new", "gone"}
        assert found[0].change == -0.5
        assert {one.task: (one.count_before, one.count_after) for one in found}["gone"] == (1, 1)
        assert library.changes(parse_query("step:9"), parse_query("step:8")) == []


def test_calls_are_summed_up_by_tool_and_their_errors_by_the_last_line(tmp_path: Path) -> None:
    wrong = {"verdict": "failed", "queue_seconds": 0.5}
    write(
        tmp_path / "1.jsonl",
        *(calls(at, call(seconds=at / 10, metrics={"verdict": "ok", "queue_seconds": 0.25})) for at in range(1, 20)),
        calls(20, call(seconds=9.0, response="Traceback\nZeroDivisionError: x\n\n", metrics=wrong), call("search")),
        calls(21, call(seconds=1.0, response="other\nZeroDivisionError: x", metrics=wrong)),
        calls(22, call("search", 3.0, "timeout", error="no answer within 3 s")),
    )
    with Library.open(tmp_path) as library:
        report = library.calls()
        run, search = report.tools
        assert (run.tool, run.calls, run.failed, run.verdicts) == ("run", 21, 2, {"ok": 19, "failed": 2})
        assert (run.p50, run.p95, run.longest) == (1.0, 1.9, 9.0)
        assert (run.wait_p50, run.wait_p95) == (0.25, 0.5)
        assert (search.calls, search.failed, search.p50, search.wait_p50) == (2, 1, 3.0, None)
        assert [(one.tool, one.error, one.calls) for one in report.errors] == [
            ("run", "ZeroDivisionError: x", 2),
            ("search", "no answer within 3 s", 1),
        ]
        assert [(one.tool, one.seconds) for one in report.slowest][:2] == [("run", 9.0), ("search", 3.0)]
        # The query is about calls, too.
        only = library.calls(parse_query("tool=search"))
        assert [(one.tool, one.calls) for one in only.tools] == [("search", 2)]
        slow = library.calls(parse_query("call_time>2 verdict:failed"))
        assert [(one.tool, one.seconds) for one in slow.slowest] == [("run", 9.0)]
        assert library.count(parse_query("tool:search call_time>5")) == 0, "not of two different calls"
        assert library.count(parse_query('tool=run error="ZeroDivisionError: x"')) == 2
        assert library.count(parse_query("tool=search error:zero")) == 0, "not of two different calls"
        assert [(one.turn, one.verdict) for one in report.errors] == [(0, "failed"), (0, "timeout")]
        numbers = [row.number for row in library.rows(parse_query("tool:search"))]
        assert [(one.tool, bool(one.failed)) for one in library.calls_of(numbers)] == [
            ("run", True),
            ("search", False),
            ("search", True),
        ]
        assert library.values("tool", "s") == [("search", 2)]
        assert library.values("verdict") == [("ok", 20), ("failed", 2), ("timeout", 1)]
