"""`python main.py` passes `PythonSemantics`: what the suite asks of a sandbox is Python's own doing and not our idea."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from toolyard.sandbox.protocol import Execution, Limits, Program, StageResult, Verdict
from toolyard.testing import PythonSemantics


class PlainPython:
    """As much of a `Sandbox` as the suite needs, and no sandbox at all."""

    async def run(self, program: Program, limits: Limits | None = None) -> Execution:
        with tempfile.TemporaryDirectory() as folder:
            for name, content in {**program.files, "main.py": program.code.encode()}.items():
                path = Path(folder, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            stdin = program.stdin.encode() if isinstance(program.stdin, str) else program.stdin or b""
            process = await asyncio.create_subprocess_exec(
                sys.executable, "main.py", *program.args, stdin=-1, stdout=-1, stderr=-1, cwd=folder,
                env={"PATH": f"{os.path.dirname(sys.executable)}:/usr/bin:/bin", "LANG": "C.UTF-8", **program.env},
            )  # fmt: skip
            out, err = await process.communicate(stdin)
            code: Any = process.returncode
            verdict = Verdict.OK if code == 0 else Verdict.SIGNALED if code < 0 else Verdict.FAILED
            fetched = {name: Path(folder, name).read_bytes() for name in program.fetch_files}
        return Execution(verdict, StageResult(verdict, code, out, err), files=fetched)


class TestPlainPython(PythonSemantics):
    @pytest.fixture
    def sandbox(self) -> PlainPython:
        return PlainPython()
