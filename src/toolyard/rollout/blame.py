"""Whose failure it was: the one place where an exception becomes a reason."""

from __future__ import annotations

from dataclasses import dataclass

from toolyard.errors import (
    ChatError,
    ConfigError,
    DivergenceError,
    EngineError,
    InteractionError,
    ProgramError,
    RewardError,
    ToolError,
    ToolyardError,
)
from toolyard.records.trajectory import Failure
from toolyard.tools.calls import bare, in_short, trace

from .finish import FinishReason, RolloutState

OURS, TASK = "ours", "task"


@dataclass(frozen=True, slots=True)
class Broken:
    """A stage that did not come to its end."""

    reason: FinishReason
    failure: Failure


def broken(raised: BaseException, stage: RolloutState) -> Broken:
    error = bare(raised)
    reason, whose = _judged(error, stage)
    # Errors of our own tree say all there is to say; of anything else, where it happened is what helps.
    told = in_short(error) if isinstance(error, ToolyardError) else trace(raised)
    return Broken(reason, Failure(whose, stage.value, told))


def late(reason: FinishReason, stage: RolloutState, what: str) -> Broken:
    return Broken(reason, Failure(OURS, stage.value, what))


def _judged(error: BaseException, stage: RolloutState) -> tuple[FinishReason, str]:
    match error:
        case EngineError() | DivergenceError():  # the latter of a replay engine, whose tape does not go on
            return FinishReason.ENGINE_FAILURE, OURS
        case ToolError():
            return FinishReason.TOOL_FAILURE, TASK if _is_the_tasks(error.__cause__) else OURS
        case ChatError() if stage is not RolloutState.PENDING:
            return FinishReason.CANNOT_CONTINUE, OURS
        case ChatError() | ConfigError() | ProgramError():
            return FinishReason.BAD_TASK, TASK
        case RewardError():
            return FinishReason.REWARD_FAILURE, TASK
        case InteractionError():
            return FinishReason.INTERACTION_FAILURE, TASK
        case _ if stage is RolloutState.INTERACTING:
            return FinishReason.INTERACTION_FAILURE, TASK
        case _:
            return FinishReason.INTERNAL_ERROR, OURS


def _is_the_tasks(cause: BaseException | None) -> bool:
    """What a tool raised of itself, given the task's arguments."""
    return cause is not None and (not isinstance(cause, ToolyardError) or isinstance(cause, ConfigError | ProgramError))
