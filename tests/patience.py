"""Tests on a machine that has other things to do as well: their time limits, and programs it was too busy for."""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from toolyard.errors import SandboxError
from toolyard.sandbox.local import LocalSandbox
from toolyard.sandbox.protocol import Execution, Limits, Program

T = TypeVar("T")


def patient(seconds: float) -> float:
    """Seconds that something may take, if it may take `seconds` on a machine with nothing else to do.

    Where more is to be computed than there are processors, everything takes longer in proportion.
    """
    with open("/proc/loadavg") as file:
        last_minute, _, _, now, _ = file.read().split()
    to_compute = max(float(last_minute), float(now.partition("/")[0]))
    return processor_time(seconds) * max(1.0, 2 * to_compute / len(os.sched_getaffinity(0)))


def processor_time(seconds: float) -> float:
    """Seconds of a processor that something may take, if it may take `seconds` where most tests were written.

    Processors of virtual machines are now and then several times slower than that.
    """
    began = time.process_time()
    sum(number * number for number in range(100_000))
    return seconds * max(1.0, (time.process_time() - began) / 0.01)


async def again_if_busy(run: Callable[[], Awaitable[T]]) -> T:
    """Run a program again that the machine was too busy for, as its error suggests."""
    for _ in range(3):
        try:
            return await run()
        except SandboxError as error:
            if "the machine is too busy" not in str(error):
                raise
    return await run()


class PatientSandbox(LocalSandbox):
    async def run(
        self, program: Program, limits: Limits | None = None, *, start_within: float | None = None
    ) -> Execution:
        return await again_if_busy(lambda: LocalSandbox.run(self, program, limits, start_within=start_within))
