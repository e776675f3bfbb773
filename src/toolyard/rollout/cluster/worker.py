"""A worker of a cluster: opens the run's settings for itself, and plays the requests that the ledger leases to it.

Reports go through a thread of their own: a tool that blocks the event loop costs no lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

from toolyard.messages import JSON
from toolyard.records.lines import to_line
from toolyard.records.trajectory import Trajectory
from toolyard.rollout.assembly import open_rollout
from toolyard.rollout.cluster.journal import FolderJournals, JournalledCalls, StreamedJournal
from toolyard.rollout.cluster.ledger import Answer, Lease, Report
from toolyard.rollout.cluster.results import Results
from toolyard.rollout.config import RolloutConfig
from toolyard.rollout.external import ExternalCalls
from toolyard.rollout.faults.inject import Faults
from toolyard.rollout.faults.profile import FaultProfile
from toolyard.rollout.finish import FinishReason
from toolyard.rollout.play.speaker import Speaker, TokenSpeaker
from toolyard.rollout.request import AsyncRolloutRequest, create_request
from toolyard.rollout.run_many import RolloutRun, Stuck
from toolyard.rollout.status import status_of
from toolyard.rollout.watching.logs import logging_to
from toolyard.supervision import Stall
from toolyard.tasks.protocol import Task

_REPORT_SECONDS = 0.25
_GAP_SECONDS = 0.01
"""Minimum seconds between two reports: what happens meanwhile goes into one."""
_CERTAIN = 0.8
"""Fraction of a term during which a worker may start tool calls after it sent a report that was answered."""
JOURNALS = "journals"
SHARDS = "shards"


@dataclass(frozen=True, slots=True)
class Setup:
    """What a worker needs to know of the run."""

    config: RolloutConfig
    term: float
    directory: str
    """The driver's working directory: paths of the settings are relative to it."""
    folder: str | None
    """Where journals and results go, if the worker's machine shares it."""
    token: str = ""
    """What a file of this name in `folder` contains, if it is the same folder."""
    marks: JSON = field(default_factory=dict[str, object])
    """Metrics for every line of the dump."""
    engine_urls: tuple[str, ...] | None = None
    """What `engine.directory` contains; only the driver reads that file."""
    faults: FaultProfile | None = None


class Payload(NamedTuple):
    """A request on its way to a worker."""

    task: Task
    rollout_offset: int
    step: int
    digest: str = ""
    """The task's digest, for the dump."""
    play: str = ""
    """Set if the same request is played more than once: which time it is."""

    def packed(self) -> bytes:
        return pickle.dumps(tuple(self))

    @classmethod
    def unpacked(cls, data: bytes) -> Payload:
        return cls(*pickle.loads(data))  # noqa: S301 - from our own driver


class Weights(NamedTuple):
    """The model's weights, for workers with an embedded engine."""

    by_name: Mapping[str, Any]
    """Tensors."""
    version: str


TOKEN = "token"  # noqa: S105 - the name of a file


def shares_folder(setup: Setup) -> bool:
    """Whether this machine sees the run's folder and can write to it."""
    if setup.folder is None:
        return False
    try:
        folder = Path(setup.folder)
        if (folder / TOKEN).read_text() != setup.token:
            return False
        probe = folder / f"probe-{uuid.uuid4().hex}"
        probe.touch()
        probe.unlink()
    except OSError:
        return False
    return True


@dataclass(slots=True, eq=False)
class _Held:
    """A request that is leased to this worker."""

    index: int
    request: AsyncRolloutRequest
    payload: Payload
    past: tuple[bytes, ...]
    begun: bool = False
    dropped: bool = False
    journal: StreamedJournal | None = None
    entries: list[bytes] = field(default_factory=list[bytes])
    """The tape's entries, if the run is recorded."""
    close_journal: Callable[[bool], None] = lambda _: None


class _Leased:
    """The requests waiting to be begun, as an async iterator for `RolloutRun`."""

    def __init__(self, begin: Callable[[_Held], bool]) -> None:
        self._waiting: asyncio.Queue[_Held | None] = asyncio.Queue()
        self._begin = begin

    def add(self, held: _Held | None) -> None:
        """None: there will be no more."""
        self._waiting.put_nowait(held)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> AsyncRolloutRequest:
        while (held := await self._waiting.get()) is not None:
            if self._begin(held):
                return held.request
        self.add(None)  # for the others who wait
        raise StopAsyncIteration


class Worker:
    """Plays until it is told to stop: call `run` in a thread of its own.

    `ask` sends a report to the ledger and returns the ledger's id and answer. Without an answer, the ledger is another
    one than the report was written for. None: there is no ledger at the moment. It may block for up to a term.
    """

    def __init__(
        self,
        name: str,
        setup: Setup,
        ask: Callable[[Report], tuple[str, Answer | None] | None],
        weights: Weights | None = None,
    ) -> None:
        self.name = name
        self.setup = setup
        self.shares = shares_folder(setup)
        self._ask = ask
        self._lock = threading.Lock()
        self._holds: dict[int, _Held] = {}
        self._by_request: dict[str, _Held] = {}
        """Requests that are playing, also if they were dropped and have not ended yet."""
        self._again: dict[str, _Held] = {}
        """Leased again while an earlier play of the same request has not ended."""
        self._finished: dict[int, object] = {}
        """Places of results that the ledger has not judged yet."""
        self._committed: dict[int, object] = {}
        """Accepted, and not yet in the dump."""
        self._journals: dict[int, Callable[[bool], None]] = {}
        """Closes the journals of finished requests."""
        self._poked = threading.Event()
        self._draining = self._stopping = False
        self._ledger = ""
        self._tell_all = False
        """The ledger is a new one: the next report has everything."""
        self._name_now = name
        self._certain_until = 0.0
        self._messages: deque[tuple[int, str, str]] = deque(maxlen=20)
        self._told = 0
        self._run: RolloutRun | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._leased: _Leased | None = None
        self._results: Results | None = None
        self._failure: BaseException | None = None
        self._weights = weights
        self._speaker: Speaker | None = None
        self._is_open = threading.Event()
        self._engine_urls = setup.engine_urls
        self._engine_change = 0

    # -------------------------------------------------------------------------------------------------- from any thread
    def run(self) -> None:
        """
        Raises:
            ToolyardError: a part of the run cannot be opened, or a result cannot be written.
        """
        with contextlib.suppress(OSError):
            os.chdir(self.setup.directory)
        logs = self.setup.config.logs
        try:
            # Ray keeps what a worker writes to stderr.
            with contextlib.nullcontext() if logs is None else logging_to(logs.model_copy(update={"file": None})):
                asyncio.run(self._work())
        finally:
            self._stopping = True
            self._is_open.set()

    def update_weights(self, weights: Weights) -> None:
        """Give them to the embedded engine, and wait until it samples from them.

        Raises:
            ConfigError: the model has no such weights.
        """
        self._is_open.wait()
        assert self._loop is not None
        if not self._stopping:
            asyncio.run_coroutine_threadsafe(self._give(weights), self._loop).result()

    def stop(self) -> None:
        """Abort what runs; its journals remain."""
        self._stopping = True
        self._poked.set()

    def drain(self) -> None:
        """The machine is about to go: hand over what has not begun, and take on nothing more."""
        self._draining = True
        self._poked.set()

    def set_engine_urls(self, urls: tuple[str, ...], number: int) -> None:
        """`number`: of the change. They may arrive in another order, since several threads take calls."""
        with self._lock:
            if number < self._engine_change:
                return
            self._engine_change, self._engine_urls = number, urls
            if self._speaker is not None and self._speaker.servers is not None:
                self._later(self._speaker.servers.set_urls, urls)

    def fetch(self, indices: Iterable[int]) -> list[bytes | None]:
        """Results that are not in the shared folder."""
        assert self._results is not None
        return [self._results.held(index) for index in indices]

    # ------------------------------------------------------------------------------------------------ in the event loop
    async def _work(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._leased = _Leased(self._begin)
        folder = Path(self.setup.folder) if self.shares and self.setup.folder is not None else None
        config = self.setup.config
        profile = self.setup.faults
        self._faults = None if profile is None else Faults(profile)
        async with open_rollout(config, engine_urls=self._engine_urls, faults=self._faults) as opened:
            self._results = Results(None if folder is None else folder / SHARDS / f"{self.name}.jsonl")
            self._file_journals = None if folder is None else FolderJournals(folder / JOURNALS)
            self._tool_schemas, self._setting = opened.tool_schemas, opened.setting
            self._speaker = opened.setting.speaker
            if self._engine_urls is not None and self._speaker.servers is not None:
                self._speaker.servers.set_urls(self._engine_urls)  # they may have changed meanwhile
            if self._weights is not None:
                await self._give(self._weights)
                self._weights = None
            self._is_open.set()
            reporting = threading.Thread(target=self._report_until_stopped, name="toolyard reports", daemon=True)
            try:
                async with RolloutRun(
                    opened.setting,
                    self._leased,
                    concurrency=config.in_flight,
                    external_calls_for=self._calls_for,
                    on_stuck=self._stuck,
                    on_stall=self._stalled,
                ) as run:
                    self._run = run
                    reporting.start()
                    async for trajectory in run:
                        await asyncio.to_thread(self._ended, trajectory)
            finally:
                self._stopping = True
                self._poked.set()
                if reporting.is_alive():
                    await asyncio.to_thread(reporting.join)
                self._results.close()
        if self._failure is not None:
            raise self._failure

    async def _give(self, weights: Weights) -> None:
        from toolyard.engines.transformers.engine import TransformersEngine

        assert isinstance(self._speaker, TokenSpeaker)
        assert isinstance(self._speaker.engine, TransformersEngine)
        await self._speaker.engine.update_weights(weights.by_name, weights.version)

    def _begin(self, held: _Held) -> bool:
        """False if it was handed over or dropped meanwhile, or has to wait for an earlier play of the same request."""
        with self._lock:
            if self._holds.get(held.index) is not held:
                return False
            if held.request.request_id in self._by_request:
                self._again[held.request.request_id] = held
                return False
            held.begun = True
            self._by_request[held.request.request_id] = held
        return True

    def _calls_for(self, request: AsyncRolloutRequest) -> ExternalCalls:
        held = self._by_request[request.request_id]
        held.entries = []
        keep = held.entries.append if self.setup.config.record is not None else None
        if self._file_journals is not None:
            journal = self._file_journals.open(request.request_id + held.payload.play, held.past)
            held.close_journal = lambda keep: journal.close(keep=keep)
        else:
            journal = held.journal = StreamedJournal(held.past, self._poked.set)
        held.past = ()  # if it starts over, its journal is empty
        calls = JournalledCalls(journal, request.request_id, self._certain, keep)
        return calls if self._faults is None else self._faults.calls(calls, request, self._speaker)

    async def _certain(self) -> None:
        """Wait until it is certain that no other worker has this one's requests."""
        while time.monotonic() > self._certain_until:  # noqa: ASYNC110 - another thread sets it
            await asyncio.sleep(0.02)

    def _ended(self, trajectory: Trajectory) -> None:
        """Not in the event loop: encoding and writing take their time."""
        assert self._results is not None
        with self._lock:
            held = self._by_request.pop(trajectory.request_id)
            waiting = self._again.pop(trajectory.request_id, None)
            counts = not held.dropped and trajectory.finish_reason != FinishReason.ABORTED
        if counts:
            digest = {"task_digest": held.payload.digest} if held.payload.digest else {}
            metrics = {**trajectory.metrics, **digest, **self.setup.marks}
            place = self._results.keep(held.index, [to_line(replace(trajectory, metrics=metrics)), *held.entries])
            with self._lock:
                if not held.dropped:
                    del self._holds[held.index]
                    self._finished[held.index] = place
                    self._journals[held.index] = held.close_journal
        else:
            held.close_journal(True)
            with self._lock:
                if not held.dropped:
                    self._holds.pop(held.index, None)
        self._poked.set()
        if waiting is not None:
            self._add(waiting)

    def _stuck(self, stuck: Stuck) -> None:
        self._tell("stuck", str(stuck))

    def _stalled(self, stall: Stall) -> None:
        self._tell("blocked", str(stall))

    def _tell(self, kind: str, text: str) -> None:
        self._told += 1
        self._messages.append((self._told, kind, text))

    # ------------------------------------------------------------------------------------------- the reporting thread
    def _report_until_stopped(self) -> None:
        try:
            while not self._stopping:
                self._poked.clear()
                sent = time.monotonic()
                said, journals = self._report()
                answer = self._ask(said)
                if answer is not None:
                    self._take(*answer, journals, sent)
                time.sleep(_GAP_SECONDS)
                self._poked.wait(_REPORT_SECONDS)
        except BaseException as error:  # without reports, it would play for nobody
            self._failure = error
        finally:
            assert self._run is not None
            self._later(self._run.stop)
            self._add(None)

    def _report(self) -> tuple[Report, dict[int, int]]:
        assert self._run is not None
        status = status_of(self._run.running, self._setting, messages=self._messages)
        with self._lock:
            holds = list(self._holds.values())
            busy = len(self._by_request)
            finished = list(self._finished.items())
        journals = list[tuple[int, int, tuple[bytes, ...]]]()
        for held in holds:
            unsent = None if held.journal is None else held.journal.unsent(again=self._tell_all)
            if unsent is not None:
                journals.append((held.index, *unsent))
        report = Report(
            self._name_now,
            self._ledger,
            max(0, self._run.limit - busy),
            [held.index for held in holds],
            [held.index for held in holds if held.begun],
            finished,
            journals,
            self.shares,
            self._draining,
            status,
        )
        return report, {index: start + len(lines) for index, start, lines in journals}

    def _take(self, ledger: str, answer: Answer | None, journals: dict[int, int], sent: float) -> None:
        if answer is None:  # a new ledger, which knows nothing: tell it everything
            with self._lock:
                self._ledger, self._tell_all = ledger, True
                self._finished |= self._committed
                self._committed.clear()
            self._poked.set()
            return
        self._tell_all = False
        leased = list[_Held]()
        dropped = list[str]()
        with self._lock:
            if answer.lost:
                self._name_now = f"{self.name}/{uuid.uuid4().hex[:4]}"
                for index in list(self._finished):
                    del self._finished[index]
                    self._discard(index, keep_journal=True)
            for index in (*answer.drop, *answer.hand_over):
                held = self._holds.get(index)
                if held is None or (held.begun and index not in answer.drop):
                    continue
                del self._holds[index]
                held.dropped = True
                if held.begun:
                    dropped.append(held.request.request_id)
            for index in answer.accepted:
                if index in self._finished:
                    self._committed[index] = self._finished.pop(index)
            for index in (*answer.refused, *answer.in_dump):
                self._finished.pop(index, None)
                self._committed.pop(index, None)
                self._discard(index, keep_journal=index in answer.refused)
            for lease in answer.leases:
                held = self._held(lease)
                self._holds[lease.index] = held
                leased.append(held)
            for index, count in journals.items():
                held = self._holds.get(index)
                if held is not None and held.journal is not None:
                    self._later(held.journal.sent, count)
        if not answer.lost:
            self._certain_until = sent + _CERTAIN * self.setup.term
        for request_id in dropped:
            assert self._run is not None
            self._later(self._run.abort, request_id)
        for held in leased:
            self._add(held)

    def _discard(self, index: int, *, keep_journal: bool) -> None:
        assert self._results is not None
        self._results.discard(index)
        close = self._journals.pop(index, None)
        if close is not None:
            close(keep_journal)

    def _held(self, lease: Lease) -> _Held:
        payload, config = Payload.unpacked(lease.payload), self.setup.config
        request = create_request(
            payload.task,
            payload.rollout_offset,
            tool_schemas=self._tool_schemas,
            step=payload.step,
            seed=config.seed,
        )
        return _Held(lease.index, request, payload, tuple(lease.journal))

    def _add(self, held: _Held | None) -> None:
        assert self._leased is not None
        self._later(self._leased.add, held)

    def _later(self, function: Callable[..., object], *args: object) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(function, *args)
