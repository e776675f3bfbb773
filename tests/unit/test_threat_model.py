"""docs/threat-model.md names the tests that attack its claims; they must exist."""

import re
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]


def test_every_attack_that_is_named_exists():
    named = set(re.findall(r"`(test_\w+)`", (CHECKOUT / "docs/threat-model.md").read_text()))
    attacks = "".join(path.read_text() for path in (CHECKOUT / "tests/isolation").glob("test_*.py"))
    assert len(named) > 20
    assert named <= set(re.findall(r"def (test_\w+)\(", attacks))
