"""Wrap an answer whose function is called, or on which test code runs. Pure: text in, text out.

One program text serves all cases of a suite; what differs comes through stdin. Inside the sandbox the harness
(`driver`) reads stdin first, so that the answer finds it empty, then runs the suite's setup, the answer, and the call
or the test code, and reports the outcome on stdout. A random number precedes each of its reports, to distinguish them
from what the answer prints.

The answer is a module of its own, not the main one: code under `if __name__ == "__main__":` does not run, since it
would read missing input, and print. It is compiled from its own text, so that tracebacks show its own line numbers.
Names that judging sites import for everyone (`List`, `deque`, `inf`, `math`, …) are available if it uses them, since
the starter code of tasks does: see `_AT_HAND`.

Covered: an answer that prints the harness's reports, returns objects of any kind, reads stdin, closes stdout, shadows
builtins, forks, or exits early, even in the middle of a test. The expected return value is never in the sandbox, so
forging a result is no easier than returning it.
Not covered: test code shares its process with the answer. An answer that looks for the tests, or for the number, in its
caller's frames can claim that it passed; so can one that replaces what the tests use, and an object that claims to be
equal to everything.
"""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import dataclass
from typing import Any

from toolyard.errors import ConfigError
from toolyard.rewards.code import driver as code_driver
from toolyard.rewards.code.protocol import Case, Suite, SuiteKind

READY, TASK_FAILED = "ready", "task"
RETURNED, ODD = "returned", "odd"
PASSED, FAILED = "passed", "failed"

_AT_HAND = {
    "typing": "Any Callable DefaultDict Deque Dict FrozenSet Generator Iterable Iterator List Optional Sequence Set "
    "Tuple Union",
    "bisect": "bisect_left bisect_right insort insort_left insort_right",
    "collections": "Counter OrderedDict defaultdict deque namedtuple",
    "copy": "deepcopy",
    "functools": "cache cmp_to_key lru_cache partial reduce",
    "heapq": "heapify heappop heappush heappushpop heapreplace nlargest nsmallest",
    "itertools": "accumulate chain combinations combinations_with_replacement groupby islice pairwise permutations "
    "product zip_longest",
    "math": "ceil comb factorial floor gcd inf isqrt lcm log2 perm pi prod sqrt",
    "operator": "itemgetter",
    "string": "ascii_lowercase ascii_uppercase",
}
_MODULES = "bisect collections copy datetime functools heapq itertools json math operator random re string sys"
_IMPORTS = {name: f"from {module} import {name}" for module, names in _AT_HAND.items() for name in names.split()}
_MODULE_IMPORTS = {name: f"import {name}" for name in _MODULES.split()}
_LONG, _TIMES_LONGER = 1 << 20, 32
"""Characters of a value that are always parsed, and how much longer an equal one may be: 0 is also 0.0000000000001."""
_WORD = re.compile(r"[\w.]++")
_DRIVERS = {SuiteKind.FUNCTION: code_driver.CALL, SuiteKind.ASSERTS: code_driver.ASSERTS}


@dataclass(frozen=True, slots=True)
class HarnessReport:
    """What the harness reported, and what the program printed besides."""

    word: str | None
    """RETURNED, ODD, PASSED or FAILED; READY: it started, then reported nothing; TASK_FAILED: the suite's own code
    failed before the answer ran; None: it did not even start."""
    value: Any = None
    """RETURNED: the value. ODD: a description of the value. FAILED: line, source and message of the failed test.
    TASK_FAILED: why."""
    printed: bytes = b""
    size: int = 0
    """Length of the value in JSON, in characters."""


class Harness:
    """The harness of one answer and one suite of kind FUNCTION or ASSERTS."""

    def __init__(self, suite: Suite, code: str) -> None:
        self._calls = suite.kind is SuiteKind.FUNCTION
        self._last_words = (RETURNED, ODD) if self._calls else (PASSED, FAILED)
        self._nonce = secrets.token_hex(16)
        self._mark = f"\n{self._nonce} ".encode()
        names = _at_hand("\n".join([code, *(case.test for case in suite.cases)]))
        setup = _literal(suite.setup) if suite.setup else "''"
        call = f"harness({setup}, {_literal(code)}, {suite.function!r})"
        self.program = f"{_DRIVERS[suite.kind]}\n\n{names}\n\n{call}\n"

    def stdin(self, case: Case, index: int) -> str:
        """Return the input of a case.

        Raises:
            ConfigError: an argument cannot be expressed in JSON.
        """
        if not self._calls:
            return f"{self._nonce}\n{writable(case.test)}"
        try:
            return f"{self._nonce}\n{json.dumps(case.arguments)}"
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"case {index}: its arguments cannot be written as JSON: {error}") from None

    def read(self, stdout: bytes, expected: Any = None) -> HarnessReport:
        """Parse the last report: an answer that prints forged reports does so before it.

        A value many times as long as the `expected` one is not parsed: it cannot be equal, and as objects it would need
        many times the size of its text.
        """
        mark = self._mark
        first = stdout.find(mark)
        if first < 0:
            return HarnessReport(None)
        begun = stdout.find(b"\n", first + 1) + 1
        word, text = _words(stdout[first + len(mark) : begun])
        if word == TASK_FAILED:
            return HarnessReport(TASK_FAILED, _value(text)[0])
        last = stdout.rfind(mark)
        end = stdout.find(b"\n", last + 1) + 1
        if last == first or not end:  # no further report, or it was cut at the limit of stdout
            return HarnessReport(READY, printed=stdout[begun:])
        word, text = _words(stdout[last + len(mark) : end])
        if word not in self._last_words:
            return HarnessReport(READY, printed=stdout[begun:])
        if len(text) > _LONG and len(text) > _TIMES_LONGER * len(json.dumps(expected, default=str)):
            word, value = ODD, f"{len(text)} characters of JSON"
        else:
            value, readable = _value(text)
            word = word if readable else ODD if self._calls else READY
            value = f"what JSON has no word for: {value}" if word == ODD else value
        return HarnessReport(word, value, stdout[begun:last] + stdout[end:], len(text))


def _words(line: bytes) -> tuple[str, str]:
    """Split a report line; a forged one may contain anything."""
    word, _, text = line.decode("utf-8", "replace").partition(" ")
    return word, text


def _value(text: str) -> tuple[Any, bool]:
    try:
        return json.loads(text), True
    except (ValueError, RecursionError) as error:
        return str(error), False


def writable(text: str) -> str:
    """Escape lone surrogates, which cannot be encoded."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def _at_hand(code: str) -> str:
    """Return a function that provides what the program may use without importing it. Its own definitions win."""
    found: set[str] = set()
    for word in set(_WORD.findall(code)):
        name, dot, attribute = word.partition(".")
        if name in _IMPORTS:
            found.add(_IMPORTS[name])
        elif dot and attribute and name in _MODULE_IMPORTS:
            found.add(_MODULE_IMPORTS[name])
    # An older interpreter lacks some of them; the answer may define its own.
    tries = [f"try: {line}\n    except ImportError: pass" for line in sorted(found)]
    return "\n    ".join(["def names():", *tries, "return locals()"])


def _literal(text: str) -> str:
    """Return `text` as a literal that keeps its lines, which the sandbox scans for the program's imports."""
    text = writable(text).removeprefix("\ufeff")
    text = text.replace("\\", "\\\\").replace("'''", "\\'\\'\\'").replace("\r", "\\r").replace("\0", "\\x00")
    return f"'''\\\n{text}\n'''"
