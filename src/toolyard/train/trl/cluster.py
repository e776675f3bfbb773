"""Plays a trainer's rollouts on a Ray cluster, whose workers stay open from the first step to the last."""

from __future__ import annotations

import itertools
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from toolyard.errors import TrainError
from toolyard.records.lines import trajectory_of
from toolyard.records.trajectory import Trajectory
from toolyard.rewards import blocking
from toolyard.rollout.assembly import open_sglang
from toolyard.rollout.cluster.run import ClusterRun, Offer, leftovers, remove_work
from toolyard.rollout.cluster.worker import Payload, Weights
from toolyard.rollout.config import RolloutConfig
from toolyard.rollout.observer import Observer
from toolyard.tasks.protocol import Task
from toolyard.train.trl.stream import GroupStream
from toolyard.train.trl.weights import FolderSync, SyncedByTrainer, WeightSync, whole_weights

_log = logging.getLogger(__name__)


class ClusterSync(WeightSync):
    """Copies the weights into the embedded engines of the cluster's workers."""

    def __init__(self, run: ClusterRun) -> None:
        self._run = run

    def hand_over(self, trainer: Any, version: str) -> None:
        with whole_weights(trainer.model) as weights:
            copied = {name: value.cpu() for name, value in weights.items()}
        blocking.run(self._run.update_weights(Weights(copied, version)))


class ClusterStage:
    """An open cluster run. Nothing is kept for resuming: a step that did not end is played again, by other weights."""

    def __init__(self, run: ClusterRun, sync: WeightSync, observer: Observer) -> None:
        self.sync, self.observer = sync, observer
        self.stream: GroupStream | None = None  # not on a cluster
        self._run = run
        self._indices = itertools.count()
        self._plays = itertools.count(1)

    async def play(
        self, numbered: Sequence[tuple[Task, int]], step: int, ended: Callable[[Trajectory], None]
    ) -> list[Trajectory]:
        """One trajectory for each task and offset, in their order."""
        play = f"+{next(self._plays)}"  # a step's evaluation has the same request ids as its training
        tasks = {task.id: number for number, (task, _) in enumerate(numbered)}
        offers = [
            Offer(next(self._indices), tasks[task.id], Payload(task, at, step, play=play)) for task, at in numbered
        ]
        self._run.play(offers)
        found: dict[int, Trajectory] = {}
        while len(found) < len(offers):
            result = await self._run.next_result()
            if result is None:
                raise TrainError(f"step {step}: the cluster's run was stopped")
            found[result.index] = trajectory_of(result.line)
            self._run.keep_no_longer(result)
            ended(found[result.index])
        return [found[offer.index] for offer in offers]


@asynccontextmanager
async def on_cluster(config: RolloutConfig, process: int, observer: Observer) -> AsyncGenerator[ClusterStage]:
    """`process`: the number of this process among the trainer's: each has workers of its own."""
    async with AsyncExitStack() as stack:
        folder = None
        if config.rollout_data_dir is not None:
            folder = Path(config.rollout_data_dir, ".cluster", f"training-{process}")
            for _ in leftovers(folder):  # waits for the workers of a trainer that was killed
                pass
            remove_work(folder)
            stack.callback(remove_work, folder)
        run = await stack.enter_async_context(ClusterRun(config, folder=folder, note=_log.info, tell=observer.told))
        observer.began(run)
        sync: WeightSync = SyncedByTrainer()
        if config.engine.kind == "transformers":
            sync = ClusterSync(run)
        elif config.engine.kind == "sglang":
            sync = FolderSync(await stack.enter_async_context(open_sglang(config, observer.note)))
        yield ClusterStage(run, sync, observer)
