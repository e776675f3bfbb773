"""GRPO with Toolyard's rollouts: where the time of a step goes, the same step with TRL's own `tools=` loop, and
synchronous and asynchronous training.

    python benchmarks/train.py                     all parts, on the CPU: 20 minutes on two busy cores
    python benchmarks/train.py --part shares       the embedded model, word problems, code in the embedded sandbox
    python benchmarks/train.py --part beside       the two loops side by side
    python benchmarks/train.py --part beside --model smollm2-135m --prompts 2 --steps 1
    python benchmarks/train.py --part async        synchronous and asynchronous steps, with tools that wait
    python benchmarks/train.py --part async --device cuda --prompts 32 --group 8
    python benchmarks/train.py --quick

Side by side, both loops have the same model, prompts, seeds, sampling and update, and the same samples: before
measuring, the model memorizes a few conversations (two calls, one after the other, then the answer), and it always
takes the most likely token (`top_k` 1). The benchmark checks that every prompt, sampled and masked token is the same
in both. All rewards are equal, so an update takes its normal time but changes nothing. The model is a small one with
random weights unless you name another: only the time matters. The loops take turns, so that the load of the machine
affects both; compare the ratios, not the numbers.

What differs: TRL samples with `transformers.generate`, which recomputes the whole conversation for each turn, and
awaits the calls of one sample before those of the next, even if the tool is asynchronous, as here. Toolyard samples
with the embedded engine, and runs calls while other requests are sampled.

Synchronous and asynchronous steps are measured with the same memorized model, on all steps of a run without the opening
of the engine: the first step of an asynchronous run plays ahead, and the last one only trains. The benchmark checks
that both trained on the same samples, and that no token was older than allowed.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import gc
import itertools
import logging
import statistics
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import toolyard.engines.transformers.openmp  # noqa: F401 - before torch, for both loops: waiting threads do not spin
from memorized import CALLS, RESPONSE, TAIL_SECONDS, TAIL_SHARE, Setup, Workspace, distance_in, prepare
from toolyard.engines.models import DEFAULT_MODEL, resolve_model
from toolyard.records.trajectory import Trajectory
from toolyard.train.config import EMBEDDED as EMBEDDED_TRAINING
from toolyard.train.config import AsynchronousConfig, load_train_config
from toolyard.train.trl.rollout import StepObserver, StepReport, ToolyardRollout
from toolyard.train.trl.stream import StreamSettings

CONSOLE = Console()
DELAYS = (0.0, 0.05, 0.2)


# The trainer ----------------------------------------------------------------------------------------------------------


@dataclass
class Times:
    """Seconds of each step."""

    steps: list[float] = field(default_factory=list)
    rollouts: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)


def trainer(model: Any, times: Times, *, kind: Any = None, **given: Any) -> Any:
    """A GRPOTrainer that measures its own times, and keeps its last samples in `sampled`.

    `kind`: its class, if it is not TRL's."""
    import trl
    from transformers import PrinterCallback, TrainerCallback

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.steps.append(time.perf_counter() - self.began)

    class Timed(kind or trl.GRPOTrainer):
        sampled: Any = None

        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            made = super()._generate(*args, **kwargs)
            times.rollouts.append(time.perf_counter() - began)
            self.sampled = [list(map(list, rows)) for rows in made[:3]]  # prompts, completions, mask
            return made

        def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            made = super()._calculate_rewards(*args, **kwargs)
            times.rewards.append(time.perf_counter() - began)
            return made

    made = Timed(model, callbacks=[Clock()], **given)
    made.remove_callback(PrinterCallback)
    return made


def grpo_config(folder: Path, samples: int, group: int, steps: int, *, temperature: float = 1.0, **given: Any) -> Any:
    import trl

    return trl.GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=samples,
        num_generations=group,
        max_steps=steps,
        learning_rate=1e-6,
        temperature=temperature,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        seed=0,
        bf16=False,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        **given,
    )


# Where the time of a step goes ----------------------------------------------------------------------------------------

Interval = tuple[float, float]


class Watch(StepObserver):
    def __init__(self) -> None:
        self.trajectories: list[list[Trajectory]] = []
        self.reports: list[StepReport] = []

    def begins(self, step: int, requests: int, evaluation: bool) -> None:
        self.trajectories.append([])

    def ended(self, trajectory: Trajectory) -> None:
        self.trajectories[-1].append(trajectory)

    def stepped(self, report: StepReport) -> None:
        self.reports.append(report)


def stages(trajectories: Iterable[Trajectory]) -> dict[str, list[Interval]]:
    """When requests were sampled, waited for tools, and were scored, in seconds from the start of the rollout.
    All requests start together."""
    found: dict[str, list[Interval]] = {"sampling": [], "tools": [], "rewards": []}
    for trajectory in trajectories:
        end = 0.0
        for turn in trajectory.turns:
            spoken = turn.timings["started"] + turn.timings["generating"]
            end = spoken + turn.timings.get("tool_calling", 0.0)
            found["sampling"].append((turn.timings["started"], spoken))
            found["tools"].append((spoken, end))
        found["rewards"].append((end, end + trajectory.metrics["seconds"].get("reward", 0.0)))
    return found


def covered(intervals: Iterable[Interval]) -> float:
    """Seconds covered by at least one interval."""
    total, until = 0.0, 0.0
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def measure_shares(model: str, steps: int) -> None:
    import peft
    from transformers import AutoTokenizer

    settings = load_train_config(EMBEDDED_TRAINING)
    rollout_settings = settings.rollout.model_copy(
        update={"engine": settings.rollout.engine.model_copy(update={"model": model, "device": "cpu"})}
    )
    folder, samples = resolve_model(model, progress=CONSOLE.print), 2 * settings.rollout.n
    watch, times = Watch(), Times()
    with tempfile.TemporaryDirectory() as scratch, ToolyardRollout(rollout_settings, observer=watch) as rollout:
        args = grpo_config(
            Path(scratch),
            samples,
            settings.rollout.n,
            steps + 1,
            temperature=settings.rollout.sampling.temperature,
            use_cpu=True,
            model_init_kwargs={"dtype": "float32"},
        )
        trainer(
            str(folder),
            times,
            args=args,
            train_dataset=rollout.dataset(),
            processing_class=AutoTokenizer.from_pretrained(folder),
            reward_funcs=[rollout.reward],
            rollout_func=rollout,
            peft_config=peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
        ).train()
    show_shares(model, samples, times, watch)


def show_shares(model: str, samples: int, times: Times, watch: Watch) -> None:
    """The means of all steps except the first, in which everything is opened."""
    played = [stages(trajectories) for trajectories in watch.trajectories[1:]]
    mean = statistics.fmean
    step = mean(times.steps[1:])
    wall = {name: mean(report.seconds[name] for report in watch.reports[1:]) for name in ("sync", "rollout")}
    sampling = mean(covered(one["sampling"]) for one in played)
    tools = mean(covered(one["sampling"] + one["tools"]) for one in played) - sampling
    everything = mean(covered(one["sampling"] + one["tools"] + one["rewards"]) for one in played)
    summed = {
        name: mean(sum(end - start for start, end in one[name]) for one in played)
        for name in ("sampling", "tools", "rewards")
    }
    scoring = mean(times.rewards[1:])
    rows = [
        ("weights to the engine", wall["sync"], None),
        ("rollout", wall["rollout"], None),
        ("  somebody is sampled", sampling, summed["sampling"]),
        ("  all others wait for tools", tools, summed["tools"]),
        ("  all others are scored", everything - sampling - tools, summed["rewards"]),
        ("  the rest: texts, audit", wall["rollout"] - everything, None),
        ("reward function in TRL", scoring, None),
        ("update", step - mean(times.rollouts[1:]) - scoring, None),
        ("the whole step", step, None),
    ]
    calls = mean(sum(len(turn.tool_calls) for it in some for turn in it.turns) for some in watch.trajectories[1:])
    tokens = mean(sum(sum(it.tokens.response_mask) for it in some) for some in watch.trajectories[1:])
    title = (
        f"{model}, {samples} samples per step, {calls:.0f} calls, {tokens:.0f} sampled tokens, mean of {len(played)}"
    )
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left")
    table.add_column("")
    for name in ("seconds", "share", "summed over requests"):
        table.add_column(name, justify="right")
    for name, seconds, together in rows:
        share = f"{seconds / step:.1%}"
        table.add_row(name, f"{seconds:.2f}", share, "" if together is None else f"{together:.2f}")
    CONSOLE.print(table)


# Beside TRL's own loop ------------------------------------------------------------------------------------------------


@dataclass
class Run:
    times: Times
    sampled: Any


def by_trl(place: Workspace, model: Any, seconds: float, steps: int) -> Run:
    import datasets
    from transformers import AutoTokenizer
    from trl.chat_template_utils import qwen2_5_chat_template

    tokenizer = AutoTokenizer.from_pretrained(place.model)
    tokenizer.chat_template = qwen2_5_chat_template
    times = Times()
    with tempfile.TemporaryDirectory() as scratch:
        made = trainer(
            model,
            times,
            args=sampling_the_same(place, scratch, steps),
            train_dataset=datasets.Dataset.from_list([{"prompt": prompt} for prompt in place.prompts]),
            processing_class=tokenizer,
            reward_funcs=[right],
            tools=[distance_in(seconds)],
        )
        made.train()
    return Run(times, made.sampled)


def sampling_the_same(place: Workspace, scratch: str, steps: int) -> Any:
    return grpo_config(
        Path(scratch),
        place.samples,
        place.setup.group,
        steps,
        use_cpu=place.setup.device == "cpu",
        top_k=1,
        max_completion_length=RESPONSE,
    )


def right(completions: list[Any], **_: Any) -> list[float]:
    return [float(completion[-1]["content"].endswith("#### 80")) for completion in completions]


def by_us(place: Workspace, model: Any, seconds: float, steps: int) -> Run:
    from transformers import AutoTokenizer

    times = Times()
    with tempfile.TemporaryDirectory() as scratch, ToolyardRollout(place.settings(seconds)) as rollout:
        made = trainer(
            model,
            times,
            args=sampling_the_same(place, scratch, steps),
            train_dataset=rollout.dataset(),
            processing_class=AutoTokenizer.from_pretrained(place.model),
            reward_funcs=[rollout.reward],
            rollout_func=rollout,
        )
        made.train()
    return Run(times, made.sampled)


def measure_beside(setup: Setup, steps: int, rounds: int) -> None:
    """Each round measures all delays and both loops; the first step of each is not counted."""
    import torch
    from transformers import AutoModelForCausalLM

    found: dict[tuple[float, str], Times] = {}
    with tempfile.TemporaryDirectory() as scratch:
        place = prepare(Path(scratch), setup)
        plain = AutoModelForCausalLM.from_pretrained(place.model, dtype=torch.float32)
        for turn in range(rounds):
            for seconds in DELAYS:
                ways = [("TRL", by_trl), ("ours", by_us)]
                sampled: dict[str, Any] = {}
                for name, way in ways if turn % 2 == 0 else reversed(ways):
                    run = way(place, copy.deepcopy(plain), seconds, steps + 1)
                    told = ", ".join(f"{one:.2f}" for one in run.times.steps[1:])
                    CONSOLE.print(f"[dim]{name}, {seconds * 1000:.0f} ms: {told} s")
                    kept = found.setdefault((seconds, name), Times())
                    kept.steps += run.times.steps[1:]
                    kept.rollouts += run.times.rollouts[1:]
                    sampled[name] = run.sampled
                if sampled["TRL"] != sampled["ours"]:
                    raise SystemExit(f"the two loops differ in what they sampled: {difference(sampled)}")
    show_beside(place, sampled["ours"], found)


def difference(sampled: dict[str, Any]) -> str:
    for field_name, theirs, ours in zip(("prompt", "completion", "mask"), sampled["TRL"], sampled["ours"], strict=True):
        for row, (one, other) in enumerate(zip(theirs, ours, strict=True)):
            if one != other:
                at = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), "the end")
                return f"{field_name} {row} at {at}, with {len(one)} and {len(other)} tokens"
    return "nothing"


def show_beside(place: Workspace, sampled: Any, found: dict[tuple[float, str], Times]) -> None:
    tokens, steps = sum(map(sum, sampled[2])), len(found[DELAYS[0], "ours"].steps)
    title = (
        f"{place.setup.name}: {place.samples} samples per step, the same {tokens} sampled tokens and "
        f"{CALLS * place.samples} calls with both loops; seconds, of {steps} steps"
    )
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left")
    for name in ("a call takes", "", "median: TRL", "ours", "ratio", "best: TRL", "ours", "ratio", "goal"):
        table.add_column(name, justify="right")
    for seconds in DELAYS:
        theirs, ours = found[seconds, "TRL"], found[seconds, "ours"]
        met = statistics.median(ours.steps) < statistics.median(theirs.steps)
        goal = "" if seconds < 0.05 else "met" if met else "missed"
        table.add_row(f"{seconds * 1000:.0f} ms", "step", *compared(theirs.steps, ours.steps), goal)
        table.add_row("", "rollout", *compared(theirs.rollouts, ours.rollouts))
    CONSOLE.print(table)


def compared(theirs: list[float], ours: list[float]) -> list[str]:
    """Theirs, ours, and the ratio; by median and by best."""
    cells: list[str] = []
    for of in (statistics.median, min):
        cells += [f"{of(theirs):.2f}", f"{of(ours):.2f}", f"{of(theirs) / of(ours):.1f}"]
    return cells


# Synchronous and asynchronous -----------------------------------------------------------------------------------------

WAITS = ((0.0, False), (0.05, False), (0.2, False), (1.0, False), (0.05, True))
"""How long a call takes, and whether some take much longer."""
WAYS: dict[str, AsynchronousConfig | None] = {
    "synchronous": None,
    "asynchronous": AsynchronousConfig(max_staleness=1),
    "finishing": AsynchronousConfig(max_staleness=1, on_update="finish"),
}


@dataclass
class Ahead:
    """A run: the seconds of a step, what was trained on, and how old its tokens were."""

    seconds: float
    processor: float
    """Of all threads, per step, with the opening of the engine."""
    samples: list[tuple[str, tuple[int, ...]]]
    staleness: Counter[int]


def play_ahead(
    place: Workspace, model: Any, wait: tuple[float, bool], way: AsynchronousConfig | None, steps: int
) -> Ahead:
    from transformers import AutoTokenizer

    from toolyard.train.trl.off_policy import OffPolicyGRPOTrainer

    stream = StreamSettings(asynchronous=way, shuffle=False) if way else None
    watch, times, settings = Handed(), Times(), place.settings(wait[0], tail=wait[1])
    with tempfile.TemporaryDirectory() as scratch, ToolyardRollout(settings, observer=watch, stream=stream) as rollout:
        began = time.process_time()
        watch.reward = rollout.reward
        rollout.reward = watch
        trainer(
            model,
            times,
            kind=OffPolicyGRPOTrainer if way else None,
            args=sampling_the_same(place, scratch, steps),
            train_dataset=rollout.dataset(),
            processing_class=AutoTokenizer.from_pretrained(place.model),
            reward_funcs=[rollout.reward],
            rollout_func=rollout,
        ).train()
    processor = (time.process_time() - began) / steps
    opening = watch.reports[0].seconds["sync"]
    ages = sum((Counter(report.staleness) for report in watch.reports), Counter[int]())
    return Ahead((sum(times.steps) - opening) / steps, processor, sorted(watch.samples), ages)


class Handed(StepObserver):
    """Keeps the reports and what is trained on. It is the reward function, too: TRL shows it the trajectories."""

    __name__ = "score"

    def __init__(self) -> None:
        self.reports: list[StepReport] = []
        self.samples: list[tuple[str, tuple[int, ...]]] = []
        self.reward: Any = None

    def stepped(self, report: StepReport) -> None:
        self.reports.append(report)

    def __call__(self, *, trajectory: list[Trajectory], **columns: Any) -> Any:
        self.samples += [(one.batch_data_id, tuple(one.tokens.response_ids)) for one in trajectory]
        return self.reward(**columns)


def measure_ahead(setup: Setup, steps: int, rounds: int) -> None:
    """The ways take turns, so that the load of the machine affects all of them; of each, the best round counts."""
    import torch
    from transformers import AutoModelForCausalLM

    found: dict[tuple[tuple[float, bool], str], Ahead] = {}
    with tempfile.TemporaryDirectory() as scratch:
        place = prepare(Path(scratch), setup)
        plain = AutoModelForCausalLM.from_pretrained(place.model, dtype=torch.float32)
        for wait, (name, way) in itertools.product(WAITS, [*WAYS.items()] * rounds):
            run = play_ahead(place, copy.deepcopy(plain), wait, way, steps)
            gc.collect()
            CONSOLE.print(f"[dim]{name}, {waiting(wait)}: {run.seconds:.2f} s per step, {run.processor:.2f} s of CPU")
            found[wait, name] = min(run, found.get((wait, name), run), key=lambda one: one.seconds)
            if run.samples != found[wait, "synchronous"].samples:
                raise SystemExit(f"{name}: not the same samples as in synchronous training")
            if way is not None and max(run.staleness) > way.max_staleness:
                raise SystemExit(f"{name}: a token was {max(run.staleness)} updates old")
    show_ahead(place, steps, found)


def show_ahead(place: Workspace, steps: int, found: dict[tuple[tuple[float, bool], str], Ahead]) -> None:
    title = (
        f"{place.setup.name}: {steps} steps of {place.samples} samples with {CALLS} calls each, the same "
        "samples in all runs; seconds per step, how much faster than synchronous, mean staleness of tokens"
    )
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left")
    table.add_column("a call takes")
    for name in WAYS:
        table.add_column(name, justify="right")
    for wait in WAITS:
        base, cells = found[wait, "synchronous"].seconds, []
        for name in WAYS:
            run = found[wait, name]
            age = sum(age * count for age, count in run.staleness.items()) / max(1, run.staleness.total())
            more = f"  {base / run.seconds:.2f} x  {age:.1f}" if run.staleness else ""
            cells.append(f"{run.seconds:.2f}{more}")
        table.add_row(waiting(wait), *cells)
    CONSOLE.print(table)


def waiting(wait: tuple[float, bool]) -> str:
    tail = f", {TAIL_SHARE:.0%} of them {TAIL_SECONDS:g} s" if wait[1] else ""
    return f"{wait[0] * 1000:.0f} ms{tail}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("shares", "beside", "async", "all"), default="all")
    parser.add_argument("--model", help="default: shares: the embedded one; beside and async: random weights")
    parser.add_argument("--device", default="cpu", help="beside and async: where to sample and train, such as cuda")
    parser.add_argument("--prompts", type=int, default=4, help="beside: prompts per step; async: half as many")
    parser.add_argument("--group", type=int, default=4, help="beside and async: samples per prompt")
    parser.add_argument("--steps", type=int, default=3, help="steps to count in each round; async: one more")
    parser.add_argument("--rounds", type=int, default=2, help="beside and async: rounds")
    parser.add_argument("--quick", action="store_true", help="one step, one round")
    options = parser.parse_args()
    if options.quick:
        options.steps = options.rounds = 1
    quiet()
    setup = Setup(options.model, options.prompts, options.group, options.device)
    if options.part in ("shares", "all"):
        measure_shares(options.model or DEFAULT_MODEL, options.steps)
    if options.part in ("beside", "all"):
        measure_beside(setup, options.steps, options.rounds)
    if options.part in ("async", "all"):
        half = dataclasses.replace(setup, prompts=(setup.prompts + 1) // 2)
        measure_ahead(half, options.steps + 1, options.rounds)


def quiet() -> None:
    import transformers

    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("trl").setLevel(logging.ERROR)


if __name__ == "__main__":
    main()
