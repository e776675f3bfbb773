"""The spans of a trajectory, from its recorded times.

    request
    ├─ prepare                 tools and simulator are created, the prompt is rendered
    ├─ turn                    one for each sampled message
    │  ├─ generate
    │  │  └─ wait for engine
    │  ├─ tool NAME            one for each call that was made; they run concurrently
    │  │  ├─ wait for tool slot
    │  │  ├─ wait for permit
    │  │  ├─ wait for sandbox
    │  │  └─ sandbox run
    │  └─ interaction          the user simulator
    └─ reward                  tools are released, the final reward is computed

Waits that took no time have no span. No attribute contains what a model, a user or a tool said.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, cast

from toolyard.records.jsonl import duration
from toolyard.records.trajectory import CallRecord, Trajectory, Turn

Attribute = str | int | float | bool
Attributes = Mapping[str, Attribute | None]
"""Those that are None are left out."""
_NONE: Attributes = {}
_MOST_CHARS = 128
"""Maximum characters of an attribute: ids of tasks may have any length."""
_MOST = (1 << 63) - 1
_LATEST = 1.8e10
"""Unix seconds whose nanoseconds fit into 64 bits."""
_ROUNDING = 1e-4
_OK = "ok"
_NOT_MADE = frozenset({"malformed", "too_many_calls"})
_NAMED_BY_THE_MODEL = frozenset({"unknown_tool", "unknown"})
"""Outcomes of calls whose name may be any text."""


@dataclass(slots=True)
class Span:
    """A piece of a request's time. The first span of a request is its root; every other one is within its parent."""

    name: str
    start: float
    """Unix seconds."""
    end: float
    parent: int | None
    """Index of its parent in the request's list; None for the root."""
    attributes: Mapping[str, Attribute] = field(default_factory=dict[str, Attribute])
    error: str = ""
    """Why it failed, in one word; empty if it did not."""


def spans_of(trajectory: Trajectory) -> list[Span]:
    """The spans of a request, parents first; empty if the trajectory does not say when it began."""
    if trajectory.started_at is None:
        return []
    layout = _Layout(duration(trajectory.started_at))
    seconds = _mapping(trajectory.metrics.get("seconds"))
    failed = trajectory.finish_reason if trajectory.state == "FAILED" else ""
    root = layout.add("request", 0.0, 0.0, None, _request_attributes(trajectory), failed)
    now = layout.stage("prepare", 0.0, seconds.get("pending"), root)
    for number, turn in enumerate(trajectory.turns):
        now = _turn(layout, number, turn, max(now, duration(turn.timings.get("started"))), root)
    # A message that could not be sampled is no turn, but it took its time.
    in_turns = sum(duration(turn.timings.get("generating")) for turn in trajectory.turns)
    lost = duration(seconds.get("generating")) - in_turns
    if lost > _ROUNDING:
        now = layout.stage("generate", now, lost, root, error=trajectory.finish_reason)
    now = layout.stage("reward", now, seconds.get("reward"), root)
    spans = layout.spans
    spans[root].end = min(spans[root].start + now, _LATEST)
    return spans


def trace_id_of(trajectory: Trajectory) -> int:
    """The same whenever the same trajectory is sent, and another one if the request is played again."""
    return _digest(f"{trajectory.request_id}\0{trajectory.started_at!r}", 16)


def span_id_of(trace_id: int, index: int) -> int:
    return _digest(f"{trace_id}\0{index}", 8)


def _digest(text: str, size: int) -> int:
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=size).digest()
    return int.from_bytes(digest, "big") or 1  # 0 is not a valid id


class _Layout:
    """Places spans on the clock. Times are seconds after the request's start."""

    def __init__(self, origin: float) -> None:
        self.spans: list[Span] = []
        self._origin = origin

    def add(
        self, name: str, start: float, end: float, parent: int | None, attributes: Attributes = _NONE, error: str = ""
    ) -> int:
        """Add a span and return its index. It is cut to fit into its parent, unless that is the root."""
        start, end = min(self._origin + start, _LATEST), min(self._origin + end, _LATEST)
        if parent:
            within = self.spans[parent]
            start, end = min(max(start, within.start), within.end), min(end, within.end)
        known = {f"toolyard.{key}": _bounded(value) for key, value in attributes.items() if value is not None}
        self.spans.append(Span(name, start, max(start, end), parent, known, error))
        return len(self.spans) - 1

    def stage(
        self, name: str, start: float, seconds: Any, parent: int, attributes: Attributes = _NONE, error: str = ""
    ) -> float:
        """Add a span of `seconds`, if they are any, and return its end."""
        end = start + duration(seconds)
        if end > start:
            self.add(name, start, end, parent, attributes, error)
        return end


def _turn(layout: _Layout, number: int, turn: Turn, start: float, root: int) -> float:
    timings = turn.timings
    sampled = start + duration(timings.get("generating"))
    called = sampled + duration(timings.get("tool_calling"))
    end = called + duration(timings.get("interacting"))
    not_made = sum(call.outcome in _NOT_MADE for call in turn.tool_calls)
    inside = layout.add("turn", start, end, root, {"turn": number, "calls_not_made": not_made})
    if sampled > start:
        said = turn.sampled
        about: Attributes = {
            "sampled_tokens": said.end - said.start,
            "cached_tokens": said.cached_tokens,
            "finish": said.finish,
            "attempts": said.attempts,
            "weight_version": said.weight_versions[-1] if said.weight_versions else None,
        }
        asked = layout.add("generate", start, sampled, inside, about)
        layout.stage("wait for engine", start, said.queue_seconds, asked)
    for call in turn.tool_calls:
        if call.outcome not in _NOT_MADE:
            _call(layout, call, sampled + duration(call.started), inside)
    if not turn.tool_calls:  # they did not end, for example because of a deadline
        layout.stage("tools", sampled, timings.get("tool_calling"), inside, error="no result")
    layout.stage("interaction", called, timings.get("interacting"), inside)
    return end


def _call(layout: _Layout, call: CallRecord, start: float, turn: int) -> None:
    end = start + duration(call.seconds)
    name = "?" if call.outcome in _NAMED_BY_THE_MODEL else call.name
    about: Attributes = {
        "tool": name,
        "outcome": call.outcome,
        "attempts": call.attempts,
        "truncated": call.truncated,
        "reward": call.reward,
    }
    tool = layout.add(
        f"tool {_bounded(name)}", start, end, turn, about, error="" if call.outcome == _OK else call.outcome
    )
    metrics = call.metrics
    permit, run = duration(metrics.get("permit_seconds")), duration(metrics.get("run_seconds"))
    slot = duration(duration(metrics.get("queue_seconds")) - permit)
    now = layout.stage("wait for tool slot", start, call.queue_seconds, tool)
    if call.attempts > 1:  # what a tool reports is about its last attempt
        now = max(now, end - permit - slot - run)
    now = layout.stage("wait for permit", now, permit, tool)
    now = layout.stage("wait for sandbox", now, slot, tool)
    told = {key: str(metrics[key]) for key in ("verdict", "isolation") if key in metrics}
    layout.stage("sandbox run", now, run, tool, told)


def _request_attributes(trajectory: Trajectory) -> Attributes:
    failure = trajectory.failure
    return {
        "request_id": trajectory.request_id,
        "task": trajectory.batch_data_id,
        "sample": trajectory.rollout_offset,
        "step": trajectory.step,
        "data_source": trajectory.data_source,
        "state": trajectory.state,
        "finish_reason": trajectory.finish_reason,
        "score": trajectory.score,
        "turns": len(trajectory.turns),
        "prompt_tokens": len(trajectory.tokens.prompt_ids),
        "response_tokens": len(trajectory.tokens.response_ids),
        "failed_stage": None if failure is None else failure.stage,
        "failure_source": None if failure is None else failure.source or None,
    }


def _bounded(value: Attribute) -> Attribute:
    """A dump may contain anything; what goes out is short, fits into 64 bits and is valid UTF-8."""
    if isinstance(value, str):
        return value[:_MOST_CHARS].encode("utf-8", "replace").decode()
    return max(-_MOST, min(value, _MOST)) if isinstance(value, int) and not isinstance(value, bool) else value


def _mapping(value: Any) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}
