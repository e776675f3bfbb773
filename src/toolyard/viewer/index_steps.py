"""What is told of each step, added up by SQLite."""

# ruff: noqa: S608 - what is put together here are constants; every value is a parameter
from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from toolyard.viewer.index_sql import LOOKED_UP
from toolyard.viewer.protocol import StepSummary

_SUMS = """rows.step, sum(rows.damaged = ''), count(rows.score), avg(rows.score), min(rows.score), max(rows.score),
    avg(CASE WHEN rows.damaged = '' THEN rows.turns END), avg(CASE WHEN rows.damaged = '' THEN rows.tools END),
    avg(CASE WHEN rows.damaged = '' THEN rows.response_tokens END),
    avg(CASE WHEN rows.damaged = '' THEN rows.seconds END), sum(rows.damaged != '')"""


def step_summaries(connection: sqlite3.Connection, condition: str, values: Sequence[Any]) -> list[StepSummary]:
    """Of the rows for which `condition` holds. Damaged lines count as damaged, and for nothing else."""
    finishes, verdicts = defaultdict[int, dict[str, int]](dict), defaultdict[int, dict[str, int]](dict)
    connection.execute("BEGIN")  # the three belong together
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
            f"SELECT rows.step, said.verdict, sum(said.calls) AS times FROM {LOOKED_UP} "
            f"CROSS JOIN verdicts AS said ON said.number = rows.number WHERE {condition} "
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
