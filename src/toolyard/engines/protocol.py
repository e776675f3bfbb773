"""The interfaces of engines.

There are two kinds. An `Engine` samples tokens after a prompt of tokens: its results can be trained on exactly. A
`ChatEngine` uses a server that only handles messages: it is for evaluation and distillation, and is marked as not
token-exact unless its server also returns ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol, Self, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt

from toolyard.images import Image
from toolyard.messages import Message, OpenAIFunctionToolSchema

Ids = Sequence[int]


class Sampling(BaseModel):
    """How the next tokens are chosen."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_tokens: PositiveInt = 512
    """Maximum tokens per turn; further limited by what the request has left."""
    temperature: NonNegativeFloat = 1.0
    """0 takes the most likely token. The embedded engine's log-probabilities are those at this temperature (at 1 if it
    is 0), with nothing cut off; servers have their own rules."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=-1, ge=-1)
    """-1 and 0 consider all tokens."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: PositiveFloat = 1.0
    seed: int | None = None
    """None: the engine's own randomness. A run gives every turn its own seed."""
    stop_token_ids: tuple[int, ...] = ()
    """Sampling ends with one of these tokens, which is kept."""
    stop: tuple[str, ...] = ()
    """Sampling ends with the token that completes one of these strings, which is kept."""


class Finish(StrEnum):
    """Why an engine stopped sampling."""

    STOP = "stop"
    """A stop token or a stop string was sampled; `token_ids` ends with it."""
    LENGTH = "length"
    """`max_tokens` were sampled, or the model's context is full."""
    ABORT = "abort"
    """Aborted by `abort` or by the engine (for example to load new weights). What was sampled so far is valid: the
    request may continue from `prompt_ids + token_ids`."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One answer of an engine."""

    token_ids: list[int]
    """Including the stop token, or the tokens of the stop string, if there was one."""
    logprobs: list[float] | None
    """One per id in `token_ids`; None if the engine has none."""
    finish: Finish
    weight_version: str | None = None
    """The version of the weights that sampled it, if known."""
    cached_tokens: int | None = None
    """How many prompt tokens came from the cache."""
    stop_text: str | None = None
    """The stop string that ended it, if any."""
    queue_seconds: float = field(default=0.0, compare=False)
    """How long it waited before the engine began it, as far as that is known."""


@runtime_checkable
class Engine(Protocol):
    """Samples tokens. Use it with `async with`: leaving it aborts running requests and frees its resources."""

    async def generate(self, prompt_ids: Ids, sampling: Sampling, *, request_id: str) -> Generation:
        """Sample after `prompt_ids`. If cancelled, it stops the work for it, even on a server.

        Raises:
            EngineRequestError: the engine refuses this request; a retry does not help.
            EngineError: any failure that is not the request's fault; `retryable`.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """Stop sampling for `request_id`: its `generate` returns what it has, with `Finish.ABORT`. Does nothing if
        nothing is running."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...


@runtime_checkable
class ImageEngine(Engine, Protocol):
    """An engine that accepts images. Not part of `Engine`: most do not."""

    async def generate_with_images(
        self, prompt_ids: Ids, images: Sequence[Image], sampling: Sampling, *, request_id: str
    ) -> Generation:
        """Like `generate`. `prompt_ids` has one `ChatFormat.image_token_id` per image, in order; the server expands it
        to as many tokens as the image needs."""
        ...


@runtime_checkable
class ReportsActivity(Protocol):
    """An engine that can describe what it is doing for a request. Not part of `Engine`: it is optional."""

    def activity(self, request_id: str) -> str:
        """Return which server has it, which attempt it is, and the last error; empty if there is nothing to say."""
        ...


@runtime_checkable
class ReportsProgress(Protocol):
    """An engine that says how far it is with a turn. Not part of `Engine`: servers answer when a turn has ended."""

    def sampled_tokens(self, request_id: str) -> int:
        """Tokens of the turn that is being sampled; 0 if there is none. Can be called from any thread."""
        ...

    def steps(self) -> int:
        """Forward passes so far. While they go on, requests wait for a slow engine, not for one that is stuck."""
        ...


class ServerLoad(NamedTuple):
    """One server of an engine, as this process sees it."""

    url: str
    in_flight: int
    answered: int
    """Requests it answered since the engine was created."""
    failed: int
    """Attempts that failed."""
    is_up: bool
    """False while it rests after a failure."""


@runtime_checkable
class ReportsServers(Protocol):
    """An engine that can describe its servers. Not part of `Engine`: it is optional."""

    def servers(self) -> Sequence[ServerLoad]:
        """Can be called from any thread."""
        ...


@dataclass(frozen=True, slots=True)
class Load:
    """How much one server has to do, as it says itself."""

    running: int
    """Requests that are being sampled."""
    waiting: int
    """Requests in its queue."""
    usage: float = 0.0
    """Fraction of its KV cache that running requests use."""


@runtime_checkable
class HasServers(Protocol):
    """An engine that is several servers, which may come and go. Not part of `Engine`: others are in this process."""

    def set_urls(self, urls: Sequence[str]) -> None:
        """Use these servers from now on. Raises ConfigError, and changes nothing, if a URL is invalid."""
        ...

    async def loads(self) -> list[Load]:
        """What the servers say about their load; those that say nothing are left out."""
        ...


@dataclass(frozen=True, slots=True)
class ChatGeneration:
    """One answer of a server that handles messages."""

    message: Message
    """Includes tool calls as parsed by the server; those it could not parse remain in the content."""
    finish: Finish
    prompt_ids: list[int] | None = None
    """The server's prompt ids, if it returns them; with `token_ids`, the answer is token-exact."""
    token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    weight_version: str | None = None
    queue_seconds: float = field(default=0.0, compare=False)


@runtime_checkable
class ChatEngine(Protocol):
    """Answers messages with a message."""

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[OpenAIFunctionToolSchema],
        sampling: Sampling,
        *,
        request_id: str,
    ) -> ChatGeneration:
        """Return the assistant's next message. Raises what `Engine.generate` raises."""
        ...

    async def abort(self, request_id: str) -> None: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...
