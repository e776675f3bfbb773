"""Where verl's values and ours are meant to differ: docs/guides/verl-rewards.md has a line, with a reason, for each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"
Differences = Mapping[str, tuple[int, Any, Any]]
"""By what is scored: the number of the line in docs/guides/verl-rewards.md, verl's value and ours."""


def check(found: Mapping[str, tuple[Any, Any]], different: Differences) -> None:
    """Every difference is listed, and everything listed differs as stated. `found` has verl's value and ours."""
    differing = {name: values for name, values in found.items() if values[0] != values[1]}
    assert differing == {name: (verls, ours) for name, (_, verls, ours) in different.items()}
    text = (DOCS / "guides" / "verl-rewards.md").read_text()
    for number, *_ in different.values():
        assert re.search(rf"^\| {number} \|", text, re.MULTILINE), f"docs/guides/verl-rewards.md has no line {number}"
