"""One request, from PENDING to its trajectory.

`Machine` decides; `Play` performs. One boundary, one capture point: an error in a stage becomes an `EffectFailed` with
its `Failure`, never an exception of the run. Tool instances are always released. Only Toolyard's own code runs in the
request's task: engines, tools, simulators and rewards have their own (`toolyard.supervision`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from pydantic import TypeAdapter

from toolyard.chat.protocol import ParsedCall
from toolyard.errors import DivergenceError, InteractionError, RecordError, summarize
from toolyard.messages import JSON, Message
from toolyard.records.trajectory import CallRecord, Failure, Trajectory, Turn
from toolyard.rewards.protocol import FinalScore
from toolyard.rollout.blame import OURS, TASK, StageFailure, our_failure, stage_failure
from toolyard.rollout.external import ExternalCall, ExternalCalls, Redo, StartOverError
from toolyard.rollout.finish import FinishReason, RolloutState
from toolyard.rollout.interaction import BaseInteraction
from toolyard.rollout.play.call_records import (
    call_records,
    images_of,
    plain,
    plain_metrics,
    told_at_creation,
    tool_calls,
    with_placeholders,
)
from toolyard.rollout.play.conclusion import conclude, lost_trajectory
from toolyard.rollout.play.machine import (
    BEGIN,
    Append,
    CallTools,
    Conclude,
    Effect,
    EffectFailed,
    Event,
    Interact,
    Machine,
    Prepare,
    Prepared,
    Progress,
    Sample,
    ToolsAnswered,
    TurnSampled,
    UserSaid,
)
from toolyard.rollout.play.setting import Setting
from toolyard.rollout.play.speaker import SampledTurn
from toolyard.rollout.request import AsyncRolloutRequest, turn_seed
from toolyard.supervision import Call, LoopClock, Scope, loop_clock, uninterrupted
from toolyard.tools.answers import as_reward
from toolyard.tools.instance import ToolInstances, ToolOutcome, ToolResult, handle_of, open_instances
from toolyard.tools.policy import CallPolicy, Recovery
from toolyard.turns import EngineAnswer

T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Begun:
    """The texts that tools returned from `create`, by tool name."""

    said: dict[str, str]


@dataclass(frozen=True, slots=True)
class UserAnswer:
    done: bool
    text: str
    reward: float | None
    metrics: dict[str, Any]


_BEGUN = TypeAdapter[Begun | StageFailure](Begun | StageFailure)
ANSWER = TypeAdapter[EngineAnswer | StageFailure](EngineAnswer | StageFailure)
_RESULTS = TypeAdapter[list[ToolResult] | StageFailure](list[ToolResult] | StageFailure)
_USER = TypeAdapter[UserAnswer | StageFailure](UserAnswer | StageFailure)


class Play:
    """One request being played. Call `run` once, and `abort` at any time."""

    def __init__(self, request: AsyncRolloutRequest, setting: Setting, external: ExternalCalls | None = None) -> None:
        self.request = request
        self.setting = setting
        self.external = external or ExternalCalls()
        self.failure: Failure | None = None
        self.interaction_rewards: list[float] = []
        self.stages: dict[str, float] = {}
        """Seconds spent in each state."""
        self._machine = Machine(setting.limits, interactive=setting.interaction is not None)
        self._progress = Progress()
        self._stack = AsyncExitStack()
        self._instances: ToolInstances | None = None
        self.simulating = False
        """The user simulator has started."""
        self._spoken: SampledTurn | None = None
        """The current turn."""
        self._calls: list[CallRecord] = []
        self._timings: dict[str, float] = {}
        self._proposed: tuple[list[Message], list[int]] = ([], [])
        self.solution: str | None = None
        """What the final reward judges. None: what the model said."""
        self.given_score: Callable[[], FinalScore] | None = None
        """In place of a final reward: returns a score that is known. Raises RewardError."""
        self.abandoned: list[str] = []
        """Calls that ignored their cancellation."""
        self._deadline = 0.0
        self._clock: LoopClock
        self._task: asyncio.Task[Any]
        self._scope: Scope | None = None

    async def run(self) -> Trajectory:
        """Play the request to its end, whatever that is. If cancelled, release everything and return no trajectory.

        Raises:
            DivergenceError: a replay differs from its tape.
            RecordError: the tape cannot be written.
        """
        task = asyncio.current_task()
        assert task is not None
        self._task, self._clock = task, loop_clock()
        cancellations = task.cancelling()
        try:
            return await self._run_to_completion()
        except (DivergenceError, RecordError, KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:
            if task.cancelling() > cancellations:
                raise
            return lost_trajectory(self, error)  # a bug: if raised, it would end the run, or silently a worker

    async def _run_to_completion(self) -> Trajectory:
        self.request.stage_since = time.monotonic()
        self._deadline = self._clock.now() + self.setting.limits.request_seconds
        async with self._stack:
            effects: deque[Effect] = deque(BEGIN)
            while not isinstance(effect := effects.popleft(), Conclude):
                if isinstance(effect, Append):
                    self._append()
                else:
                    effects += self._advance(await self._performed(effect))
            self._end_turn()
            return await conclude(self, self._stack, self._instances)

    def abort(self) -> None:
        """End it soon, as ABORTED."""
        self.request.abort_requested = True
        if self._scope is not None:
            self._scope.expire()

    async def supervised(self, work: Coroutine[Any, Any, T], what: str, seconds: float | None = None) -> T:
        """Await `work`, code that is not Toolyard's, and return its result.

        Raises:
            TimeoutError: it took more than `seconds`.
            BaseException: whatever it raised.
        """
        limits = self.setting.limits
        call = Call(work, what, self.request.request_id, seconds=seconds, grace=limits.grace_seconds, clock=self._clock)
        try:
            await call.ended()
        finally:
            if call.abandoned:
                self.abandoned.append(f"{call.what}, at {call.place}")
        if call.expired:
            raise TimeoutError(f"{what} took more than {seconds:g} s")
        if call.error is not None:
            raise call.error
        return call.value

    # ---------------------------------------------------------------------------------------------------- the stages
    def _advance(self, event: Event) -> Sequence[Effect]:
        self._progress, effects = self._machine.step(self._progress, event)
        request = self.request
        if request.state is not self._progress.state:
            request.state, request.waits_for = self._progress.state, ""
            request.stage_since = time.monotonic()
            _log.debug("entered %s", request.state)
        request.finish_reason = reason = self._progress.finish_reason
        if self.failure is None and reason is not None and reason.state is RolloutState.FAILED:
            self.failure = self._failure_of(reason)
        return effects

    def _failure_of(self, reason: FinishReason) -> Failure:
        """The failure for a reason that the machine itself decided."""
        if reason is FinishReason.PROMPT_TOO_LONG:
            limits = self.setting.limits
            room = f"prompt_length is {limits.prompt_length}, max_model_len {limits.max_model_len}"
            return Failure(
                TASK, RolloutState.PENDING.value, f"the prompt has {self._progress.prompt_tokens} tokens; {room}"
            )
        source = self.setting.speaker.engine_name
        told = "the engine aborted the answer repeatedly"
        return Failure(OURS, RolloutState.GENERATING.value, told, source, told)

    async def _performed(self, effect: Effect) -> Event:
        """Perform an effect and return its event. Raises only cancellation and errors of tapes."""
        stage, began = self._progress.state, self.external.now()
        try:
            event = await self._perform(effect, began)
        except (DivergenceError, RecordError):  # from tapes: they end the run
            raise
        except Exception as error:  # from processing the answer: deterministic, so not on the tape
            event = stage_failure(error, stage)
        seconds = self.external.now() - began
        key = stage.lower()
        self.stages[key] = self.stages.get(key, 0.0) + seconds
        if self._spoken is not None:
            self._timings[key] = seconds
        if isinstance(event, StageFailure):
            self.failure = event.failure
            return EffectFailed(event.reason)
        return event

    def _perform(self, effect: Effect, began: float) -> Awaitable[Event | StageFailure]:
        match effect:
            case Sample(max_tokens):
                self._end_turn()
                self._timings = {"started": began}
                return self._sample(max_tokens)
            case CallTools():
                return self._call_tools()
            case Interact():
                return self._interact()
            case Prepare():
                return self._prepare()
            case _:
                raise AssertionError(effect)

    async def _prepare(self) -> Event | StageFailure:
        request, setting = self.request, self.setting

        async def begin() -> Begun:
            request.waits_for = ", ".join(setting.tools)
            opened = open_instances(setting.tools, request.request_id, request.tools_kwargs, self.abandoned)
            self._instances = await self._stack.enter_async_context(opened)
            if setting.interaction is not None:
                self._stack.push_async_callback(self._finalize, setting.interaction)
                try:
                    work = setting.interaction.start(request.request_id, **(request.task.interaction_kwargs or {}))
                    await self.supervised(work, "simulator: start")
                except (Exception, SystemExit, asyncio.CancelledError, BaseExceptionGroup) as error:
                    if self._task.cancelling():
                        raise
                    raise InteractionError(f"start failed: {summarize(error)}") from error
                self.simulating = True
            said = {name: told_at_creation(instance.creation) for name, instance in self._instances.items()}
            return Begun({name: text for name, text in said.items() if text})

        def asked() -> JSON:
            return {"task": request.batch_data_id, "sample": request.rollout_offset, "seed": request.seed}

        async def begin_again(before: Begun | StageFailure) -> Begun | StageFailure:
            """The instances of another machine are gone: create new ones, which must say the same."""
            begun = await self._bounded(begin, setting.limits.create_seconds)
            if isinstance(begun, Begun) and begun != before:
                raise StartOverError(f"request {request.request_id}: a tool's `create` answered differently")
            return begun

        begun = await self._asked("begin", asked, _BEGUN, begin, setting.limits.create_seconds, redo=begin_again)
        if isinstance(begun, StageFailure):
            return begun
        for text in begun.said.values():
            last = request.messages[-1]
            request.messages[-1] = Message(last.role, f"{last.content}\n\n{text}")
        return Prepared(self.setting.speaker.begin(request))

    async def _sample(self, max_tokens: int) -> Event | StageFailure:
        request, speaker = self.request, self.setting.speaker
        answer = await self._asked(
            "sampled",
            partial(self._next_prompt, max_tokens),
            ANSWER,
            partial(self._ask_engine, max_tokens),
            self.setting.limits.generate_seconds,
        )
        if isinstance(answer, StageFailure):
            return answer
        self._spoken = spoken = speaker.take(request, answer)
        parsed = spoken.parsed
        calls = tool_calls(parsed, len(request.turns))
        request.messages.append(Message("assistant", parsed.text, parsed.reasoning, calls))
        return TurnSampled(spoken.tokens, answer.generation.finish, len(parsed.calls), len(parsed.malformed))

    def _next_prompt(self, max_tokens: int) -> JSON:
        prompt = self.setting.speaker.prompt(self.request)
        return {**prompt, "max_tokens": max_tokens, "seed": turn_seed(self.request)}

    def _ask_engine(self, max_tokens: int) -> Awaitable[EngineAnswer]:
        return self.supervised(self.setting.speaker.ask(self.request, max_tokens), "engine")

    async def _call_tools(self) -> Event | StageFailure:
        assert self._spoken is not None
        request, limits, parsed = self.request, self.setting.limits, self._spoken.parsed
        made = parsed.calls[: limits.max_parallel_calls]
        names = ", ".join(call.name for call in made)
        request.waits_for = names.encode("utf-8", "backslashreplace").decode()  # a model can write half a character
        results = await self._asked(
            "tools",
            partial(_question_of, made),
            _RESULTS,
            partial(self._executed, made),
            limits.tool_seconds,
            redo=partial(self._executed_again, made),
            once=self._why_only_once(made),
        )
        if isinstance(results, StageFailure):
            return results
        results = self._with_placeholders(results)
        records = call_records(parsed, results, len(request.turns), limits, self.setting.speaker.count)
        self._calls = records
        failed = next((result for result in results if result.outcome is ToolOutcome.FAILED), None)
        if failed is not None:
            told, source = f"tool {failed.tool!r}: {failed.error}", failed.source or f"tool {failed.tool!r}"
            failure = Failure(OURS, RolloutState.TOOL_CALLING.value, told, source, failed.cause)
            return StageFailure(FinishReason.TOOL_FAILURE, failure)
        images = [*map(images_of, results), *((),) * (len(records) - len(results))]
        messages = [
            Message("tool", record.response, tool_call_id=record.id, name=record.name or None, images=shown)
            for record, shown in zip(records, images, strict=True)
        ]
        return ToolsAnswered(self._propose(messages))

    def _with_placeholders(self, results: list[ToolResult]) -> list[ToolResult]:
        """Replace hidden images by text; the metrics record how many, and why."""
        if not any(result.response.image for result in results):
            return results
        request, speaker = self.request, self.setting.speaker
        used = sum(len(image.data) for message in request.messages for image in message.images)
        told, hidden = with_placeholders(results, self.setting.limits.max_image_bytes - used, speaker.hides_images)
        counts: JSON = request.metrics.setdefault("images", {"shown": 0, "hidden": 0})
        counts["shown"] += sum(len(result.response.image or ()) for result in told)
        counts["hidden"] += hidden
        if hidden:
            counts["why_hidden"] = speaker.hides_images or "more than limits.max_image_bytes"
        return told

    async def _executed(self, calls: Sequence[ParsedCall]) -> list[ToolResult]:
        started = round(time.monotonic() - self.request.stage_since, 6)
        if len(calls) == 1:  # the usual case; a separate task would cost as much as the call
            return [plain(await self._call(calls[0]), started)]
        async with asyncio.TaskGroup() as group:
            running = list(map(group.create_task, map(self._call, calls)))
        return [plain(task.result(), started) for task in running]

    async def _executed_again(
        self, calls: Sequence[ParsedCall], before: list[ToolResult] | StageFailure
    ) -> list[ToolResult] | StageFailure:
        """Bring the tools into the state that they had after `before`, as their `recovery` says."""
        if isinstance(before, StageFailure):
            return before
        recovery = [policy.recovery if (policy := self._policy(call)) else Recovery.REPLAY for call in calls]
        if Recovery.RESTART in recovery:
            told = f"tool {calls[recovery.index(Recovery.RESTART)].name!r} cannot continue on another machine"
            raise StartOverError(f"request {self.request.request_id}: {told}")
        again = [call for call, how in zip(calls, recovery, strict=True) if how is Recovery.RERUN]
        if again:
            now = await self._bounded(partial(self._executed, again), self.setting.limits.tool_seconds)
            then = [result for result, how in zip(before, recovery, strict=True) if how is Recovery.RERUN]
            if isinstance(now, StageFailure):
                return now
            if list(map(_answer_of, now)) != list(map(_answer_of, then)):
                raise StartOverError(f"request {self.request.request_id}: a repeated call answered differently")
        return before

    def _policy(self, call: ParsedCall) -> CallPolicy | None:
        tool = self.setting.tools.get(call.name)
        return None if tool is None else handle_of(tool).policy

    def _why_only_once(self, calls: Sequence[ParsedCall]) -> str:
        """Names a tool that does not say that its calls are repeatable; empty if all do."""
        for call in calls:
            policy = self._policy(call)
            if policy is not None and not policy.repeatable:
                return f"tool {call.name!r} does not say that its calls are repeatable (call.repeatable)"
        return ""

    def _call(self, call: ParsedCall) -> Coroutine[Any, Any, ToolResult]:
        assert self._instances is not None
        return self._instances.call(call.name, call.arguments)

    async def _interact(self) -> Event | StageFailure:
        request, interaction = self.request, self.setting.interaction
        assert interaction is not None

        async def respond() -> UserAnswer:
            said = [message.as_openai() for message in request.messages]
            kwargs = request.task.interaction_kwargs or {}
            work = interaction.generate_response(request.request_id, said, **kwargs)
            done, text, reward, metrics = await self.supervised(work, "simulator: generate_response")
            return UserAnswer(
                bool(done), str(text), None if reward is None else as_reward(reward), plain_metrics(metrics)
            )

        def asked() -> JSON:
            return {"messages": len(request.messages), "last": request.messages[-1].content}

        async def respond_again(before: UserAnswer | StageFailure) -> UserAnswer | StageFailure:
            """A simulator may count what it was asked: ask it again."""
            now = before
            if isinstance(before, UserAnswer):
                now = await self._bounded(respond, limits.interaction_seconds)
            if isinstance(now, UserAnswer) and now != before:
                raise StartOverError(f"request {request.request_id}: the simulator answered differently")
            return now

        limits = self.setting.limits
        answer = await self._asked("user", asked, _USER, respond, limits.interaction_seconds, redo=respond_again)
        if isinstance(answer, StageFailure):
            return answer
        if answer.reward is not None:
            self.interaction_rewards.append(answer.reward)
        if answer.metrics:
            request.metrics.setdefault("interaction", []).append(answer.metrics)
        return UserSaid(0 if answer.done else self._propose([Message("user", answer.text)]), answer.done)

    # ------------------------------------------------------------------------------------------------------- its parts
    def _propose(self, messages: list[Message]) -> int:
        assert self._spoken is not None
        ids = self.setting.speaker.propose(self.request, self._spoken.sampled, messages)
        self._proposed = messages, ids
        return len(ids)

    def _append(self) -> None:
        messages, ids = self._proposed
        self.request.messages += messages
        self.request.append_given(ids)

    def _end_turn(self) -> None:
        if self._spoken is not None:
            self.request.turns.append(Turn(self._spoken.sampled, tuple(self._calls), self._timings))
        self._spoken, self._calls = None, []

    def _asked(
        self,
        kind: str,
        asked: Callable[[], JSON],
        made_of: TypeAdapter[T | StageFailure],
        ask: Callable[[], Awaitable[T]],
        seconds: float,
        redo: Redo[T | StageFailure] | None = None,
        once: str = "",
    ) -> Awaitable[T | StageFailure]:
        """Make an external call, bounded by `seconds` and by the request's remaining time."""
        return self.external.call(
            ExternalCall(kind, asked, made_of, partial(self._bounded, ask, seconds), redo=redo, once=once)
        )

    async def _bounded(self, ask: Callable[[], Awaitable[T]], seconds: float) -> T | StageFailure:
        request, stage = self.request, self.request.state
        cancellations = self._task.cancelling()
        left = self._deadline - self._clock.now()
        if request.abort_requested:
            return our_failure(FinishReason.ABORTED, stage, "aborted")
        if left <= 0:  # even if nothing ever had to wait
            return self._overdue(stage)
        self._scope = scope = Scope(self._task, self._clock, min(seconds, left), self._note_wait)
        try:
            with scope:
                return await ask()
        except (Exception, SystemExit, asyncio.CancelledError, BaseExceptionGroup) as error:
            if self._task.cancelling() > cancellations:
                raise asyncio.CancelledError from error
            if not scope.expired:
                # This request was not cancelled, so a cancellation comes from the code it waited for.
                return stage_failure(error, stage)
        finally:
            self._scope = None
        where = f"in {stage}" + (f", waiting for {request.waits_for}" if request.waits_for else "")
        if request.abort_requested:
            return our_failure(FinishReason.ABORTED, stage, f"aborted {where}")
        if left <= seconds:
            return self._overdue(stage)
        return our_failure(
            FinishReason.STAGE_DEADLINE, stage, f"more than {seconds:g} s {where}", cause=request.waits_for
        )

    def _note_wait(self) -> None:
        """Called while it still waits: afterwards the reason is gone."""
        self.request.waits_for = self.setting.speaker.waits_for(self.request) or self.request.waits_for

    def _overdue(self, stage: RolloutState) -> StageFailure:
        whole, waits = self.setting.limits.request_seconds, self.request.waits_for
        where = f"in {stage}" + (f", waiting for {waits}" if waits else "")
        told = f"the request took more than {whole:g} s; it was {where}"
        return our_failure(FinishReason.REQUEST_DEADLINE, stage, told, cause=waits)

    async def _finalize(self, interaction: BaseInteraction) -> None:
        """Run to completion in spite of cancellations, within a time limit."""
        limits, kwargs = self.setting.limits, self.request.task.interaction_kwargs or {}
        call = Call(
            interaction.finalize(self.request.request_id, **kwargs),
            "simulator: finalize",
            self.request.request_id,
            seconds=limits.interaction_seconds,
            grace=limits.grace_seconds,
        )
        await uninterrupted(call)
        if call.abandoned:
            self.abandoned.append(f"{call.what}, at {call.place}")
        if call.expired:
            raise TimeoutError(f"finalize took more than {limits.interaction_seconds:g} s")
        if call.error is not None:
            raise call.error


def _answer_of(result: ToolResult) -> JSON:
    """What must be equal if a call is run again: what the model saw and was rewarded for, not how long it took."""
    return {"outcome": result.outcome, "response": result.response.model_dump(), "reward": result.reward}


def _question_of(calls: Sequence[ParsedCall]) -> JSON:
    return {"calls": [[call.name, call.arguments] for call in calls]}
