"""Playing tasks with the weights that a trainer has now, without training on them."""

from __future__ import annotations

import copy
from typing import Any

from .config import EvaluateConfig, TrainConfig
from .metrics import Measure
from .observer import TrainObserver
from .reports import Reports
from .trl import ToolyardRollout


def evaluate(config: TrainConfig, settings: EvaluateConfig, trainer: Any, observer: TrainObserver) -> Measure:
    """Of this process's share of the tasks. All processes have to ask at the same time.

    Raises:
        ToolyardError: nothing can be played.
    """
    sampling = config.rollout.sampling.model_copy(update={"temperature": settings.temperature})
    changed = {"tasks": settings.tasks, "sampling": sampling, "n": settings.n}
    reports = Reports(observer)
    if trainer.use_vllm:  # TRL does that before it asks for rollouts, and for these it does not ask
        trainer.vllm_generation.sync_weights()
    was_training = trainer.model.training
    trainer.model.eval()
    try:
        with ToolyardRollout(config.rollout.model_copy(update=changed), observer=reports) as rollout:
            every = [row["prompt"] for row in rollout.dataset() for _ in range(settings.n)]
            rollout(_share(every, trainer), _Evaluated(trainer, settings.temperature))
    finally:
        trainer.model.train(was_training)
    return reports.taken()


def _share(prompts: list[Any], trainer: Any) -> list[Any]:
    """Those of this process, as even as can be."""
    mine, processes = trainer.accelerator.process_index, trainer.accelerator.num_processes
    return prompts[len(prompts) * mine // processes : len(prompts) * (mine + 1) // processes]


class _Evaluated:
    """The trainer, at another temperature: what is not trained on need not be sampled as training wants it."""

    def __init__(self, trainer: Any, temperature: float) -> None:
        self._trainer = trainer
        self.args = copy.copy(trainer.args)
        self.args.temperature = temperature

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)
