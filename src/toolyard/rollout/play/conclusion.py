"""The end of a request: tool rewards and release, the final reward, the audit, the record."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeVar

from pydantic import TypeAdapter

from toolyard.errors import RewardError, ToolyardError, blame, summarize
from toolyard.messages import JSON, Message
from toolyard.records.audit import audit
from toolyard.records.trajectory import Failure, Tokens, Trajectory
from toolyard.rewards.combination import MISSING, Combined, Missing, combine, reward_details
from toolyard.rewards.explanation import Explanation
from toolyard.rewards.protocol import FinalScore, with_prompt
from toolyard.rollout.blame import OURS, TASK
from toolyard.rollout.external import ExternalCall, ExternalCalls
from toolyard.rollout.finish import FinishReason, RolloutState
from toolyard.rollout.play.setting import Setting
from toolyard.rollout.request import AsyncRolloutRequest
from toolyard.tools.answers import as_reward
from toolyard.tools.calls import trace
from toolyard.tools.instance import ToolInstance, ToolInstances

T = TypeVar("T")


class Ending(Protocol):
    """What `conclude` needs of a `Play`."""

    request: AsyncRolloutRequest
    setting: Setting
    external: ExternalCalls
    failure: Failure | None
    interaction_rewards: list[float]
    stages: dict[str, float]
    simulating: bool
    abandoned: list[str]

    @property
    def solution(self) -> str | None: ...

    @property
    def given_score(self) -> Callable[[], FinalScore] | None: ...

    async def supervised(self, work: Coroutine[Any, Any, T], what: str, seconds: float | None = None) -> T: ...


@dataclass(frozen=True, slots=True)
class Released:
    """Rewards and problems from releasing the tools and the simulator."""

    tools: dict[str, float | None] = field(default_factory=dict[str, float | None])
    """Rewards by tool; None if `calc_reward` failed. Tools without a reward are left out."""
    problems: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """Errors by part of the reward: `tool/<name>` or `interaction`."""
    interaction: float | None = None
    interaction_failed: bool = False
    ours: list[str] = field(default_factory=list[str])
    """Parts that are missing because of an infrastructure failure."""
    abandoned: list[str] = field(default_factory=list[str])
    """Calls that ignored their cancellation."""
    explanations: dict[str, Explanation] | None = None
    """Why tools' rewards are what they are, by part. None: from a tape of a version that did not ask, which explained
    nothing."""


@dataclass(frozen=True, slots=True)
class Unscored:
    """Why there is no final reward."""

    error: str
    whose: str = TASK
    source: str = ""
    cause: str = ""


_RELEASED = TypeAdapter(Released)
_STUCK = TypeAdapter(list[str])
_FINAL = TypeAdapter[FinalScore | Unscored](FinalScore | Unscored)


async def conclude(play: Ending, stack: AsyncExitStack, instances: ToolInstances | None) -> Trajectory:
    request = play.request
    began = play.external.now()
    released = await play.external.call(
        ExternalCall("released", dict[str, Any], _RELEASED, lambda: _release(play, stack, instances))
    )
    if released.problems:
        request.metrics["problems"] = released.problems
    combined = Combined(None, {}, None)
    if request.state is RolloutState.COMPLETED:
        combined, unscored = await _rewarded(play, released)
        if combined.failed:
            _fail(play, FinishReason.REWARD_FAILURE, _reward_failure(combined, unscored, released))
    if released.abandoned:
        request.metrics["abandoned"] = released.abandoned
    request.reward_scores = dict(combined.parts)
    play.stages["reward"] = play.external.now() - began
    stuck = await play.external.call(ExternalCall("stuck", dict[str, Any], _STUCK, partial(_stuck, play)))
    if stuck:
        request.metrics["stuck"] = stuck
    trajectory = _trajectory(play, combined)
    problems = audit(trajectory)
    if problems:
        told = "; ".join(map(str, problems[:3]))
        if play.failure is None:
            _fail(play, FinishReason.TOKEN_DRIFT, Failure(OURS, RolloutState.COMPLETED.value, told))
        else:  # the first failure matters most
            play.failure = replace(play.failure, error=f"{play.failure.error}\naudit: {told}")
        trajectory = replace(
            trajectory,
            state=request.state.value,
            finish_reason=str(request.finish_reason),
            score=None,
            failure=play.failure,
        )
    play.external.ended()
    return trajectory


def _reward_failure(combined: Combined, unscored: Unscored | None, released: Released) -> Failure:
    """The infrastructure's failure if it caused any missing part; otherwise the task's."""
    told, parts = combined.why_missing or "", [part for part in combined.failed if part in released.ours]
    if unscored is not None and (unscored.whose == OURS or not parts):
        return Failure(unscored.whose, RolloutState.COMPLETED.value, told, unscored.source, unscored.cause)
    source = next(iter(parts or combined.failed))
    cause = (told.strip().splitlines() or [""])[-1]
    return Failure(OURS if parts else TASK, RolloutState.COMPLETED.value, told, source, cause)


def _fail(play: Ending, reason: FinishReason, failure: Failure) -> None:
    play.request.state, play.request.finish_reason, play.failure = reason.state, reason, failure


def lost_trajectory(play: Ending, error: BaseException) -> Trajectory:
    """The trajectory of a request that hit a bug in Toolyard: only what is certain, and the traceback."""
    request = play.request
    _fail(play, FinishReason.INTERNAL_ERROR, Failure(OURS, request.state.value, trace(error)))
    play.external.ended()
    return Trajectory(
        request_id=request.request_id,
        batch_data_id=request.batch_data_id,
        rollout_offset=request.rollout_offset,
        state=RolloutState.FAILED.value,
        finish_reason=FinishReason.INTERNAL_ERROR.value,
        input="",
        output="",
        ground_truth=request.task.ground_truth,
        score=None,
        step=request.step,
        messages=request.task.messages,
        tokens=Tokens(),
        turns=(),
        rewards={},
        metrics={"seed": request.seed},
        data_source=request.task.data_source,
        token_exact=False,
        failure=play.failure,
        started_at=play.external.started_at,
    )


async def _stuck(play: Ending) -> list[str]:
    return list(play.request.stuck)


async def _release(play: Ending, stack: AsyncExitStack, instances: ToolInstances | None) -> Released:
    request, interaction = play.request, play.setting.interaction
    request.waits_for, request.stage_since = "its tools and simulator to end", time.monotonic()
    problems: list[str] = []
    score, failed = None, False
    if interaction is not None and play.simulating and request.state is RolloutState.COMPLETED:
        try:
            work = interaction.score(request.request_id, **(request.task.interaction_kwargs or {}))
            score = await play.supervised(work, "simulator: score", play.setting.limits.interaction_seconds)
            score = None if score is None else as_reward(score)
        except (Exception, SystemExit, asyncio.CancelledError, BaseExceptionGroup) as error:
            _unless_cancelled(error)
            score, failed = None, True
            problems.append(trace(error))
    try:
        await stack.aclose()
    except (Exception, SystemExit, asyncio.CancelledError, BaseExceptionGroup) as error:
        # From the simulator's finalize: tools record their own.
        _unless_cancelled(error)
        problems.append(trace(error))
    there: Mapping[str, ToolInstance] = instances or {}
    noted = {f"tool/{name}": instance.problems for name, instance in there.items() if instance.problems}
    return Released(
        {name: tool.reward for name, tool in there.items() if tool.reward is not None or not tool.rewarded},
        noted | ({"interaction": problems} if problems else {}),
        score,
        failed,
        [f"tool/{name}" for name, instance in there.items() if instance.our_failure],
        list(play.abandoned),
        {f"tool/{name}": said for name, one in there.items() if (said := one.explanation) is not None},
    )


def _unless_cancelled(error: BaseException) -> None:
    """Raise only if this task itself was cancelled: a CancelledError raised by other code is that code's failure."""
    task = asyncio.current_task()
    if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
        raise error


async def _rewarded(play: Ending, released: Released) -> tuple[Combined, Unscored | None]:
    """The combined score, and why the final reward is missing from it, if it is."""
    request, setting = play.request, play.setting
    final: float | Missing | None = MISSING
    reasons: dict[str, str] = {}
    unscored: Unscored | None = None
    explanations: dict[str, Explanation | None] = {**(released.explanations or {})}
    if setting.final_reward is not None or play.given_score is not None:
        # Only the model's own messages: tool results are not its solution.
        solution = play.solution
        if solution is None:
            solution = "\n".join(message.content for message in _sampled_messages(play))
        asked: JSON = {"data_source": request.task.data_source, "solution": solution}
        request.waits_for, request.stage_since = "the final reward", time.monotonic()
        scored = await play.external.call(ExternalCall("final", lambda: asked, _FINAL, lambda: _scored(play, solution)))
        if isinstance(scored, Unscored):
            final, reasons["final"], unscored = None, scored.error, scored
        else:
            final = scored.value
            if scored.extras:
                request.metrics["reward"] = dict(scored.extras)
            explanations["final"] = scored.explanation
    steps: dict[str, list[float]] = {}
    for turn in request.turns:
        for call in turn.tool_calls:
            if call.reward is not None:
                steps.setdefault(call.name, []).append(call.reward)
    spoken = [*play.interaction_rewards, *([] if released.interaction is None else [released.interaction])]
    reasons |= {part: problems[0] for part, problems in released.problems.items()}
    combined = combine(
        setting.weights,
        final=final,
        steps=steps,
        tools=released.tools,
        interaction=None if released.interaction_failed else sum(spoken) if spoken else MISSING,
        reasons=reasons,
    )
    if released.explanations is not None:
        request.reward_details = reward_details(setting.weights, combined.parts, explanations, reasons)
    return combined, unscored


async def _scored(play: Ending, solution: str) -> FinalScore | Unscored:
    task, reward = play.request.task, play.setting.final_reward
    if play.given_score is not None:
        try:
            return play.given_score()
        except RewardError as error:
            return Unscored(str(error), source="agent")
    assert reward is not None
    what = f"reward {reward.name!r}"
    work = reward.score(
        task.data_source,
        solution,
        task.ground_truth,
        with_prompt(reward, task.extra_info, task.messages),
        deadline_seconds=play.setting.limits.reward_seconds,
    )
    try:
        return await play.supervised(work, what)
    except (Exception, SystemExit, asyncio.CancelledError, BaseExceptionGroup) as error:
        _unless_cancelled(error)
        found = blame(error)
        told = str(error) if isinstance(error, RewardError) else summarize(error)
        whose = found.whose if isinstance(error, ToolyardError) else TASK
        return Unscored(told, whose, found.source or what, found.cause)


def _sampled_messages(play: Ending) -> list[Message]:
    given = len(play.request.task.messages)
    return [message for message in play.request.messages[given:] if message.role == "assistant"]


def _trajectory(play: Ending, combined: Combined) -> Trajectory:
    request = play.request
    assert request.finish_reason is not None
    said_before, said = play.setting.speaker.decode(request)
    return Trajectory(
        request_id=request.request_id,
        batch_data_id=request.batch_data_id,
        rollout_offset=request.rollout_offset,
        state=request.state.value,
        finish_reason=request.finish_reason.value,
        input=said_before,
        output=said,
        ground_truth=request.task.ground_truth,
        score=combined.score if request.state is RolloutState.COMPLETED else None,
        step=request.step,
        messages=tuple(request.messages),
        tokens=Tokens(request.prompt_ids, request.response_ids, request.response_mask, request.response_logprobs),
        turns=tuple(request.turns),
        rewards=request.reward_scores,
        reward_details=request.reward_details,
        metrics=_metrics(play),
        data_source=request.task.data_source,
        token_exact=request.token_exact,
        failure=play.failure,
        started_at=play.external.started_at,
    )


def _metrics(play: Ending) -> JSON:
    request = play.request
    outcomes: dict[str, int] = {}
    for turn in request.turns:
        for call in turn.tool_calls:
            outcomes[call.outcome] = outcomes.get(call.outcome, 0) + 1
    return {
        "turns": len(request.turns),
        "prompt_tokens": request.prompt_tokens,
        "response_tokens": request.response_tokens,
        "sampled_tokens": request.sampled_tokens,
        "tool_calls": outcomes,
        "seconds": {stage: round(seconds, 6) for stage, seconds in play.stages.items()},
        "seed": request.seed,
        **request.metrics,
    }
