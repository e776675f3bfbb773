"""Inside a container with Docker's default profile there are no namespaces: programs run all the same, confined."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only as root can one be root in a container")
pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the profile is written for this architecture")

WHO = [pytest.param("root", marks=as_root), pytest.param("open-root", marks=as_root), "user"]

CORE = """
    host_file or host_files or private_places or devices or variable_of_the_host or kernels_log or neighbours_directory
    or loopback or unix_socket or other_kind_of_socket or fork_bomb or leaves_at_once or nothing_outlives or kill_to_all
    or every_number or fork_fails or end_its_own_worker or forged_answer or flood_is_stopped or full_disk or marks
    or traced_or_read or workers_entries
"""
"""Files, network, processes, environment, verdicts. The rest is the same code as outside."""


def in_container(who: str, *command: str) -> subprocess.CompletedProcess[str]:
    wrapper = [sys.executable, str(TESTS / "in_container.py"), who]
    environment = {**os.environ, "HOME": "/tmp"}
    return subprocess.run(
        [*wrapper, *command], capture_output=True, text=True, check=False, timeout=110, env=environment
    )


RUN_SOME = """
import asyncio
from toolyard import LocalSandbox, Program
from toolyard.errors import IsolationError

async def main():
    async with LocalSandbox() as sandbox:
        print(sandbox.level, sandbox.statistics().isolation)
        print((await sandbox.run(Program("print(6 * 7)"))).isolation)
        for code, language in (("print(6 * 7)", "python"), ("echo $((6 * 7))", "bash")):
            print((await sandbox.run(Program(code, language))).stdout.strip())
        async with sandbox.session() as session:
            await session.run("x = 6")
            print((await session.run("print(x * 7)")).stdout.strip())
    try:
        async with LocalSandbox(isolation="required"):
            print("started")
    except IsolationError as error:
        print(error)

asyncio.run(main())
"""


@pytest.mark.parametrize("who", WHO)
def test_programs_run_confined_and_say_so(who: str) -> None:
    done = in_container(who, sys.executable, "-c", RUN_SOME)
    assert done.returncode == 0, done.stderr
    *told, refusal = done.stdout.splitlines()
    assert told == ["confined confined", "confined", "42", "42", "42"]
    for missing in ("user namespace", "mount namespace", "pid namespace", "network namespace", "private root"):
        assert missing in refusal
    assert "Operation not permitted" in refusal
    assert "toolyard doctor" in refusal


@pytest.mark.parametrize("who", WHO)
def test_the_core_attacks_are_contained(who: str) -> None:
    selection = ["-m", "not kernel", "-k", f"({' '.join(CORE.split())}) and not confined"]
    ignored = [f"--ignore={path}" for path in (__file__, str(TESTS / "isolation" / "test_faults.py"))]
    pytest_ = ["-m", "pytest", "tests/isolation", "-q", "-p", "no:cacheprovider", "--tb=short", *selection, *ignored]
    done = in_container(who, sys.executable, *pytest_)
    summary = done.stdout.splitlines()[-1]
    assert done.returncode == 0, done.stdout[-8000:]
    assert re.fullmatch(r"\d{2,} passed, \d+ deselected in .*", summary), f"something was skipped: {summary}"
