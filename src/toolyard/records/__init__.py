"""Records of a run: trajectories, dumps, tapes, and the exact-token audit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolyard._lazy import exports

if TYPE_CHECKING:
    from toolyard.records.audit import Problem, ProblemKind
    from toolyard.records.dump import DumpWriter, read_dump
    from toolyard.records.follower import follow
    from toolyard.records.tape import Tape, TapeWriter
    from toolyard.records.trajectory import CallRecord, Failure, Sampled, Tokens, Trajectory, Turn

__all__ = [
    "CallRecord",
    "DumpWriter",
    "Failure",
    "Problem",
    "ProblemKind",
    "Sampled",
    "Tape",
    "TapeWriter",
    "Tokens",
    "Trajectory",
    "Turn",
    "follow",
    "read_dump",
]

__getattr__, __dir__ = exports(
    __name__,
    {
        "toolyard.records.audit": "Problem ProblemKind",
        "toolyard.records.dump": "DumpWriter read_dump",
        "toolyard.records.follower": "follow",
        "toolyard.records.tape": "Tape TapeWriter",
        "toolyard.records.trajectory": "CallRecord Failure Sampled Tokens Trajectory Turn",
    },
)
