"""A session as trajectories of a dump: one for each branch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from toolyard.chat.protocol import ChatFormat
from toolyard.errors import OURS, TASK
from toolyard.gateway.branches import Branch
from toolyard.gateway.sessions import Session, SessionEnd
from toolyard.messages import JSON
from toolyard.records.audit import audit
from toolyard.records.trajectory import BRANCH, Failure, Trajectory

_FAILURES = {
    SessionEnd.IDLE: "no request came for {idle:g} s; the session was ended without a score",
    SessionEnd.ABORTED: "the gateway was stopped before the session was ended",
    SessionEnd.MAX_SECONDS: "the session reached its time limit",
}
"""Ends that say nothing about the model."""


def trajectories_of(
    session: Session,
    end: SessionEnd,
    chat: ChatFormat,
    *,
    score: float | None = None,
    rewards: Mapping[str, float] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> list[Trajectory]:
    """One trajectory for each branch; the last is the main one and has the session's id. A session without a delivered
    turn has none.

    A branch that does not pass the audit is FAILED, with the first difference.
    """
    branches = session.branches(chat)
    told = _FAILURES.get(end)
    failure = None if told is None else Failure(TASK, "GENERATING", told.format(idle=session.limits.idle_seconds))
    found: list[Trajectory] = []
    for index, branch in enumerate(branches):
        trajectory = Trajectory(
            request_id=branch_id(session.id, index, len(branches)),
            batch_data_id=session.task.task or session.id,
            rollout_offset=session.task.sample,
            state="COMPLETED" if failure is None else "FAILED",
            finish_reason=end.value,
            input=branch.prompt_text,
            output=branch.response_text,
            ground_truth=session.task.ground_truth,
            score=score if failure is None else None,
            step=session.task.step,
            messages=branch.messages,
            tokens=branch.tokens,
            turns=branch.turns,
            rewards=dict(rewards or ({} if score is None else {"final": score})) if failure is None else {},
            metrics={
                "turns": len(branch.turns),
                "prompt_tokens": len(branch.tokens.prompt_ids),
                "response_tokens": len(branch.tokens.response_ids),
                "sampled_tokens": sum(branch.tokens.response_mask),
                "session": {**session.counts.as_json(), **(metadata or {})},
                "branch": branch_metrics(branch, session.id, index, len(branches)),
            },
            data_source=session.task.data_source,
            failure=failure,
            started_at=round(session.started_at, 6),
        )
        found.append(audited(trajectory))
    return found


def branch_id(session_id: str, index: int, count: int) -> str:
    """The request id of a branch: the session's for the main one, which is the last."""
    return session_id if index == count - 1 else f"{session_id}{BRANCH}{index}"


def branch_metrics(branch: Branch, session_id: str, index: int, count: int) -> JSON:
    """What a reader of the dump needs to put a session together again."""
    return {
        "session": session_id,
        "index": index,
        "of": count,
        "shared_turns": branch.shared_turns,
        "shared_tokens": branch.shared_tokens,
        **({"why": branch.why} if branch.why else {}),
    }


def audited(trajectory: Trajectory) -> Trajectory:
    """The trajectory, FAILED if it does not pass the exact-token audit."""
    problems = audit(trajectory)
    if not problems:
        return trajectory
    told = "; ".join(map(str, problems[:3]))
    return replace(
        trajectory, state="FAILED", finish_reason="token_drift", score=None, failure=Failure(OURS, "COMPLETED", told)
    )
