"""The table of data sources, and verl's `default_compute_score` over it; the same rewards as TRL's `reward_funcs`."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import logging
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

import toolyard.rewards
from toolyard.errors import ConfigError, RewardError
from toolyard.rewards import blocking, data_sources, default, default_compute_score, trl_reward
from toolyard.rewards.data_sources import register, scorer_for
from toolyard.rewards.math.reward import MathSettings
from toolyard.rewards.registry import load_reward

SQUARE = "It is\n```python\nprint(int(input()) ** 2)\n```"
SQUARES = json.dumps({"inputs": ["2", "3", "4", "x"], "outputs": ["4", "9", "16", "0"]})


@pytest.fixture(scope="module", autouse=True)
def nothing_stays_open() -> Iterator[None]:
    yield
    blocking.close()


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    monkeypatch.setattr(data_sources, "_TABLE", dict(data_sources._TABLE))


def constant(value: Any) -> Any:
    def score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> Any:
        return value

    return score


# The table ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data_source", "scorer"),
    [
        ("openai/gsm8k", "gsm8k:strict"),
        ("lighteval/MATH", "math"),
        ("DigitalLearningGmbH/MATH-lighteval", "math"),
        ("HuggingFaceH4/MATH-500", "math"),
        ("math_dapo", "math"),
        ("math_dapo_reasoning", "math"),
        ("aime", "math"),
        ("aime2025", "math"),
        ("numina_aops_forum", "math"),
        ("numina_olympiads", "math"),
        ("codecontests", "code:continuous"),
        ("apps", "code:continuous"),
        ("codeforces", "code:continuous"),
        ("taco", "code:continuous"),
        ("livecodebench", "code"),
        ("livecodebench/code_generation_lite", "code"),
        ("openai_humaneval", "code"),
        ("mbpp", "code"),
    ],
)
def test_data_sources_that_verl_and_others_name_have_their_reward(data_source: str, scorer: str) -> None:
    assert scorer_for(data_source) == scorer


def test_an_unknown_data_source_is_told_what_is_known_and_how_to_add_it() -> None:
    with pytest.raises(ConfigError, match=r"'my/data' has no reward; registered: .*aime\*.*openai/gsm8k.*register\("):
        default_compute_score("my/data", "18", "18")


@pytest.mark.parametrize("name", ["gsm8k", "GSM8K", "openai/gsm8k2", "", "AIME"])
def test_a_name_is_meant_as_it_is_written(name: str) -> None:
    with pytest.raises(ConfigError, match="has no reward"):
        scorer_for(name)


def test_a_name_goes_before_a_beginning_and_a_longer_beginning_before_a_shorter() -> None:
    for pattern in ("my*", "my/long*", "my/long/name"):
        register(pattern, constant(len(pattern)))
    assert default_compute_score("my own", "", "") == 3.0
    assert default_compute_score("my/longer", "", "") == 8.0
    assert default_compute_score("my/long/name", "", "") == 12.0
    assert default_compute_score("my/long/name2", "", "") == 8.0


def test_another_scorer_for_the_same_name_must_be_meant() -> None:
    with pytest.raises(ConfigError, match=r"'openai/gsm8k' is already scored by 'gsm8k:strict'.*replace=True"):
        register("openai/gsm8k", "gsm8k:flexible")
    register("openai/gsm8k", "gsm8k:strict")
    register("openai/gsm8k", "gsm8k:flexible", replace=True)
    assert default_compute_score("openai/gsm8k", "it is 18", "18") == 1.0


@pytest.mark.parametrize(
    ("name", "scorer"), [("", "math"), ("a*b", "math"), ("*a*", "math"), ("x", "default"), ("x", "none"), ("x", None)]
)
def test_what_cannot_be_looked_up_or_called_is_not_registered(name: str, scorer: Any) -> None:
    with pytest.raises(ConfigError, match="data source"):
        register(name, scorer)


def test_a_reward_that_does_not_exist_is_said_to_be_so_when_it_is_needed() -> None:
    register("my/data", "gsm9k")
    with pytest.raises(ConfigError, match="gsm9k"):
        default_compute_score("my/data", "", "")


# Scores ---------------------------------------------------------------------------------------------------------------


def test_gsm8k_is_strict_as_in_verl() -> None:
    assert default_compute_score("openai/gsm8k", "so it is\n#### 1,018", "1018") == 1.0
    assert default_compute_score("openai/gsm8k", "so it is 1018", "1018") == 0.0


def test_mathematics_is_one_or_zero() -> None:
    pytest.importorskip("math_verify")
    assert default_compute_score("HuggingFaceH4/MATH-500", r"so \boxed{\frac{1}{2}}", "0.5", check_seconds=60) == 1.0
    assert default_compute_score("aime2024", r"so \boxed{7}", "8", check_seconds=60) == 0.0


def test_contest_problems_are_the_share_of_cases_that_pass() -> None:
    score = default_compute_score("codecontests", SQUARE, SQUARES)
    assert score == 0.75
    assert type(score) is float


def test_without_a_service_contest_answers_need_no_fence_and_are_compared_as_by_prime_code() -> None:
    program = "print(f' {int(input()) ** 2:.7f}')"
    cases = {"inputs": ["2", "3"], "outputs": ["4", "9"]}
    assert default_compute_score("apps", program, cases) == 1.0
    assert default_compute_score("apps", program, cases, without_fences="refuse") == 0.0
    assert default_compute_score("apps", program, cases, comparison={"mode": "lines"}) == 0.0
    assert default_compute_score("livecodebench/x", program, cases) == 0.0, "only verl's own are read so"


async def test_a_rollouts_default_reward_reads_contest_answers_the_same_way() -> None:
    cases = {"inputs": ["2"], "outputs": ["4"]}
    reward = load_reward("default", {})
    assert reward is not None
    async with reward:
        for source, value in [("taco", 1.0), ("mbpp", 0.0), ("taco", 1.0)]:
            found = await reward.score(source, "print(int(input()) ** 2)", cases, {}, deadline_seconds=60)
            assert (source, found.value) == (source, value)


def test_benchmarks_are_passed_or_not() -> None:
    answer = "```python\ndef double(x):\n    return 2 * x\n```"
    assert default_compute_score("mbpp", answer, {"assert_case": ["assert double(2) == 4"]}) == 1.0
    assert (
        default_compute_score("mbpp", answer, {"assert_case": ["assert double(2) == 4", "assert not double(1)"]}) == 0.0
    )


def test_settings_reach_the_judge() -> None:
    slow = "```python\nimport time; time.sleep(1); print(1)\n```"
    tests = {"inputs": [""], "outputs": ["1"]}
    assert default_compute_score("taco", slow, tests) == 1.0
    assert default_compute_score("taco", slow, tests, run_seconds=0.3) == 0.0


@pytest.mark.parametrize(
    ("data_source", "truth"),
    [("openai/gsm8k", None), ("openai/gsm8k", "many"), ("taco", None), ("taco", "{"), ("taco", {"inputs": ["1"]})],
)
def test_a_task_that_cannot_be_scored_has_no_reward(data_source: str, truth: Any) -> None:
    with pytest.raises(RewardError):
        default_compute_score(data_source, SQUARE, truth)


class Broken(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.send_error(500, "out of order")

    def log_message(self, *_: Any) -> None:
        pass


def test_an_outage_is_no_reward() -> None:
    with HTTPServer(("127.0.0.1", 0), Broken) as server, ThreadPoolExecutor(1) as threads:
        threads.submit(server.serve_forever, 0.01)
        url = f"http://127.0.0.1:{server.server_port}/run_code"
        with pytest.raises(RewardError, match="out of order"):
            default_compute_score("taco", SQUARE, SQUARES, sandbox_fusion_url=url, retries=0)
        server.shutdown()


def test_what_is_not_done_by_the_deadline_is_no_reward() -> None:
    limits = {"run_seconds": 0.1, "compile_seconds": 0.1}
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(RewardError, match="the deadline passed"):
            default_compute_score("taco", SQUARE, SQUARES, sandbox_fusion_url=url, deadline_seconds=0.1, **limits)


def test_the_semaphore_is_held_for_code_and_for_nothing_else() -> None:
    semaphore = threading.Semaphore(0)
    assert default_compute_score("openai/gsm8k", "#### 1", "1", concurrent_semaphore=semaphore) == 1.0
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(default_compute_score, "taco", SQUARE, SQUARES, concurrent_semaphore=semaphore)
        assert not waiting.done()
        semaphore.release()
        assert waiting.result() == 0.75
    assert semaphore.acquire(blocking=False)


# Callers --------------------------------------------------------------------------------------------------------------


async def test_it_may_be_called_where_an_event_loop_runs() -> None:
    assert default_compute_score("taco", SQUARE, SQUARES) == 0.75


def test_many_threads_may_call_it_at_once() -> None:
    def score(number: int) -> Any:
        if number % 2:
            return default_compute_score("openai/gsm8k", f"#### {number}", "7")
        return default_compute_score("taco", SQUARE, {"inputs": [str(number)], "outputs": [str(number**2)]})

    with ThreadPoolExecutor(32) as threads:
        scores = list(threads.map(score, range(100)))
    assert scores == [1.0 if number % 2 == 0 or number == 7 else 0.0 for number in range(100)]


async def test_a_rollout_takes_it_for_a_reward_of_the_users() -> None:
    reward = load_reward("toolyard.rewards:default_compute_score")
    assert reward is not None
    found = await asyncio.gather(
        *(reward.score("openai/gsm8k", f"#### {n}", "3", {}, deadline_seconds=60) for n in range(6)),
        reward.score("taco", SQUARE, SQUARES, {}, deadline_seconds=60),
    )
    assert [score.value for score in found] == [0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.75]


def test_it_takes_verls_arguments_in_verls_order() -> None:
    names = "data_source solution_str ground_truth extra_info sandbox_fusion_url concurrent_semaphore memory_limit_mb"
    assert list(inspect.signature(default_compute_score).parameters)[:7] == names.split()
    assert not inspect.iscoroutinefunction(default_compute_score)


# Functions of the user's ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("returned", "score"),
    [(1, 1.0), (True, 1.0), (0.25, 0.25), ({"score": 1, "why": "so"}, {"score": 1.0, "why": "so"})],
)
def test_what_a_function_returns_is_the_score(returned: Any, score: Any) -> None:
    register("my/data", constant(returned))
    assert default_compute_score("my/data", "", "") == score


@pytest.mark.parametrize("returned", [None, "1", float("nan"), float("inf"), {}, {"score": None}, [1, 2], object()])
def test_what_is_no_finite_number_is_no_score(returned: Any) -> None:
    register("my/data", constant(returned))
    with pytest.raises(RewardError, match=r"'my/data': constant.*(not a finite number|without 'score')"):
        default_compute_score("my/data", "", "")


def test_a_function_gets_the_task_and_the_options_that_it_takes() -> None:
    calls: list[dict[str, Any]] = []

    def score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any, strictness: int = 0) -> float:
        calls.append(locals())
        return 1.0

    register("my/data", score)
    default_compute_score("my/data", "answer", [1], {"index": 3}, memory_limit_mb=5, strictness=2, rate_limit=7)
    default_compute_score("my/data", "answer", [1])
    [first, second] = [{key: value for key, value in call.items() if key != "calls"} for call in calls]
    task = {"data_source": "my/data", "solution_str": "answer", "ground_truth": [1]}
    assert first == {**task, "extra_info": {"index": 3}, "strictness": 2}
    assert second == {**task, "extra_info": {}, "strictness": 0}


def test_an_async_function_runs_beside_others() -> None:
    together = threading.Barrier(4, timeout=10)

    async def score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
        await asyncio.to_thread(together.wait)
        return 0.5

    register("my/data", score)
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda _: default_compute_score("my/data", "", ""), range(4))) == [0.5] * 4


def test_an_error_of_the_function_is_a_reward_that_could_not_be_computed() -> None:
    def score(**_: Any) -> float:
        raise KeyError("oops")

    register("my/data", score)
    with pytest.raises(RewardError, match="'my/data': KeyError: 'oops'") as caught:
        default_compute_score("my/data", "", "")
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_misspelt_option_is_an_error_and_one_for_others_is_not() -> None:
    with pytest.raises(ConfigError, match=r"unknown option 'rate_limt'; known: .*rate_limit"):
        default_compute_score("openai/gsm8k", "#### 1", "1", rate_limt=3)
    assert default_compute_score("openai/gsm8k", "#### 1", "1", rate_limit=3, children=1) == 1.0
    assert default_compute_score("openai/gsm8k", "#### 1", "1", reward_router_address="x", reward_model_tokenizer=None)


def test_a_setting_that_makes_no_sense_is_an_error() -> None:
    with pytest.raises(ConfigError, match="rate_limit"):
        default_compute_score("taco", SQUARE, SQUARES, rate_limit=0)


def test_the_options_of_mathematics_are_some_of_its_settings() -> None:
    assert default._OPTIONS["math"] < set(MathSettings.model_fields)


# TRL ------------------------------------------------------------------------------------------------------------------


def test_trl_gets_a_score_for_each_completion() -> None:
    scores = trl_reward()(
        prompts=["p"] * 3,
        completions=["#### 18", "#### 17", SQUARE],
        completion_ids=[[1], [2], [3]],
        data_source=["openai/gsm8k", "openai/gsm8k", "taco"],
        ground_truth=["18", "18", SQUARES],
        trainer_state=object(),
        log_extra=print,
    )
    assert scores == [1.0, 0.0, 0.75]
    assert all(type(score) is float for score in scores)


def test_trl_may_have_verls_columns_and_conversations() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{}]}
    tool = {"role": "tool", "content": "#### 5"}
    parts = {"role": "assistant", "content": [{"type": "text", "text": "#### "}, {"type": "text", "text": "18"}]}
    scores = trl_reward("gsm8k:strict")(
        prompts=[[{"role": "user", "content": "?"}]] * 3,
        completions=[[{"role": "assistant", "content": "#### 18"}], [call, tool, parts], [call, tool]],
        reward_model=[{"ground_truth": "18", "style": "rule"}] * 3,
        extra_info=[{"index": 1}] * 3,
    )
    assert scores == [1.0, 1.0, 0.0]


def test_trl_gets_none_where_there_is_no_reward_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    reward = trl_reward("gsm8k")
    with caplog.at_level(logging.WARNING):
        scores = reward(completions=["18", "18", "18"], ground_truth=["18", None, "many"])
    assert scores == [1.0, None, None]
    assert "gsm8k: 2 of 3 answers have no reward" in caplog.text
    assert "many" in caplog.text


def test_trl_may_use_a_function_with_verls_arguments() -> None:
    async def length(data_source: str, solution_str: str, ground_truth: int, extra_info: Any, scale: float) -> float:
        await asyncio.sleep(0.01)
        return scale * len(solution_str) / ground_truth

    reward = trl_reward(length, scale=2.0)
    assert reward.__name__ == "length"
    assert reward(completions=["ab", "abcd"], ground_truth=[4, 4]) == [1.0, 2.0]


@pytest.mark.parametrize(
    ("reward", "name"),
    [
        (trl_reward(), "default"),
        (trl_reward("code:fraction"), "code_fraction"),
        (trl_reward("gsm8k", name="exact"), "exact"),
        (trl_reward(default_compute_score), "default_compute_score"),
        (trl_reward(functools.partial(default_compute_score, rate_limit=3), name="partial"), "partial"),
    ],
)
def test_trl_reports_it_by_a_name(reward: Any, name: str) -> None:
    assert reward.__name__ == name


def test_it_can_be_sent_to_another_process() -> None:
    sent = pickle.loads(pickle.dumps(trl_reward("gsm8k", name="mine")))
    assert sent.__name__ == "mine"
    assert sent(completions=["18"], ground_truth=["18"]) == [1.0]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: trl_reward("gsm9k"), "gsm9k"),
        (lambda: trl_reward("none"), "no score to train on"),
        (lambda: trl_reward("code", rate_limt=3), "rate_limt"),
        (lambda: trl_reward(lambda x: x), "the function takes"),
        (lambda: trl_reward("gsm8k")(completions=["1"], answer=["1"]), "neither a column 'ground_truth'"),
        (
            lambda: trl_reward()(completions=["1"], ground_truth=["1"], data_source=["my/data"]),
            "'my/data' has no reward",
        ),
        (lambda: trl_reward()(completions=["1"], ground_truth=["1"]), "'' has no reward"),
    ],
)
def test_a_mistake_in_the_set_up_is_said_at_once(make: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make()


def test_the_data_source_of_all_rows_can_be_said_once() -> None:
    reward = trl_reward(data_source="openai/gsm8k")
    assert reward(completions=["#### 1", "#### 2"], ground_truth=["1", "1"]) == [1.0, 0.0]


def test_a_whole_batch_is_scored_at_once() -> None:
    sleep = "```python\nimport time; time.sleep(0.2); print(1)\n```"
    reward = trl_reward("code", enable_global_rate_limit=False, num_workers=16)
    tests = {"inputs": [""], "outputs": ["1"]}
    assert reward(completions=[sleep] * 16, ground_truth=[tests] * 16) == [1.0] * 16


# The package ----------------------------------------------------------------------------------------------------------


def test_the_package_names_them_and_loads_them_when_they_are_asked_for() -> None:
    code = (
        "import sys, toolyard.rewards; print('toolyard.rewards.data_sources' in sys.modules, 'pydantic' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["False", "False"]
    assert {"default_compute_score", "trl_reward"} <= set(toolyard.rewards.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = toolyard.rewards.no_such_name


def test_neither_verl_nor_trl_nor_aiohttp_is_loaded_for_them() -> None:
    code = (
        "import sys; from toolyard.rewards import default_compute_score as f; print(f('openai/gsm8k', '#### 1', '1'))"
    )
    code += "\nprint({'verl', 'trl', 'torch', 'aiohttp', 'math_verify', 'sympy'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["1.0", "set()"]
