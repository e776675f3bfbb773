"""Experiment trackers: W&B, TensorBoard and Trackio.

The trainer sends its own metrics to them (`report_to`). Toolyard's lines of metrics go the same way, through the same
callbacks: `train/toolyard/…` for steps, `eval/…` for evaluations.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import transformers.integrations as integrations

from toolyard.errors import MissingDependencyError
from toolyard.messages import JSON

_integrations: Any = integrations
_CALLBACKS = (_integrations.TensorBoardCallback, _integrations.TrackioCallback, _integrations.WandbCallback)
_PROJECT = "toolyard"


def check_trackers(trackers: Sequence[str]) -> None:
    """
    Raises:
        MissingDependencyError: the package of a tracker is not installed.
    """
    for name in trackers:
        if find_spec(name) is None:
            raise MissingDependencyError(name, name, f"tracker: {name}")


@contextmanager
def open_trackers(trackers: Sequence[str], folder: Path) -> Generator[None]:
    """Sets defaults for the trackers, and ends a run that W&B began meanwhile: transformers leaves it open."""
    with ExitStack() as stack:
        if trackers:
            stack.enter_context(redirect_stdout(sys.stderr))  # Trackio prints; stdout is for the result
        if "wandb" in trackers:
            os.environ.setdefault("WANDB_PROJECT", _PROJECT)
            os.environ.setdefault("WANDB_DIR", str(folder))
            wandb: Any = import_module("wandb")
            if wandb.run is None:
                stack.callback(wandb.finish)
        yield


def tracking_arguments(trackers: Sequence[str], folder: Path) -> JSON:
    """The settings of TRL for these trackers."""
    return {"report_to": list(trackers) or "none", "project": _PROJECT, "run_name": folder.name}


def track(line: JSON, trainer: Any, *, prefix: str) -> None:
    """Send a line of metrics to all trackers of the trainer. They ignore it in all but the main process."""
    values = {f"{prefix}{name}": value for name, value in _flat(line) if name != "step"}
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, _CALLBACKS):
            callback.on_log(trainer.args, trainer.state, trainer.control, model=trainer.model, logs=values)


def _flat(line: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, float]]:
    """Numbers by path, as `seconds/rollout`. Missing ones are left out: trackers draw gaps."""
    for name, value in line.items():
        if isinstance(value, Mapping):
            yield from _flat(cast("Mapping[str, Any]", value), f"{above}{name}/")
        elif isinstance(value, int | float):
            yield f"{above}{name}", value
