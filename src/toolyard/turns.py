"""Samples one assistant turn from an engine: retries what failed, joins what an engine aborted, checks every answer.

Shared by rollouts and the gateway, so that both record the same tokens for the same answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from toolyard.chat.protocol import ChatFormat
from toolyard.engines.protocol import Engine, Finish, Generation, ImageEngine, Sampling
from toolyard.errors import EngineError
from toolyard.images import Image
from toolyard.messages import Message
from toolyard.records.audit import are_logprobs
from toolyard.records.trajectory import Sampled

T = TypeVar("T")
Told = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """An engine's answer for one turn, from one or more attempts."""

    generation: Generation
    attempts: int = 1
    weight_versions: tuple[str, ...] = ()
    message: Message | None = None
    """The message, from a server with a message API."""
    prompt_ids: list[int] | None = None
    """The prompt ids that such a server reports, if any."""
    tokens: int = 0
    """Number of sampled tokens, even if their ids are unknown."""
    queue_seconds: float = 0.0
    """Failed attempts, the pauses after them, and the wait in the engine's queue."""
    misread: bool = False
    """An injected fault: its calls count as malformed."""
    version_starts: tuple[int, ...] = ()
    """See `Sampled.version_starts`."""

    def sampled(self, start: int, end: int, text: str, prompt_crc: int, stopped_by: int | str | None = "") -> Sampled:
        """Its record, as `response_ids[start:end]`."""
        return Sampled(
            start=start,
            end=end,
            text=text,
            finish=self.generation.finish.value,
            prompt_crc=prompt_crc,
            weight_versions=self.weight_versions,
            version_starts=self.version_starts,
            cached_tokens=self.generation.cached_tokens,
            attempts=self.attempts,
            stopped_by=stopped_by,
            queue_seconds=self.queue_seconds,
        )


@dataclass(frozen=True, slots=True)
class Retries:
    """How often a failed call of an engine is repeated."""

    count: int = 3
    pause_seconds: float = 0.5
    """Pause before the first retry; it doubles with each further one."""

    async def run(
        self, ask: Callable[[], Awaitable[T]], name: str, told: Told, before: int = 0
    ) -> tuple[T, int, float]:
        """Call `ask` until it succeeds; return its result, the number of attempts including `before`, and the seconds
        before the last. Nothing is kept of a failed attempt, so retrying is safe.

        `told` is called with what is being waited for, in which `name` stands for the engine.
        """
        first = began = time.monotonic()
        pause, task = self.pause_seconds, asyncio.current_task()
        cancellations = 0 if task is None else task.cancelling()
        attempts = before
        while True:
            attempts += 1
            try:
                return await ask(), attempts, began - first
            except EngineError as error:
                if task is not None and task.cancelling() > cancellations:
                    raise asyncio.CancelledError from error  # it was cancelled, whatever the engine raised for that
                if not error.retryable or attempts > self.count:
                    raise
                told(f"{name}, attempt {attempts + 1} (last error: {error})")
            await asyncio.sleep(pause)
            pause *= 2
            began = time.monotonic()


class TurnSampler:
    """Tokens in, tokens out: what is trained on is what was sampled."""

    def __init__(
        self,
        engine: Engine | None,
        chat: ChatFormat,
        retries: Retries,
        *,
        before_attempt: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        """`before_attempt`: awaited with the request's id before every call of the engine; it may raise EngineError."""
        self.engine = engine
        self._chat = chat
        self._retries = retries
        self._before_attempt = before_attempt
        self._name = "" if engine is None else repr(engine)
        self._ends = frozenset(chat.stop_token_ids) | chat.special_ids

    def with_stops(self, sampling: Sampling) -> Sampling:
        """`sampling`, which also stops where a turn of this format ends."""
        stops, texts = dict.fromkeys((*sampling.stop_token_ids, *self._chat.stop_token_ids)), self._chat.stop
        return sampling.model_copy(
            update={"stop_token_ids": tuple(stops), "stop": tuple(dict.fromkeys((*sampling.stop, *texts)))}
        )

    async def sample(
        self,
        prompt_ids: list[int],
        sampling: Sampling,
        *,
        request_id: str,
        images: Sequence[Image] = (),
        told: Told = lambda _: None,
    ) -> EngineAnswer:
        """Sample one turn after `prompt_ids`. `sampling` is complete: see `with_stops`.

        Raises:
            EngineError: no retries are left.
        """
        budget = sampling.max_tokens
        ids: list[int] = []
        logprobs: list[float] | None = []
        versions: list[str] = []
        starts: list[int] = []
        attempts = fruitless = 0
        queued = 0.0
        cached: int | None = None
        while True:
            prompt = [*prompt_ids, *ids] if ids else prompt_ids
            asked = sampling if not ids else _continued(sampling, len(ids))
            ask = partial(self._generate, prompt, images, asked, request_id)
            got, tries, failing = await self._retries.run(ask, self._name, told, fruitless)
            attempts += tries - fruitless
            queued = round(queued + failing + got.queue_seconds, 6)
            fruitless = 0 if got.token_ids else tries
            joint = len(ids)
            ids += got.token_ids
            logprobs = None if logprobs is None or got.logprobs is None else [*logprobs, *got.logprobs]
            cached = got.cached_tokens if cached is None else cached
            version = got.weight_version
            if version is not None and got.token_ids and version not in versions[-1:]:
                versions.append(version)
                starts.append(joint)
            end = self._stop_across(ids, joint, sampling) if joint else None
            if end is not None:
                logprobs = None if logprobs is None else logprobs[:end]
                whole = Generation(ids[:end], logprobs, Finish.STOP, got.weight_version, cached)
                return _answer(whole, attempts, versions, starts, queued)
            if got.finish is not Finish.ABORT or len(ids) >= budget or fruitless > self._retries.count:
                break
            # Aborted by the engine, for new weights for example. The request continues exactly where it was.
            await asyncio.sleep(self._retries.pause_seconds if fruitless else 0)
        finish = Finish.LENGTH if got.finish is Finish.ABORT and len(ids) >= budget else got.finish
        whole = Generation(ids, logprobs, finish, got.weight_version, cached, got.stop_text)
        return _answer(whole, attempts, versions, starts, queued)

    def stopped_by(self, got: Generation, sampling: Sampling) -> int | str | None:
        """See `Sampled.stopped_by`."""
        if got.finish is not Finish.STOP:
            return ""
        last = got.token_ids[-1] if got.token_ids else None
        if last in self._ends or last in sampling.stop_token_ids:
            return last
        if not sampling.stop:
            return None
        # The token that completes a stop text may extend beyond it.
        end = self._chat.decode(got.token_ids)
        return next((text for text in sampling.stop if text in end), None)

    def _stop_across(self, ids: list[int], joint: int, sampling: Sampling) -> int | None:
        """The end of a stop text that began before `joint`, or None: the engine's new call at `joint` missed it."""
        if not sampling.stop or any(stop in self._chat.decode(ids[:joint]) for stop in sampling.stop):
            return None
        for end in range(joint + 1, len(ids) + 1):
            text, after = self._chat.decode(ids[:end]), self._chat.decode(ids[joint:end])
            if any(stop in text and stop not in after for stop in sampling.stop):
                return end
            if len(after) > max(map(len, sampling.stop)):
                break
        return None

    async def _generate(
        self, prompt: list[int], images: Sequence[Image], sampling: Sampling, request_id: str
    ) -> Generation:
        """Call the engine and check its answer."""
        engine = self.engine
        assert engine is not None, "a replay has no engine"
        if self._before_attempt is not None:
            await self._before_attempt(request_id)
        if images and isinstance(engine, ImageEngine):
            got = await engine.generate_with_images(prompt, images, sampling, request_id=request_id)
        else:
            got = await engine.generate(prompt, sampling, request_id=request_id)
        problem = self._problem(got, sampling)
        if problem:
            error = EngineError(f"{self._name} returned an invalid answer: {problem}")
            error.source = self._name
            raise error
        return got

    def _problem(self, got: Generation, sampling: Sampling) -> str:
        """What is wrong with an answer; empty if nothing. Engines are not trusted: the model is trained on these
        tokens."""
        ids, logprobs = got.token_ids, got.logprobs
        if len(ids) > sampling.max_tokens:
            return f"{len(ids)} tokens, but at most {sampling.max_tokens} were requested"
        size = self._chat.vocab_size
        if ids and not (set(map(type, ids)) == {int} and min(ids) >= 0 and (size is None or max(ids) < size)):
            bad = next(one for one in ids if type(one) is not int or one < 0 or (size is not None and one >= size))
            return f"token id {bad!r}, but the vocabulary has the ids 0 to {'?' if size is None else size - 1}"
        if logprobs is not None:
            if len(logprobs) != len(ids):
                return f"{len(ids)} tokens but {len(logprobs)} logprobs"
            if not are_logprobs(logprobs):
                return f"invalid logprobs: {str(logprobs)[:120]}"
        if got.finish is Finish.STOP and self.stopped_by(got, sampling) is None:
            return "it stopped, but not at a stop token or a stop text"
        return ""


def _continued(sampling: Sampling, sampled: int) -> Sampling:
    """For the rest of an answer of which `sampled` tokens are there. Another seed: with the same random numbers again,
    the rest would depend on the beginning in a way that the model knows nothing of."""
    seed = None if sampling.seed is None else (sampling.seed + 1_000_003 * sampled) & 0x7FFFFFFF
    return sampling.model_copy(update={"max_tokens": sampling.max_tokens - sampled, "seed": seed})


def _answer(whole: Generation, attempts: int, versions: list[str], starts: list[int], queued: float) -> EngineAnswer:
    if not versions and whole.weight_version is not None:  # nothing was sampled
        versions, starts = [whole.weight_version], [0]
    return EngineAnswer(
        whole,
        attempts,
        tuple(versions),
        tokens=len(whole.token_ids),
        queue_seconds=queued,
        version_starts=tuple(starts) if len(starts) > 1 else (),
    )
