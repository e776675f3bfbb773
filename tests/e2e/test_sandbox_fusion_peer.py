"""Our clients against a server with SandboxFusion's quirks: no numpy under a memory limit, outputs cut, one worker."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from toolyard.errors import ProgramError
from toolyard.rewards import blocking
from toolyard.rewards.code.judge import CodeJudge
from toolyard.rewards.code.protocol import CaseVerdict
from toolyard.rewards.sandbox_fusion import check_correctness
from toolyard.sandbox.protocol import MIB, Limits, Program, Verdict
from toolyard.sandbox.remote.sandbox import RemoteSandbox
from toolyard.testing.sandbox_fusion import KEPT_BYTES, SandboxFusionServer
from toolyard.tools.code_interpreter.tool import SandboxFusionTool

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NUMPY = "import numpy\nprint(numpy.arange(3).sum())"
LONG = 300_000


@pytest_asyncio.fixture
async def peer() -> AsyncIterator[SandboxFusionServer]:
    async with SandboxFusionServer() as server:
        yield server
    await asyncio.to_thread(blocking.close)


async def test_the_stand_in_has_the_quirks_that_it_stands_for(peer: SandboxFusionServer) -> None:
    async with RemoteSandbox(peer.url) as sandbox:
        limited = await sandbox.run(Program(NUMPY), Limits(memory_bytes=1024 * MIB))
        assert (limited.verdict, "OpenBLAS" in limited.stderr) == (Verdict.FAILED, True)
        cut = await sandbox.run(Program(f"print('x' * {LONG})"))
        assert (cut.verdict, len(cut.stdout), cut.run and cut.run.stdout_truncated) == (Verdict.OK, KEPT_BYTES, False)
        begun = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(sandbox.run(Program("import time; time.sleep(0.3)")))
        assert time.monotonic() - begun > 0.9
        with pytest.raises(ProgramError):
            await sandbox.run(Program("", "klingon"))
        looped = await sandbox.run(Program("while True: pass"), Limits(run_seconds=0.3))
        assert looped.verdict is Verdict.TIMED_OUT
        told = await sandbox.run(Program("cat in > out; exit 3", "bash", files={"in": b"1"}, fetch_files=["out", "no"]))
        assert (told.run and told.run.exit_code, told.files) == (3, {"out": b"1"})


async def test_a_memory_limit_is_sent_only_if_somebody_set_it(peer: SandboxFusionServer) -> None:
    cases = {"inputs": [""], "outputs": ["3"]}
    async with RemoteSandbox(peer.url) as sandbox:
        assert (await sandbox.run(Program(NUMPY), Limits(run_seconds=9))).stdout == "3\n"
    async with CodeJudge(sandbox_fusion_url=peer.url) as judge:
        assert (await judge.judge(f"```python\n{NUMPY}\n```", cases)).score == 1.0
    async with CodeJudge(sandbox_fusion_url=peer.url, memory_limit_mb=512) as judge:
        assert (await judge.judge(f"```python\n{NUMPY}\n```", cases)).score == 0.0
    assert await interpreted(peer, {}) == "3\n"
    assert "OpenBLAS" in await interpreted(peer, {"memory_limit_mb": 256})
    assert [sent["memory_limit_MB"] for sent in peer.requests] == [-1, -1, 512, -1, 256]


async def interpreted(peer: SandboxFusionServer, config: dict[str, Any]) -> str:
    tool = SandboxFusionTool({"sandbox_fusion_url": peer.url, **config}, None)
    try:
        instance, _ = await tool.create()
        response, _, _ = await tool.execute(instance, {"code": NUMPY})
        return response.text or ""
    finally:
        await tool.close()


async def test_an_output_that_the_server_cut_is_no_wrong_answer(peer: SandboxFusionServer) -> None:
    code, expected = f"print('x' * {LONG})", "x" * LONG
    async with CodeJudge(sandbox_fusion_url=peer.url, retries=0) as judge:
        result = await judge.judge(f"```python\n{code}\n```", {"inputs": [""], "outputs": [expected]})
        assert (result.score, result.cases[0].verdict) == (None, CaseVerdict.INFRASTRUCTURE)
        wrong = await judge.judge(f"```python\n{code}\n```", {"inputs": [""], "outputs": ["y" * LONG]})
        assert (wrong.score, wrong.cases[0].verdict) == (0.0, CaseVerdict.WRONG_ANSWER)
    results, [metadata] = await asyncio.to_thread(
        check_correctness, peer.url, {"inputs": [""], "outputs": [expected]}, code
    )
    assert (results, metadata["status"]) == ([-1], "output_cut")


async def test_limits_that_the_server_cannot_hold_are_named_once(
    peer: SandboxFusionServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "toolyard.sandbox.remote"):
        async with RemoteSandbox(peer.url) as sandbox:
            await sandbox.run(Program("1"), Limits(run_seconds=5, memory_bytes=512 * MIB, output_bytes=100))
            assert caplog.messages == []
            for _ in range(2):
                await sandbox.run(Program("1"), Limits(processes=3, disk_bytes=MIB))
    assert [message.partition(" does not ")[2] for message in caplog.messages] == ["enforce disk_bytes, processes"]


@pytest.mark.exhaustive
@pytest.mark.kernel("full")
@pytest.mark.parametrize(
    ("script", "options", "said"),
    [
        (
            "sandbox.py",
            ["--seconds", "0.1", "--warm-up", "0", "--in-flight", "2", "--only", "numpy", "--only", "300 KB"],
            "100%",
        ),
        ("rewards.py", ["--quick", "--solutions", "2", "--cases", "2"], "CodeJudge over the peer"),
    ],
)
async def test_the_benchmarks_run_beside_it(
    peer: SandboxFusionServer, script: str, options: list[str], said: str
) -> None:
    command = [sys.executable, str(BENCHMARKS / script), "--peer", peer.url, *options]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    printed = (await process.communicate())[0].decode()
    assert process.returncode == 0, printed
    assert said in printed
