"""The Makefile: what its variables do to the commands it runs."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROBE = "probe:\n\t@env\n"


def test_variables_on_makes_command_line_do_not_reach_the_programs_it_starts() -> None:
    given = {"PYTHON": "/nowhere/python", "VENV": "/nowhere/venv", "ARGS": "-x", "BENCH": "none"}
    done = subprocess.run(
        ["make", "-f", "Makefile", "-f", "-", *(f"{name}={value}" for name, value in given.items()), "probe"],
        input=PROBE,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert not {line.partition("=")[0] for line in done.stdout.splitlines()} & given.keys()
