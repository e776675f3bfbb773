"""One program on many inputs: leaving early, cancelling, workers that die or retire, many at once."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import cast

import pytest
import pytest_asyncio

from patience import patient
from toolyard import Execution, Limits, LocalSandbox, Program, SandboxError
from toolyard.sandbox.guest import frames
from toolyard.sandbox.host.cases import replies
from toolyard.sandbox.host.pool import Pool
from toolyard.sandbox.host.requests import Order
from toolyard.sandbox.host.worker import Worker
from toolyard.sandbox.host.zygote import Zygote
from toolyard.sandbox.protocol import MIB

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[pytest.param("best", marks=pytest.mark.kernel("full")), "confined", "none"],
)
async def sandbox(request: pytest.FixtureRequest) -> AsyncIterator[LocalSandbox]:
    """One worker, so that the next request finds what the last one left."""
    async with LocalSandbox(workers=1, isolation=request.param) as sandbox:
        yield sandbox


async def collect(sandbox: LocalSandbox, code: str, stdins: Sequence[str | bytes]) -> list[Execution]:
    return [execution async for execution in sandbox.run_each(Program(code), stdins)]


# ------------------------------------------------------------------------------------------------------- leaving early
async def still_works(sandbox: LocalSandbox) -> None:
    async with asyncio.timeout(patient(5)):
        found = await collect(sandbox, "import os\nprint(input(), sorted(os.listdir()))", ["1", "2"])
    assert [execution.stdout for execution in found] == ["1 ['main.py']\n", "2 ['main.py']\n"]
    assert sandbox.statistics().busy == 0


@pytest.mark.parametrize("taken", [1, 2, 3])
async def test_closing_early_stops_the_one_that_runs_and_abandons_the_rest(sandbox: LocalSandbox, taken: int) -> None:
    program = Program("import time\ntime.sleep(float(input()))")
    worker = list(sandbox._pool._idle["light"])
    began = time.monotonic()
    async with aclosing(sandbox.run_each(program, [*["0"] * taken, "60", "60"])) as executions:
        for _ in range(taken):
            assert (await anext(executions)).ok
        await asyncio.sleep(0.05 * taken)
    assert time.monotonic() - began < patient(2)
    assert list(sandbox._pool._idle["light"]) == worker, "it is clean and goes on"
    await still_works(sandbox)


async def test_a_break_stops_it_too(sandbox: LocalSandbox) -> None:
    async for execution in sandbox.run_each(Program("print(input())"), ["1", "2", "3"]):
        assert execution.stdout == "1\n"
        break
    await still_works(sandbox)


@pytest.mark.parametrize("delay", [0.0, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05])
async def test_cancelling_at_any_moment_leaves_a_working_sandbox(sandbox: LocalSandbox, delay: float) -> None:
    code = "import time\nword = input()\nif word == 'sleep': time.sleep(60)"
    for stdins in (["-"] * 20, ["-", "sleep"], ["sleep"], [b"x" * (1 << 20), "sleep", "-"]):
        task = asyncio.ensure_future(collect(sandbox, code, stdins))
        await asyncio.sleep(delay)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() or (stdins[0] == "-" and len(stdins) == 20)
    await still_works(sandbox)


async def test_a_second_cancellation_is_heard(sandbox: LocalSandbox) -> None:
    task = asyncio.ensure_future(collect(sandbox, "import time; time.sleep(60)", ["", ""]))
    await asyncio.sleep(0.1)
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()
    async with asyncio.timeout(patient(1)):
        await asyncio.wait([task])
    assert task.cancelled()
    await still_works(sandbox)


async def test_a_slow_taker_gets_everything(sandbox: LocalSandbox) -> None:
    """More than is buffered: the worker waits, with a full channel, until its results are read."""
    limits = Limits(output_bytes=4 * MIB)
    found = 0
    async for execution in sandbox.run_each(Program("print('x' * (3 << 20))"), [""] * 8, limits):
        await asyncio.sleep(0.03)
        assert len(execution.stdout) == (3 << 20) + 1
        found += 1
    assert found == 8
    async with aclosing(sandbox.run_each(Program("print('x' * (3 << 20))"), [""] * 8, limits)) as executions:
        await anext(executions)
        await asyncio.sleep(0.3)
    await still_works(sandbox)


# ------------------------------------------------------------------------------------------------------------ failures
def worker_below(zygote: int) -> int:
    """The one worker of a zygote, past its launcher."""

    def child(pid: int) -> int:
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    return child(child(zygote))


async def test_a_killed_worker_is_an_error_after_what_was_done(sandbox: LocalSandbox) -> None:
    executions = sandbox.run_each(Program("import time\ntime.sleep(float(input()))"), ["0", "0", "60", "0"])
    assert (await anext(executions)).ok
    assert (await anext(executions)).ok

    async def fails() -> None:
        with pytest.raises(SandboxError) as caught:
            await anext(executions)
        assert caught.value.retryable

    async with asyncio.TaskGroup() as group:
        group.create_task(fails())
        await asyncio.sleep(0.1)
        os.kill(worker_below(sandbox.process_ids["light"]), signal.SIGKILL)
    await still_works(sandbox)


class Pretended:
    """Gives out workers that answer each input with itself, and one that says after two answers that it leaves."""

    def __init__(self) -> None:
        self.given = 0

    @asynccontextmanager
    async def worker(self, profile: str) -> AsyncGenerator[Worker]:
        self.given += 1
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        worker = Worker(ours, cast("Zygote", None), 0, 0, "")
        serving = asyncio.to_thread(self._serve, theirs, 2 if self.given == 1 else 99)
        async with asyncio.TaskGroup() as group:
            group.create_task(serving)
            try:
                yield worker
            finally:
                worker.close()

    def _serve(self, channel: socket.socket, answers: int) -> None:
        with channel:
            header = frames.read_request(bytearray(channel.recv(frames.REQUEST.size, socket.MSG_WAITALL)))
            body = channel.recv(header.end - frames.REQUEST.size, socket.MSG_WAITALL)
            body = body[header.order_end - frames.REQUEST.size :]
            count, _, _ = frames.CASES.unpack_from(body)
            at = frames.CASES.size + count * frames.CASE.size
            for number in range(count)[:answers]:
                (size,) = frames.CASE.unpack_from(body, frames.CASES.size + number * frames.CASE.size)
                flags = frames.RETIRING if number + 1 == answers else 0
                reply = frames.RESPONSE.pack(frames.ENDED, flags, 0, 0.0, 0.0, 0.0, 0, size, 0, 0)
                channel.sendall(reply + body[at : at + size])
                at += size


async def test_when_a_worker_retires_another_goes_on() -> None:
    """One that could not get clean has answered all the same, and only for what it ran."""
    pool, order = Pretended(), Order(frames.RUN_PYTHON, (), "", {})
    stdins = [b"1", b"22", b"333", b"", b"4"]
    found = [
        reply.stdout async for reply in replies(cast("Pool", pool), "", order, stdins, Limits(), 0, batch_results=False)
    ]
    assert found == stdins
    assert pool.given == 2


@pytest.mark.parametrize("sandbox", ["best"], indirect=True)
@pytest.mark.slow
async def test_many_batches_at_once(sandbox: LocalSandbox) -> None:
    async def one(number: int) -> None:
        found = await collect(sandbox, f"print({number}, input())", [str(n) for n in range(5)])
        assert [execution.stdout for execution in found] == [f"{number} {n}\n" for n in range(5)]

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for number in range(200):
            group.create_task(one(number))
    await still_works(sandbox)
