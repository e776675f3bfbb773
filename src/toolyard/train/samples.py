"""Turns trajectories into training samples, or refuses them with a reason.

    samples, refused = samples_of(dumped.trajectory for dumped in read_dump("runs/a"))
    for group in grouped(samples): group.advantages()          # toolyard.train.groups
    batch = padded(samples, pad_token_id=0).as_torch()         # toolyard.train.padding

How each kind is treated:

* Completed, token-exact and scored: a sample, with the ids as they were sampled and seen. Nothing is rendered, cut or
  filled in.
* Failed, for any reason: refused. It says nothing about the model, and a reward of 0 would teach it something false.
* Without a reward: refused. A score of 0 makes a sample like any other.
* Empty, that is without any sampled token: refused. A message that is only its stop token is not empty: the model chose
  to say nothing, and learns from the reward for that.
* Truncated by a limit: a sample with `truncated` set. Its score is that of the unfinished answer. To exclude such
  samples, drop them before or after grouping; the two differ in the group's mean.
* Sampled by several versions of the weights: a sample that lists all of them. The trainer decides how old is too old.
* In a group whose rewards are all equal: a sample. See `toolyard.train.groups`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple

from toolyard.messages import JSON
from toolyard.records.audit import audit
from toolyard.records.trajectory import Trajectory, session_of
from toolyard.rollout.finish import FinishReason, RolloutState
from toolyard.tokens import ids_crc

_LARGEST_REWARD = 3.4028234663852886e38
"""The largest float32. Trainers compute in 32 bits, where anything beyond is infinity."""
TRUNCATED = frozenset(
    {
        FinishReason.LENGTH,
        FinishReason.LENGTH_BEFORE_GENERATION,
        FinishReason.TOOL_RESPONSE_TOO_LONG,
        FinishReason.MAX_ASSISTANT_TURNS,
    }
)
"""The model was not done: a message was cut off, or the next one was never sampled. Not `max_user_turns`: there the
model has answered everything it was asked."""


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """What a trainer needs of one trajectory. The lists are copies."""

    request_id: str
    group: str
    """The task and the step: `batch_data_id@step`. Only samples of one task in one step are compared."""
    prompt_ids: list[int]
    response_ids: list[int]
    """Everything after the prompt: sampled and given tokens. It may end with given tokens, if there was no room for an
    answer."""
    response_mask: list[int]
    """1 for sampled tokens, of which there is at least one; 0 for given tokens, which are not trained on."""
    logprobs: list[float] | None
    """The sampling model's logprobs, one for each of `response_ids`, 0.0 where the mask is 0. None if the engine
    returned none: the trainer must compute them."""
    reward: float
    """The trajectory's score: finite, also in 32 bits."""
    weight_versions: tuple[str, ...]
    """Weight versions of all turns in order, each once. Empty if the engine did not report them."""
    finish_reason: str
    truncated: bool
    """A limit ended it before the model was done: `length`, `length_before_generation`, `tool_response_too_long` or
    `max_assistant_turns`."""
    session: str = ""
    """The request that it is a branch of; empty if an agent did not play it."""
    token_versions: list[str] | None = None
    """The weight version of each of `response_ids`, empty where the mask is 0. None if the engine did not report
    them."""


class Refusal(StrEnum):
    """Why a trajectory is not trained on. If several reasons apply, the first in this order is given."""

    FAILED_REQUEST = "failed_request"
    """It is not COMPLETED: its engine, a tool, a deadline or its task failed. Two failures have their own reasons:
    `token_drift` is FAILED_AUDIT, and `reward_failure` is NO_REWARD."""
    NO_REWARD = "no_reward"
    """It was never scored, its reward could not be computed, or the reward is not finite in 32 bits."""
    NOT_TOKEN_EXACT = "not_token_exact"  # noqa: S105 - not a password
    """Its engine has a message API, or it comes from verl's dump: the sampled ids are unknown."""
    FAILED_AUDIT = "failed_audit"
    """Its tokens are not those that the model sampled and saw, or its parts contradict each other, according to the
    run's audit or the one made here."""
    EMPTY = "empty"
    """The model sampled nothing, not even a stop token. There is nothing to learn from, and TRL breaks on it."""
    TOO_LONG = "too_long"
    """The response is longer than the trainer accepts. If cut, it would be rewarded for tokens no longer in it."""
    HAS_IMAGES = "has_images"
    """The model saw images. Its tokens, one for each image, do not contain them, and our trainers take only tokens."""
    FAULTS = "faults"
    """Faults were injected into it (`toolyard rollout --faults`): the model may have seen them."""
    OTHER_WEIGHTS = "other_weights"
    """It was sampled with other weights than the trainer's, because a server was restarted or joined during a step."""
    DUPLICATE = "duplicate"
    """There is already a sample of the same request; a second one would count double in its group."""


@dataclass(frozen=True, slots=True)
class Refused:
    request_id: str
    refusal: Refusal
    why: str
    """The reason in words: the value that was found, and what was expected."""


class Samples(NamedTuple):
    """Samples and refused trajectories, both in the order of the trajectories."""

    samples: list[TrainingSample]
    refused: list[Refused]


def samples_of(
    trajectories: Iterable[Trajectory],
    *,
    max_response_length: int | None = None,
    shared_turns: Literal["once", "each"] = "once",
) -> Samples:
    """Apply `sample_of` to each trajectory, and refuse duplicates.

    A request that was refused and then played again is not a duplicate: the first trainable trajectory counts.

    `shared_turns`: the branches of a session begin with the same turns. once: each turn is trained in the first sample
    that has it, and masked in the others. each: in every sample.
    """
    made = Samples([], [])
    seen: set[str] = set()
    trained: set[tuple[str, int, int]] = set()
    for trajectory in trajectories:
        one = sample_of(trajectory, max_response_length=max_response_length)
        if isinstance(one, TrainingSample) and shared_turns == "once":
            _mask_what_is_trained(one, trajectory, trained)
        if isinstance(one, TrainingSample) and one.request_id in seen:
            one = Refused(one.request_id, Refusal.DUPLICATE, "there is already a sample of this request")
        if isinstance(one, Refused):
            made.refused.append(one)
        else:
            seen.add(one.request_id)
            made.samples.append(one)
    return made


def _mask_what_is_trained(sample: TrainingSample, trajectory: Trajectory, trained: set[tuple[str, int, int]]) -> None:
    """Mask the turns of `sample` that an earlier branch of its session has, and add the others to `trained`."""
    ids, mask, logprobs, versions = sample.response_ids, sample.response_mask, sample.logprobs, sample.token_versions
    own: set[tuple[str, int, int]] = set()
    for turn in trajectory.turns:
        span = slice(turn.sampled.start, turn.sampled.end)
        known = sample.session or sample.request_id, turn.sampled.prompt_crc, ids_crc(ids[span])
        if known in trained:
            mask[span] = [0] * len(mask[span])
            if logprobs is not None:
                logprobs[span] = [0.0] * len(mask[span])
            if versions is not None:
                versions[span] = [""] * len(mask[span])
        own.add(known)
    trained |= own


def sample_of(trajectory: Trajectory, *, max_response_length: int | None = None) -> TrainingSample | Refused:
    """Turn a trajectory into a sample, or refuse it with a reason; see `Refusal` and the module's docstring.

    `max_response_length` limits the whole response, including given tokens; None: no limit.
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
        truncated=reason in TRUNCATED,
        session=session_of(trajectory),
        token_versions=token_versions(trajectory),
    )


def token_versions(trajectory: Trajectory) -> list[str] | None:
    """The weight version of each token of the response; empty for given tokens. None if a turn does not say."""
    versions = [""] * len(trajectory.tokens.response_ids)
    for turn in trajectory.turns:
        sampled = turn.sampled
        starts = [sampled.start + at for at in sampled.version_starts or (0,)]
        bounds = [*starts, sampled.end]
        if len(starts) != len(sampled.weight_versions) or bounds != sorted(bounds) or starts[0] != sampled.start:
            return None
        for version, start, end in zip(sampled.weight_versions, starts, bounds[1:], strict=True):
            versions[start:end] = [version] * (end - start)
    return versions


_OWN_NAME = {
    FinishReason.TOKEN_DRIFT.value: Refusal.FAILED_AUDIT,
    FinishReason.REWARD_FAILURE.value: Refusal.NO_REWARD,
}
"""Finish reasons of failed requests that have their own refusal."""


def _refusal(trajectory: Trajectory, max_response_length: int | None) -> tuple[Refusal, str] | None:
    if trajectory.state != RolloutState.COMPLETED:
        return _OWN_NAME.get(trajectory.finish_reason, Refusal.FAILED_REQUEST), _failed(trajectory)
    score = trajectory.score
    if score is None or not math.isfinite(score) or abs(score) > _LARGEST_REWARD:
        return Refusal.NO_REWARD, f"the score is {score!r}; expected a number that is finite in 32 bits"
    if not trajectory.token_exact:
        return Refusal.NOT_TOKEN_EXACT, "the sampled ids are unknown: token_exact is false"
    problems = audit(trajectory)
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        return Refusal.FAILED_AUDIT, f"{problems[0]}{more}"
    response = len(trajectory.tokens.response_ids)
    if 1 not in trajectory.tokens.response_mask:
        return Refusal.EMPTY, f"none of the {response} tokens after the prompt was sampled"
    if max_response_length is not None and response > max_response_length:
        return Refusal.TOO_LONG, f"{response} tokens after the prompt; at most {max_response_length} are allowed"
    images = sum(len(message.images) for message in trajectory.messages)
    if images:
        return Refusal.HAS_IMAGES, f"the model saw {images} images, but trainers get only tokens"
    mark: JSON = trajectory.metrics.get("faults") or {}
    if faults := mark.get("injected"):
        return Refusal.FAULTS, f"{len(faults)} faults were injected into it, the first: {faults[0].get('kind')}"
    return None


def _failed(trajectory: Trajectory) -> str:
    if trajectory.failure is None:
        return f"state {trajectory.state}, {trajectory.finish_reason}"
    last = trajectory.failure.error.strip().splitlines()[-1:] or ["no error message"]
    return f"{trajectory.finish_reason} ({trajectory.failure.whose}): {last[0]}"
