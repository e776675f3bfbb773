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

from toolyard.errors import ConfigError
from toolyard.messages import JSON
from toolyard.records.dump import DumpWriter
from toolyard.records.tape import Tape, TapeWriter
from toolyard.records.trajectory import Trajectory

from .chance import Chance, RecordingChance, ReplayedChance
from .config import RolloutConfig
from .finish import FinishReason
from .opening import count_tasks, open_rollout, requests_of
from .request import AsyncRolloutRequest
from .run_many import RolloutRun, Stuck
from .summary import Summary

_SETTINGS = "rollout.json"
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
    if config.record is not None and config.replay is not None:
        raise ConfigError("record and replay: one at a time")
    total = count_tasks(config, observer.note) * config.n
    if total == 0:
        raise ConfigError(f"tasks {config.tasks.path!r}: there are none")
    result = RolloutResult()
    async with AsyncExitStack() as stack:
        tape = None if config.replay is None else await asyncio.to_thread(Tape.read, config.replay)
        for text in () if tape is None else tape.notes:
            observer.note(text)
        dump = None
        done: frozenset[str] = frozenset()
        if config.rollout_data_dir is not None:
            dump = await stack.enter_async_context(DumpWriter(config.rollout_data_dir))
            result.dump = dump.folder / f"{config.step}.jsonl"
            done = frozenset(await asyncio.to_thread(dump.existing, config.step))
            for mended in dump.mended:
                observer.note(str(mended))
            _remember(config, dump.folder, bool(done), observer.note)
        opened = await stack.enter_async_context(open_rollout(config, tape=tape, note=observer.note))
        chance_of: Callable[[AsyncRolloutRequest], Chance] | None = None
        if config.record is not None:
            schemas = [schema.model_dump(mode="json") for schema in opened.tool_schemas]
            meta = {"tool_schemas": schemas, "config": config.model_dump(mode="json", exclude={"record", "engine"})}
            writer = stack.enter_context(TapeWriter(config.record, meta))
            chance_of = lambda request: RecordingChance(writer, request.request_id)  # noqa: E731
        elif tape is not None:
            chance_of = lambda request: ReplayedChance(tape, request.request_id)  # noqa: E731
        result.done_before = len(done)
        observer.opened(total, len(done))
        run = RolloutRun(
            opened.setting,
            requests_of(config, opened.tool_schemas, without=done),
            concurrency=config.concurrency,
            chance_of=chance_of,
            on_stuck=observer.stuck,
        )
        async with run:
            observer.began(run)
            async for trajectory in _in_order(run, tape):
                if trajectory.finish_reason == FinishReason.ABORTED:
                    continue
                if dump is not None:
                    await dump.write(trajectory)
                result.summary.add(trajectory)
                observer.ended(trajectory, result.summary)
    result.missing = total - len(done) - result.summary.trajectories
    return result


async def _in_order(run: RolloutRun, tape: Tape | None) -> AsyncIterator[Trajectory]:
    """As they end; of a replay, as they ended on the tape, so that its dump is the same to the bit."""
    if tape is None:
        async for trajectory in run:
            yield trajectory
        return
    early: dict[str, Trajectory] = {}
    order = iter(tape.ended)
    turn = next(order, None)
    async for trajectory in run:
        early[trajectory.request_id] = trajectory
        while turn is not None and turn in early:
            yield early.pop(turn)
            turn = next(order, None)
    for trajectory in early.values():
        yield trajectory


def _remember(config: RolloutConfig, folder: Path, resumed: bool, note: Callable[[str], None]) -> None:
    """Keep the settings beside the dump; tell if those that matter to its contents were others before."""
    kept = config.model_dump(
        mode="json",
        exclude={"rollout_data_dir": True, "concurrency": True, "record": True, "replay": True, "step": True}
        | {"engine": {"api_key", "urls"}},
    )
    file = folder / _SETTINGS
    if resumed and file.exists():
        before: JSON = json.loads(file.read_text())
        changed = sorted(key for key in kept.keys() | before.keys() if kept.get(key) != before.get(key))
        if changed:
            note(f"{folder} was begun with other settings of {', '.join(changed)}: its dump will hold both")
        return
    file.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n")
