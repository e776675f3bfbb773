"""The browser viewer: its page, its server, and reports in one file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolyard._lazy import exports

if TYPE_CHECKING:
    from toolyard.viewer.web.export import write_report
    from toolyard.viewer.web.server import Server

__all__ = ["Server", "write_report"]

__getattr__, __dir__ = exports(
    __name__,
    {
        "toolyard.viewer.web.export": "write_report",
        "toolyard.viewer.web.server": "Server",
    },
)
