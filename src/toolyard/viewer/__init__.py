"""Viewing dumps in a terminal or a browser. `library` and the other models do not depend on a user interface."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolyard._lazy import exports

if TYPE_CHECKING:
    from toolyard.viewer.library import Library
    from toolyard.viewer.query import Query, QueryError, parse_query
    from toolyard.viewer.web.export import write_report

__all__ = ["Library", "Query", "QueryError", "parse_query", "write_report"]

__getattr__, __dir__ = exports(
    __name__,
    {
        "toolyard.viewer.library": "Library",
        "toolyard.viewer.query": "Query QueryError parse_query",
        "toolyard.viewer.web.export": "write_report",
    },
)
