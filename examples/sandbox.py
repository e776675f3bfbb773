"""The embedded sandbox in one file: run a program, test one on several inputs, use a session.

python examples/sandbox.py
"""

import asyncio

from toolyard import Limits, LocalSandbox, Program

SOLUTION = "print(sum(map(int, input().split())))"
CASES = [("1 2", "3"), ("10 -4", "6"), ("0 0", "0")]


async def main() -> None:
    async with LocalSandbox() as sandbox:
        execution = await sandbox.run(Program("print(6 * 7)"), Limits(run_seconds=2))
        print(f"{execution.verdict}: {execution.stdout.strip()}")

        looping = await sandbox.run(Program("while True: pass"), Limits(run_seconds=0.5))
        print(f"{looping.verdict} after {looping.wall_seconds:.1f} s")

        results = await asyncio.gather(*(sandbox.run(Program(SOLUTION, stdin=given)) for given, _ in CASES))
        passed = sum(result.stdout.strip() == wanted for result, (_, wanted) in zip(results, CASES, strict=True))
        print(f"{passed} of {len(CASES)} cases passed")

        async with sandbox.session() as session:
            await session.run("import math\nradius = 2")
            cell = await session.run("math.pi * radius ** 2")
            print("the session remembers:", cell.display[0]["text/plain"])


asyncio.run(main())
