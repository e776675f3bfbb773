"""docs/threat-model.md names the tests that attack its claims. They must exist, and try each way to run a program."""

import ast
import re
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]
WAYS = {"runs", "batches", "sessions"}


def rows(heading: str) -> dict[str, str]:
    """The table below it: what the first column says, and the last."""
    section = (CHECKOUT / "docs/threat-model.md").read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return {line[0]: line[-1] for line in lines[1:]}


COVERED, SHARED = rows("Covered at level `full`"), rows("What programs share")


def attacks() -> dict[str, tuple[set[str], str]]:
    """Tests of isolation by name: their parameters, and their marks with those of their module."""
    found: dict[str, tuple[set[str], str]] = {}
    for path in (CHECKOUT / "tests/isolation").glob("test_*.py"):
        tree = ast.parse(path.read_text())
        assigned = [ast.unparse(node) for node in tree.body if isinstance(node, ast.Assign)]
        shared = "".join(line for line in assigned if line.startswith("pytestmark ="))
        for node in tree.body:
            if isinstance(node, ast.AsyncFunctionDef | ast.FunctionDef):
                own = "".join(map(ast.unparse, node.decorator_list))
                found[node.name] = {argument.arg for argument in node.args.args}, own + shared
    return found


ATTACKS = attacks()


def named_in(text: str) -> list[str]:
    return re.findall(r"`(test_\w+)`", text)


def test_the_tables_are_found():
    assert len(COVERED) >= 20
    assert len(SHARED) >= 20


def test_every_row_names_attacks_that_exist_or_says_that_there_are_none():
    for what, attacked_by in (COVERED | SHARED).items():
        assert named_in(attacked_by) or "not covered" in attacked_by, what
        assert set(named_in(attacked_by)) <= set(ATTACKS), what


def test_every_attack_is_tried_as_an_ordinary_user_too():
    left_out = [name for row in (COVERED | SHARED).values() for name in named_in(row) if "any_user" in ATTACKS[name][1]]
    assert left_out == []


def test_every_row_is_attacked_in_single_runs_in_batches_and_in_sessions():
    """Tests without a way before them are run in each by a fixture. "sessions: …" names tests, or says why none."""
    for what, attacked_by in COVERED.items():
        tried: set[str] = set()
        for part in attacked_by.split("; "):
            ways = set(part.partition(":")[0].split(", "))
            if ways <= WAYS:
                tried |= ways
            else:
                tried |= WAYS
                for name in named_in(part):
                    assert {"any_way", "full_way"} & ATTACKS[name][0], f"{name} is not run in each way"
        assert tried == WAYS, what
