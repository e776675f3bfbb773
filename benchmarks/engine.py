"""Tokens per second of the embedded engine and of plain `transformers.generate`: the same model, prompts and number of
tokens, greedy, in one process and in turns, so that the load of the machine affects both. Compare the ratios, not the
numbers.

    python benchmarks/engine.py                        # about two minutes on two quiet cores
    python benchmarks/engine.py --model PATH --rounds 3 --device cuda

Every request has its own prompt. With four turns, each turn adds a tool result; `generate` recomputes the whole
conversation every turn, the engine only what is new.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolyard.engines.models import DEFAULT_MODEL, resolve_model
from toolyard.engines.protocol import Sampling
from toolyard.engines.transformers.engine import TransformersEngine

PROMPT = 640
"""Approximate tokens of a system message and eight worked examples."""
RESULT = 40
"""Tokens of a tool result between two turns."""


@dataclass(frozen=True)
class Case:
    batch: int
    turns: int
    tokens: int
    """Sampled per turn and request."""
    rounds: int = 1
    """Number of measurements; short cases have more. The best of each side is shown."""

    @property
    def name(self) -> str:
        return f"batch {self.batch}, {self.turns} turn{'s' if self.turns > 1 else ''} of {self.tokens} tokens"

    @property
    def sampled(self) -> int:
        return self.batch * self.turns * self.tokens


CASES = (Case(1, 1, 48, rounds=2), Case(8, 1, 48), Case(1, 4, 12, rounds=2), Case(8, 4, 12))


def words(chance: random.Random, count: int, vocabulary: int) -> list[int]:
    return [chance.randrange(vocabulary // 10, vocabulary) for _ in range(count)]


def prompts(case: Case, chance: random.Random, vocabulary: int) -> list[list[int]]:
    """Prompts of different lengths."""
    return [words(chance, PROMPT + 8 * (row - case.batch // 2), vocabulary) for row in range(case.batch)]


def by_generate(model: Any, case: Case, chance: random.Random) -> None:
    import torch

    device, vocabulary = model.device, model.config.vocab_size
    conversations = prompts(case, chance, vocabulary)
    for turn in range(case.turns):
        if turn:
            conversations = [ids + words(chance, RESULT, vocabulary) for ids in conversations]
        longest = max(map(len, conversations))
        padded = torch.tensor([[0] * (longest - len(ids)) + ids for ids in conversations], device=device)
        mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in conversations], device=device)
        out = model.generate(
            padded, attention_mask=mask, do_sample=False, min_new_tokens=case.tokens, max_new_tokens=case.tokens
        )
        conversations = [ids + new for ids, new in zip(conversations, out[:, longest:].tolist(), strict=True)]


async def by_engine(engine: TransformersEngine, case: Case, chance: random.Random, vocabulary: int, name: str) -> None:
    async def play(row: int, ids: list[int]) -> None:
        for turn in range(case.turns):
            if turn:
                ids = ids + words(chance, RESULT, vocabulary)
            found = await engine.generate(
                ids, Sampling(temperature=0, max_tokens=case.tokens), request_id=f"{name}-{row}"
            )
            ids = ids + found.token_ids

    async with asyncio.TaskGroup() as tasks:
        for row, ids in enumerate(prompts(case, chance, vocabulary)):
            tasks.create_task(play(row, ids))


def load_plain(model: str | Path, device: str) -> Any:
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval().to(device)
    loaded.generation_config.pad_token_id = 0
    return loaded


def timed(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


async def measure(model: str | Path, device: str, rounds: int) -> None:
    plain = load_plain(model, device)
    vocabulary = plain.config.vocab_size
    async with TransformersEngine(model, device=device) as engine:
        by_generate(plain, Case(1, 1, 2), random.Random(0))
        await by_engine(engine, Case(1, 1, 2), random.Random(0), vocabulary, "warm")
        print(f"{'':32}{'generate':>12}{'engine':>12}{'ratio':>8}    tokens/s")
        for case in CASES:
            theirs, ours = list[float](), list[float]()
            for turn in range(rounds * case.rounds):
                seed = f"{case.name}, {turn}"  # no two measurements share a prompt: the engine would cache it
                theirs.append(timed(lambda case=case, seed=seed: by_generate(plain, case, random.Random(seed))))
                started = time.perf_counter()
                await by_engine(engine, case, random.Random(seed), vocabulary, f"{case.name}-{turn}")
                ours.append(time.perf_counter() - started)
            slow, fast = (case.sampled / min(times) for times in (theirs, ours))
            print(f"{case.name:32}{slow:12.1f}{fast:12.1f}{fast / slow:8.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    asyncio.run(measure(resolve_model(options.model, progress=print), options.device, options.rounds))


if __name__ == "__main__":
    main()
