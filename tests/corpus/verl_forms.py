"""200 answers in the forms that verl's scorers take: four kinds of test cases, ten programs each, in five wrappings.

All are about adding two numbers, and every kind has two cases, so that a program may be right in one of them. Names say
what a program does; tests/verl compares what verl and Toolyard think of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

TESTS: dict[str, dict[str, Any]] = {
    "stdin": {"inputs": ["1 2\n", "10 -4\n"], "outputs": ["3\n", "6\n"]},
    "fn_name": {"fn_name": "add", "inputs": ["1\n2", "10\n-4"], "outputs": ["3", "6"]},
    "assert_case": {"assert_case": ["assert add(1, 2) == 3", "assert add(10, -4) == 6"]},
    "fn_name and assert_case": {
        "fn_name": "add",
        "assert_case": ["assert add(1, 2) == 3", "assert add(10, -4) == 6"],
    },
}
READ = "a, b = map(int, input().split())\n"
FUNCTIONS = {
    "right": "def add(a, b):\n    return a + b",
    "wrong": "def add(a, b):\n    return a - b",
    "half right": "def add(a, b):\n    return abs(a) + abs(b)",
    "raises": "def add(a, b):\n    raise KeyError(a)",
    "raises in one case": "def add(a, b):\n    return {2: 3}[b]",
    "does not compile": "def add(a, b)\n    return a + b",
    "of another name": "def plus(a, b):\n    return a + b",
    "prints as well": "def add(a, b):\n    print('adding')\n    return a + b",
    "takes List for granted": "def add(a, b):\n    numbers: List[int] = [a, b]\n    return sum(numbers)",
    "leaves at once": "import sys\nsys.exit(0)\ndef add(a, b):\n    return a + b",
}
PROGRAMS: dict[str, dict[str, str]] = {
    "stdin": {
        "right": READ + "print(a + b)",
        "wrong": READ + "print(a - b)",
        "half right": READ + "print(abs(a) + abs(b))",
        "raises": READ + "raise KeyError(a)",
        "raises in one case": READ + "print({2: 3}[b])",
        "does not compile": READ + "print(a + b",
        "says nothing": READ + "pass",
        "right with white space around it": READ + "print(f'  {a + b}  ')",
        "a float where an integer is expected": READ + "print(float(a + b))",
        "takes names of modules for granted": "print(reduce(add, map(int, input().split())))",
    },
    "fn_name": FUNCTIONS,
    "assert_case": FUNCTIONS,
    "fn_name and assert_case": FUNCTIONS,
}
WRAPPINGS = {
    "fenced as python": "I add them:\n```python\n{}\n```\nDone.",
    "fenced": "I add them:\n```\n{}\n```\nDone.",
    "not fenced": "{}",
    "cut off": "I add them:\n```python\n{}",
    "the last of two": "At first:\n```python\nimport nothing_of_this_name\n```\nNo, rather:\n```python\n{}\n```",
}


@dataclass(frozen=True)
class Answer:
    kind: str
    program: str
    wrapping: str
    completion: str

    @property
    def tests(self) -> dict[str, Any]:
        return TESTS[self.kind]

    def __str__(self) -> str:
        return f"{self.kind}, {self.program}, {self.wrapping}"


def answers() -> Iterator[Answer]:
    for kind, programs in PROGRAMS.items():
        for program, code in programs.items():
            for wrapping, text in WRAPPINGS.items():
                yield Answer(kind, program, wrapping, text.replace("{}", code))
