"""Why a reward is what it is: what was extracted from the answer, what was expected, and the reason in one sentence.

An explanation is stored with every trajectory, so its texts are cut. What is unknown is None.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

FIELDS = ("reason", "extracted", "expected")
"""The fields of an explanation: keys in dumps, and in what users' functions return."""
_MOST_CHARS = 300


@dataclass(frozen=True, slots=True)
class Explanation:
    """Short texts; create it with `explain`, which cuts them."""

    reason: str | None = None
    """One sentence: `the answer 71 is not 72`."""
    extracted: str | None = None
    """What was taken as the answer. None: nothing was found, or the reward does not say."""
    expected: str | None = None

    def as_json(self) -> dict[str, str]:
        """Return the texts that are known, by name."""
        return {name: text for name in FIELDS if (text := getattr(self, name)) is not None}


def explain(reason: Any = None, *, extracted: Any = None, expected: Any = None) -> Explanation:
    """Make an explanation from values of any kind and size."""
    sentence = " ".join((short_text(reason) or "").split())
    return Explanation(sentence or None, short_text(extracted), short_text(expected))


def explanation_in(said: Any) -> Explanation | None:
    """Return the explanation in a mapping with some of `FIELDS`; None if it has none of them, or is no mapping."""
    if not isinstance(said, Mapping):
        return None
    given = cast("Mapping[str, Any]", said)
    found = {name: given[name] for name in FIELDS if given.get(name) is not None}
    return explain(**found) if found else None


def short_text(value: Any) -> str | None:
    """Text as it is, other values as JSON; cut, and free of what cannot be encoded."""
    if value is None:
        return None
    if not isinstance(value, str):
        try:
            value = json.dumps(value, ensure_ascii=False, default=str)
        except Exception:  # keys that are not text, cycles, too many digits, a __str__ that raises
            value = f"({type(value).__name__})"
    cut: str = value if len(value) <= _MOST_CHARS else f"{value[: _MOST_CHARS - 1]}…"
    return cut.encode("utf-8", "replace").decode()
