"""Answers to the page's requests, as JSON values; for the server, and for exported reports."""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, cast

from toolyard._version import __version__
from toolyard.errors import RecordError, ToolyardError
from toolyard.messages import JSON
from toolyard.records.audit import Decode, try_decode
from toolyard.records.trajectory import Trajectory
from toolyard.viewer.comparison import compare, pair_runs
from toolyard.viewer.conversation import conversation
from toolyard.viewer.library import MEASURES, Library
from toolyard.viewer.notes import Notes
from toolyard.viewer.protocol import Group, RequestTimeline, Row
from toolyard.viewer.query import FIELDS, REWARD, SORTABLE, Condition, Kind, Query, QueryError, quoted
from toolyard.viewer.reasons import reward_breakdown
from toolyard.viewer.timeline import request_timeline, step_timeline
from toolyard.viewer.token_runs import token_runs

MOST_ROWS = 1000
_BINS = 20
_WHOLE = frozenset(("turns", "tools", "response_tokens"))
_TIMED = 2000
"""Only the slowest requests of a step are read for its timeline."""
_MOST_TEXT = 2_000_000
"""Maximum characters of one text: browsers show more only very slowly."""
_MOST_TEXTS = 4 * _MOST_TEXT
"""Maximum characters of all texts in one answer."""
_MEMBERS = 100
"""Maximum samples of a group in one answer: lines without a task may all have the same prompt."""
_SHORT = 200
"""Texts up to this length are never cut."""
_MOST_TOKENS = 200_000
_DEEPEST = 60
_LARGEST = 2**53
"""JavaScript's numbers are exact up to here."""


class UnknownKeyError(ToolyardError):
    """There is no line with that key."""


class Answers:
    """Answers about one library. All methods are thread-safe."""

    def __init__(
        self, library: Library, *, title: str, decode: Decode | None = None, notes: Notes | None = None
    ) -> None:
        self.library = library
        self.notes = notes or Notes(library.folder)
        self.title = title
        self.decode = decode
        """Turns ids into text; used only if it reproduces a trajectory's own prompt."""
        self._timeline = lru_cache(maxsize=4096)(self._timeline_of)

    # Lists ------------------------------------------------------------------------------------------------------------

    def overview(self) -> JSON:
        library = self.library
        return {
            "title": self.title,
            "folder_name": library.folder.resolve().name,
            "count": library.count(),
            "generation": library.generation,
            "steps": [dataclasses.asdict(step) for step in library.steps()],
            "runs": library.runs(),
            "tokenizer": self.decode is not None,
            "version": __version__,
            "notes": self.saved(),
        }

    def rows(self, query: Query, offset: int, limit: int) -> JSON:
        found = self.library.rows(query, offset=offset, limit=min(limit, MOST_ROWS))
        failed = self.library.count(_and(query, Condition("failed", ":", True)))
        return {"count": self.library.count(query), "failed": failed, "rows": self.marked(found), "query": str(query)}

    def find(self, request_id: str) -> JSON:
        return {"rows": keyed(self.library.find(request_id))}

    def position(self, key: str, query: Query) -> JSON:
        return {"position": self.library.position(self.row_of(key).number, query)}

    def search(self, needle: str, query: Query, key: str | None, *, backwards: bool) -> JSON:
        here = None if key is None else self.row_of(key).number
        return self._found(self.library.next_match(needle, here, query, backwards=backwards), query)

    def next_step(self, step: int, query: Query, *, backwards: bool) -> JSON:
        """The first row, in the query's order, of the step after (or before) `step`."""
        steps = [one.step for one in self.library.steps(query)]
        beyond = [one for one in steps if (one < step if backwards else one > step)]
        if not beyond:
            return self._found(None, query)
        wanted = max(beyond) if backwards else min(beyond)
        return self._found(next(iter(self.library.rows(_of_step(query, wanted), limit=1)), None), query)

    def _found(self, row: Row | None, query: Query) -> JSON:
        position = None if row is None else self.library.position(row.number, query)
        return {"row": None if row is None else with_key(row), "position": position}

    # One trajectory ---------------------------------------------------------------------------------------------------

    def detail(self, key: str) -> JSON:
        row = self.row_of(key)
        trajectory = self.library.trajectory(row.number)
        if trajectory is None:
            why = row.damaged or "this line was changed or removed after it was indexed"
            return {"row": with_key(row), "key": key, "damaged": why, "raw": self.library.raw(row.number, _MOST_TEXT)}
        near = self.library.related(row.number)
        fields = {
            "bubbles": conversation(trajectory),
            "score": trajectory.score,
            "rewards": trajectory.rewards,
            "why": reward_breakdown(trajectory),
            "failure": trajectory.failure,
            "timeline": request_timeline(trajectory, row.number),
            "token_exact": trajectory.token_exact,
            "has_tokens": bool(trajectory.tokens.prompt_ids or trajectory.tokens.response_ids),
            "ground_truth": trajectory.ground_truth,
            "metrics": trajectory.metrics,
            "extra": trajectory.extra,
            "input": trajectory.input,
            "output": trajectory.output,
        }
        return {
            "row": with_key(row),
            "key": key,
            **_BrowserSafe()(fields),
            "note": self.note(row),
            "group": keyed(near.group),
            "twins": keyed(near.elsewhere),
        }

    def tokens(self, key: str) -> JSON:
        trajectory, left_out = _first_tokens(self._trajectory(key))
        decode = self.decode if self._fits(trajectory) else None
        runs = token_runs(trajectory, decode)
        return {
            "runs": [dataclasses.asdict(run) for run in runs],
            "tokenizer": decode is not None,
            "left_out": left_out,
        }

    def raw(self, key: str) -> JSON:
        return {"text": self.library.raw(self.row_of(key).number, _MOST_TEXT)}

    def comparison(self, left: str, right: str) -> JSON:
        one, other = self._trajectory(left), self._trajectory(right)
        decode = self.decode if self._fits(one) and self._fits(other) else None
        runs = [token_runs(_first_tokens(trajectory)[0]) for trajectory in (one, other)]
        return {
            "left": with_key(self.row_of(left)),
            "right": with_key(self.row_of(right)),
            "comparison": _BrowserSafe()(compare(one, other, decode)),
            "runs": pair_runs(*runs) if all(runs) else [],
        }

    # Notes ------------------------------------------------------------------------------------------------------------

    def saved(self) -> JSON:
        """The saved views. If the notes cannot be read, the page says why, and shows the dump without them."""
        try:
            return {"views": self.notes.views(), "read_only": self.notes.read_only}
        except RecordError as error:
            return {"views": {}, "read_only": str(error)}

    def note(self, row: Row) -> str:
        with suppress(RecordError):
            return self.notes.of(row)
        return ""

    def marked(self, rows: Sequence[Row]) -> list[JSON]:
        """Rows with their keys, and whether they have a note."""
        noted: set[int] = set()
        with suppress(RecordError):
            noted = self.notes.noted(rows)
        return [{**with_key(row), "noted": row.number in noted} for row in rows]

    # Steps ------------------------------------------------------------------------------------------------------------

    def step(self, step: int, query: Query) -> JSON:
        summary = next((one for one in self.library.steps(query) if one.step == step), None)
        if summary is None:
            raise UnknownKeyError(f"no trajectory of step {step} matches the filter")
        asked = _of_step(query, step)
        readable = _and(asked, Condition("damaged", ":", False)).sorted_by("time", descending=True)
        slowest = self.library.rows(readable, limit=_TIMED)
        runs = sorted({run_of(row) for row in slowest})
        timelines = [self._timeline(row, self.library.generation) for row in slowest]
        if len(runs) > 1:  # their start times have nothing to do with each other
            timelines = [dataclasses.replace(one, started_at=None) for one in timelines]
        found = step_timeline(step, timelines)
        timeline: JSON | None = None
        if found is not None:
            keys = {row.number: key_of(row) for row in slowest}
            timeline = dataclasses.asdict(found)
            for one in (timeline["critical"], *timeline["slowest"], *timeline["waterfall"]):
                one["key"] = keys.get(one["number"])
        return {
            "summary": dataclasses.asdict(summary),
            "timeline": timeline,
            "runs": runs,
            "distributions": self._distributions(asked),
        }

    # Groups and calls -------------------------------------------------------------------------------------------------

    def groups(self, query: Query, *, kind: str = "", sort: str = "", offset: int = 0, limit: int = 100) -> JSON:
        """`kind`: only these; `sort`: mean, std, size or failed, with a minus for descending order."""
        found = self.library.groups(query)
        chosen = [group for group in found if not kind or group.kind == kind]
        field = sort.removeprefix("-")
        if field:
            if field not in _GROUP_SORTS:
                raise QueryError(f"cannot sort groups by {field!r}; expected one of {', '.join(_GROUP_SORTS)}", 0)
            chosen = _sorted(chosen, _GROUP_SORTS[field], descending=sort.startswith("-"))
        page = chosen[offset : offset + min(limit, MOST_ROWS)]
        rows = {
            row.number: row
            for row in self.library.fetch([number for group in page for number in group.numbers[:_MEMBERS]])
        }
        return {
            "count": len(chosen),
            "kinds": Counter(group.kind.value for group in found),
            "several_runs": len(self.library.runs()) > 1,
            "largest": max((len(group.numbers) for group in found), default=0),
            "groups": [_group(group, rows) for group in page if group.numbers[0] in rows],
        }

    def calls(self, query: Query) -> JSON:
        report = self.library.calls(query)
        told = dataclasses.asdict(report)
        examples = (*told["errors"], *told["slowest"])
        rows = {row.number: row for row in self.library.fetch(list({one["number"] for one in examples}))}
        for one in examples:
            row = rows.get(one["number"])
            one |= {"key": row and key_of(row), "request_id": row and row.request_id, "step": row and row.step}
        return told

    def changes(self, before: Query, after: Query, *, kind: str = "", offset: int = 0, limit: int = 100) -> JSON:
        """What became of each task between two selections."""
        found = self.library.changes(before, after)
        both = [one for one in found if one.change is not None]
        chosen = [one for one in found if not kind or one.kind == kind]
        page = chosen[offset : offset + min(limit, MOST_ROWS)]
        rows = {row.number: row for row in self.library.fetch([one.number for one in page])}
        return {
            "count": len(chosen),
            "kinds": Counter(one.kind for one in found),
            "tasks": len(both),
            "before": sum(one.before or 0.0 for one in both) / len(both) if both else None,
            "after": sum(one.after or 0.0 for one in both) / len(both) if both else None,
            "changes": [
                {**dataclasses.asdict(one), "change": one.change, **_shown(rows[one.number])}
                for one in page
                if one.number in rows
            ],
        }

    def suggestions(self, field: str, part: str) -> JSON:
        """What may be written next, with a note: values of `field` that contain `part`, with how many rows or calls
        have them; or fields, with their kinds, if `field` is empty."""
        if FIELDS.get(field) is Kind.TEXT:
            found = self.library.values(field, part)
            return {"values": [[quoted(value), count] for value, count in found]}
        wanted = part.lower()
        if field:
            offered = SORTABLE if field == "sort" else ("yes", "no") if FIELDS.get(field) is Kind.FLAG else ()
            return {"values": [[value, None] for value in offered if wanted in value]}
        kinds = {**FIELDS, **{REWARD + name: Kind.NUMBER for name in self.library.reward_names()}}
        notes = {**{name: kind.value for name, kind in kinds.items()}, "sort": "order"}
        names = sorted((name for name in notes if wanted in name.lower()), key=lambda name: not name.startswith(wanted))
        return {"values": [[name if kinds.get(name) is Kind.NUMBER else f"{name}:", notes[name]] for name in names]}

    def statistics(self, query: Query) -> JSON:
        by_step: dict[int, list[float | None]] = {}
        for step, score in self.library.scores(query):
            by_step.setdefault(step, []).append(score)
        edges = bin_edges(score for scores in by_step.values() for score in scores if score is not None)
        steps: list[JSON] = []
        for summary in self.library.steps(query):
            counted = histogram(by_step.get(summary.step, []), edges)
            steps.append({**dataclasses.asdict(summary), "histogram": counted})
        distributions = self._distributions(query) if len(steps) == 1 else None
        return {"steps": steps, "edges": edges, "distributions": distributions}

    def _distributions(self, query: Query) -> JSON:
        rows = self.library.measures(query)
        return {name: distribution(name, [row[at] for row in rows]) for at, name in enumerate(MEASURES)}

    # ------------------------------------------------------------------------------------------------------------------

    def row_of(self, key: str) -> Row:
        """
        Raises:
            UnknownKeyError: no line has that key. Files are looked up only in the index: a key cannot lead elsewhere.
        """
        file, _, line = key.rpartition(":")
        row = self.library.at(file, int(line)) if line.isascii() and line.isdigit() and len(line) < 19 else None
        if row is None:
            raise UnknownKeyError(f"there is no line {key!r} in this dump")
        return row

    def _trajectory(self, key: str) -> Trajectory:
        trajectory = self.library.trajectory(self.row_of(key).number)
        if trajectory is None:
            raise UnknownKeyError(f"{key} is damaged")
        return trajectory

    def _timeline_of(self, row: Row, generation: int) -> RequestTimeline:
        """`generation` is only a cache key, so that a replaced file is read again."""
        trajectory = self.library.trajectory(row.number)
        if trajectory is None:
            return RequestTimeline(row.number, "", (), 0.0, None, True)
        return request_timeline(trajectory, row.number)

    def _fits(self, trajectory: Trajectory) -> bool:
        """Whether the tokenizer matches this trajectory: another one would show nonsense."""
        return self.decode is not None and decodes(self.decode, trajectory)


class _BrowserSafe:
    """Makes a value fit for a browser: cuts text that is too long, alone or in total, writes integers that JavaScript
    cannot represent as text, and drops what is nested too deeply."""

    def __init__(self) -> None:
        self._left = _MOST_TEXTS

    def __call__(self, value: Any, depth: int = 0) -> Any:
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, int) and abs(value) > _LARGEST:
            return str(value)
        if value is None or isinstance(value, int | float):
            self._left -= 8
            return value
        if isinstance(value, tuple):
            return [self(inner, depth + 1) for inner in cast("tuple[Any, ...]", value)]
        if isinstance(value, Mapping | list):
            return self._decoded(cast("Mapping[Any, Any] | list[Any]", value), depth)
        fields = dataclasses.fields(value)
        return {field.name: self(getattr(value, field.name), depth + 1) for field in fields}

    def _decoded(self, value: Mapping[Any, Any] | list[Any], depth: int) -> Any:
        """JSON values of the line itself: only these may be dropped."""
        beyond = depth > _DEEPEST or self._left <= 0
        if isinstance(value, list):
            return ["…"] if beyond else [self(inner, depth + 1) for inner in value]
        if beyond:
            return {"…": "…"}
        return {self._text(str(name)): self(inner, depth + 1) for name, inner in value.items()}

    def _text(self, text: str) -> str:
        most = max(min(_MOST_TEXT, self._left), _SHORT)
        self._left -= min(len(text), most)
        return text if len(text) <= most else f"{text[:most]}… ({len(text) - most} more characters)"


def _group(group: Group, rows: Mapping[int, Row]) -> JSON:
    members = [
        {"key": key_of(row), "sample": row.sample, "score": score, "advantage": advantage, **_ended(row)}
        for number, score, advantage in list(zip(group.numbers, group.scores, group.advantages, strict=True))[:_MEMBERS]
        for row in [rows.get(number)]
        if row is not None
    ]
    told = {name: getattr(group, name) for name in ("step", "run", "group_id", "task", "kind", "mean", "std", "failed")}
    return {**told, "size": len(group.numbers), "members": members, **_shown(rows[group.numbers[0]])}


def _shown(row: Row) -> JSON:
    return {"preview": row.preview, "truth": row.truth}


def _ended(row: Row) -> JSON:
    return {"finish": row.finish, "failure": (row.failure or row.finish) if row.state == "FAILED" else ""}


def _sorted(groups: Iterable[Group], value: Callable[[Group], float | None], *, descending: bool) -> list[Group]:
    """Unknown values come last."""
    sign = -1 if descending else 1
    known = [(found is None, sign * (found or 0.0), group) for group in groups for found in [value(group)]]
    return [group for *_, group in sorted(known, key=lambda one: one[:2])]


_GROUP_SORTS: dict[str, Callable[[Group], float | None]] = {
    "mean": lambda group: group.mean,
    "std": lambda group: group.std,
    "size": lambda group: len(group.numbers),
    "failed": lambda group: group.failed,
}


def _first_tokens(trajectory: Trajectory) -> tuple[Trajectory, int]:
    """The trajectory with at most `_MOST_TOKENS`, and how many were left out."""
    tokens = trajectory.tokens
    prompt = tokens.prompt_ids[:_MOST_TOKENS]
    response = tokens.response_ids[: _MOST_TOKENS - len(prompt)]
    left_out = len(tokens.prompt_ids) + len(tokens.response_ids) - len(prompt) - len(response)
    shown = dataclasses.replace(tokens, prompt_ids=prompt, response_ids=response)
    return dataclasses.replace(trajectory, tokens=shown), left_out


def _of_step(query: Query, step: int) -> Query:
    return _and(query, Condition("step", ":", float(step)))


def _and(query: Query, condition: Condition) -> Query:
    """The query with an additional condition."""
    return dataclasses.replace(
        query, alternatives=tuple((*conditions, condition) for conditions in query.alternatives or ((),))
    )


def decodes(decode: Decode, trajectory: Trajectory) -> bool:
    """Whether `decode` turns the trajectory's prompt ids into its prompt."""
    return try_decode(trajectory.tokens.prompt_ids, decode) == trajectory.input


def key_of(row: Row) -> str:
    """The key of a row, used in links."""
    return f"{row.file}:{row.line}"


def run_of(row: Row) -> str:
    return row.file.rpartition("/")[0]


def with_key(row: Row) -> JSON:
    return {**dataclasses.asdict(row), "key": key_of(row)}


def keyed(rows: Sequence[Row]) -> list[JSON]:
    return [with_key(row) for row in rows]


def bin_edges(scores: Iterable[float]) -> list[float]:
    """The edges of equal bins over all scores, even if there are only a few different values."""
    known = [score for score in scores if math.isfinite(score)]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    if low >= 0.0 and high <= 1.0:
        low, high = 0.0, 1.0  # most rewards: use the same axis for all
    return _equal_bins(low, high)


def _equal_bins(low: float, high: float) -> list[float]:
    if high / 2 - low / 2 < 1e-12:
        low, high = low - 0.5, high + 0.5
    # Not by their difference, which may overflow.
    return [low * (1 - at / _BINS) + high * (at / _BINS) for at in range(_BINS + 1)]


def histogram(values: Sequence[float | None], edges: Sequence[float]) -> JSON:
    """The number of values in each bin, and of those that are missing."""
    counts = [0] * (len(edges) - 1)
    none = 0
    for value, times in Counter(values).items():  # most values occur often
        if value is None or not math.isfinite(value):
            none += times
        else:
            counts[min(max(bisect_right(edges, value) - 1, 0), len(counts) - 1)] += times
    return {"counts": counts, "none": none}


def distribution(name: str, values: Sequence[float | None]) -> JSON:
    """A histogram of one of the `MEASURES`; with a bin for each number if there are only a few whole ones."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    whole = name in _WHOLE and high - low < _BINS
    if whole:
        edges: list[float] = [low + at for at in range(int(high - low) + 2)]
    else:
        edges = bin_edges(known) if name == "score" else _equal_bins(low, high)
    return {"edges": edges, **histogram(values, edges), "whole": whole}
