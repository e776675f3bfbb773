"""Where each token of a trajectory came from."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from toolyard.records.audit import Decode, try_decode
from toolyard.records.trajectory import Trajectory
from toolyard.viewer.protocol import Origin, TokenRun

UNKNOWN = -1
"""Replaces anything in a line's ids that is not an id."""
_LARGEST = 2**53


def token_runs(trajectory: Trajectory, decode: Decode | None = None) -> tuple[TokenRun, ...]:
    """All tokens in order, as runs of one origin and turn. Empty for a line without tokens.

    `decode` turns ids into text; without it runs have only ids.
    """
    tokens = trajectory.tokens
    ids, before = [*tokens.prompt_ids, *tokens.response_ids], len(tokens.prompt_ids)
    runs = [_run(Origin.PROMPT, None, 0, ids, before, decode, None)] if before else []
    turn_of = _turns(trajectory)
    for (origin, turn), places in groupby(range(len(tokens.response_ids)), lambda at: _place(trajectory, turn_of, at)):
        span = list(places)
        start, end = span[0], span[-1] + 1
        logprobs = tokens.response_logprobs
        given = _logprobs(logprobs, start, end) if logprobs is not None and origin is Origin.SAMPLED else None
        runs.append(_run(origin, turn, before + start, ids, before + end, decode, given))
    return tuple(runs)


def origin_at(trajectory: Trajectory, place: int) -> tuple[Origin, int | None]:
    """Origin and turn of the token at index `place` in `prompt_ids + response_ids`."""
    before = len(trajectory.tokens.prompt_ids)
    if place < before:
        return Origin.PROMPT, None
    return _place(trajectory, _turns(trajectory), place - before)


def _turns(trajectory: Trajectory) -> list[int]:
    """For each response token, the turn that sampled it, or the turn after which it was inserted."""
    starts = [turn.sampled.start for turn in trajectory.turns]
    return [max(bisect_right(starts, at) - 1, 0) for at in range(len(trajectory.tokens.response_ids))]


def _place(trajectory: Trajectory, turn_of: list[int], at: int) -> tuple[Origin, int | None]:
    mask = trajectory.tokens.response_mask
    sampled = at < len(mask) and bool(mask[at])
    turn = turn_of[at] if at < len(turn_of) and trajectory.turns else None
    return (Origin.SAMPLED if sampled else Origin.TOOL), turn


def _run(
    origin: Origin,
    turn: int | None,
    start: int,
    all_ids: Sequence[Any],
    end: int,
    decode: Decode | None,
    logprobs: list[float] | None,
) -> TokenRun:
    known = [number if type(number) is int and abs(number) <= _LARGEST else UNKNOWN for number in all_ids[start:end]]
    texts = None if decode is None else texts_of(known, decode, before=all_ids[start - 1 : start])
    return TokenRun(origin, turn, start, known, texts, logprobs)


def _logprobs(given: Sequence[Any], start: int, end: int) -> list[float]:
    """The logprob of each token; NaN if it is missing or not a number."""
    known = [float(one) if type(one) in (int, float) and abs(one) < _LARGEST else math.nan for one in given[start:end]]
    return known + [math.nan] * (end - start - len(known))


def texts_of(ids: Sequence[int], decode: Decode, before: Sequence[int] = ()) -> list[str]:
    """The text that each token adds; `before` is the preceding token, if any. If several tokens make up a character,
    the last one gets it. Ids that the tokenizer does not have are U+FFFD."""
    texts: list[str] = []
    context, begin = list(before), 0
    for at in range(len(ids)):
        added = _added(context, ids[begin : at + 1], decode)
        if added is not None and "\ufffd" in added and at - begin < 8 and at + 1 < len(ids):
            texts.append("")  # part of a character: the next token may complete it
            continue
        texts.append("\ufffd" if added is None else added)
        context, begin = ([] if added is None else [ids[at]]), at + 1
    return texts


def _added(context: Sequence[int], ids: Sequence[int], decode: Decode) -> str | None:
    """The text of `ids` after `context`. Alone they may decode differently: some tokenizers drop a leading space."""
    base, whole = try_decode(context, decode) if context else "", try_decode([*context, *ids], decode)
    if base is None or whole is None:
        return None
    return whole[len(base) :] if whole.startswith(base) else try_decode(ids, decode)
