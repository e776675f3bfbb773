"""Chooses the zygote a Python program is forked from: one that has already imported what the program will import.

A wrong guess costs time, never correctness, so a pattern over the source is enough.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

LIGHT = "light"
_IMPORT = re.compile(r"^[ \t]*(?:from[ \t]+(\w+)|import[ \t]+([\w., \t]+))", re.MULTILINE)


def imported_packages(code: str) -> set[str]:
    """Top-level names after `import` and `from` at the start of a line."""
    found: set[str] = set()
    if "import" in code:
        for source, listed in _IMPORT.findall(code):
            if source:
                found.add(source)
            found.update(part.strip().split(".")[0].split(" ")[0] for part in listed.split(",") if part.strip())
    return found


def choose_profile(code: str, profiles: Mapping[str, frozenset[str]]) -> str:
    """The profile that covers most of what `code` imports with the fewest extra packages."""
    wanted = imported_packages(code)
    best, best_rank = LIGHT, (0, 0)
    for name, modules in profiles.items():
        covered = len(wanted & modules)
        if covered and (covered, -len(modules)) > best_rank:
            best, best_rank = name, (covered, -len(modules))
    return best
