"""Trajectories as conversations to imitate, or the reason why one is not a good example.

A conversation is what a chat template can render: messages with calls as objects. What the model wrote and a template
would not write again, such as half a message or a call that could not be read, cannot be said in this form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from toolyard.messages import JSON, Message, decode_arguments
from toolyard.records.trajectory import Trajectory
from toolyard.rollout.finish import RolloutState
from toolyard.rollout.rescore.scoring import prompt_of
from toolyard.train.samples import TRUNCATED


class LeftOut(StrEnum):
    """Why a trajectory is not exported. If several reasons apply, the first in this order is given."""

    DAMAGED = "damaged"
    """The line is damaged, or was changed after it was indexed."""
    BRANCH = "other branch"
    """An agent's session has a main branch, which is exported."""
    FAILED = "failed"
    """Its engine, a tool, a deadline or its task failed."""
    NO_SCORE = "no score"
    """Nobody knows whether it is a good example."""
    NO_MESSAGES = "no messages"
    """The line has only text, as verl's and TRL's have."""
    TRUNCATED = "truncated"
    """A limit ended it before the model was done: a template would end the message as if it were complete."""
    UNANSWERED = "no last answer"
    """It does not end with a message of the model."""
    MALFORMED_CALL = "malformed call"
    """A call could not be read, or its arguments are not a JSON object."""
    IMAGES = "images"
    """It contains images."""
    FAULTS = "faults"
    """Faults were injected into it: see `toolyard rollout --faults`."""
    DUPLICATE = "duplicate"
    """Another conversation has the same messages."""
    NOT_EXACT = "not exact"
    """The template does not render it to the tokens that were sampled."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of a trajectory; the completion begins with the first sampled one."""

    trajectory: Trajectory
    prompt: Sequence[Message]
    completion: Sequence[Message]

    @property
    def messages(self) -> list[Message]:
        return [*self.prompt, *self.completion]

    @property
    def has_calls(self) -> bool:
        return any(message.tool_calls for message in self.messages)


def conversation_of(trajectory: Trajectory) -> Conversation | LeftOut:
    """The conversation, or the reason to leave it out."""
    prompt = prompt_of(trajectory)
    completion = trajectory.messages[len(prompt) :]
    marked: JSON = trajectory.metrics.get("faults") or {}
    reasons = {
        LeftOut.FAILED: trajectory.state != RolloutState.COMPLETED,
        LeftOut.NO_SCORE: trajectory.score is None,
        LeftOut.NO_MESSAGES: not prompt or not completion,
        LeftOut.TRUNCATED: trajectory.finish_reason in TRUNCATED,
        LeftOut.UNANSWERED: not completion or completion[-1].role != "assistant" or bool(completion[-1].tool_calls),
        LeftOut.MALFORMED_CALL: _has_malformed_call(trajectory, completion),
        LeftOut.IMAGES: any(message.images for message in trajectory.messages),
        LeftOut.FAULTS: bool(marked.get("injected")),
    }
    found = next((reason for reason, applies in reasons.items() if applies), None)
    return found or Conversation(trajectory, prompt, completion)


def _has_malformed_call(trajectory: Trajectory, completion: Sequence[Message]) -> bool:
    if any(call.outcome == "malformed" for turn in trajectory.turns for call in turn.tool_calls):
        return True
    return any(decode_arguments(call.arguments)[1] for message in completion for call in message.tool_calls)
