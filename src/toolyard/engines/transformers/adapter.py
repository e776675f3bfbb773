"""LoRA adapters in PEFT's format, merged into a model's weights. PEFT itself is not needed."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from toolyard.engines.models import ADAPTER_CONFIG as CONFIG
from toolyard.engines.models import ADAPTER_WEIGHTS as WEIGHTS
from toolyard.errors import ConfigError

_PREFIX = "base_model.model."
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"
_READ = frozenset({"r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"})
_NO_MATTER = frozenset(
    {
        # Its origin.
        *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type"),
        # The modules it was meant for: the tensors show which have one.
        *("target_modules", "exclude_modules", "layers_pattern", "layers_to_transform"),
        # For training only.
        *("lora_dropout", "eva_config", "loftq_config", "runtime_config"),
        # The orientation of weights: the module itself shows it, and PEFT corrects this value too.
        "fan_in_fan_out",
        # Settings of features that have their own switch.
        *("megatron_core", "qalora_group_size"),
    }
)
_ONLY: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    # Others move part of the base weights into the adapter; the remainder is not available here.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}
_WAY_OUT = "merge it with PEFT (merge_and_unload, save_pretrained), and use that folder as the model"


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """The update of one module's weights: `scale * up @ down`."""

    down: Tensor
    """Rank × inputs."""
    up: Tensor
    """Outputs × rank."""
    scale: float

    @property
    def shape(self) -> tuple[int, int]:
        return self.up.shape[0], self.down.shape[1]

    def delta(self) -> Tensor:
        """Outputs × inputs, in float32."""
        return self.scale * (self.up.float() @ self.down.float())


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """A folder's updates to a model, by module name."""

    folder: Path
    updates: dict[str, LowRank]

    @torch.no_grad()
    def merge_into(self, model: Any) -> None:
        """Add it to the weights in float32, rounding once to their dtype.

        Raises:
            ConfigError: the adapter was made for another model; nothing was changed.
        """
        modules: dict[str, nn.Module] = dict(model.named_modules())
        owners = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
        for name, update in self.updates.items():
            self._check(name, update, modules.get(name), owners)
        for name, update in self.updates.items():
            module = modules[name]
            weight = cast("Tensor", module.weight)
            delta = update.delta().to(weight.device)
            weight.copy_(weight.float() + (delta.T if isinstance(module, Conv1D) else delta))

    def _check(self, name: str, update: LowRank, module: nn.Module | None, owners: Counter[int]) -> None:
        if module is None:
            raise self._misfit(f"the model has no module {name!r}")
        if not isinstance(module, nn.Linear | Conv1D) or not module.weight.is_floating_point():
            raise self._misfit(f"{name!r} is a {type(module).__name__}, not a plain linear layer: {_WAY_OUT}")
        shape = tuple(module.weight.shape)[:: -1 if isinstance(module, Conv1D) else 1]
        if shape != update.shape:
            raise self._misfit(f"{name!r} is {list(shape)} in the model, but {list(update.shape)} in the adapter")
        if owners[id(module.weight)] > 1:
            raise self._misfit(f"{name!r} shares its weights with another module, which would change with it")

    def _misfit(self, why: str) -> ConfigError:
        return ConfigError(f"adapter {self.folder} does not fit: {why}")


def read_adapter(folder: str | Path) -> Adapter:
    """Read the LoRA adapter in a folder: adapter_config.json and adapter_model.safetensors.

    Raises:
        ConfigError: there is none, or it contains something that cannot be merged, which the message names. Nothing in
            the files is ignored.
    """
    place = Path(folder).expanduser()
    config = _config(place)
    try:
        tensors = load_file(place / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"adapter {place}: {WEIGHTS} cannot be read: {error}") from error
    names = sorted(key.removeprefix(_PREFIX).removesuffix(_DOWN) for key in tensors if key.endswith(_DOWN))
    updates: dict[str, LowRank] = {}
    for name in names:
        down, up = (tensors.pop(f"{_PREFIX}{name}{end}", None) for end in (_DOWN, _UP))
        if down is None or up is None:
            raise ConfigError(f"adapter {place}: {name!r} needs both lora_A and lora_B, under {_PREFIX!r}")
        updates[name] = _low_rank(place, config, name, down, up)
    if tensors:
        raise ConfigError(f"adapter {place}: {_listed(tensors)}: not supported; {_WAY_OUT}")
    if not updates:
        raise ConfigError(f"adapter {place}: {WEIGHTS} is empty")
    return Adapter(place, updates)


def _config(place: Path) -> dict[str, Any]:
    try:
        found: Any = json.loads((place / CONFIG).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"adapter {place}: {CONFIG} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"adapter {place}: {CONFIG} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"adapter {place}: {CONFIG} is not an object")
    config = cast("dict[str, Any]", found)
    for key, value in config.items():
        if key in _ONLY:
            if value not in _ONLY[key]:
                expected = ", ".join(map(repr, _ONLY[key]))
                raise ConfigError(f"adapter {place}: {key} {value!r} is not supported ({expected}): {_WAY_OUT}")
        elif key not in _READ | _NO_MATTER and value:
            # Including future features of PEFT: whatever is enabled changes the model, in an unknown way.
            raise ConfigError(f"adapter {place}: {key} {str(value)[:80]} is not supported: {_WAY_OUT}")
    if "peft_type" not in config:
        raise ConfigError(f"adapter {place}: {CONFIG} has no peft_type")
    return config


def _low_rank(place: Path, config: dict[str, Any], name: str, down: Tensor, up: Tensor) -> LowRank:
    try:
        rank = int(_by_pattern(config.get("rank_pattern"), name, config["r"]))
        alpha = float(_by_pattern(config.get("alpha_pattern"), name, config["lora_alpha"]))
    except (KeyError, TypeError, ValueError, AttributeError, re.error) as error:
        raise ConfigError(f"adapter {place}: {CONFIG}: r or lora_alpha of {name!r}: {error!r}") from error
    if not (down.ndim == up.ndim == 2 and down.shape[0] == up.shape[1] == rank > 0):
        found = f"lora_A is {list(down.shape)}, lora_B is {list(up.shape)}"
        raise ConfigError(f"adapter {place}: {name!r} should have the rank {rank}: {found}")
    return LowRank(down, up, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _by_pattern(patterns: dict[str, Any] | None, name: str, otherwise: Any) -> Any:
    """Like PEFT: return the first pattern that is a suffix of the name, starting at a dot."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return value
    return otherwise


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - 3} more" if len(ordered) > 3 else ""
    return f"{', '.join(map(repr, ordered[:3]))}{more}"
