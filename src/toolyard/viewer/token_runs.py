"""Where each token of a trajectory came from."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from toolyard.records.trajectory import Trajectory
from toolyard.viewer.protocol import Origin, TokenRun

Decode = Callable[[Sequence[int]], str]

UNKNOWN = -1
"""Stands for what a line has among its ids that is no id."""
_LARGEST = 2**53


def token_runs(trajectory: Trajectory, decode: Decode | None = None) -> tuple[TokenRun, ...]:
    """All tokens in order, in runs of one origin; sampled ones also by turn. Nothing for a line without tokens.

    `decode` gives the text of ids; without it runs have ids only.
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
    """Of a token, by its place in `prompt_ids + response_ids`, and the turn it belongs to."""
    before = len(trajectory.tokens.prompt_ids)
    if place < before:
        return Origin.PROMPT, None
    return _place(trajectory, _turns(trajectory), place - before)


def _turns(trajectory: Trajectory) -> list[int]:
    """Of each token after the prompt: the turn that sampled it, or after whose words it was put."""
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
    """Of each token; NaN for what is none, and where the line has too few."""
    known = [float(one) if type(one) in (int, float) and abs(one) < _LARGEST else math.nan for one in given[start:end]]
    return known + [math.nan] * (end - start - len(known))


def texts_of(ids: Sequence[int], decode: Decode, before: Sequence[int] = ()) -> list[str]:
    """What each token adds to the text of those before it; `before`: the one that precedes them all. Tokens that hold a
    part of a character show it with the last of them, and what the tokenizer does not know is U+FFFD."""
    texts: list[str] = []
    context, begin = list(before), 0
    for at in range(len(ids)):
        said = _added(context, ids[begin : at + 1], decode)
        if said is not None and "\ufffd" in said and at - begin < 8 and at + 1 < len(ids):
            texts.append("")  # half a character: the next token may complete it
            continue
        texts.append("\ufffd" if said is None else said)
        context, begin = ([] if said is None else [ids[at]]), at + 1
    return texts


def _added(context: Sequence[int], ids: Sequence[int], decode: Decode) -> str | None:
    """By themselves tokens may read otherwise: some tokenizers leave out a space at the beginning of any text."""
    try:
        base, whole = decode(context) if context else "", decode([*context, *ids])
        return whole[len(base) :] if whole.startswith(base) else decode(ids)
    except Exception:  # an id that this tokenizer does not have
        return None
