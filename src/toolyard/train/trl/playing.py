"""Plays a trainer's rollouts in their own event loop, with engine and tools open from the first step to the last."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from toolyard.errors import ConfigError
from toolyard.records.dump import DumpWriter
from toolyard.records.trajectory import Trajectory
from toolyard.rewards import blocking
from toolyard.rollout.assembly import OpenedRollout, open_rollout
from toolyard.rollout.config import RolloutConfig
from toolyard.rollout.fingerprint import save_settings
from toolyard.rollout.observer import Observer
from toolyard.rollout.play.speaker import TokenSpeaker
from toolyard.rollout.request import create_request, request_id_of
from toolyard.rollout.run_many import RolloutRun, Stuck
from toolyard.rollout.summary import Summary
from toolyard.rollout.watching.setup import watched
from toolyard.tasks.protocol import Task
from toolyard.train.pacing import Pacing
from toolyard.train.trl.stream import GroupStream, PlayedStep, StreamShare

if TYPE_CHECKING:
    from toolyard.records.traces.opentelemetry import TraceReport
    from toolyard.train.trl.weights import WeightSync

_log = logging.getLogger(__name__)

EVALUATIONS = "eval"
"""Subfolder of the dump's folder for evaluations."""


class _Stage(Protocol):
    """The opened parts."""

    sync: WeightSync
    observer: Observer
    stream: GroupStream | None

    async def play(
        self, numbered: Sequence[tuple[Task, int]], step: int, ended: Callable[[Trajectory], None]
    ) -> list[Trajectory]: ...


@dataclass(slots=True)
class _Here:
    """Engine and tools in this process."""

    config: RolloutConfig
    rollout: OpenedRollout
    sync: WeightSync
    observer: Observer
    parts: AsyncExitStack
    """What is closed before engine and tools."""
    stream: GroupStream | None = None

    async def play(
        self, numbered: Sequence[tuple[Task, int]], step: int, ended: Callable[[Trajectory], None]
    ) -> list[Trajectory]:
        schemas, seed = self.rollout.tool_schemas, self.config.seed
        requests = [create_request(task, at, tool_schemas=schemas, step=step, seed=seed) for task, at in numbered]
        if self.stream is not None:  # it may be playing the same tasks for the same step
            for request, (task, at) in zip(requests, numbered, strict=True):
                request.request_id = request_id_of(f"{EVALUATIONS}\0{task.id}", at, step)
        found: dict[str, Trajectory] = {}
        run = RolloutRun(
            self.rollout.setting, requests, concurrency=self.config.in_flight, on_stuck=self.observer.stuck
        )
        async with run:
            self.observer.began(run)
            async for trajectory in run:
                found[trajectory.request_id] = trajectory
                ended(trajectory)
        return [found[request.request_id] for request in requests]


class Player:
    """Plays rollouts for a trainer, called from the trainer's thread, which blocks but can be interrupted."""

    def __init__(self, config: RolloutConfig, note: Callable[[str], None] = _log.info) -> None:
        self._config = config
        self._note = note
        self._summary, self._begun = Summary(), 0
        """Of all steps."""
        self._stage: _Stage | None = None
        self._is_open = False
        """Or being opened: that goes on if it is interrupted."""
        self._synced: int | None = None
        self._dumped: set[tuple[int, bool]] = set()
        """Steps that this run has dumped, and whether they were evaluations."""

    def prepare(self, trainer: Any, step: int) -> None:
        """Open engine and tools, and give the engine the trainer's weights.

        Raises:
            ToolyardError: a part cannot be opened, or the weights do not fit.
        """
        if self._stage is None:
            process = int(trainer.accelerator.process_index)
            config = _with_trainer_url(self._config, trainer)
            if process:  # one endpoint and one log for all
                config = config.model_copy(update={"metrics": None, "logs": None})
            self._is_open = True
            self._stage = blocking.run(self._opened(config, process))
        if self._synced != step:
            stream = self._stage.stream
            if stream is not None:
                blocking.run(stream.before_update())
                trainer.accelerator.wait_for_everyone()  # processes may share servers
            self._stage.sync.hand_over(trainer, str(step))
            if stream is not None:
                blocking.run(stream.after_update())
            self._synced = step

    @property
    def names_versions(self) -> bool:
        """See `WeightSync`."""
        return self._stage is not None and self._stage.sync.names_versions

    def prepare_stream(self, trainer: Any, step: int) -> None:
        """Like `prepare`, if a stream is running."""
        if self._stage is not None and self._stage.stream is not None:
            self.prepare(trainer, step)

    def play(
        self, numbered: Sequence[tuple[Task, int]], step: int, ended: Callable[[Trajectory], None]
    ) -> list[Trajectory]:
        """One trajectory for each task and offset, in their order."""
        stage = self._stage
        assert stage is not None, "after `prepare`"
        self._counts_begun(stage, len(numbered))
        try:
            played = blocking.run(stage.play(numbered, step, self._counted(stage, ended)))
        except BaseException:  # a cluster would go on playing
            self.close()
            raise
        if stage.stream is not None:  # it is still there, and is watched again
            stage.observer.began(stage.stream.run)
        return played

    def take(
        self,
        step: int,
        share: StreamShare,
        pacing: Callable[[], Pacing],
        ended: Callable[[Trajectory], None],
        *,
        finishes: bool,
    ) -> PlayedStep:
        """The next step of the stream, which the first call opens with the other arguments.

        Raises:
            ToolyardError: the stream has failed.
        """
        stage = self._stage
        assert isinstance(stage, _Here), "after `prepare`, and not on a cluster"

        async def opened() -> GroupStream:
            stream = GroupStream(
                stage.rollout,
                stage.config,
                stage.observer,
                share,
                pacing(),
                partial(self._counts_begun, stage),
                self._counted(stage, ended),
                finishes=finishes,
            )
            return await stage.parts.enter_async_context(stream)

        try:
            if stage.stream is None:
                stage.stream = blocking.run(opened())
            return blocking.run(stage.stream.take(step))
        except BaseException:
            self.close()
            raise

    def _counts_begun(self, stage: _Stage, requests: int) -> None:
        self._begun += requests
        stage.observer.opened(self._begun, 0)

    def _counted(self, stage: _Stage, ended: Callable[[Trajectory], None]) -> Callable[[Trajectory], None]:
        def counted(trajectory: Trajectory) -> None:
            self._summary.add(trajectory)
            stage.observer.ended(trajectory, self._summary)
            ended(trajectory)

        return counted

    def dump(self, trajectories: Sequence[Trajectory], step: int, evaluation: bool) -> None:
        """Append trajectories to the step's file, if `rollout_data_dir` is set. The first call for a step removes what
        an earlier run has left there.

        Raises:
            RecordError: the file cannot be written.
        """
        folder = self._config.rollout_data_dir
        if folder is not None:
            again = (step, evaluation) in self._dumped
            self._dumped.add((step, evaluation))
            place = Path(folder, EVALUATIONS) if evaluation else Path(folder)
            blocking.run(self._dump(place, trajectories, step, keep=again))
            if not again:
                save_settings(self._config, place)

    def close(self) -> None:
        is_open, self._is_open = self._is_open, False
        self._stage = self._synced = None
        if is_open:
            blocking.run(blocking.discard(self))

    # -------------------------------------------------------------------------------------------------- in their loop
    async def _opened(self, config: RolloutConfig, process: int) -> _Stage:
        return await blocking.kept(self, lambda: _staged(config, process, _Told(self._note)))

    async def _dump(self, folder: Path, trajectories: Sequence[Trajectory], step: int, *, keep: bool) -> None:
        async with DumpWriter(folder) as dump:
            again = dump.existing(step).keys()
            if keep:
                again &= {trajectory.request_id for trajectory in trajectories}
            if again:  # from a run that got further than the checkpoint it was resumed from
                dump.forget(step, again)
            for trajectory in trajectories:
                await dump.write(trajectory)


@asynccontextmanager
async def _staged(config: RolloutConfig, process: int, told: Observer) -> AsyncGenerator[_Stage]:
    async with AsyncExitStack() as stack:
        observer = await stack.enter_async_context(watched(config, told, _tell_traces))
        if config.cluster is not None:
            from toolyard.train.trl.cluster import on_cluster

            yield await stack.enter_async_context(on_cluster(config, process, observer))
            return
        from toolyard.train.trl.weights import weight_sync

        opened = await stack.enter_async_context(open_rollout(config, note=_log.info))
        speaker = opened.setting.speaker
        assert isinstance(speaker, TokenSpeaker)
        assert speaker.engine is not None
        yield _Here(config, opened, weight_sync(speaker.engine), observer, stack)


def _with_trainer_url(config: RolloutConfig, trainer: Any) -> RolloutConfig:
    """The config with the URL of TRL's own vLLM server, if it has one."""
    if config.engine.kind != "vllm":
        return config
    if trainer.vllm_mode != "server":
        raise ConfigError(
            f"the trainer's vllm_mode is {trainer.vllm_mode!r}, but rollouts need a server; set "
            'GRPOConfig(vllm_mode="server") and start the server as TRL documents'
        )
    url = str(trainer.vllm_generation.vllm_client.base_url)
    return config.model_copy(update={"engine": config.engine.model_copy(update={"urls": (url,)})})


class _Told(Observer):
    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note

    def note(self, text: str) -> None:
        self._note(text)

    def told(self, kind: str, text: str) -> None:
        _log.warning("%s: %s", kind, text)

    def stuck(self, stuck: Stuck) -> None:
        _log.warning("%s", stuck)


def _tell_traces(report: TraceReport) -> None:
    _log.log(logging.WARNING if report.dropped else logging.INFO, "%s", report)
