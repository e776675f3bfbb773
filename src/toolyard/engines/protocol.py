"""What an engine is.

Two kinds. An `Engine` samples tokens after tokens: what it returns can be trained on exactly. A `ChatEngine` stands
before a server that only speaks of messages: it serves evaluation and distillation, and is marked as not token-exact
unless its server also returns ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, Self, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt

from toolyard.images import Image
from toolyard.messages import Message, OpenAIFunctionToolSchema

Ids = Sequence[int]


class Sampling(BaseModel):
    """How the next tokens are chosen."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_tokens: PositiveInt = 512
    """Of one turn; never more than what the request has left."""
    temperature: NonNegativeFloat = 1.0
    """0 takes the most likely token. Log-probabilities are always those of the model's own distribution (temperature 1,
    nothing cut off) with the embedded engine; servers have their own rules."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=-1, ge=-1)
    """-1 and 0 consider all tokens."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: PositiveFloat = 1.0
    seed: int | None = None
    """None: the engine's own chance. A run gives every turn one of its own."""
    stop_token_ids: tuple[int, ...] = ()
    """Sampling ends with one of these, which is kept."""
    stop: tuple[str, ...] = ()
    """Sampling ends with the token that completes one of these texts, which is kept."""


class Finish(StrEnum):
    """Why an engine stopped sampling."""

    STOP = "stop"
    """A stop token or a stop text was sampled; it is the end of `token_ids`."""
    LENGTH = "length"
    """`max_tokens` were sampled, or the model's context is full."""
    ABORT = "abort"
    """Somebody aborted it, `abort` or the engine (for new weights, say). What was sampled until then is valid: the
    request may go on from `prompt_ids + token_ids`."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One answer of an engine."""

    token_ids: list[int]
    """With the stop token, or the tokens of the stop text, if there was one."""
    logprobs: list[float] | None
    """One for each of `token_ids`; None if the engine has none."""
    finish: Finish
    weight_version: str | None = None
    """Which weights sampled it, where the engine knows."""
    cached_tokens: int | None = None
    """Of the prompt, how many did not have to be computed again."""
    stop_text: str | None = None
    """The stop text that ended it, if one did."""


@runtime_checkable
class Engine(Protocol):
    """Samples tokens. Used with `async with`: leaving it aborts what still runs and frees what it holds."""

    async def generate(self, prompt_ids: Ids, sampling: Sampling, *, request_id: str) -> Generation:
        """Sample after `prompt_ids`. Cancelled, it stops the work for it, also on a server.

        Raises:
            EngineRequestError: the engine refuses this request, now and again.
            EngineError: anything else that is not the request's fault; `retryable`.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End what is sampled for `request_id`: its `generate` returns what there is, with `Finish.ABORT`. Of nothing,
        nothing happens."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...


@runtime_checkable
class ImageEngine(Engine, Protocol):
    """An engine that takes images. Not a part of `Engine`: most take none."""

    async def generate_with_images(
        self, prompt_ids: Ids, images: Sequence[Image], sampling: Sampling, *, request_id: str
    ) -> Generation:
        """As `generate`. `prompt_ids` has one `ChatFormat.image_token_id` for each image, in their order; the server
        puts as many in its place as the image needs."""
        ...


@runtime_checkable
class Telling(Protocol):
    """An engine that can say what it does for a request just now. Not a part of `Engine`: engines need not know."""

    def doing(self, request_id: str) -> str:
        """Which server has it, which try it is, and what went wrong with the last; empty if there is nothing to say."""
        ...


@dataclass(frozen=True, slots=True)
class ChatGeneration:
    """One answer of a server that speaks of messages."""

    message: Message
    """With its tool calls, as the server parsed them; those it could not parse are still in its content."""
    finish: Finish
    prompt_ids: list[int] | None = None
    """What the server made of the messages, if it says; with `token_ids`, the answer is token-exact."""
    token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    weight_version: str | None = None


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
        """The next message of the assistant. Raises what `Engine.generate` raises."""
        ...

    async def abort(self, request_id: str) -> None: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...
