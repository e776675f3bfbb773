"""Tasks: rows of datasets, read from files or bundled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolyard._lazy import exports

if TYPE_CHECKING:
    from toolyard.tasks.files import open_tasks, read_tasks
    from toolyard.tasks.protocol import Task

__all__ = ["Task", "open_tasks", "read_tasks"]

__getattr__, __dir__ = exports(
    __name__,
    {
        "toolyard.tasks.files": "open_tasks read_tasks",
        "toolyard.tasks.protocol": "Task",
    },
)
