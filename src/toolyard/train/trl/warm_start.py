"""A supervised start with TRL's SFTTrainer, on good trajectories.

Only sampled tokens are trained on; tool results are context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import transformers

from toolyard.errors import TrainError
from toolyard.messages import JSON
from toolyard.records.trajectory import Trajectory
from toolyard.train.config import WarmStartConfig
from toolyard.train.samples import Refused, TrainingSample, sample_of

Progress = Callable[[int, int, float | None], None]
"""Called after each update with the number of updates so far, the total, and the last known loss."""

_IGNORED = -100
_datasets: Any = import_module("datasets")
_trl: Any = import_module("trl")


@dataclass(frozen=True, slots=True)
class WarmStarted:
    """The result of a warm start."""

    samples: int
    refused: tuple[Refused, ...]
    below: int
    """Number of trajectories left out because of their score."""
    updates: int
    loss: float
    """The mean over all updates."""


def warm_start(
    model: Any,
    tokenizer: Any,
    trajectories: Iterable[Trajectory],
    settings: WarmStartConfig,
    *,
    output_dir: str,
    seed: int = 0,
    processes: int = 1,
    use_cpu: bool = False,
    bf16: bool = False,
    progress: Progress | None = None,
) -> WarmStarted:
    """Train `model` in place: all its weights, or its adapter if it is a PEFT model.

    Raises:
        TrainError: none of the trajectories can be trained on.
    """
    samples, refused, below = _chosen(trajectories, settings)
    if not samples:
        why = f"; the first: {refused[0].why}" if refused else ""
        raise TrainError(
            f"warm start: nothing to learn from: {len(refused)} trajectories were refused, {below} are below "
            f"min_score {settings.min_score}{why}"
        )
    share = max(1, settings.batch_size // processes)
    micro = max(size for size in range(1, min(share, settings.micro_batch_size) + 1) if share % size == 0)
    args = _trl.SFTConfig(
        output_dir=output_dir,
        num_train_epochs=settings.epochs,
        learning_rate=settings.learning_rate,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=share // micro,
        lr_scheduler_type="cosine",
        warmup_steps=0.05,
        max_length=None,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=seed,
        use_cpu=use_cpu,
        bf16=bf16,
        gradient_checkpointing=False,
        dataset_num_proc=None,
    )
    trainer = _trl.SFTTrainer(
        model=model,
        args=args,
        train_dataset=_dataset(samples),
        processing_class=tokenizer,
        callbacks=[_ProgressCallback(progress)] if progress else [],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    done = trainer.train()
    return WarmStarted(len(samples), tuple(refused), below, done.global_step, float(done.training_loss))


def _chosen(
    trajectories: Iterable[Trajectory], settings: WarmStartConfig
) -> tuple[list[TrainingSample], list[Refused], int]:
    samples: list[TrainingSample] = []
    refused: list[Refused] = []
    below = 0
    for trajectory in trajectories:
        if settings.limit is not None and len(samples) == settings.limit:
            break
        one = sample_of(trajectory)
        if isinstance(one, Refused):
            refused.append(one)
        elif settings.min_score is not None and one.reward < settings.min_score:
            below += 1
        else:
            samples.append(one)
    return samples, refused, below


def _dataset(samples: Iterable[TrainingSample]) -> Any:
    return _datasets.Dataset.from_list(
        [
            {
                "input_ids": [*sample.prompt_ids, *sample.response_ids],
                "labels": [_IGNORED] * len(sample.prompt_ids)
                + [
                    token if sampled else _IGNORED
                    for token, sampled in zip(sample.response_ids, sample.response_mask, strict=True)
                ],
            }
            for sample in samples
        ]
    )


class _ProgressCallback(transformers.TrainerCallback):
    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._loss: float | None = None

    def on_log(self, args: Any, state: Any, control: Any, logs: JSON | None = None, **_: Any) -> None:
        self._loss = (logs or {}).get("loss", self._loss)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._progress(state.global_step, state.max_steps, self._loss)
