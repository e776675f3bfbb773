"""How far a request may go."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveFloat, PositiveInt

from toolyard.tools.policy import Keep, KeepOrVerlName


class RolloutLimits(BaseModel):
    """Lengths are tokens of the model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_assistant_turns: PositiveInt = 8
    max_user_turns: NonNegativeInt = 8
    """Messages of the user simulator; those of the task do not count."""
    max_parallel_calls: PositiveInt = 8
    """Of one message. Calls beyond it are answered with an error, so that the model learns of it."""
    max_malformed_turns: PositiveInt = 3
    """Messages in which no call could be read."""
    max_tool_response_length: PositiveInt = 1024
    """Of one result. Longer ones are cut, and the cut is marked."""
    tool_response_truncate_side: KeepOrVerlName = Keep.BOTH
    """What is kept: head, tail or both. verl's left, right and middle are understood as verl ≥ 0.8 does."""
    max_image_bytes: NonNegativeInt = 16 << 20
    """Of all images of a request together, in bytes. Those for which there is no room are hidden: the model is told of
    them in words."""
    prompt_length: PositiveInt = 4096
    response_length: PositiveInt = 4096
    """Of everything after the prompt: sampled messages, tool results and users' messages."""
    max_model_len: PositiveInt | None = None
    """Of prompt and response together; None: no other limit than those two."""

    engine_retries: NonNegativeInt = 3
    """Of one message, after failures that may pass, or aborts that nobody here asked for."""
    engine_retry_pause_seconds: PositiveFloat = 0.5
    """Before the first retry; twice as long before each next one."""

    request_seconds: PositiveFloat = 1800.0
    """The whole request, from its first tool instance to its last message."""
    create_seconds: PositiveFloat = 120.0
    """The tools' instances and the user simulator's start. A tool has its own deadline for it, which is shorter."""
    generate_seconds: PositiveFloat = 600.0
    """One message, retries included."""
    tool_seconds: PositiveFloat = 600.0
    """All calls of one message. A tool's own deadline is shorter: this one is for tools that do not keep it."""
    interaction_seconds: PositiveFloat = 120.0
    reward_seconds: PositiveFloat = 60.0
    """The final reward."""
    grace_seconds: PositiveFloat = 5.0
    """How long an engine, a simulator or a reward that is cancelled may take to end. Then it is abandoned, named and
    counted. Tools have their own (`call.grace_seconds`)."""
    stuck_after_seconds: PositiveFloat = 60.0
    """A request longer than this in one stage is named by the watchdog; nothing happens to it."""
