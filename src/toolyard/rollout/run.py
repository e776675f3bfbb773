"""The main job: play all requests of a run, dump their trajectories, sum them up.

summary = await run_rollouts(load_config("rollout.yaml"))
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from toolyard.errors import ConfigError, DivergenceError
from toolyard.messages import JSON
from toolyard.records.dump import DumpWriter
from toolyard.records.tape import Tape, TapeWriter
from toolyard.records.trajectory import Trajectory
from toolyard.rollout.assembly import OpenedRollout, open_rollout, planned, prompt_additions, requests_of
from toolyard.rollout.chance import Chance, RecordingChance, ReplayedChance
from toolyard.rollout.config import RolloutConfig
from toolyard.rollout.fingerprint import check_resumed
from toolyard.rollout.finish import FinishReason, RolloutState
from toolyard.rollout.request import AsyncRolloutRequest
from toolyard.rollout.run_many import RolloutRun, Stuck
from toolyard.rollout.summary import Accounting, Summary
from toolyard.supervision import Stall


class Observer:
    """Who watches a run. Inherit, and override what is of interest; all of it is called in the run's event loop."""

    def note(self, text: str) -> None:
        """Something that is worth a line: a model is fetched, rows are skipped."""

    def opened(self, total: int, done: int) -> None:
        """The run is about to begin: `total` requests, of which `done` were found in the dump."""

    def began(self, run: RolloutRun) -> None:
        """It can be looked at, and stopped."""

    def ended(self, trajectory: Trajectory, summary: Summary) -> None:
        """One more."""

    def stuck(self, stuck: Stuck) -> None:
        """A request has been in one stage for long."""

    def stalled(self, stall: Stall) -> None:
        """The event loop stands still. Called in another thread: nothing else could be called then."""


@dataclass(slots=True)
class RolloutResult:
    summary: Summary = field(default_factory=Summary)
    accounting: Accounting = field(default_factory=Accounting)
    dump: Path | None = None
    stalls: list[Stall] = field(default_factory=list[Stall])
    """Times when the event loop stood still."""

    @property
    def done_before(self) -> int:
        """Found in the dump, and not played again."""
        return self.accounting.before

    @property
    def missing(self) -> int:
        """Not played, because the run was stopped."""
        return len(self.accounting.missing)

    def as_json(self) -> JSON:
        return {
            "dump": None if self.dump is None else str(self.dump),
            "done_before": self.done_before,
            "missing": self.missing,
            "accounting": self.accounting.as_json(),
            "stalls": [{"seconds": round(one.seconds, 3), "what": one.what, "line": one.line} for one in self.stalls],
            **self.summary.as_json(),
        }


async def run_rollouts(config: RolloutConfig, observer: Observer | None = None) -> RolloutResult:
    """Play what `config` asks for. Requests that the dump has already are not played again; those that ran when the
    run was stopped are not dumped, so that they are played by the next run.

    At its end the run accounts for every request: `RolloutResult.accounting`; call its `check` to have it raise.

    Raises:
        ToolyardError: the run could not begin, the dump not be written, or a replay differs from its tape.
    """
    observer = observer or Observer()
    _check_tapes(config)
    tasks = await asyncio.to_thread(planned, config, observer.note)
    wanted = set(tasks)
    result = RolloutResult()
    books = result.accounting
    books.planned = len(wanted)
    async with AsyncExitStack() as stack:
        tape = None if config.replay is None else await asyncio.to_thread(Tape.read, config.replay)
        if tape is not None:
            found = _on_tape(tape, wanted, observer.note)
            books.missing = dict.fromkeys(wanted - found, "not on the tape")
            wanted = found
        dump = None
        marks: JSON = {}
        if config.rollout_data_dir is not None:
            dump = await stack.enter_async_context(DumpWriter(config.rollout_data_dir))
            result.dump = dump.folder / f"{config.step}.jsonl"
            books.before, accepted = await asyncio.to_thread(_resumed, config, dump, wanted, tasks)
            marks = {"accepted_changes": accepted} if accepted else {}
        opened = await stack.enter_async_context(open_rollout(config, tape=tape, note=observer.note))
        if additions := prompt_additions(config):
            observer.note(f"every prompt gets {additions}")
        observer.opened(books.planned, books.before)
        run = RolloutRun(
            opened.setting,
            requests_of(config, opened.tool_schemas, wanted),
            concurrency=config.in_flight,
            chance_of=_chance_of(config, opened, tape, stack),
            on_stuck=observer.stuck,
            on_stall=observer.stalled,
        )
        async with run:
            observer.began(run)
            async for trajectory in _in_order(run, tape, wanted):
                if run.stopping and trajectory.finish_reason == FinishReason.ABORTED:
                    books.missing[trajectory.request_id] = "stopped while it ran"
                    continue
                if dump is not None:
                    kept = {**trajectory.metrics, "task_digest": tasks[trajectory.request_id], **marks}
                    await dump.write(replace(trajectory, metrics=kept))
                books.dumped.add(trajectory.request_id)
                result.summary.add(trajectory)
                observer.ended(trajectory, result.summary)
        _close(result, run, wanted)
        if dump is not None:
            await asyncio.to_thread(_recount, dump, config.step, books)
        for mended in () if dump is None else dump.mended:
            observer.note(str(mended))
    return result


def _close(result: RolloutResult, run: RolloutRun, wanted: set[str]) -> None:
    books, result.stalls = result.accounting, run.stalls
    if run.stopping:
        for request_id in wanted - run.begun:
            books.missing[request_id] = "stopped before it began"
    if run.deaths:
        books.problems.append(f"workers ended without a trajectory: {', '.join(run.deaths)}")
    books.close(wanted)


def _recount(dump: DumpWriter, step: int, books: Accounting) -> None:
    """Look at the file itself: what was written may have been taken away by somebody else."""
    expected, there = dump.expected_lines(step), dump.count_lines(step)
    if there != expected:
        books.problems.append(f"{dump.folder}/{step}.jsonl has {there} lines, and {expected} were written")


def _check_tapes(config: RolloutConfig) -> None:
    if config.record is not None and config.replay is not None:
        raise ConfigError("record and replay: one at a time")
    if config.record is not None and Path(config.record).exists():
        raise ConfigError(f"record {config.record!r}: it exists, and a tape is never written over")


def _on_tape(tape: Tape, wanted: set[str], note: Callable[[str], None]) -> set[str]:
    """Those that can be played again: a run that was resumed or interrupted has only some of them on its tape."""
    for text in tape.notes:
        note(text)
    found = wanted & set(tape.ended)
    if not found:
        raise DivergenceError(f"the tape has none of the {len(wanted)} requests: it is of other tasks, or another step")
    if len(found) < len(wanted):
        note(f"the tape has {len(found)} of {len(wanted)} requests; the others are left out")
    return found


def _resumed(
    config: RolloutConfig, dump: DumpWriter, wanted: set[str], tasks: Mapping[str, str]
) -> tuple[int, list[str]]:
    """Take those that the dump has already out of `wanted`. How many they are, and which changes were accepted.

    Raises:
        ConfigError: the dump was begun with something else.
        RecordError: a line of it is damaged.
    """
    existing = {request_id: ended for request_id, ended in dump.existing(config.step).items() if request_id in wanted}
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


def _chance_of(
    config: RolloutConfig, opened: OpenedRollout, tape: Tape | None, stack: AsyncExitStack
) -> Callable[[AsyncRolloutRequest], Chance] | None:
    if tape is not None:
        return lambda request: ReplayedChance(tape, request.request_id)
    if config.record is None:
        return None
    meta = {
        "tool_schemas": [schema.model_dump(mode="json") for schema in opened.tool_schemas],
        "config": config.model_dump(mode="json", exclude={"record", "engine"}),
    }
    writer = stack.enter_context(TapeWriter(config.record, meta))
    return lambda request: RecordingChance(writer, request.request_id)


async def _in_order(run: RolloutRun, tape: Tape | None, wanted: set[str]) -> AsyncIterator[Trajectory]:
    """As they end; of a replay, as they ended on the tape, so that its dump is the same to the bit."""
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
