"""Metrics of a run: what a line says, and a file that survives kills and resumes."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest

from toolyard.errors import RecordError
from toolyard.rollout.summary import RunningStats, Summary
from toolyard.train.metrics import Measure, MetricsFile, evaluation_line, read_metrics, step_line
from toolyard.train.samples import Refusal, Refused
from toolyard.train.trl.rollout import StepReport


def report(*, scores: list[float], seconds: dict[str, float] | None = None) -> StepReport:
    score = RunningStats()
    for value in scores:
        score.add(value)
    summary = Summary(
        trajectories=4,
        completed=3,
        turns=8,
        sampled_tokens=100,
        response_tokens=120,
        with_calls=2,
        score=score,
        rewards={"final": score},
        finish_reasons=Counter({"stop": 3, "tool_failure": 1}),
        outcomes=Counter(
            {("python", "ok"): 3, ("python", "failed"): 1, ("made up", "unknown_tool"): 2, ("too", "unknown_tool"): 1}
        ),
        seconds=Counter({"generating": 6.0, "tool_calling": 2.0}),
    )
    refused = (Refused("r", Refusal.FAILED_REQUEST, "it failed"),)
    return StepReport(3, False, summary, refused, seconds or {"sync": 1.0, "rollout": 4.0})


def line(step: int, **more: float) -> dict:
    return step_line(step, Measure.of(report(scores=[1.0])), 9.0, {"loss": 0.5, **more})


def test_a_line_says_what_was_earned_how_tools_were_used_and_where_the_time_went():
    found = step_line(4, Measure.of(report(scores=[1.0, 0.0, 0.5])), 10.0, {"loss": 0.25, "kl": 0.1, "epoch": 3})
    assert found == {
        "step": 4,
        "reward": 0.5,
        "tool_calls": 1.75,
        "calls_ok": 0.428571,
        "with_calls": 0.5,
        "turns": 2.0,
        "sampled_tokens": 25.0,
        "response_tokens": 30.0,
        "trajectories": 4,
        "completed": 3,
        "refused": {"failed_request": 1},
        "rewards": {"final": 0.5},
        "finish_reasons": {"stop": 3, "tool_failure": 1},
        "outcomes": {"python/ok": 3, "python/failed": 1, "?/unknown_tool": 3},
        "seconds": {"sync": 1.0, "rollout": 4.0, "update": 5.0, "step": 10.0},
        "request_seconds": {"generating": 6.0, "tool_calling": 2.0},
        "loss": 0.25,
        "kl": 0.1,
    }


def test_groups_and_ages_are_told_where_there_are_any_and_add_up_over_processes():
    made = report(scores=[1.0])
    one = Measure.of(replace(made, groups={"sampled": 3, "flat": 1, "replaced": 1}, staleness={0: 10, 2: 30}))
    two = Measure.of(replace(made, groups={"sampled": 2, "flat": 0, "replaced": 0}, staleness={1: 40}))
    found = Measure.of_all([one, two]).as_json()
    assert found["dynamic_sampling"] == {"sampled": 5, "flat": 1, "replaced": 1}
    assert found["staleness"] == {"mean": 1.25, "max": 2}
    plain = step_line(1, Measure.of(made), 9.0, {})
    assert not {"dynamic_sampling", "staleness"} & plain.keys()


def test_means_of_nothing_are_null_and_not_zero():
    found = step_line(4, Measure(), 10.0, {})
    assert (found["reward"], found["tool_calls"], found["calls_ok"]) == (None, None, None)
    assert found["seconds"] == {"update": 10.0, "step": 10.0}


def test_processes_add_up_and_the_slowest_counts():
    one = Measure.of(report(scores=[1.0], seconds={"sync": 1.0, "rollout": 4.0}))
    other = Measure.of(report(scores=[0.0, 0.5], seconds={"sync": 2.0, "rollout": 3.0}))
    both = Measure.of_all([one, other])
    assert both.as_json()["reward"] == 0.5
    assert (both.trajectories, both.calls, both.calls_ok, both.refused) == (8, 14, 6, {"failed_request": 2})
    assert both.as_json()["rewards"] == {"final": 0.5}
    assert (both.finish_reasons["stop"], both.outcomes["python/ok"]) == (6, 6)
    assert both.wall_seconds == {"sync": 2.0, "rollout": 4.0}
    assert (one + other).wall_seconds == {"sync": 3.0, "rollout": 7.0}, "one after the other"


def test_steps_after_the_checkpoint_are_dropped_on_resume_and_written_anew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path, steps=0) as file:
        for step in range(1, 6):
            file.write(line(step))
    with MetricsFile(path, steps=3) as file:
        assert [found["step"] for found in read_metrics(path)] == [1, 2, 3]
        file.write(line(4, kl=7.0))
    assert [(found["step"], found.get("kl")) for found in read_metrics(path)] == [
        (1, None),
        (2, None),
        (3, None),
        (4, 7),
    ]


def test_an_evaluation_before_the_first_step_is_dropped_with_it(tmp_path):
    path = tmp_path / "evaluations.jsonl"
    for reward in (0.25, 0.5):
        with MetricsFile(path, steps=0) as file:
            file.write({"step": 0, "reward": reward})
    with MetricsFile(path, steps=20):
        assert [found["reward"] for found in read_metrics(path)] == [0.5]


def test_a_torn_line_is_passed_over_and_removed_by_the_next_writer(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(json.dumps(line(1)).encode() + b'\n{"step": 2, "rew')
    assert [found["step"] for found in read_metrics(path)] == [1]
    with MetricsFile(path, steps=1) as file:
        file.write(line(2))
    assert [found["step"] for found in read_metrics(path)] == [1, 2]


def test_a_file_can_be_read_while_it_is_written(tmp_path):
    with MetricsFile(tmp_path / "m.jsonl", steps=0) as file:
        for step in range(1, 4):
            file.write(line(step))
            assert len(read_metrics(tmp_path / "m.jsonl")) == step


@pytest.mark.parametrize("said", ["{}", "[1]", "nonsense"])
def test_what_is_no_line_of_metrics_is_refused_by_its_number(tmp_path, said):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{said}\n')
    with pytest.raises(RecordError, match=r"metrics\.jsonl:2: "):
        read_metrics(path)


def test_numbers_that_are_none_are_null(tmp_path):
    with MetricsFile(tmp_path / "m.jsonl", steps=0) as file:
        file.write(line(1, kl=float("nan")))
    assert read_metrics(tmp_path / "m.jsonl")[0]["kl"] is None


@pytest.mark.exhaustive
def test_the_plot_takes_one_step_and_many_with_gaps_and_evaluations(tmp_path):
    from toolyard.train.plot_matplotlib import draw

    path = tmp_path / "metrics.png"
    draw([], [], path)
    assert not path.exists()
    for steps in (1, 60):
        lines = [line(step) for step in range(1, steps)] + [step_line(steps, Measure(), 3.0, {})]
        draw(lines, [evaluation_line(0, Measure.of(report(scores=[0.5])))], path)
        assert path.read_bytes().startswith(b"\x89PNG")
    groups = {"dynamic_sampling": {"sampled": 3, "flat": 1, "replaced": 1}}
    for more in (groups, {"staleness": {"mean": 0.5, "max": 1}}, {**groups, "staleness": {"mean": 0.5, "max": 1}}):
        draw([line(1), {**line(2), **more}, line(3)], [], path)
    assert [left.name for left in tmp_path.iterdir()] == ["metrics.png"]


def test_parts_of_the_reward_that_cancel_out_are_zero_and_not_missing():
    one, other = (Measure.of(report(scores=[score])) for score in (-1.0, 1.0))
    assert (one + other).as_json()["rewards"] == {"final": 0.0}
