"""Where the time of a request and of a step went."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

from toolyard.records.jsonl import duration
from toolyard.records.trajectory import CallRecord, Trajectory, Turn
from toolyard.viewer.protocol import RequestTimeline, Segment, Stage, StepTimeline

_SLOWEST = 20
_WATERFALL = 200


def request_timeline(trajectory: Trajectory, number: int | None = None) -> RequestTimeline:
    """The stages of a request, in order. A line without timings has none."""
    seconds = _mapping(trajectory.metrics.get("seconds"))
    pending = duration(seconds.get("pending"))
    segments = [Segment(Stage.QUEUE, 0.0, pending, label="waiting to start")] if pending else []
    now, estimated = pending, False
    for index, turn in enumerate(trajectory.turns):
        started = turn.timings.get("started")
        if started is None:
            estimated = True
        begin = max(now, duration(started))
        if begin > now and segments:
            segments.append(Segment(Stage.OTHER, now, begin, index, "between turns"))
        now = _turn(segments, index, turn, begin)
    reward = duration(seconds.get("reward"))
    if reward:
        segments.append(Segment(Stage.REWARD, now, now + reward, label="release tools, final reward, audit"))
        now += reward
    return RequestTimeline(number, trajectory.request_id, tuple(segments), now, trajectory.started_at, estimated)


def _turn(segments: list[Segment], index: int, turn: Turn, now: float) -> float:
    generating = duration(turn.timings.get("generating"))
    if generating:
        sampled = turn.sampled.end - turn.sampled.start
        segments.append(Segment(Stage.ENGINE, now, now + generating, index, f"{sampled} tokens"))
        now += generating
    calling = duration(turn.timings.get("tool_calling"))
    if calling:
        longest = max(turn.tool_calls, key=lambda call: duration(call.seconds), default=None)
        wait = min(_wait(longest), calling) if longest else 0.0
        name = longest.name if longest else "tools"
        if wait:
            segments.append(Segment(Stage.LIMITER, now, now + wait, index, f"{name}: waiting for a permit or worker"))
        others = f" and {len(turn.tool_calls) - 1} more" if len(turn.tool_calls) > 1 else ""
        segments.append(Segment(Stage.TOOL, now + wait, now + calling, index, f"{name}{others}"))
        now += calling
    interacting = duration(turn.timings.get("interacting"))
    if interacting:
        segments.append(Segment(Stage.INTERACTION, now, now + interacting, index, "user simulator"))
        now += interacting
    return now


def _wait(call: CallRecord) -> float:
    return min(duration(call.metrics.get("queue_seconds")), duration(call.seconds))


def stage_seconds(timeline: RequestTimeline) -> dict[str, float]:
    """Seconds by stage; stages that took no time are left out."""
    found: dict[str, float] = {}
    for segment in timeline.segments:
        found[segment.stage.value] = found.get(segment.stage.value, 0.0) + segment.end - segment.start
    return found


def step_timeline(step: int, timelines: Iterable[RequestTimeline]) -> StepTimeline | None:
    """The timeline of a step from those of its requests; None if none of them has timings."""
    known = sorted((one for one in timelines if one.segments), key=lambda one: one.seconds, reverse=True)
    if not known:
        return None
    starts = [one.started_at for one in known if one.started_at is not None]
    first = min(starts) if len(starts) == len(known) else None

    def end(one: RequestTimeline) -> float:
        return one.seconds if first is None else (one.started_at or first) - first + one.seconds

    by_stage: dict[str, float] = {}
    for one in known:
        for stage, seconds in stage_seconds(one).items():
            by_stage[stage] = by_stage.get(stage, 0.0) + seconds
    critical = max(known, key=end)
    of_critical = stage_seconds(critical)
    stage, most = max(of_critical.items(), key=lambda item: item[1])
    verdict = (
        f"The step waited {end(critical):.1f} s for request {critical.request_id}, "
        f"{most / critical.seconds if critical.seconds else 0:.0%} of its time in {stage}."
    )
    middle = known[len(known) // 2].seconds
    if middle and critical.seconds > 2 * middle:
        verdict += f" Half of the requests took {middle:.1f} s or less."
    waterfall: list[RequestTimeline] = []
    if first is not None:
        waterfall = sorted(sorted(known, key=end)[-_WATERFALL:], key=lambda one: one.started_at or first)
    return StepTimeline(
        step,
        len(known),
        first,
        end(critical),
        by_stage,
        critical,
        of_critical,
        verdict,
        tuple(known[:_SLOWEST]),
        tuple(waterfall),
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}
