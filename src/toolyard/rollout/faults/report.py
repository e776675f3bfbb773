"""What was injected into a run, and how the trajectories that were hit have ended."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolyard.messages import JSON
from toolyard.records.trajectory import Trajectory
from toolyard.rollout.finish import FinishReason, RolloutState

SURVIVED, NOT_INJECTED = "survived", "not injected"


@dataclass(slots=True)
class FaultCount:
    """The faults of one kind."""

    planned: int = 0
    injected: int = 0
    """Less than planned if there was nothing left to kill."""
    survived: int = 0
    """The trajectory went on afterwards."""
    ended: Counter[str] = field(default_factory=Counter[str])
    """How the trajectories ended that did not go on: the finish reason, and whose failure it is."""


@dataclass(slots=True)
class FaultReport:
    """Updated with each trajectory. `file` gets a line per fault, before the trajectory's own line is written."""

    profile: str
    seed: int
    file: Path | None = None
    kinds: dict[str, FaultCount] = field(default_factory=dict[str, FaultCount])
    hit: int = 0
    """Trajectories with at least one fault."""
    scored_failures: list[str] = field(default_factory=list[str])
    """Requests that have a score although our infrastructure failed: never, or it is a bug."""

    def resume(self, in_dump: Collection[str]) -> None:
        """Drop lines of an earlier run for requests that are not in the dump: they are played again."""
        if self.file is None or not self.file.exists():
            return
        lines = self.file.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if _request_of(line) in {"", *in_dump}]
        new = self.file.with_suffix(".new")
        new.write_bytes(b"".join(kept))
        new.replace(self.file)

    def add(self, trajectory: Trajectory) -> None:
        found: JSON = trajectory.metrics.get("faults") or {}
        faults: list[JSON] = found.get("injected") or []
        self.hit += bool(faults)
        failure = trajectory.failure
        if failure is not None and failure.whose == "ours" and trajectory.score is not None:
            self.scored_failures.append(trajectory.request_id)
        for fault in faults:
            self._enter(trajectory.request_id, fault, _outcome(trajectory, fault), trajectory.finish_reason)

    def add_own(self, kind: str, request_id: str | None, **told: Any) -> None:
        """A fault of the run rather than of a trajectory: no trajectory fails because of it."""
        fault = {"kind": kind, "time": round(time.time(), 3), **told}
        self._enter(request_id, fault, SURVIVED, None)

    def _enter(self, request_id: str | None, fault: JSON, outcome: str, finish_reason: str | None) -> None:
        count = self.kinds.setdefault(fault["kind"], FaultCount())
        count.planned += 1
        if "failed" in fault:
            outcome = NOT_INJECTED
        elif outcome == SURVIVED:
            count.injected += 1
            count.survived += 1
        else:
            count.injected += 1
            count.ended[outcome] += 1
        if self.file is not None:
            line = {"request_id": request_id, **fault, "outcome": outcome, "finish_reason": finish_reason}
            with self.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")

    @property
    def problems(self) -> list[str]:
        named = self.scored_failures
        return [f"failures of the infrastructure have a score: {', '.join(named[:5])}"] if named else []

    def as_json(self) -> JSON:
        return {
            "profile": self.profile,
            "seed": self.seed,
            "file": None if self.file is None else str(self.file),
            "trajectories_hit": self.hit,
            "scored_failures": self.scored_failures,
            "kinds": {
                kind: {
                    "planned": count.planned,
                    "injected": count.injected,
                    "survived": count.survived,
                    "ended": dict(count.ended),
                }
                for kind, count in self.kinds.items()
            },
        }


def _request_of(line: bytes) -> str | None:
    """Empty for a fault of the run; None if the line is torn or damaged."""
    try:
        return (json.loads(line)["request_id"] or "") if line.endswith(b"\n") else None
    except (ValueError, LookupError, TypeError):
        return None


def _outcome(trajectory: Trajectory, fault: JSON) -> str:
    """Whether the trajectory ended in the stage and turn of the fault. Earlier faults were survived."""
    failure, last = trajectory.failure, len(trajectory.turns) - 1
    if trajectory.finish_reason == FinishReason.MALFORMED_CALLS:
        return "malformed_calls" if fault["kind"] == "malformed_call" and fault["turn"] == last else SURVIVED
    if failure is None:
        return SURVIVED
    sampling = fault["kind"].startswith("engine_")
    stage, turn = (RolloutState.GENERATING, last + 1) if sampling else (RolloutState.TOOL_CALLING, last)
    here = failure.stage == stage and fault["turn"] == turn
    return f"{trajectory.finish_reason} ({failure.whose})" if here else SURVIVED
