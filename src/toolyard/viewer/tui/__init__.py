"""The terminal viewer, built with Textual."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolyard._lazy import exports

if TYPE_CHECKING:
    from toolyard.viewer.tui.app import Viewer

__all__ = ["Viewer"]

__getattr__, __dir__ = exports(
    __name__,
    {
        "toolyard.viewer.tui.app": "Viewer",
    },
)
