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
    if not branches:
        return []
    main = branches[-1]
    told = _FAILURES.get(end)
    failure = None if told is None else Failure(TASK, "GENERATING", told.format(idle=session.limits.idle_seconds))
    whole = Trajectory(
        request_id=session.id,
        batch_data_id=session.task.task or session.id,
        rollout_offset=session.task.sample,
        state="COMPLETED" if failure is None else "FAILED",
        finish_reason=end.value,
        input=main.prompt_text,
        output=main.response_text,
        ground_truth=session.task.ground_truth,
        score=score if failure is None else None,
        step=session.task.step,
        messages=main.messages,
        tokens=main.tokens,
        turns=main.turns,
        rewards=dict(rewards or ({} if score is None else {"final": score})) if failure is None else {},
        metrics={"session": {**session.counts.as_json(), **(metadata or {})}},
        data_source=session.task.data_source,
        failure=failure,
        started_at=round(session.started_at, 6),
    )
    count = len(branches)
    return [audited(with_branch(whole, branch, session.id, at, count)) for at, branch in enumerate(branches)]


def with_branch(whole: Trajectory, branch: Branch, session_id: str, index: int, count: int) -> Trajectory:
    """The trajectory of one of a session's `count` branches: its own tokens, and everything else of `whole`. The main
    one, which is the last, has the session's id."""
    place: JSON = {
        "session": session_id,
        "index": index,
        "of": count,
        "shared_turns": branch.shared_turns,
        "shared_tokens": branch.shared_tokens,
        **({"why": branch.why} if branch.why else {}),
    }
    own = {
        "turns": len(branch.turns),
        "prompt_tokens": len(branch.tokens.prompt_ids),
        "response_tokens": len(branch.tokens.response_ids),
        "sampled_tokens": sum(branch.tokens.response_mask),
        "branch": place,
    }
    return replace(
        whole,
        request_id=session_id if index == count - 1 else f"{session_id}{BRANCH}{index}",
        input=branch.prompt_text,
        output=branch.response_text,
        messages=branch.messages,
        tokens=branch.tokens,
        turns=branch.turns,
        metrics={**whole.metrics, **own},
    )


def audited(trajectory: Trajectory) -> Trajectory:
    """The trajectory, FAILED if it does not pass the exact-token audit."""
    problems = audit(trajectory)
    if not problems:
        return trajectory
    told = "; ".join(map(str, problems[:3]))
    return replace(
        trajectory, state="FAILED", finish_reason="token_drift", score=None, failure=Failure(OURS, "COMPLETED", told)
    )
