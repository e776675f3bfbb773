"""Solutions with known verdicts: one YAML file a problem, written for this project.

problem: what the solutions are to do
shows: what the file is about
settings: {…}              of `CodeSettings`, where the problem needs other than the corpus's own
tests: {…}                 in one of the forms that `read_suite` reads; or, where they are long,
generated: {inputs: …}     the same, each value a Python expression
solutions:
  - name: …
    language: python       or cpp
    code: |                the program, which stands alone in the answer's only block; or
    answer: |              the whole answer, and then perhaps
    extracted: {blocks: 2, chosen: 1, unclosed: false}
    verdicts: […]          of each case when all are run; one word: of all of them
    scores: {all: 0, fraction: 0.75}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from toolyard.rewards.code.protocol import Aggregation, CaseVerdict


@dataclass(frozen=True, eq=False)
class Solution:
    problem: str
    name: str
    language: str
    answer: str
    verdicts: tuple[CaseVerdict, ...]
    scores: Mapping[Aggregation, float]
    extracted: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.problem}, {self.language}: {self.name}"


@dataclass(frozen=True, eq=False)
class Problem:
    name: str
    tests: Mapping[str, Any]
    settings: Mapping[str, Any]
    solutions: list[Solution] = field(default_factory=list[Solution])

    @property
    def stdio(self) -> bool:
        """Whether its cases are nothing but an input and the output that is expected, word for word."""
        return set(self.tests) == {"inputs", "outputs"}


def read_corpus() -> list[Problem]:
    return [_problem(path) for path in sorted(Path(__file__).parent.glob("*.yaml"))]


def _problem(path: Path) -> Problem:
    read = yaml.load(path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    tests = read.get("tests") or {name: eval(expression) for name, expression in read["generated"].items()}
    problem = Problem(path.stem, tests, read.get("settings", {}))
    count = len(tests.get("inputs") or tests["assert_case"])
    problem.solutions.extend(_solution(path.stem, entry, count) for entry in read["solutions"])
    return problem


def _solution(problem: str, entry: dict[str, Any], count: int) -> Solution:
    verdicts: list[str] | str = entry["verdicts"]
    answer = entry.get("answer") or f"```{entry['language']}\n{entry['code']}```\n"
    return Solution(
        problem,
        entry["name"],
        entry["language"],
        answer,
        tuple(map(CaseVerdict, verdicts if isinstance(verdicts, list) else [verdicts] * count)),
        {Aggregation(name): float(score) for name, score in entry["scores"].items()},
        {"unclosed": False, **entry.get("extracted", {"blocks": 1, "chosen": 0})},
    )
