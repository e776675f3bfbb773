"""Samples of different lengths as one rectangle: prompts padded on the left, responses on the right.

So every response begins at the same column, and `prompt_ids + response_ids` is one row that a model can be run on with
`attention_mask`. No token is ever cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, TypeVar

from toolyard.errors import ConfigError, MissingDependencyError
from toolyard.train.samples import TrainingSample

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Rows = list[list[int]]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """One row a sample, in their order; all rows of a field have one length."""

    prompt_ids: Rows
    prompt_mask: Rows
    """0 where it is padding."""
    response_ids: Rows
    response_attention: Rows
    """0 where it is padding; 1 also where the model was told something."""
    response_mask: Rows
    """1 where the model sampled: what the loss is over. A row has at least one, as `samples_of` refuses empty ones."""
    logprobs: list[list[float]] | None
    """0.0 where nothing was sampled. None if a sample has none: some would be of no use."""
    rewards: list[float]
    prompt_length: int
    response_length: int

    @property
    def input_ids(self) -> Rows:
        """Prompt and response."""
        return [prompt + response for prompt, response in zip(self.prompt_ids, self.response_ids, strict=True)]

    @property
    def attention_mask(self) -> Rows:
        """Of `input_ids`."""
        return [prompt + response for prompt, response in zip(self.prompt_mask, self.response_attention, strict=True)]

    @property
    def position_ids(self) -> Rows:
        """Of `input_ids`: each token's place among those that are no padding, from 0 on."""
        return [[max(0, place - 1) for place in accumulate(row)] for row in self.attention_mask]

    def as_torch(self) -> TorchBatch:
        """As tensors.

        Raises:
            MissingDependencyError: torch is not installed.
        """
        try:
            import torch
        except ImportError as error:
            raise MissingDependencyError(error.name or "torch", "hf", "a batch of tensors") from error

        def rectangle(rows: Sequence[Sequence[float]], width: int, dtype: torch.dtype = torch.int64) -> Tensor:
            # A tensor made of an empty list would forget its width.
            return torch.tensor(rows, dtype=dtype).reshape(len(rows), width)

        both = self.prompt_length + self.response_length
        return TorchBatch(
            prompt_ids=rectangle(self.prompt_ids, self.prompt_length),
            prompt_mask=rectangle(self.prompt_mask, self.prompt_length),
            response_ids=rectangle(self.response_ids, self.response_length),
            response_attention=rectangle(self.response_attention, self.response_length),
            response_mask=rectangle(self.response_mask, self.response_length),
            logprobs=None if self.logprobs is None else rectangle(self.logprobs, self.response_length, torch.float32),
            rewards=torch.tensor(self.rewards, dtype=torch.float32),
            input_ids=rectangle(self.input_ids, both),
            attention_mask=rectangle(self.attention_mask, both),
            position_ids=rectangle(self.position_ids, both),
        )


@dataclass(frozen=True, slots=True)
class TorchBatch:
    """The fields of `PaddedBatch`, on the CPU: ids and masks of 64 bits, logprobs and rewards of 32."""

    prompt_ids: Tensor
    prompt_mask: Tensor
    response_ids: Tensor
    response_attention: Tensor
    response_mask: Tensor
    logprobs: Tensor | None
    rewards: Tensor
    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor


def padded(
    samples: Sequence[TrainingSample],
    pad_token_id: int,
    *,
    prompt_length: int | None = None,
    response_length: int | None = None,
) -> PaddedBatch:
    """As wide as the longest, or of the widths that are given. No samples: no rows.

    Raises:
        ConfigError: a sample is longer than a width that was given.
    """
    prompts = _width("prompt_length", prompt_length, [(one.request_id, len(one.prompt_ids)) for one in samples])
    responses = _width("response_length", response_length, [(one.request_id, len(one.response_ids)) for one in samples])
    logprobs = [one.logprobs for one in samples if one.logprobs is not None]
    return PaddedBatch(
        prompt_ids=[_left(one.prompt_ids, pad_token_id, prompts) for one in samples],
        prompt_mask=[_left([1] * len(one.prompt_ids), 0, prompts) for one in samples],
        response_ids=[_right(one.response_ids, pad_token_id, responses) for one in samples],
        response_attention=[_right([1] * len(one.response_ids), 0, responses) for one in samples],
        response_mask=[_right(one.response_mask, 0, responses) for one in samples],
        logprobs=[_right(row, 0.0, responses) for row in logprobs] if len(logprobs) == len(samples) else None,
        rewards=[one.reward for one in samples],
        prompt_length=prompts,
        response_length=responses,
    )


def _width(name: str, given: int | None, lengths: Sequence[tuple[str, int]]) -> int:
    request_id, longest = max(lengths, key=lambda one: one[1], default=("", 0))
    if given is not None and longest > given:
        raise ConfigError(f"the sample {request_id!r} has {longest} tokens, but {name} is {given}; nothing is cut")
    return longest if given is None else given


def _left(values: list[T], filling: T, width: int) -> list[T]:
    return [filling] * (width - len(values)) + values


def _right(values: list[T], filling: T, width: int) -> list[T]:
    return values + [filling] * (width - len(values))
