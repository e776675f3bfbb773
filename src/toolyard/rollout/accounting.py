"""What became of every request that was planned: it is in the dump, or it is named as missing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from toolyard.errors import ToolyardError
from toolyard.messages import JSON

_SHOWN = 5


class AccountingError(ToolyardError):
    """A run cannot say what became of all of its requests."""


@dataclass(slots=True)
class Accounting:
    """planned = dumped + missing. Everything else is an error."""

    planned: int = 0
    before: int = 0
    """Found in the dump, and not played again."""
    dumped: set[str] = field(default_factory=set[str])
    """Written by this run; without a dump, handed over."""
    missing: dict[str, str] = field(default_factory=dict[str, str])
    """Request ids, and why there is no line of them."""
    problems: list[str] = field(default_factory=list[str])
    """What must not be: requests nobody knows of, workers that died, lines that are not there."""

    @property
    def in_dump(self) -> int:
        return self.before + len(self.dumped)

    def close(self, wanted: Iterable[str]) -> None:
        """Hold it against the requests that this run was to play."""
        lost = [request_id for request_id in wanted if request_id not in self.dumped and request_id not in self.missing]
        if lost:
            self.problems.append(f"{_count(len(lost))} disappeared: {_named(lost)}")
        if twice := self.dumped & self.missing.keys():
            self.problems.append(f"{_count(len(twice))} both dumped and missing: {_named(sorted(twice))}")

    def check(self) -> None:
        """
        Raises:
            AccountingError: the equation does not hold.
        """
        if self.problems:
            raise AccountingError(f"the run does not add up: {'; '.join(self.problems)}")

    def __str__(self) -> str:
        earlier = f" ({self.before} of them by an earlier run)" if self.before else ""
        line = f"{self.planned} planned = {self.in_dump} in the dump{earlier} + {len(self.missing)} missing"
        reasons: dict[str, list[str]] = {}
        for request_id, why in self.missing.items():
            reasons.setdefault(why, []).append(request_id)
        return line + "".join(f"; {why}: {_named(ids)}" for why, ids in reasons.items())

    def as_json(self) -> JSON:
        return {
            "planned": self.planned,
            "dumped": self.in_dump,
            "dumped_before": self.before,
            "missing": self.missing,
            "problems": self.problems,
        }


def _count(number: int) -> str:
    return f"{number} request{'' if number == 1 else 's'}"


def _named(ids: list[str]) -> str:
    more = len(ids) - _SHOWN
    return ", ".join(ids[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
