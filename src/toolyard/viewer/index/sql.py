"""Queries as SQL over `rows` and `files`. Text is not in there: a text condition becomes a list of row numbers."""
# ruff: noqa: S608 - only constants are put together here; every value is a parameter

from __future__ import annotations

import dataclasses
import json
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from toolyard.viewer.protocol import Row, StepSummary
from toolyard.viewer.query import Condition, Query, Range, SortKey

Matching = Callable[[str], Iterable[int]]
"""Returns the numbers of the rows that contain a text."""

TABLES = "files CROSS JOIN rows ON rows.file = files.id"
"""File by file, so that the natural order needs no sorting."""
LOOKED_UP = "rows CROSS JOIN files ON files.id = rows.file"
"""The same, for a few rows found by an SQLite index."""
ROW = ", ".join("files.name" if field.name == "file" else f"rows.{field.name}" for field in dataclasses.fields(Row))
NATURAL = "files.place, rows.number"
"""The order of the files and their lines; row numbers grow with the line in a file."""
_NUMBERS = {
    "score": "rows.score",
    "tools": "rows.tools",
    "turns": "rows.turns",
    "length": "rows.response_tokens",
    "prompt": "rows.prompt_tokens",
    "chars": "rows.chars",
    "time": "rows.seconds",
    "step": "rows.step",
    "line": "rows.line",
    "sample": "rows.sample",
}
_TEXTS = {
    "finish": "rows.finish",
    "state": "rows.state",
    "source": "rows.source",
    "task": "rows.task",
    "id": "rows.request_id",
    "file": "files.name",
}
_VERDICT = "EXISTS (SELECT 1 FROM verdicts WHERE verdicts.number = rows.number AND {})"


def where(query: Query, matching: Matching) -> tuple[str, list[Any]]:
    """A condition and its parameters."""
    values: list[Any] = []
    alternatives = [
        " AND ".join(_condition(condition, values, matching) for condition in conditions)
        for conditions in query.alternatives
    ]
    return " OR ".join(f"({alternative})" for alternative in alternatives) or "1", values


def order_by(query: Query) -> str:
    return ", ".join([*map(_sort, query.sort), NATURAL])


def _sort(key: SortKey) -> str:
    direction = "DESC" if key.descending else "ASC"
    if key.field in _TEXTS:
        return f"folded({_TEXTS[key.field]}) {direction}"
    return f"{_NUMBERS[key.field]} {direction} NULLS LAST"


def _condition(condition: Condition, values: list[Any], matching: Matching) -> str:
    """An expression that is never null, so that it can be negated."""
    test = _positive(condition, values, matching)
    return f"NOT {test}" if condition.negated else test


def _positive(condition: Condition, values: list[Any], matching: Matching) -> str:
    field, value = condition.field, condition.value
    if field == "damaged":
        return "(rows.damaged != '')" if value else "(rows.damaged = '')"
    if isinstance(value, str):
        if field == "text":
            values.append(json.dumps(list(matching(value))))
            return "(rows.number IN (SELECT value FROM json_each(?)))"
        # The index has no lone surrogates, and SQLite accepts none.
        values.append(value.casefold().encode("utf-8", "replace").decode())
        column = "verdicts.verdict" if field == "verdict" else _TEXTS[field]
        test = f"instr(folded({column}), ?) > 0" if condition.operator == ":" else f"folded({column}) = ?"
        return _VERDICT.format(test) if field == "verdict" else f"({test})"
    column = _NUMBERS[field]
    if value is None:
        return f"({column} IS NULL)"
    if isinstance(value, Range):
        ends = [(sign, end) for sign, end in ((">=", value.low), ("<=", value.high)) if end is not None]
    else:
        ends = [("=" if condition.operator == ":" else condition.operator, value)]
    values += [end for _, end in ends]
    return f"coalesce({' AND '.join(f'{column} {sign} ?' for sign, _ in ends)}, 0)"


# Summaries of steps, computed by SQLite.


_SUMS = """rows.step, sum(rows.damaged = ''), count(rows.score), avg(rows.score), min(rows.score), max(rows.score),
    avg(CASE WHEN rows.damaged = '' THEN rows.turns END), avg(CASE WHEN rows.damaged = '' THEN rows.tools END),
    avg(CASE WHEN rows.damaged = '' THEN rows.response_tokens END),
    avg(CASE WHEN rows.damaged = '' THEN rows.seconds END), sum(rows.damaged != '')"""


def step_summaries(connection: sqlite3.Connection, condition: str, values: Sequence[Any]) -> list[StepSummary]:
    """Summaries of the rows that match `condition`. Damaged lines count only as damaged."""
    finishes, verdicts = defaultdict[int, dict[str, int]](dict), defaultdict[int, dict[str, int]](dict)
    connection.execute("BEGIN")  # the three queries must see the same state
    try:
        sums = connection.execute(f"SELECT {_SUMS} FROM {LOOKED_UP} WHERE {condition} GROUP BY 1 ORDER BY 1", values)
        found = sums.fetchall()
        for step, finish, count in connection.execute(
            f"SELECT rows.step, rows.finish, count(*) AS times FROM {LOOKED_UP} "
            f"WHERE ({condition}) AND rows.damaged = '' GROUP BY 1, 2 ORDER BY times DESC, 2",
            values,
        ):
            finishes[step][finish] = count
        for step, verdict, calls in connection.execute(
            f"SELECT rows.step, verdicts.verdict, sum(verdicts.calls) AS times FROM {LOOKED_UP} "
            f"CROSS JOIN verdicts ON verdicts.number = rows.number WHERE {condition} "
            "GROUP BY 1, 2 ORDER BY times DESC, 2",
            values,
        ):
            verdicts[step][verdict] = calls
    finally:
        connection.execute("COMMIT")
    return [
        StepSummary(
            step,
            count,
            scored,
            mean,
            least,
            most,
            *(value or 0.0 for value in means),
            finishes=finishes[step],
            verdicts=verdicts[step],
            damaged=damaged,
        )
        for step, count, scored, mean, least, most, *means, damaged in found
    ]
