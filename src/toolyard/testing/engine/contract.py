"""What any `Engine` promises, tested from outside: by the tokens it returns and when it returns them.

Greedy sampling is the reference: its tokens are sampled once, and stops, limits and aborts must cut them at the right
place.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import pytest

from toolyard.engines.protocol import Engine, Finish, Generation, Sampling
from toolyard.errors import EngineError, EngineRequestError

_PATIENCE = 20.0
"""Seconds to wait for something that should happen."""


class EngineContract(ABC):
    """Subclass it and provide the class-scoped fixture `engine`: an open engine. Then describe yours:

    class TestMine(EngineContract):
        prompt = [1, 2, 3]
        vocabulary = 32_000

        @pytest_asyncio.fixture(scope="class", loop_scope="class")
        @classmethod
        async def engine(cls):
            async with cls.make() as engine:
                yield engine

        @classmethod
        def make(cls):
            return MyEngine()

        def decode(self, ids):
            return tokenizer.decode(ids)
    """

    pytestmark = pytest.mark.asyncio(loop_scope="class")

    prompt: Sequence[int] = tuple(b"Once upon a time")
    """With greedy sampling, the answer must have at least `endless` tokens, and its first `some` must be text."""
    vocabulary: int = 256
    """Size of the vocabulary: ids from here on are invalid."""
    some: int = 24
    """Number of tokens that most tests sample."""
    endless: int = 2000
    """More tokens than the engine samples in a second; together with the prompt they must fit into the context."""
    settle_seconds: float = 0.1
    """After this time a request is running, or an abort has arrived."""
    crowd: int = 50
    """Number of concurrent requests."""
    context: int | None = None
    """Maximum tokens of prompt and answer together; None: unknown and not tested."""
    has_logprobs: bool = True
    is_seeded: bool = True
    """The same seed yields the same tokens."""
    is_batch_invariant: bool = True
    """Greedy tokens do not depend on what else is being sampled."""
    continues_tokens: bool = True
    """What follows a prompt depends only on its tokens, so an answer can be continued. False for chat APIs, where the
    server wraps messages in its template."""
    out_of_range_is_refused: bool = True
    """Invalid ids are rejected. Some servers leave the check to the client."""

    @classmethod
    @abstractmethod
    def make(cls) -> Engine:
        """Another engine, not yet open. It may share expensive parts with others."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Decode tokens as the engine does when it looks for stop texts."""

    # ----------------------------------------------------------------------------------------------------- sampling
    async def test_it_is_an_engine(self, engine: Engine) -> None:
        assert isinstance(engine, Engine)

    async def test_max_tokens_are_sampled_and_no_more(self, engine: Engine) -> None:
        for most in (1, 2, self.some):
            found = await self.greedy(engine, max_tokens=most)
            assert (len(found.token_ids), found.finish) == (most, Finish.LENGTH)
            assert found.stop_text is None

    async def test_tokens_are_plain_integers_of_the_vocabulary(self, engine: Engine) -> None:
        found = await self.sample(engine, temperature=1.0)
        assert all(type(token) is int and 0 <= token < self.vocabulary for token in found.token_ids)

    async def test_each_token_has_its_log_probability(self, engine: Engine) -> None:
        for temperature in (0.0, 1.0):
            self.check(await self.sample(engine, temperature=temperature, seed=3))

    async def test_temperature_zero_is_deterministic_whatever_the_seed(self, engine: Engine) -> None:
        first = await self.greedy(engine)
        for seed in (None, 1, 2):
            again = await self.greedy(engine, seed=seed)
            assert again.token_ids == first.token_ids

    async def test_the_same_seed_samples_the_same_tokens(self, engine: Engine) -> None:
        if not self.is_seeded:
            pytest.skip("the engine does not promise it")
        first, again = [await self.sample(engine, seed=11) for _ in range(2)]
        assert first.token_ids == again.token_ids
        others = [await self.sample(engine, seed=seed) for seed in range(12, 16)]
        assert any(other.token_ids != first.token_ids for other in others)

    async def test_a_seed_may_be_any_integer(self, engine: Engine) -> None:
        for seed in (0, -1, 2**63 - 1, 2**64 + 1):
            self.check(await self.sample(engine, seed=seed, max_tokens=2))

    async def test_top_k_of_one_is_greedy(self, engine: Engine) -> None:
        greedy = await self.greedy(engine)
        assert (await self.sample(engine, top_k=1)).token_ids == greedy.token_ids

    async def test_the_prompt_may_be_any_sequence_and_is_not_modified(self, engine: Engine) -> None:
        prompt = list(self.prompt)
        as_list = await self.greedy(engine, prompt)
        as_tuple = await self.greedy(engine, tuple(prompt))
        assert as_list.token_ids == as_tuple.token_ids
        assert prompt == list(self.prompt)

    async def test_an_answer_can_be_continued_where_it_ended(self, engine: Engine) -> None:
        """A conversation is only its tokens: one request or two give the same answer."""
        if not self.continues_tokens:
            pytest.skip("the engine does not promise it")
        whole = (await self.greedy(engine, request_id="whole")).token_ids
        half = len(whole) // 2
        for name in ("same", "another"):
            await self.greedy(engine, max_tokens=half, request_id="same")
            rest = await self.greedy(
                engine, [*self.prompt, *whole[:half]], max_tokens=len(whole) - half, request_id=name
            )
            assert rest.token_ids == whole[half:]

    async def test_the_cached_tokens_fit_the_prompt(self, engine: Engine) -> None:
        found = await self.greedy(engine)
        assert found.cached_tokens is None or 0 <= found.cached_tokens <= len(self.prompt)

    # ------------------------------------------------------------------------------------------------------ stopping
    async def test_a_stop_token_ends_it_and_is_kept(self, engine: Engine) -> None:
        greedy = (await self.greedy(engine)).token_ids
        stop = next(token for token in greedy[2:] if token not in greedy[:2])
        found = await self.greedy(engine, stop_token_ids=(self.vocabulary - 1, stop))
        assert found.token_ids == greedy[: greedy.index(stop) + 1]
        assert found.finish is Finish.STOP
        self.check(found)

    async def test_a_stop_token_at_the_token_limit_is_a_stop(self, engine: Engine) -> None:
        greedy = (await self.greedy(engine)).token_ids
        stop = next(token for token in greedy[2:] if token not in greedy[:2])
        found = await self.greedy(engine, stop_token_ids=(stop,), max_tokens=greedy.index(stop) + 1)
        assert (found.token_ids[-1], found.finish) == (stop, Finish.STOP)

    async def test_a_stop_text_ends_it_with_the_token_that_completes_it(self, engine: Engine) -> None:
        greedy = (await self.greedy(engine)).token_ids
        text = self.decode(greedy)
        middle = len(text) // 2
        stop = text[middle : middle + 3]
        completed = next(n for n in range(1, len(greedy) + 1) if stop in self.decode(greedy[:n]))
        found = await self.greedy(engine, stop=("\N{SNOWMAN} never said", stop))
        assert found.token_ids == greedy[:completed]
        assert (found.finish, found.stop_text) == (Finish.STOP, stop)
        self.check(found)

    async def test_a_stop_text_of_the_prompt_does_not_count(self, engine: Engine) -> None:
        greedy = (await self.greedy(engine)).token_ids
        prompt = self.decode(self.prompt)
        found = await self.greedy(engine, stop=(prompt[-6:],))
        assert found.token_ids == greedy or prompt[-6:] in self.decode(found.token_ids)

    # --------------------------------------------------------------------------------------------- at the same time
    async def test_different_requests_run_at_the_same_time(self, engine: Engine) -> None:
        prompts = [[*self.prompt, *self.prompt[: 1 + n % 4]] for n in range(self.crowd)]
        alone = [(await self.greedy(engine, prompt)).token_ids for prompt in prompts[:4]]
        async with asyncio.timeout(3 * _PATIENCE), asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(self.greedy(engine, prompt, request_id=f"crowd-{n:04}"))
                for n, prompt in enumerate(prompts)
            ]
        for n, done in enumerate(running):
            self.check(done.result())
            assert len(done.result().token_ids) == self.some
            if self.is_batch_invariant:
                assert done.result().token_ids == alone[n % 4]

    # ------------------------------------------------------------------------------------------------------ aborting
    async def test_an_abort_returns_what_was_sampled_and_leaves_other_requests_alone(self, engine: Engine) -> None:
        greedy = (await self.greedy(engine)).token_ids
        # One name is a prefix of the other: some servers abort by prefix.
        async with asyncio.timeout(_PATIENCE), asyncio.TaskGroup() as tasks:
            doomed = tasks.create_task(self.greedy(engine, max_tokens=self.endless, request_id="a-1"))
            other = tasks.create_task(self.greedy(engine, max_tokens=self.endless, request_id="a-11"))
            await asyncio.sleep(self.settle_seconds)
            await engine.abort("a-1")
            found = await doomed
            assert not other.done()
            await engine.abort("a-11")
        assert found.finish is Finish.ABORT
        assert len(found.token_ids) < self.endless
        assert found.token_ids[: self.some] == greedy[: len(found.token_ids)]
        self.check(found)

    async def test_an_aborted_request_can_be_continued(self, engine: Engine) -> None:
        async with asyncio.timeout(_PATIENCE), asyncio.TaskGroup() as tasks:
            first = tasks.create_task(self.greedy(engine, max_tokens=self.endless, request_id="goes-on"))
            await asyncio.sleep(self.settle_seconds)
            await engine.abort("goes-on")
        done = first.result().token_ids
        rest = await self.greedy(engine, [*self.prompt, *done], max_tokens=self.some, request_id="goes-on")
        assert (len(rest.token_ids), rest.finish) == (self.some, Finish.LENGTH)

    async def test_aborting_a_request_that_is_not_running_does_nothing(self, engine: Engine) -> None:
        async with asyncio.timeout(_PATIENCE):
            await engine.abort("never heard of")
            await self.greedy(engine, request_id="finished")
            await engine.abort("finished")
            assert (await self.greedy(engine, request_id="finished")).finish is Finish.LENGTH

    async def test_a_request_aborted_immediately_ends(self, engine: Engine) -> None:
        """Before, while or after it reaches the sampler: in any case it ends."""
        for ticks in range(4):
            async with asyncio.timeout(_PATIENCE), asyncio.TaskGroup() as tasks:
                doomed = tasks.create_task(self.greedy(engine, max_tokens=self.endless, request_id=f"at-once-{ticks}"))
                for _ in range(ticks + 1):
                    await asyncio.sleep(0)
                await engine.abort(f"at-once-{ticks}")
                await asyncio.sleep(self.settle_seconds)
                await engine.abort(f"at-once-{ticks}")
            assert doomed.result().finish is Finish.ABORT
            self.check(doomed.result())

    async def test_a_cancelled_request_frees_its_name(self, engine: Engine) -> None:
        greedy = (await self.greedy(engine)).token_ids
        async with asyncio.timeout(_PATIENCE), asyncio.TaskGroup() as tasks:
            for pause in (0.0, self.settle_seconds):
                cancelled = tasks.create_task(self.greedy(engine, max_tokens=self.endless, request_id="name"))
                await asyncio.sleep(pause)
                cancelled.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await cancelled
                assert cancelled.cancelled()
                again = await self.greedy(engine, request_id="name")
                assert (again.token_ids, again.finish) == (greedy, Finish.LENGTH)

    # ------------------------------------------------------------------------------------------------------ lifetime
    async def test_nothing_runs_after_the_engine_is_closed(self) -> None:
        before = asyncio.all_tasks()
        engine = self.make()
        async with asyncio.timeout(_PATIENCE):
            async with engine:
                running = asyncio.ensure_future(self.outcome(engine, max_tokens=self.endless))
                await asyncio.sleep(self.settle_seconds)
                assert not running.done()
            found = await running
        assert isinstance(found, EngineError) or found.finish is Finish.ABORT
        await asyncio.sleep(self.settle_seconds)
        assert asyncio.all_tasks() <= before

    async def test_an_engine_that_is_not_open_says_so(self) -> None:
        engine = self.make()
        for opened in (False, True):
            if opened:
                async with engine:
                    assert (await self.greedy(engine)).finish is Finish.LENGTH
            with pytest.raises(EngineError) as refused:
                await self.greedy(engine)
            assert not refused.value.retryable
            await engine.abort("nothing")

    # --------------------------------------------------------------------------------------------------- bad requests
    async def test_an_empty_prompt_is_refused(self, engine: Engine) -> None:
        with pytest.raises(EngineRequestError):
            await self.greedy(engine, [])

    async def test_invalid_token_ids_are_refused(self, engine: Engine) -> None:
        if not self.out_of_range_is_refused:
            pytest.skip("the engine does not promise it")
        for bad in (-1, self.vocabulary, 2**40):
            with pytest.raises(EngineRequestError):
                await self.greedy(engine, [*self.prompt, bad])
        assert (await self.greedy(engine)).finish is Finish.LENGTH

    async def test_a_refused_request_is_not_retryable(self, engine: Engine) -> None:
        with pytest.raises(EngineRequestError) as refused:
            await self.greedy(engine, [])
        assert not refused.value.retryable

    async def test_an_answer_ends_when_the_context_is_full(self, engine: Engine) -> None:
        if self.context is None:
            pytest.skip("the engine's context is not known")
        prompt = self.prompt_of(self.context - 5)
        found = await self.greedy(engine, prompt, max_tokens=50)
        assert found.finish is Finish.LENGTH
        assert 1 <= len(found.token_ids) <= 5
        self.check(found)

    async def test_a_prompt_longer_than_the_context_is_refused(self, engine: Engine) -> None:
        if self.context is None:
            pytest.skip("the engine's context is not known")
        with pytest.raises(EngineRequestError):
            await self.greedy(engine, self.prompt_of(self.context + 1), max_tokens=1)

    # ---------------------------------------------------------------------------------------------------------- tools
    def prompt_of(self, length: int) -> list[int]:
        return (list(self.prompt) * (length // len(self.prompt) + 1))[:length]

    async def sample(
        self, engine: Engine, prompt: Sequence[int] | None = None, *, request_id: str = "contract", **sampling: Any
    ) -> Generation:
        """Sample at temperature 1 by default, with a timeout."""
        wanted = Sampling.model_validate({"max_tokens": self.some, "temperature": 1.0, **sampling})
        async with asyncio.timeout(3 * _PATIENCE):
            return await engine.generate(self.prompt if prompt is None else prompt, wanted, request_id=request_id)

    async def greedy(
        self, engine: Engine, prompt: Sequence[int] | None = None, *, request_id: str = "contract", **sampling: Any
    ) -> Generation:
        return await self.sample(engine, prompt, request_id=request_id, **{"temperature": 0.0, **sampling})

    async def outcome(self, engine: Engine, **sampling: Any) -> Generation | EngineError:
        try:
            return await self.greedy(engine, **sampling)
        except EngineError as error:
            return error

    def check(self, found: Generation) -> None:
        """Check what every answer must satisfy."""
        assert isinstance(found.finish, Finish)
        if self.has_logprobs:
            assert found.logprobs is not None
        if found.logprobs is not None:
            assert len(found.logprobs) == len(found.token_ids)
            assert all(type(value) is float and math.isfinite(value) and value <= 0 for value in found.logprobs)
