"""Cases of one program, with the C library and without it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from toolyard.sandbox.local import LocalSandbox
from toolyard.sandbox.protocol import Execution, Limits, Program

pytestmark = pytest.mark.kernel("full")


@pytest.fixture(params=["native", "plain"])
async def sandbox(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LocalSandbox]:
    if request.param == "plain":
        monkeypatch.setenv("TOOLYARD_NATIVE", "0")
    async with LocalSandbox(workers=1) as sandbox:
        yield sandbox


async def each(sandbox: LocalSandbox, code: str, *stdins: str, **limits: float) -> list[Execution]:
    return [one async for one in sandbox.run_each(Program(code), stdins, Limits.model_validate(limits))]


async def test_every_case_has_its_own_input_and_output(sandbox: LocalSandbox) -> None:
    code = "import sys\nword = sys.stdin.read()\nprint(word)\nprint(word, file=sys.stderr)\nsys.exit(len(word))"
    found = await each(sandbox, code, "a", "bb", "", "cccc")
    assert [(one.stdout, one.stderr, one.exit_code) for one in found] == [
        ("a\n", "a\n", 1), ("bb\n", "bb\n", 2), ("\n", "\n", 0), ("cccc\n", "cccc\n", 4),
    ]  # fmt: skip


async def test_output_that_was_cut_is_not_cut_again_in_the_next_case(sandbox: LocalSandbox) -> None:
    found = await each(sandbox, "print('x' * int(input()))", "3", "3000", "3", output_bytes=1000)
    assert [one.truncated for one in found] == [False, True, False]
    assert [one.stdout for one in found[::2]] == ["xxx\n"] * 2


async def test_cases_are_forked_from_one_parent_by_the_library(
    sandbox: LocalSandbox, request: pytest.FixtureRequest
) -> None:
    """Or the tests above would be about one of the two only."""
    code = "import os\nprint(sum(name.isdigit() for name in os.listdir('/proc')))"
    processes = "3\n" if "native" in request.node.callspec.id else "2\n"  # worker, parent and case
    for _ in range(5):
        found = [one.stdout for one in await each(sandbox, code, "", "", "")]
        if found == [processes] * 3:
            break  # on a busy machine the parent may not be ready within its half a second
    assert found == [processes] * 3
