"""Whose failure it was: the one place where an exception becomes a finish reason."""

from __future__ import annotations

import traceback
from dataclasses import dataclass

from toolyard.errors import (
    OURS,
    TASK,
    ChatError,
    ConfigError,
    DivergenceError,
    EngineError,
    InteractionError,
    ProgramError,
    RewardError,
    ToolError,
    ToolyardError,
    blame,
    summarize,
    unwrap,
)
from toolyard.records.trajectory import Failure
from toolyard.rollout.finish import FinishReason, RolloutState

__all__ = ["OURS", "TASK", "StageFailure", "our_failure", "stage_failure"]


@dataclass(frozen=True, slots=True)
class StageFailure:
    """A stage that did not complete, and why."""

    reason: FinishReason
    failure: Failure


def stage_failure(raised: BaseException, stage: RolloutState) -> StageFailure:
    error = unwrap(raised)
    found = blame(error)
    reason, whose = _judged(error, stage)
    # Toolyard's own errors have complete messages. For anything else, the traceback is what helps.
    told = summarize(error) if isinstance(error, ToolyardError) else "".join(traceback.format_exception(raised))
    return StageFailure(reason, Failure(whose or found.whose, stage.value, told, found.source, found.cause))


def our_failure(reason: FinishReason, stage: RolloutState, what: str, cause: str = "") -> StageFailure:
    return StageFailure(reason, Failure(OURS, stage.value, what, cause=cause))


def _judged(error: BaseException, stage: RolloutState) -> tuple[FinishReason, str | None]:
    """The finish reason, and whose failure it is where the error alone does not decide that."""
    match error:
        case EngineError() | DivergenceError():  # the latter from a replay engine whose tape has no more samples
            return FinishReason.ENGINE_FAILURE, OURS
        case ToolError():
            return FinishReason.TOOL_FAILURE, None
        case ChatError() if stage is not RolloutState.PENDING:
            return FinishReason.CANNOT_CONTINUE, OURS
        case ChatError() | ConfigError() | ProgramError():
            return FinishReason.BAD_TASK, TASK
        case RewardError():
            return FinishReason.REWARD_FAILURE, None
        case InteractionError():
            return FinishReason.INTERACTION_FAILURE, None
        case _ if stage is RolloutState.INTERACTING:
            return FinishReason.INTERACTION_FAILURE, TASK
        case _:
            return FinishReason.INTERNAL_ERROR, OURS
