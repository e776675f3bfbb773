"""Generated word problems with answers, so that `toolyard train` can learn without a dataset."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolyard._lazy import exports

if TYPE_CHECKING:
    from toolyard.tasks.word_problems.files import write_problems
    from toolyard.tasks.word_problems.generator import problems

__all__ = ["problems", "write_problems"]

__getattr__, __dir__ = exports(
    __name__,
    {
        "toolyard.tasks.word_problems.files": "write_problems",
        "toolyard.tasks.word_problems.generator": "problems",
    },
)
