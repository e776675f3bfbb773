"""How a request talks to its engine: in tokens, or in messages if the server's API has no tokens.

Only `ask` is non-deterministic; everything else depends on the request alone.
"""

from __future__ import annotations

import json
import zlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from toolyard.chat.protocol import ChatFormat, MalformedCall, ParsedCall, ParsedTurn, Tokenizer
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
from toolyard.records.audit import check_extension
from toolyard.records.trajectory import Sampled
from toolyard.rollout.budget import RolloutLimits
from toolyard.rollout.request import AsyncRolloutRequest, turn_seed
from toolyard.turns import EngineAnswer, Retries, TurnSampler

_PROMPTS_KEPT = 64


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
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """
        Args:
            tell_near_misses: Answer text that looks like a call as if it were a malformed call.
            before_attempt: Awaited with the request's id before every call of the engine: it may raise EngineError.
            hides_images: Why images are hidden although format and engine support them; empty to show them.
        """
        hides_images = hides_images or _why_hidden(engine, chat)
        self._turns = TurnSampler(engine, chat, _retries(limits), before_attempt=before_attempt)
        super().__init__(self._turns.with_stops(sampling), limits, engine, hides_images)
        self._chat = chat
        self.tokenizer = tokenizer
        """That of the format, if it is known: only prompts of plain text need it, which agents may send."""
        self._tell_near_misses = tell_near_misses
        self._rendered: dict[tuple[Message, ...], tuple[Sequence[OpenAIFunctionToolSchema], list[int], str]] = {}
        """Recent prompts: the samples of a task share one and start one after another."""

    @property
    def chat(self) -> ChatFormat:
        return self._chat

    @property
    def engine(self) -> Engine | None:
        return self._turns.engine

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
        return await self._turns.sample(
            request.input_ids,
            self._sampling_of(request, max_tokens),
            request_id=request.request_id,
            images=self._images_of(request),
            told=partial(setattr, request, "waits_for"),
        )

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
            answer.sampled(
                start, request.response_tokens, text, crc, self._turns.stopped_by(generation, self._sampling)
            ),
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
        got, attempts, failing = await _retries(self._limits).run(
            partial(self._chat, request, sampling), self.engine_name, partial(setattr, request, "waits_for")
        )
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
            answer.sampled(start, request.response_tokens, message.content, crc),
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


def _retries(limits: RolloutLimits) -> Retries:
    return Retries(limits.engine_retries, limits.engine_retry_pause_seconds)
