"""`python main.py` passes `PythonSemantics`: the suite asks of a sandbox only what Python itself does."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from toolyard.sandbox.protocol import Execution, Limits, Program, StageResult, Verdict
from toolyard.testing import PythonSemantics


class PlainPython:
    """As much of a `Sandbox` as the suite needs, and no sandbox at all."""

    async def run(self, program: Program, limits: Limits | None = None) -> Execution:
        return await asyncio.to_thread(run_plain, program)


def run_plain(program: Program) -> Execution:
    with tempfile.TemporaryDirectory() as folder:
        for name, content in {**program.files, "main.py": program.code.encode()}.items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        stdin = program.stdin.encode() if isinstance(program.stdin, str) else program.stdin or b""
        environment = {"PATH": f"{os.path.dirname(sys.executable)}:/usr/bin:/bin", "LANG": "C.UTF-8", **program.env}
        command = [sys.executable, "main.py", *program.args]
        done = subprocess.run(command, input=stdin, capture_output=True, cwd=folder, env=environment, check=False)
        fetched = {name: Path(folder, name).read_bytes() for name in program.fetch_files}
    code = done.returncode
    verdict = Verdict.OK if code == 0 else Verdict.SIGNALED if code < 0 else Verdict.FAILED
    return Execution(verdict, StageResult(verdict, code, done.stdout, done.stderr), files=fetched)


class TestPlainPython(PythonSemantics):
    @pytest.fixture
    def sandbox(self) -> PlainPython:
        return PlainPython()
