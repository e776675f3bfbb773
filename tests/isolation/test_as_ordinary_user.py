"""Every attack of this directory again, as an ordinary user: nothing here needs root."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
NOT_AGAIN = (Path(__file__).name, "test_in_a_container.py", "test_faults.py")
"""Those that start sandboxes as other users themselves, and those that kill our own processes, whoever owns them."""


@pytest.mark.skipif(os.getuid() != 0, reason="not root: this whole run already is an ordinary user's")
@pytest.mark.timeout(300)
def test_all_attacks_are_contained_for_an_ordinary_user_too() -> None:
    ignored = [f"--ignore={TESTS / 'isolation' / name}" for name in NOT_AGAIN]
    pytest_ = [sys.executable, "-m", "pytest", "tests/isolation", "-q", "-p", "no:cacheprovider", "--tb=short", *ignored]
    done = subprocess.run(
        [sys.executable, str(TESTS / "as_user.py"), *pytest_], capture_output=True, text=True, check=False, timeout=290
    )
    summary = done.stdout.splitlines()[-1]
    assert done.returncode == 0, done.stdout[-8000:]
    assert re.fullmatch(r"\d{3,} passed in .*", summary), f"something was skipped or left out: {summary}"
