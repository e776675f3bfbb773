"""What surrounds an answer whose function is called, or that test code is run on. Pure: texts in, texts out.

One program text serves all cases of a suite; what differs comes by stdin. Inside the sandbox the harness
(`code_driver`) reads stdin first, so that the answer finds it empty, then runs the suite's setup, the answer, and the
call or the test code, and says on stdout how it went. A number that cannot be guessed stands before each of its words,
so that they are told apart from what the answer prints.

The answer is a module of its own, and not the main one: what stands below `if __name__ == "__main__":` does not run,
since that would read input which is not there, and print. It is compiled from its own text, so that tracebacks show
its own line numbers. Names that judging sites import for everybody (`List`, `deque`, `inf`, `math`, …) are there if it
uses them, since starter code that comes with a task does: see `_AT_HAND`.

Covered: an answer that prints the harness's words, returns objects of any kind, reads stdin, closes stdout, shadows
builtins, forks, or leaves early, also in the middle of a test. What a called function ought to return is never in the
sandbox, so an answer that forges a result is no better off than one that returns it.
Not covered: test code shares its process with the answer. One that looks for the tests, or for the number, in its
caller's frames can say that it passed; so can one that replaces what the tests use, and an object that claims to be
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
"""Characters of a value that are always read, and how much longer an equal one may be: 0 is also 0.0000000000001."""
_WORD = re.compile(r"[\w.]++")
_DRIVERS = {SuiteKind.FUNCTION: code_driver.CALL, SuiteKind.ASSERTS: code_driver.ASSERTS}


@dataclass(frozen=True, slots=True)
class Report:
    """What the harness said, and what the program printed besides."""

    word: str | None
    """RETURNED, ODD, PASSED or FAILED; READY: it began, and said no more; TASK_FAILED: the suite's own code failed
    before the answer had its turn; None: it did not even begin."""
    value: Any = None
    """RETURNED: the value. ODD: what was returned, in words. FAILED: line, source and message of the test that failed.
    TASK_FAILED: why."""
    printed: bytes = b""
    size: int = 0
    """Characters of the value in JSON."""


class Harness:
    """Of one answer and one suite, which is of kind FUNCTION or ASSERTS."""

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
        """
        Raises:
            ConfigError: JSON has no word for an argument.
        """
        if not self._calls:
            return f"{self._nonce}\n{writable(case.test)}"
        try:
            return f"{self._nonce}\n{json.dumps(case.arguments)}"
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"case {index}: its arguments cannot be written as JSON: {error}") from None

    def read(self, stdout: bytes, expected: Any = None) -> Report:
        """What was said last counts: an answer that prints the harness's words does so before that.

        A value that is many times as long as the `expected` one is not taken apart: it is not the same, and as objects
        it would have many times the size of its text.
        """
        mark = self._mark
        first = stdout.find(mark)
        if first < 0:
            return Report(None)
        begun = stdout.find(b"\n", first + 1) + 1
        word, text = _words(stdout[first + len(mark) : begun])
        if word == TASK_FAILED:
            return Report(TASK_FAILED, _value(text)[0])
        last = stdout.rfind(mark)
        end = stdout.find(b"\n", last + 1) + 1
        if last == first or not end:  # it said no more, or that was cut off at the limit of what is kept of stdout
            return Report(READY, printed=stdout[begun:])
        word, text = _words(stdout[last + len(mark) : end])
        if word not in self._last_words:
            return Report(READY, printed=stdout[begun:])
        if len(text) > _LONG and len(text) > _TIMES_LONGER * len(json.dumps(expected, default=str)):
            word, value = ODD, f"{len(text)} characters of JSON"
        else:
            value, readable = _value(text)
            word = word if readable else ODD if self._calls else READY
            value = f"what JSON has no word for: {value}" if word == ODD else value
        return Report(word, value, stdout[begun:last] + stdout[end:], len(text))


def _words(line: bytes) -> tuple[str, str]:
    """What the harness wrote, or the answer in its place: anything may stand there."""
    word, _, text = line.decode("utf-8", "replace").partition(" ")
    return word, text


def _value(text: str) -> tuple[Any, bool]:
    try:
        return json.loads(text), True
    except (ValueError, RecursionError) as error:
        return str(error), False


def writable(text: str) -> str:
    """With half an emoji written as an escape: no file and no wire could carry it."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def _at_hand(code: str) -> str:
    """A function that gives what the program may use without importing it. What it defines itself goes before."""
    found: set[str] = set()
    for word in set(_WORD.findall(code)):
        name, dot, attribute = word.partition(".")
        if name in _IMPORTS:
            found.add(_IMPORTS[name])
        elif dot and attribute and name in _MODULE_IMPORTS:
            found.add(_MODULE_IMPORTS[name])
    # An older interpreter lacks some of them; the answer may well have its own.
    tries = [f"try: {line}\n    except ImportError: pass" for line in sorted(found)]
    return "\n    ".join(["def names():", *tries, "return locals()"])


def _literal(text: str) -> str:
    """`text` as a literal that keeps its lines, among which the sandbox looks for what the program will import."""
    text = writable(text).removeprefix("\ufeff")
    text = text.replace("\\", "\\\\").replace("'''", "\\'\\'\\'").replace("\r", "\\r").replace("\0", "\\x00")
    return f"'''\\\n{text}\n'''"
