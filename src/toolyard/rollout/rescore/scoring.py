"""A dump scored again, offline: by another final reward, or by the same one after a mistake was mended.

    run = Rescoring("runs/a", load_reward("gsm8k:strict"), weights=weights_beside("runs/a") or Weights())
    await run.run(lambda rescored: print(rescored.trajectory.request_id, rescored.change, rescored.score))

Only the final reward is computed anew. What steps, tools and simulators gave stands in the dump, and is combined with
it as the run did. A trajectory that failed for another reason than its reward says nothing about the model, and is left
as it is. Of verl's lines, which have a score and no parts, the final reward is the score.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from os import PathLike
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from toolyard.errors import RecordError, RewardError, summarize
from toolyard.messages import JSON
from toolyard.records.dump import DumpLine, dump_files, lines_of, read_line
from toolyard.records.lines import UNKNOWN
from toolyard.records.trajectory import Tokens, Trajectory
from toolyard.rewards.combination import MISSING, Combined, Missing, Weights, combine
from toolyard.rewards.registry import FinalReward, FinalScore
from toolyard.rollout.config import SETTINGS_BESIDE_DUMP
from toolyard.rollout.finish import FinishReason, RolloutState

_AHEAD = 4
"""Lines read for each that is scored at once: a slow answer must not stop those behind it."""
_AHEAD_BYTES = 64 << 20
_NAMED = 20
"""Damaged lines that are told one by one."""
_TOOL = "tool/"


class Change(StrEnum):
    """What became of a trajectory's score."""

    UNCHANGED = "unchanged"
    UP = "up"
    DOWN = "down"
    NEWLY_SCORED = "newly scored"
    NEWLY_ABSENT = "newly absent"
    """It had a score, and now a part of it could not be computed."""
    STILL_ABSENT = "still absent"
    LEFT = "left"
    """As it is: it failed for another reason than its reward."""


class Lack(StrEnum):
    """What the reward was not told, because the line does not say it."""

    DATA_SOURCE = "data_source"
    EXTRA_INFO = "extra_info"
    MESSAGES = "messages"
    """Those of our lines: what the model said was taken from `output`, with what tools answered."""


@dataclass(frozen=True, slots=True)
class Rescored:
    """One line of the dump."""

    path: Path
    number: int
    raw: bytes
    trajectory: Trajectory
    """As the line has it, without its tokens, which are most of it."""
    change: Change
    score: float | None
    combined: Combined | None = None
    """None: verl's line, or one that was left."""
    final: FinalScore | None = None
    """None: it could not be computed, or the line was left."""
    why: str = ""
    """Why there is no score, or what the reward says about it."""


@dataclass(frozen=True, slots=True)
class _Line:
    raw: bytes
    found: DumpLine


class Rescoring:
    """One run over a dump: in its order, with bounded memory, at most `concurrency` answers at once."""

    def __init__(
        self,
        path: str | PathLike[str],
        reward: FinalReward,
        *,
        weights: Weights,
        steps: Collection[int] | None = None,
        limit: int | None = None,
        data_source: str | None = None,
        deadline_seconds: float = 60.0,
        concurrency: int = 32,
    ) -> None:
        """
        Raises:
            RecordError: there is no such dump, or nothing in it.
        """
        self.files = dump_files(path, steps=steps)
        if not self.files:
            there = "" if steps is None else f" of the steps {', '.join(map(str, sorted(steps)))}"
            raise RecordError(f"{path}: there is no <step>.jsonl{there} in it")
        self.stopped = False
        self.damaged: list[str] = []
        """Lines that are no trajectories: the first of them, and what is wrong with each."""
        self.damaged_lines = 0
        self.lacks: Counter[Lack] = Counter()
        self.unexplained = 0
        """Lines whose score is not what the weights make of its parts: they were other weights then."""
        self._reward, self._weights = reward, weights
        self._limit, self._data_source = limit, data_source
        self._deadline = deadline_seconds
        self._slots = asyncio.Semaphore(concurrency)
        self._most = concurrency * _AHEAD
        self._pending: deque[tuple[_Line, asyncio.Task[Rescored]]] = deque()
        self._held = 0

    def stop(self) -> None:
        """Soon: what is being scored is given up, what has been scored is delivered."""
        self.stopped = True
        for _, task in self._pending:
            task.cancel()

    async def run(self, ended: Callable[[Rescored], None]) -> None:
        """Score all lines; `ended` is told of each, in the dump's order.

        Raises:
            RecordError: a file cannot be read. A line that is no trajectory is only counted.
        """
        failure: Exception | None = None
        async with asyncio.TaskGroup() as group:
            try:
                for line in self._lines():
                    while len(self._pending) >= self._most or self._held > _AHEAD_BYTES:
                        await self._next(ended)
                    if self.stopped:
                        break
                    self._pending.append((line, group.create_task(self._one(line))))
                    self._held += len(line.raw)
                while self._pending:
                    await self._next(ended)
            except Exception as error:  # out of the group as it is, not in a group of one
                failure = error
                self.stop()
        if failure is not None:
            raise failure

    async def _next(self, ended: Callable[[Rescored], None]) -> None:
        line, task = self._pending[0]
        await asyncio.wait([task])
        self._pending.popleft()
        self._held -= len(line.raw)
        if not task.cancelled():
            ended(task.result())

    def _lines(self) -> Iterator[_Line]:
        count = 0
        for file in self.files:
            for number, raw in lines_of(file):
                if count == self._limit:
                    return
                try:
                    found = read_line(file, number, raw)
                except RecordError as error:
                    self.damaged_lines += 1
                    if len(self.damaged) < _NAMED:
                        self.damaged.append(str(error))
                    continue
                count += 1
                yield _Line(raw, found._replace(trajectory=replace(found.trajectory, tokens=Tokens())))

    # ------------------------------------------------------------------------------------------------------- one line
    async def _one(self, line: _Line) -> Rescored:
        trajectory = line.found.trajectory
        if not is_scorable(trajectory):
            return self._rescored(line, Change.LEFT, trajectory.score)
        scored: FinalScore | str
        try:
            async with self._slots:
                scored = await self._final(trajectory)
        except RewardError as error:
            scored = str(error)
        except Exception as error:  # a defect of a reward must not cost the other lines
            scored = summarize(error)
        final, why = (None, scored) if isinstance(scored, str) else (scored, str(scored.extras.get("why", "")))
        combined = None if is_verls(trajectory) else self._combined(trajectory, final, why)
        if combined is None:
            score = None if final is None else final.value
        else:
            score, why = combined.score, why if final is None else combined.why_missing or why
        return self._rescored(line, _change(trajectory.score, score), score, combined, final, why)

    def _rescored(self, line: _Line, change: Change, score: float | None, *rest: Any) -> Rescored:
        return Rescored(line.found.path, line.found.number, line.raw, line.found.trajectory, change, score, *rest)

    async def _final(self, trajectory: Trajectory) -> FinalScore:
        source = self._data_source or _text(trajectory.data_source) or _text(trajectory.extra.get("data_source"))
        extra_info: Any = trajectory.extra.get("extra_info")
        self.lacks[Lack.DATA_SOURCE] += source is None
        self.lacks[Lack.EXTRA_INFO] += not isinstance(extra_info, Mapping)
        self.lacks[Lack.MESSAGES] += not is_verls(trajectory) and not trajectory.turns
        return await self._reward.score(
            source or UNKNOWN,
            solution_of(trajectory),
            trajectory.ground_truth,
            cast("JSON", extra_info) if isinstance(extra_info, Mapping) else {},
            deadline_seconds=self._deadline,
        )

    def _combined(self, trajectory: Trajectory, final: FinalScore | None, why: str) -> Combined:
        before = _recombined(self._weights, trajectory, _part(trajectory, "final")).score
        self.unexplained += trajectory.score is not None and not _same(before, trajectory.score)
        reasons = {} if final is not None else {"final": why}
        return _recombined(self._weights, trajectory, None if final is None else final.value, reasons)


def is_verls(trajectory: Trajectory) -> bool:
    """A line with verl's fields alone: no messages, no parts of the score."""
    return not trajectory.messages and not trajectory.rewards and trajectory.finish_reason == UNKNOWN


def is_scorable(trajectory: Trajectory) -> bool:
    """Whether it ended so that its answer counts; also if only its reward was missing."""
    return trajectory.state == RolloutState.COMPLETED or trajectory.finish_reason == FinishReason.REWARD_FAILURE


def solution_of(trajectory: Trajectory) -> str:
    """What the model said, as the run gave it to the reward: without what tools answered. Of verl's lines, `output`."""
    turns = len(trajectory.turns)
    said = [message.content for message in trajectory.messages if message.role == "assistant"]
    # A prompt may have had messages of the assistant before them.
    return "\n".join(said[-turns:]) if 0 < turns <= len(said) else trajectory.output


def weights_beside(path: str | PathLike[str]) -> Weights | None:
    """Those that the dump was made with, if its settings lie beside it.

    Raises:
        RecordError: they do, and cannot be read.
    """
    path = Path(path)
    file = (path if path.is_dir() else path.parent) / SETTINGS_BESIDE_DUMP
    try:
        said: Any = json.loads(file.read_bytes())
        return Weights.model_validate(said["rewards"]["weights"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError, ValidationError) as error:
        what = " ".join(str(error).split())[:200]
        raise RecordError(f"{file}: it should say which weights the rewards had: {what}") from None


def _recombined(
    weights: Weights, trajectory: Trajectory, final: float | Missing | None, reasons: Mapping[str, str] | None = None
) -> Combined:
    step = _part(trajectory, "step")
    return combine(
        weights,
        final=final,
        steps={} if step is MISSING else {"": [math.nan if step is None else step]},
        tools={
            name.removeprefix(_TOOL): _number(value) for name, value in trajectory.rewards.items() if _is_tool(name)
        },
        interaction=_part(trajectory, "interaction"),
        reasons=reasons,
    )


def _part(trajectory: Trajectory, name: str) -> float | Missing | None:
    return _number(trajectory.rewards[name]) if name in trajectory.rewards else MISSING


def _is_tool(name: str) -> bool:
    return name.startswith(_TOOL)


def _number(value: Any) -> float | None:
    """Lines are checked for their shape, not for what stands in `rewards`."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value != UNKNOWN else None


def _same(one: float | None, other: float | None) -> bool:
    """Closely enough: other programs may have written fewer digits."""
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-9)


def _change(before: float | None, after: float | None) -> Change:
    if before is None:
        return Change.STILL_ABSENT if after is None else Change.NEWLY_SCORED
    if after is None:
        return Change.NEWLY_ABSENT
    return Change.UNCHANGED if _same(before, after) else Change.UP if after > before else Change.DOWN
