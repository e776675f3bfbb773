"""Tokens per second of the embedded engine and of plain `transformers.generate`: the same model, prompts and number of
tokens, in one process and in turns, so that the load of the machine affects both. Compare the ratios, not the numbers.

    python benchmarks/engine.py                        # about two minutes on two quiet cores
    python benchmarks/engine.py --model PATH --rounds 3 --device cuda --in-flight 128 --dtype float32 --torch-compile
    python benchmarks/engine.py … --before fcd0059^    # the same by the engine of an earlier commit, in turns

By default, every request has its own prompt, and tokens are the likeliest. With four turns, each turn adds a tool
result; `generate` recomputes the whole conversation every turn, the engine only what is new.

With `--in-flight`, requests come as in training: eight samples of each prompt, at temperature 1, all at once. Then the
log-probabilities of some of them are compared with those of a plain forward pass, as a trainer computes them.

With `--before`, `--torch-compile` is ignored by engines that do not have it.

With `--vllm`, only vLLM is measured, with the same requests; beside it, the others would be slower:

    make .venv-vllm/.ready && .venv-vllm/bin/python benchmarks/engine.py --vllm
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import inspect
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

from earlier import measure_in_turns
from toolyard.engines.models import DEFAULT_MODEL, resolve_model
from toolyard.engines.protocol import Sampling
from toolyard.engines.transformers.engine import TransformersEngine

PROMPT = 640
"""Approximate tokens of a system message and eight worked examples."""
GROUP, GROUP_PROMPT = 8, 300
"""Samples of a prompt in training, and its approximate tokens."""
COMPARED = 16
"""Requests whose log-probabilities are compared."""
RESULT = 40
"""Tokens of a tool result between two turns."""


Played: TypeAlias = "tuple[list[int], dict[int, float]]"
"""A conversation: its tokens, and the log-probabilities of those that were sampled."""


@dataclass(frozen=True)
class Case:
    batch: int
    turns: int
    tokens: int
    """Sampled per turn and request, on average."""
    rounds: int = 1
    """Number of measurements; short cases have more. The best of each side is shown."""
    in_groups: bool = False
    """Several samples of each prompt, at temperature 1."""

    @property
    def name(self) -> str:
        span = f"{self.tokens // 2} to {self.tokens * 3 // 2}" if self.is_ragged else self.tokens
        return f"batch {self.batch}, {self.turns} turn{'s' if self.turns > 1 else ''} of {span} tokens"

    @property
    def is_ragged(self) -> bool:
        """Turns have different lengths, so that requests come back one by one."""
        return self.in_groups and self.turns > 1

    @functools.cached_property
    def lengths(self) -> list[list[int]]:
        """How many tokens to sample, by turn and request."""
        chance = random.Random(self.name)
        low, high = (self.tokens // 2, self.tokens * 3 // 2) if self.is_ragged else (self.tokens, self.tokens)
        return [[chance.randint(low, high) for _ in range(self.batch)] for _ in range(self.turns)]

    @property
    def sampled(self) -> int:
        return sum(map(sum, self.lengths))


CASES = (Case(1, 1, 48, rounds=2), Case(8, 1, 48), Case(1, 4, 12, rounds=2), Case(8, 4, 12))


def words(chance: random.Random, count: int, vocabulary: int) -> list[int]:
    return [chance.randrange(vocabulary // 10, vocabulary) for _ in range(count)]


def flight_cases(requests: int) -> tuple[Case, ...]:
    return Case(requests, 1, 128, in_groups=True), Case(requests, 4, 32, in_groups=True)


def prompts(case: Case, chance: random.Random, vocabulary: int) -> list[list[int]]:
    """Prompts of different lengths."""
    if case.in_groups:
        groups = [
            words(chance, GROUP_PROMPT + 4 * (group % 16 - 8), vocabulary) for group in range(-(-case.batch // GROUP))
        ]
        return [groups[row // GROUP] for row in range(case.batch)]
    return [words(chance, PROMPT + 8 * (row - case.batch // 2), vocabulary) for row in range(case.batch)]


def by_turns(
    case: Case, chance: random.Random, vocabulary: int, sample: Callable[[list[list[int]], list[int]], list[list[int]]]
) -> None:
    """Play all conversations turn by turn. `sample` gives each its new tokens, as many as asked for."""
    conversations = prompts(case, chance, vocabulary)
    for turn, lengths in enumerate(case.lengths):
        if turn:
            conversations = [ids + words(chance, RESULT, vocabulary) for ids in conversations]
        sampled = sample(conversations, lengths)
        conversations = [ids + new for ids, new in zip(conversations, sampled, strict=True)]


def by_generate(model: Any, case: Case, chance: random.Random) -> None:
    import torch

    device = model.device

    def sample(conversations: list[list[int]], lengths: list[int]) -> list[list[int]]:
        longest = max(map(len, conversations))
        padded = torch.tensor([[0] * (longest - len(ids)) + ids for ids in conversations], device=device)
        mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in conversations], device=device)
        out = model.generate(
            padded,
            attention_mask=mask,
            do_sample=case.in_groups,
            top_k=0,
            min_new_tokens=max(lengths),
            max_new_tokens=max(lengths),
        )
        return [new[:most] for new, most in zip(out[:, longest:].tolist(), lengths, strict=True)]

    by_turns(case, chance, model.config.vocab_size, sample)


def by_vllm(model: Any, case: Case, chance: random.Random, vocabulary: int) -> None:
    vllm: Any = import_module("vllm")  # in an environment of its own

    def sample(conversations: list[list[int]], lengths: list[int]) -> list[list[int]]:
        settings = [
            vllm.SamplingParams(
                temperature=float(case.in_groups), max_tokens=most, ignore_eos=True, seed=row, logprobs=0
            )
            for row, most in enumerate(lengths)
        ]
        found = model.generate([{"prompt_token_ids": ids} for ids in conversations], settings, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in found]

    by_turns(case, chance, vocabulary, sample)


async def by_engine(
    engine: TransformersEngine, case: Case, chance: random.Random, vocabulary: int, name: str
) -> list[Played]:
    results = words(chance, case.batch * RESULT, vocabulary)

    async def play(row: int, ids: list[int]) -> Played:
        logprobs = dict[int, float]()
        for turn, length in enumerate(lengths[row] for lengths in case.lengths):
            if turn:
                ids = ids + results[row * RESULT : (row + 1) * RESULT]
            sampling = Sampling(temperature=float(case.in_groups), max_tokens=length, seed=row)
            found = await engine.generate(ids, sampling, request_id=f"{name}-{row}")
            logprobs |= {len(ids) + at: value for at, value in enumerate(found.logprobs or ())}
            ids = ids + found.token_ids
        return ids, logprobs

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(play(row, ids)) for row, ids in enumerate(prompts(case, chance, vocabulary))]
    return [one.result() for one in running]


def differences(model: Any, played: list[Played]) -> list[float]:
    """Of the log-probabilities from those of a plain forward pass over each sequence."""
    import torch

    found: list[float] = []
    for ids, logprobs in played:
        with torch.inference_mode():
            scores = model(torch.tensor([ids], device=model.device), use_cache=False).logits[0].float().log_softmax(1)
        places = torch.tensor(list(logprobs), device=model.device)
        expected = scores[places - 1, torch.tensor(ids, device=model.device)[places]].tolist()
        found += [abs(one - other) for one, other in zip(expected, logprobs.values(), strict=True)]
    return found


def load_plain(model: str | Path, device: str, dtype: str) -> Any:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    models: Any = transformers.AutoModelForCausalLM
    loaded = models.from_pretrained(model, dtype=dtype).eval().to(device)
    loaded.generation_config.pad_token_id = 0
    return loaded


def timed(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


async def measure(
    model: str | Path,
    device: str,
    dtype: str,
    rounds: int,
    in_flight: int,
    *,
    engine_only: bool,
    torch_compile: bool,
    say: Callable[[str], None] = print,
) -> dict[str, float]:
    """Say how fast both are, and return the engine's tokens per second in each case."""
    plain = load_plain(model, device, dtype)
    vocabulary = plain.config.vocab_size
    cases = flight_cases(in_flight) if in_flight else CASES
    options: Any = {"device": device, "dtype": dtype}
    if torch_compile and "torch_compile" in inspect.signature(TransformersEngine).parameters:
        options["torch_compile"] = True
    started = time.perf_counter()
    found: dict[str, float] = {}
    async with TransformersEngine(model, max_batch_size=in_flight or 16, **options) as engine:
        say(f"opened in {time.perf_counter() - started:.1f} s")
        by_generate(plain, Case(1, 1, 2), random.Random(0))
        await by_engine(engine, Case(1, 1, 2), random.Random(0), vocabulary, "warm")
        say(f"{device + ', ' + dtype:40}{'generate':>12}{'engine':>12}{'ratio':>8}    tokens/s")
        for case in cases:
            theirs, ours, played = list[float](), list[float](), list[Played]()
            for turn in range(rounds * case.rounds):
                seed = f"{case.name}, {turn}"  # no two measurements share a prompt: the engine would cache it
                if not engine_only:
                    theirs.append(timed(lambda case=case, seed=seed: by_generate(plain, case, random.Random(seed))))
                started = time.perf_counter()
                played = await by_engine(engine, case, random.Random(seed), vocabulary, f"{case.name}-{turn}")
                ours.append(time.perf_counter() - started)
            slow, fast = (case.sampled / min(times, default=float("nan")) for times in (theirs, ours))
            found[case.name] = fast
            say(f"{case.name:40}{slow:12.1f}{fast:12.1f}{fast / slow:8.2f}")
            if in_flight:
                apart = differences(plain, played[:: max(1, len(played) // COMPARED)])
                mean, most = sum(apart) / len(apart), max(apart)
                say(f"    log-probabilities differ by {mean:.2g}, at most {most:.2g}; {len(apart)} tokens")
    return found


def compare(commit: str, arguments: list[str], rounds: int) -> None:
    """Tokens per second of this tree's engine and of an earlier commit's."""
    tell = functools.partial(print, file=sys.stderr)
    seen = measure_in_turns(__file__, ["--measure", *arguments], commit, rounds, tell)
    print(f"{'medians of ' + str(rounds):40}{commit:>12}{'this tree':>12}{'ratio':>8}    tokens/s")
    before, here = seen.values()
    for name in here[0]:
        old, new = ([rates[name] for rates in runs] for runs in (before, here))
        ratios = [one / other for one, other in zip(new, old, strict=True)]
        middles = [statistics.median(values) for values in (old, new, ratios)]
        print("{:40}{:12.1f}{:12.1f}{:8.2f}".format(name, *middles), f"   {min(ratios):.2f} to {max(ratios):.2f}")


def measure_vllm(model: str | Path, dtype: str, rounds: int, in_flight: int) -> None:
    os.environ.update(VLLM_CPU_KVCACHE_SPACE="2", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR")
    processors = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", processors)  # all, like the others; it would leave one unused
    vllm: Any = import_module("vllm")  # in an environment of its own

    # Eager: compiling takes longer than the whole measurement, and again for every shape.
    loaded: Any = vllm.LLM(
        str(model), dtype=dtype, max_model_len=2048, max_num_seqs=in_flight or 16, enforce_eager=True
    )
    vocabulary = loaded.get_tokenizer().vocab_size
    by_vllm(loaded, Case(1, 1, 2), random.Random(0), vocabulary)
    print(f"{dtype:40}{'vLLM':>12}    tokens/s")
    for case in flight_cases(in_flight) if in_flight else CASES:
        seeds = [f"{case.name}, {turn}" for turn in range(rounds * case.rounds)]
        times = [timed(functools.partial(by_vllm, loaded, case, random.Random(seed), vocabulary)) for seed in seeds]
        print(f"{case.name:40}{case.sampled / min(times):12.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="", help="float32 (default on the CPU), bfloat16 (default elsewhere)")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--in-flight", type=int, default=0, help="Requests at the same time, as in training.")
    parser.add_argument("--engine-only", action="store_true", help="Do not measure `generate`.")
    parser.add_argument("--torch-compile", action="store_true", help="Compile the engine's layers.")
    parser.add_argument("--vllm", action="store_true", help="Measure vLLM, and nothing else.")
    parser.add_argument(
        "--before", metavar="COMMIT", help="Only compare with an earlier commit's engine, --rounds times."
    )
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    dtype = options.dtype or ("float32" if options.device == "cpu" else "bfloat16")
    if options.before:
        shared = ["--model", options.model, "--device", options.device, "--dtype", dtype]
        shared += ["--in-flight", str(options.in_flight), "--rounds", "4"]  # the first ones record graphs
        compare(options.before, [*shared, *["--torch-compile"] * options.torch_compile], options.rounds)
        return
    say = functools.partial(print, flush=True, file=sys.stderr if options.measure else sys.stdout)
    model = resolve_model(options.model, progress=say)
    if options.vllm:
        measure_vllm(model, dtype, options.rounds, options.in_flight)
        return
    flags: Any = {"engine_only": options.engine_only or options.measure, "torch_compile": options.torch_compile}
    found = asyncio.run(measure(model, options.device, dtype, options.rounds, options.in_flight, say=say, **flags))
    if options.measure:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
