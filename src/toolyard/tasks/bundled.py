"""Tasks that ship with Toolyard, by name.

`word-problems`: sixty grade-school problems written for this project, the easiest first, in GSM8K's format. Their
`expression` computes the answer, so that a test can verify each one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class BundledTasks:
    name: str
    path: Path
    data_source: str


_FOLDER = Path(__file__).parent
_ALL = (BundledTasks("word-problems", _FOLDER / "word_problems.jsonl", "toolyard/word-problems"),)

NAMES = tuple(tasks.name for tasks in _ALL)


def find(name: str | Path) -> BundledTasks | None:
    return next((tasks for tasks in _ALL if tasks.name == name), None)
