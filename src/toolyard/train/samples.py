"""Trajectories become training samples, or are refused by name.

    samples, refused = samples_of(dumped.trajectory for dumped in read_dump("runs/a"))
    for group in grouped(samples): group.advantages()          # toolyard.train.groups
    batch = padded(samples, pad_token_id=0).as_torch()         # toolyard.train.padding

What becomes of each kind:

* Completed, exact to the token and scored: a sample, with the ids as they were sampled and seen. Nothing is rendered,
  cut or filled in.
* Failed, for whatever reason: refused. It says nothing about the model, and 0 would teach it something false.
* Without a reward: refused. Scored 0: a sample like any other.
* Empty, which is without one sampled token: refused. A message that is nothing but its stop token is not empty: the
  model chose to say nothing, and is taught what that is worth.
* Truncated by a limit: a sample with `truncated` set. Its score is what the unfinished answer earned. Whoever does not
  want to learn from such answers leaves them out, before grouping or after: the two differ in the group's mean.
* Sampled by several versions of the weights: a sample that names them all. How old is too old is the trainer's to say.
* One of a group whose rewards are all equal: a sample. What it is worth is said in `toolyard.train.groups`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from toolyard.records.audit import audit
from toolyard.records.trajectory import Trajectory
from toolyard.rollout.finish import FinishReason, RolloutState

_LARGEST_REWARD = 3.4028234663852886e38
"""Of 32 bits, which is what trainers compute with: beyond, they have infinity."""
_TRUNCATED = frozenset(
    {
        FinishReason.LENGTH,
        FinishReason.LENGTH_BEFORE_GENERATION,
        FinishReason.TOOL_RESPONSE_TOO_LONG,
        FinishReason.MAX_ASSISTANT_TURNS,
    }
)
"""The model was not done: a message was cut, or the one that it would have gone on with was never asked for. Not
`max_user_turns`: there the model has answered all that it was asked."""


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """What a trainer needs of one trajectory. The lists are its own: changing them changes no trajectory."""

    request_id: str
    group: str
    """The task and the step: `batch_data_id@step`. Only what was sampled for one task in one step is compared."""
    prompt_ids: list[int]
    response_ids: list[int]
    """Everything after the prompt: what the model said and what it was told. It may end with something told, if there
    was no room for an answer to it."""
    response_mask: list[int]
    """1 where the model sampled the token, at least once; 0 where it was told it: there is nothing to learn there."""
    logprobs: list[float] | None
    """Of the model that sampled, one for each of `response_ids`, 0.0 where the mask is 0. None if the engine gave
    none: the trainer then has to compute them."""
    reward: float
    """The trajectory's score: finite, also in 32 bits."""
    weight_versions: tuple[str, ...]
    """Of all turns in their order, each once. Empty if the engine did not say."""
    finish_reason: str
    truncated: bool
    """It ended by a limit while the model was not done: `length`, `length_before_generation`, `tool_response_too_long`
    or `max_assistant_turns`."""


class Refusal(StrEnum):
    """Why a trajectory is not trained on. Where several apply, it is the first of them in this order."""

    FAILED_REQUEST = "failed_request"
    """It is not COMPLETED: its engine, a tool, a deadline or its task failed. Two failures have the names of what they
    are instead: `token_drift` is FAILED_AUDIT, and `reward_failure` is NO_REWARD."""
    NO_REWARD = "no_reward"
    """It was never scored, its reward could not be computed, or it is no finite number in 32 bits."""
    NOT_TOKEN_EXACT = "not_token_exact"  # noqa: S105 - not a password
    """Its engine speaks in messages, or it comes from a line of verl's: the ids that were sampled are not known."""
    FAILED_AUDIT = "failed_audit"
    """Its tokens are not what the model sampled and saw, or its parts contradict each other: the audit of its run has
    said so, or the one that is made here does."""
    EMPTY = "empty"
    """The model sampled nothing, not even a stop token. There is nothing to learn from, and TRL breaks on it."""
    TOO_LONG = "too_long"
    """The response is longer than the trainer takes. Cut, it would be rewarded for what is no longer in it."""
    HAS_IMAGES = "has_images"
    """The model was shown images. Its tokens, with one for each image, are not all that it saw, and our trainers take
    nothing else."""
    DUPLICATE = "duplicate"
    """A sample of the same request came before: twice in its group, it would count double."""


@dataclass(frozen=True, slots=True)
class Refused:
    request_id: str
    refusal: Refusal
    why: str
    """In words: the value that was found, and what was expected."""


class Samples(NamedTuple):
    """Both in the order of the trajectories."""

    samples: list[TrainingSample]
    refused: list[Refused]


def samples_of(trajectories: Iterable[Trajectory], *, max_response_length: int | None = None) -> Samples:
    """Each trajectory as `sample_of` takes it, and none twice.

    A request that was refused and then run again is no duplicate: the first that can be trained on counts.
    """
    made = Samples([], [])
    seen: set[str] = set()
    for trajectory in trajectories:
        one = sample_of(trajectory, max_response_length=max_response_length)
        if isinstance(one, TrainingSample) and one.request_id in seen:
            one = Refused(one.request_id, Refusal.DUPLICATE, "there is a sample of this request already")
        if isinstance(one, Refused):
            made.refused.append(one)
        else:
            seen.add(one.request_id)
            made.samples.append(one)
    return made


def sample_of(trajectory: Trajectory, *, max_response_length: int | None = None) -> TrainingSample | Refused:
    """The sample that `trajectory` is, or why it is none; see `Refusal`, and above what becomes of each kind.

    `max_response_length`: of the whole response, with what the model was told; None takes any.
    """
    found = _refusal(trajectory, max_response_length)
    if found is not None:
        return Refused(trajectory.request_id, *found)
    assert trajectory.score is not None
    tokens, reason = trajectory.tokens, trajectory.finish_reason
    return TrainingSample(
        request_id=trajectory.request_id,
        group=f"{trajectory.batch_data_id}@{trajectory.step}",
        prompt_ids=[*tokens.prompt_ids],
        response_ids=[*tokens.response_ids],
        response_mask=[*tokens.response_mask],
        logprobs=None if tokens.response_logprobs is None else [*tokens.response_logprobs],
        reward=float(trajectory.score),
        weight_versions=tuple(dict.fromkeys(v for turn in trajectory.turns for v in turn.sampled.weight_versions)),
        finish_reason=reason,
        truncated=reason in _TRUNCATED,
    )


_OWN_NAME = {
    FinishReason.TOKEN_DRIFT.value: Refusal.FAILED_AUDIT,
    FinishReason.REWARD_FAILURE.value: Refusal.NO_REWARD,
}
"""Of failed requests whose failure is that of the sample itself."""


def _refusal(trajectory: Trajectory, max_response_length: int | None) -> tuple[Refusal, str] | None:
    if trajectory.state != RolloutState.COMPLETED:
        return _OWN_NAME.get(trajectory.finish_reason, Refusal.FAILED_REQUEST), _failed(trajectory)
    score = trajectory.score
    if score is None or not math.isfinite(score) or abs(score) > _LARGEST_REWARD:
        return Refusal.NO_REWARD, f"the score is {score!r}; expected a number that is finite in 32 bits"
    if not trajectory.token_exact:
        return Refusal.NOT_TOKEN_EXACT, "the ids that were sampled are not known: token_exact is false"
    problems = audit(trajectory)
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        return Refusal.FAILED_AUDIT, f"{problems[0]}{more}"
    response = len(trajectory.tokens.response_ids)
    if 1 not in trajectory.tokens.response_mask:
        return Refusal.EMPTY, f"none of the {response} tokens after the prompt was sampled"
    if max_response_length is not None and response > max_response_length:
        return Refusal.TOO_LONG, f"{response} tokens after the prompt; at most {max_response_length} are taken"
    images = sum(len(message.images) for message in trajectory.messages)
    if images:
        return Refusal.HAS_IMAGES, f"the model was shown {images} images, and trainers get tokens only"
    return None


def _failed(trajectory: Trajectory) -> str:
    if trajectory.failure is None:
        return f"state {trajectory.state}, {trajectory.finish_reason}"
    last = trajectory.failure.error.strip().splitlines()[-1:] or ["nothing is said about it"]
    return f"{trajectory.finish_reason} ({trajectory.failure.whose}): {last[0]}"
