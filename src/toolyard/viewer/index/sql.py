"""Queries as SQL over `rows` and `files`. Text is not in there: a text condition becomes a list of row numbers."""
# ruff: noqa: S608 - only constants are put together here; every value is a parameter

from __future__ import annotations

import dataclasses
import json
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from toolyard.records.trajectory import BRANCH
from toolyard.viewer.calls import Call
from toolyard.viewer.protocol import Attempt, Row, StepSummary
from toolyard.viewer.query import OF_CALLS, REWARD, Condition, Query, Range, SortKey

Matching = Callable[[str], Iterable[int]]
"""Returns the numbers of the rows that contain a text."""

TABLES = "files CROSS JOIN rows ON rows.file = files.id"
"""File by file, so that the natural order needs no sorting."""
LOOKED_UP = "rows CROSS JOIN files ON files.id = rows.file"
"""The same, for a few rows found by an SQLite index."""
ROW = ", ".join("files.name" if field.name == "file" else f"rows.{field.name}" for field in dataclasses.fields(Row))
CALL = ", ".join(f"calls.{name}" for name in Call._fields)
SAMPLE = "rows.step, files.run, rows.group_id, rows.task, rows.number, rows.score, rows.state = 'FAILED'"
"""The columns of a `Sample`."""
ATTEMPT = ", ".join(
    f"{'files' if name in ('file', 'run') else 'rows'}.{'name' if name == 'file' else name}"
    for name in Attempt._fields[:-1]
)
"""The columns of an `Attempt`, without its score."""
NOT_A_BRANCH = f"rows.request_id NOT GLOB '*{BRANCH}[0-9]*'"
"""Other branches of a session have its score: in a group, it counts once."""
NATURAL = "files.place, rows.number"
"""The order of the files and their lines; row numbers grow with the line in a file."""
_NUMBERS = {
    "score": "rows.score",
    "tools": "rows.tools",
    "failed_calls": "rows.failed_tools",
    "turns": "rows.turns",
    "length": "rows.response_tokens",
    "prompt": "rows.prompt_tokens",
    "chars": "rows.chars",
    "time": "rows.seconds",
    "started": "rows.started_at",
    "step": "rows.step",
    "line": "rows.line",
    "sample": "rows.sample",
    "group": "rows.group_id",
    "call_time": "calls.seconds",
}
_TEXTS = {
    "finish": "rows.finish",
    "state": "rows.state",
    "source": "rows.source",
    "task": "rows.task",
    "truth": "rows.truth",
    "id": "rows.request_id",
    "file": "files.name",
    "tool": "calls.tool",
    "run": "files.run",
    "verdict": "calls.verdict",
    "error": "calls.error",
}
_FLAGS = {"damaged": "rows.damaged != ''", "failed": "rows.state = 'FAILED'"}
_CALL = "EXISTS (SELECT 1 FROM calls WHERE calls.number = rows.number AND {})"
REWARD_BY_NAME = "(SELECT value FROM rewards WHERE rewards.number = rows.number AND rewards.name = ?)"
"""Its parameter is the name."""


def where(query: Query, matching: Matching) -> tuple[str, list[Any]]:
    """A condition and its parameters."""
    values: list[Any] = []
    alternatives = [_all_of(conditions, values, matching) for conditions in query.alternatives]
    return " OR ".join(f"({alternative})" for alternative in alternatives) or "1", values


def where_calls(query: Query) -> tuple[str, list[Any]]:
    """A condition on the calls of matching rows, and its parameters: which of them the query is about."""
    values: list[Any] = []
    alternatives = [
        " AND ".join(
            f"{'NOT ' if condition.negated else ''}{_test(condition, values)}"
            for condition in conditions
            if condition.field in OF_CALLS
        )
        or "1"
        for conditions in query.alternatives
    ]
    return " OR ".join(f"({alternative})" for alternative in alternatives) or "1", values


def _all_of(conditions: Sequence[Condition], values: list[Any], matching: Matching) -> str:
    rest = [one for one in conditions if one.field not in OF_CALLS or one.negated]
    tests = [_condition(one, values, matching) for one in rest]
    calls = [_test(one, values) for one in conditions if one.field in OF_CALLS and not one.negated]
    if calls:
        tests.append(_CALL.format(" AND ".join(calls)))
    return " AND ".join(tests)


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
    if field == "text" and isinstance(value, str):
        values.append(json.dumps(list(matching(value))))
        return "(rows.number IN (SELECT value FROM json_each(?)))"
    test = _test(condition, values)
    return _CALL.format(test) if field in OF_CALLS else test


def _test(condition: Condition, values: list[Any]) -> str:
    field, value = condition.field, condition.value
    if field in _FLAGS:
        return f"({_FLAGS[field]})" if value else f"(NOT {_FLAGS[field]})"
    if isinstance(value, str):
        # The index has no lone surrogates, and SQLite accepts none.
        values.append(value.casefold().encode("utf-8", "replace").decode())
        column = _TEXTS[field]
        return f"(instr(folded({column}), ?) > 0)" if condition.operator == ":" else f"(folded({column}) = ?)"
    if isinstance(value, Range):
        ends = [(sign, end) for sign, end in ((">=", value.low), ("<=", value.high)) if end is not None]
    else:
        ends = [("=" if condition.operator == ":" else condition.operator, value)]
    tests: list[str] = []
    for sign, end in ends:
        if field.startswith(REWARD):
            column = REWARD_BY_NAME
            values.append(field.removeprefix(REWARD))
        else:
            column = _NUMBERS[field]
        if end is None:
            return f"({column} IS NULL)"
        values.append(end)
        tests.append(f"{column} {sign} ?")
    return f"coalesce({' AND '.join(tests)}, 0)"


def values_of(connection: sqlite3.Connection, field: str, part: str) -> list[tuple[str, int]]:
    column = _TEXTS[field]
    tables = "calls" if field in OF_CALLS else LOOKED_UP
    wanted = part.casefold().encode("utf-8", "replace").decode()
    return connection.execute(
        f"SELECT {column}, count(*) AS times FROM {tables} WHERE {column} != '' AND instr(folded({column}), ?) > 0 "
        f"GROUP BY 1 ORDER BY instr(folded({column}), ?) = 1 DESC, times DESC, 1 LIMIT 20",
        (wanted, wanted),
    ).fetchall()


# Summaries of steps, computed by SQLite.


_SUMS = """rows.step, sum(rows.damaged = ''), sum(rows.state = 'FAILED'), count(rows.score), avg(rows.score),
    min(rows.score), max(rows.score), avg(rows.turns), avg(rows.tools), avg(rows.response_tokens), avg(rows.seconds),
    sum(rows.damaged != '')"""


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
            f"SELECT rows.step, calls.verdict, count(*) AS times FROM {LOOKED_UP} "
            f"CROSS JOIN calls ON calls.number = rows.number WHERE {condition} "
            "GROUP BY 1, 2 ORDER BY times DESC, 2",
            values,
        ):
            verdicts[step][verdict] = calls
    finally:
        connection.execute("COMMIT")
    return [
        StepSummary(*sums, finishes=finishes[sums[0]], verdicts=verdicts[sums[0]], damaged=damaged)
        for *sums, damaged in found
    ]
