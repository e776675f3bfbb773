"""examples/gsm8k_grpo as its README says: its files fit together, and its smallest form runs."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from toolyard.engines.models import resolve_model
from toolyard.rollout.config import load_config
from toolyard.rollout.run import run_rollouts
from toolyard.tasks.files import read_tasks
from toolyard.tasks.word_problems.files import write_problems
from toolyard.tasks.word_problems.generator import rows
from toolyard.tools.registry import initialize_tools_from_config
from toolyard.train.config import load_train_config

EXAMPLE = Path(__file__).parents[2] / "examples" / "gsm8k_grpo"


def run(*args: str | Path, seconds: float = 480) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, EXAMPLE / "run.py", *map(str, args)], capture_output=True, text=True, timeout=seconds
    )


def test_settings_are_known_and_what_they_name_is_there(monkeypatch):
    monkeypatch.chdir(EXAMPLE)
    config = load_train_config("train.yaml")
    assert config.prompts_per_step % 8 == 0, "that eight GPUs can share"
    assert config.rollout.tools == "tools.yaml"


def test_the_tools_are_the_two_of_the_seeds_with_their_six_settings():
    tools = {tool.name: tool for tool in initialize_tools_from_config(EXAMPLE / "tools.yaml")}
    assert set(tools) == {"code_interpreter", "calc_gsm8k_reward"}
    six = {"num_workers", "rate_limit", "default_timeout", "default_language", "enable_global_rate_limit"}
    assert {*six, "sandbox_fusion_url"} <= tools["code_interpreter"].config.keys()


def test_accelerate_reads_the_fsdp_settings():
    from accelerate.commands.config.config_args import load_config_from_file

    read = load_config_from_file(str(EXAMPLE / "fsdp.yaml"))
    assert (read.distributed_type.value, read.num_processes) == ("FSDP", 8)


def test_verl_is_told_of_files_that_are_there_and_of_our_loop():
    (loop,) = yaml.safe_load((EXAMPLE / "verl" / "agent_loop.yaml").read_text())
    script = (EXAMPLE / "verl" / "run.sh").read_text()
    assert loop["_target_"] == "toolyard.train.verl.ToolyardAgentLoop"
    assert f"agent.default_agent_loop={loop['name']} " in script
    for named in re.findall(r'config_path="\$here/(\S+)"', script):
        assert (EXAMPLE / named).is_file()
    assert subprocess.run(["bash", "-n", EXAMPLE / "verl" / "run.sh"]).returncode == 0


@pytest.mark.kernel("confined")
async def test_the_teacher_of_the_smoke_form_solves_its_problems_with_the_tools_of_the_example(tmp_path):
    write_problems(tmp_path / "made.jsonl", 10, script=tmp_path / "teacher.json")
    played = {
        "tasks": {"path": str(tmp_path / "made.jsonl")},
        "engine": {"kind": "scripted", "model": "smollm2-135m", "script": str(tmp_path / "teacher.json")},
        "chat": {"format": "hermes", "tool_role": "user"},
        "tools": str(EXAMPLE / "tools.yaml"),
        "n": 1,
    }
    result = await run_rollouts(load_config(EXAMPLE / "rollout.yaml", played))
    assert (result.summary.completed, result.summary.score.mean) == (10, 1.0)


@pytest.mark.parametrize("published", ["train.jsonl test.jsonl", "main/train-00000.parquet main/test-00000.parquet"])
@pytest.mark.exhaustive
def test_gsm8k_is_found_as_it_is_published_and_train_is_asked_last(tmp_path, published):
    for name in published.split():
        source = tmp_path / "gsm8k" / name
        write_problems(source.with_suffix(".jsonl"), 3)
        if source.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(list(rows(3))), source)
            source.with_suffix(".jsonl").unlink()
    ran = run("--gsm8k", tmp_path / "gsm8k", "--work", tmp_path, "stepps=2", seconds=90)
    assert ran.returncode != 0
    assert "stepps" in ran.stderr.splitlines()[-1], "train's own error"
    made = [task for split in ("train", "test") for task in read_tasks(tmp_path / "data" / f"{split}.parquet")]
    assert [task.id for task in made] == [f"{split}-{number}" for split in ("train", "test") for number in range(3)]
    assert "calc_gsm8k_reward" in made[0].messages[0].content


def test_where_there_is_no_gsm8k_it_says_so(tmp_path):
    ran = run("--gsm8k", tmp_path, seconds=60)
    assert ran.returncode == 1
    assert "has neither train.jsonl nor main/train-*.parquet" in ran.stderr


@pytest.fixture
def small(tmp_path) -> Path:
    """The embedded model with two small random layers. Nobody looks at what it learns; test_train_command trains the
    real one."""
    from transformers import AutoConfig, LlamaForCausalLM

    real, folder = Path(resolve_model("smollm2-135m")), tmp_path / "small"
    shutil.copytree(real, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    config = AutoConfig.from_pretrained(real, **sizes, num_attention_heads=3, num_key_value_heads=3)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.exhaustive
@pytest.mark.timeout(500)  # half a minute, on cores that others may use as well
@pytest.mark.kernel("confined")
def test_the_smoke_form_trains_two_steps_and_leaves_everything_a_run_leaves(tmp_path, small):
    ran = run("--smoke", "--work", tmp_path, f"rollout.engine.model={small}")
    assert ran.returncode == 0, ran.stderr
    typed = [shlex.split(line[2:]) for line in ran.stderr.splitlines() if line.startswith("$ ")]
    assert [command[1] for command in typed] == ["tasks", "tasks", "tasks", "tasks", "train"]
    folder = tmp_path / "runs" / "smoke"
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == [1, 2]
    assert "trained on 2 trajectories" in ran.stderr, "the teacher's, whose code ran in the sandbox"
    dumps = [file.read_text().splitlines() for file in sorted((folder / "rollouts").glob("*.jsonl"))]
    dumped = [json.loads(line) for lines in dumps for line in lines]
    assert [line["step"] for line in dumped] == [0, 0, 1, 1]
    assert all("calc_gsm8k_reward" in line["input"] and "code_interpreter" in line["input"] for line in dumped)
    assert list((folder / "rollouts" / "eval").glob("*.jsonl"))
    assert (folder / "model").is_dir()
