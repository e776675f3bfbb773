"""How `RemoteSandbox` runs one program on many inputs in one request, where the server takes that."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from toolyard.errors import SandboxError
from toolyard.sandbox import wire_cases
from toolyard.sandbox.protocol import Execution, Limits
from toolyard.sandbox.remote_http import Connections, explain


class NoCasesError(Exception):
    """The server has no such route, though it had said so: there is an older one behind the same address."""


async def run_cases(
    http: Connections, base: str, body: bytes, count: int, limits: Limits, margin: float
) -> AsyncGenerator[Execution]:
    """One for each of so many inputs, in order. `margin`: seconds beyond what the program itself may take.

    Raises:
        NoCasesError: nothing was run.
        ProgramError, SandboxError: the next one could not be run; those before it are good.
    """
    where = f"{base}{wire_cases.PATH}"
    # A case that loses the process it was forked from is run again from the start.
    seconds = 2 * limits.run_seconds + margin
    async with http.stream(wire_cases.PATH, body, seconds=limits.compile_seconds + seconds) as reply:
        if reply.status in (404, 405):
            raise NoCasesError
        if reply.lines is None:
            raise explain(reply, where)
        for number in range(count):
            line = await reply.lines.next(seconds)
            if not line:
                raise SandboxError(f"{where}: the server answered {number} of {count} cases, and no more")
            yield wire_cases.read_line(line, where)
        await reply.lines.next(margin)  # there is none, and the connection can be used again
