"""Training: turns trajectories into samples, and connects rollouts to TRL and verl."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolyard._lazy import exports

if TYPE_CHECKING:
    from toolyard.train.config import TrainConfig, load_train_config
    from toolyard.train.groups import SampleGroup, grouped
    from toolyard.train.padding import PaddedBatch, padded
    from toolyard.train.samples import Samples, TrainingSample, samples_of

__all__ = [
    "PaddedBatch",
    "SampleGroup",
    "Samples",
    "TrainConfig",
    "TrainingSample",
    "grouped",
    "load_train_config",
    "padded",
    "samples_of",
]

__getattr__, __dir__ = exports(
    __name__,
    {
        "toolyard.train.config": "TrainConfig load_train_config",
        "toolyard.train.groups": "SampleGroup grouped",
        "toolyard.train.padding": "PaddedBatch padded",
        "toolyard.train.samples": "Samples TrainingSample samples_of",
    },
)
