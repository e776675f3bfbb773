"""The main job: play all requests of a run, dump their trajectories, sum them up.

summary = await run_rollouts(load_config("rollout.yaml"))
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from toolyard.errors import ConfigError, DivergenceError
from toolyard.messages import JSON
from toolyard.records.dump import DumpWriter
from toolyard.records.tape import Tape, TapeWriter
from toolyard.records.trajectory import Trajectory

from .chance import Chance, RecordingChance, ReplayedChance
from .config import SETTINGS_BESIDE_DUMP, RolloutConfig
from .finish import FinishReason, RolloutState
from .opening import OpenedRollout, open_rollout, planned, requests_of
from .request import AsyncRolloutRequest
from .run_many import RolloutRun, Stuck
from .summary import Summary

"""Beside the dump: the settings it was made with."""


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


@dataclass(slots=True)
class RolloutResult:
    summary: Summary = field(default_factory=Summary)
    dump: Path | None = None
    done_before: int = 0
    """Found in the dump, and not played again."""
    missing: int = 0
    """Not played, because the run was stopped."""

    def as_json(self) -> JSON:
        return {
            "dump": None if self.dump is None else str(self.dump),
            "done_before": self.done_before,
            "missing": self.missing,
            **self.summary.as_json(),
        }


async def run_rollouts(config: RolloutConfig, observer: Observer | None = None) -> RolloutResult:
    """Play what `config` asks for. Requests that the dump has already are not played again; aborted ones are not
    dumped, so that they are played by the next run.

    Raises:
        ToolyardError: the run could not begin, the dump not be written, or a replay differs from its tape.
    """
    observer = observer or Observer()
    _check_tapes(config)
    wanted = await asyncio.to_thread(planned, config, observer.note)
    result = RolloutResult()
    async with AsyncExitStack() as stack:
        tape = None if config.replay is None else await asyncio.to_thread(Tape.read, config.replay)
        if tape is not None:
            wanted = _on_tape(tape, wanted, observer.note)
        dump = None
        if config.rollout_data_dir is not None:
            dump = await stack.enter_async_context(DumpWriter(config.rollout_data_dir))
            result.dump = dump.folder / f"{config.step}.jsonl"
            result.done_before = await asyncio.to_thread(_done, config, dump, wanted)
            _remember(config, dump.folder, observer.note)
        opened = await stack.enter_async_context(open_rollout(config, tape=tape, note=observer.note))
        observer.opened(len(wanted) + result.done_before, result.done_before)
        run = RolloutRun(
            opened.setting,
            requests_of(config, opened.tool_schemas, wanted),
            concurrency=config.in_flight,
            chance_of=_chance_of(config, opened, tape, stack),
            on_stuck=observer.stuck,
        )
        async with run:
            observer.began(run)
            async for trajectory in _in_order(run, tape, wanted):
                if trajectory.finish_reason == FinishReason.ABORTED:
                    continue
                if dump is not None:
                    await dump.write(trajectory)
                result.summary.add(trajectory)
                observer.ended(trajectory, result.summary)
        for mended in () if dump is None else dump.mended:
            observer.note(str(mended))
    result.missing = len(wanted) - result.summary.trajectories
    return result


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


def _done(config: RolloutConfig, dump: DumpWriter, wanted: set[str]) -> int:
    """Take those that the dump has already out of `wanted`; how many they are."""
    existing = {request_id: ended for request_id, ended in dump.existing(config.step).items() if request_id in wanted}
    if config.retry_failed:
        again = {request_id for request_id, ended in existing.items() if ended.state == RolloutState.FAILED}
        dump.forget(config.step, again)
        for request_id in again:
            del existing[request_id]
    wanted.difference_update(existing)
    return len(existing)


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


def _remember(config: RolloutConfig, folder: Path, note: Callable[[str], None]) -> None:
    """Keep the settings beside the dump; tell if those that matter to its contents were others before."""
    unimportant = {"rollout_data_dir", "concurrency", "record", "replay", "retry_failed", "step", "n"}
    kept = config.model_dump(mode="json", exclude=unimportant)
    del kept["engine"]["api_key"], kept["engine"]["urls"]
    file = folder / SETTINGS_BESIDE_DUMP
    try:
        before: JSON = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # there is none, or half of one
        new = file.with_suffix(".new")
        new.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        new.replace(file)
        return
    changed = sorted(key for key in kept.keys() | before.keys() if kept.get(key) != before.get(key))
    if changed:
        note(f"{folder} was begun with other settings of {', '.join(changed)}: its dumps will hold both")
