"""Python and what its interpreter runs: programs, pytest tests, GPU programs."""

from __future__ import annotations

from toolyard.sandbox.languages.toolchains import Language, Way
from toolyard.sandbox.protocol import Program

_RUN_TESTS = """\
import sys
import pytest
sys.exit(int(pytest.main(["-s", "-p", "no:cacheprovider", "test_main.py", *sys.argv[1:]])))
"""
"""`-s`, so that tests can read stdin. It comes first, so that the program's arguments can override it."""


def _as_it_is(program: Program) -> Program:
    return program


def _tested(program: Program) -> Program:
    files = {"test_main.py": program.code.encode("utf-8", "surrogatepass"), **program.files}
    # Its plugin imports Hypothesis, which takes a second, for every test, whether it is used or not.
    unused = (
        () if any("hypothesis" in text for text in (program.code, *program.args)) else ("-p", "no:hypothesispytest")
    )
    return program.model_copy(update={"code": _RUN_TESTS, "files": files, "args": (*unused, *program.args)})


# The commands are only descriptions, for `doctor` and readers: all of these are forked from a warm interpreter.
ROWS: tuple[Language, ...] = (
    Language(
        "python",
        "Python",
        "main.py",
        aliases=("python3", "py"),
        ways=(Way(needs=("python3",), run="{python3} main.py", version="{python3} --version"),),
        in_python=_as_it_is,
        self_test="a, b = map(int, input().split())\nprint(a + b)\n",
    ),
    Language(
        "pytest",
        "pytest",
        "test_main.py",
        ways=(
            Way(
                needs=("python3", "python:pytest"),
                run="{python3} -m pytest -s test_main.py",
                version="{python3} -m pytest --version",
            ),
        ),
        in_python=_tested,
        self_test="def test_sum():\n    a, b = map(int, input().split())\n    print(a + b)\n    assert a + b == 42\n",
    ),
    Language(
        "python_gpu",
        "Python with GPUs",
        "main.py",
        ways=(Way(needs=("python3", "nvidia-smi"), run="{python3} main.py", version="{nvidia-smi} --version"),),
        in_python=_as_it_is,
        gpu=True,
        self_test="a, b = map(int, input().split())\nprint(a + b)\n",
    ),
)
