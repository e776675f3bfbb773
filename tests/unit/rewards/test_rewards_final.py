"""The final reward: ours by name, the user's by module or file; a failure is an error, never a number."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import threading
import time
from collections import OrderedDict
from decimal import Decimal
from fractions import Fraction
from types import MappingProxyType

import numpy as np
import pytest

from toolyard.errors import ConfigError, RewardError
from toolyard.rewards.registry import FinalScore, FunctionReward, GroundTruthError, load_reward

SECONDS = 20.0


async def score(reward, solution="#### 18", truth="18", extra=None, seconds=SECONDS) -> FinalScore:
    return await reward.score("source", solution, truth, extra or {}, deadline_seconds=seconds)


def returning(value) -> FunctionReward:
    return FunctionReward("mine", lambda data_source, solution_str, ground_truth, extra_info: value)


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module into the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)

    def write(code: str, name: str) -> str:
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(code))
        return name

    yield write
    for name in set(sys.modules) - before:
        if "reward_beside" in name:
            del sys.modules[name]


# By name --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "solution", "value"),
    [
        ("gsm8k", "#### 18", 1.0),
        ("gsm8k", "It is 18.0", 1.0),
        ("gsm8k", "#### 17", 0.0),
        ("gsm8k", "", 0.0),
        ("gsm8k:flexible", "It is 18.", 1.0),
        ("gsm8k:strict", "It is 18.", 0.0),
        ("gsm8k:strict", "#### 18", 1.0),
    ],
)
async def test_gsm8k_by_name(name, solution, value):
    found = await score(load_reward(name), solution)
    assert (found.value, found.extras) == (value, {})


def test_none_is_no_reward():
    assert load_reward("none") is None


@pytest.mark.parametrize("truth", [None, "Paris", {"a": 1}, [18], True, ""])
async def test_a_ground_truth_that_gsm8k_cannot_use_is_the_tasks_fault(truth):
    with pytest.raises(GroundTruthError, match="reward 'gsm8k': "):
        await score(load_reward("gsm8k"), truth=truth)
    assert issubclass(GroundTruthError, RewardError)
    assert issubclass(GroundTruthError, ConfigError)


@pytest.mark.parametrize("spec", ["gsm9k", "", "maths", "None", "gsm8k:strct", "code:frac", "math:sqrt", "none:x"])
def test_an_unknown_name_lists_the_known_ones(spec):
    with pytest.raises(ConfigError, match=rf"reward '{spec}': expected one of gsm8k, .*none, module:function"):
        load_reward(spec)


# By module or file ----------------------------------------------------------------------------------------------------

LENGTH = """
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        return len(solution_str) / 10
    class Judge:
        @staticmethod
        def judge(**kwargs):
            return 1
    number = 5
"""


async def test_a_function_of_a_module_in_the_current_folder(module):
    module(LENGTH, "reward_beside_1")
    assert (await score(load_reward("reward_beside_1:compute_score"), "12345")).value == 0.5
    assert (await score(load_reward("reward_beside_1:Judge.judge"))).value == 1.0


async def test_a_function_of_a_file_that_may_import_its_neighbours(module):
    module("WORTH = 0.25", "deep/reward_beside_neighbour")
    code = """
        from dataclasses import dataclass
        from reward_beside_neighbour import WORTH

        @dataclass
        class Judgement:
            worth: float

        async def compute_score(data_source, solution_str, ground_truth, extra_info):
            return Judgement(WORTH).worth
    """
    module(code, "deep/json")  # a name that must not become everybody's json
    reward = load_reward("deep/json.py:compute_score")
    assert (reward.name, (await score(reward)).value) == ("deep/json.py:compute_score", 0.25)
    assert sys.modules["json"].__file__.endswith("json/__init__.py")


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("reward_beside_nowhere:f", "no module named 'reward_beside_nowhere' on Python's path .*file.py:function"),
        ("reward_beside_2.inner:f", "no module named 'reward_beside_2.inner'"),
        ("reward_beside_2:f", "reward_beside_2 has no 'f'; functions in it: compute_score, Judge"),
        ("reward_beside_2:number", "number is a int and cannot be called"),
        ("reward_beside_2:", "expected module:function or"),
        (":f", "expected module:function or"),
        ("missing.py:f", "no such file: 'missing.py'"),
        ("reward_beside_3:f", "importing reward_beside_3 failed: ZeroDivisionError: division by zero"),
        ("reward_beside_3.py:f", "running .*reward_beside_3.py failed: ZeroDivisionError"),
        ("reward_beside_4:f", "importing reward_beside_4 failed: SyntaxError"),
        ("reward_beside_4.py:f", "reward_beside_4.py failed: SyntaxError"),
        ("reward_beside_5:f", "importing reward_beside_5 failed: No module named 'not_installed'"),
        ("reward_beside_6.py:f", "reward_beside_6.py failed: SystemExit: 3"),
        ("reward_beside_6:f", "importing reward_beside_6 failed: SystemExit: 3"),
        (
            "reward_beside_7:f",
            r"takes \(solution_str, ground_truth\), but would be called with the keywords data_source",
        ),
    ],
)
def test_what_is_wrong_with_a_module_is_told(module, spec, told):
    module(LENGTH, "reward_beside_2")
    module("1 / 0", "reward_beside_3")
    module("def f(:", "reward_beside_4")
    module("import not_installed", "reward_beside_5")
    module("raise SystemExit(3)", "reward_beside_6")
    module("def f(solution_str, ground_truth): return 1", "reward_beside_7")
    with pytest.raises(ConfigError, match=told) as caught:
        load_reward(spec)
    assert str(caught.value).startswith(f"reward {spec!r}: ")


async def test_options_of_a_function_are_its_keyword_arguments(module):
    code = """
        def compute_score(data_source, solution_str, ground_truth, extra_info, bonus=0.0, seen=()):
            seen.append(1)
            return {"score": bonus, "calls": len(seen)}
        def plain(data_source, solution_str, ground_truth, extra_info):
            return 0
    """
    module(code, "reward_beside_options")
    reward = load_reward("reward_beside_options:compute_score", {"bonus": 0.25, "seen": []})
    assert [await score(reward), await score(reward)] == [FinalScore(0.25, {"calls": 1})] * 2, "a copy for each"
    with pytest.raises(ConfigError, match=r"would be called with the keywords .*, penalty: .*'penalty'"):
        load_reward("reward_beside_options:plain", {"penalty": 1})
    with pytest.raises(ConfigError, match="option 'ground_truth': this argument comes from the task or the model"):
        load_reward("reward_beside_options:compute_score", {"ground_truth": 1})


# What it is called with -----------------------------------------------------------------------------------------------


async def test_verls_arguments_arrive_by_keyword():
    seen = {}
    await FunctionReward("mine", lambda **given: seen.update(given) or 0.0).score(
        "d", "s", [1], MappingProxyType({"a": {"b": 2}}), deadline_seconds=SECONDS
    )
    assert seen == {"data_source": "d", "solution_str": "s", "ground_truth": [1], "extra_info": {"a": {"b": 2}}}


async def test_what_a_function_does_to_its_arguments_is_not_seen_by_others():
    def spoil(data_source, solution_str, ground_truth, extra_info):
        ground_truth.clear()
        extra_info["tools"].clear()
        extra_info["x"] = 1
        return 0

    truth, extra = [1], {"tools": [2]}
    await score(FunctionReward("mine", spoil), truth=truth, extra=extra)
    assert (truth, extra) == ([1], {"tools": [2]})


# What it returns ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("returned", "value"),
    [
        (1, 1.0),
        (0.5, 0.5),
        (True, 1.0),
        (-2, -2.0),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3.0),
        (np.bool_(True), 1.0),
        (np.array(0.5), 0.5),
        (np.array([0.5]), 0.5),
        (Decimal("0.5"), 0.5),
        (Fraction(1, 2), 0.5),
    ],
)
async def test_numbers_of_all_kinds_are_scores(returned, value):
    found = await score(returning(returned))
    assert (found, type(found.value)) == (FinalScore(value), float)


async def test_what_comes_with_a_score_is_kept_in_jsons_terms():
    extras = {
        "acc": np.float32(0.5),
        "ok": np.bool_(True),
        "hits": np.arange(2),
        "nan": float("nan"),
        5: {1},
        "e": Fraction(1, 2),
    }
    found = await score(returning(OrderedDict(score=np.float64(1), **{str(k): v for k, v in extras.items()})))
    assert found.value == 1.0
    assert found.extras == {"acc": 0.5, "ok": True, "hits": [0, 1], "nan": None, "5": [1], "e": "1/2"}


@pytest.mark.parametrize(
    "returned",
    [
        None, "1.0", b"1", np.str_("1"), np.array("1"), float("nan"), float("inf"), -np.inf, np.float32("nan"), [1.0],
        (1.0, "why"), np.array([1, 2]), 1j, 10**400, object(), {"score": None}, {"score": "1"}, {"score": float("nan")},
    ],
    ids=lambda value: str(value).partition(" at 0x")[0],
)  # fmt: skip
async def test_what_is_not_a_finite_number_is_an_error(returned):
    with pytest.raises(RewardError, match=r"reward 'mine': returned .*, which is not a finite number"):
        await score(returning(returned))


async def test_a_dict_needs_a_score():
    with pytest.raises(RewardError, match="a dict without 'score'; its keys: acc, reward"):
        await score(returning({"acc": 1, "reward": 2}))
    cyclic: dict = {"score": 1}
    cyclic["self"] = cyclic
    with pytest.raises(RewardError, match="what it returned besides the score is not JSON"):
        await score(returning(cyclic))


# Failures -------------------------------------------------------------------------------------------------------------


def raising(error: BaseException, *, as_async: bool) -> FunctionReward:
    def fail(**_):
        raise error

    async def fail_later(**_):
        await asyncio.sleep(0)
        raise error

    return FunctionReward("mine", fail_later if as_async else fail)


@pytest.mark.parametrize("as_async", [False, True])
@pytest.mark.parametrize(
    "error",
    [
        ValueError("no such row"), TimeoutError("of its own"), SystemExit(3), StopIteration(1), RecursionError(),
        asyncio.CancelledError(), ExceptionGroup("some", [ValueError("a")]), KeyError("x"),
    ],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
async def test_whatever_a_function_raises_is_a_reward_error_with_the_traceback(error, as_async):
    with pytest.raises(RewardError, match=r"(?s)reward 'mine': raised .*Traceback.*test_rewards_final\.py") as caught:
        await score(raising(error, as_async=as_async))
    assert type(error).__name__ in str(caught.value)


@pytest.mark.parametrize("error", [GeneratorExit(), KeyboardInterrupt()], ids=lambda error: type(error).__name__)
async def test_what_a_thread_raises_does_not_end_the_event_loop(error):
    with pytest.raises(RewardError, match=f"the function raised {type(error).__name__}"):
        await score(raising(error, as_async=False))


async def test_a_huge_traceback_is_cut():
    with pytest.raises(RewardError) as caught:
        await score(raising(ValueError("x" * 1_000_000), as_async=False))
    assert len(str(caught.value)) < 11_000


async def test_an_async_function_that_is_late_is_cancelled():
    cancelled = []

    async def slow(**_):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    with pytest.raises(RewardError, match=r"reward 'mine': did not finish within 0\.05 s"):
        await score(FunctionReward("mine", slow), seconds=0.05)
    assert cancelled


async def test_a_cancellation_of_ours_is_no_reward_error():
    begun = asyncio.Event()

    async def slow(**_):
        begun.set()
        await asyncio.sleep(60)

    task = asyncio.create_task(score(FunctionReward("mine", slow)))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_function_that_returns_a_coroutine_is_awaited():
    async def later():
        return 0.5

    assert (await score(FunctionReward("mine", lambda **_: later()))).value == 0.5


async def test_an_object_may_be_called_too():
    class Sync:
        def __call__(self, **_):
            return 1

    class Async:
        async def __call__(self, **_):
            return 2

    assert (await score(FunctionReward("a", Sync()))).value == 1.0
    assert (await score(FunctionReward("b", Async()))).value == 2.0


# Threads --------------------------------------------------------------------------------------------------------------


class Gate:
    """A function that hangs until it is opened, and counts how many are inside."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.inside = 0
        self.most = 0
        self._lock = threading.Lock()

    def __call__(self, data_source, solution_str, ground_truth, extra_info) -> float:
        with self._lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        if solution_str == "hang":
            self.open.wait(SECONDS)
        elif solution_str == "work":
            time.sleep(0.05)
        with self._lock:
            self.inside -= 1
        return 1.0


async def until(reached) -> None:
    async with asyncio.timeout(SECONDS):
        while not reached():  # noqa: ASYNC110  (threads set no event of this loop)
            await asyncio.sleep(0.005)


@pytest.fixture
def gate():
    gate = Gate()
    yield gate
    gate.open.set()


async def test_a_function_that_hangs_is_reported_and_the_others_go_on(gate):
    reward = FunctionReward("mine", gate, max_running=1, max_hung=2)
    with pytest.raises(RewardError, match=r"did not finish within 0\.05 s"):
        await score(reward, "hang", seconds=0.05)
    assert (await score(reward, "fine")).value == 1.0


async def test_functions_that_hang_are_limited_in_number_and_forgiven_when_they_return(gate):
    reward = FunctionReward("mine", gate, max_running=4, max_hung=2)
    for _ in range(2):
        with pytest.raises(RewardError, match="did not finish"):
            await score(reward, "hang", seconds=0.02)
    with pytest.raises(
        RewardError, match="reward 'mine': 2 earlier calls did not finish in time and are still running"
    ):
        await score(reward, "fine")
    gate.open.set()
    await until(lambda: not gate.inside and not reward._threads.hung)
    assert (await score(reward, "fine")).value == 1.0


async def test_a_cancelled_call_leaves_its_thread_behind_but_not_its_place(gate):
    reward = FunctionReward("mine", gate, max_running=1)
    task = asyncio.create_task(score(reward, "hang"))
    await until(lambda: gate.inside > 0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await score(reward, "fine")).value == 1.0
    assert reward._threads.hung == 1


async def test_calls_beyond_the_threads_wait_and_waiting_is_not_being_late(gate):
    reward = FunctionReward("mine", gate, max_running=2)
    async with asyncio.TaskGroup() as group:  # two seconds of work for two threads, with a deadline of 1.5
        calls = [group.create_task(score(reward, "work", seconds=1.5)) for _ in range(80)]
    assert [call.result().value for call in calls] == [1.0] * 80
    assert gate.most == 2


def test_a_reward_may_be_used_in_one_loop_after_another(gate):
    reward = FunctionReward("mine", gate, max_running=1)

    async def score_four() -> list[float | None]:
        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(score(reward, "work")) for _ in range(4)]
        return [call.result().value for call in calls]

    assert asyncio.run(score_four()) + asyncio.run(score_four()) == [1.0] * 8
    assert gate.most == 1, "the limit holds in both loops"


def test_a_function_that_hangs_does_not_keep_the_process_alive():
    code = """
        import asyncio, time
        from toolyard.rewards.registry import FunctionReward
        reward = FunctionReward("mine", lambda **_: time.sleep(600))
        try:
            asyncio.run(reward.score("d", "s", 1, {}, deadline_seconds=0.1))
        except Exception as error:
            print(error)
    """
    run = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == "reward 'mine': did not finish within 0.1 s\n"


async def test_gsm8k_starts_no_thread():
    before = threading.active_count()
    async with asyncio.TaskGroup() as group:
        for _ in range(50):
            group.create_task(score(load_reward("gsm8k")))
    assert threading.active_count() == before
