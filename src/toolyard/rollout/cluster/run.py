"""The driver's side of a run on a cluster: it offers requests, keeps the workers alive, and collects results.

    async with ClusterRun(config, requests, folder=…) as run:
        async for result in run:
            ...

A result counts as dumped when the next one is asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import logging
import os
import shutil
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from toolyard.engines.http.directory import read_directory, watch_directory
from toolyard.errors import ClusterError, RecordError, ToolyardError
from toolyard.limits.cluster.ray import LimiterReader
from toolyard.messages import JSON
from toolyard.rollout.assembly import tasks_of
from toolyard.rollout.cluster.actors import LedgerActor, Orders, State, WorkerActor, ray
from toolyard.rollout.cluster.connection import connect, disconnect
from toolyard.rollout.cluster.ledger import Result
from toolyard.rollout.cluster.results import Place, check_result, read_result, results_in
from toolyard.rollout.cluster.worker import JOURNALS, SHARDS, TOKEN, Payload, Setup, Weights
from toolyard.rollout.config import RolloutConfig
from toolyard.rollout.faults.profile import FaultProfile
from toolyard.rollout.finish import RolloutState
from toolyard.rollout.request import request_id_of
from toolyard.rollout.status import Status

_log = logging.getLogger(__name__)
_TEND_SECONDS = 0.5
_ORDER_SECONDS = 0.1
_ASK_SECONDS = 10.0
_STOP_SECONDS = 10.0
_LATE_SECONDS = 30.0
_WORKER_DEATH_SECONDS = 30.0
_LEAST_WINDOW = 256
_CHUNK_BYTES = 8 << 20
"""Results fetched from a worker at a time."""
_QUICK_DEATH_SECONDS = 20.0
_QUICK_DEATHS = 5
"""Workers of one node that die this soon and this often in a row end the run: something is wrong with it."""


@dataclass(frozen=True, slots=True)
class Offer:
    index: int
    group: int
    payload: Payload


@dataclass(frozen=True, slots=True)
class ClusterResult:
    index: int
    line: bytes
    """The dump's line."""
    entries: Sequence[bytes]
    """The tape's entries."""


@dataclass(slots=True, eq=False)
class _Worker:
    """A worker, as the driver sees it."""

    name: str
    node: str
    actor: Any
    running: Any
    """The reference to its `run`."""
    hello: Any
    began: float
    shares: bool | None = None
    """None: it has not started yet."""
    is_late: bool = False
    draining: bool = False


class ClusterRun:
    """Plays requests on the nodes of a Ray cluster."""

    def __init__(
        self,
        config: RolloutConfig,
        offers: Iterator[Offer] | None = None,
        *,
        folder: Path | None,
        marks: JSON | None = None,
        faults: FaultProfile | None = None,
        note: Callable[[str], None] = lambda _: None,
        tell: Callable[[str, str], None] = lambda _, __: None,
    ) -> None:
        """
        Args:
            config: The settings; `cluster` is set.
            offers: The requests to play, consumed lazily; the run ends with the last of them. None: they come through
                `play`, and the run goes on until it is left.
            folder: For journals and results on machines that share it.
            marks: Metrics for every line of the dump.
            faults: Faults that the workers inject.
            note: Called with messages for the user.
            tell: Called with the kind (stuck, blocked) and text of what workers report.
        """
        assert config.cluster is not None
        self._config, self._cluster = config, config.cluster
        self._offers = iter(()) if offers is None else offers
        self._ends = offers is not None
        self._exhausted = False
        self._weights: Any = None
        """The reference to the weights of the workers, if they have other ones than the model's own."""
        self._folder = folder if self._cluster.shared_folder else None
        self._note, self._tell = note, tell
        self._marks, self._faults = marks or {}, faults
        self._setup: Setup
        self._ledger: Any = None
        self._ledger_id = ""
        self._after = 0
        self._open: dict[int, tuple[int, bytes]] = {}
        """Offered and not in the dump: group and payload by index."""
        self._new: list[tuple[int, int, bytes]] = []
        self._in_dump: list[int] = []
        self._unreadable: list[int] = []
        self._dead: list[str] = []
        self._collecting: set[int] = set()
        self._collected: asyncio.Queue[ClusterResult | None] = asyncio.Queue()
        self._workers: dict[str, _Worker] = {}
        self._deaths: Counter[str] = Counter()
        """Quick deaths in a row by node."""
        self._not_before: dict[str, float] = {}
        """When a node may get its next worker."""
        self._statuses: dict[str, Status] = {}
        self._figures: Mapping[str, int] = {}
        self._heard: dict[str, int] = {}
        """The last message that was passed on, by worker."""
        self._owner: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._poked = asyncio.Event()
        self._engine_changes = 0
        self._started_ray = False
        self.stopping = False

    # -------------------------------------------------------------------------------------------------------- outside
    @property
    def states(self) -> Counter[RolloutState]:
        """Number of running requests by state."""
        states: Counter[RolloutState] = Counter()
        for status in self.statuses.values():
            states.update({RolloutState(state): count for state, count in status.states.items()})
        return states

    @property
    def live(self) -> tuple[int, int, int]:
        """Turns, sampled tokens and tool calls of the running requests."""
        turns = [(status.turns, status.tokens, status.calls) for status in self.statuses.values()]
        return sum(row[0] for row in turns), sum(row[1] for row in turns), sum(row[2] for row in turns)

    @property
    def statuses(self) -> dict[str, Status]:
        """See `Running`."""
        return dict(self._statuses)

    @property
    def limiters(self) -> list[LimiterReader]:
        """See `Running`."""
        names = {name for status in self.statuses.values() for name in status.limiters}
        return [LimiterReader(name) for name in sorted(names)]

    @property
    def ledger(self) -> Mapping[str, int]:
        """See `Running`."""
        return self._figures

    @property
    def is_blocked(self) -> bool:
        return False

    def play(self, offers: Iterable[Offer]) -> None:
        """Play these as well."""
        self._offers = itertools.chain(self._offers, offers)
        self._exhausted = False
        self._poked.set()

    async def next_result(self) -> ClusterResult | None:
        """None: the run is over. Call `keep_no_longer` for each result.

        Raises:
            ToolyardError: the run cannot go on.
        """
        assert self._owner is not None, "use `async with`"
        result = await self._collected.get()
        if result is None:
            self._collected.put_nowait(None)
            await asyncio.wait([self._owner])
            self._owner.result()
        return result

    def keep_no_longer(self, result: ClusterResult) -> None:
        """The result is in the dump, or not needed any more."""
        self._in_dump.append(result.index)
        self._collecting.discard(result.index)
        del self._open[result.index]
        self._poked.set()

    async def update_weights(self, weights: Weights) -> None:
        """Give weights to all workers, those of the future included. Nothing may be playing.

        Raises:
            ToolyardError: the workers' model has no such weights.
        """
        self._weights = await asyncio.to_thread(ray.put, weights)
        for given in [worker.actor.update_weights.remote(self._weights) for worker in self._workers.values()]:
            try:
                await given
            except ray.exceptions.RayTaskError as error:
                raise _cause(error) from None
            except ray.exceptions.RayError:
                pass  # the worker has died, and the next one starts with them

    def stop(self) -> None:
        """Play no more; the iteration ends soon."""
        self.stopping = True
        self._poked.set()

    def kill_worker(self, choose: Callable[[int], int]) -> str | None:
        """For fault injection: kill -9 of one of the workers that have started. Returns its name; None if none has.

        `choose`: which one of a number of workers.
        """
        workers = sorted(self._workers.values(), key=lambda worker: worker.began)
        begun = [worker for worker in workers if worker.shares is not None or worker.name in self._statuses]
        if not begun:
            return None
        worker = begun[choose(len(begun))]
        worker.actor.die.remote()
        return worker.name

    async def __aenter__(self) -> Self:
        """
        Raises:
            ClusterError, ConfigError: there is no such cluster, or the engine directory cannot be read.
        """
        directory = self._config.engine.directory
        urls = None if directory is None else await asyncio.to_thread(read_directory, directory)
        self._started_ray = await asyncio.to_thread(connect, self._cluster.address, "cluster.address")
        token = uuid.uuid4().hex
        if self._folder is not None:
            (self._folder / SHARDS).mkdir(parents=True, exist_ok=True)
            (self._folder / TOKEN).write_text(token)
        folder = None if self._folder is None else str(self._folder.absolute())
        alone = self._config.model_copy(update={"cluster": None})
        term, marks = self._cluster.term_seconds, self._marks
        self._setup = Setup(alone, term, os.getcwd(), folder, token, marks, engine_urls=urls, faults=self._faults)
        strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=True
        )
        self._ledger = (
            ray.remote(LedgerActor)
            .options(num_cpus=0, max_restarts=-1, scheduling_strategy=strategy)
            .remote(self._cluster.term_seconds, self._config.in_flight)
        )
        self._owner = asyncio.create_task(self._manage())
        if directory is not None and urls is not None:
            self._tasks.add(asyncio.create_task(watch_directory(directory, urls, self._set_engine_urls, self._note)))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._owner is not None
        for task in (self._owner, *self._tasks):
            task.cancel()
        await asyncio.wait([self._owner, *self._tasks])
        self._statuses = {}  # nobody is to ask a limiter while Ray is shut down
        await asyncio.shield(self._end_workers())
        if self._started_ray:
            await asyncio.to_thread(disconnect)

    async def __aiter__(self) -> AsyncGenerator[ClusterResult]:
        while (result := await self.next_result()) is not None:
            yield result
            self.keep_no_longer(result)

    # --------------------------------------------------------------------------------------------------- the management
    async def _manage(self) -> None:
        try:
            tended = -_TEND_SECONDS
            while not self.stopping:
                if time.monotonic() - tended >= _TEND_SECONDS:
                    await self._tend()
                    tended = time.monotonic()
                self._refill()
                if self._ends and self._exhausted and not self._open:
                    break
                await self._order()
                self._poked.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_ORDER_SECONDS):
                        await self._poked.wait()
        finally:
            self._collected.put_nowait(None)

    def _refill(self) -> None:
        window = max(_LEAST_WINDOW, 4 * self._config.in_flight * len(self._workers))  # as many again as are leased
        while not self._exhausted and len(self._open) < window:
            offer = next(self._offers, None)
            if offer is None:
                self._exhausted = True
                return
            packed = offer.payload.packed()
            self._open[offer.index] = offer.group, packed
            self._new.append((offer.index, offer.group, packed))

    async def _order(self) -> None:
        """Talk to the ledger; if it is a new one, tell it everything."""
        new, in_dump, unreadable, dead = self._new, self._in_dump, self._unreadable, self._dead
        orders = Orders(self._ledger_id, new, in_dump, unreadable, dead, self._after)
        self._new, self._in_dump, self._unreadable, self._dead = [], [], [], []
        try:
            state: State = await _get(self._ledger.order.remote(orders))
            if not state.known:
                # The first ledger has no workers to wait for; a later one waits for all, even those just started.
                workers = list(self._workers) if self._ledger_id else []
                self._ledger_id = await _get(self._ledger.open.remote(workers))
                self._after = 0
                self._new = [(index, group, payload) for index, (group, payload) in self._open.items()]
                return
        except (ray.exceptions.RayError, TimeoutError):
            # Orders that arrived are harmless if repeated.
            self._new, self._in_dump = new + self._new, in_dump + self._in_dump
            self._unreadable, self._dead = unreadable + self._unreadable, dead + self._dead
            return
        self._statuses = {name: status for name, status in state.statuses if status is not None}
        self._figures = state.figures
        for name in state.silent:
            self._note(f"worker {name} was silent for {self._cluster.term_seconds:g} s; others play its requests")
        self._pass_on_messages()
        results = [result for _, result in state.results if result.index in self._open]
        self._after = max([self._after, *(number for number, _ in state.results)])
        self._collect([result for result in results if result.index not in self._collecting])

    def _pass_on_messages(self) -> None:
        for name, status in self._statuses.items():
            for number, kind, text in status.messages:
                if number > self._heard.get(name, 0):
                    self._heard[name] = number
                    self._tell(kind, f"{text} (worker {name})")

    # ---------------------------------------------------------------------------------------------------------- results
    def _collect(self, results: Sequence[Result]) -> None:
        by_worker: dict[str, list[Result]] = {}
        for result in results:
            self._collecting.add(result.index)
            by_worker.setdefault("" if result.place.shard else result.worker, []).append(result)
        for worker, theirs in by_worker.items():
            task = asyncio.create_task(self._fetch(worker, theirs) if worker else self._read(theirs))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _read(self, results: Sequence[Result]) -> None:
        assert self._folder is not None
        for result in results:
            try:
                data = await asyncio.to_thread(read_result, self._folder / SHARDS, result.place)
            except RecordError as error:
                self._withdraw(result.index, error)
            else:
                self._deliver(result.index, data)

    async def _fetch(self, name: str, results: Sequence[Result]) -> None:
        worker = self._workers.get(name.partition("/")[0])
        for chunk in _chunks(results):
            try:
                if worker is None:
                    raise RecordError(f"worker {name} is gone, with {len(chunk)} results")
                found: list[bytes | None] = await _get(worker.actor.fetch.remote([result.index for result in chunk]))
            except (RecordError, ray.exceptions.RayError, TimeoutError) as error:
                for result in chunk:
                    self._withdraw(result.index, error)
                continue
            for result, data in zip(chunk, found, strict=True):
                try:
                    check_result(data or b"", result.place)
                except RecordError as error:
                    self._withdraw(result.index, error)
                else:
                    self._deliver(result.index, data or b"")

    def _deliver(self, index: int, data: bytes) -> None:
        line, *entries = data.splitlines(keepends=True)
        self._collected.put_nowait(ClusterResult(index, line, entries))

    def _withdraw(self, index: int, error: BaseException) -> None:
        _log.warning("request %d is played again: its result cannot be read: %s", index, error)
        self._collecting.discard(index)
        self._unreadable.append(index)

    # ---------------------------------------------------------------------------------------------------------- workers
    async def _tend(self) -> None:
        """Start, replace and drain workers."""
        nodes: list[JSON] = await asyncio.to_thread(ray.nodes)
        draining: set[str] = await asyncio.to_thread(_draining)
        fit = [
            node["NodeID"]
            for node in nodes
            if node["Alive"] and node["NodeID"] not in draining and self._fits(node["Resources"])
        ]
        if not fit and not self._workers:
            what = f" with the resource {self._cluster.resource!r}" if self._cluster.resource else ""
            raise ClusterError(f"the cluster has no node{what} and {self._cluster.cpus:g} CPUs for a worker")
        await self._bury(set(fit))
        for worker in self._workers.values():
            if worker.node in draining and not worker.draining:
                worker.draining = True
                worker.actor.drain.remote()
                self._note(f"node {worker.node[:8]} is being drained: worker {worker.name} accepts no more requests")
        count = Counter(worker.node for worker in self._workers.values())
        while len(self._workers) < (self._cluster.workers or len(fit)):
            now = time.monotonic()
            free = [node for node in fit if self._not_before.get(node, 0.0) <= now]
            node = min(free, key=lambda node: count[node], default=None)
            if node is None or (self._cluster.workers is None and count[node]):
                break
            self._start(node)
            count[node] += 1

    def _fits(self, resources: dict[str, float]) -> bool:
        wanted = self._cluster.resource
        needs = {"CPU": self._cluster.cpus, "GPU": self._cluster.gpus, **({wanted: 0.001} if wanted else {})}
        return all(resources.get(name, 0.0) >= share for name, share in needs.items())

    def _start(self, node: str) -> None:
        name = f"{node[:8]}-{uuid.uuid4().hex[:8]}"
        strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        wanted = self._cluster.resource
        actor = (
            ray.remote(WorkerActor)
            .options(
                num_cpus=self._cluster.cpus,
                num_gpus=self._cluster.gpus,
                resources={wanted: 0.001} if wanted else None,
                max_concurrency=4,
                max_restarts=0,
                scheduling_strategy=strategy,
                runtime_env=dict(self._cluster.runtime_env) or None,
            )
            .remote(name, self._setup, self._ledger, self._weights)
        )
        self._workers[name] = _Worker(name, node, actor, actor.run.remote(), actor.hello.remote(), time.monotonic())

    async def _bury(self, alive: set[str]) -> None:
        """Notice workers that have ended, and what they said at first."""
        for worker in list(self._workers.values()):
            if worker.shares is None and ray.wait([worker.hello], timeout=0)[0]:
                with contextlib.suppress(ray.exceptions.RayError):
                    worker.shares, pid = await _get(worker.hello)
                    how = "writes to the shared folder" if worker.shares else "sends its results and journals"
                    self._note(f"worker {worker.name} (process {pid}) {how}")
            elif worker.shares is None and not worker.is_late and time.monotonic() - worker.began > _LATE_SECONDS:
                worker.is_late = True
                free = f"are {self._cluster.cpus:g} CPUs free on node {worker.node[:8]}? (cluster.cpus)"
                self._note(f"worker {worker.name} has not started for {_LATE_SECONDS:g} s: {free}")
            if not ray.wait([worker.running], timeout=0)[0]:
                continue
            del self._workers[worker.name]
            self._statuses.pop(worker.name, None)
            self._dead.append(worker.name)
            try:
                await _get(worker.running)
            except ray.exceptions.RayTaskError as error:
                raise _cause(error, f"worker {worker.name}: ") from None
            except ray.exceptions.RayError as error:
                self._died(worker, str(error).strip().partition("\n")[0], on_live_node=worker.node in alive)

    def _set_engine_urls(self, urls: tuple[str, ...]) -> None:
        """The engine directory has changed. Workers hear of it from here: not all of them may see the file."""
        self._setup = replace(self._setup, engine_urls=urls)
        self._engine_changes += 1
        for worker in self._workers.values():
            worker.actor.set_engine_urls.remote(urls, self._engine_changes)

    def _died(self, worker: _Worker, why: str, *, on_live_node: bool) -> None:
        self._note(f"worker {worker.name} died; others play its requests")
        quick = on_live_node and time.monotonic() - worker.began < _QUICK_DEATH_SECONDS and worker.shares is None
        self._deaths[worker.node] = self._deaths[worker.node] + 1 if quick else 0
        if self._deaths[worker.node] >= _QUICK_DEATHS:
            raise ClusterError(f"{_QUICK_DEATHS} workers in a row died at their start on node {worker.node[:8]}: {why}")
        self._not_before[worker.node] = time.monotonic() + 0.2 * 2 ** self._deaths[worker.node] - 0.2

    async def _end_workers(self) -> None:
        workers = list(self._workers.values())
        for worker in workers:
            worker.actor.stop.remote()
        if workers:
            await asyncio.to_thread(
                ray.wait, [worker.running for worker in workers], num_returns=len(workers), timeout=_STOP_SECONDS
            )
        for worker in workers:
            ray.kill(worker.actor)
        if self._ledger is not None:
            ray.kill(self._ledger)


def offers_of(config: RolloutConfig, digests: Mapping[str, str], wanted: Collection[str]) -> Iterator[Offer]:
    """The requests whose ids are in `wanted`, with the digests of their tasks."""
    for group, task in enumerate(tasks_of(config)):
        for offset in range(config.n):
            request_id = request_id_of(task.id, offset, config.step)
            if request_id in wanted:
                yield Offer(group * config.n + offset, group, Payload(task, offset, config.step, digests[request_id]))


def leftovers(folder: Path) -> Iterator[list[bytes]]:
    """The results of a run that was killed, each as its lines. Waits until its workers are dead, then removes them.

    Raises:
        RecordError: its workers live on.
    """
    shards = sorted((folder / SHARDS).glob("*.jsonl")) if folder.exists() else []
    until = time.monotonic() + _WORKER_DEATH_SECONDS
    for shard in shards:
        with shard.open("rb") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > until:
                        raise RecordError(f"a worker of an earlier run is still writing to {shard}") from None
                    time.sleep(0.1)
            yield from results_in(shard)
    for shard in shards:
        shard.unlink()


def forget_journals(folder: Path) -> None:
    """The settings have changed: what was begun with others starts over."""
    shutil.rmtree(folder / JOURNALS, ignore_errors=True)


def remove_work(folder: Path) -> None:
    """The run is complete: its journals and shards are no longer needed."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()


def _cause(error: Any, where: str = "") -> ToolyardError:
    """What was raised in a worker."""
    return error.cause if isinstance(error.cause, ToolyardError) else ClusterError(f"{where}{error}")


async def _get(reference: Any) -> Any:
    async with asyncio.timeout(_ASK_SECONDS):
        return await reference


def _chunks(results: Sequence[Result]) -> Iterator[list[Result]]:
    chunk, size = list[Result](), 0
    for result in results:
        place: Place = result.place
        if chunk and size + place.size > _CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
        chunk.append(result)
        size += place.size
    if chunk:
        yield chunk


def _draining() -> set[str]:
    """Nodes that are about to go."""
    state = ray._private.state.state  # noqa: SLF001 - there is no public way to ask
    with contextlib.suppress(Exception):
        return set(state.get_draining_nodes())
    return set()
