"""The trainer's current weights, gathered and under the plain model's names, and how engines get them."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from toolyard.engines.http.sglang import SglangEngine
from toolyard.engines.protocol import Engine
from toolyard.engines.transformers.engine import TransformersEngine
from toolyard.errors import ConfigError
from toolyard.rewards import blocking

_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
_PEFT_PREFIX = "base_model.model."
_ADAPTED = "base_layer."
_COPIES = "modules_to_save"


class WeightSync(ABC):
    """How an engine gets the trainer's weights. With several processes, all of them must call it together."""

    names_versions = True
    """Whether engines report which version a token was sampled with, by the name given to `hand_over`."""

    @abstractmethod
    def hand_over(self, trainer: Any, version: str) -> None:
        """Give the engine the trainer's weights. When this returns, it samples from them and reports `version`.

        Raises:
            ToolyardError: the engine rejects them, or an adapter cannot be merged.
        """


class SyncedByTrainer(WeightSync):
    """Does nothing: TRL updates its own vLLM server."""

    names_versions = False

    def hand_over(self, trainer: Any, version: str) -> None:
        pass


class InProcessSync(WeightSync):
    """Copies the weights into the embedded engine."""

    def __init__(self, engine: TransformersEngine) -> None:
        self._engine = engine

    def hand_over(self, trainer: Any, version: str) -> None:
        with whole_weights(trainer.model) as weights:
            blocking.run(self._engine.update_weights(weights, version))


class FolderSync(WeightSync):
    """Saves the weights to a folder shared with the servers, has the servers load them, and deletes the previous
    ones."""

    def __init__(self, engine: SglangEngine) -> None:
        self._engine = engine

    def hand_over(self, trainer: Any, version: str) -> None:
        folder = Path(trainer.args.output_dir).absolute() / "weights"
        new = folder / version
        with whole_weights(trainer.model) as weights:
            if trainer.accelerator.is_main_process:
                plain = _plain(trainer.accelerator.unwrap_model(trainer.model))
                plain.save_pretrained(new, state_dict=dict(weights))
                trainer.processing_class.save_pretrained(new)
                blocking.run(self._engine.update_weights_from_disk(new, version))
                for old in folder.iterdir():
                    if old != new:
                        shutil.rmtree(old, ignore_errors=True)
        trainer.accelerator.wait_for_everyone()


def weight_sync(engine: Engine) -> WeightSync:
    match engine:
        case TransformersEngine():
            return InProcessSync(engine)
        case SglangEngine():
            return FolderSync(engine)
        case _:
            return SyncedByTrainer()


@contextmanager
def whole_weights(model: Any) -> Generator[Mapping[str, Tensor]]:
    """The weights of `model` under the plain model's names: without wrappers, adapters merged (the model itself is
    unchanged), shards gathered. All processes with a shard must call it. Valid only within the block."""
    with torch.no_grad(), _summoned(model):
        yield _Weights(dict(_named(model)))


class _Weights(Mapping[str, Tensor]):
    """Merges adapters lazily, weight by weight: a second complete model may not fit into memory."""

    def __init__(self, found: Mapping[str, Tensor | Callable[[], Tensor]]) -> None:
        self._found = found

    def __getitem__(self, name: str) -> Tensor:
        found = self._found[name]
        return found() if callable(found) else found

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def _named(model: Any) -> Generator[tuple[str, Tensor | Callable[[], Tensor]]]:
    modules = {_unwrapped(name): module for name, module in model.named_modules()}
    adapted = {name: module for name, module in modules.items() if hasattr(module, "get_delta_weight")}
    copied = {name: module for name, module in modules.items() if hasattr(module, "original_module")}
    _check_adapters(adapted, copied)
    for wrapped, value in (*model.named_parameters(), *_kept_buffers(model)):
        name = _unwrapped(wrapped)
        place = _owner(name, copied)
        if place is not None:  # the module is there twice: as it was, and as it is trained
            trained = f"{place}.{_COPIES}.{copied[place].active_adapters[0]}."
            if name.startswith(trained):
                yield f"{place.removeprefix(_PEFT_PREFIX)}.{name.removeprefix(trained)}", _whole(value)
            continue
        place = _owner(name, adapted)
        if place is None:
            yield name.removeprefix(_PEFT_PREFIX), _whole(value)
            continue
        part = name.removeprefix(f"{place}.")
        if part.startswith(_ADAPTED):  # not the adapter itself
            plain = f"{place.removeprefix(_PEFT_PREFIX)}.{part.removeprefix(_ADAPTED)}"
            yield plain, partial(_merged, adapted[place], value) if part == f"{_ADAPTED}weight" else _whole(value)


def _check_adapters(adapted: Mapping[str, Any], copied: Mapping[str, Any]) -> None:
    """
    Raises:
        ConfigError: an adapter is of a kind that cannot be merged here.
    """
    other = [name for name, module in copied.items() if not hasattr(module, _COPIES)]
    other += [name for name, layer in adapted.items() if any(map(layer.use_dora.get, layer.active_adapters))]
    if other:
        raise ConfigError(
            f"the adapter of {other[0]} cannot be merged into the rollouts' weights; use LoRA without DoRA, and "
            "modules_to_save instead of trainable tokens"
        )


@torch.no_grad()
def _merged(layer: Any, value: Any) -> Tensor:
    for adapter in layer.active_adapters:
        value = value + layer.get_delta_weight(adapter).to(value.dtype)
    return _whole(value)


def _owner(name: str, places: Mapping[str, Any]) -> str | None:
    """The module that the weight belongs to."""
    parts = name.split(".")
    tried = (".".join(parts[:length]) for length in range(1, len(parts)))
    return next((place for place in tried if place in places), None)


def _kept_buffers(model: Any) -> Generator[tuple[str, Any]]:
    """Persistent buffers: others are recomputed, and plain models do not have them."""
    for place, module in model.named_modules():
        for name, value in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:  # noqa: SLF001  (there is no public way)
                yield f"{place}.{name}" if place else name, value


def _unwrapped(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _whole(value: Any) -> Tensor:
    """The whole tensor, gathered from all processes if it is sharded."""
    found = value.full_tensor() if hasattr(value, "full_tensor") else value
    return found.detach()


@contextmanager
def _summoned(model: Any) -> Generator[None]:
    """Gathers the parameters of FSDP1 within the block; FSDP2 has distributed tensors instead."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    if not any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        yield
        return
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        yield


def _plain(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model
