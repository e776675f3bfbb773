"""Every test of this directory that could depend on the user, and the sandbox's contract, without root."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parent.parent.parent
ACCEPTED_SKIPS = re.compile(r"(not|only as|needs) root|needs '|no IPv6 here|this architecture|toolchain")
"""What is ours to skip without root, and toolchains that lie where only root can look (rustup's, say)."""
SHARING = "session or traced or tampering or killed or cancelled or threads_fail or raised or hidden or TestConfined"
"""Without namespaces and without root, programs have the user id of the sandbox: what that could change, and the core
attacks of `test_in_other_containers`, are tried at that level as well."""


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become somebody else")
@pytest.mark.timeout(900)
def test_all_of_it_holds_for_an_ordinary_user() -> None:
    _passes("alone")
    _passes("not alone", "--numprocesses", "2")


def _passes(which: str, *options: str) -> None:
    tests = [
        "tests/isolation",
        "tests/contract/test_local_sandbox.py::TestFull",
        "tests/contract/test_local_sandbox.py::TestConfined",
        f"--ignore={Path(__file__).relative_to(CHECKOUT)}",
        "-m",
        f"{which} and not any_user and not slow",
        "-k",
        f"not [confined or {SHARING}",
        *options,
    ]
    environment = {name: value for name, value in os.environ.items() if name not in ("CI", "TMPDIR", "XDG_CACHE_HOME")}
    done = subprocess.run(
        [sys.executable, "tests/as_user.py", sys.executable, "-m", "pytest", *tests, "-q", "-p", "no:cacheprovider"],
        cwd=CHECKOUT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", timeout=880, check=False,
    )  # fmt: skip
    tail = "\n".join(done.stdout.splitlines()[-150:])
    assert done.returncode == 0, tail
    assert re.search(r"\b[1-9]\d* passed", done.stdout), tail
    skips = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    assert [line for line in skips if not ACCEPTED_SKIPS.search(line)] == []
