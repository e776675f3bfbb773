"""Loading a causal language model such that the packed attention serves it, and proving that it does."""

from __future__ import annotations

import threading
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.utils import logging

from toolyard.engines.transformers_adapter import read_adapter
from toolyard.engines.transformers_attention import PACKED, Piece, Step
from toolyard.engines.transformers_cache import Rows, Shape, Span
from toolyard.errors import ConfigError

_LOADING = threading.Lock()
"""transformers changes the whole process while it loads: two that load at once get each other's empty tensors."""
_models: Any = transformers.AutoModelForCausalLM
_sdpa_kernel: Any = sdpa_kernel


class PackedModel:
    """A model, what one token of it takes, and how to run it."""

    def __init__(self, model: Any, device: torch.device) -> None:
        """
        Raises:
            ConfigError: the model's attention cannot be replaced, or is not the plain one.
        """
        self.model = model
        self.device = device
        self.vocabulary: int = model.get_input_embeddings().weight.shape[0]
        self.context: int | None = _context(model)
        try:
            self.shape = self._probed()
            difference = self._difference()
        except (TypeError, AttributeError, RuntimeError, KeyError, ValueError) as error:
            raise _unfit(model, f"it cannot be run packed: {error}") from error
        exact = self.shape.dtype == torch.float32
        if not difference < (0.001 if exact else 0.2):
            raise _unfit(
                model, f"packed, its probabilities differ by {difference:.3g}: its attention is not the plain one"
            )

    @torch.inference_mode()
    def logits(self, step: Step) -> Tensor:
        """Of the tokens that `step.last` names, in float32."""
        with self._kernels():
            return self._forward(step, step.ids, step.positions, step.last)

    def check_weights(self, weights: Mapping[str, Tensor]) -> None:
        """
        Raises:
            ConfigError: a name or a shape that the model has not.
        """
        own: dict[str, Tensor] = self.model.state_dict()
        for name, value in weights.items():
            if name not in own:
                raise ConfigError(f"the model has no weight {name!r}")
            if own[name].shape != value.shape:
                raise ConfigError(f"weight {name!r} is {list(own[name].shape)}, not {list(value.shape)}")

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Copy them in, after `check_weights`. What is not named stays."""
        own: dict[str, Tensor] = self.model.state_dict()
        for name, value in weights.items():
            own[name].copy_(value)

    def _kernels(self) -> AbstractContextManager[Any]:
        """On a GPU, without cuDNN's attention: it makes a plan for every new shape, which takes longer than a step, and
        with requests that come and go every other shape is new."""
        if self.device.type != "cuda":
            return nullcontext()
        return _sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])

    def _forward(self, step: Any, ids: Tensor, positions: Tensor, last: Tensor) -> Tensor:
        out = self.model(
            input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=last, toolyard_step=step
        )
        return out.logits[0].float()

    # ----------------------------------------------------------------------------------------------------- proving it
    @torch.inference_mode()
    def _probed(self) -> Shape:
        """The shape, as the attention of each layer is given it for one token."""
        probe = _Probe()
        one = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        self._forward(probe, one, one, one[0])
        shapes = set(probe.seen.values())
        if not shapes or sorted(probe.seen) != list(range(len(probe.seen))):
            raise _unfit(self.model, f"{len(probe.seen)} of its layers use an attention that can be replaced")
        if len(shapes) > 1:
            raise _unfit(self.model, "its layers have keys of different shapes")
        heads, key_dim, value_dim, dtype = shapes.pop()
        return Shape(len(probe.seen), heads, key_dim, value_dim, dtype, self.device)

    @torch.inference_mode()
    def _difference(self) -> float:
        """How far the probabilities of a short text, taken in pieces and then token by token, are from those that the
        model computes by itself: the largest share of probability that has moved."""
        ids = [(7 * at + 3) % self.vocabulary for at in range(12)]
        rows, span = Rows(self.shape), Span(self.shape, len(ids))
        found: dict[int, Tensor] = {}
        for start, end in ((0, 5), (5, 9)):
            found[end - 1] = self.logits(Step(rows, [], [Piece(ids[start:end], start, span)], self.device))[0]
        rows.join(span, 9)
        for at in range(9, 12):
            found[at] = self.logits(Step(rows, [ids[at]], [], self.device))[0]
            rows.lengths[0] += 1
        self.model.set_attn_implementation("eager")
        try:
            expected = self.model(torch.tensor([ids], device=self.device), use_cache=False).logits[0].float().softmax(1)
        finally:
            self.model.set_attn_implementation(PACKED)
        moved = [0.5 * (logits.softmax(0) - expected[at]).abs().sum() for at, logits in found.items()]
        return float(torch.stack(moved).max())


class _Probe:
    """In a step's place: attends within the call, and remembers what it was given."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[int, int, int, torch.dtype]] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        self.seen[layer] = (key.shape[0], key.shape[2], value.shape[2], key.dtype)
        return value.repeat_interleave(query.shape[0] // value.shape[0], 0).transpose(0, 1)


def load(
    model: str | Path, device: str = "auto", dtype: str = "auto", adapter: str | Path | None = None
) -> PackedModel:
    """
    Raises:
        ConfigError: there is no such model, adapter, device or dtype; or it cannot be used here.
    """
    place = _device(device)
    added = None if adapter is None else read_adapter(adapter)
    try:
        number = _dtype(dtype, place)
        with _LOADING, without_bars():
            loaded: Any = _models.from_pretrained(model, dtype=number, attn_implementation=PACKED)
            if added is not None:
                added.merge_into(loaded)
            loaded.eval().requires_grad_(False).to(place)
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise ConfigError(f"model {str(model)!r} cannot be loaded on {place}: {error}") from error
    return PackedModel(loaded, place)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r}: {error}") from error


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    number = getattr(torch, name, None)
    if not isinstance(number, torch.dtype) or not number.is_floating_point:
        raise ConfigError(f"dtype {name!r}: expected auto, float32, bfloat16 or float16")
    return number


def _context(model: Any) -> int | None:
    """How many tokens the model was made for. One that looks back only so far is held to that, where both agree."""
    config = model.config.get_text_config()
    limits = [getattr(config, "max_position_embeddings", None), getattr(config, "sliding_window", None)]
    return min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=None)


def _unfit(model: Any, why: str) -> ConfigError:
    return ConfigError(f"{type(model).__name__} cannot be used with the embedded engine: {why}; use sglang or vllm")


@contextmanager
def without_bars() -> Generator[None]:
    """transformers draws one for whatever it reads or writes, in the middle of what others show."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
