"""Whose failure it was: the one place where an exception becomes a reason."""

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

__all__ = ["OURS", "TASK", "Broken", "broken", "late"]


@dataclass(frozen=True, slots=True)
class Broken:
    """A stage that did not come to its end."""

    reason: FinishReason
    failure: Failure


def broken(raised: BaseException, stage: RolloutState) -> Broken:
    error = unwrap(raised)
    found = blame(error)
    reason, whose = _judged(error, stage)
    # Errors of our own tree say all there is to say; of anything else, where it happened is what helps.
    told = summarize(error) if isinstance(error, ToolyardError) else "".join(traceback.format_exception(raised))
    return Broken(reason, Failure(whose or found.whose, stage.value, told, found.source, found.cause))


def late(reason: FinishReason, stage: RolloutState, what: str, source: str = "", cause: str = "") -> Broken:
    return Broken(reason, Failure(OURS, stage.value, what, source, cause))


def _judged(error: BaseException, stage: RolloutState) -> tuple[FinishReason, str | None]:
    """The reason, and whose failure it is where that does not go by the error alone."""
    match error:
        case EngineError() | DivergenceError():  # the latter of a replay engine, whose tape does not go on
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
