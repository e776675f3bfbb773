"""The spans of a trajectory, whatever its line contains, and the thread that sends them."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from collector import collector
from expensive import examples
from toolyard.records.lines import to_line, trajectory_of
from toolyard.records.traces import opentelemetry
from toolyard.records.traces.opentelemetry import TraceSender
from toolyard.records.traces.spans import Span, span_id_of, spans_of, trace_id_of
from toolyard.records.trajectory import CallRecord, Failure, Trajectory
from trajectory_samples import failed_trajectory, good_trajectory

BEGAN = 1_700_000_000.25


def dated(number: int = 1, **changes: Any) -> Trajectory:
    return replace(good_trajectory(number), started_at=BEGAN, **changes)


def with_call(**fields: Any) -> Trajectory:
    """One turn: 1 s of sampling after 0.5 s, then 2 s of tools."""
    trajectory = dated()
    call = CallRecord("c", "python", "{}", "ok", "", seconds=2.0, attempts=1)
    turn = replace(
        trajectory.turns[0],
        tool_calls=(replace(call, **fields),),
        timings={"started": 0.5, "generating": 1.0, "tool_calling": 2.0},
    )
    seconds = {"pending": 0.5, "generating": 1.0, "tool_calling": 2.0, "reward": 0.25}
    return replace(trajectory, turns=(turn,), metrics={"seconds": seconds})


def times(spans: list[Span]) -> dict[str, tuple[float, float]]:
    return {span.name: (span.start - BEGAN, span.end - BEGAN) for span in spans}


def test_stages_and_waits_lie_where_they_happened() -> None:
    metrics = {"permit_seconds": 0.5, "queue_seconds": 0.75, "run_seconds": 0.5, "verdict": "ok"}
    trajectory = with_call(queue_seconds=0.25, started=0.25, seconds=1.75, metrics=metrics)
    turn = trajectory.turns[0]
    trajectory = replace(trajectory, turns=(replace(turn, sampled=replace(turn.sampled, queue_seconds=0.25)),))
    assert times(spans_of(trajectory)) == {
        "request": (0.0, 3.75),
        "prepare": (0.0, 0.5),
        "turn": (0.5, 3.5),
        "generate": (0.5, 1.5),
        "wait for engine": (0.5, 0.75),
        "tool python": (1.75, 3.5),
        "wait for tool slot": (1.75, 2.0),
        "wait for permit": (2.0, 2.5),
        "wait for sandbox": (2.5, 2.75),
        "sandbox run": (2.75, 3.25),
        "reward": (3.5, 3.75),
    }


def test_what_a_retried_call_reports_is_about_its_last_attempt() -> None:
    found = times(spans_of(with_call(attempts=2, metrics={"queue_seconds": 0.25, "run_seconds": 0.5})))
    assert found["wait for sandbox"] == (2.75, 3.0)
    assert found["sandbox run"] == (3.0, 3.5)


def test_a_message_that_was_not_sampled_has_its_span() -> None:
    trajectory = dated(
        turns=(),
        state="FAILED",
        finish_reason="engine_failure",
        metrics={"seconds": {"pending": 0.5, "generating": 2.0}},
        failure=Failure("ours", "GENERATING", "secret", "http://engine", "secret"),
    )
    spans = spans_of(trajectory)
    assert times(spans) == {"request": (0.0, 2.5), "prepare": (0.0, 0.5), "generate": (0.5, 2.5)}
    assert [span.error for span in spans] == ["engine_failure", "", "engine_failure"]
    assert spans[0].attributes["toolyard.failure_source"] == "http://engine"
    assert "secret" not in repr(spans)


def test_tools_that_did_not_end_have_a_span() -> None:
    trajectory = with_call()
    trajectory = replace(trajectory, turns=(replace(trajectory.turns[0], tool_calls=()),))
    (tools,) = [span for span in spans_of(trajectory) if span.name == "tools"]
    assert (tools.end - tools.start, tools.error) == (2.0, "no result")


def test_an_old_trajectory_has_no_spans() -> None:
    assert spans_of(good_trajectory()) == []
    assert b"started_at" not in to_line(good_trajectory())


def test_ids_depend_on_the_request_and_its_start() -> None:
    same = trajectory_of(to_line(dated()))
    assert trace_id_of(same) == trace_id_of(dated())
    ids = {trace_id_of(one) for one in (dated(), dated(2), replace(dated(), started_at=BEGAN + 1e-6))}
    assert len(ids) == 3
    assert len({span_id_of(trace, index) for trace in ids for index in range(100)}) == 300


odd = st.sampled_from(["x", None, True, -1, 0, 0.5, 1e308, float("inf"), float("nan"), 10**400, {}, [1]])


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(odd, odd, odd, odd, st.sampled_from([0.0, -5.0, 1e308, BEGAN]), st.integers(-(10**30), 10**30))
def test_whatever_a_line_contains_can_be_sent(one: Any, two: Any, three: Any, four: Any, began: float, n: int) -> None:
    trajectory = with_call(metrics={"permit_seconds": one, "queue_seconds": two, "run_seconds": three, "verdict": four})
    turn = replace(trajectory.turns[0], timings={"started": one, "generating": two, "tool_calling": three})
    odd_one = replace(
        trajectory,
        batch_data_id="\ud800" * 1000,
        rollout_offset=n,
        started_at=began,
        turns=(turn,),
        metrics={"seconds": {"pending": four, "reward": one, "generating": two}},
    )
    spans = spans_of(odd_one)
    for span in spans:
        within = spans[span.parent or 0]
        assert 0 <= within.start <= span.start <= span.end <= within.end
        assert all(len(value) <= 128 for value in span.attributes.values() if isinstance(value, str))
    sender = TraceSender.__new__(TraceSender)
    sender._resource = opentelemetry.Resource({})
    opentelemetry.trace_exporter.encode_spans(list(sender._readable(1, spans))).SerializeToString()


def test_all_that_was_queued_is_sent_before_it_closes() -> None:
    with collector() as there:
        sender = TraceSender(there.url)
        for number in range(300):
            sender.send(dated(number))
        sender.send(failed_trajectory())
        report = sender.close()
    assert len(there.traces()) == 300
    assert (report.sent, report.dropped, report.without_times) == (len(there.spans), 0, 1)
    assert "1 trajectories do not say when they began" in str(report)


def test_a_full_queue_drops_at_once_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opentelemetry, "_MAX_QUEUED", 50)
    monkeypatch.setattr(opentelemetry, "_CLOSE_SECONDS", 0.05)
    spans = sum(len(spans_of(dated(number))) for number in range(1000))
    with collector() as there:
        there.answering.clear()
        sender = TraceSender(there.url)
        began = time.process_time()
        for number in range(1000):
            sender.send(dated(number))
        spent = time.process_time() - began
        report = sender.close()
    assert (report.sent, report.dropped) == (0, spans)
    assert spent < 2.0  # a millisecond each would already be a lot


def test_a_collector_that_recovers_gets_what_comes_after(caplog: pytest.LogCaptureFixture) -> None:
    with collector() as there:
        there.status = 400  # not retried
        sender = TraceSender(there.url)
        sender.send(dated(1))
        refused = threading.Event()
        while not sender._dropped:
            refused.wait(0.005)
        there.status = 200
        sender.send(dated(2))
        report = sender.close()
    assert len(there.traces()) == 1
    assert (report.sent, report.dropped) == (len(spans_of(dated(2))), len(spans_of(dated(1))))
    assert "400" in report.problem
    assert not caplog.records  # reported once, at the end
