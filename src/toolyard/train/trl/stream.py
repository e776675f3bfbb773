"""A stream of groups: plays task after task, in its own order, and hands out whole groups.

The run behind it stays open from step to step. `toolyard.train.pacing` decides what starts and what is handed out; this
module plays it. Everything here runs in the rollouts' event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Self

from toolyard.errors import TrainError
from toolyard.records.trajectory import Trajectory
from toolyard.rollout.assembly import OpenedRollout
from toolyard.rollout.config import RolloutConfig
from toolyard.rollout.observer import Observer, Running
from toolyard.rollout.request import AsyncRolloutRequest, create_request
from toolyard.rollout.run_many import RolloutRun
from toolyard.tasks.protocol import Task
from toolyard.train.config import AsynchronousConfig, DynamicSamplingConfig
from toolyard.train.order import Position, TaskOrder
from toolyard.train.pacing import HandOut, PacedGroup, Pacing
from toolyard.train.samples import Refused, TrainingSample, sample_of

ASIDE = "put aside"
"""The metric `dynamic_sampling` of trajectories that were not trained on because their group was flat."""


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """Lets a rollout choose its own tasks, instead of playing the trainer's prompts."""

    dynamic_sampling: DynamicSamplingConfig | None = None
    asynchronous: AsynchronousConfig | None = None
    seed: int = 0
    shuffle: bool = True
    """Shuffle the tasks, differently for each pass over them."""
    start: Position | None = None
    """Where the run that is continued was (`ToolyardRollout.position`). None: as many groups were trained in each step
    before the first as in the first, and none was replaced."""

    @property
    def max_staleness(self) -> int:
        return 0 if self.asynchronous is None else self.asynchronous.max_staleness

    @property
    def finishes(self) -> bool:
        """Whether running requests are finished before the weights change."""
        return self.asynchronous is not None and self.asynchronous.on_update == "finish"

    def pacing(self, groups: int, step: int, steps: int | None) -> Pacing:
        """For `groups` groups per step, from `step` on."""
        return Pacing(
            groups,
            max_staleness=self.max_staleness,
            spare=0 if self.dynamic_sampling is None else self.dynamic_sampling.spare(groups),
            steps=None if steps is None else steps - step,
            start=self.start or Position(step * groups),
        )


@dataclass(frozen=True, slots=True)
class PlayedGroup:
    """All samples of a task, in order."""

    trajectories: list[Trajectory]
    judged: list[TrainingSample | Refused]

    @property
    def is_flat(self) -> bool:
        """Whether there is nothing to compare: all scores are equal, or there is at most one."""
        return len({one.reward for one in self.judged if isinstance(one, TrainingSample)}) < 2

    def trained_in(self, step: int, repetition: int) -> PlayedGroup:
        """The same group as a part of a step, in which its task was already played `repetition` times."""
        first = repetition * len(self.trajectories)
        told = [_as_of(one, step=step, rollout_offset=first + index) for index, one in enumerate(self.trajectories)]
        return PlayedGroup(told, self.judged)


@dataclass(frozen=True, slots=True)
class PlayedStep:
    """The groups of one step."""

    trained: list[PlayedGroup]
    aside: list[PlayedGroup]
    """Flat groups that others have replaced; they are not trained on."""
    position: Position
    """Of the stream, after this step."""

    @property
    def counts(self) -> dict[str, int]:
        """Numbers of groups."""
        every = [*self.trained, *self.aside]
        return {"sampled": len(every), "flat": sum(one.is_flat for one in every), "replaced": len(self.aside)}


@dataclass(frozen=True, slots=True)
class StreamShare:
    """One process's part of the order of tasks: `groups` at a time, process after process."""

    order: TaskOrder
    tasks: Sequence[Task]
    groups: int
    """Per step, in this process."""
    process: int = 0
    processes: int = 1

    def at(self, place: int) -> tuple[Task, int, int]:
        """The task at a place of this process's part; the step that would train it if nothing were ever replaced or
        late; and how often the task comes before that in the same step, in any process."""
        step, index = divmod(place, self.groups)
        begin = step * self.groups * self.processes
        whole = begin + self.process * self.groups + index
        found = self.order.at(whole)
        return self.tasks[found], step, sum(self.order.at(one) == found for one in range(begin, whole))


@dataclass(slots=True)
class _Playing:
    """A group with requests that have not ended."""

    paced: PacedGroup
    requests: list[str]
    ended: dict[str, Trajectory] = field(default_factory=dict[str, Trajectory])

    def whole(self) -> PlayedGroup | None:
        if len(self.ended) < len(self.requests):
            return None
        trajectories = [self.ended[request_id] for request_id in self.requests]
        return PlayedGroup(trajectories, [sample_of(one) for one in trajectories])


class GroupStream:
    """Open it with `async with`. Leaving the block cancels what runs and releases its tools."""

    def __init__(
        self,
        rollout: OpenedRollout,
        config: RolloutConfig,
        observer: Observer,
        share: StreamShare,
        pacing: Pacing,
        begun: Callable[[int], None],
        ended: Callable[[Trajectory], None],
        *,
        finishes: bool = False,
    ) -> None:
        """
        Args:
            begun: Called with the number of requests that are added.
            ended: Called with each trajectory as soon as it ends.
            finishes: Finish running requests before the weights change. Otherwise they go on with the new ones.
        """
        self._finishes = finishes
        self._share, self._pacing = share, pacing
        self._config, self._schemas = config, rollout.tool_schemas
        self._observer, self._begun, self._ended = observer, begun, ended
        self._inbox = _Inbox()
        self._run = RolloutRun(rollout.setting, self._inbox, concurrency=config.in_flight, on_stuck=observer.stuck)
        self._playing: dict[str, _Playing] = {}
        """By request."""
        self._played: dict[PacedGroup, PlayedGroup] = {}
        self._changed = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None
        self._failure: Exception | None = None

    @property
    def run(self) -> Running:
        return self._run

    async def __aenter__(self) -> Self:
        await self._run.__aenter__()
        self._observer.began(self._run)
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._reader is not None
        self._reader.cancel()
        try:
            await self._run.__aexit__(kind, error, trace)
        finally:
            await asyncio.wait([self._reader])

    async def take(self, step: int) -> PlayedStep:
        """The groups of the next step: waits until they have ended.

        Raises:
            ToolyardError: the run has failed.
        """
        self._pacing.begin_step()
        self._admit()
        while (handed := self._hand_out()) is None:
            self._changed.clear()
            await self._changed.wait()
        position = self._pacing.position
        self._admit()  # for the steps after this one
        repetitions: dict[str, int] = {}

        def told(paced: PacedGroup) -> PlayedGroup:
            played = self._played.pop(paced)
            task = played.trajectories[0].batch_data_id
            repetitions[task] = repetitions.get(task, -1) + 1
            return played.trained_in(step, repetitions[task])

        trained = [told(paced) for paced in handed.trained]
        return PlayedStep(trained, [_put_aside(told(paced)) for paced in handed.aside], position)

    async def before_update(self) -> None:
        """The weights are about to change. If running requests are to be finished with the old ones, wait for them;
        others do not start until `after_update`."""
        if not self._finishes:
            return
        self._inbox.pause()
        while self._inbox.running and self._failure is None:
            self._changed.clear()
            await self._changed.wait()

    async def after_update(self) -> None:
        self._inbox.resume()

    # ---------------------------------------------------------------------------------------------------------- inside
    def _hand_out(self) -> HandOut | None:
        if self._failure is not None:
            raise self._failure
        return self._pacing.hand_out()

    def _admit(self) -> None:
        for paced in self._pacing.admit():
            task, step, repetition = self._share.at(paced.place)
            first = repetition * self._config.n
            requests = [
                create_request(task, first + at, tool_schemas=self._schemas, step=step, seed=self._config.seed)
                for at in range(self._config.n)
            ]
            playing = _Playing(paced, [request.request_id for request in requests])
            self._playing |= dict.fromkeys(playing.requests, playing)
            self._begun(len(requests))
            for request in requests:
                self._inbox.put(request)

    async def _read(self) -> None:
        try:
            async for trajectory in self._run:
                self._take_in(trajectory)
            raise TrainError("the stream of rollouts was stopped")
        except Exception as error:
            self._failure = error
            self._changed.set()

    def _take_in(self, trajectory: Trajectory) -> None:
        self._inbox.running -= 1
        self._changed.set()
        self._ended(trajectory)
        playing = self._playing.pop(trajectory.request_id)
        playing.ended[trajectory.request_id] = trajectory
        played = playing.whole()
        if played is not None:
            self._played[playing.paced] = played
            self._pacing.end(playing.paced, flat=played.is_flat)
            self._admit()  # in place of a flat one


class _Inbox(AsyncIterator[AsyncRolloutRequest]):
    """The requests of the run, which never end."""

    def __init__(self) -> None:
        self.running = 0
        """Requests that have started and not ended."""
        self._queue: asyncio.Queue[AsyncRolloutRequest] = asyncio.Queue()
        self._held: list[AsyncRolloutRequest] | None = None
        """Requests that do not start because it is paused."""

    def put(self, request: AsyncRolloutRequest) -> None:
        if self._held is None:
            self._queue.put_nowait(request)
        else:
            self._held.append(request)

    def pause(self) -> None:
        if self._held is None:
            self._held = [self._queue.get_nowait() for _ in range(self._queue.qsize())]

    def resume(self) -> None:
        held, self._held = self._held, None
        for request in held or ():
            self._queue.put_nowait(request)

    async def __anext__(self) -> AsyncRolloutRequest:
        request = await self._queue.get()
        self.running += 1
        return request


def _as_of(trajectory: Trajectory, *, step: int, rollout_offset: int) -> Trajectory:
    branches = tuple(replace(one, step=step, rollout_offset=rollout_offset) for one in trajectory.branches)
    return replace(trajectory, step=step, rollout_offset=rollout_offset, branches=branches)


def _put_aside(group: PlayedGroup) -> PlayedGroup:
    def marked(one: Trajectory) -> Trajectory:
        metrics = {**one.metrics, "dynamic_sampling": ASIDE}
        return replace(one, metrics=metrics, branches=tuple(map(marked, one.branches)))

    return PlayedGroup([marked(one) for one in group.trajectories], group.judged)
