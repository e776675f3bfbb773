"""The rollout runner alone: turns per second, CPU per turn and memory per request, with an engine that costs nothing.

    python benchmarks/rollout.py            about a minute
    python benchmarks/rollout.py --quick
    python benchmarks/rollout.py --before ecf6319   the same work by an earlier commit, in turns, and the ratio
    python benchmarks/rollout.py --embedded the embedded model as well, against transformers.generate (engine.py)

Every request has 8 turns, and every task 8 requests: the model calls a tool, reads its result, and so on. The engine is
scripted, the tool adds numbers, the tokenizer is byte-level or, if it is cached, SmolLM2's; everything else is real:
state machine, chat format, tool instances, rewards, audit.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import resource
import statistics
import sys
import time
import tracemalloc

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from earlier import measure_in_turns
from toolyard.chat.formats import open_format
from toolyard.chat.protocol import Tokenizer
from toolyard.engines.models import EMBEDDED, embedded_folder, resolve_model
from toolyard.engines.protocol import Sampling
from toolyard.engines.scripted import ScriptedEngine
from toolyard.messages import Message
from toolyard.rewards.registry import load_reward
from toolyard.rollout.budget import RolloutLimits
from toolyard.rollout.play.play import Play
from toolyard.rollout.play.setting import Setting
from toolyard.rollout.play.speaker import TokenSpeaker
from toolyard.rollout.request import create_request
from toolyard.rollout.run_many import RolloutRun
from toolyard.tasks.protocol import Task
from toolyard.testing.engine.byte_tokenizer import ByteTokenizer
from toolyard.tools.base import BaseTool, ToolResponse

TURNS = 8
GOAL = 2000
GAIN = 1.4
"""Turns per CPU second, relative to the commit before each call got its own task."""
CALL = '<tool_call>\n{"name": "add", "arguments": {"numbers": [1, 2, 3]}}\n</tool_call>'
SCHEMA = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds numbers.",
        "parameters": {
            "type": "object",
            "properties": {"numbers": {"type": "array", "items": {"type": "number"}}},
            "required": ["numbers"],
        },
    },
}
GROUP = 8
"""Samples per task."""


def task(number: int) -> Task:
    question = f"Exercise {number}: how much are 1, 2 and 3?"
    return Task(f"task-{number}", (Message("system", "You are a calculator. " * 20), Message("user", question)), "6")


class Add(BaseTool):
    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(text=str(sum(parameters["numbers"]))), None, {}


def tokenizer() -> tuple[Tokenizer, str]:
    folder = embedded_folder(EMBEDDED["smollm2-135m"])
    if folder.fault() is None:
        from toolyard.chat.tokenizers.opening import load_tokenizer

        return load_tokenizer(folder.path), "SmolLM2's"
    return ByteTokenizer(), "bytes"


class Bench:
    def __init__(self, turns: int = TURNS) -> None:
        self.tokenizer, self.tokens_are = tokenizer()
        self.chat = open_format(self.tokenizer, format="hermes")
        stop = self.chat.stop_token_ids[0]
        self.call_ids = [*self.tokenizer.encode(f"Let me add them.\n{CALL}"), stop]
        self.answer_ids = [*self.tokenizer.encode("They add up.\n#### 6"), stop]
        self.tool = Add({"type": "native"}, SCHEMA)
        self.limits = RolloutLimits(max_assistant_turns=100_000, response_length=10_000_000)
        self.reward = load_reward("gsm8k")
        self.turns = turns

    def engine(self, turns: int) -> ScriptedEngine:
        return ScriptedEngine(lambda request_id, turn, prompt: self.answer_ids if turn >= turns - 1 else self.call_ids)

    def setting(self, engine: ScriptedEngine) -> Setting:
        speaker = TokenSpeaker(engine, self.chat, Sampling(max_tokens=4096), self.limits)
        return Setting(speaker, {"add": self.tool}, self.limits, self.reward)

    async def run(self, requests: int, concurrency: int) -> tuple[float, float]:
        """Turns per second, and CPU seconds per turn."""
        async with self.engine(TURNS) as engine:
            place = self.setting(engine)
            schemas = (self.tool.tool_schema,)
            made = [create_request(task(i // GROUP), i % GROUP, tool_schemas=schemas) for i in range(requests)]
            wall, cpu, turns = time.perf_counter(), time.process_time(), 0
            async with RolloutRun(place, made, concurrency=concurrency) as run:
                async for trajectory in run:
                    assert trajectory.score == 1.0, trajectory
                    turns += len(trajectory.turns)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        assert turns == requests * TURNS
        return turns / wall, cpu / turns

    async def turn_costs(self, turns: int) -> list[float]:
        """Seconds for each turn of one long request."""
        async with self.engine(turns) as engine:
            place = self.setting(engine)
            request = create_request(task(0), tool_schemas=(self.tool.tool_schema,))
            stamps: list[float] = []
            generate = engine.generate

            async def stamped(*args, **kwargs):
                stamps.append(time.process_time())
                return await generate(*args, **kwargs)

            engine.generate = stamped
            await Play(request, place).run()
        return [after - before for before, after in itertools.pairwise(stamps)]

    async def memory(self, requests: int) -> float:
        """Memory of one request in its last turn, in bytes."""
        gate, all_there, waiting = asyncio.Event(), asyncio.Event(), 0
        async with self.engine(TURNS) as engine:
            place = self.setting(engine)
            generate = engine.generate

            async def held(prompt, sampling, *, request_id):
                nonlocal waiting
                got = await generate(prompt, sampling, request_id=request_id)
                if got.token_ids == self.answer_ids:
                    waiting += 1
                    if waiting == requests:
                        all_there.set()
                    await gate.wait()
                return got

            engine.generate = held
            gc.collect()
            tracemalloc.start()
            before = tracemalloc.get_traced_memory()[0]
            schemas = (self.tool.tool_schema,)
            made = [create_request(task(i // GROUP), i % GROUP, tool_schemas=schemas) for i in range(requests)]
            async with RolloutRun(place, made, concurrency=requests) as run:
                await all_there.wait()
                after = tracemalloc.get_traced_memory()[0]
                gate.set()
                async for _ in run:
                    pass
            tracemalloc.stop()
        return (after - before) / requests


async def main(quick: bool) -> None:
    console, bench = Console(), Bench()
    table = Table(box=SIMPLE_HEAD, title=f"8 turns per request, tokenizer: {bench.tokens_are}", title_justify="left")
    for title in ("concurrency", "requests", "requests/s", "turns/s", "CPU per turn", "goal"):
        table.add_column(title, justify="right")
    await bench.run(64, 64)  # warm
    for concurrency in (64, 512, 4096):
        requests = max(concurrency, 256) if quick else max(2 * concurrency, 1024)
        rate, cpu = await bench.run(requests, concurrency)
        met = "met" if rate >= GOAL else f"missed (≥ {GOAL})"
        table.add_row(str(concurrency), str(requests), f"{rate / TURNS:.0f}", f"{rate:.0f}", f"{cpu * 1e6:.0f} µs", met)
    console.print(table)
    turns = 200 if quick else 800
    costs = await bench.turn_costs(turns)
    early, late = statistics.median(costs[10:60]), statistics.median(costs[-50:])
    console.print(
        f"One request of {turns} turns: a turn costs {early * 1e6:.0f} µs at the start, {late * 1e6:.0f} µs at the end "
        f"({late / early:.2f}×)."
    )
    each = await bench.memory(256)
    console.print(f"Memory per request in its 8th turn: {each / 1024:.0f} KiB.")
    console.print(f"Peak memory of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB.")


def measure() -> None:
    """One measurement with the imported toolyard, for `compare`."""
    bench = Bench()
    asyncio.run(bench.run(64, 64))  # warm
    print(json.dumps([asyncio.run(bench.run(512, concurrency))[1] for concurrency in (64, 512)]))


def compare(commit: str, rounds: int) -> None:
    """Turns per CPU second of this tree and of an earlier commit."""
    seen = measure_in_turns(__file__, ["--measure"], commit, rounds)
    table = Table(box=SIMPLE_HEAD, title=f"turns per CPU second, best of {rounds}", title_justify="left")
    for title in ("concurrency", commit, "this tree", "ratio", "goal"):
        table.add_column(title, justify="right")
    for column, concurrency in enumerate((64, 512)):
        old, new = (1 / min(row[column] for row in rows) for rows in seen.values())
        met = "met" if new / old >= GAIN else f"MISS (≥ {GAIN})"
        table.add_row(str(concurrency), f"{old:.0f}", f"{new:.0f}", f"{new / old:.2f}", met)
    Console().print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer requests")
    parser.add_argument("--embedded", action="store_true", help="also measure the embedded model: three minutes more")
    parser.add_argument("--before", metavar="COMMIT", help="only compare with an earlier commit")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of the comparison")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure()
        sys.exit()
    if options.before:
        compare(options.before, options.rounds)
        sys.exit()
    asyncio.run(main(options.quick))
    if options.embedded:
        from engine import measure

        asyncio.run(measure(resolve_model("smollm2-135m"), "cpu", 1))
