"""Many requests at once: bounded, watched, and streamed in the order in which they end.

    async with RolloutRun(setting, requests, concurrency=256) as run:
        async for trajectory in run:
            ...

A slow reader slows the run down: at most twice `concurrency` requests are running or waiting to be read. Leaving the
block early cancels running requests and releases their tools.

Every request that starts ends as exactly one trajectory, unless the block is left early: a worker that is cancelled
from outside delivers a record of the failure and continues.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from types import TracebackType
from typing import Self, cast

from toolyard.durations import duration
from toolyard.errors import ConfigError
from toolyard.execution.workplaces import open_limiters
from toolyard.limits.protocol import Limiter
from toolyard.records.trajectory import Trajectory
from toolyard.rollout.admission import AdaptiveConcurrency, Gate, Loads
from toolyard.rollout.external import ExternalCalls, StartOverError
from toolyard.rollout.finish import RolloutState
from toolyard.rollout.play.conclusion import lost_trajectory
from toolyard.rollout.play.play import Play
from toolyard.rollout.play.setting import Setting
from toolyard.rollout.request import CURRENT, AsyncRolloutRequest
from toolyard.rollout.status import Status, live_counts, status_of
from toolyard.supervision import LoopWatch, Stall

_log = logging.getLogger(__name__)
_WATCH_SECONDS = 1.0
SLOWEST = 20
"""How many running requests a status describes: those that have been in their state longest."""
_LOAD_SECONDS = 1.0
"""Time between two looks at the load of the engine's servers."""


@dataclass(frozen=True, slots=True)
class Stuck:
    """A request that has been in one stage for too long."""

    request_id: str
    task: str
    rollout_offset: int
    state: RolloutState
    seconds: float
    waits_for: str

    def __str__(self) -> str:
        waits = f", waiting for {self.waits_for}" if self.waits_for else ""
        return (
            f"request {self.request_id} (task {self.task}, sample {self.rollout_offset}) has been in {self.state} "
            f"for {duration(self.seconds)}{waits}"
        )


class RolloutRun:
    """A run over `requests`, which are consumed lazily. From an async iterator, many may be awaited at once, and one
    that has ended may come again."""

    def __init__(
        self,
        setting: Setting,
        requests: Iterable[AsyncRolloutRequest] | AsyncIterator[AsyncRolloutRequest],
        *,
        concurrency: int = 256,
        external_calls_for: Callable[[AsyncRolloutRequest], ExternalCalls] | None = None,
        on_stuck: Callable[[Stuck], None] | None = None,
        on_stall: Callable[[Stall], None] | None = None,
    ) -> None:
        """`on_stall` is called in another thread, because the run's own is blocked then."""
        if concurrency < 1:
            raise ConfigError(f"concurrency: expected at least 1, not {concurrency}")
        self._setting = setting
        self._requests = requests if isinstance(requests, AsyncIterator) else iter(requests)
        self._concurrency = concurrency
        self._adaptive = AdaptiveConcurrency(concurrency)
        self._gate = Gate(concurrency if setting.loads is None else self._adaptive.limit)
        self._external_calls_for = external_calls_for
        self._on_stuck = on_stuck
        self._watch = LoopWatch(self._note_stall)
        self._on_stall = on_stall
        self.stalls: list[Stall] = []
        """Times when the event loop was blocked, each as last seen."""
        self.deaths: list[str] = []
        """Requests whose worker ended without a trajectory: a bug, although they are recorded."""
        self._plays: dict[str, Play] = {}
        self._begun: set[str] = set()
        self._ended: asyncio.Queue[Trajectory | None] = asyncio.Queue()
        self._room = asyncio.Semaphore(2 * concurrency)
        """For requests that run or wait to be read. Not a bounded queue: waiting writers could overtake each other."""
        self._owner: asyncio.Task[None] | None = None
        self._stopping = False
        self._closing = False
        """The workers are cancelled on purpose."""
        self._told = False

    # ------------------------------------------------------------------------------------------------------- outside
    @property
    def states(self) -> Counter[RolloutState]:
        """Number of running requests by state."""
        return Counter(request.state for request in self.running)

    @property
    def begun(self) -> AbstractSet[str]:
        """The ids of all requests that have started."""
        return self._begun

    @property
    def limit(self) -> int:
        """How many requests may run now: `concurrency`, or fewer while the engine's servers queue."""
        return self._gate.limit

    @property
    def stopping(self) -> bool:
        """`stop` was called."""
        return self._stopping

    @property
    def running(self) -> list[AsyncRolloutRequest]:
        return [play.request for play in list(self._plays.values())]  # a copy: other threads may ask

    @property
    def live(self) -> tuple[int, int, int]:
        """Turns, sampled tokens and tool calls of the running requests."""
        return live_counts(self.running, self._setting)

    @property
    def statuses(self) -> dict[str, Status]:
        """See `Running`."""
        return {"": status_of(self.running, self._setting, slowest=SLOWEST)}

    @property
    def limiters(self) -> list[Limiter]:
        """See `Running`."""
        return open_limiters()

    @property
    def ledger(self) -> dict[str, int]:
        """See `Running`."""
        return {}

    @property
    def is_blocked(self) -> bool:
        """Whether the event loop is blocked. Can be read from any thread."""
        return self._watch.is_blocked

    def abort(self, request_id: str) -> None:
        """End one request soon, as ABORTED. Does nothing if it is not running."""
        play = self._plays.get(request_id)
        if play is not None:
            play.abort()

    def stop(self) -> None:
        """Start no more requests and abort the running ones; the iteration ends soon."""
        self._stopping = True
        for play in list(self._plays.values()):
            play.abort()

    async def __aenter__(self) -> Self:
        self._owner = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._owner is not None
        self._closing = True
        self._owner.cancel()
        cancelled: asyncio.CancelledError | None = None
        while not self._owner.done():
            try:
                await asyncio.wait([self._owner])
            except asyncio.CancelledError as again:  # release resources first
                cancelled = again
        if cancelled is not None:
            raise cancelled
        if error is None:
            self._tell_failure()

    def __aiter__(self) -> AsyncIterator[Trajectory]:
        return self._iterate()

    async def _iterate(self) -> AsyncIterator[Trajectory]:
        assert self._owner is not None, "use `async with`"
        while (trajectory := await self._ended.get()) is not None:
            self._room.release()
            yield trajectory
        self._ended.put_nowait(None)  # for a second iteration
        await asyncio.wait([self._owner])
        self._tell_failure()

    def _tell_failure(self) -> None:
        """Raise what ended the run, once."""
        assert self._owner is not None
        failure: BaseException | None = None if self._told or self._owner.cancelled() else self._owner.exception()
        self._told = True
        while isinstance(failure, BaseExceptionGroup):  # from workers: the first is why the others were stopped
            failure = cast("BaseException", failure.exceptions[0])  # pyright: ignore[reportUnknownMemberType]
        if failure is not None:
            raise failure

    # -------------------------------------------------------------------------------------------------------- inside
    async def _run(self) -> None:
        watching = [asyncio.create_task(self._watch_requests())]
        if self._setting.loads is not None:
            watching.append(asyncio.create_task(self._adapt(self._setting.loads)))
        self._watch.start()
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._concurrency):
                    group.create_task(self._work())
        finally:
            self._watch.stop()
            self._ended.put_nowait(None)
            for task in watching:
                task.cancel()
            await asyncio.wait(watching)

    async def _work(self) -> None:
        while True:
            await self._room.acquire()
            await self._gate.enter()
            try:
                try:
                    request = await self._next()
                except Exception:
                    self._closing = True
                    raise
                if request is None:
                    self._room.release()  # for the other workers, which must end too
                    return
                self._ended.put_nowait(await self._played(request))
            finally:
                self._gate.leave()

    async def _played(self, request: AsyncRolloutRequest) -> Trajectory:
        external = self._external_calls_for(request) if self._external_calls_for else None
        play = play_of(request, self._setting, external)
        self._plays[request.request_id] = play
        before = CURRENT.set(request)
        try:
            return await play.run()
        except asyncio.CancelledError as error:
            if self._closing:
                raise
            return self._died(play, error)
        except StartOverError as why:
            _log.warning("%s; restarting it", why)
        except BaseException:  # from a tape, or Ctrl-C: it ends the run and all workers
            self._closing = True
            raise
        finally:
            CURRENT.reset(before)
            del self._plays[request.request_id]
        play.external.start_over()
        return await self._played(request.anew())

    def _died(self, play: Play, error: asyncio.CancelledError) -> Trajectory:
        """The worker was cancelled by code outside the run. Unhandled, its requests would be lost silently."""
        task = asyncio.current_task()
        assert task is not None
        while task.uncancel():
            pass
        self.deaths.append(play.request.request_id)
        _log.error("request %s: its worker was cancelled from outside the run", play.request.request_id)
        return lost_trajectory(play, error)

    async def _next(self) -> AsyncRolloutRequest | None:
        """The next request, or None."""
        if isinstance(self._requests, AsyncIterator):
            request = await anext(self._requests, None)
            return None if self._stopping else request
        request = None if self._stopping else next(self._requests, None)
        if request is not None:
            if request.request_id in self._begun:
                raise ConfigError(
                    f"two requests have the id {request.request_id}: is task {request.batch_data_id!r} listed twice?"
                )
            self._begun.add(request.request_id)
        return request

    async def _adapt(self, loads: Loads) -> None:
        while True:
            await asyncio.sleep(_LOAD_SECONDS)
            self._gate.resize(self._adaptive.decide(await loads(), len(self._plays)))

    async def _watch_requests(self) -> None:
        """Report stuck requests, once for each stage. One that waits for an engine that is at work is merely slow."""
        named: dict[str, float] = {}
        steps, at_work = 0, 0.0
        progress = self._setting.speaker.progress
        limit = self._setting.limits.stuck_after_seconds
        while True:
            await asyncio.sleep(min(_WATCH_SECONDS, limit))
            now = time.monotonic()
            named = {request_id: since for request_id, since in named.items() if request_id in self._plays}
            if progress is not None and progress.steps() != steps:
                steps, at_work = progress.steps(), now
            for request in self.running:
                since = request.stage_since
                moved = at_work if request.state is RolloutState.GENERATING else since
                if now - max(since, moved) < limit or named.get(request.request_id) == since:
                    continue
                named[request.request_id] = since
                stuck = Stuck(
                    request.request_id,
                    request.batch_data_id,
                    request.rollout_offset,
                    request.state,
                    now - since,
                    self._setting.speaker.waits_for(request) or request.waits_for,
                )
                request.stuck.append(f"{stuck.state}: {stuck.waits_for}" if stuck.waits_for else stuck.state.value)
                self._tell_stuck(stuck)

    def _tell_stuck(self, stuck: Stuck) -> None:
        try:
            if self._on_stuck is not None:
                self._on_stuck(stuck)
        except Exception:  # an observer's exception must not end the watch
            _log.exception("%s; the on_stuck callback failed", stuck)

    def _note_stall(self, stall: Stall) -> None:
        if self.stalls and stall.seconds > self.stalls[-1].seconds and stall.line == self.stalls[-1].line:
            self.stalls[-1] = stall  # the same stall, still going on
        else:
            self.stalls.append(stall)
        if self._on_stall is not None:
            self._on_stall(stall)


def play_of(request: AsyncRolloutRequest, setting: Setting, external: ExternalCalls | None = None) -> Play:
    """The play of a request: Toolyard's own loop, or the setting's agent."""
    if setting.agent is None:
        return Play(request, setting, external)
    from toolyard.rollout.agent.play import AgentPlay

    return AgentPlay(request, setting, external)
