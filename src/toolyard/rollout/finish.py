"""The states of a request, and every way a request can end."""

from __future__ import annotations

from enum import StrEnum


class RolloutState(StrEnum):
    PENDING = "PENDING"
    """Its tool instances are being created and its prompt rendered."""
    GENERATING = "GENERATING"
    """The engine is sampling the assistant's next message."""
    TOOL_CALLING = "TOOL_CALLING"
    """The calls of that message are running, in parallel."""
    INTERACTING = "INTERACTING"
    """The user simulator is answering."""
    COMPLETED = "COMPLETED"
    """Ended by the model's doing or by a limit on lengths and turns: it can be scored."""
    FAILED = "FAILED"
    """Ended by something that says nothing about the model: there is no score."""

    @property
    def ended(self) -> bool:
        return self in (RolloutState.COMPLETED, RolloutState.FAILED)


class FinishReason(StrEnum):
    # Completed -------------------------------------------------------------------------------------------------------
    STOP = "stop"
    """The assistant ended a message without calls, and there is no user simulator to answer it."""
    LENGTH = "length"
    """A message was cut off at `response_length`, `max_model_len` or the sampling's `max_tokens`. Its calls are not
    executed."""
    LENGTH_BEFORE_GENERATION = "length_before_generation"
    """After tool results or a user message, no tokens were left for another assistant message."""
    TOOL_RESPONSE_TOO_LONG = "tool_response_too_long"
    """The tool results did not fit into the remaining tokens. They are in the turn's record, not the conversation."""
    MAX_ASSISTANT_TURNS = "max_assistant_turns"
    """`max_assistant_turns` messages were sampled. Calls in the last one are not executed: no turn is left to use the
    results."""
    MAX_USER_TURNS = "max_user_turns"
    """The user simulator has spoken `max_user_turns` times."""
    MALFORMED_CALLS = "malformed_calls"
    """In `max_malformed_turns` messages there were calls, but none could be parsed."""
    INTERACTION_ENDED = "interaction_ended"
    """The user simulator ended the conversation."""

    # Failed ----------------------------------------------------------------------------------------------------------
    PROMPT_TOO_LONG = "prompt_too_long"
    """The prompt is longer than `prompt_length`, or leaves no tokens of `max_model_len`. The engine was not called."""
    BAD_TASK = "bad_task"
    """The conversation cannot be rendered, or its `tools_kwargs` are invalid."""
    REQUEST_DEADLINE = "request_deadline"
    """The whole request took longer than `request_seconds`."""
    STAGE_DEADLINE = "stage_deadline"
    """One stage took longer than its limit (`generate_seconds`, `tool_seconds`, …): a hanging engine, tool or
    simulator. Not an endless loop in a program: the tool reports that to the model in time."""
    ABORTED = "aborted"
    """The request was aborted."""
    ENGINE_FAILURE = "engine_failure"
    """The engine failed after every retry, or rejected the request."""
    TOOL_FAILURE = "tool_failure"
    """A tool could not be created or was not available. An exception raised by a tool goes to the model instead."""
    INTERACTION_FAILURE = "interaction_failure"
    """The user simulator raised an exception."""
    AGENT_FAILURE = "agent_failure"
    """The agent that plays the requests (`agent`) exited with an error, or made no request."""
    IDLE = "idle"
    """A session of the gateway had no request for too long, and nobody ended it."""
    REWARD_FAILURE = "reward_failure"
    """A reward with a weight could not be computed. A score of 0 would teach the model something false."""
    CANNOT_CONTINUE = "cannot_continue"
    """The chat format cannot continue without changing sampled tokens, as with a turn that ended inside its reasoning
    in some model families."""
    TOKEN_DRIFT = "token_drift"  # noqa: S105 - not a password
    """The exact-token audit found a difference: training on it would train on something that never happened."""
    INTERNAL_ERROR = "internal_error"
    """A bug in Toolyard; the record has the traceback."""

    @property
    def state(self) -> RolloutState:
        return RolloutState.COMPLETED if self in _COMPLETED else RolloutState.FAILED


_COMPLETED = frozenset(
    {
        FinishReason.STOP,
        FinishReason.LENGTH,
        FinishReason.LENGTH_BEFORE_GENERATION,
        FinishReason.TOOL_RESPONSE_TOO_LONG,
        FinishReason.MAX_ASSISTANT_TURNS,
        FinishReason.MAX_USER_TURNS,
        FinishReason.MALFORMED_CALLS,
        FinishReason.INTERACTION_ENDED,
    }
)
