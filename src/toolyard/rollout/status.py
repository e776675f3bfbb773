"""What a process that plays requests says about itself: to the driver of a cluster, and to those who watch a run."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from toolyard.engines.protocol import ServerLoad
from toolyard.execution.workplaces import open_limiters, open_sandboxes
from toolyard.rollout.play.setting import Setting
from toolyard.rollout.request import AsyncRolloutRequest
from toolyard.sandbox.local import LocalSandbox

_WAITS_FOR_CHARS = 200


class SlowRequest(NamedTuple):
    """A running request."""

    request_id: str
    task: str
    state: str
    seconds: float
    """In this state."""
    turn: int
    waits_for: str


class SandboxLoad(NamedTuple):
    """An embedded sandbox, or several added up."""

    workers: int
    busy: int
    waiting: int
    sessions: int
    executions: dict[str, int]
    """Finished programs by verdict."""


class Status(NamedTuple):
    node: str
    pid: int
    states: dict[str, int]
    turns: int
    """Turns, sampled tokens and tool calls of requests that are running."""
    tokens: int
    calls: int
    slowest: tuple[SlowRequest, ...]
    servers: tuple[ServerLoad, ...] = ()
    sandbox: SandboxLoad | None = None
    limiters: tuple[str, ...] = ()
    """Names."""
    messages: tuple[tuple[int, str, str], ...] = ()
    """Numbered: stuck requests and blocked event loops. Repeated for a while, since reports get lost."""


def live_counts(running: Sequence[AsyncRolloutRequest], setting: Setting) -> tuple[int, int, int]:
    """Turns, sampled tokens and tool calls; of a turn that has not ended, the tokens that its engine tells of. Can be
    called from any thread."""
    turns = [turn for request in running for turn in list(request.turns)]
    tokens, progress = sum(request.sampled_tokens for request in running), setting.speaker.progress
    if progress is not None:
        tokens += sum(progress.sampled_tokens(request.request_id) for request in running)
    return len(turns), tokens, sum(len(turn.tool_calls) for turn in turns)


def status_of(
    running: Sequence[AsyncRolloutRequest],
    setting: Setting,
    *,
    slowest: int = 3,
    messages: Sequence[tuple[int, str, str]] = (),
) -> Status:
    """Can be called from any thread: it reads, and copies what the event loop may change meanwhile."""
    turns, tokens, calls = live_counts(running, setting)
    engine = setting.speaker.reports_servers
    return Status(
        os.uname().nodename,
        os.getpid(),
        dict(Counter(request.state.value for request in running)),
        turns,
        tokens,
        calls,
        tuple(
            _described(request, setting)
            for request in sorted(running, key=lambda request: request.stage_since)[:slowest]
        ),
        () if engine is None else tuple(engine.servers()),
        _sandbox_load(),
        tuple(str(getattr(limiter, "name", "")) for limiter in open_limiters()),
        tuple(messages),
    )


def _described(request: AsyncRolloutRequest, setting: Setting) -> SlowRequest:
    waits_for = request.waits_for
    with contextlib.suppress(RuntimeError):  # the engine changed it meanwhile
        waits_for = setting.speaker.waits_for(request) or waits_for
    seconds = max(0.0, time.monotonic() - request.stage_since)
    return SlowRequest(
        request.request_id,
        request.batch_data_id,
        request.state.value,
        seconds,
        len(request.turns) + 1,
        waits_for[:_WAITS_FOR_CHARS],
    )


def _sandbox_load() -> SandboxLoad | None:
    found = [sandbox.statistics() for sandbox in open_sandboxes() if isinstance(sandbox, LocalSandbox)]
    return added_up([SandboxLoad(one.workers, one.busy, one.waiting, one.sessions, one.executions) for one in found])


def added_up(loads: Sequence[SandboxLoad]) -> SandboxLoad | None:
    """None if there are none."""
    if not loads:
        return None
    executions: Counter[str] = Counter()
    for load in loads:
        executions.update(load.executions)
    return SandboxLoad(
        sum(load.workers for load in loads),
        sum(load.busy for load in loads),
        sum(load.waiting for load in loads),
        sum(load.sessions for load in loads),
        dict(executions),
    )
