"""Containers of the two other kinds: root whose interpreter everybody can reach, and `docker run --user`.

`test_in_a_container` plays the one that this run's user would be in. Here programs get a user id without any right, or
share the sandbox's own, and both times the core attacks of this directory are made again.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parent.parent.parent
CORE = """
    host_file or host_files or private_places or variable_of_the_host or neighbours_directory or loopback or unix_socket
    or fork_bomb or leaves_at_once or nothing_outlives or kill_to_all or every_number or fork_fails
    or end_its_own_worker or flood_is_stopped or full_disk or marks or workers_entries
"""
"""Files, network, processes, environment, verdicts. The rest is the same code as outside."""

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only as root can one choose whom to be")


@pytest.mark.parametrize("who", ["open-root", pytest.param("user", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_the_core_attacks_are_contained(who: str) -> None:
    wrapper = [sys.executable, "tests/in_container.py", who, sys.executable, "-m", "pytest"]
    attacks = ["tests/isolation", "-m", "not kernel and not slow", "-k", f"({' '.join(CORE.split())}) and best"]
    done = subprocess.run(
        [*wrapper, *attacks, "-q", "-p", "no:cacheprovider", "--tb=short"],
        cwd=CHECKOUT, env={**os.environ, "HOME": "/tmp"}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:]
    summary = done.stdout.splitlines()[-1]
    assert re.fullmatch(r"\d{2,} passed, \d+ deselected in .*", summary), f"something was skipped: {summary}"
