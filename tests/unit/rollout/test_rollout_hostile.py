"""Engines, tools and simulators that misbehave: one bad request neither ends the others nor is lost."""

from __future__ import annotations

import asyncio

import pytest

from playing import CHAT, TOKENIZER, Echo, call, played, playing, request_for, said, scripted, setting, task
from toolyard.engines.protocol import Finish, Generation, Sampling
from toolyard.errors import EngineError
from toolyard.records.audit import audit
from toolyard.records.lines import to_line
from toolyard.records.tape import Tape, TapeWriter
from toolyard.rewards.combination import Weights
from toolyard.rollout.external import RecordedCalls, ReplayedCalls
from toolyard.rollout.finish import FinishReason
from toolyard.rollout.interaction import BaseInteraction
from toolyard.rollout.play.play import Play
from toolyard.rollout.run_many import RolloutRun
from toolyard.tools.base import ToolResponse


async def run(place, count, concurrency=4):
    requests = [request_for(place, task(id=f"task-{number}")) for number in range(count)]
    async with RolloutRun(place, requests, concurrency=concurrency) as running:
        return [trajectory async for trajectory in running]


class Simulator(BaseInteraction):
    def __init__(self, **bad) -> None:
        super().__init__()
        self.bad = bad
        self.finalized = 0

    async def _do(self, what, result=None):
        bad = self.bad.get(what, result)
        if isinstance(bad, BaseException):
            raise bad
        return await bad() if callable(bad) else bad

    async def start(self, instance_id, **kwargs):
        await self._do("start")

    async def generate_response(self, instance_id, messages, **kwargs):
        return await self._do("respond", (True, "", None, {}))

    async def score(self, instance_id, **kwargs):
        return await self._do("score")

    async def finalize(self, instance_id, **kwargs):
        self.finalized += 1
        await self._do("finalize")


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ("start", "interaction_failure"),
        ("respond", "interaction_failure"),
        ("score", "reward_failure"),
        ("finalize", "interaction_ended"),
    ],
)
async def test_a_cancellation_that_nobody_sent_loses_no_request(where, reason):
    simulator = Simulator(**{where: asyncio.CancelledError()})
    async with scripted(["#### 42"]) as engine:
        ended = await run(setting(engine, interaction=simulator), 10)
    assert len(ended) == 10
    assert simulator.finalized == 10
    assert {trajectory.finish_reason for trajectory in ended} == {reason}


@pytest.mark.parametrize("score", ["0.5 points", float("nan"), object()])
async def test_a_score_that_is_no_number_fails_its_request_alone(score):
    async with scripted(["#### 42"]) as engine:
        ended = await run(setting(engine, interaction=Simulator(score=score)), 3)
    assert {(trajectory.finish_reason, trajectory.score) for trajectory in ended} == {("reward_failure", None)}


async def test_a_simulator_that_does_not_start_is_blamed_and_not_asked_for_a_score():
    simulator = Simulator(start=RuntimeError("no persona"), score=AssertionError("asked"))
    trajectory = await played(["#### 42"], interaction=simulator)
    assert (trajectory.finish_reason, trajectory.failure.whose) == (FinishReason.INTERACTION_FAILURE, "task")
    assert "no persona" in trajectory.failure.error
    assert "problems" not in trajectory.metrics


async def test_finalize_may_hang_no_longer_than_the_simulator_may():
    async def hang():
        await asyncio.sleep(60)

    async with asyncio.timeout(5):
        trajectory = await played(["#### 42"], interaction=Simulator(finalize=hang), interaction_seconds=0.05)
    assert trajectory.score == 1.0
    assert "TimeoutError" in trajectory.metrics["problems"]["interaction"][0]


async def test_ids_that_are_no_numbers_fail_the_request_alone():
    def say(request_id, turn, prompt):
        return Generation(["a"], [-0.1], Finish.STOP) if request_id == bad else "#### 42"  # type: ignore[list-item]

    async with scripted(say) as engine:
        place = setting(engine)
        bad = request_for(place, task(id="task-1")).request_id
        ended = {trajectory.request_id: trajectory for trajectory in await run(place, 3)}
    assert ended[bad].finish_reason == FinishReason.ENGINE_FAILURE
    assert [trajectory.score for trajectory in ended.values()].count(1.0) == 2


async def test_a_defect_of_ours_ends_its_request_with_the_traceback_and_releases_its_tools():
    echo = Echo()
    async with scripted(["#### 42"]) as engine:
        place = setting(engine, [echo])
        place.speaker.decode = lambda request: 1 / 0  # type: ignore[method-assign, assignment, return-value]
        trajectory = await Play(request_for(place), place).run()
    assert (trajectory.finish_reason, trajectory.score) == (FinishReason.INTERNAL_ERROR, None)
    assert "ZeroDivisionError" in trajectory.failure.error
    assert audit(trajectory) == []
    assert not echo.alive


async def test_more_tokens_than_asked_for_are_refused():
    ids = TOKENIZER.encode("x" * 500)
    trajectory = await played([Generation(ids, [-0.1] * 500, Finish.STOP)] * 9, response_length=20)
    assert trajectory.finish_reason == FinishReason.ENGINE_FAILURE
    assert "500 tokens, but at most 20 were requested" in trajectory.failure.error


async def test_aborts_that_bring_tokens_are_progress_and_those_that_do_not_are_attempts():
    def say(_, turn, prompt):
        if turn < 20:
            return Generation(TOKENIZER.encode("a"), [-0.1], Finish.ABORT)
        return "#### 42"

    assert (await played(say)).score == 1.0
    trajectory = await played([Generation([], [], Finish.ABORT)] * 9)
    assert trajectory.finish_reason == FinishReason.ENGINE_FAILURE


async def test_a_stop_text_that_an_abort_cut_in_two_is_found():
    def say(_, turn, prompt):
        ids = TOKENIZER.encode("so: DO" if turn == 0 else "NE, and much more")
        return Generation(ids, [-0.1] * len(ids), Finish.ABORT if turn == 0 else Finish.LENGTH)

    trajectory = await played(say, sampling=Sampling(max_tokens=100, stop=("DONE",)))
    assert (trajectory.output, trajectory.turns[0].sampled.finish) == ("so: DONE", "stop")
    assert audit(trajectory, TOKENIZER.decode) == []


async def test_an_engine_that_calls_a_cancellation_an_error_is_not_asked_again():
    asked = 0

    class Stubborn:
        async def generate(self, prompt_ids, sampling, *, request_id):
            nonlocal asked
            asked += 1
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                raise EngineError("connection lost") from None

    place = setting(Stubborn(), generate_seconds=0.05)
    trajectory = await Play(request_for(place), place).run()
    assert (trajectory.finish_reason, asked) == (FinishReason.STAGE_DEADLINE, 1)
    running = asyncio.create_task(Play(request_for(place), setting(Stubborn())).run())
    await asyncio.sleep(0.02)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_swallowed_cancellation_still_ends_the_run():
    async def swallow():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return True, "", None, {}

    async with asyncio.timeout(5), scripted(["41"]) as engine:
        place = setting(engine, interaction=Simulator(respond=swallow))
        requests = [request_for(place, task(id=f"task-{number}")) for number in range(8)]
        async with RolloutRun(place, requests, concurrency=2):
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("pauses", range(0, 40, 2))
async def test_an_abort_at_any_moment_never_raises(pauses):
    echo = Echo()
    async with playing([said("a"), said("b"), "#### 42"], [echo]) as play:
        running = asyncio.create_task(play.run())
        for _ in range(pauses):
            await asyncio.sleep(0)
        play.abort()
        play.abort()
        trajectory = await running
    assert trajectory.finish_reason in (FinishReason.ABORTED, FinishReason.STOP)
    assert not echo.alive


async def test_a_deadline_counts_also_if_nothing_ever_waits():
    assert (await played(["#### 42"], request_seconds=1e-9)).finish_reason == FinishReason.REQUEST_DEADLINE


async def test_a_reward_that_does_not_count_may_fail():
    class Broken(Echo):
        async def calc_reward(self, instance_id, **kwargs):
            raise RuntimeError("no idea")

    trajectory = await played(["#### 42"], [Broken()], reward="none")
    assert (trajectory.state, trajectory.score) == ("COMPLETED", None)
    trajectory = await played(["#### 42"], [Broken()], weights=Weights(tool=1.0))
    assert (trajectory.finish_reason, trajectory.score) == (FinishReason.REWARD_FAILURE, None)
    assert "no idea" in trajectory.failure.error


async def test_a_tool_whose_release_fails_has_given_its_reward():
    class Clinging(Echo):
        async def release(self, instance_id, **kwargs):
            raise RuntimeError("no")

    trajectory = await played(["#### 42"], [Clinging()], weights=Weights(tool=1.0))
    assert trajectory.score == 1.5


class Odd(Echo):
    """Its metrics are everything but JSON."""

    async def execute(self, instance_id, parameters, **kwargs):
        import datetime

        import numpy as np

        loop: list = []
        loop.append(loop)
        odd = {
            "np": np.float32(0.5),
            "set": {3, 1},
            "none": {None: 1},
            "when": datetime.timedelta(days=1),
            "bytes": b"\xff",
        }
        return ToolResponse(text="ok"), None, {"loop": loop} if parameters["text"] == "loop" else odd


@pytest.mark.parametrize("text", ["odd", "loop"])
async def test_metrics_that_are_no_json_are_the_same_live_and_from_a_tape(tmp_path, text):
    odd = Odd()
    async with scripted([said(text), "#### 42"]) as engine:
        place = setting(engine, [odd])
        with TapeWriter(tmp_path / "tape") as tape:
            request = request_for(place)
            live = await Play(request, place, RecordedCalls(tape, request.request_id)).run()
    assert live.state == "COMPLETED", live.failure
    again = request_for(place)
    replayed = await Play(again, setting(None), ReplayedCalls(Tape.read(tmp_path / "tape"), again.request_id)).run()
    assert to_line(live) == to_line(replayed)


async def test_results_are_delivered_in_the_order_of_the_tape_also_to_a_slow_reader(tmp_path):
    with TapeWriter(tmp_path / "tape") as tape:
        async with scripted([said("a"), "#### 42"]) as engine:
            place = setting(engine, [Echo()])
            requests = [request_for(place, task(id=f"task-{number}")) for number in range(60)]
            external_calls_for = lambda request: RecordedCalls(tape, request.request_id)  # noqa: E731
            read = []
            async with RolloutRun(place, requests, concurrency=4, external_calls_for=external_calls_for) as run:
                async for trajectory in run:
                    read.append(trajectory.request_id)
                    await asyncio.sleep(0.002)
    assert list(Tape.read(tmp_path / "tape").ended) == read


async def test_a_megabyte_of_output_is_cut_quickly():
    text = "".join(f"{number} " for number in range(150_000))

    class Flood(Echo):
        call_defaults = {"max_response_chars": None}  # noqa: RUF012

        async def execute(self, instance_id, parameters, **kwargs):
            return ToolResponse(text=text), None, {}

    async with asyncio.timeout(5):
        trajectory = await played([said("a"), "#### 42"], [Flood()], max_tool_response_length=200)
    assert CHAT.count(trajectory.turns[0].tool_calls[0].response) <= 200


async def test_a_watcher_that_raises_does_not_end_the_watch():
    told = []

    def tell(stuck):
        told.append(stuck.request_id)
        raise RuntimeError("no terminal")

    async with scripted([said("sleep")]) as engine:
        place = setting(engine, [Echo()], stuck_after_seconds=0.05, tool_seconds=0.4)
        requests = [request_for(place, task(id=f"task-{number}")) for number in range(2)]
        async with RolloutRun(place, requests, concurrency=2, on_stuck=tell) as run:
            assert len([trajectory async for trajectory in run]) == 2
    assert len(set(told)) == 2


async def test_a_call_of_nobody_is_told_and_the_request_goes_on():
    trajectory = await played([call("nobody", {}), "#### 42"])
    assert trajectory.turns[0].tool_calls[0].outcome == "unknown_tool"
    assert trajectory.score == 1.0
