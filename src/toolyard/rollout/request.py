"""The running conversation of one sample, and the tokens it is made of."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from toolyard.engines.protocol import Generation
from toolyard.messages import JSON, Message, OpenAIFunctionToolSchema
from toolyard.records.trajectory import Turn
from toolyard.rollout.finish import FinishReason, RolloutState
from toolyard.tasks.protocol import Task
from toolyard.tasks.rows import GSM8K_TOOLS
from toolyard.tokens import ids_crc


@dataclass(slots=True, eq=False)
class AsyncRolloutRequest:
    """One sample of a task while it runs. It ends as a `Trajectory`.

    Tokens are only ever appended to `input_ids`: nothing that was sampled or seen is rendered again.
    """

    request_id: str
    """See `request_id_of`."""
    batch_data_id: str
    """The id of its task."""
    rollout_offset: int
    """The index of this sample among the task's samples."""
    task: Task
    messages: list[Message]
    tool_schemas: Sequence[OpenAIFunctionToolSchema] = ()
    tools_kwargs: Mapping[str, Mapping[str, JSON]] = field(default_factory=dict[str, Mapping[str, JSON]])
    seed: int | None = None
    """The request's seed; the seed of each turn is derived from it."""
    step: int = 0

    state: RolloutState = RolloutState.PENDING
    finish_reason: FinishReason | None = None
    input_ids: list[int] = field(default_factory=list[int])
    """The prompt, then the response."""
    prompt_tokens: int = 0
    prompt_text: str = ""
    response_mask: list[int] = field(default_factory=list[int])
    """1 = sampled by the model."""
    response_logprobs: list[float] | None = field(default_factory=list[float])
    """0.0 where the mask is 0. None if the engine returns no logprobs."""
    reward_scores: dict[str, float | None] = field(default_factory=dict[str, float | None])
    reward_details: dict[str, JSON] = field(default_factory=dict[str, JSON])
    metrics: dict[str, Any] = field(default_factory=dict[str, Any])
    turns: list[Turn] = field(default_factory=list[Turn])
    token_exact: bool = True
    stage_since: float = field(default_factory=time.monotonic)
    """When it entered its state, for the watchdog."""
    waits_for: str = ""
    """What it is waiting for, for example tools."""
    sampled_tokens: int = 0
    """Number of sampled tokens, even if their ids are unknown."""
    stuck: list[str] = field(default_factory=list[str])
    """Stages in which the watchdog reported it."""
    abort_requested: bool = False
    crc: int = 0
    """CRC of `input_ids`, updated as they grow."""

    @property
    def prompt_ids(self) -> list[int]:
        return self.input_ids[: self.prompt_tokens]

    @property
    def response_ids(self) -> list[int]:
        return self.input_ids[self.prompt_tokens :]

    @property
    def response_tokens(self) -> int:
        return len(self.input_ids) - self.prompt_tokens

    def anew(self) -> AsyncRolloutRequest:
        """The same request, not begun."""
        return AsyncRolloutRequest(
            self.request_id,
            self.batch_data_id,
            self.rollout_offset,
            self.task,
            list(self.task.messages),
            self.tool_schemas,
            self.tools_kwargs,
            self.seed,
            self.step,
        )

    def begin(self, prompt_ids: Sequence[int]) -> None:
        self.input_ids = list(prompt_ids)
        self.prompt_tokens = len(self.input_ids)
        self.crc = ids_crc(self.input_ids)

    def append_sampled(self, generation: Generation) -> None:
        """Append tokens sampled by the model."""
        ids = generation.token_ids
        self._append(ids, 1)
        if generation.logprobs is None:
            self.response_logprobs = None
        elif self.response_logprobs is not None:
            self.response_logprobs += generation.logprobs

    def append_given(self, ids: Sequence[int]) -> None:
        """Append tokens given to the model."""
        self._append(ids, 0)
        if self.response_logprobs is not None:
            self.response_logprobs += [0.0] * len(ids)

    def _append(self, ids: Sequence[int], mask: int) -> None:
        self.crc = ids_crc(ids, self.crc)  # first: it rejects invalid ids
        self.input_ids += ids
        self.response_mask += [mask] * len(ids)


CURRENT: ContextVar[AsyncRolloutRequest | None] = ContextVar("current_request", default=None)
"""The request that the current task or thread works for."""


def create_request(
    task: Task,
    rollout_offset: int = 0,
    *,
    tool_schemas: Sequence[OpenAIFunctionToolSchema] = (),
    step: int = 0,
    seed: int | None = 0,
) -> AsyncRolloutRequest:
    """The request for one sample of `task`; the same arguments always give the same request.

    `tools_kwargs` for our own GSM8K tools are dropped if the run does not have these tools, since every row has them.
    Others are kept, so that a misspelled name is found.
    """
    absent = {*GSM8K_TOOLS} - {schema.function.name for schema in tool_schemas}
    name = _name(task.id, rollout_offset, step)
    return AsyncRolloutRequest(
        request_id=request_id_of(task.id, rollout_offset, step),
        batch_data_id=task.id,
        rollout_offset=rollout_offset,
        task=task,
        messages=list(task.messages),
        tool_schemas=tool_schemas,
        tools_kwargs={tool: kwargs for tool, kwargs in task.tools_kwargs.items() if tool not in absent},
        seed=None if seed is None else _seed_of(seed, name),
        step=step,
    )


def request_id_of(task_id: str, rollout_offset: int, step: int) -> str:
    """The id of a sample, the same in every run. All ids have the same length, because SGLang aborts by prefix."""
    name = _name(task_id, rollout_offset, step)
    return blake2b(name.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()


def _name(task_id: str, rollout_offset: int, step: int) -> str:
    return f"{step}\0{task_id}\0{rollout_offset}"


def turn_seed(request: AsyncRolloutRequest) -> int | None:
    return None if request.seed is None else _seed_of(request.seed, str(len(request.turns)))


def _seed_of(seed: int, name: str) -> int:
    """A derived seed of 31 bits, which every engine accepts."""
    digest = blake2b(f"{seed}\0{name}".encode("utf-8", "surrogatepass"), digest_size=4).digest()
    return int.from_bytes(digest, "little") & 0x7FFFFFFF
