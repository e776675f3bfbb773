"""Toolyard's rollouts as an agent loop for verl (0.9.1 and later):

    actor_rollout_ref.rollout.agent.agent_loop_config_path=agent_loop.yaml
    actor_rollout_ref.rollout.agent.default_agent_loop=toolyard

    - name: toolyard
      _target_: toolyard.train.verl.ToolyardAgentLoop
      reward: gsm8k                      # all keys are optional: see `VerlSettings`

verl's trajectories are then played by Toolyard, from the tool instances to the audit, and sampled by verl's servers.

A failed trajectory does not raise, because that would fail verl's whole batch or group; only invalid settings raise, at
the first trajectory. A trajectory that must not be trained on (see `toolyard.train.samples`) goes to verl with a mask
of zeros and at least one token, so it adds nothing to the loss. Its reward, which verl requires, is the mean of the
scores that its group has in this worker so far, or `failure_reward` if there are none. It leaves the group's mean as it
is only if all others have ended by then, and in this worker. If verl's reward workers score (`reward: none`), they
score it too.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import groupby
from typing import Any
from uuid import uuid4

from toolyard.engines.protocol import Sampling
from toolyard.errors import MissingDependencyError, TaskError
from toolyard.records.trajectory import Failure, Tokens, Trajectory
from toolyard.rollout.assembly import with_agent
from toolyard.rollout.blame import OURS, TASK
from toolyard.rollout.finish import FinishReason, RolloutState
from toolyard.rollout.play.setting import Setting
from toolyard.rollout.play.speaker import TokenSpeaker
from toolyard.rollout.request import create_request
from toolyard.rollout.run_many import play_of
from toolyard.tasks.rows import ids_of, task_of_row
from toolyard.tools.calls import trace
from toolyard.train.samples import Refused, sample_of
from toolyard.train.verl.engine import VerlEngine, texts_of
from toolyard.train.verl.settings import VerlSettings, settings_of
from toolyard.train.verl.shared import Opened, close, dump, open_here

try:
    _verl: Any = import_module("verl.experimental.agent_loop.agent_loop")  # its annotations are incomplete
    _traced: Any = import_module("verl.utils.rollout_trace").rollout_trace_op
except ImportError as error:
    raise MissingDependencyError("verl", "verl", "an agent loop for verl") from error

__all__ = ["ToolyardAgentLoop", "VerlSettings", "close"]

_log = logging.getLogger(__name__)
_OF_TASKS = ("reward_model", "data_source", "extra_info", "tools_kwargs", "interaction_kwargs")
_VERLS = frozenset(inspect.signature(_verl.AgentLoopBase.__init__).parameters)
"""Arguments that verl passes to every loop, including `tools`, which it creates for its own loop."""


@dataclass(frozen=True, slots=True)
class _SampleIds:
    """The ids of a sample."""

    request_id: str
    task_id: str
    group: str
    """The prompt, in this step."""
    offset: int
    """The index of the sample in its group, as far as this process knows."""
    step: int | None


class ToolyardAgentLoop(_verl.AgentLoopBase):
    """verl creates one per sample; `open_here` keeps what they share."""

    def __init__(self, *args: Any, name: str = "toolyard", tools: Any = None, **given: Any) -> None:
        """
        Raises:
            ConfigError: a key is unknown or invalid.
        """
        verls = {key: value for key, value in given.items() if key in _VERLS}
        super().__init__(*args, **verls)  # pyright: ignore[reportUnknownMemberType]
        ours = {key: value for key, value in given.items() if key not in _VERLS}
        self._settings = settings_of(ours, self.rollout_config, self.apply_chat_template_kwargs)

    @_traced
    async def run(self, sampling_params: Mapping[str, Any], **row: Any) -> Any:
        """Play one sample and return an `AgentLoopOutput`, even if it failed. If cancelled, it releases its tools.

        Raises:
            ToolyardError: the settings are invalid, or a part they name cannot be opened.
        """
        opened = open_here(self._settings, self.tokenizer)
        names = _sample_ids(row, opened)
        engine = VerlEngine(
            self.server_manager,
            sampling_params,
            session=self._session(names, row),
            decode=opened.chat.decode,
            with_texts=texts_of(self.rollout_config),
            answered=opened.seen.take,
        )
        trajectory = await self._played(opened, engine, names, row)
        if names.step is None:
            trajectory = replace(trajectory, step=engine.notes.newest or 0)
        if self._settings.rollout_data_dir is not None:
            await dump(self._settings.rollout_data_dir, trajectory)
        return self._output(opened, engine, names, row, trajectory)

    def _session(self, names: _SampleIds, row: Mapping[str, Any]) -> str:
        """With `full_determinism`, the id that verl's own loop would use: its servers depend on it."""
        if self.rollout_config.get("full_determinism"):
            return f"det-{_whole(row.get('priority'), 0)}"
        return names.request_id

    async def _played(
        self, opened: Opened, engine: VerlEngine, names: _SampleIds, row: Mapping[str, Any]
    ) -> Trajectory:
        settings = self._settings
        try:
            task = task_of_row(_task_row(row), names.task_id)
            tools, schemas = opened.select(task.extra_info.get("tool_selection"))
            request = create_request(task, names.offset, tool_schemas=schemas, step=names.step or 0, seed=None)
            request.request_id = names.request_id
            sampling = Sampling(max_tokens=settings.limits.response_length)  # the rest is in verl's params
            speaker = TokenSpeaker(engine, opened.chat, sampling, settings.limits)
            weights, interaction = settings.reward_weights, opened.interaction
            setting = Setting(speaker, tools, settings.limits, opened.reward, weights, interaction)
            # An engine of verl's belongs to one sample, so each has a gateway of its own.
            async with with_agent(setting, settings.agent, sampling) as complete:
                return await play_of(request, complete).run()
        except TaskError as error:
            return _lost(names, FinishReason.BAD_TASK, Failure(TASK, RolloutState.PENDING.value, str(error)))
        except Exception as error:
            return _lost(names, FinishReason.INTERNAL_ERROR, Failure(OURS, RolloutState.PENDING.value, trace(error)))

    def _output(
        self, opened: Opened, engine: VerlEngine, names: _SampleIds, row: Mapping[str, Any], trajectory: Trajectory
    ) -> Any:
        settings, limits, notes = self._settings, self._settings.limits, engine.notes
        # Without a reward here, verl computes the score.
        judged = trajectory if settings.scores else replace(trajectory, score=0.0)
        sample = sample_of(judged, max_response_length=limits.response_length)
        refused = isinstance(sample, Refused)
        if isinstance(sample, Refused):
            _log.warning("request %s, task %s: not trained on: %s", names.request_id, names.task_id, sample.why)
            prompt = trajectory.tokens.prompt_ids[-limits.prompt_length :] or [opened.filler]
            response = trajectory.tokens.response_ids[: limits.response_length] or [opened.filler]
            mask, logprobs = [0] * len(response), [0.0] * len(response)
            mean = opened.groups.mean(names.group)
            reward = settings.failure_reward if mean is None else mean
        else:
            prompt, response, mask = sample.prompt_ids, sample.response_ids, sample.response_mask
            logprobs, reward = sample.logprobs, sample.reward
            if settings.scores:
                opened.groups.scored(names.group, reward)
        calls = [call for turn in trajectory.turns for call in turn.tool_calls]
        # The same keys for every sample, because verl turns them into arrays.
        told: dict[str, Any] = {
            "turn_scores": [],
            "tool_rewards": [call.reward for call in calls if call.reward is not None],
            "tool_call_counts": len(calls),
            "min_global_steps": _version(notes.oldest, opened, names),
            "max_global_steps": _version(notes.newest, opened, names),
            **opened.seen.speculated,
            **notes.speculated,
            "toolyard_request_id": names.request_id,
            "toolyard_finish_reason": trajectory.finish_reason,
            "toolyard_refusal": sample.refusal.value if isinstance(sample, Refused) else "",
            "toolyard_rewards": dict(trajectory.rewards),
        }
        if "request_id" not in row:
            told["request_id"] = names.request_id  # verl's dump shows it
        if settings.scores:
            told["reward_extra_info"] = {"acc": reward, "toolyard_refused": float(refused)}
        seconds: Mapping[str, float] = trajectory.metrics.get("seconds", {})
        experts = opened.seen.experts if notes.experts is None else notes.experts
        return _verl.AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=response,
            response_mask=mask,
            response_logprobs=logprobs if engine.with_logprobs else None,
            routed_experts=None if experts is None else experts[: len(prompt) + len(response)],
            reward_score=reward if settings.scores else None,
            num_turns=_turns(trajectory),
            metrics=_verl.AgentLoopMetrics(
                generate_sequences=seconds.get("generating", 0.0),
                tool_calls=seconds.get("tool_calling", 0.0),
                compute_score=seconds.get("reward", 0.0),
                num_preempted=notes.preempted,
            ),
            extra_fields=told,
        )


# Rows -----------------------------------------------------------------------------------------------------------------


def _sample_ids(row: Mapping[str, Any], opened: Opened) -> _SampleIds:
    uid = row.get("uid")
    try:
        own = next((name for name in ids_of(_task_row(row), "row") if name is not None), None)
    except TaskError:  # reported when the sample is played
        own = None
    request_id = uuid4().hex
    group = request_id if uid is None else str(uid)
    offset = opened.groups.join(group)
    return _SampleIds(
        request_id=request_id,
        task_id=own or group,
        group=group,
        offset=_whole(row.get("session_id"), offset),
        step=_whole(row.get("global_steps"), None),
    )


def _task_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row as `task_of_row` expects it: verl names the prompt differently, and passes values that are not part of
    the task. A missing ground truth is None."""
    kept = {name: row[name] for name in _OF_TASKS if row.get(name) is not None}
    return {"reward_model": {"ground_truth": None}, **kept, "prompt": row.get("raw_prompt")}


def _whole(value: Any, default: Any) -> Any:
    """`value` as an int; numpy integers are accepted too."""
    try:
        return default if value is None else int(value)
    except (TypeError, ValueError):
        return default


# Output ---------------------------------------------------------------------------------------------------------------


def _lost(names: _SampleIds, reason: FinishReason, failure: Failure) -> Trajectory:
    """The trajectory of a row that could not be played at all."""
    return Trajectory(
        request_id=names.request_id,
        batch_data_id=names.task_id,
        rollout_offset=names.offset,
        state=reason.state.value,
        finish_reason=reason.value,
        input="",
        output="",
        ground_truth=None,
        score=None,
        step=names.step or 0,
        messages=(),
        tokens=Tokens(),
        turns=(),
        rewards={},
        metrics={},
        token_exact=False,
        failure=failure,
    )


def _version(told: int | None, opened: Opened, names: _SampleIds) -> int:
    """The version of the weights, with which verl's trainers compute. If no server has answered: the version that other
    samples used, that of the step's start, or the first."""
    if told is not None:
        return told
    if opened.seen.newest is not None:
        return opened.seen.newest
    return max((names.step or 0) - 1, 0)


def _turns(trajectory: Trajectory) -> int:
    """The number of turns as verl counts them: the prompt, the assistant messages, and the answers to them."""
    answered = sum(1 for mask, _ in groupby(trajectory.tokens.response_mask) if not mask)
    return 1 + len(trajectory.turns) + answered
