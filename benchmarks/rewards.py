"""The speed of scoring answers by running them, compared with the alternatives, in one run.

    python benchmarks/rewards.py                    256 Python solutions × 16 cases, about three minutes
    python benchmarks/rewards.py --quick            rougher, about a minute
    python benchmarks/rewards.py --language cpp     32 C++ solutions × 16 cases; each program is compiled once
    python benchmarks/rewards.py --peer URL         with another SandboxFusion-compatible service
    python benchmarks/rewards.py --before cb1881d   compare Python cases with an earlier commit, in turns

Compare ratios, not numbers: everything is measured in turn, in several rounds, on the same, possibly busy, machine.
"subprocess" is one process per case, one per processor at a time, without isolation; it is measured on a sample of the
solutions. Every result is checked: a scorer that is fast but wrong stops the benchmark.

In the second table, a tenth of the cases loops forever. These cases may only cost their own time-outs, spread over the
workers. The third table has answers that fail; with all-or-nothing scoring, their remaining cases need not run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from earlier import measure_in_turns
from sandbox import service
from toolyard.rewards.code.judge import CodeJudge
from toolyard.rewards.code.protocol import Aggregation, CaseVerdict, Submission
from toolyard.sandbox.languages.compiled import CPP_FLAGS
from toolyard.sandbox.local import LocalSandbox
from toolyard.sandbox.protocol import Limits, Program

CPUS = len(os.sched_getaffinity(0))
AT_ONCE = max(10, CPUS)
"""Executions in flight: the default, or more if that would leave processors idle."""
LOOP = "loop"
"""The input on which every program loops forever."""
LOOP_SECONDS = 0.5
SUBPROCESS, UNBATCHED = "subprocess, one per case", "sandbox.run, one per case"
EMBEDDED, SERVED, PEER = "CodeJudge", "CodeJudge over our service", "CodeJudge over the peer"
IMMORTAL = sys.version_info >= (3, 12)
"""Since Python 3.12 a forked process copies less, especially in ordinary runs."""
BATCHES_OVER_RUNS = 1.25 if IMMORTAL else 2.0
KEPT = {EMBEDDED: 0.85 if IMMORTAL else 0.7, UNBATCHED: 1.0}
"""Share of the rates of cb1881d, whose fast path was machine code."""

# The programs ---------------------------------------------------------------------------------------------------------

PYTHON = {
    "the longest run of rising numbers": """
def solve(data):
    numbers = [int(word) for word in data]
    longest = length = 1
    for before, number in zip(numbers, numbers[1:]):
        length = length + 1 if number > before else 1
        longest = max(longest, length)
    return str(longest)
""",
    "prime factors of the sum": """
def solve(data):
    n = sum(map(int, data))
    found = []
    divisor = 2
    while divisor * divisor <= n:
        while n % divisor == 0:
            found.append(divisor)
            n //= divisor
        divisor += 1
    return " ".join(map(str, found + [n] * (n > 1)))
""",
    "how often each last digit occurs": """
from collections import Counter

def solve(data):
    counts = Counter(word[-1] for word in data)
    return "\\n".join(f"{digit}: {count}" for digit, count in sorted(counts.items()))
""",
    "the heap's order": """
import heapq

def solve(data):
    heap = []
    for word in data:
        heapq.heappush(heap, -int(word))
    return "\\n".join(str(-heapq.heappop(heap)) for _ in range(len(heap)))
""",
}
PYTHON_MAIN = """
import sys

data = sys.stdin.read().split()
while data[0] == "loop":
    pass
print(solve(data))
"""
CPP = {
    "the longest run of rising numbers": """
    long long longest = 1, length = 1;
    for (size_t i = 1; i < numbers.size(); i++) {
        length = numbers[i] > numbers[i - 1] ? length + 1 : 1;
        longest = std::max(longest, length);
    }
    std::cout << longest << std::endl;
""",
    "the heap's order": """
    std::sort(numbers.rbegin(), numbers.rend());
    for (long long number : numbers) std::cout << number << "\\n";
""",
}
CPP_MAIN = """#include <algorithm>
#include <iostream>
#include <string>
#include <vector>

int main() {
    std::vector<long long> numbers;
    for (std::string word; std::cin >> word;) {
        volatile bool loop = word == "loop";
        while (loop) {}
        numbers.push_back(std::stoll(word));
    }
"""


@dataclass(frozen=True)
class Solution:
    code: str
    inputs: list[str]
    outputs: list[str]
    """The correct ones; unused for loops."""
    language: str

    def submission(self) -> Submission:
        return Submission(f"```{self.language}\n{self.code}```", {"inputs": self.inputs, "outputs": self.outputs})


numbers = itertools.count()
"""Every solution has its own number, so that no program is cached from an earlier measurement."""


def solutions(count: int, args: argparse.Namespace, *, loops: float = 0.0) -> list[Solution]:
    """`loops`: the share of the cases that loop forever."""
    kinds = CPP if args.language == "cpp" else PYTHON
    dice = random.Random(7)
    numbered = itertools.count(1)
    made: list[Solution] = []
    for number, (kind, text) in zip(itertools.islice(numbers, count), itertools.cycle(kinds.items())):
        scope: dict[str, Callable[[list[str]], str]] = {}
        exec(PYTHON[kind], scope)
        inputs = [" ".join(str(dice.randrange(1, 1000)) for _ in range(20)) for _ in range(args.cases)]
        outputs = [scope["solve"](stdin.split()) for stdin in inputs]
        inputs = [LOOP if loops and next(numbered) % round(1 / loops) == 0 else stdin for stdin in inputs]
        code = f"{CPP_MAIN}{text}}}\n// {number}\n" if kinds is CPP else f"{text}{PYTHON_MAIN}# {number}\n"
        made.append(Solution(code, inputs, outputs, args.language))
    return made


# The ways to score them -----------------------------------------------------------------------------------------------

Scorer = Callable[[Sequence[Solution]], Awaitable[None]]


def judge_over(url: str = "", run_seconds: float = 10.0, aggregation: Aggregation = Aggregation.FRACTION) -> CodeJudge:
    """A judge with the embedded sandbox or the service at `url`, on all processors."""
    return CodeJudge(
        sandbox_fusion_url=url,
        run_seconds=run_seconds,
        aggregation=aggregation,
        num_workers=AT_ONCE,
        rate_limit=AT_ONCE,
    )


def judged(judge: CodeJudge, late: list[str] | None = None) -> Scorer:
    """`late`: a list for cases that timed out although they do not loop. None: that is an error, too."""

    async def score(them: Sequence[Solution]) -> None:
        results = await judge.judge_all([solution.submission() for solution in them])
        for solution, result in zip(them, results, strict=True):
            assert result.score is not None, result.why
            for stdin, case in zip(solution.inputs, result.cases, strict=True):
                right = CaseVerdict.TIME_LIMIT if stdin == LOOP else CaseVerdict.PASSED
                if case.verdict is CaseVerdict.TIME_LIMIT and right is CaseVerdict.PASSED and late is not None:
                    late.append(case.why)
                else:
                    assert case.verdict is right, (case, right)

    return score


def unbatched(sandbox: LocalSandbox) -> Scorer:
    """A scorer that uses only `sandbox.run`."""

    async def score(them: Sequence[Solution]) -> None:
        turn = asyncio.Semaphore(4 * CPUS)

        async def one(solution: Solution, stdin: str, expected: str) -> None:
            async with turn:
                execution = await sandbox.run(Program(solution.code, solution.language, stdin=stdin), Limits())
            assert execution.stdout.rstrip() == expected, execution

        async with asyncio.TaskGroup() as group:
            for solution in them:
                for stdin, expected in zip(solution.inputs, solution.outputs, strict=True):
                    group.create_task(one(solution, stdin, expected))

    return score


def in_subprocesses(pool: ThreadPoolExecutor) -> Scorer:
    """A scorer without a sandbox."""

    def prepare(folder: str, number: int, solution: Solution) -> list[str]:
        source = Path(folder, f"{number}.{'cpp' if solution.language == 'cpp' else 'py'}")
        source.write_text(solution.code)
        if solution.language != "cpp":
            return [sys.executable, str(source)]
        subprocess.run(["g++", *CPP_FLAGS, str(source), "-o", str(source.with_suffix(""))], check=True)
        return [str(source.with_suffix(""))]

    def run(command: list[str], stdin: str, expected: str) -> None:
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=10, check=True)
        assert done.stdout.rstrip() == expected, done

    def score(them: Sequence[Solution]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            commands = pool.map(prepare, itertools.repeat(folder), itertools.count(), them)
            cases = [
                (command, stdin, expected)
                for command, solution in zip(list(commands), them, strict=True)
                for stdin, expected in zip(solution.inputs, solution.outputs, strict=True)
            ]
            for _ in pool.map(run, *zip(*cases, strict=True)):
                pass

    return lambda them: asyncio.to_thread(score, them)


# Measuring ------------------------------------------------------------------------------------------------------------


async def measure(score: Scorer, them: Sequence[Solution]) -> tuple[float, float]:
    """Seconds, and cases per second."""
    start = time.perf_counter()
    await score(them)
    seconds = time.perf_counter() - start
    return seconds, len(them) * len(them[0].inputs) / seconds


Rounds = list[tuple[float, float]]
"""Cases per second, and the ratio to the subprocesses measured right before and after."""


async def measure_rates(
    scorers: dict[str, Scorer], args: argparse.Namespace, tell: Callable[[str], None]
) -> dict[str, Rounds]:
    found: dict[str, Rounds] = {name: [] for name in scorers}
    for number in range(args.rounds):
        them = solutions(args.solutions, args)
        sampled = {SUBPROCESS: them[: max(2 * CPUS, len(them) // 32)], UNBATCHED: them[: max(2 * CPUS, len(them) // 4)]}
        _, before = await measure(scorers[SUBPROCESS], sampled[SUBPROCESS])
        for name in itertools.islice(scorers, 1, None):
            tell(f"round {number + 1}: {name}")
            _, rate = await measure(scorers[name], sampled.get(name, them))
            _, after = await measure(scorers[SUBPROCESS], sampled[SUBPROCESS])
            found[name].append((rate, rate / ((before + after) / 2)))
            found[SUBPROCESS].append((after, 1.0))
            before = after
    return found


@dataclass(frozen=True)
class Loops:
    """Seconds for the same cases without and with loops."""

    cases: int
    without: float
    with_them: float
    allowed: float
    """The time without loops, plus the time-outs spread over the workers."""
    late: int
    """Cases that ran out of time though they do not loop: the machine was too busy for so short a limit."""

    @property
    def ratio(self) -> float:
        return self.with_them / self.allowed


async def measure_loops(
    urls: dict[str, str], args: argparse.Namespace, tell: Callable[[str], None]
) -> dict[str, Loops]:
    found: dict[str, Loops] = {}
    count = max(4, args.solutions * CPUS // 8)  # on any machine the same time, and many loops for each worker
    for name, url in urls.items():
        looping = solutions(count, args, loops=0.1)
        loops = sum(solution.inputs.count(LOOP) for solution in looping)
        tell(f"{loops} endless loops: {name}")
        late: list[str] = []
        async with judge_over(url, LOOP_SECONDS) as judge:
            score = judged(judge, late)
            await score(solutions(2 * CPUS, args))
            before, _ = await measure(score, solutions(count, args))
            with_them, _ = await measure(score, looping)
            after, _ = await measure(score, solutions(count, args))
        without = (before + after) / 2
        allowed = without + loops * LOOP_SECONDS / CPUS
        found[name] = Loops(count * args.cases, without, with_them, allowed, len(late))
    return found


async def measure_failing(args: argparse.Namespace, tell: Callable[[str], None]) -> dict[str, float]:
    """Solutions per second with all-or-nothing scoring, by where they fail."""
    found: dict[str, list[float]] = {}
    async with judge_over(aggregation=Aggregation.ALL) as judge:
        await judged(judge)(solutions(2 * CPUS, args))
        for _ in range(args.rounds):
            for name, case in {"nowhere": None, "at the first case": 0, "at the sixth": 5}.items():
                tell(f"answers that fail {name}")
                them = solutions(max(4 * CPUS, args.solutions // 2), args)
                submissions = [solution.submission() for solution in them]
                for one in submissions:
                    if case is not None:
                        one.tests["outputs"] = [*one.tests["outputs"][:case], "no", *one.tests["outputs"][case + 1 :]]
                start = time.perf_counter()
                results = await judge.judge_all(submissions)
                found.setdefault(name, []).append(len(them) / (time.perf_counter() - start))
                assert {result.score for result in results} == {float(case is None)}
    return {name: statistics.median(rates) for name, rates in found.items()}


# Showing --------------------------------------------------------------------------------------------------------------


async def tables(args: argparse.Namespace) -> None:
    console = Console(width=max(100, Console().width))
    with contextlib.ExitStack() as stack:
        urls = {EMBEDDED: "", SERVED: stack.enter_context(service())}
        if args.peer:
            urls[PEER] = args.peer
        pool = stack.enter_context(ThreadPoolExecutor(CPUS))
        async with contextlib.AsyncExitStack() as opened:
            local = await opened.enter_async_context(LocalSandbox())
            scorers = {SUBPROCESS: in_subprocesses(pool), UNBATCHED: unbatched(local)}
            for name, url in urls.items():
                scorers[name] = judged(await opened.enter_async_context(judge_over(url)))
            with console.status("warming up") as status:
                for score in scorers.values():
                    await score(solutions(2 * CPUS, args))
                rates = await measure_rates(scorers, args, status.update)
        with console.status("measuring endless loops") as status:
            loops = await measure_loops(urls, args, status.update)
            failing = await measure_failing(args, status.update) if args.cases > 5 else {}
    title = f"Python {sys.version.split()[0]}, {CPUS} cores, isolation {local.level}"
    show_rates(console, rates, f"{args.solutions} {args.language} solutions × {args.cases} cases, {title}")
    show_loops(console, loops)
    show_failing(console, failing, args.cases)
    goals(console, rates, loops, args.language)


def show_rates(console: Console, found: dict[str, Rounds], title: str) -> None:
    grid = Table("method", title=title)
    for column in ("cases/s", "slowest round", "fastest round", "× subprocess"):
        grid.add_column(column, justify="right")
    for name, rounds in found.items():
        rates, ratios = zip(*rounds, strict=True)
        shown = [f"{rate:.0f}" for rate in (statistics.median(rates), min(rates), max(rates))]
        grid.add_row(name, *shown, f"{statistics.median(ratios):.1f}")
    console.print(grid)


def show_loops(console: Console, loops: dict[str, Loops]) -> None:
    grid = Table("method", title=f"a tenth of the cases loops forever, {LOOP_SECONDS:g} s each, over {CPUS} workers")
    for column in ("cases", "without, s", "with, s", "may take, s", "ratio", "late"):
        grid.add_column(column, justify="right")
    for name, row in loops.items():
        seconds = [f"{value:.2f}" for value in (row.without, row.with_them, row.allowed)]
        grid.add_row(name, str(row.cases), *seconds, f"{row.ratio:.2f}", str(row.late))
    console.print(grid)


def show_failing(console: Console, failing: dict[str, float], cases: int) -> None:
    grid = Table("answers that fail", title=f"all or nothing, {cases} cases each")
    grid.add_column("answers/s", justify="right")
    for name, rate in failing.items():
        grid.add_row(name, f"{rate:.0f}")
    if failing:
        console.print(grid)


def goals(console: Console, found: dict[str, Rounds], loops: dict[str, Loops], language: str) -> None:
    lines: list[tuple[str, float, float, str]] = []
    if language == "python":
        batches, runs = (statistics.median(ratio for _, ratio in found[name]) for name in (EMBEDDED, UNBATCHED))
        lines.append(("cases per second × ordinary runs", batches / runs, BATCHES_OVER_RUNS, ">="))
    # 5 % for the noise of three measurements.
    lines.append(("endless loops: time × what they may cost", loops[EMBEDDED].ratio, 1.05, "<="))
    for text, value, goal, sense in lines:
        met = value >= goal if sense == ">=" else value <= goal
        console.print(f"{'[green]met [/]' if met else '[red]MISS[/]'} {text}: {value:.2f} (goal {sense} {goal:g})")


# An earlier commit ----------------------------------------------------------------------------------------------------


async def measure_own(args: argparse.Namespace) -> dict[str, float]:
    """Cases per second with the imported toolyard, for `compare`."""
    async with LocalSandbox() as local, judge_over() as judge:
        scorers = {EMBEDDED: judged(judge), UNBATCHED: unbatched(local)}
        rates: dict[str, float] = {}
        for name, score in scorers.items():
            await score(solutions(2 * CPUS, args))
            _, rates[name] = await measure(score, solutions(args.solutions, args))
    return rates


def compare(args: argparse.Namespace) -> None:
    console = Console(width=max(100, Console().width))
    with console.status("measuring") as status:
        arguments = ["--measure", "--solutions", str(args.solutions // 4), "--cases", str(args.cases)]
        seen = measure_in_turns(__file__, arguments, args.before, 2 * args.rounds + 1, status.update)
    title = f"cases per second, medians, Python {sys.version.split()[0]}, {CPUS} cores"
    grid = Table("method", title=title)
    for column in (*seen, "ratio", "goal"):
        grid.add_column(column, justify="right")
    for name, goal in KEPT.items():
        old, new = (statistics.median(row[name] for row in rows) for rows in seen.values())
        met = "met" if new / old >= goal else f"MISS (≥ {goal:g})"
        grid.add_row(name, f"{old:.0f}", f"{new:.0f}", f"{new / old:.2f}", met)
    console.print(grid)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="an eighth of the solutions, fewer rounds, about a minute")
    parser.add_argument("--solutions", type=int, help="number of solutions; default: 256, for C++ 32")
    parser.add_argument("--cases", type=int, default=16, help="cases per solution")
    parser.add_argument("--language", default="python", choices=["python", "cpp"])
    parser.add_argument("--peer", help="URL of another SandboxFusion-compatible service")
    parser.add_argument("--before", metavar="COMMIT", help="only compare with an earlier commit")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.solutions = args.solutions or (32 if args.language == "cpp" else 256) // (8 if args.quick else 1)
    args.rounds = 3 if args.quick else 5
    if args.measure:
        print(json.dumps(asyncio.run(measure_own(args))))
    elif args.before:
        compare(args)
    else:
        asyncio.run(tables(args))


if __name__ == "__main__":
    main()
