"""Load a causal language model with the packed attention, and verify that it works."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

import torch
import transformers
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.utils import logging as transformers_logging

from toolyard.engines.transformers.adapter import read_adapter
from toolyard.engines.transformers.attention import PACKED, AnyStep, Current, Piece, Step, hide_from_compiler
from toolyard.engines.transformers.cache import Rows, Span, TokenShape
from toolyard.engines.transformers.projections import Projections
from toolyard.engines.transformers.static import RowPiece, StaticModel
from toolyard.errors import ConfigError

_log = logging.getLogger(__name__)
_LOADING = threading.Lock()
"""transformers changes global state while it loads: concurrent loads would get each other's empty tensors."""
_models: Any = transformers.AutoModelForCausalLM
_sdpa_kernel: Any = sdpa_kernel

_COMPUTED_LAYERS = frozenset({"full_attention", "sliding_attention", "attention"})
"""Values of a config's `layer_types` that the packed attention supports. Not chunks, indexers, convolutions, states."""
_CACHED_SHARE = 0.05
"""The share of a GPU's memory that may hold finished turns."""
_PROBED_TOKENS, _PROBED_WINDOW = 12, 4
"""Length of the texts that verify a model, and of its sliding window meanwhile."""


_Found: TypeAlias = "tuple[int, int, Tensor]"
"""Which text, at which token, and the logits after it."""


class PackedModel:
    """A model, the size of one token's keys and values, and how to run it."""

    def __init__(
        self, model: Any, device: torch.device, *, is_static: bool | None = None, torch_compile: bool = False
    ) -> None:
        """Verify that the packed attention works with the model.

        Raises:
            ConfigError: the model's attention cannot be replaced, or is not supported; or the model cannot be compiled.
        """
        self.model = model
        self.device = device
        self.is_static = device.type == "cuda" if is_static is None else is_static
        """Whether the next token is computed in a few fixed shapes: see `static`."""
        self.vocabulary: int = model.get_input_embeddings().weight.shape[0]
        config = model.config.get_text_config()
        _refuse_by_name(model, config)
        self._switch = _rope_switch(config)
        self.context: int | None = min(
            filter(None, (_count(config, "max_position_embeddings"), self._switch)), default=None
        )
        is_compiled = False
        try:
            with _short_window(model, config, self.context):
                self.shape = self._probed()
                expected = self._expected()
                self._projections = Projections(model) if self.is_static else None
                if torch_compile:
                    is_compiled = True
                    _compile_layers(model)
                difference = self._difference(expected)
        except (TypeError, AttributeError, RuntimeError, KeyError, ValueError) as error:
            why = str(error).partition("\n")[0]
            if is_compiled:
                raise _unfit(model, f"it cannot be compiled: {why}", "try it without torch_compile") from error
            raise _unfit(model, f"it cannot be run packed: {why}") from error
        exact = self.shape.dtype == torch.float32
        if not difference < (0.001 if exact else 0.2):
            raise _unfit(
                model, f"packed, its probabilities differ by {difference:.3g}: its attention is not plain and causal"
            )

    @property
    def prefill_tokens(self) -> int:
        """How many prompt tokens to compute per step."""
        return 4_096 if self.device.type == "cuda" else 1_024

    @property
    def cache_tokens(self) -> int:
        """How many tokens of finished turns to keep."""
        least = 32_768
        if self.device.type != "cuda":
            return least
        cuda: Any = torch.cuda
        memory: int = cuda.get_device_properties(self.device).total_memory
        return max(least, int(_CACHED_SHARE * memory) // self.shape.bytes)

    def room(self, max_model_len: int | None) -> int:
        """Return how many tokens a sequence may have: never more than the model's maximum.

        Raises:
            ConfigError: `max_model_len` exceeds what the engine supports, although the model could.
        """
        if self._switch and self._switch < (max_model_len or 2**31):
            why = f"{type(self.model).__name__}: longrope changes the factors of sequences beyond {self._switch} tokens"
            if max_model_len:
                remedy = f"use at most {self._switch} in the embedded engine, or use sglang or vllm"
                raise ConfigError(f"{why}, but max_model_len is {max_model_len}: {remedy}")
            _log.warning("%s; the embedded engine ends them there", why)
        return min(filter(None, (self.context, max_model_len)), default=2**31)

    @torch.inference_mode()
    def logits(self, step: AnyStep) -> Tensor:
        """Return the float32 logits of the tokens in `step.last`."""
        with self._kernels():
            return self._forward(step, step.ids, step.positions, step.last)

    def check_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Check names and shapes.

        Raises:
            ConfigError: the model has no such name or shape.
        """
        own: dict[str, Tensor] = self.model.state_dict()
        for name, value in weights.items():
            if name not in own:
                raise ConfigError(f"the model has no weight {name!r}")
            if own[name].shape != value.shape:
                raise ConfigError(f"weight {name!r} is {list(own[name].shape)}, not {list(value.shape)}")

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Copy them in, after `check_weights`. Weights that are not named stay unchanged."""
        own: dict[str, Tensor] = self.model.state_dict()
        for name, value in weights.items():
            own[name].copy_(value)

    def modify(self, change: Callable[[Any], None]) -> None:
        """Let a function modify the model in place."""
        if self._projections is None:
            change(self.model)
            return
        self._projections.undo()
        try:
            change(self.model)
        finally:
            self._projections = Projections(self.model)

    def _kernels(self) -> AbstractContextManager[Any]:
        """On a GPU, disable cuDNN's attention: it makes a plan for every new shape, which takes longer than a step, and
        as requests come and go every other shape is new."""
        if self.device.type != "cuda":
            return nullcontext()
        return _sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])

    def _forward(self, step: Any, ids: Tensor, positions: Tensor, last: Tensor | int) -> Tensor:
        out = self.model(
            input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=last, toolyard_step=Current(step)
        )
        return out.logits[0].float()

    # ----------------------------------------------------------------------------------------------------- proving it
    @torch.inference_mode()
    def _probed(self) -> TokenShape:
        """Return the shape that each layer's attention gets for one token."""
        probe = _Probe()
        one = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        self._forward(probe, one, one, one[0])
        shapes = set(probe.seen.values())
        if not shapes or sorted(probe.seen) != list(range(len(probe.seen))):
            raise _unfit(self.model, f"{len(probe.seen)} of its layers use an attention that can be replaced")
        if len(shapes) > 1:
            raise _unfit(self.model, "its layers have keys of different shapes")
        unproved = sorted(window for window in probe.windows if _PROBED_WINDOW < window < (self.context or 2**31))
        if unproved:
            raise _unfit(self.model, f"it has sliding windows of {unproved} tokens, which its config does not name")
        heads, key_dim, value_dim, dtype = shapes.pop()
        return TokenShape(len(probe.seen), heads, key_dim, value_dim, dtype, self.device)

    @torch.inference_mode()
    def _expected(self) -> Tensor:
        """Return the probabilities of two short texts that the model computes by itself."""
        self.model.set_attn_implementation("eager")
        try:
            texts = torch.tensor(self._texts, device=self.device)
            return self.model(texts, use_cache=False).logits.float().softmax(2)
        finally:
            self.model.set_attn_implementation(PACKED)

    def _difference(self, expected: Tensor) -> float:
        """Return how much the probabilities of the same texts computed together, in pieces and then token by token,
        differ: the largest share of probability that has moved."""
        found = self._logits_in_rows(self._texts) if self.is_static else self._logits_in_spans(self._texts)
        moved = [0.5 * (logits.softmax(0) - expected[text, at]).abs().sum() for text, at, logits in found]
        return float(torch.stack(moved).max())

    @property
    def _texts(self) -> list[list[int]]:
        return [[(step * at + 3) % self.vocabulary for at in range(_PROBED_TOKENS)] for step in (7, 5)]

    def _logits_in_spans(self, texts: Sequence[list[int]]) -> list[_Found]:
        rows, spans = Rows(self.shape), [Span(self.shape, _PROBED_TOKENS) for _ in texts]
        found: list[_Found] = []
        for cuts in (((0, 5), (0, 2)), ((5, 9), (2, 7))):
            pieces = [
                Piece(ids[start:end], start, span) for ids, span, (start, end) in zip(texts, spans, cuts, strict=True)
            ]
            logits = self.logits(Step(rows, [], pieces, self.device))
            found += [(text, end - 1, logits[text]) for text, (_, end) in enumerate(cuts)]
        rows.join(spans[0].contents, 9)
        rows.join(spans[1].contents, 7)
        for _ in range(3):
            at = list(rows.lengths)
            logits = self.logits(Step(rows, [ids[at[text]] for text, ids in enumerate(texts)], [], self.device))
            found += [(text, at[text], logits[text]) for text in range(len(texts))]
            rows.lengths[:] = [length + 1 for length in at]
        return found

    def _logits_in_rows(self, texts: Sequence[list[int]]) -> list[_Found]:
        rows = Rows(self.shape)
        for _ in texts:
            rows.join(None, 0)
        static = StaticModel(self, rows)
        for cuts in (((0, 2), (0, 1)), ((2, 5), (1, 2)), ((5, 8), (2, 7))):  # on a GPU: computed, recorded, repeated
            static.fill([RowPiece(text, texts[text][start:end], start) for text, (start, end) in enumerate(cuts)])
            rows.lengths[:] = [end for _, end in cuts]
        found: list[_Found] = []
        for _ in range(4):
            at = list(rows.lengths)
            logits = static.logits([ids[at[text]] for text, ids in enumerate(texts)]).clone()
            found += [(text, at[text], logits[text]) for text in range(len(texts))]
            rows.lengths[:] = [length + 1 for length in at]
        return found


class _Probe:
    """Replaces a step: attends within the call, and records what it was given."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[int, int, int, torch.dtype]] = {}
        self.windows: set[int] = set()

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        if window is not None:
            self.windows.add(window)
        self.seen[layer] = (key.shape[0], key.shape[2], value.shape[2], key.dtype)
        return value.repeat_interleave(query.shape[0] // value.shape[0], 0).transpose(0, 1)


def load(
    model: str | Path,
    device: str = "auto",
    dtype: str = "auto",
    adapter: str | Path | None = None,
    *,
    is_static: bool | None = None,
    torch_compile: bool = False,
) -> PackedModel:
    """Load a model.

    Raises:
        ConfigError: there is no such model, adapter, device or dtype; or it is not supported.
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
    except (OSError, ValueError, ImportError, RuntimeError, AssertionError) as error:  # of a torch without CUDA
        raise ConfigError(f"model {str(model)!r} cannot be loaded on {place}: {error}") from error
    except KeyError as error:  # from a model that has its own table of attentions
        why = f"its attention cannot be replaced ({error} is unknown to it)"
        raise ConfigError(
            f"model {str(model)!r} cannot be used with the embedded engine: {why}; use sglang or vllm"
        ) from error
    return PackedModel(loaded, place, is_static=is_static, torch_compile=torch_compile)


def _compile_layers(model: Any) -> None:
    """Let torch compile each kind of layer, once for all sizes: what is between attention and matrix products becomes
    a few kernels instead of thirty."""
    hide_from_compiler()
    # Otherwise compiled layers would ignore hooks that `update_weights` adds.
    settings: Any = import_module("torch._dynamo.config")
    settings.skip_nnmodule_hook_guards = False
    # It suggests less precise matrix products, with which log-probabilities would not agree with a trainer's.
    warnings.filterwarnings("ignore", "TensorFloat32", UserWarning)
    kinds: Collection[str] = getattr(model, "_no_split_modules", None) or ()
    layers = [module for module in model.modules() if type(module).__name__ in kinds]
    if not layers:
        raise ValueError("it does not say which of its modules are layers")
    for layer in layers:
        layer.compile(dynamic=True)


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


def _refuse_by_name(model: Any, config: Any) -> None:
    """Reject differences from plain attention that only show in sequences too long to test."""
    others = sorted({*(getattr(config, "layer_types", None) or ())} - _COMPUTED_LAYERS)
    if others:
        raise _unfit(model, f"it has layers of {', '.join(others)}")
    if getattr(config, "attn_temperature_tuning", False):
        raise _unfit(model, "its attn_temperature_tuning confuses positions in a batch with positions in a sequence")


def _rope_switch(config: Any) -> int | None:
    """Return after how many tokens longrope changes its factors, for all tokens of a sequence and a batch. No cache can
    support that: log-probabilities of tokens before the switch would change after it. Dynamic factors change after
    `max_position_embeddings`, which no sequence exceeds."""
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    nested: list[dict[str, Any]] = [value for value in parameters.values() if isinstance(value, dict)]
    own = getattr(config, "original_max_position_embeddings", None)
    switches: list[int | None] = [
        rope.get("original_max_position_embeddings") or own
        for rope in (parameters, *nested)
        if rope.get("rope_type") == "longrope"
    ]
    return min(filter(None, switches), default=None)


@contextmanager
def _short_window(model: Any, config: Any, context: int | None) -> Generator[None]:
    """Make a sliding window so small that a short text exceeds it, both in the model's own masks and in what it passes
    to its attention."""
    window = _count(config, "sliding_window")
    if window is None or (context is not None and window >= context):
        yield
        return
    modules: list[Any] = list(model.modules())
    windowed = [module for module in modules if getattr(module, "sliding_window", None) == window]
    for place in (config, *windowed):
        place.sliding_window = _PROBED_WINDOW
    try:
        yield
    finally:
        for place in (config, *windowed):
            place.sliding_window = window


def _count(config: Any, name: str) -> int | None:
    value = getattr(config, name, None)
    return value if isinstance(value, int) and value > 0 else None


def _unfit(model: Any, why: str, remedy: str = "use sglang or vllm") -> ConfigError:
    return ConfigError(f"{type(model).__name__} cannot be used with the embedded engine: {why}; {remedy}")


@contextmanager
def without_bars() -> Generator[None]:
    """Disable the progress bars that transformers shows when it reads or writes anything."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
