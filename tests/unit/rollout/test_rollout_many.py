"""Many requests: bounded, streamed, stoppable, watched; recorded and replayed."""

from __future__ import annotations

import asyncio
import json

import pytest

from playing import END, TOKENIZER, Echo, call, request_for, said, scripted, setting, task
from toolyard.engines.scripted import ScriptedEngine
from toolyard.errors import ConfigError, DivergenceError
from toolyard.records.lines import to_line
from toolyard.records.tape import Tape, TapeWriter
from toolyard.rollout.external import RecordedCalls, ReplayedCalls
from toolyard.rollout.finish import FinishReason, RolloutState
from toolyard.rollout.run_many import RolloutRun


def requests_for(place, count):
    return [request_for(place, task(id=f"task-{number}")) for number in range(count)]


async def test_no_more_than_the_limit_run_at_once():
    most = 0
    async with scripted(["#### 42"], seconds=0.01) as engine:
        place = setting(engine)
        async with RolloutRun(place, requests_for(place, 40), concurrency=7) as run:
            async for _ in run:
                most = max(most, len(run.running))
    assert 0 < most <= 7


async def test_a_slow_reader_holds_the_run_back():
    begun = 0

    def requests(place):
        nonlocal begun
        for request in requests_for(place, 100):
            begun += 1
            yield request

    async with scripted(["#### 42"]) as engine:
        place = setting(engine)
        async with RolloutRun(place, requests(place), concurrency=4) as run:
            iterator = aiter(run)
            await anext(iterator)
            await asyncio.sleep(0.1)
            assert begun <= 2 * 4 + 2, "those that run and those that wait to be read"
            rest = [trajectory async for trajectory in iterator]
    assert len(rest) == 99


async def test_every_trajectory_is_delivered_also_to_a_reader_who_comes_late():
    async with scripted(["#### 42"]) as engine:
        place = setting(engine)
        async with RolloutRun(place, requests_for(place, 5), concurrency=5) as run:
            await asyncio.sleep(0.1)
            assert len([trajectory async for trajectory in run]) == 5


async def calling(run, count):
    """Wait until this many requests are calling tools."""
    async with asyncio.timeout(20):
        while run.states[RolloutState.TOOL_CALLING] < count:  # noqa: ASYNC110 - nothing would set an event
            await asyncio.sleep(0.01)


async def test_results_come_in_the_order_in_which_they_end():
    others_ended = asyncio.Event()

    async def generate_slowly(prompt, sampling, *, request_id):
        if request_id == slow:
            await others_ended.wait()
        return await generate(prompt, sampling, request_id=request_id)

    async with scripted(["#### 42"]) as engine:
        generate, engine.generate = engine.generate, generate_slowly
        place = setting(engine)
        requests = requests_for(place, 6)
        slow = requests[0].request_id
        async with RolloutRun(place, requests, concurrency=6) as run:
            ended = []
            async for trajectory in run:
                ended.append(trajectory.request_id)
                if len(ended) == 5:
                    others_ended.set()
    assert ended[-1] == slow


async def test_leaving_early_releases_everything():
    echo = Echo()
    async with scripted([said("sleep")]) as engine:
        place = setting(engine, [echo])
        async with RolloutRun(place, requests_for(place, 8), concurrency=8) as run:
            await calling(run, 8)
            assert len(echo.alive) == 8
        assert not echo.alive
    assert echo.scored == 8


async def test_stopped_it_aborts_what_runs_and_begins_no_more():
    echo = Echo()
    async with scripted([said("sleep")]) as engine:
        place = setting(engine, [echo])
        async with RolloutRun(place, requests_for(place, 50), concurrency=5) as run:
            await calling(run, 5)
            run.stop()
            ended = [trajectory async for trajectory in run]
    assert {trajectory.finish_reason for trajectory in ended} == {FinishReason.ABORTED}
    assert len(ended) == 5
    assert not echo.alive


async def test_the_watchdog_names_who_is_stuck_where_and_for_what():
    echo, named = Echo(), []
    async with scripted([said("sleep")]) as engine:
        place = setting(engine, [echo], stuck_after_seconds=0.05, tool_seconds=0.4)
        async with RolloutRun(place, requests_for(place, 1), concurrency=1, on_stuck=named.append) as run:
            (trajectory,) = [trajectory async for trajectory in run]
    (stuck,) = [one for one in named if one.state is RolloutState.TOOL_CALLING]
    assert "(task task-0, sample 0) has been in TOOL_CALLING for" in str(stuck)
    assert str(stuck).endswith("waiting for echo")
    assert "TOOL_CALLING: echo" in trajectory.metrics["stuck"]


class CountingEngine(ScriptedEngine):
    """Says how far it is: `pace` forward passes whenever it is asked."""

    pace = done = 0

    def sampled_tokens(self, request_id: str) -> int:
        return 100

    def steps(self) -> int:
        self.done += self.pace
        return self.done


@pytest.mark.parametrize("pace", [0, 1])
async def test_who_waits_for_an_engine_at_work_is_slow_but_not_stuck(pace):
    named = []
    async with CountingEngine([TOKENIZER.encode(f"#### 42{END}")], seconds=0.3) as engine:
        engine.pace = pace
        place = setting(engine, stuck_after_seconds=0.05)
        async with RolloutRun(place, requests_for(place, 1), concurrency=1, on_stuck=named.append) as run:
            (trajectory,) = [trajectory async for trajectory in run]
    assert [str(stuck.state) for stuck in named] == ([] if pace else ["GENERATING"])
    assert ("stuck" in trajectory.metrics) == (not pace)


async def test_tokens_of_a_turn_count_while_it_is_sampled():
    async with CountingEngine([TOKENIZER.encode(f"#### 42{END}")], seconds=60) as engine:
        place = setting(engine)
        async with RolloutRun(place, requests_for(place, 3), concurrency=3) as run:
            while run.states[RolloutState.GENERATING] < 3:  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0.005)
            assert run.live == (0, 300, 0)
            assert run.statuses[""].tokens == 300


async def test_a_worker_that_somebody_cancels_delivers_a_record_of_its_death_and_goes_on():
    async with scripted(["#### 42"]) as engine:
        place = setting(engine)
        take, doomed = place.speaker.take, []

        def cancelling(request, answer):
            if not doomed:
                doomed.append(request.request_id)
                asyncio.current_task().cancel()
            return take(request, answer)

        place.speaker.take = cancelling  # type: ignore[method-assign]
        async with RolloutRun(place, requests_for(place, 6), concurrency=2) as run:
            ended = {trajectory.request_id: trajectory async for trajectory in run}
    assert len(ended) == 6, "nobody is lost, and nobody waits for a worker that is gone"
    assert run.deaths == doomed
    assert ended[doomed[0]].finish_reason == FinishReason.INTERNAL_ERROR
    assert sum(trajectory.score == 1.0 for trajectory in ended.values()) == 5


async def test_two_requests_of_one_id_are_a_mistake_that_is_told():
    async with scripted(["#### 42"], seconds=0.05) as engine:
        place = setting(engine)
        twice = [request_for(place), request_for(place)]
        async with RolloutRun(place, twice, concurrency=2) as run:
            with pytest.raises(ConfigError, match="two requests have the id"):
                async for _ in run:
                    pass


# Tapes ----------------------------------------------------------------------------------------------------------------


async def recorded(path, lines, count=4):
    echo = Echo()
    with TapeWriter(path) as tape:
        async with scripted(lines) as engine:
            place = setting(engine, [echo])
            external_calls_for = lambda request: RecordedCalls(tape, request.request_id)  # noqa: E731
            async with RolloutRun(
                place, requests_for(place, count), concurrency=count, external_calls_for=external_calls_for
            ) as run:
                return [trajectory async for trajectory in run], place.tools["echo"].tool_schema


async def replayed(path, schema, count=4, **changed):
    """With neither an engine nor a tool."""
    tape = Tape.read(path)
    place = setting(None, **changed)
    requests = requests_for(place, count)
    for request in requests:
        request.tool_schemas = (schema,)
    external_calls_for = lambda request: ReplayedCalls(tape, request.request_id)  # noqa: E731
    async with RolloutRun(place, requests, concurrency=count, external_calls_for=external_calls_for) as run:
        return [trajectory async for trajectory in run]


async def test_a_tape_is_played_bit_for_bit_without_engine_and_tools(tmp_path):
    lines = [said("a") + "\n" + said("its failure") + "\n<tool_call>\n{\n</tool_call>", call("nobody", {}), "#### 42"]
    live, schema = await recorded(tmp_path / "tape", lines)
    again = await replayed(tmp_path / "tape", schema)
    assert sorted(map(to_line, again)) == sorted(map(to_line, live))
    assert live[0].score == pytest.approx(1.25)


async def test_failures_and_deadlines_are_on_the_tape_too(tmp_path):
    live, schema = await recorded(tmp_path / "tape", [said("a"), said("our failure")])
    again = await replayed(tmp_path / "tape", schema)
    assert sorted(map(to_line, again)) == sorted(map(to_line, live))
    assert live[0].finish_reason == FinishReason.TOOL_FAILURE


async def test_the_first_divergence_is_shown(tmp_path):
    _, schema = await recorded(tmp_path / "tape", [said("x" * 300), "#### 42"], count=1)
    with pytest.raises(DivergenceError, match=r"entry 4 of \d+ \(sampled\): asked\.prompt_tokens is \d+; the tape has"):
        await replayed(tmp_path / "tape", schema, count=1, max_tool_response_length=50)


async def test_a_request_that_the_tape_does_not_have_is_a_divergence(tmp_path):
    _, schema = await recorded(tmp_path / "tape", ["#### 42"], count=1)
    with pytest.raises(DivergenceError, match="the tape has no entries for request"):
        await replayed(tmp_path / "tape", schema, count=2)


async def test_the_tape_holds_seeds_and_times(tmp_path):
    await recorded(tmp_path / "tape", ["#### 42"], count=1)
    entries = [json.loads(line) for line in (tmp_path / "tape").read_text().splitlines()[1:]]
    assert [entry["kind"] for entry in entries] == ["begin", "sampled", "released", "final", "stuck", "ended"]
    assert entries[0]["asked"]["seed"] is not None
    assert all(isinstance(entry["got"]["clock"], list) for entry in entries)
