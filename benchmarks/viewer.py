"""Response times of the viewer's library, compared with the obvious alternative: reading all lines into a list.

    python benchmarks/viewer.py                          1k, 10k and 100k trajectories: a few minutes, 2 GB of disk
    python benchmarks/viewer.py --sizes 1000,10000       fewer

Compare ratios, not numbers: everything is measured in turn on the same, possibly busy, machine. Lines have about 10 KB,
with token ids and logprobs, like a rollout of two or three turns; files have 1,024 lines. Each column runs in its own
process, to measure its memory; files are in the page cache. Times below three seconds are the best of three, without
caches of the previous measurement.

    index        builds the index, once
    library      opens it again: the first screen is the list of steps and 50 rows; "nothing new" is a refresh
    json.loads   reads every line into a list, then loops in Python

The filter is `score<0.5 tools>1 finish:length`, the order `sort:-time`; both show 50 rows. Groups, calls and changes
between the first and the second half of the steps are the answers of the web viewer's server, with 100 rows as JSON;
"again" is the next page of groups, which are cached.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from toolyard.messages import Message, ToolCall
from toolyard.records.jsonl import encode
from toolyard.records.lines import to_line
from toolyard.records.trajectory import CallRecord, Sampled, Tokens, Trajectory, Turn
from toolyard.viewer.library import Library
from toolyard.viewer.query import parse_query
from toolyard.viewer.web.answers import Answers

SIZES = (1_000, 10_000, 100_000)
PER_FILE = 1024
LAST = "the only one of its kind"
NOWHERE = "nobody ever said this"
FILTER, SORT = "score<0.5 tools>1 finish:length", "sort:-time"
FIRST_SCREEN_GOAL = 2.0

clock = time.perf_counter


# A dump ---------------------------------------------------------------------------------------------------------------

WORDS = """the a of to each has have costs dollars marbles boxes apples hours minutes how many altogether left then so
we need first multiply add subtract result print total number answer is per day week sold bought remaining twice half
with for in every shop train km speed price given find let compute check therefore""".split()  # noqa: SIM905 - no list would be easier to read


def sentence(chance: random.Random, words: int) -> str:
    return " ".join(chance.choices(WORDS, k=words)).capitalize() + "."


def call_of(chance: random.Random, name: str) -> CallRecord:
    lines = [f"{chance.choice(WORDS)}_{at} = {chance.randrange(1000)} * {chance.randrange(100)}" for at in range(6)]
    verdict = chance.choices(["ok", "failed", "timed_out"], [8, 1, 1])[0]
    return CallRecord(
        name,
        "code_interpreter",
        json.dumps({"code": "\n".join([*lines, 'print("total", total)'])}),
        "ok",
        f"total {chance.randrange(10**6)}\n" if verdict == "ok" else "Traceback: NameError: total",
        metrics={"verdict": verdict, "exit_code": 0, "queue_seconds": chance.random(), "run_seconds": chance.random()},
        seconds=chance.expovariate(1.0),
        attempts=1,
    )


def trajectory_of(number: int, last: bool) -> Trajectory:
    chance = random.Random(number)
    question = sentence(chance, 60)
    messages = [Message("system", "You solve word problems. " + sentence(chance, 40)), Message("user", question)]
    output = ""
    turns: list[Turn] = []
    ids: list[int] = []
    mask: list[int] = []
    for at in range(count := chance.randint(2, 3)):
        said = sentence(chance, 40) + (f" {LAST}" if last else "")
        calls = () if at == count - 1 else (call_of(chance, f"call_{at}_0"),)
        asked = "".join(f"\n<tool_call>\n{call.arguments}\n</tool_call>" for call in calls)
        answers = "".join(f"<|im_start|>tool\n{call.response}<|im_end|>\n" for call in calls)
        start, sampled, put = len(ids), chance.randint(45, 70), 12 * len(calls)
        ids += chance.choices(range(150_000), k=sampled + put)
        mask += [1] * sampled + [0] * put
        timings = {"started": at * 2.0, "generating": chance.expovariate(0.5), "tool_calling": chance.random()}
        turns.append(Turn(Sampled(start, start + sampled, said + asked, "stop", 1, ("7",), start), calls, timings))
        messages.append(Message("assistant", said, tool_calls=tuple(map(as_asked, calls))))
        messages += [Message("tool", call.response, tool_call_id=call.id, name=call.name) for call in calls]
        output += f"{said}{asked}<|im_end|>\n{answers}<|im_start|>assistant\n"
    prompt = "".join(f"<|im_start|>{message.role}\n{message.content}<|im_end|>\n" for message in messages[:2])
    return Trajectory(
        request_id=f"{chance.getrandbits(96):024x}",
        batch_data_id=f"gsm8k-{number // 8}",
        rollout_offset=number % 8,
        state="COMPLETED",
        finish_reason=chance.choices(["stop", "length", "max_assistant_turns"], [8, 1, 1])[0],
        input=prompt,
        output=output,
        ground_truth=str(chance.randrange(1000)),
        score=chance.choice([0.0, 1.0, chance.random()]),
        step=number // PER_FILE,
        messages=tuple(messages),
        tokens=Tokens(
            chance.choices(range(150_000), k=110), ids, mask, [-chance.expovariate(2.0) if one else 0.0 for one in mask]
        ),
        turns=tuple(turns),
        rewards={"final": 1.0, "tool/code_interpreter": 0.0},
        metrics={"seconds": {"generating": chance.expovariate(0.2), "tool_calling": chance.random()}, "seed": number},
        data_source="openai/gsm8k",
    )


def as_asked(call: CallRecord) -> ToolCall:
    return ToolCall(call.id, call.name, call.arguments)


def generate(folder: Path, count: int) -> int:
    """Write the dump. Returns its size in bytes."""
    size = 0
    for step in range(0, count, PER_FILE):
        with (folder / f"{step // PER_FILE}.jsonl").open("wb") as file:
            for number in range(step, min(step + PER_FILE, count)):
                size += file.write(to_line(trajectory_of(number, number == count - 1)))
    return size


# Measurements, each in its own process --------------------------------------------------------------------------------


def best(work: Callable[[], Any], times: int = 3) -> float:
    took: list[float] = []
    for _ in range(times):
        started = clock()
        work()
        took.append(clock() - started)
        if took[-1] > 3.0:
            break
    return min(took)


def measure_index(folder: Path) -> dict[str, float]:
    started = clock()
    Library.open(folder).close()
    seconds = clock() - started
    size = sum(path.stat().st_size for path in (folder / ".toolyard-index").rglob("*") if path.is_file())
    return {"build": seconds, "index_bytes": size}


def measure_library(folder: Path) -> dict[str, float]:
    def opened(work: Callable[[Library], Any]) -> float:
        """Reopen the library, so that nothing is cached; only `work` is timed."""
        took: list[float] = []
        for _ in range(3):
            with Library.open(folder) as library:
                took.append(best(lambda: work(library), 1))
        return min(took)

    def first_screen() -> None:
        with Library.open(folder) as library:
            assert library.rows(limit=50)
            assert library.steps()

    def answered(answer: Callable[[Answers], Any]) -> float:
        return opened(lambda library: encode(answer(Answers(library, title=""))))

    def next_page() -> float:
        with Library.open(folder) as library:
            answers = Answers(library, title="")
            answers.groups(parse_query(""))
            return best(lambda: encode(answers.groups(parse_query(""), kind="mixed", sort="-std", offset=100)))

    with Library.open(folder) as library:
        half = library.steps()[-1].step // 2
        some = [row.number for row in library.rows(offset=library.count() // 2, limit=20)]
    return {
        "first": best(first_screen),
        "filter": opened(lambda library: library.rows(parse_query(FILTER), limit=50)),
        "sort": opened(lambda library: library.rows(parse_query(SORT), limit=50)),
        "hit": opened(lambda library: library.next_match(LAST, None, None).number),
        "miss": opened(lambda library: library.next_match(NOWHERE, None, None)),
        "open": opened(lambda library: [library.trajectory(number).score for number in some]) / len(some),
        "nothing new": opened(lambda library: library.refresh()),
        "groups": answered(lambda answers: answers.groups(parse_query(""))),
        "groups again": next_page(),
        "calls": answered(lambda answers: answers.calls(parse_query(""))),
        "calls of a filter": answered(lambda answers: answers.calls(parse_query("score<0.5 verdict:failed"))),
        "changes": answered(
            lambda answers: answers.changes(parse_query(f"step:..{half}"), parse_query(f"step:{half + 1}.."))
        ),
        "suggestions": answered(lambda answers: answers.suggestions("task", "gsm")),
    }


def measure_list(folder: Path) -> dict[str, float]:
    started = clock()
    lines: list[dict[str, Any]] = []
    for path in sorted(folder.glob("*.jsonl"), key=lambda path: int(path.stem)):
        with path.open() as file:
            lines += map(json.loads, file)
    loaded = clock() - started

    def calls(line: dict[str, Any]) -> int:
        return sum(len(turn["tool_calls"]) for turn in line["turns"])

    def search(needle: str) -> dict[str, Any] | None:
        return next((line for line in lines if any(needle in text.casefold() for text in texts(line))), None)

    def texts(line: dict[str, Any]) -> list[str]:
        return [line["input"], line["output"], *(message["content"] for message in line["messages"])]

    return {
        "first": loaded,
        "filter": best(
            lambda: [
                line
                for line in lines
                if line["score"] < 0.5 and calls(line) > 1 and "length" in line["finish_reason"].casefold()
            ][:50]
        ),
        "sort": best(lambda: sorted(lines, key=lambda line: -sum(line["metrics"]["seconds"].values()))[:50]),
        "hit": best(lambda: search(LAST)),
        "miss": best(lambda: search(NOWHERE)),
        "open": 0.0,
    }


MEASURES = {"index": measure_index, "library": measure_library, "json.loads": measure_list}


def in_child(what: str, folder: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--measure", what, str(folder)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=3600).stdout)


# The table ------------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="numbers of trajectories")
    parser.add_argument("--measure", nargs=2, metavar=("WHAT", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        what, folder = args.measure
        found = MEASURES[what](Path(folder))
        print(json.dumps({**found, "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))
        return
    console = Console()
    grid = Table(title="the viewer's library (l) and json.loads into a list (j)")
    grid.add_column("")
    columns: list[list[str]] = []
    firsts: dict[int, float] = {}
    for count in map(int, args.sizes.split(",")):
        grid.add_column(f"{count:,}", justify="right")
        with tempfile.TemporaryDirectory(prefix="toolyard-viewer-") as folder, console.status("") as status:
            status.update(f"{count:,} trajectories: writing")
            size = generate(Path(folder), count)
            measured: dict[str, dict[str, float]] = {}
            for what in MEASURES:
                status.update(f"{count:,} trajectories: {what}")
                measured[what] = in_child(what, Path(folder))
        columns.append(column(size, **{name.replace(".", "_"): found for name, found in measured.items()}))
        firsts[count] = measured["library"]["first"]
    for cells in zip(NAMES, *columns, strict=True):
        grid.add_row(*cells)
    console.print(grid)
    for count, seconds in firsts.items():
        met = "[green]met [/]" if seconds <= FIRST_SCREEN_GOAL else "[red]MISS[/]"
        console.print(f"{met} first screen of {count:,}: {seconds:.3f} s (goal <= {FIRST_SCREEN_GOAL:g})")


NAMES = (
    "size of the dump",
    "index: build, once",
    "index: size",
    "index: memory",
    "first screen (l)",
    "first screen (j)",
    "filter (l)",
    "filter (j)",
    "sort (l)",
    "sort (j)",
    "search: match in the last line (l)",
    "search: match in the last line (j)",
    "search: no match (l)",
    "search: no match (j)",
    "open a trajectory (l)",
    "nothing new (l)",
    "page of groups",
    "page of groups, again",
    "page of calls",
    "page of calls, filtered",
    "page of changes",
    "suggestions",
    "memory (l)",
    "memory (j)",
)


PAGES = ("nothing new", "groups", "groups again", "calls", "calls of a filter", "changes", "suggestions")


def column(
    size: int, index: dict[str, float], library: dict[str, float], json_loads: dict[str, float]
) -> tuple[str, ...]:
    pairs = [
        value for name in ("first", "filter", "sort", "hit", "miss") for value in (library[name], json_loads[name])
    ]
    return (
        megabytes(size),
        f"{duration(index['build'])}, {size / index['build'] / 1e6:.0f} MB/s",
        megabytes(index["index_bytes"]),
        megabytes(index["memory"]),
        *map(duration, pairs),
        duration(library["open"]),
        *(duration(library[name]) for name in PAGES),
        megabytes(library["memory"]),
        megabytes(json_loads["memory"]),
    )


def megabytes(size: float) -> str:
    return f"{size / 1e6:,.0f} MB" if size >= 1e7 else f"{size / 1e6:.1f} MB"


def duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 10 else f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


if __name__ == "__main__":
    main()
