"""What `toolyard rollout` shows: at two sizes of a terminal, and in a pipe."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from playing import END, TOKENIZER, Echo, request_for, said, scripted, setting, task
from toolyard.cli.rollout.progress import ProgressDisplay, Rate
from toolyard.cli.rollout.report import next_commands, print_result
from toolyard.durations import duration, elapsed
from toolyard.engines.scripted import ScriptedEngine
from toolyard.rollout.config import RewardConfig, RolloutConfig
from toolyard.rollout.finish import FinishReason
from toolyard.rollout.run import RolloutResult
from toolyard.rollout.run_many import RolloutRun
from toolyard.rollout.summary import Accounting, Summary
from toolyard.supervision import Stall

SIZES = [(80, 24), (140, 45)]


class TellingEngine(ScriptedEngine):
    """Never ends a turn, and says how far it is."""

    tokens = 0

    def __init__(self) -> None:
        super().__init__(["#### 42"], encode=lambda text: TOKENIZER.encode(text + END), seconds=3600)

    def sampled_tokens(self, request_id: str) -> int:
        return self.tokens

    def steps(self) -> int:
        return self.tokens


def terminal(size: tuple[int, int]) -> Console:
    width, height = size
    return Console(file=io.StringIO(), force_terminal=True, color_system=None, width=width, height=height)


def drawn(display: ProgressDisplay, size: tuple[int, int]) -> list[str]:
    """The lines of the screen, which fit the terminal."""
    console = terminal(size)
    console.print(display.screen())
    lines = console.file.getvalue().rstrip("\n").split("\n")
    assert max(map(len, lines)) <= size[0]
    assert len(lines) <= 4
    return [line.rstrip() for line in lines]


def requests_for(place, count):
    return [request_for(place, task(id=f"task-{number}")) for number in range(count)]


async def until(condition) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("size", SIZES)
async def test_before_the_first_request_it_says_what_it_does_and_for_how_long(size):
    display = ProgressDisplay(terminal(size))
    display.stage("importing torch and transformers")
    assert drawn(display, size) == ["importing torch and transformers  0 s"]
    display.stage("loading " + "x" * 300)
    (line,) = drawn(display, size)
    assert line.startswith("loading xxx")


@pytest.mark.parametrize("size", SIZES)
async def test_tokens_are_counted_before_the_first_turn_ends(size):
    display = ProgressDisplay(terminal(size))
    async with TellingEngine() as engine:
        place = setting(engine)
        async with RolloutRun(place, requests_for(place, 4), concurrency=3) as run:
            display.opened(1004, 1000)
            display.grouped(251, 250)
            display.began(run)
            await until(lambda: run.states.total() == 3)
            display.update()
            bar, ended, running, rates = drawn(display, size)
            assert bar.startswith("rollouts ━━━")
            assert bar.endswith("1000/1004 done 0 s")
            assert ended == "250/251 groups · 0 failed · reward –"
            assert running == "generating 3 · not started 1"
            assert rates == "– tokens/s · 0.0 tool calls/s · 0 turns", "none sampled: not 0 tokens/s"
            engine.tokens = 2000
            await asyncio.sleep(0.001)
            display.update()
            rate, _, _ = drawn(display, size)[3].partition(" tokens/s")
            assert float(rate.replace(",", "")) > 1000


@pytest.mark.parametrize("size", SIZES)
async def test_what_has_ended_has_a_mean_a_spread_and_failures(size):
    display, summary = ProgressDisplay(terminal(size)), Summary()
    lines = {"task-0": ["#### 42"], "task-1": ["#### 41"], "task-2": [said("our failure")], "task-3": [said("sleep")]}
    async with scripted(lambda request_id, turn, _: names[request_id][turn]) as engine:
        place = setting(engine, [Echo()])
        requests = requests_for(place, 4)
        names = {request.request_id: lines[request.batch_data_id] for request in requests}
        async with RolloutRun(place, requests, concurrency=4) as run:
            display.opened(4, 0)
            display.grouped(4, 0)
            display.began(run)
            ended = aiter(run)
            for _ in range(3):
                trajectory = await anext(ended)
                summary.add(trajectory)
                display.ended(trajectory, summary)
            display.update()
            bar, told, running, rates = drawn(display, size)
    assert "3/4 done" in bar
    assert told == "1 failed · reward 0.500 (std 0.500)", "with one sample per task, groups say nothing"
    assert running == "tool calling 1"
    assert rates.endswith("3 turns")


async def test_in_a_pipe_there_are_plain_lines_and_hundreds_of_slow_requests_are_a_few():
    console = Console(file=io.StringIO(), width=120, soft_wrap=True)
    async with TellingEngine() as engine:
        place = setting(engine)
        display = ProgressDisplay(console)
        async with RolloutRun(place, requests_for(place, 2), concurrency=2) as run:
            display.opened(2, 0)
            display.grouped(1, 0)
            display.began(run)
            await until(lambda: run.states.total() == 2)
            for number in range(300):
                display.told("stuck", f"request {number} has been in GENERATING for 1 min [red]")
            display.update()
            display._next_line = 0
            display.update()
    text = console.file.getvalue()
    assert not [char for char in text if not char.isprintable() and char != "\n"]
    lines = text.splitlines()
    assert lines[0] == "slow: request 0 has been in GENERATING for 1 min [red]"
    assert lines[3:] == [
        "slow: 297 more requests",
        "0/2 done · 0/1 groups · 0 failed · reward – · generating 2 · – tokens/s · 0.0 tool calls/s · 0 turns · 0 s",
    ]


def test_a_rate_goes_back_to_the_change_before_its_window():
    """A server answers when a turn has ended: 600 tokens after a minute are 10 per second, not 60."""
    rate = Rate(0)
    assert rate.after(0, 0) is None
    assert rate.after(30, 0) == 0
    assert rate.after(60, 600) == 10
    assert rate.after(61, 610) == 10
    assert rate.after(65, 1110) == pytest.approx(1110 / 65)
    assert rate.after(72, 1110) == pytest.approx(500 / 11), "since 61 s"
    assert rate.after(100, 1110) == 0
    assert rate.after(101, 900) == 0, "a worker died with its tokens"


def test_the_next_commands_can_be_pasted():
    folder, gsm8k = Path("runs/my run"), RewardConfig(final="gsm8k")
    view, audit, score = next_commands(folder, gsm8k, Summary())
    assert view == "toolyard view 'runs/my run'"
    assert audit == "toolyard audit 'runs/my run'"
    assert score == "toolyard score 'runs/my run' --reward gsm8k:strict"
    own = RewardConfig(final="mine:score", options={"penalty": 0.1, "words": ["a b"]})
    assert len(next_commands(folder, own, Summary())) == 2, "what else it could be scored with is unknown"
    failed = Summary()
    failed.finish_reasons[FinishReason.REWARD_FAILURE] += 1
    assert next_commands(Path("a"), own, failed)[2] == (
        "toolyard score a --reward mine:score --reward-option=penalty=0.1 "
        """'--reward-option=words=["a b"]' --out a-rescored"""
    )


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0 s"), (99.9, "99 s"), (100, "1 min 40 s"), (1085.9, "18 min 5 s")]
)
def test_a_running_clock_has_whole_seconds(seconds, text):
    assert elapsed(seconds) == text


def test_times_are_for_people():
    assert duration(1085) == "18 min 5 s"


@pytest.mark.parametrize(
    ("is_new", "told"),
    [(False, "run the same command to continue."), (True, "run the same command with --out 'my runs/1' to continue.")],
)
def test_a_run_that_was_stopped_says_how_it_goes_on(is_new, told):
    result = RolloutResult(dump=Path("my runs/1/0.jsonl"))
    result.accounting = Accounting(planned=13, before=1, missing={str(at): "stopped while it ran" for at in range(12)})
    config = RolloutConfig(rollout_data_dir="my runs/1")
    console = Console(file=io.StringIO(), width=200)
    print_result(result, config, 65.0, console, is_new_folder=is_new)
    said = console.file.getvalue()
    assert f"1 were already in the dump; 12 remaining; {told}\n" in said
    assert "  toolyard view 'my runs/1'\n" in said


@pytest.mark.parametrize("name", ["\ud800x", "x\x1b]0;mine\x07\x1b[2J", "[red]x[/]"])
def test_what_a_model_calls_a_tool_is_never_obeyed_by_the_terminal(name, capsysbinary):
    result = RolloutResult(dump=None)
    result.summary.trajectories = 1
    result.summary.outcomes[name, "unknown_tool"] += 1
    result.summary.failures["tool_failure"] = f"r1: {name}"
    console = Console(file=io.StringIO(), width=200, force_terminal=True, color_system=None)
    print_result(result, RolloutConfig(), 1.0, console)
    said = console.file.getvalue()
    assert "\x1b" not in said
    assert said.encode().count(name.encode("unicode_escape")) == 2
    print_result(result, RolloutConfig(), 1.0, None)
    assert json.loads(capsysbinary.readouterr().out)["failures"] == {"tool_failure": f"r1: {name}"}


def test_a_machine_that_is_merely_busy_is_no_alarm():
    console = Console(file=io.StringIO(), width=200)
    display = ProgressDisplay(console)
    waiting = """  File "/usr/lib/python3.11/asyncio/base_events.py", line 1884, in _run_once
    event_list = self._selector.select(timeout)
  File "/usr/lib/python3.11/selectors.py", line 468, in select
    fd_event_list = self._selector.poll(timeout, max_ev)
"""
    display.stalled(Stall(3.0, "", "console.py:50 in complete: asyncio.run()", waiting))
    assert console.file.getvalue() == "the machine is busy: the event loop got no CPU time for 3 s\n"
    display.stalled(Stall(3.0, "tool 'x'", "tool.py:3 in execute: time.sleep(9)", "a stack"))
    assert "blocked: tool 'x' has blocked the event loop for 3 s" in console.file.getvalue()
