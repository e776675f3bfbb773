"""Queries as SQL over `rows` and `files`. What was said is not in there: a condition on it is the numbers found."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable
from typing import Any

from toolyard.viewer.protocol import Row
from toolyard.viewer.query import Condition, Query, Range, SortKey

Matching = Callable[[str], Iterable[int]]
"""The numbers of the rows in which a text was said."""

TABLES = "files CROSS JOIN rows ON rows.file = files.id"
"""File by file, so that nothing needs to be sorted in the natural order."""
LOOKED_UP = "rows CROSS JOIN files ON files.id = rows.file"
"""The same for a few rows that an index of SQLite finds."""
ROW = ", ".join("files.name" if field.name == "file" else f"rows.{field.name}" for field in dataclasses.fields(Row))
NATURAL = "files.place, rows.number"
"""The order of the files and their lines; of one file, lines are numbered in their order."""
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
    """A condition, and its parameters."""
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
    """True or false, never null: so that its opposite is one as well."""
    said = _positive(condition, values, matching)
    return f"NOT {said}" if condition.negated else said


def _positive(condition: Condition, values: list[Any], matching: Matching) -> str:
    field, value = condition.field, condition.value
    if field == "damaged":
        return "(rows.damaged != '')" if value else "(rows.damaged = '')"
    if isinstance(value, str):
        if field == "text":
            values.append(json.dumps(list(matching(value))))
            return "(rows.number IN (SELECT value FROM json_each(?)))"
        # No text of the index has half of a surrogate pair, and SQLite takes none.
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
