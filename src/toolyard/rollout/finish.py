"""The states of a request, and every way in which one can end."""

from __future__ import annotations

from enum import StrEnum


class RolloutState(StrEnum):
    PENDING = "PENDING"
    """Its tool instances are created and its prompt is rendered."""
    GENERATING = "GENERATING"
    """The engine samples the assistant's next message."""
    TOOL_CALLING = "TOOL_CALLING"
    """The calls of that message are executed, all at once."""
    INTERACTING = "INTERACTING"
    """A user simulator answers."""
    COMPLETED = "COMPLETED"
    """It ended by something the model did, or by a limit that it knows of: it can be scored."""
    FAILED = "FAILED"
    """It ended by something that says nothing about the model: there is no score."""

    @property
    def ended(self) -> bool:
        return self in (RolloutState.COMPLETED, RolloutState.FAILED)


class FinishReason(StrEnum):
    # Completed -------------------------------------------------------------------------------------------------------
    STOP = "stop"
    """The assistant ended a message that calls nothing, and nobody was there to answer it."""
    LENGTH = "length"
    """A message was cut: `response_length`, `max_model_len` or the sampling's `max_tokens` were reached in it. Calls in
    it are not executed."""
    LENGTH_BEFORE_GENERATION = "length_before_generation"
    """After tool results or a user's message, nothing was left for another message of the assistant."""
    TOOL_RESPONSE_TOO_LONG = "tool_response_too_long"
    """The tool results did not fit into what was left. They are in the record of the turn, not in the conversation."""
    MAX_ASSISTANT_TURNS = "max_assistant_turns"
    """`max_assistant_turns` messages were sampled. The calls of the last are not executed: nobody would read them."""
    MAX_USER_TURNS = "max_user_turns"
    """The user simulator has spoken `max_user_turns` times."""
    MALFORMED_CALLS = "malformed_calls"
    """`max_malformed_turns` messages had calls, and none of them could be read."""
    INTERACTION_ENDED = "interaction_ended"
    """The user simulator had nothing more to say."""

    # Failed ----------------------------------------------------------------------------------------------------------
    PROMPT_TOO_LONG = "prompt_too_long"
    """The prompt is longer than `prompt_length`, or leaves nothing of `max_model_len`. The engine was not asked."""
    BAD_TASK = "bad_task"
    """The conversation cannot be rendered, or its `tools_kwargs` are wrong."""
    REQUEST_DEADLINE = "request_deadline"
    """The whole request took longer than `request_seconds`."""
    STAGE_DEADLINE = "stage_deadline"
    """One stage took longer than it may (`generate_seconds`, `tool_seconds`, …): a hanging engine, tool or simulator.
    Not a program that loops: that is told to the model by the tool, in time."""
    ABORTED = "aborted"
    """Somebody aborted the request."""
    ENGINE_FAILURE = "engine_failure"
    """The engine failed again after every retry, or refused the request."""
    TOOL_FAILURE = "tool_failure"
    """A tool could not be created, or was not available. What a tool raised is told to the model instead."""
    INTERACTION_FAILURE = "interaction_failure"
    """The user simulator raised."""
    REWARD_FAILURE = "reward_failure"
    """A reward that counts could not be computed. Scoring 0 instead would teach the model something false."""
    CANNOT_CONTINUE = "cannot_continue"
    """The chat format cannot say what comes next without changing what was sampled: a turn that ended within its
    reasoning, in some families."""
    TOKEN_DRIFT = "token_drift"  # noqa: S105 - not a password
    """The exact-token audit found a difference: training on it would train on something that never happened."""
    INTERNAL_ERROR = "internal_error"
    """A defect of Toolyard; the record has the traceback."""

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
