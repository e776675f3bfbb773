"""One program on many inputs: the host's side."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from collections import Counter
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace

from toolyard.sandbox.guest import frames
from toolyard.sandbox.host.pool import Pool
from toolyard.sandbox.host.requests import Order, accepted, header_of, inputs_part
from toolyard.sandbox.host.worker import WorkerReply
from toolyard.sandbox.protocol import Limits

_EACH = {frames.RUN_PYTHON: frames.EACH_PYTHON, frames.RUN_COMMAND: frames.EACH_COMMAND}
_random = random.SystemRandom()


class Processors:
    """Chooses the CPU on which a batch starts its cases.

    A case takes a fraction of a millisecond, and twice that if the kernel moves it away from its parent's CPU. So a
    batch stays on one CPU, and this class gives concurrent batches different ones.
    The programs themselves may run on any CPU.
    """

    def __init__(self) -> None:
        self._lent = Counter(dict.fromkeys(os.sched_getaffinity(0), 0))

    @contextmanager
    def lend(self) -> Generator[int]:
        least = min(self._lent.values())
        # At random, since batches of other processes choose as well.
        processor = _random.choice([number for number, lent in self._lent.items() if lent == least])
        self._lent[processor] += 1
        try:
            yield processor
        finally:
            self._lent[processor] -= 1


async def replies(
    pool: Pool,
    profile: str,
    order: Order,
    stdins: Sequence[bytes],
    limits: Limits,
    processor: int,
    *,
    batch_results: bool,
) -> AsyncGenerator[WorkerReply]:
    """Yield one reply per input, in order. If a worker retires, another continues."""
    order = replace(order, operation=_EACH[order.operation])
    done = 0
    while done < len(stdins):
        parts = order.parts(inputs_part(stdins[done:], processor, batch_results=batch_results))
        header = header_of(order.operation, limits, limits.run_seconds, parts)
        async with pool.worker(profile) as worker:
            answers = worker.request_each(header, parts, limits.run_seconds, len(stdins) - done)
            async with aclosing(answers):
                async for reply in answers:
                    yield accepted(reply)
                    done += 1


_AHEAD = 4
"""How many replies a share may be ahead of the share whose turn it is."""


async def interleave(shares: Sequence[AsyncGenerator[WorkerReply]]) -> AsyncGenerator[WorkerReply]:
    """Yield the first reply of each share, then the second of each, and so on, while all shares run concurrently.

    An error of a share is raised when it is that share's turn, and stops the others.
    """
    if len(shares) == 1:
        async with aclosing(shares[0]) as only:
            async for reply in only:
                yield reply
        return
    queues = [asyncio.Queue[WorkerReply | Exception | None](_AHEAD) for _ in shares]
    # Not a TaskGroup: a generator that is closed early would make it raise an error of its own.
    tasks = [asyncio.create_task(_put(share, queue)) for share, queue in zip(shares, queues, strict=True)]
    try:
        for turn in itertools.cycle(queues):
            reply = await turn.get()
            if reply is None:
                return  # shares differ by at most one reply, so the first to end comes right after the last reply
            if isinstance(reply, Exception):
                raise reply
            yield reply
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _put(share: AsyncGenerator[WorkerReply], queue: asyncio.Queue[WorkerReply | Exception | None]) -> None:
    try:
        async with aclosing(share):
            async for reply in share:
                await queue.put(reply)
    except Exception as error:
        await queue.put(error)
    else:
        await queue.put(None)
