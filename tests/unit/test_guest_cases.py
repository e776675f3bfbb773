"""Cases of one program on a machine without machine code, which is every machine but x86-64."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from toolyard.sandbox import zygote
from toolyard.sandbox.isolation import GUEST_MAIN
from toolyard.sandbox.local import LocalSandbox
from toolyard.sandbox.protocol import Execution, Limits, Program

pytestmark = pytest.mark.kernel("full")

WITHOUT_MACHINE_CODE = f"""
import runpy, sys
sys.path[0] = {str(Path(GUEST_MAIN).parent)!r}
from guest import machine_code
machine_code.load = lambda text: 0
runpy.run_path({GUEST_MAIN!r})
"""


@pytest.fixture
async def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LocalSandbox]:
    main = tmp_path / "guest_main.py"
    main.write_text(WITHOUT_MACHINE_CODE)
    monkeypatch.setattr(zygote, "GUEST_MAIN", str(main))
    async with LocalSandbox(workers=1) as sandbox:
        yield sandbox


async def each(sandbox: LocalSandbox, code: str, *stdins: str, **limits: float) -> list[Execution]:
    return [one async for one in sandbox.run_each(Program(code), stdins, Limits.model_validate(limits))]


async def test_every_case_has_its_own_input_and_output(plain: LocalSandbox) -> None:
    code = "import sys\nword = sys.stdin.read()\nprint(word)\nprint(word, file=sys.stderr)\nsys.exit(len(word))"
    found = await each(plain, code, "a", "bb", "", "cccc")
    assert [(one.stdout, one.stderr, one.exit_code) for one in found] == [
        ("a\n", "a\n", 1), ("bb\n", "bb\n", 2), ("\n", "\n", 0), ("cccc\n", "cccc\n", 4),
    ]  # fmt: skip


async def test_output_that_was_cut_is_not_cut_again_in_the_next_case(plain: LocalSandbox) -> None:
    found = await each(plain, "print('x' * int(input()))", "3", "3000", "3", output_bytes=1000)
    assert [one.truncated for one in found] == [False, True, False]
    assert [one.stdout for one in found[::2]] == ["xxx\n"] * 2


async def test_cases_are_forked_from_one_parent(plain: LocalSandbox) -> None:
    """Or the tests above would be about ordinary runs."""
    code = "import os\nprint(sum(name.isdigit() for name in os.listdir('/proc')))"
    for _ in range(5):
        found = [one.stdout for one in await each(plain, code, "", "", "")]
        if found[0] != "2\n":
            break  # on a busy machine the parent may not be ready within its half a second
    assert found == ["3\n"] * 3, "worker, parent and case"
