"""Pads samples to a rectangle: prompts on the left, responses on the right.

Every response starts at the same column, and `prompt_ids + response_ids` is a row to run a model on with
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
    """One row per sample, in their order; all rows of a field have the same length."""

    prompt_ids: Rows
    prompt_mask: Rows
    """0 for padding."""
    response_ids: Rows
    response_attention: Rows
    """0 for padding; 1 for sampled and for given tokens."""
    response_mask: Rows
    """1 for sampled tokens, which the loss is computed on. At least one per row, as `samples_of` refuses empty ones."""
    logprobs: list[list[float]] | None
    """0.0 for tokens that were not sampled. None if any sample has no logprobs."""
    rewards: list[float]
    prompt_length: int
    response_length: int

    @property
    def input_ids(self) -> Rows:
        """Prompt and response."""
        return [prompt + response for prompt, response in zip(self.prompt_ids, self.response_ids, strict=True)]

    @property
    def attention_mask(self) -> Rows:
        """The attention mask for `input_ids`."""
        return [prompt + response for prompt, response in zip(self.prompt_mask, self.response_attention, strict=True)]

    @property
    def position_ids(self) -> Rows:
        """Positions for `input_ids`: each token's index among the tokens that are not padding, from 0."""
        return [[max(0, place - 1) for place in accumulate(row)] for row in self.attention_mask]

    def as_torch(self) -> TorchBatch:
        """Convert to tensors.

        Raises:
            MissingDependencyError: torch is not installed.
        """
        try:
            import torch
        except ImportError as error:
            raise MissingDependencyError(error.name or "torch", "hf", "a batch of tensors") from error

        def rectangle(rows: Sequence[Sequence[float]], width: int, dtype: torch.dtype = torch.int64) -> Tensor:
            # A tensor made from an empty list would lose its width.
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
    """The fields of `PaddedBatch` as CPU tensors: ids and masks int64, logprobs and rewards float32."""

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
    """Pad samples to the longest one, or to the given widths. Without samples the batch has no rows.

    Raises:
        ConfigError: a sample is longer than a given width.
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
        raise ConfigError(f"sample {request_id!r} has {longest} tokens, but {name} is {given}; samples are never cut")
    return longest if given is None else given


def _left(values: list[T], filling: T, width: int) -> list[T]:
    return [filling] * (width - len(values)) + values


def _right(values: list[T], filling: T, width: int) -> list[T]:
    return values + [filling] * (width - len(values))
