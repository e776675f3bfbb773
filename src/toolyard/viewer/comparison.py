"""Two trajectories side by side: by turn, by token, and their first difference."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from toolyard.records.audit import Decode, try_decode
from toolyard.records.differences import excerpt, first_index
from toolyard.records.trajectory import Trajectory, Turn
from toolyard.viewer.foreign import ForeignCounts, counts_in
from toolyard.viewer.protocol import Comparison, DiffLine, Divergence, Origin, TokenRun, TurnDiff
from toolyard.viewer.timeline import request_timeline
from toolyard.viewer.token_runs import origin_at

_MOST_EDITS = 1000
"""Beyond this nothing is matched: the time grows quadratically, and the result would be unreadable."""
_CONTEXT = 12
_UNKNOWN = "–"
_FACT = 100
"""Maximum characters of a reward that is not a number."""


class RunPair(NamedTuple):
    """The runs of one origin and turn on both sides."""

    left: int | None
    """Index in the left trajectory's `token_runs`; None if it has no such run."""
    right: int | None
    equal: tuple[tuple[int, int, int], ...]
    """Equal stretches: start on the left, start on the right, number of tokens."""


def compare(left: Trajectory, right: Trajectory, decode: Decode | None = None) -> Comparison:
    """Compare two samples of one task, or the same request in two runs."""
    turns = tuple(
        _turn_diff(index, _turn_text(left, index), _turn_text(right, index))
        for index in range(max(len(left.turns), len(right.turns)))
    )
    prompt = align(left.input.split("\n"), right.input.split("\n")) if left.input != right.input else ()
    if not left.turns or not right.turns:  # without turns, compare the whole output as one
        turns = (_turn_diff(0, left.output, right.output),)
    divergence = _divergence(left, right, decode)
    return Comparison(divergence is None, divergence, prompt, turns, tuple(_facts(left, right)))


def pair_runs(left: Sequence[TokenRun], right: Sequence[TokenRun]) -> tuple[RunPair, ...]:
    """The runs of two trajectories side by side, in order."""
    names = [[(run.origin, run.turn) for run in runs] for runs in (left, right)]
    pairs: list[RunPair] = []
    one = other = 0
    for at, to, count in [*_matches(*names), (len(left), len(right), 0)]:
        pairs += [RunPair(index, None, ()) for index in range(one, at)]
        pairs += [RunPair(None, index, ()) for index in range(other, to)]
        for step in range(count):
            equal = tuple(_matches(left[at + step].ids, right[to + step].ids))
            pairs.append(RunPair(at + step, to + step, equal))
        one, other = at + count, to + count
    return tuple(pairs)


# Alignment ------------------------------------------------------------------------------------------------------------


def align(left: Sequence[str], right: Sequence[str]) -> tuple[DiffLine, ...]:
    """Lines side by side, with equal ones matched."""
    lines: list[DiffLine] = []
    one = other = 0
    for at, to, count in [*_matches(left, right), (len(left), len(right), 0)]:
        paired = min(at - one, to - other)
        lines += map(_beside, left[one : one + paired], right[other : other + paired])
        lines += _only(left[one + paired : at], right[other + paired : to])
        lines += map(_beside, left[at : at + count], right[to : to + count])
        one, other = at + count, to + count
    return tuple(lines)


def _beside(left: str, right: str) -> DiffLine:
    return DiffLine("same" if left == right else "changed", left, right)


def _only(left: Sequence[str], right: Sequence[str]) -> list[DiffLine]:
    return [DiffLine("left", line, None) for line in left] + [DiffLine("right", None, line) for line in right]


def _matches(left: Sequence[Any], right: Sequence[Any]) -> list[tuple[int, int, int]]:
    """Equal stretches in order: start on the left, start on the right, length. Optimal unless there are too many edits
    (Myers' greedy algorithm)."""
    begin, most = 0, min(len(left), len(right))
    while begin < most and left[begin] == right[begin]:
        begin += 1
    end = 0
    while end < most - begin and left[-1 - end] == right[-1 - end]:
        end += 1
    inner = _edited(left[begin : len(left) - end], right[begin : len(right) - end])
    found = [(at + begin, to + begin, count) for at, to, count in inner]
    if begin:
        found.insert(0, (0, 0, begin))
    if end:
        found.append((len(left) - end, len(right) - end, end))
    return found


def _edited(left: Sequence[Any], right: Sequence[Any]) -> list[tuple[int, int, int]]:
    """`reached[d][k]`: the furthest left index on diagonal `k` (left minus right) with `d` edits."""
    reached: list[dict[int, int]] = [{1: 0}]
    if not left or not right:
        return []
    for edits in range(min(len(left) + len(right), _MOST_EDITS) + 1):
        last, now = reached[-1], dict[int, int]()
        for k in range(-edits, edits + 1, 2):
            down, over = last.get(k + 1, -1), last.get(k - 1, -2) + 1
            at = max(down, over)
            to = at - k
            if not (0 <= at <= len(left) and 0 <= to <= len(right)):
                continue  # past the end of one side
            while at < len(left) and to < len(right) and left[at] == right[to]:
                at, to = at + 1, to + 1
            now[k] = at
        reached.append(now)
        if now.get(len(left) - len(right)) == len(left):
            break
    return _traced(reached)


def _traced(reached: list[dict[int, int]]) -> list[tuple[int, int, int]]:
    """Trace the path back from the furthest point."""
    k = max(reached[-1], key=lambda one: 2 * reached[-1][one] - one)
    found: list[tuple[int, int, int]] = []
    for edits in range(len(reached) - 1, 0, -1):
        at, last = reached[edits][k], reached[edits - 1]
        down, over = last.get(k + 1, -1), last.get(k - 1, -2) + 1
        came = max(down, over)
        if at > came:
            found.append((came, came - k, at - came))
        k = k + 1 if down >= over else k - 1
    return found[::-1]


def _turn_diff(index: int, left: str, right: str) -> TurnDiff:
    return TurnDiff(index, left == right, align(left.split("\n"), right.split("\n")))


def _turn_text(trajectory: Trajectory, index: int) -> str:
    """A turn as text: what was sampled, then the result of each call."""
    if index >= len(trajectory.turns):
        return ""
    turn: Turn = trajectory.turns[index]
    results = [
        f"── {call.name or 'call'}: {call.metrics.get('verdict') or call.outcome} ──\n{call.response}"
        for call in turn.tool_calls
    ]
    return "\n".join([turn.sampled.text, *results])


# The first difference -------------------------------------------------------------------------------------------------


def _divergence(left: Trajectory, right: Trajectory, decode: Decode | None) -> Divergence | None:
    one = [*left.tokens.prompt_ids, *left.tokens.response_ids]
    other = [*right.tokens.prompt_ids, *right.tokens.response_ids]
    if not one or not other:
        return _of_texts(left, right)
    place = first_index(one, other)
    if place is None:
        return None
    longer = left if place < len(one) else right
    origin, turn = origin_at(longer, place)
    return Divergence(
        token=place,
        turn=turn,
        origin=origin.value,
        left=_around(one, place, decode),
        right=_around(other, place, decode),
        explanation=_explain(left, right, origin, turn, place, (len(one), len(other))),
    )


def _explain(
    left: Trajectory, right: Trajectory, origin: Origin, turn: int | None, place: int, lengths: tuple[int, int]
) -> str:
    if place >= min(lengths):
        shorter = "left" if lengths[0] < lengths[1] else "right"
        ended = left if shorter == "left" else right
        return f"The {shorter} one ends here ({ended.finish_reason}); the other continues."
    if origin is Origin.PROMPT:
        return "The prompts differ."
    if origin is Origin.SAMPLED:
        versions = [sorted({v for turn in one.turns for v in turn.sampled.weight_versions}) for one in (left, right)]
        weights = "" if versions[0] == versions[1] else f", under weights {versions[0]} and {versions[1]}"
        return f"{_turn_name(turn)}: a different token was sampled after the same text{weights}."
    return f"After {_turn_name(turn).lower()}: the inserted text differs, for example a tool result."


def _turn_name(turn: int | None) -> str:
    return "The response" if turn is None else f"Turn {turn + 1}"


def _of_texts(left: Trajectory, right: Trajectory) -> Divergence | None:
    one, other = left.input + left.output, right.input + right.output
    at = first_index(one, other)
    if at is None:
        return None
    inside = at < min(len(left.input), len(right.input))
    what = "the prompts differ" if inside else "the responses differ"
    return Divergence(
        None,
        None,
        (Origin.PROMPT if inside else Origin.SAMPLED).value,
        excerpt(one, at),
        excerpt(other, at),
        f"At character {at} {what}. One of the dumps has no tokens, so nothing more is known.",
    )


def _around(ids: Sequence[int], place: int, decode: Decode | None) -> str:
    shown = list(ids[place : place + _CONTEXT])
    if not shown:
        return "the end"
    plain = " ".join(str(number)[:20] for number in shown)
    text = None if decode is None else try_decode(shown, decode)
    return plain if text is None else text


def _facts(left: Trajectory, right: Trajectory) -> list[tuple[str, str, str]]:
    told: tuple[tuple[str, Callable[[Trajectory], str]], ...] = (
        ("score", lambda side: _told(side.score)),
        ("finish", lambda side: side.finish_reason),
        ("turns", lambda side: _told(_counts(side).turns)),
        ("tool calls", lambda side: _told(_counts(side).tools)),
        ("response tokens", lambda side: str(len(side.tokens.response_ids) or _UNKNOWN)),
        ("seconds", _seconds),
    )
    names = sorted({*left.rewards, *right.rewards})
    return [(name, fact(left), fact(right)) for name, fact in told] + [
        (f"reward {name}", _told(left.rewards.get(name)), _told(right.rewards.get(name))) for name in names
    ]


def _seconds(trajectory: Trajectory) -> str:
    timeline = request_timeline(trajectory)
    return f"{timeline.seconds:.4g}" if timeline.segments else _UNKNOWN


def _counts(trajectory: Trajectory) -> ForeignCounts:
    if not (trajectory.turns or trajectory.messages):
        return counts_in(trajectory.input, trajectory.output)
    return ForeignCounts(len(trajectory.turns), sum(len(turn.tool_calls) for turn in trajectory.turns))


def _told(value: Any) -> str:
    """A reward as text. Usually a number, but a line may contain anything."""
    if value is None:
        return _UNKNOWN
    return f"{value:.6g}" if type(value) is float else json.dumps(value)[:_FACT]
