"""How a request talks to its engine: in tokens, or in messages if the server's API has no tokens.

Only `ask` is non-deterministic; everything else depends on the request alone.
"""

from __future__ import annotations

import asyncio
import json
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from toolyard.chat.protocol import ChatFormat, MalformedCall, ParsedCall, ParsedTurn
from toolyard.engines.protocol import (
    ChatEngine,
    ChatGeneration,
    Engine,
    Finish,
    Generation,
    HasServers,
    ImageEngine,
    ReportsActivity,
    ReportsProgress,
    ReportsServers,
    Sampling,
)
from toolyard.errors import EngineError, EngineRequestError
from toolyard.images import Image
from toolyard.messages import JSON, Message, OpenAIFunctionToolSchema
from toolyard.records.audit import are_logprobs, check_extension
from toolyard.records.trajectory import Sampled
from toolyard.rollout.budget import RolloutLimits
from toolyard.rollout.request import AsyncRolloutRequest, turn_seed

T = TypeVar("T")
_PROMPTS_KEPT = 64


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


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """One assistant turn, added to the conversation."""

    parsed: ParsedTurn
    sampled: Sampled
    tokens: int


class Speaker(ABC):
    """A request's view of an engine and its API."""

    def __init__(self, sampling: Sampling, limits: RolloutLimits, engine: object, hides_images: str) -> None:
        self.hides_images = hides_images
        """Why the model does not see the images that tools return; empty if it does."""
        self._sampling = sampling
        self._limits = limits
        self._talking = engine if isinstance(engine, ReportsActivity) else None
        self.progress = engine if isinstance(engine, ReportsProgress) else None
        self.reports_servers = engine if isinstance(engine, ReportsServers) else None
        self.engine_name = "" if engine is None else repr(engine)
        self.servers = engine if isinstance(engine, HasServers) else None

    @abstractmethod
    def begin(self, request: AsyncRolloutRequest) -> int:
        """Render the prompt and return its number of tokens, 0 if unknown. Raises ChatError."""

    @abstractmethod
    def prompt(self, request: AsyncRolloutRequest) -> JSON:
        """Values that identify the engine's next prompt."""

    @abstractmethod
    async def ask(self, request: AsyncRolloutRequest, max_tokens: int) -> EngineAnswer:
        """Have the engine sample the next turn. Raises EngineError when no retries are left."""

    @abstractmethod
    def take(self, request: AsyncRolloutRequest, answer: EngineAnswer) -> SampledTurn:
        """Add the answer's tokens to the request and parse them."""

    @abstractmethod
    def propose(self, request: AsyncRolloutRequest, sampled: Sampled, messages: Sequence[Message]) -> list[int]:
        """The tokens that `messages` would add after the last turn. Raises ChatError."""

    @abstractmethod
    def decode(self, request: AsyncRolloutRequest) -> tuple[str, str]:
        """Prompt and response as text."""

    @abstractmethod
    def count(self, text: str) -> int:
        """Number of tokens in a text; characters if there is no tokenizer."""

    engine_name: str = ""
    """For messages: the engine's servers or kind."""

    def waits_for(self, request: AsyncRolloutRequest) -> str:
        """What the engine is doing for the request right now."""
        engine = self._talking
        return "" if engine is None else engine.activity(request.request_id)

    def _sampling_of(self, request: AsyncRolloutRequest, max_tokens: int) -> Sampling:
        return self._sampling.model_copy(
            update={"max_tokens": min(max_tokens, self._sampling.max_tokens), "seed": turn_seed(request)}
        )

    async def _retried(
        self, request: AsyncRolloutRequest, attempts: int, ask: Callable[[], Awaitable[T]]
    ) -> tuple[T, int, float]:
        """Call `ask` until it succeeds; return its result, the number of attempts, and the seconds before the last.
        Nothing is kept of a failed attempt, so retrying is safe."""
        first = began = time.monotonic()
        pause, task = self._limits.engine_retry_pause_seconds, asyncio.current_task()
        cancellations = 0 if task is None else task.cancelling()
        while True:
            attempts += 1
            try:
                return await ask(), attempts, began - first
            except EngineError as error:
                if task is not None and task.cancelling() > cancellations:
                    raise asyncio.CancelledError from error  # it was cancelled, whatever the engine raised for that
                if not error.retryable or attempts > self._limits.engine_retries:
                    raise
                request.waits_for = f"{self.engine_name}, attempt {attempts + 1} (the last: {error})"
            await asyncio.sleep(pause)
            pause *= 2
            began = time.monotonic()


class TokenSpeaker(Speaker):
    """Tokens in, tokens out: what is trained on is what was sampled."""

    def __init__(
        self,
        engine: Engine | None,
        chat: ChatFormat,
        sampling: Sampling,
        limits: RolloutLimits,
        *,
        tell_near_misses: bool = False,
        hides_images: str = "",
        before_attempt: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        """
        Args:
            tell_near_misses: Answer text that looks like a call as if it were a malformed call.
            before_attempt: Awaited with the request's id before every call of the engine: it may raise EngineError.
            hides_images: Why images are hidden although format and engine support them; empty to show them.
        """
        hides_images = hides_images or _why_hidden(engine, chat)
        stops = (*sampling.stop_token_ids, *(ids for ids in chat.stop_token_ids if ids not in sampling.stop_token_ids))
        texts = (*sampling.stop, *(text for text in chat.stop if text not in sampling.stop))
        told = sampling.model_copy(update={"stop_token_ids": stops, "stop": texts})
        super().__init__(told, limits, engine, hides_images)
        self._engine = engine
        self._chat = chat
        self._ends = frozenset(stops) | chat.special_ids
        self._tell_near_misses = tell_near_misses
        self._before_attempt = before_attempt
        self._rendered: dict[tuple[Message, ...], tuple[Sequence[OpenAIFunctionToolSchema], list[int], str]] = {}
        """Recent prompts: the samples of a task share one and start one after another."""

    @property
    def engine(self) -> Engine | None:
        return self._engine

    def begin(self, request: AsyncRolloutRequest) -> int:
        key = tuple(request.messages)
        found = self._rendered.get(key)
        if found is None or found[0] is not request.tool_schemas:
            ids = self._chat.render(request.messages, request.tool_schemas)
            if len(self._rendered) >= _PROMPTS_KEPT:
                del self._rendered[next(iter(self._rendered))]
            self._rendered[key] = found = request.tool_schemas, ids, self._chat.decode(ids)
        _, ids, request.prompt_text = found
        request.begin(ids)
        return request.prompt_tokens

    def prompt(self, request: AsyncRolloutRequest) -> JSON:
        return {"prompt_tokens": len(request.input_ids), "prompt_crc": request.crc}

    async def ask(self, request: AsyncRolloutRequest, max_tokens: int) -> EngineAnswer:
        sampling = self._sampling_of(request, max_tokens)
        budget = sampling.max_tokens
        images = self._images_of(request)
        ids: list[int] = []
        logprobs: list[float] | None = []
        versions: list[str] = []
        attempts = fruitless = 0
        queued = 0.0
        cached: int | None = None
        while True:
            prompt = [*request.input_ids, *ids] if ids else request.input_ids
            asked = sampling if not ids else sampling.model_copy(update={"max_tokens": budget - len(ids)})
            got, tries, failing = await self._retried(
                request, fruitless, partial(self._generate, prompt, images, asked, request.request_id)
            )
            attempts += tries - fruitless
            queued = round(queued + failing + got.queue_seconds, 6)
            fruitless = 0 if got.token_ids else tries
            joint = len(ids)
            ids += got.token_ids
            logprobs = None if logprobs is None or got.logprobs is None else [*logprobs, *got.logprobs]
            cached = got.cached_tokens if cached is None else cached
            if got.weight_version is not None and got.weight_version not in versions:
                versions.append(got.weight_version)
            end = self._stop_across(ids, joint, sampling) if joint else None
            if end is not None:
                logprobs = None if logprobs is None else logprobs[:end]
                whole = Generation(ids[:end], logprobs, Finish.STOP, got.weight_version, cached)
                return EngineAnswer(whole, attempts, tuple(versions), tokens=end, queue_seconds=queued)
            if got.finish is not Finish.ABORT or len(ids) >= budget or fruitless > self._limits.engine_retries:
                break
            # Aborted by the engine, for new weights for example. The request continues exactly where it was.
            await asyncio.sleep(self._limits.engine_retry_pause_seconds if fruitless else 0)
        finish = Finish.LENGTH if got.finish is Finish.ABORT and len(ids) >= budget else got.finish
        whole = Generation(ids, logprobs, finish, got.weight_version, cached, got.stop_text)
        return EngineAnswer(whole, attempts, tuple(versions), tokens=len(ids), queue_seconds=queued)

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

    def _images_of(self, request: AsyncRolloutRequest) -> list[Image]:
        """Raises EngineRequestError if the model has sampled an image token: it would refer to no image."""
        images = [image for message in request.messages for image in message.images]
        token = self._chat.image_token_id
        places = request.input_ids.count(token) if images and token is not None else 0
        if places != len(images):
            raise EngineRequestError(
                f"the conversation has {len(images)} images but {places} image tokens: the model sampled some itself"
            )
        return images

    async def _generate(
        self, prompt: list[int], images: Sequence[Image], sampling: Sampling, request_id: str
    ) -> Generation:
        """Call the engine and check its answer."""
        engine = self._engine
        assert engine is not None, "a replay has no engine"
        if self._before_attempt is not None:
            await self._before_attempt(request_id)
        if images and isinstance(engine, ImageEngine):
            got = await engine.generate_with_images(prompt, images, sampling, request_id=request_id)
        else:
            got = await engine.generate(prompt, sampling, request_id=request_id)
        problem = self._problem(got, sampling)
        if problem:
            error = EngineError(f"{self.engine_name} returned an invalid answer: {problem}")
            error.source = self.engine_name
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
        if got.finish is Finish.STOP and self._stopped_by(got, sampling) is None:
            return "it stopped, but not at a stop token or a stop text"
        return ""

    def _stopped_by(self, got: Generation, sampling: Sampling) -> int | str | None:
        if got.finish is not Finish.STOP:
            return ""
        if got.token_ids and got.token_ids[-1] in self._ends:
            return got.token_ids[-1]
        if not sampling.stop:
            return None
        # The token that completes a stop text may extend beyond it.
        end = self._chat.decode(got.token_ids)
        return next((text for text in sampling.stop if text in end), None)

    def take(self, request: AsyncRolloutRequest, answer: EngineAnswer) -> SampledTurn:
        generation = answer.generation
        start, crc = request.response_tokens, request.crc
        request.append_sampled(generation)
        request.sampled_tokens += len(generation.token_ids)
        text = self._chat.decode(generation.token_ids)
        parsed = self._chat.parse(generation.token_ids, request.tool_schemas)
        if parsed.near_misses:
            request.metrics["near_misses"] = request.metrics.get("near_misses", 0) + len(parsed.near_misses)
            if self._tell_near_misses:
                parsed = replace(parsed, malformed=parsed.near_misses)
        if answer.misread:
            damaged = [MalformedCall(call.arguments, "it is damaged; send it again") for call in parsed.calls]
            parsed = replace(parsed, calls=(), malformed=(*damaged, *parsed.malformed))
        return SampledTurn(
            parsed,
            _sampled(answer, start, request.response_tokens, text, crc, self._stopped_by(generation, self._sampling)),
            len(generation.token_ids),
        )

    def has_calls(self, request: AsyncRolloutRequest, answer: EngineAnswer) -> bool:
        return bool(self._chat.parse(answer.generation.token_ids, request.tool_schemas).calls)

    def propose(self, request: AsyncRolloutRequest, sampled: Sampled, messages: Sequence[Message]) -> list[int]:
        start = request.prompt_tokens + sampled.start
        prompt = request.input_ids[:start] if self._chat.reads_prompt else []
        turn = request.input_ids[start:]
        return self._chat.extension(prompt, turn, messages, request.tool_schemas)

    def decode(self, request: AsyncRolloutRequest) -> tuple[str, str]:
        return request.prompt_text, self._chat.decode(request.response_ids)

    def count(self, text: str) -> int:
        return self._chat.count(text)


class MessageSpeaker(Speaker):
    """Messages in, a message out. Token-exact only if the server returns ids that extend each other."""

    def __init__(
        self,
        engine: ChatEngine | None,
        sampling: Sampling,
        limits: RolloutLimits,
        *,
        hides_images: str = "the server's model may not accept images",
    ) -> None:
        super().__init__(sampling, limits, engine, hides_images)
        self._engine = engine

    def begin(self, request: AsyncRolloutRequest) -> int:
        request.begin([])
        request.token_exact = False  # until an answer comes with ids
        return 0

    def prompt(self, request: AsyncRolloutRequest) -> JSON:
        said = json.dumps([message.as_openai() for message in request.messages]).encode()
        return {"messages": len(request.messages), "crc": zlib.crc32(said)}

    async def ask(self, request: AsyncRolloutRequest, max_tokens: int) -> EngineAnswer:
        sampling = self._sampling_of(request, max_tokens)
        got, attempts, failing = await self._retried(request, 0, partial(self._chat, request, sampling))
        versions = () if got.weight_version is None else (got.weight_version,)
        ids = got.token_ids or []
        generation = Generation(ids, got.logprobs, got.finish, got.weight_version)
        tokens = got.completion_tokens if got.completion_tokens is not None else len(ids)
        queued = round(failing + got.queue_seconds, 6)
        return EngineAnswer(generation, attempts, versions, got.message, _prompt_of(got), tokens, queued)

    async def _chat(self, request: AsyncRolloutRequest, sampling: Sampling) -> ChatGeneration:
        assert self._engine is not None, "a replay has no engine"
        got = await self._engine.chat(request.messages, request.tool_schemas, sampling, request_id=request.request_id)
        if got.finish is Finish.ABORT:  # half a message cannot be continued
            raise EngineError("the server aborted the answer")
        return got

    def take(self, request: AsyncRolloutRequest, answer: EngineAnswer) -> SampledTurn:
        assert answer.message is not None
        request.sampled_tokens += answer.tokens
        start, crc = self._take_tokens(request, answer)
        message = answer.message
        calls = tuple(ParsedCall(call.name, call.arguments, call.id) for call in message.tool_calls)
        return SampledTurn(
            ParsedTurn(message.content, message.reasoning_content, calls),
            _sampled(answer, start, request.response_tokens, message.content, crc),
            answer.tokens,
        )

    def _take_tokens(self, request: AsyncRolloutRequest, answer: EngineAnswer) -> tuple[int, int]:
        """The start of the sampled tokens, and the CRC of everything before them."""
        prompt = answer.prompt_ids
        first = not request.turns
        if prompt is None or not (first or request.token_exact):
            return self._is_not_exact(request)
        if first:
            request.begin(prompt)
            request.token_exact = True
        else:
            difference = check_extension(request.input_ids, prompt)
            if difference is not None:
                request.metrics["token_drift"] = str(difference)
                return self._is_not_exact(request)
            request.append_given(prompt[len(request.input_ids) :])
        start, crc = request.response_tokens, request.crc
        request.append_sampled(answer.generation)
        return start, crc

    def _is_not_exact(self, request: AsyncRolloutRequest) -> tuple[int, int]:
        """Drop all tokens: a part of them would look like all of them."""
        request.token_exact = False
        request.begin([])
        request.response_mask, request.response_logprobs = [], None
        return 0, 0

    def propose(self, request: AsyncRolloutRequest, sampled: Sampled, messages: Sequence[Message]) -> list[int]:
        return []

    def decode(self, request: AsyncRolloutRequest) -> tuple[str, str]:
        given = len(request.task.messages)
        return _as_text(request.messages[:given]), _as_text(request.messages[given:])

    def count(self, text: str) -> int:
        return len(text)


def _prompt_of(got: ChatGeneration) -> list[int] | None:
    return None if got.prompt_ids is None or got.token_ids is None else got.prompt_ids


def _sampled(
    answer: EngineAnswer, start: int, end: int, text: str, crc: int, stopped_by: int | str | None = ""
) -> Sampled:
    return Sampled(
        start=start,
        end=end,
        text=text,
        finish=answer.generation.finish.value,
        prompt_crc=crc,
        weight_versions=answer.weight_versions,
        cached_tokens=answer.generation.cached_tokens,
        attempts=answer.attempts,
        stopped_by=stopped_by,
        queue_seconds=answer.queue_seconds,
    )


def _as_text(messages: Sequence[Message]) -> str:
    return "".join(f"{message.role}\n{_said(message)}\n" for message in messages)


def _said(message: Message) -> str:
    return "\n".join((message.content, *(f"[image: {image}]" for image in message.images)))


def _why_hidden(engine: Engine | None, chat: ChatFormat) -> str:
    if chat.image_token_id is None:
        return f"the format {chat.name} has no place for images"
    if engine is not None and not isinstance(engine, ImageEngine):
        return f"{engine!r} does not accept images"
    return ""
