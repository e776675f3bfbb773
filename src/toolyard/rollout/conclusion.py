"""The end of a request: its tools' rewards and release, the final reward, the audit, the record."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from toolyard.errors import RewardError
from toolyard.messages import JSON, Message
from toolyard.records.audit import audit
from toolyard.records.trajectory import Failure, Tokens, Trajectory
from toolyard.rewards.combination import MISSING, Combined, Missing, combine
from toolyard.rewards.final import FinalScore
from toolyard.tools.calls import in_short, trace
from toolyard.tools.instance import ToolInstance, ToolInstances

from .blame import OURS, TASK
from .finish import FinishReason, RolloutState

if TYPE_CHECKING:
    from .run_one import Play


@dataclass(frozen=True, slots=True)
class Released:
    """What came of the tools and the simulator in the end."""

    tools: dict[str, float | None] = field(default_factory=dict[str, float | None])
    problems: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    interaction: float | None = None
    stuck: list[str] = field(default_factory=list[str])


@dataclass(frozen=True, slots=True)
class Unscored:
    """Why there is no final reward."""

    error: str


_RELEASED = TypeAdapter(Released)
_FINAL = TypeAdapter[FinalScore | Unscored](FinalScore | Unscored)


async def conclude(play: Play, stack: AsyncExitStack, instances: ToolInstances | None) -> Trajectory:
    request = play.request
    began = play.chance.now()
    released = await play.chance.got("released", dict[str, Any], _RELEASED, lambda: _release(play, stack, instances))
    if released.problems:
        request.metrics["tool_problems"] = released.problems
    if released.stuck:
        request.metrics["stuck"] = released.stuck
    combined = Combined(None, {}, None)
    if request.state is RolloutState.COMPLETED:
        combined = await _rewarded(play, released)
        if combined.score is None and None in combined.parts.values():  # not: nobody gives rewards here
            failure = Failure(TASK, RolloutState.COMPLETED.value, combined.why_missing or "")
            _fail(play, FinishReason.REWARD_FAILURE, failure)
    request.reward_scores = dict(combined.parts)
    play.stages["reward"] = play.chance.now() - began
    trajectory = _trajectory(play, combined)
    problems = audit(trajectory)
    if problems:
        told = "; ".join(problem.message for problem in problems[:3])
        _fail(play, FinishReason.TOKEN_DRIFT, Failure(OURS, RolloutState.COMPLETED.value, told))
        trajectory = replace(
            trajectory,
            state=request.state.value,
            finish_reason=FinishReason.TOKEN_DRIFT.value,
            score=None,
            failure=play.failure,
        )
    play.chance.ended()
    return trajectory


def _fail(play: Play, reason: FinishReason, failure: Failure) -> None:
    play.request.state, play.request.finish_reason, play.failure = reason.state, reason, failure


async def _release(play: Play, stack: AsyncExitStack, instances: ToolInstances | None) -> Released:
    problems: dict[str, list[str]] = {}
    score = None
    interaction, request = play.setting.interaction, play.request
    if interaction is not None and instances is not None:
        try:
            async with asyncio.timeout(play.setting.limits.interaction_seconds):
                score = await interaction.score(request.request_id, **(request.task.interaction_kwargs or {}))
        except Exception as error:
            problems["interaction"] = [trace(error)]
    try:
        await stack.aclose()
    except Exception as error:  # of the simulator's finalize: tools note their own
        problems.setdefault("interaction", []).append(trace(error))
    there: Mapping[str, ToolInstance] = instances or {}
    problems |= {name: instance.problems for name, instance in there.items() if instance.problems}
    return Released({name: instance.reward for name, instance in there.items()}, problems, score, request.stuck)


async def _rewarded(play: Play, released: Released) -> Combined:
    request, setting = play.request, play.setting
    final: float | Missing | None = MISSING
    reasons: dict[str, str] = {}
    if setting.final_reward is not None:
        # Only what the model said: what tools answered is not its solution.
        solution = "\n".join(message.content for message in _sampled_messages(play))
        asked: JSON = {"data_source": request.task.data_source, "solution": solution}
        scored = await play.chance.got("final", lambda: asked, _FINAL, lambda: _scored(play, solution))
        if isinstance(scored, Unscored):
            final, reasons["final"] = None, scored.error
        else:
            final = scored.value
            if scored.extras:
                request.metrics["reward"] = dict(scored.extras)
    steps: dict[str, list[float]] = {}
    for turn in request.turns:
        for call in turn.tool_calls:
            if call.reward is not None:
                steps.setdefault(call.name, []).append(call.reward)
    spoken = [*play.interaction_rewards, *([] if released.interaction is None else [released.interaction])]
    return combine(
        setting.weights,
        final=final,
        steps=steps,
        tools={
            name: reward
            for name, reward in released.tools.items()
            if reward is not None or name in released.problems  # it gave none, and not because it failed
        },
        interaction=None if "interaction" in released.problems else sum(spoken) if spoken else MISSING,
        reasons=reasons | {f"tool/{name}": problems[0] for name, problems in released.problems.items()},
    )


async def _scored(play: Play, solution: str) -> FinalScore | Unscored:
    task, reward = play.request.task, play.setting.final_reward
    assert reward is not None
    try:
        return await reward.score(
            task.data_source,
            solution,
            task.ground_truth,
            dict(task.extra_info),
            deadline_seconds=play.setting.limits.reward_seconds,
        )
    except RewardError as error:
        return Unscored(str(error))
    except Exception as error:
        return Unscored(in_short(error))


def _sampled_messages(play: Play) -> list[Message]:
    given = len(play.request.task.messages)
    return [message for message in play.request.messages[given:] if message.role == "assistant"]


def _trajectory(play: Play, combined: Combined) -> Trajectory:
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
        metrics=_metrics(play),
        data_source=request.task.data_source,
        token_exact=request.token_exact,
        failure=play.failure,
    )


def _metrics(play: Play) -> JSON:
    request = play.request
    outcomes: dict[str, int] = {}
    for turn in request.turns:
        for call in turn.tool_calls:
            outcomes[call.outcome] = outcomes.get(call.outcome, 0) + 1
    return {
        "turns": len(request.turns),
        "prompt_tokens": request.prompt_tokens,
        "response_tokens": request.response_tokens,
        "sampled_tokens": sum(request.response_mask),
        "tool_calls": outcomes,
        "seconds": {stage: round(seconds, 6) for stage, seconds in play.stages.items()},
        "seed": request.seed,
        **request.metrics,
    }
