"""The limits of a request: turns, tokens, bytes and seconds."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveFloat, PositiveInt

from toolyard.tools.policy import Keep, KeepOrVerlName


class RolloutLimits(BaseModel):
    """The limits of one request. Lengths are in tokens of the model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_assistant_turns: PositiveInt = 8
    max_user_turns: NonNegativeInt = 8
    """Messages from the user simulator; the task's own do not count."""
    max_parallel_calls: PositiveInt = 8
    """Maximum calls per message. Further calls are answered with an error, so that the model sees the limit."""
    max_malformed_turns: PositiveInt = 3
    """Messages with calls of which none could be parsed."""
    max_tool_response_length: PositiveInt = 1024
    """Maximum length of one tool result. Longer ones are truncated, with a marker."""
    tool_response_truncate_side: KeepOrVerlName = Keep.BOTH
    """The part to keep: head, tail or both. verl's left, right and middle mean the same as in verl ≥ 0.8."""
    max_image_bytes: NonNegativeInt = 16 << 20
    """Total bytes of all images in a request. Images beyond it are hidden, and described to the model in text."""
    prompt_length: PositiveInt = 4096
    response_length: PositiveInt = 4096
    """Everything after the prompt: sampled messages, tool results and user messages."""
    max_model_len: PositiveInt | None = None
    """Prompt and response together. None: only the two limits above."""

    engine_retries: NonNegativeInt = 3
    """Retries per message, after transient failures or aborts that Toolyard did not request."""
    engine_retry_pause_seconds: PositiveFloat = 0.5
    """Pause before the first retry; it doubles with each further one."""

    request_seconds: PositiveFloat = 1800.0
    """The whole request, from its first tool instance to its last message."""
    create_seconds: PositiveFloat = 120.0
    """Creating the tool instances and starting the user simulator. Each tool has its own, shorter deadline."""
    generate_seconds: PositiveFloat = 600.0
    """One message, including retries."""
    tool_seconds: PositiveFloat = 600.0
    """All calls of one message. Each tool has its own, shorter deadline; this one catches tools that miss it."""
    interaction_seconds: PositiveFloat = 120.0
    reward_seconds: PositiveFloat = 60.0
    """The final reward."""
    grace_seconds: PositiveFloat = 5.0
    """How long a cancelled engine, simulator or reward may take to end before it is abandoned, named and counted. Tools
    have their own (`call.grace_seconds`)."""
    stuck_after_seconds: PositiveFloat = 60.0
    """The watchdog reports a request that is in one stage longer than this, unless it waits for an embedded engine that
    is at work. The request keeps running."""
