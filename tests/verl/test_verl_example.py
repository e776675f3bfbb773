"""examples/gsm8k_grpo/verl: verl knows every setting of its script, and our agent loop accepts the result."""

from __future__ import annotations

import shlex
from pathlib import Path

import yaml
from hydra import compose, initialize_config_module

from toolyard.train.verl.settings import settings_of

EXAMPLE = Path(__file__).parents[2] / "examples" / "gsm8k_grpo"


def test_verl_takes_the_settings_of_the_example_and_our_loop_takes_verls():
    script = (EXAMPLE / "verl" / "run.sh").read_text().replace("$here", str(EXAMPLE)).replace("\\\n", " ")
    overrides = [word for word in shlex.split(script.partition("main_ppo")[2]) if "=" in word]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides)
    (loop,) = yaml.safe_load((EXAMPLE / "verl" / "agent_loop.yaml").read_text())
    ours = {key: value for key, value in loop.items() if key not in ("name", "_target_")}
    settings = settings_of(ours, config.actor_rollout_ref.rollout, config.data.get("apply_chat_template_kwargs"))
    assert settings.tool_config_path == str(EXAMPLE / "tools.yaml")
    assert settings.scores
    assert (settings.limits.prompt_length, settings.limits.response_length) == (1024, 1024)


def test_verls_own_registry_loads_the_tools():
    from verl.tools.tool_registry import initialize_tools_from_config

    tools = initialize_tools_from_config(str(EXAMPLE / "tools.yaml"))
    assert [tool.name for tool in tools] == ["code_interpreter", "calc_gsm8k_reward"]
