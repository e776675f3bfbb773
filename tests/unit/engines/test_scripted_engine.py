"""Engines without a model: the script, and the recording."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patience import patient
from toolyard.engines.protocol import Engine, Finish, Generation, Sampling
from toolyard.engines.replay import RecordedGeneration, ReplayEngine
from toolyard.engines.scripted import ScriptedEngine
from toolyard.errors import DivergenceError, EngineError, EngineRequestError
from toolyard.testing.engine.byte_model import byte_decode, byte_encode
from toolyard.tokens import ids_crc

SAMPLING = Sampling()


async def say(engine: Engine, request_id: str = "r", prompt: Sequence[int] = (1,), **sampling: object) -> Generation:
    return await engine.generate(prompt, Sampling.model_validate(sampling), request_id=request_id)


# The script ---------------------------------------------------------------------------------------------------------


async def test_a_list_is_what_every_request_hears_turn_by_turn() -> None:
    async with ScriptedEngine(["one", [7, 8]], encode=byte_encode) as engine:
        for request_id in ("a", "b"):
            assert (await say(engine, request_id)).token_ids == [*b"one"]
            assert (await say(engine, request_id)).token_ids == [7, 8]
            with pytest.raises(EngineRequestError, match=r"'[ab]' has 2 turns"):
                await say(engine, request_id)


async def test_a_mapping_is_what_each_request_hears() -> None:
    async with ScriptedEngine({"a": [[1]], "b": [[2]]}) as engine:
        assert (await say(engine, "b")).token_ids == [2]
        assert (await say(engine, "a")).token_ids == [1]
        with pytest.raises(EngineRequestError, match="no request 'c'"):
            await say(engine, "c")


async def test_a_function_sees_the_request_its_turn_and_the_prompt() -> None:
    async with ScriptedEngine(lambda request_id, turn, prompt: [len(request_id), turn, *prompt]) as engine:
        assert (await say(engine, "abc", (9, 9))).token_ids == [3, 0, 9, 9]
        assert (await say(engine, "abc", (5,))).token_ids == [3, 1, 5]


async def test_an_exception_in_the_script_is_raised_once_and_takes_its_turn() -> None:
    async with ScriptedEngine([EngineError("away"), [1]]) as engine:
        with pytest.raises(EngineError, match="away"):
            await say(engine)
        assert (await say(engine)).token_ids == [1]


async def test_a_generation_is_returned_as_it_stands() -> None:
    whole = Generation([1, 2, 3], None, Finish.ABORT, "v7")
    async with ScriptedEngine([whole]) as engine:
        assert await say(engine, max_tokens=1) is whole


async def test_the_answer_is_cut_like_a_sampled_one() -> None:
    script = lambda *_: "call <tool> now <tool>"  # noqa: E731
    async with ScriptedEngine(script, encode=byte_encode, decode=byte_decode, logprob=-1.5) as engine:
        whole = await say(engine)
        assert (byte_decode(whole.token_ids), whole.finish) == ("call <tool> now <tool>", Finish.STOP)
        assert whole.logprobs == [-1.5] * 22
        cut = await say(engine, max_tokens=4)
        assert (byte_decode(cut.token_ids), cut.finish, cut.logprobs) == ("call", Finish.LENGTH, [-1.5] * 4)
        stopped = await say(engine, stop=("!", "ol>"))
        assert (byte_decode(stopped.token_ids), stopped.finish) == ("call <tool>", Finish.STOP)
        assert stopped.stop_text == "ol>"
        token = await say(engine, stop_token_ids=(0, ord("l")), stop=("ol>",))
        assert (byte_decode(token.token_ids), token.finish, token.stop_text) == ("cal", Finish.STOP, None)


async def test_a_text_without_an_encoder_is_refused_with_the_way_out() -> None:
    async with ScriptedEngine(["text"]) as engine:
        with pytest.raises(EngineRequestError, match="`encode`"):
            await say(engine)


async def test_an_answer_takes_the_time_it_is_told_to() -> None:
    async with ScriptedEngine(lambda *_: [1] * 10, seconds=0.05, token_seconds=0.005) as engine:
        began = time.monotonic()
        assert (await say(engine)).finish is Finish.STOP
        assert 0.09 <= time.monotonic() - began < patient(1)


async def test_a_thousand_turns_cost_next_to_nothing() -> None:
    """The runner is benchmarked with it, so it must not dominate the time."""
    prompt, answer = list(range(2000)), list(range(50))
    async with ScriptedEngine(lambda *_: answer) as engine:

        async def seconds() -> float:
            began = time.process_time()
            for n in range(1000):
                await engine.generate(prompt, SAMPLING, request_id=f"r-{n}")
            return time.process_time() - began

        best = min([await seconds() for _ in range(5)])
    assert best / 1000 < 60e-6


async def test_a_cancelled_answer_leaves_nothing_behind() -> None:
    async with ScriptedEngine([[1]], seconds=60) as engine:
        saying = asyncio.ensure_future(say(engine))
        await asyncio.sleep(0)
        saying.cancel()
        with pytest.raises(asyncio.CancelledError):
            await saying
        assert not engine._waiting


# The recording --------------------------------------------------------------------------------------------------------


def recorded(*turns: tuple[Sequence[int], Generation]) -> list[RecordedGeneration]:
    return [RecordedGeneration.of(prompt, generation) for prompt, generation in turns]


FIRST, SECOND = Generation([5], [-0.1], Finish.STOP, "v1"), Generation([6, 7], None, Finish.LENGTH)


async def test_a_recording_is_heard_again_turn_by_turn() -> None:
    tape = {"a": recorded(([1, 2], FIRST), ([1, 2, 5, 3], SECOND)), "b": recorded(([9], FIRST))}
    async with ReplayEngine(tape) as engine:
        assert isinstance(engine, Engine)
        assert await say(engine, "a", [1, 2]) is FIRST
        assert await say(engine, "b", (9,)) is FIRST
        assert await say(engine, "a", [1, 2, 5, 3]) is SECOND
        await engine.abort("a")


@pytest.mark.parametrize(
    ("request_id", "prompt", "complaint"),
    [
        ("a", [1, 3], "request 'a', turn 0: the prompt has 2 tokens; in the recording it had as many, but different"),
        ("a", [1], "request 'a', turn 0: the prompt has 1 tokens; in the recording it had 2"),
        ("c", [1, 2], "request 'c' is not in the recording"),
    ],
)
async def test_another_prompt_is_a_divergence(request_id: str, prompt: list[int], complaint: str) -> None:
    async with ReplayEngine({"a": recorded(([1, 2], FIRST))}) as engine:
        with pytest.raises(DivergenceError) as diverged:
            await say(engine, request_id, prompt)
        assert str(diverged.value) == complaint


async def test_a_turn_more_than_was_recorded_is_a_divergence() -> None:
    async with ReplayEngine({"a": recorded(([1, 2], FIRST))}) as engine:
        await say(engine, "a", [1, 2])
        with pytest.raises(DivergenceError, match="'a', turn 1: the recording ends after 1 turns"):
            await say(engine, "a", [1, 2, 5])


@pytest.mark.parametrize("engine", [ScriptedEngine([[1]]), ReplayEngine({})])
async def test_an_engine_that_is_not_open_says_so(engine: Engine) -> None:
    with pytest.raises(EngineError, match="not open") as refused:
        await say(engine)
    assert not refused.value.retryable


# The checksum ---------------------------------------------------------------------------------------------------------

IDS = st.lists(st.integers(0, 2**40))


@given(IDS, IDS)
def test_a_checksum_goes_on_where_another_ended(a: list[int], b: list[int]) -> None:
    assert ids_crc(b, ids_crc(a)) == ids_crc([*a, *b]) == ids_crc((*a, *b))


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1), st.data())
def test_a_checksum_tells_any_single_token_from_any_other(ids: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(ids) - 1))
    other = data.draw(st.integers(0, 2**32 - 1).filter(lambda token: token != ids[at]))
    assert ids_crc([*ids[:at], other, *ids[at + 1 :]]) != ids_crc(ids)


def test_a_checksum_is_the_same_for_ever() -> None:
    """It is written into tapes."""
    assert ids_crc([]) == 0
    assert ids_crc([1, 2, 3]) == 734760327
