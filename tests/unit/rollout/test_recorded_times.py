"""When a request began, and what it waited for."""

from __future__ import annotations

import time

import pytest

from playing import Echo, playing, said
from toolyard.errors import EngineError
from toolyard.records.traces.spans import spans_of


async def test_a_trajectory_says_when_it_began_and_when_its_calls_did() -> None:
    before = time.time()
    async with playing([said("hello"), "#### 42"], [Echo()]) as play:
        trajectory = await play.run()
    assert trajectory.started_at is not None
    assert before - 0.001 <= trajectory.started_at <= time.time()
    (call,) = trajectory.turns[0].tool_calls
    assert 0 <= call.started <= trajectory.turns[0].timings["tool_calling"]


async def test_failed_attempts_and_their_pauses_are_a_wait_for_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async with playing(["#### 42"], engine_retry_pause_seconds=0.05) as play:
        engine = play.setting.speaker.engine  # type: ignore[attr-defined]
        generate, failures = engine.generate, [EngineError("busy"), EngineError("busy")]

        async def flaky(*args, **kwargs):
            if failures:
                raise failures.pop()
            return await generate(*args, **kwargs)

        monkeypatch.setattr(engine, "generate", flaky)
        trajectory = await play.run()
    (turn,) = trajectory.turns
    assert (turn.sampled.attempts, failures) == (3, [])
    assert 0.15 <= turn.sampled.queue_seconds <= turn.timings["generating"]  # 0.05 s, then twice that
    (wait,) = [span for span in spans_of(trajectory) if span.name == "wait for engine"]
    assert wait.end - wait.start == pytest.approx(turn.sampled.queue_seconds, abs=1e-5)
