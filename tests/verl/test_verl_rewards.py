"""verl's scorer and ours against one service of ours: the same results. And our rewards in verl's reward managers."""

from __future__ import annotations

import asyncio
import inspect
import json
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from scripted import Configure
from verl.trainer.ppo.reward import get_custom_reward_fn, load_reward_manager
from verl.utils import reward_score
from verl.utils.reward_score import sandbox_fusion as theirs
from verl.utils.reward_score.sandbox_fusion import utils as their_utils
from verl.utils.tokenizer import hf_tokenizer

import toolyard.rewards
from toolyard.errors import ConfigError, RewardError
from toolyard.rewards import blocking
from toolyard.rewards import sandbox_fusion as ours
from verl import DataProto


@pytest.fixture(scope="module", autouse=True)
def nothing_stays_open() -> Iterator[None]:
    yield
    blocking.close()


# One service, two scorers ---------------------------------------------------------------------------------------------


def io(*pairs: tuple[Any, Any], **other: Any) -> dict[str, Any]:
    return {"inputs": [given for given, _ in pairs], "outputs": [expected for _, expected in pairs], **other}


SQUARE = "print(int(input()) ** 2)"
PROGRAMS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "right and wrong": ("python", SQUARE, io(("2", "4"), ("3", "9\n"), ("4", "17"), ("5", "25 "))),
    "crash": ("python", SQUARE, io(("2", "4"), ("x", "4"), ("", ""))),
    "exit code": ("python", "print(1); raise SystemExit(3)", io(("", "1"))),
    "signal": ("python", "import os; os.kill(os.getpid(), 11)", io(("", "1"))),
    "syntax error": ("python", "print(", io(("", "1"), ("", "2"))),
    "endless": ("python", "x = input()\nwhile x == 'loop': pass\nprint(1)", io(("go", "1"), ("loop", "1"))),
    "memory": ("python", "x = bytearray(1 << 29)", io(("", "1"))),
    "nothing said": ("python", "pass", io(("", "1"), (None, "2"))),
    "any output": ("python", "print(7)", io(("", None))),
    "stderr": ("python", "import sys; print('a', file=sys.stderr); print('b')", io(("", "b"))),
    "not ASCII": ("python", "print(input()[::-1])", io(("añ→", "→ña"))),
    "values": ("python", SQUARE, io((2, 4), (3, 9.0))),
    "function": ("python", "def f(a, b): return sorted(a+b)", io(("[3]\n[1]", "[1, 3]"), ("[]\n[]", "1"), fn_name="f")),
    "method": (
        "python",
        "class Solution:\n    def f(self, a: List[int]) -> Dict[str, bool]:\n        return {'x': bool(Counter(a))}",
        io(("[1]", '{"x": true}'), ("[]", '{"x": false}'), fn_name="f"),
    ),
    "text of a function": ("python", "def f(a): return a * 2", io(('"ab"', "abab"), ("2.5", "5.0"), fn_name="f")),
    "C++": ("cpp", "#include <cstdio>\nint main() { putchar(getchar() + 1); }", io(("2", "3"), ("3", "5"))),
    "C++ that does not compile": ("cpp", "a = b", io(("2", "4"), ("3", "6"))),
    "C++ that crashes": ("cpp", "int main() { return 3; }", io(("2", "4"))),
    "unequal": ("python", SQUARE, {"inputs": ["1", "2"], "outputs": ["1"]}),
    "no outputs": ("python", SQUARE, {"inputs": ["1", "2"]}),
    "no cases": ("python", SQUARE, {"inputs": [], "outputs": []}),
    "nothing": ("python", SQUARE, {}),
    "assertions": ("python", "x = 1", io(("", None), ("", None), assert_case=["assert x == 1", "assert x == 2"])),
}  # fmt: skip
MEASURED = {"duration", "compile_duration"}


def told(metadata: dict[str, Any]) -> dict[str, Any]:
    """All that does not depend on the clock, or on where a traceback says it is. verl calls an empty output None."""
    kept = {key: value for key, value in metadata.items() if key not in MEASURED | {"api_response", "stderr"}}
    if metadata.get("stderr"):
        kept["stderr"] = metadata["stderr"].splitlines()[-1]
    if "expected_output" in kept:
        kept["expected_output"] = kept["expected_output"] or None
    return kept


@pytest.mark.parametrize("name", PROGRAMS)
def test_both_say_the_same_of_a_program(url: str, name: str) -> None:
    language, code, in_outs = PROGRAMS[name]
    seconds = 1 if name == "endless" else 20
    their_results, their_metadata = their_utils.check_correctness(url, in_outs, code, seconds, 256, language)
    our_results, our_metadata = ours.check_correctness(url, in_outs, code, seconds, 256, language)
    assert our_results == their_results
    assert [list(metadata) for metadata in our_metadata] == [list(metadata) for metadata in their_metadata]
    assert [*map(told, our_metadata)] == [*map(told, their_metadata)]


@pytest.mark.parametrize(
    "completion",
    [
        f"Thus:\n```python\n{SQUARE}\n```",
        f"First\n```python\nprint(0)\n```\nno:\n```python\n{SQUARE}\n```\nDone.",
        f"```\n{SQUARE}\n```",
        f"```py\n{SQUARE}\n```\n```\nprint(0)\n```",
        f"```python\n{SQUARE}",
        "No idea.",
    ],
)
@pytest.mark.parametrize("continuous", [False, True])
def test_both_score_an_answer_the_same(url: str, completion: str, continuous: bool) -> None:
    cases = json.dumps(io(*[(str(number), str(number**2 if number < 9 else 0)) for number in range(12)]))
    their_score, their_metadata = theirs.compute_score(url, None, 1024, completion, cases, continuous)
    our_score, our_metadata = ours.compute_score(url, threading.Semaphore(4), 1024, completion, cases, continuous)
    assert our_score == their_score
    assert [*map(told, our_metadata)] == [*map(told, their_metadata)]


@pytest.mark.parametrize(
    ("our_function", "their_function"),
    [
        (ours.compute_score, theirs.compute_score),
        (ours.check_correctness, their_utils.check_correctness),
        (ours._process_single_case, their_utils._process_single_case),
        (ours.call_sandbox_api, their_utils.call_sandbox_api),
    ],
)
def test_both_take_the_same_arguments(our_function: Callable[..., Any], their_function: Callable[..., Any]) -> None:
    def taken(function: Callable[..., Any]) -> list[tuple[str, Any]]:
        return [(parameter.name, parameter.default) for parameter in inspect.signature(function).parameters.values()]

    assert taken(our_function) == taken(their_function)


def test_what_they_differ_in_is_what_the_module_says(url: str) -> None:
    raises = io(("1", "1"), fn_name="f")
    assert their_utils.check_correctness(url, raises, "def f(x): raise KeyError")[0] == [False]
    assert ours.check_correctness(url, raises, "def f(x): raise KeyError")[0] == [-2]

    answer, cases = f"```python\n{SQUARE}\n```", io(("1", "1"))
    nobody = "http://127.0.0.1:9/run_code"
    assert theirs.compute_score(nobody, None, 1024, answer, cases)[0] == 0.0
    with pytest.raises(RewardError):
        ours.compute_score(nobody, None, 1024, answer, cases)
    assert theirs.compute_score(url, None, 1024, answer, "no JSON")[0] == 0.0
    with pytest.raises(ConfigError):
        ours.compute_score(url, None, 1024, answer, "no JSON")


# Our rewards in verl's hands ------------------------------------------------------------------------------------------

DEFAULT = (
    "reward.custom_reward_function.path=pkg://toolyard.rewards",
    "reward.custom_reward_function.name=default_compute_score",
)


def test_verl_finds_our_function_by_its_package(configure: Configure) -> None:
    found = get_custom_reward_fn(configure([], *DEFAULT))
    assert isinstance(found, partial)
    assert toolyard.rewards.default_compute_score in found.args
    assert found(data_source="openai/gsm8k", solution_str="#### 18", ground_truth="18", extra_info={}) == 1.0


def row(tokenizer: Any, text: str, data_source: str, ground_truth: str) -> DataProto:
    """As a reward manager is given it."""
    ids = torch.tensor([tokenizer.encode(text)])
    tensors = {"responses": ids, "attention_mask": torch.ones_like(ids)}
    columns = {
        "data_source": data_source,
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"index": 0},
    }
    return DataProto.from_dict(tensors, {key: np.array([value], dtype=object) for key, value in columns.items()})


@pytest.mark.parametrize("manager", ["naive", "dapo"])
async def test_verls_reward_managers_score_by_it(configure: Configure, model: str, url: str, manager: str) -> None:
    tokenizer = hf_tokenizer(model)
    config = configure(
        [],
        *DEFAULT,
        f"reward.reward_manager.name={manager}",
        f"+reward.custom_reward_function.reward_kwargs.sandbox_fusion_url={url}",
        "+reward.custom_reward_function.reward_kwargs.run_seconds=9",
    )
    reward_manager = load_reward_manager(config, tokenizer)
    answer = f"```python\n{SQUARE}\n```"
    cases = json.dumps(io(("2", "4"), ("3", "10")))
    rows = [
        row(tokenizer, "so #### 18", "openai/gsm8k", "18"),
        row(tokenizer, "so #### 17", "openai/gsm8k", "18"),
        row(tokenizer, answer, "codecontests", cases),
        *[row(tokenizer, answer, "apps", cases)] * 30,
    ]
    found = await asyncio.gather(*map(reward_manager.run_single, rows))
    assert [one["reward_score"] for one in found] == [1.0, 0.0, *[0.5] * 31]
    assert {tuple(one["reward_extra_info"]) for one in found} == {("acc",)}, "verl wants the same keys of all rows"

    with pytest.raises(ConfigError, match="my/data"):
        await reward_manager.run_single(row(tokenizer, "18", "my/data", "18"))


def test_both_default_functions_agree_where_both_can_tell(url: str) -> None:
    cases = json.dumps(io(*[(str(number), str(number**2 if number < 9 else 0)) for number in range(12)]))
    answer = f"```python\n{SQUARE}\n```"
    with multiprocessing.get_context("forkserver").Manager() as manager:
        service = {
            "sandbox_fusion_url": url,
            "concurrent_semaphore": manager.Semaphore(8),
            "memory_limit_mb": 256,
        }
        for source, text, truth in [
            ("openai/gsm8k", "so #### 18", "18"),
            ("openai/gsm8k", "so 18", "18"),
            ("openai/gsm8k", "so #### 1,018", "1018"),
            ("codecontests", answer, cases),
            ("apps", answer, cases),
            ("taco", "no idea", cases),
            ("codeforces", "```python\n1 / 0\n```", cases),
        ]:
            theirs_say = reward_score.default_compute_score(source, text, truth, **service)
            ours_say = toolyard.rewards.default_compute_score(source, text, truth, **service)
            assert ours_say == theirs_say, source
            assert type(ours_say) is float
