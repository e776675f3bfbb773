"""The conformance kit's report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from toolyard.errors import ChatError


class Outcome(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    REWRITES = "rewrites"
    """The template writes earlier turns differently in the history. Not a fault: sampled turns are kept unchanged.
    `seen` names what it rewrites."""
    NOT_APPLICABLE = "n.a."
    """The format does not claim this, or there is nothing to test it on; `seen` says why."""


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    claim: str
    outcome: Outcome
    seen: str
    """What was tried, or the first difference, decoded."""


@dataclass(frozen=True, slots=True)
class ConformanceReport:
    format: str
    tokenizer: str
    seed: int
    conversations: int
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return all(check.outcome is not Outcome.FAILED for check in self.checks)


class FailedError(Exception):
    """The claim does not hold."""


class RewritesError(Exception):
    """The claim holds except for what the template rewrites."""


class NotApplicableError(Exception):
    """The claim is not made."""


def judge(name: str, check: Callable[[], str]) -> Check:
    """Run `check`, whose docstring is the claim and which returns what it saw."""
    claim = " ".join((check.__doc__ or "").split())
    try:
        return Check(name, claim, Outcome.PASSED, check())
    except NotApplicableError as error:
        return Check(name, claim, Outcome.NOT_APPLICABLE, str(error))
    except RewritesError as error:
        return Check(name, claim, Outcome.REWRITES, str(error))
    except (FailedError, ChatError) as error:
        return Check(name, claim, Outcome.FAILED, str(error))
