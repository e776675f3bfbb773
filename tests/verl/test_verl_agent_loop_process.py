"""What our agent loop keeps and leaves behind in a verl process; and its tokens, with a real model."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import serving
import torch
import yaml
from scripted import Configure, call
from serving import (
    COUNTING,
    ROLLOUT,
    STEP,
    CountingTool,
    Line,
    MakeOurs,
    ModelServers,
    ScriptedServers,
    batch_of,
    make_fixture,
    play,
    row,
    unpadded,
    with_our_loop,
)
from test_tools_under_verl import CODE_INTERPRETER, STATEFUL, cluster, code, heard
from verl.experimental.agent_loop import AgentLoopManager, AgentLoopWorker
from verl.utils.tokenizer import hf_tokenizer

from toolyard.engines.models import DEFAULT_MODEL, EMBEDDED, embedded_folder
from toolyard.engines.transformers.engine import TransformersEngine
from toolyard.records.dump import read_dump
from toolyard.train.verl import agent_loop as ours

__all__ = ["cluster", "make_fixture"]  # fixtures

# Opening and closing --------------------------------------------------------------------------------------------------


async def test_what_is_open_is_closed_once_and_opened_anew_for_whoever_comes_later(make: MakeOurs) -> None:
    worker = make({"How many?": [call("count"), "18"] * 3}, [COUNTING], reward="gsm8k")
    await play(worker, row("How many?"))
    await play(worker, row("How many?"))
    await ours.close()
    await ours.close()
    await play(worker, row("How many?"))
    assert [tool.closed for tool in CountingTool.made] == [0, 1, 0]
    assert [len(tool.released) for tool in CountingTool.made] == [0, 2, 1]


def test_another_event_loop_gets_tools_of_its_own(model: str, configure: Configure, tmp_path: Path) -> None:
    CountingTool.made.clear()
    config = with_our_loop(configure, tmp_path, [COUNTING], reward="gsm8k")

    async def one() -> float | None:
        servers = ScriptedServers(model, {"How many?": [call("count"), "18"]})
        [played] = await play(AgentLoopWorker(config, servers), row("How many?"))
        return played.reward

    async def last() -> float | None:
        try:
            return await one()
        finally:
            await ours.close()

    assert [asyncio.run(one()), asyncio.run(one()), asyncio.run(last())] == [1.25] * 3
    assert [tool.closed for tool in CountingTool.made if tool.created] == [0, 0, 1]


SHY_TOOL = """
from toolyard.tools.base import BaseTool

class ShyTool(BaseTool):
    async def close(self):
        print("closed", flush=True)
"""
AT_EXIT = """
import asyncio, threading
from transformers import AutoTokenizer
from toolyard.train.verl.shared import open_here
from toolyard.train.verl.settings import VerlSettings

async def go():
    open_here(VerlSettings(tool_config_path="tools.yaml"), AutoTokenizer.from_pretrained({model!r}))

loop = asyncio.new_event_loop()
threading.Thread(target=loop.run_forever, daemon=True).start()
asyncio.run_coroutine_threadsafe(go(), loop).result()
"""


def test_what_is_open_is_closed_when_the_process_ends(model: str, tmp_path: Path) -> None:
    """Its event loop runs in a thread, as that of a Ray actor does."""
    (tmp_path / "shy.py").write_text(SHY_TOOL)
    (tmp_path / "tools.yaml").write_text(yaml.safe_dump({"tools": [{**COUNTING, "class_name": "shy.ShyTool"}]}))
    command = [sys.executable, "-c", AT_EXIT.format(model=model)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout == "closed\n", done.stderr


# The dump -------------------------------------------------------------------------------------------------------------


async def test_trajectories_are_dumped_by_step_with_what_verl_does_not_tell(make: MakeOurs, tmp_path: Path) -> None:
    folder = tmp_path / "rollouts"
    script: dict[str, list[Line]] = {"good": [code("print(1)"), "#### 18"], "bad": [ValueError("no")]}
    worker = make(script, [CODE_INTERPRETER], reward="gsm8k", rollout_data_dir=str(folder))
    rows = [row(name, global_steps=np.int64(2)) for name in ("good", "bad")]
    played = await play(worker, *rows)
    await ours.close()
    [mine] = folder.iterdir()
    found = {line.trajectory.request_id: line.trajectory for line in read_dump(mine, steps=[2])}
    good, bad = [found[one.told["toolyard_request_id"]] for one in played]
    assert (good.score, good.batch_data_id, good.turns[0].tool_calls[0].response) == (1.0, "train-3", "1\n")
    assert good.turns[0].sampled.weight_versions == (str(STEP),)
    assert (bad.score, bad.finish_reason) == (None, "engine_failure")


async def test_a_dump_that_cannot_be_written_costs_no_sample(
    make: MakeOurs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    worker = make({"How many?": ["18"]}, [], reward="gsm8k", rollout_data_dir=str(tmp_path / "file"))
    [played] = await play(worker, row("How many?"))
    assert played.reward == 1.0
    assert "was not dumped" in caplog.text


# On Ray ---------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("cluster")
async def test_verls_actors_play_with_tools_and_dumps_of_their_own(
    model: str, configure: Configure, tmp_path: Path
) -> None:
    """As verl runs it: its manager starts Ray actors, and each of these finds our loop by the YAML file."""
    ray.cloudpickle.register_pickle_by_value(serving)
    folder, two = tmp_path / "rollouts", f"{ROLLOUT}.agent.num_workers=2"
    settings = {"reward": "gsm8k", "rollout_data_dir": str(folder)}
    config = with_our_loop(configure, tmp_path, [STATEFUL], two, **settings)
    numbers = range(4)
    script: dict[str, list[Line]] = {f"Number {i}.": [code(f"x = {i}"), code("print(x)"), f"#### {i}"] for i in numbers}
    manager = await AgentLoopManager.create(config, ScriptedServers(model, script))
    output = await manager.generate_sequences(batch_of([row(f"Number {i}.", truth=str(i)) for i in numbers]))
    output.meta_info["metrics"] = [{}] * 4
    decode = hf_tokenizer(model).decode
    for index, one in enumerate(unpadded(output)):
        assert one.reward == 1.0
        assert one.parts(decode)[3] == (0, heard(f"{index}\n"))
    assert output.meta_info["timing"]["agent_loop/tool_calls/min"] > 0
    folders = [*folder.iterdir()]
    assert len(folders) == 2
    assert sum(1 for one in folders for _ in read_dump(one)) == 4


# Exactness ------------------------------------------------------------------------------------------------------------

TOLERANCE = 1e-4
"""Mean absolute, in fp32 on a CPU."""


@pytest.fixture(scope="module")
def embedded() -> str:
    """The embedded model, if it is on this machine."""
    there = embedded_folder(EMBEDDED[DEFAULT_MODEL])
    if (fault := there.fault()) is not None:
        pytest.skip(f"{DEFAULT_MODEL}: {fault}; `toolyard models fetch`")
    return str(there.path)


@pytest.mark.timeout(600)
async def test_a_plain_forward_finds_the_log_probabilities_that_were_sampled(
    make: MakeOurs, embedded: str, tmp_path: Path
) -> None:
    """Over several turns with the real model, the real tool and verl's padding; and what is masked is the tool's."""
    import transformers

    hasty = {**CODE_INTERPRETER, "config": {**CODE_INTERPRETER["config"], "default_timeout": 2}}
    async with TransformersEngine(embedded, max_batch_size=4) as engine:
        servers = ModelServers(engine)
        worker = make(
            servers,
            [hasty],
            f"actor_rollout_ref.model.path={embedded}",
            "data.max_prompt_length=512",
            "data.max_response_length=128",
            f"{ROLLOUT}.temperature=0.8",
            f"{ROLLOUT}.multi_turn.max_assistant_turns=3",
            reward="gsm8k",
            rollout_data_dir=str(tmp_path / "rollouts"),
            chat={"format": "code_block", "syntax_options": {"tool": "code_interpreter", "argument": "code"}},
        )
        question = "Write a python code block that prints 6 * 3, and nothing else."
        output = await worker.generate_sequences(batch_of([row(question, uid=str(index)) for index in range(2)]))
        await ours.close()
    mask, sampled = output.batch["response_mask"].bool(), output.batch["rollout_log_probs"]
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(embedded, dtype=torch.float32)
    with torch.no_grad():
        inputs = {name: output.batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
        logits = model(**inputs).logits
    responses = output.batch["responses"]
    again = torch.log_softmax(logits[:, -responses.shape[1] - 1 : -1] / 0.8, -1)
    again = again.gather(-1, responses.unsqueeze(-1)).squeeze(-1)
    difference = (again - sampled)[mask].abs()
    played = unpadded(output)
    print(
        f"{mask.sum().item()} sampled tokens of {[one.turns for one in played]} turns: mean "
        f"{difference.mean().item():.2e}, largest {difference.max().item():.2e}"
    )
    assert difference.mean().item() <= TOLERANCE
    assert not sampled[~mask].any()

    [folder] = (tmp_path / "rollouts").iterdir()
    recorded = {line.trajectory.request_id: line.trajectory for line in read_dump(folder)}
    decode = hf_tokenizer(embedded).decode
    answered = 0
    for one in played:
        request_id = one.told["toolyard_request_id"]
        assert [token for token, mask in zip(one.response, one.mask, strict=True) if mask] == servers.said[request_id]
        told = [text for mask, text in one.parts(decode) if not mask]
        results = ["".join(call.response for call in turn.tool_calls) for turn in recorded[request_id].turns]
        for text, result in zip(told, results, strict=False):
            assert result.strip() in text
        answered += len(told)
    assert answered >= 2, "hardly anybody called the tool"
