"""docs/guides/migrating-from-verl.md beside the released verl: the names on its side, arguments, and what loads."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from differences import DOCS
from scripted import Configure
from verl.trainer.ppo.reward import load_reward_manager
from verl.utils.tokenizer import hf_tokenizer

from toolyard.errors import ConfigError
from toolyard.rewards import blocking
from toolyard.tools import get_tool_class
from toolyard.tools.verl_names import TOOLS
from verl import DataProto

GUIDE = (DOCS / "guides" / "migrating-from-verl.md").read_text()
NAMES: dict[str, str] = dict(re.findall(r"^\| `(verl\.[\w.]+)` \| `(toolyard[\w.]+)` \|$", GUIDE, re.MULTILINE))
GONE = ("verl.tools.sandbox_fusion_tools.", "verl.tools.gsm8k_tool.", "verl.tools.mcp_", "verl.tools.utils.")
"""With 0.9."""
REWARDS = [name for name in NAMES if name.startswith("verl.utils.reward_score.")]


@pytest.fixture(scope="module", autouse=True)
def nothing_stays_open() -> Iterator[None]:
    yield
    blocking.close()


def named(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(module), attribute)


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith(GONE)])
def test_verl_has_what_the_guide_names(name: str) -> None:
    assert named(name) is not None


@pytest.mark.parametrize("name", [name for name in REWARDS if not name.endswith("math_verify.compute_score")])
def test_reward_functions_take_the_same_arguments(name: str) -> None:
    def taken(function: Any) -> list[str]:
        return [parameter.name for parameter in inspect.signature(function).parameters.values()]

    verls, ours = taken(named(name)), taken(named(NAMES[name]))
    if verls[-1] == "kwargs":  # where ours may name more
        verls.pop()
    assert ours[: len(verls)] == verls


def test_of_the_mathematical_one_they_are_named_as_the_guide_says() -> None:
    verls = named("verl.utils.reward_score.math_verify.compute_score")
    ours = named(NAMES["verl.utils.reward_score.math_verify.compute_score"])
    assert list(inspect.signature(verls).parameters) == ["model_output", "ground_truth", "timeout_score", "timeout"]
    assert list(inspect.signature(ours).parameters) == ["solution_str", "ground_truth", "deadline_seconds"]


@pytest.mark.parametrize("name", [name for name in TOOLS if "mcp" not in name])  # which is not installed beside verl
def test_class_names_mean_ours_where_verl_is_installed(name: str) -> None:
    assert get_tool_class(name) is named(TOOLS[name])


@pytest.mark.parametrize("name", ["verl.tools.base_tool.BaseTool", "verl.tools.search_tool.SearchTool", "verl.Tool"])
def test_any_other_class_of_an_installed_verl_is_told_which_are_mapped(name: str) -> None:
    with pytest.raises(ConfigError, match="Toolyard does not provide this tool of verl's; it provides") as caught:
        get_tool_class(name)
    assert all(mapped in str(caught.value) for mapped in TOOLS)


async def test_verls_own_reward_runs_programs_at_our_service(configure: Configure, model: str, url: str) -> None:
    """`reward.sandbox_fusion.url`, and nothing else of ours."""
    tokenizer = hf_tokenizer(model)
    manager = load_reward_manager(configure([], f"reward.sandbox_fusion.url={url}"), tokenizer)
    ids = torch.tensor([tokenizer.encode("```python\nprint(int(input()) ** 2)\n```")])
    cases = json.dumps({"inputs": ["2", "3"], "outputs": ["4", "10"]})
    columns = {
        "data_source": "codecontests",
        "reward_model": {"style": "rule", "ground_truth": cases},
        "extra_info": {"index": 0},
    }
    row = DataProto.from_dict(
        {"responses": ids, "attention_mask": torch.ones_like(ids)},
        {key: np.array([value], dtype=object) for key, value in columns.items()},
    )
    assert (await manager.run_single(row))["reward_score"] == 0.5
