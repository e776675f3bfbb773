"""A request as a state machine: (progress, event) → (progress, effects), without any I/O.

    PENDING ──Prepared──▶ GENERATING ──TurnSampled──▶ TOOL_CALLING ──ToolsAnswered──▶ GENERATING …
                              │  ▲                                     │
                      TurnSampled │  │ UserSaid                            │
                              ▼  │                                     ▼
                          INTERACTING ──────────▶ COMPLETED or FAILED ◀┘

Every decision about a request is made here: what comes next, how much may be sampled, and why it ends. Each live state
has exactly one effect under way; its outcome is reported as the next event, or as `EffectFailed`. Events that arrive
after the end change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from toolyard.engines.protocol import Finish
from toolyard.rollout.budget import RolloutLimits
from toolyard.rollout.finish import FinishReason, RolloutState

# Events ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prepared:
    """The tool instances are created, and the prompt has this many tokens."""

    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class TurnSampled:
    """The assistant's message has been sampled."""

    tokens: int
    finish: Finish
    calls: int = 0
    malformed: int = 0


@dataclass(frozen=True, slots=True)
class ToolsAnswered:
    """All calls have ended; their results would add this many tokens."""

    tokens: int


@dataclass(frozen=True, slots=True)
class UserSaid:
    """The user simulator has answered or ended the conversation; its message would add this many tokens."""

    tokens: int
    done: bool


@dataclass(frozen=True, slots=True)
class EffectFailed:
    """The effect under way did not complete."""

    reason: FinishReason


Event: TypeAlias = Prepared | TurnSampled | ToolsAnswered | UserSaid | EffectFailed


# Effects --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prepare:
    """Create the tool instances and render the prompt."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Ask the engine for at most this many tokens."""

    max_tokens: int


@dataclass(frozen=True, slots=True)
class CallTools:
    """Execute the calls of the last message."""


@dataclass(frozen=True, slots=True)
class Interact:
    """Ask the user simulator."""


@dataclass(frozen=True, slots=True)
class Append:
    """Add the tool results or the user's message to the conversation."""


@dataclass(frozen=True, slots=True)
class Conclude:
    """Compute the rewards, release the tools, write the record. Always the last effect, exactly once."""


Effect: TypeAlias = Prepare | Sample | CallTools | Interact | Append | Conclude
BEGIN: tuple[Effect, ...] = (Prepare(),)
"""The effect under way in the first state, `Progress()`."""


# The machine ----------------------------------------------------------------------------------------------------------


class Progress(NamedTuple):
    state: RolloutState = RolloutState.PENDING
    prompt_tokens: int = 0
    response_tokens: int = 0
    assistant_turns: int = 0
    user_turns: int = 0
    malformed_turns: int = 0
    finish_reason: FinishReason | None = None

    def room(self, limits: RolloutLimits) -> int:
        """Tokens that may still be added."""
        room = limits.response_length - self.response_tokens
        if limits.max_model_len is not None:
            room = min(room, limits.max_model_len - self.prompt_tokens - self.response_tokens)
        return room


class Machine:
    """The rules of one run: its limits, and whether there is a user simulator."""

    def __init__(self, limits: RolloutLimits, *, interactive: bool = False) -> None:
        self.limits = limits
        self.interactive = interactive

    def step(self, now: Progress, event: Event) -> tuple[Progress, tuple[Effect, ...]]:
        """The next progress and effects after `event`.

        Raises:
            ValueError: the event does not belong to the state: a bug in the code that performs the effects.
        """
        if now.state.ended:
            return now, ()
        match event:
            case EffectFailed(reason):
                return _ended(now, reason)
            case Prepared(tokens) if now.state is RolloutState.PENDING:
                return self._prepared(now._replace(prompt_tokens=tokens))
            case TurnSampled() if now.state is RolloutState.GENERATING:
                return self._sampled(now, event)
            case ToolsAnswered(tokens) if now.state is RolloutState.TOOL_CALLING:
                return self._answered(now, tokens, FinishReason.TOOL_RESPONSE_TOO_LONG)
            case UserSaid(tokens, done) if now.state is RolloutState.INTERACTING:
                after = now._replace(user_turns=now.user_turns + 1)
                if done:
                    return _ended(after, FinishReason.INTERACTION_ENDED)
                return self._answered(after, tokens, FinishReason.LENGTH_BEFORE_GENERATION)
            case _:
                raise ValueError(f"{type(event).__name__} does not belong to {now.state}")

    def _prepared(self, now: Progress) -> tuple[Progress, tuple[Effect, ...]]:
        room = now.room(self.limits)
        if now.prompt_tokens > self.limits.prompt_length or room <= 0:
            return _ended(now, FinishReason.PROMPT_TOO_LONG)
        return now._replace(state=RolloutState.GENERATING), (Sample(room),)

    def _sampled(self, now: Progress, event: TurnSampled) -> tuple[Progress, tuple[Effect, ...]]:
        calling = event.calls or event.malformed
        after = Progress(
            RolloutState.TOOL_CALLING if calling else RolloutState.INTERACTING,
            now.prompt_tokens,
            now.response_tokens + event.tokens,
            now.assistant_turns + 1,
            now.user_turns,
            now.malformed_turns + (event.malformed > 0 and event.calls == 0),
        )
        reason = self._end_after(after, event)
        if reason is not None:
            return _ended(after, reason)
        return after, (CallTools() if calling else Interact(),)

    def _end_after(self, now: Progress, event: TurnSampled) -> FinishReason | None:
        """Why the request ends after this message; None if it continues."""
        if event.finish is Finish.ABORT:  # by the engine: our own aborts arrive as `EffectFailed`
            return FinishReason.ENGINE_FAILURE
        if event.finish is Finish.LENGTH:
            return FinishReason.LENGTH
        calling = event.calls or event.malformed
        if calling and now.malformed_turns >= self.limits.max_malformed_turns:
            return FinishReason.MALFORMED_CALLS
        if not calling and not self.interactive:
            return FinishReason.STOP
        if now.assistant_turns >= self.limits.max_assistant_turns:
            return FinishReason.MAX_ASSISTANT_TURNS
        if not calling and now.user_turns >= self.limits.max_user_turns:
            return FinishReason.MAX_USER_TURNS
        return None

    def _answered(self, now: Progress, tokens: int, too_long: FinishReason) -> tuple[Progress, tuple[Effect, ...]]:
        room = now.room(self.limits) - tokens
        if room < 0:
            return _ended(now, too_long)
        after = now._replace(state=RolloutState.GENERATING, response_tokens=now.response_tokens + tokens)
        if room == 0:
            after, effects = _ended(after, FinishReason.LENGTH_BEFORE_GENERATION)
            return after, (Append(), *effects)
        return after, (Append(), Sample(room))


def _ended(now: Progress, reason: FinishReason) -> tuple[Progress, tuple[Effect, ...]]:
    return now._replace(state=reason.state, finish_reason=reason), (Conclude(),)
