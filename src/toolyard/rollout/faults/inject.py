"""Makes faults happen where real ones do: before the engine answers, inside tool calls, in the sandbox's processes.

All of them strike inside the calls that go through `ExternalCalls`. So their consequences are on tapes and in journals,
like those of real faults, and a replay repeats them without this module.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from toolyard.errors import ConfigError, EngineError, LimiterError
from toolyard.messages import JSON
from toolyard.rollout.config import RolloutConfig
from toolyard.rollout.external import ExternalCall, ExternalCalls, Redo
from toolyard.rollout.faults.profile import FaultProfile
from toolyard.rollout.play.speaker import Speaker, TokenSpeaker
from toolyard.rollout.request import AsyncRolloutRequest
from toolyard.sandbox.host.worker import before_request
from toolyard.tools.base import BaseTool
from toolyard.tools.calls import ToolHandle, ToolResult, use_handle
from toolyard.tools.code_interpreter.tool import SandboxFusionTool
from toolyard.tools.policy import Measure
from toolyard.tools.registry import get_tool_class, read_entries
from toolyard.turns import EngineAnswer

T = TypeVar("T")
_playing: ContextVar[FaultyCalls | None] = ContextVar("playing", default=None)


class Faults:
    """The faults of one process of a run."""

    def __init__(self, profile: FaultProfile) -> None:
        self.profile = profile
        self.playing: WeakValueDictionary[str, FaultyCalls] = WeakValueDictionary()
        """By request id."""

    def calls(self, calls: ExternalCalls | None, request: AsyncRolloutRequest, speaker: Speaker | None) -> FaultyCalls:
        """The same calls, with faults. Marks the request."""
        faulty = FaultyCalls(calls or ExternalCalls(), request, speaker, self.profile)
        self.playing[request.request_id] = faulty
        return faulty

    def take_over(self, tools: Iterable[BaseTool]) -> None:
        """From now on, calls of these tools have faults."""
        for tool in tools:
            use_handle(_FaultyHandle(tool, self.profile))

    async def before_attempt(self, request_id: str) -> None:
        """For an engine in this process.

        Raises:
            EngineError: a fault.
        """
        calls = self.playing.get(request_id)
        fault = None if calls is None else calls.engine_fault("engine_error", "engine_stall")
        if fault is None:
            return
        if fault["kind"] == "engine_error":
            raise EngineError("injected fault: the engine failed")
        assert self.profile.engine_stall is not None
        await asyncio.sleep(self.profile.engine_stall.seconds)


class FaultyCalls(ExternalCalls):
    """The calls of one request, with faults."""

    def __init__(
        self, calls: ExternalCalls, request: AsyncRolloutRequest, speaker: Speaker | None, profile: FaultProfile
    ) -> None:
        super().__init__()
        self.faults, self.started_at = calls.faults, calls.started_at
        self._calls = calls
        self._request = request
        self._speaker = speaker
        self._profile = profile
        self._turn = -1
        self._counts: Counter[str] = Counter()
        """Attempts and tool calls of this turn."""
        self._is_redo = False
        request.metrics["faults"] = {**profile.mark, "injected": self.faults}

    def now(self) -> float:
        return self._calls.now()

    async def call(self, one: ExternalCall[T]) -> T:
        self._counts.clear()
        if one.kind == "sampled":
            self._turn += 1
            one = replace(one, work=partial(self._misread, one.work))
        if one.redo is not None:
            one = replace(one, redo=partial(self._redone, one.redo))
        before = _playing.set(self)
        try:
            return await self._calls.call(one)
        finally:
            _playing.reset(before)

    def ended(self) -> None:
        self._calls.ended()

    def start_over(self) -> None:
        self._calls.start_over()

    # ------------------------------------------------------------------------------------------------------ the strikes
    def strike(self, kinds: Iterable[str], **place: int) -> JSON | None:
        """The record of the first of `kinds` that strikes at `place` of this turn; None if none does."""
        where = self._request.request_id, self._turn, *place.values()
        kind = next((kind for kind in kinds if self._profile.strikes(kind, *where)), None)
        if kind is None:
            return None
        fault: JSON = {"kind": kind, "turn": self._turn, **place, "time": round(time.time(), 3)}
        if not self._is_redo:
            self.faults.append(fault)
        return fault

    def engine_fault(self, *kinds: str) -> JSON | None:
        """For the next attempt at this turn."""
        return self.strike(kinds, attempt=self.count("attempt"))

    def count(self, what: str) -> int:
        """How many of these there were in this turn, before this one."""
        self._counts[what] += 1
        return self._counts[what] - 1

    def uncount(self, what: str) -> None:
        """The last one was none."""
        self._counts[what] -= 1

    async def _misread(self, work: Callable[[], Awaitable[T]]) -> T:
        answer, speaker = await work(), self._speaker
        if not isinstance(answer, EngineAnswer) or not isinstance(speaker, TokenSpeaker):
            return answer
        struck = speaker.has_calls(self._request, answer) and self.strike(["malformed_call"])
        return replace(answer, misread=True) if struck else answer

    async def _redone(self, redo: Redo[T], before: T) -> T:
        """A call that runs again on another machine has the same faults again; they are on record."""
        self._is_redo = True
        try:
            return await redo(before)
        finally:
            self._is_redo = False


class _FaultyHandle(ToolHandle):
    def __init__(self, tool: BaseTool, profile: FaultProfile) -> None:
        super().__init__(tool)
        limit = profile.tool_timeout
        self._hanging = None if limit is None else ToolHandle(_Hanging(tool, self, limit.seconds))

    async def call(
        self,
        instance_id: str,
        arguments: str | Mapping[str, Any],
        kwargs: JSON,
        measure: Measure | None = None,
        abandoned: list[str] | None = None,
    ) -> ToolResult:
        calls = _playing.get()
        if calls is None:
            return await super().call(instance_id, arguments, kwargs, measure, abandoned)
        number = calls.count("call")
        if self._hanging is not None and calls.strike(["tool_timeout"], call=number):
            return await self._hanging.call(instance_id, arguments, kwargs, measure, abandoned)
        if isinstance(self.tool, SandboxFusionTool) and (fault := calls.strike(["limiter_kill"], call=number)):
            await asyncio.to_thread(_kill_limiter, self.tool, fault)
        # Inherited by the task that the tool runs in, so only workers that serve this call are killed.
        before = before_request.set(partial(_kill_worker, calls, number, itertools.count()))
        try:
            return await super().call(instance_id, arguments, kwargs, measure, abandoned)
        finally:
            before_request.reset(before)


class _Hanging(BaseTool):
    """Stands in for a tool whose call hangs."""

    def __init__(self, tool: BaseTool, handle: ToolHandle, seconds: float) -> None:
        policy = handle.policy.model_copy(update={"timeout_seconds": seconds, "concurrency": None})
        super().__init__({"call": policy.model_dump()}, tool.get_openai_tool_schema())

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        await asyncio.Event().wait()


def _kill_worker(calls: FaultyCalls, call: int, attempts: Iterator[int], pid: int) -> None:
    fault = calls.strike(["sandbox_kill"], call=call, attempt=next(attempts))
    if fault is None:
        return
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError as error:
        fault["failed"] = f"process {pid}: {error.strerror}"


def _kill_limiter(tool: SandboxFusionTool, fault: JSON) -> None:
    from toolyard.limits.cluster.ray import RayLimiter

    limiter = tool.limiter
    if not isinstance(limiter, RayLimiter):
        fault["failed"] = "there was no limiter on Ray yet"
        return
    try:
        limiter.kill_lender()
    except LimiterError as error:
        fault["failed"] = str(error)


def check_profile(profile: FaultProfile, config: RolloutConfig, note: Callable[[str], None]) -> FaultProfile:
    """Compare the kinds of a profile with what this run has. Returns it without those that are skipped.

    Raises:
        ConfigError: the run cannot have one of them, and the profile does not skip such kinds.
    """
    missing = {kind: why for kind in profile.kinds if (why := _why_missing(kind, config))}
    told = "; ".join(f"{kind} ({why})" for kind, why in missing.items())
    if missing and profile.if_missing == "error":
        raise ConfigError(
            f"faults {config.faults!r}: this run cannot have {told}. Remove them, or set if_missing: skip"
        )
    if missing:
        note(f"faults that this run cannot have are skipped: {told}")
    return profile.model_copy(update=dict.fromkeys(missing))


def _why_missing(kind: str, config: RolloutConfig) -> str:
    engine, ray = config.engine.kind, sys.modules.get("ray")
    on_ray = config.cluster is not None or (ray is not None and ray.is_initialized())
    match kind:
        case "engine_busy" | "engine_reset" if not config.engine.has_servers:
            return f"the engine {engine} is not a server"
        case "engine_error" | "engine_stall" | "engine_busy" | "engine_reset" if config.engine.directory is not None:
            return "servers that come and go (engine.directory) have no faults"
        case "malformed_call" if engine == "openai":
            return "an openai server parses the calls itself"
        case "sandbox_kill" if all(
            given.get("sandbox_fusion_url") or given.get("sandbox") == "ray" for given in _interpreters(config)
        ):
            return "no tool has an embedded sandbox"
        case "limiter_kill" if not on_ray or not any(
            given.get("enable_global_rate_limit", True) for given in _interpreters(config)
        ):
            return "there is no code_interpreter with a limiter on Ray"
        case "worker_kill" if config.cluster is None:
            return "only runs on a cluster have workers (--ray)"
        case "slow_disk" if config.rollout_data_dir is None:
            return "there is no dump"
        case _:
            return ""


def _interpreters(config: RolloutConfig) -> list[JSON]:
    """The configs of the run's code interpreters, which are not opened."""
    if config.tools is None:
        return [{}]
    entries = [entry for _, entry in read_entries(Path(config.tools))]
    classes = [(get_tool_class(entry.class_name), entry.config) for entry in entries]
    return [given for found, given in classes if isinstance(found, type) and issubclass(found, SandboxFusionTool)]
