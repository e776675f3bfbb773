"""Scores a dump again, offline: with another final reward, or with the same one after a fix.

    run = Rescoring("runs/a", load_reward("gsm8k:strict"), weights=weights_beside("runs/a") or Weights())
    await run.run(lambda rescored: print(rescored.trajectory.request_id, rescored.change, rescored.score))

Only the final reward is recomputed. Rewards of steps, tools and simulators are read from the dump and combined with it
as in the run. A trajectory that failed for a reason other than its reward says nothing about the model, and is left
unchanged. In verl's lines, which have a score without parts, the final reward is the score.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from os import PathLike
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from toolyard.errors import RecordError, RewardError, summarize
from toolyard.messages import JSON, Message
from toolyard.records.dump import DumpLine, dump_files, lines_of, not_a_dump, read_line
from toolyard.records.lines import UNKNOWN
from toolyard.records.trajectory import Tokens, Trajectory
from toolyard.rewards.combination import MISSING, Combined, Missing, Weights, combine, reward_details
from toolyard.rewards.explanation import explanation_in
from toolyard.rewards.protocol import with_prompt
from toolyard.rewards.registry import FinalReward, FinalScore
from toolyard.rollout.config import SETTINGS_BESIDE_DUMP
from toolyard.rollout.finish import FinishReason, RolloutState

_AHEAD = 4
"""Lines read ahead per concurrent scoring: a slow one must not hold up those behind it."""
_AHEAD_BYTES = 64 << 20
_NAMED = 20
"""Maximum number of damaged lines listed individually."""
_TOOL = "tool/"


class Change(StrEnum):
    """How a trajectory's score changed."""

    UNCHANGED = "unchanged"
    UP = "up"
    DOWN = "down"
    NEWLY_SCORED = "newly scored"
    NEWLY_ABSENT = "newly absent"
    """It had a score, but now a part of it could not be computed."""
    STILL_ABSENT = "still absent"
    LEFT = "left"
    """Left unchanged: it failed for a reason other than its reward."""


class MissingInput(StrEnum):
    """An input that the reward did not get, because the line does not have it."""

    DATA_SOURCE = "data_source"
    EXTRA_INFO = "extra_info"
    MESSAGES = "messages"
    """Toolyard's lines only: the solution was taken from `output`, which includes tool results."""


@dataclass(frozen=True, slots=True)
class Rescored:
    """One line of the dump."""

    path: Path
    number: int
    raw: bytes
    trajectory: Trajectory
    """The line's trajectory without its tokens, which are most of its size."""
    change: Change
    score: float | None
    combined: Combined | None = None
    """None for verl's lines and for lines left unchanged."""
    final: FinalScore | None = None
    """None if it could not be computed, or the line was left unchanged."""
    why: str = ""
    """Why there is no score, or the reward's explanation of it."""
    details: Mapping[str, JSON] = field(default_factory=dict[str, JSON])
    """`Trajectory.reward_details` with the new final reward and the new weights."""


@dataclass(frozen=True, slots=True)
class _Line:
    raw: bytes
    found: DumpLine


class Rescoring:
    """One pass over a dump: in its order, with bounded memory, scoring at most `concurrency` lines at once."""

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
            RecordError: the dump does not exist or is empty.
        """
        self.files = dump_files(path, steps=steps)
        if not self.files:
            if steps is None:
                raise RecordError(not_a_dump(path))
            raise RecordError(f"{path} has no <step>.jsonl for steps {', '.join(map(str, sorted(steps)))}")
        self.stopped = False
        self.damaged: list[str] = []
        """The first lines that are not trajectories, with the reason for each."""
        self.damaged_lines = 0
        self.missing_inputs: Counter[MissingInput] = Counter()
        self.unexplained = 0
        """Lines whose score differs from the weighted sum of its parts: the run used other weights."""
        self._reward, self._weights = reward, weights
        self._limit, self._data_source = limit, data_source
        self._deadline = deadline_seconds
        self._slots = asyncio.Semaphore(concurrency)
        self._most = concurrency * _AHEAD
        self._pending: deque[tuple[_Line, asyncio.Task[Rescored]]] = deque()
        self._held = 0

    def stop(self) -> None:
        """Stop soon: lines already scored are delivered, the others are dropped."""
        self.stopped = True
        for _, task in self._pending:
            task.cancel()

    async def run(self, ended: Callable[[Rescored], None]) -> None:
        """Score all lines and call `ended` for each, in the dump's order.

        Raises:
            RecordError: a file cannot be read. A line that is not a trajectory is only counted.
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
            except Exception as error:  # raised bare, not in an exception group of one
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
        except Exception as error:  # a bug in a reward must not affect the other lines
            scored = summarize(error)
        final, why = (None, scored) if isinstance(scored, str) else (scored, _reason(scored))
        if is_verl_line(trajectory):
            score = None if final is None else final.value
            return self._rescored(line, _change(trajectory.score, score), score, None, final, why)
        combined = self._combined(trajectory, final, why)
        details = self._details(trajectory, combined, final, why)
        score, why = combined.score, why if final is None else combined.why_missing or why
        return self._rescored(line, _change(trajectory.score, score), score, combined, final, why, details)

    def _rescored(self, line: _Line, change: Change, score: float | None, *rest: Any) -> Rescored:
        return Rescored(line.found.path, line.found.number, line.raw, line.found.trajectory, change, score, *rest)

    async def _final(self, trajectory: Trajectory) -> FinalScore:
        source = self._data_source or _text(trajectory.data_source) or _text(trajectory.extra.get("data_source"))
        extra_info: Any = trajectory.extra.get("extra_info")
        self.missing_inputs[MissingInput.DATA_SOURCE] += source is None
        self.missing_inputs[MissingInput.EXTRA_INFO] += not isinstance(extra_info, Mapping)
        self.missing_inputs[MissingInput.MESSAGES] += not is_verl_line(trajectory) and not trajectory.turns
        return await self._reward.score(
            source or UNKNOWN,
            solution_of(trajectory),
            trajectory.ground_truth,
            with_prompt(
                self._reward,
                cast("JSON", extra_info) if isinstance(extra_info, Mapping) else {},
                prompt_of(trajectory) or trajectory.input,
            ),
            deadline_seconds=self._deadline,
        )

    def _combined(self, trajectory: Trajectory, final: FinalScore | None, why: str) -> Combined:
        before = _recombined(self._weights, trajectory, _part(trajectory, "final")).score
        self.unexplained += trajectory.score is not None and not _same(before, trajectory.score)
        reasons = {} if final is not None else {"final": why}
        return _recombined(self._weights, trajectory, None if final is None else final.value, reasons)

    def _details(
        self, trajectory: Trajectory, combined: Combined, final: FinalScore | None, why: str
    ) -> dict[str, JSON]:
        said = {part: explanation_in(detail) for part, detail in trajectory.reward_details.items()}
        said["final"] = None if final is None else final.explanation
        return reward_details(self._weights, combined.parts, said, {"final": why})


def is_verl_line(trajectory: Trajectory) -> bool:
    """Whether the line has only verl's fields: no messages, no parts of the score."""
    return not trajectory.messages and not trajectory.rewards and trajectory.finish_reason == UNKNOWN


def is_scorable(trajectory: Trajectory) -> bool:
    """Whether it completed, or failed only because of its reward."""
    return trajectory.state == RolloutState.COMPLETED or trajectory.finish_reason == FinishReason.REWARD_FAILURE


def solution_of(trajectory: Trajectory) -> str:
    """The model's messages without tool results, as the run gave them to the reward. For verl's lines, `output`."""
    turns = len(trajectory.turns)
    said = [message.content for message in trajectory.messages if message.role == "assistant"]
    # The prompt may contain assistant messages too.
    return "\n".join(said[-turns:]) if 0 < turns <= len(said) else trajectory.output


def prompt_of(trajectory: Trajectory) -> list[Message]:
    """The messages before the first sampled one; none if the line has no turns."""
    said = [at for at, message in enumerate(trajectory.messages) if message.role == "assistant"]
    turns = len(trajectory.turns)
    return list(trajectory.messages[: said[-turns]]) if 0 < turns <= len(said) else []


def weights_beside(path: str | PathLike[str]) -> Weights | None:
    """The weights the dump was made with; None if its folder has no settings file.

    Raises:
        RecordError: the settings file cannot be read.
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
        raise RecordError(f"{file}: cannot read the weights of the rewards: {what}") from None


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
    """Lines are checked for their shape, not for the values in `rewards`."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _reason(scored: FinalScore) -> str:
    return (scored.explanation and scored.explanation.reason) or ""


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value != UNKNOWN else None


def _same(one: float | None, other: float | None) -> bool:
    """Approximately equal: other programs may have written fewer digits."""
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-9)


def _change(before: float | None, after: float | None) -> Change:
    if before is None:
        return Change.STILL_ABSENT if after is None else Change.NEWLY_SCORED
    if after is None:
        return Change.NEWLY_ABSENT
    return Change.UNCHANGED if _same(before, after) else Change.UP if after > before else Change.DOWN
