"""The main job: play all requests of a run, dump their trajectories, and summarize them.

result = await run_rollouts(load_config("rollout.yaml"))
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from toolyard.errors import ConfigError, DivergenceError
from toolyard.messages import JSON, OpenAIFunctionToolSchema
from toolyard.records.dump import DumpWriter
from toolyard.records.lines import trajectory_of
from toolyard.records.tape import Tape, TapeWriter
from toolyard.records.trajectory import Trajectory
from toolyard.rollout.assembly import OpenedRollout, open_rollout, planned, prompt_additions, requests_of, schemas_of
from toolyard.rollout.config import RolloutConfig
from toolyard.rollout.external import ExternalCalls, RecordedCalls, ReplayedCalls
from toolyard.rollout.faults.inject import Faults
from toolyard.rollout.faults.report import FaultReport
from toolyard.rollout.faults.run import RunFaults, open_faults
from toolyard.rollout.fingerprint import check_resumed
from toolyard.rollout.finish import FinishReason, RolloutState
from toolyard.rollout.observer import Observer
from toolyard.rollout.request import AsyncRolloutRequest
from toolyard.rollout.run_many import RolloutRun
from toolyard.rollout.summary import Accounting, Groups, Summary
from toolyard.rollout.watching.setup import watched
from toolyard.supervision import Stall

if TYPE_CHECKING:
    from toolyard.records.traces.opentelemetry import TraceReport


@dataclass(slots=True)
class RolloutResult:
    summary: Summary = field(default_factory=Summary)
    accounting: Accounting = field(default_factory=Accounting)
    dump: Path | None = None
    stalls: list[Stall] = field(default_factory=list[Stall])
    """Times when the event loop was blocked."""
    traces: TraceReport | None = None
    """None if no traces were asked for."""
    faults: FaultReport | None = None
    """If faults were injected."""

    @property
    def done_before(self) -> int:
        """Requests found in the dump and not played again."""
        return self.accounting.before

    @property
    def missing(self) -> int:
        """Requests not played, because the run was stopped."""
        return len(self.accounting.missing)

    def as_json(self) -> JSON:
        return {
            "dump": None if self.dump is None else str(self.dump),
            "done_before": self.done_before,
            "missing": self.missing,
            "accounting": self.accounting.as_json(),
            "traces": None if self.traces is None else self.traces.as_json(),
            "stalls": [{"seconds": round(one.seconds, 3), "what": one.what, "line": one.line} for one in self.stalls],
            **({} if self.faults is None else {"faults": self.faults.as_json()}),
            **self.summary.as_json(),
        }


async def run_rollouts(config: RolloutConfig, observer: Observer | None = None) -> RolloutResult:
    """Play the requests of `config`. Requests already in the dump are not played again. Requests that are running when
    the run is stopped are not dumped, so the next run plays them.

    `RolloutResult.accounting` accounts for every request; call its `check` to raise if it does not add up.

    Raises:
        ToolyardError: the run could not start, the dump could not be written, or a replay differs from its tape.
    """
    result, told = RolloutResult(), observer or Observer()

    def sent(report: TraceReport) -> None:
        result.traces = report
        told.note(str(report))

    async with watched(config, told, sent) as watching:
        await _run(config, watching, result)
    return result


async def _run(config: RolloutConfig, observer: Observer, result: RolloutResult) -> None:
    _check_tapes(config)
    observer.stage("reading the tasks")
    tasks = await asyncio.to_thread(planned, config, observer.note)
    wanted = set(tasks)
    accounting = result.accounting
    accounting.planned = len(wanted)
    async with AsyncExitStack() as stack:
        tape = None
        if config.replay is not None:
            observer.stage("reading the tape")
            tape = await asyncio.to_thread(Tape.read, config.replay)
            found = _on_tape(tape, wanted, observer.note)
            accounting.missing = dict.fromkeys(wanted - found, "not on the tape")
            wanted = found
        faults = await asyncio.to_thread(open_faults, config, tape, observer.note)
        dump = None
        marks: JSON = {}
        if config.rollout_data_dir is not None:
            observer.stage("opening the dump")
            dump = await stack.enter_async_context(DumpWriter(config.rollout_data_dir))
            result.dump = dump.folder / f"{config.step}.jsonl"
            accounting.before, accepted = await asyncio.to_thread(_resumed, config, dump, wanted, tasks)
            marks = {"accepted_changes": accepted} if accepted else {}
        if faults is not None:
            result.faults = faults.report
            await asyncio.to_thread(faults.report.resume, tasks.keys() - wanted)
        if additions := prompt_additions(config):
            observer.note(f"every prompt gets {additions}")
        groups = Groups(tasks, config.n, wanted | accounting.missing.keys())
        book = _Book(config, observer, result, dump, tasks, marks, faults, groups)
        if config.cluster is None or tape is not None:
            await _play_here(book, wanted, tape, stack)
        else:
            await _play_on_cluster(book, wanted, stack)
        if dump is not None:
            await asyncio.to_thread(_recount, dump, config.step, accounting)
        if result.faults is not None:
            accounting.problems += result.faults.problems
        for repair in () if dump is None else dump.repairs:
            observer.note(str(repair))


@dataclass(slots=True)
class _Book:
    """Where the trajectories of a run are entered as they end."""

    config: RolloutConfig
    observer: Observer
    result: RolloutResult
    dump: DumpWriter | None
    tasks: Mapping[str, str]
    """Digests of the tasks, by request id."""
    marks: JSON
    """Metrics for every line."""
    faults: RunFaults | None
    groups: Groups

    def open(self) -> None:
        self.observer.opened(self.result.accounting.planned, self.result.accounting.before)
        self.observer.grouped(self.groups.total, self.groups.done)

    async def enter(self, trajectory: Trajectory, line: bytes | None = None) -> None:
        """`line`: the trajectory as it is to be written, if that is known."""
        if self.faults is not None:
            await self.faults.before_line(trajectory)
        if self.dump is not None:
            if line is None:
                marks = {"task_digest": self.tasks[trajectory.request_id], **self.marks}
                branches = tuple(replace(one, metrics={**one.metrics, **marks}) for one in trajectory.branches)
                marked = {**trajectory.metrics, **marks}
                await self.dump.write(replace(trajectory, metrics=marked, branches=branches))
            else:
                await self.dump.write_line(trajectory.step, line)
        self.result.accounting.dumped.add(trajectory.request_id)
        self.result.summary.add(trajectory)
        self.observer.ended(trajectory, self.result.summary)
        if self.groups.add(trajectory.request_id):
            self.observer.grouped(self.groups.total, self.groups.done)


async def _play_here(book: _Book, wanted: set[str], tape: Tape | None, stack: AsyncExitStack) -> None:
    config, observer, accounting = book.config, book.observer, book.result.accounting
    faults = None if book.faults is None else Faults(book.faults.profile)
    opened = await stack.enter_async_context(
        open_rollout(config, tape=tape, note=observer.note, stage=observer.stage, faults=faults)
    )
    book.open()
    run = RolloutRun(
        opened.setting,
        requests_of(config, opened.tool_schemas, wanted),
        concurrency=config.in_flight,
        external_calls_for=_external_calls_for(book, opened, tape, stack, faults),
        on_stuck=observer.stuck,
        on_stall=observer.stalled,
    )
    if book.faults is not None:
        book.faults.is_stopping = lambda: run.stopping
    async with run:
        observer.began(run)
        async for trajectory in _in_order(run, tape, wanted):
            if run.stopping and trajectory.finish_reason == FinishReason.ABORTED:
                accounting.missing[trajectory.request_id] = "stopped while it ran"
            else:
                await book.enter(trajectory)
    book.result.stalls = run.stalls
    if run.stopping:
        for request_id in wanted - run.begun:
            accounting.missing[request_id] = "stopped before it began"
    if run.deaths:
        accounting.problems.append(f"workers ended without a trajectory: {', '.join(run.deaths)}")
    accounting.close(wanted)


async def _play_on_cluster(book: _Book, wanted: set[str], stack: AsyncExitStack) -> None:
    book.observer.stage("importing Ray")
    from toolyard.rollout.cluster.run import ClusterRun, forget_journals, leftovers, offers_of, remove_work

    config, observer, accounting = book.config, book.observer, book.result.accounting
    folder = None if book.dump is None else book.dump.folder / ".cluster" / str(config.step)
    writer = None
    if config.record is not None:
        writer = stack.enter_context(TapeWriter(config.record, _tape_meta(book, await schemas_of(config))))
    book.open()
    if folder is not None:
        if book.marks:
            await asyncio.to_thread(forget_journals, folder)
        found = leftovers(folder)
        while (lines := await asyncio.to_thread(next, found, None)) is not None:
            line, *entries = lines
            trajectory = trajectory_of(line)
            if trajectory.request_id in wanted and trajectory.request_id not in accounting.dumped:
                await _enter(book, writer, trajectory, line, entries)
    left = wanted - accounting.dumped
    assert config.cluster is not None
    observer.stage("starting Ray" if config.cluster.address == "local" else "connecting to Ray")
    async with ClusterRun(
        config,
        offers_of(config, book.tasks, left),
        folder=folder,
        marks=book.marks,
        faults=book.faults and book.faults.profile,
        note=observer.note,
        tell=observer.told,
    ) as run:
        if book.faults is not None:
            book.faults.is_stopping = lambda: run.stopping
        observer.began(run)
        observer.stage("starting the workers")
        async for result in run:
            await _enter(book, writer, trajectory_of(result.line), result.line, result.entries)
            if book.faults is not None:
                book.faults.after_line(run, accounting.in_dump)
    if run.stopping:
        for request_id in left - accounting.dumped:
            accounting.missing[request_id] = "stopped before it ended"
    elif folder is not None:
        await asyncio.to_thread(remove_work, folder)
    accounting.close(wanted)


async def _enter(
    book: _Book, writer: TapeWriter | None, trajectory: Trajectory, line: bytes, entries: Sequence[bytes]
) -> None:
    if writer is not None:
        for entry in entries:
            writer.record_line(entry.rstrip(b"\n"))
    await book.enter(trajectory, line)


def _recount(dump: DumpWriter, step: int, accounting: Accounting) -> None:
    """Count the lines in the file itself: another process may have removed some."""
    expected, there = dump.expected_lines(step), dump.count_lines(step)
    if there != expected:
        accounting.problems.append(f"{dump.folder}/{step}.jsonl has {there} lines, but {expected} were written")


def _check_tapes(config: RolloutConfig) -> None:
    if config.record is not None and config.replay is not None:
        raise ConfigError("record and replay cannot be used together; choose one")
    if config.record is not None and Path(config.record).exists():
        raise ConfigError(f"record {config.record!r}: the file exists, and tapes are never overwritten; name another")


def _on_tape(tape: Tape, wanted: set[str], note: Callable[[str], None]) -> set[str]:
    """The requests that the tape can replay: the tape of a resumed or interrupted run has only some of them."""
    for text in tape.notes:
        note(text)
    found = wanted & set(tape.ended)
    if not found:
        raise DivergenceError(
            f"the tape has none of the {len(wanted)} requests: it was recorded with other tasks or another step"
        )
    if len(found) < len(wanted):
        note(f"the tape has {len(found)} of {len(wanted)} requests; the others are skipped")
    return found


def _resumed(
    config: RolloutConfig, dump: DumpWriter, wanted: set[str], tasks: Mapping[str, str]
) -> tuple[int, list[str]]:
    """Remove the requests that are already in the dump from `wanted`. Returns their number and the accepted changes.

    Raises:
        ConfigError: the dump was started with other settings or tasks.
        RecordError: a line of the dump is damaged.
    """
    found = dump.existing(config.step)
    existing = {request_id: ended for request_id, ended in found.items() if request_id in wanted}
    # A killed process may have written some branches of a session, but not the last, which has the request's id.
    sessions = {ended.session for ended in found.values() if ended.session is not None}
    if torn := sessions & wanted - existing.keys():
        dump.forget(config.step, torn)
    again = {
        request_id
        for request_id, ended in existing.items()
        if config.retry_failed and ended.state == RolloutState.FAILED
    }
    kept = {request_id: ended for request_id, ended in existing.items() if request_id not in again}
    accepted = check_resumed(config, dump.folder, kept, tasks)
    if again:
        dump.forget(config.step, again)
    wanted.difference_update(kept)
    return len(kept), accepted


def _external_calls_for(
    book: _Book, opened: OpenedRollout, tape: Tape | None, stack: AsyncExitStack, faults: Faults | None
) -> Callable[[AsyncRolloutRequest], ExternalCalls]:
    writer = None
    if tape is None and book.config.record is not None:
        writer = stack.enter_context(TapeWriter(book.config.record, _tape_meta(book, opened.tool_schemas)))

    def calls_of(request: AsyncRolloutRequest) -> ExternalCalls:
        if tape is not None:
            return ReplayedCalls(tape, request.request_id)
        return ExternalCalls() if writer is None else RecordedCalls(writer, request.request_id)

    if faults is None:
        return calls_of
    return lambda request: faults.calls(calls_of(request), request, opened.setting.speaker)


_NOT_ON_TAPE = {"record", "engine", "cluster", "logs", "metrics", "otel"}


def _tape_meta(book: _Book, tool_schemas: Sequence[OpenAIFunctionToolSchema]) -> JSON:
    return {
        "tool_schemas": [schema.model_dump(mode="json") for schema in tool_schemas],
        "config": book.config.model_dump(mode="json", exclude=_NOT_ON_TAPE),
        **({} if book.faults is None else {"faults": book.faults.profile.mark}),
    }


async def _in_order(run: RolloutRun, tape: Tape | None, wanted: set[str]) -> AsyncIterator[Trajectory]:
    """Trajectories in the order in which they end; for a replay, in the tape's order, so that its dump is identical."""
    if tape is None:
        async for trajectory in run:
            yield trajectory
        return
    early: dict[str, Trajectory] = {}
    order = iter([request_id for request_id in tape.ended if request_id in wanted])
    turn = next(order, None)
    async for trajectory in run:
        early[trajectory.request_id] = trajectory
        while turn is not None and turn in early:
            yield early.pop(turn)
            turn = next(order, None)
    for trajectory in early.values():
        yield trajectory
