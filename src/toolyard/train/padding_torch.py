"""A padded batch as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .padding import PaddedBatch


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


def as_torch(batch: PaddedBatch) -> TorchBatch:
    both = batch.prompt_length + batch.response_length
    return TorchBatch(
        prompt_ids=_whole(batch.prompt_ids, batch.prompt_length),
        prompt_mask=_whole(batch.prompt_mask, batch.prompt_length),
        response_ids=_whole(batch.response_ids, batch.response_length),
        response_attention=_whole(batch.response_attention, batch.response_length),
        response_mask=_whole(batch.response_mask, batch.response_length),
        logprobs=None if batch.logprobs is None else _rectangle(batch.logprobs, batch.response_length, torch.float32),
        rewards=torch.tensor(batch.rewards, dtype=torch.float32),
        input_ids=_whole(batch.input_ids, both),
        attention_mask=_whole(batch.attention_mask, both),
        position_ids=_whole(batch.position_ids, both),
    )


def _whole(rows: Sequence[Sequence[int]], width: int) -> Tensor:
    return _rectangle(rows, width, torch.int64)


def _rectangle(rows: Sequence[Sequence[float]], width: int, dtype: torch.dtype) -> Tensor:
    """Also of no rows, which a tensor made of a list would forget the width of."""
    return torch.tensor(rows, dtype=dtype).reshape(len(rows), width)
