"""Servers for our agent loop, in place of verl's LLMServerClient; and the output of verl's worker.

Real around them: verl's configuration, its AgentLoopWorker and its postprocessing, our loop, our tools and sandbox.
"""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest_asyncio
import yaml
from scripted import LOG_PROB, Configure
from verl.experimental.agent_loop import AgentLoopWorker
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.rollout.replica import TokenOutput

from toolyard.engines.protocol import Sampling
from toolyard.engines.transformers.engine import TransformersEngine
from toolyard.rollout.agent.run import AgentTask
from toolyard.rollout.interaction import BaseInteraction
from toolyard.tools.base import BaseTool, ToolResponse
from toolyard.train.verl import agent_loop as ours
from verl import DataProto

Line = str | BaseException | TokenOutput
STEP = 7
"""Of the weights that servers sample with."""


class ScriptedServers:
    """Says what `script` has for the question that a prompt holds, turn by turn. A line may be what is raised, or the
    whole answer. As vLLM under verl does it, a limit and a stop are both called "completed"."""

    def __init__(self, model: str, script: dict[str, list[Line]], *, together: int = 1) -> None:
        self._tokenizer = hf_tokenizer(model)
        self._script = script
        self._together = asyncio.Barrier(together)
        self._turns: dict[str, int] = defaultdict(int)
        self.prompts: dict[str, list[list[int]]] = defaultdict(list)
        """By session."""
        self.asked: list[dict[str, Any]] = []
        self.answers: dict[str, list[list[int]]] = defaultdict(list)
        self.hang: asyncio.Event | None = None

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **others: Any
    ) -> TokenOutput:
        assert not others
        if self.hang is not None:
            self.hang.set()
            await asyncio.Event().wait()
        await self._together.wait()
        self.asked.append(dict(sampling_params))
        self.prompts[request_id].append(prompt_ids)
        prompt = self._tokenizer.decode(prompt_ids)
        [lines] = [lines for question, lines in self._script.items() if question in prompt]
        line = lines[self._turns[request_id]]
        self._turns[request_id] += 1
        most, with_logprobs = sampling_params.pop("max_tokens"), sampling_params.pop("logprobs")
        if isinstance(line, BaseException):
            raise line
        if isinstance(line, TokenOutput):
            return line
        ids = self._tokenizer.encode(line + self._tokenizer.eos_token)[:most]
        self.answers[request_id].append(ids)
        return TokenOutput(
            token_ids=ids,
            log_probs=[LOG_PROB] * len(ids) if with_logprobs else None,
            stop_reason="completed",
            num_preempted=0,
            extra_fields={"min_global_steps": STEP, "max_global_steps": STEP},
        )


class ModelServers:
    """A real model, behind what verl's client looks like."""

    def __init__(self, engine: TransformersEngine) -> None:
        self._engine = engine
        self._seed = 0
        self.said: dict[str, list[int]] = defaultdict(list)
        """By session, all that was sampled."""

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **others: Any
    ) -> TokenOutput:
        self._seed += 1
        params = {key: value for key, value in sampling_params.items() if key not in ("logprobs", "stop_token_ids")}
        params["stop"] = tuple(params.get("stop", ()))
        params.pop("include_stop_str_in_output", None)
        stops = tuple(sampling_params["stop_token_ids"])
        sampling = Sampling(**params, stop_token_ids=stops, seed=self._seed)
        got = await self._engine.generate(prompt_ids, sampling, request_id=request_id)
        self.said[request_id] += got.token_ids
        reason = {"stop": "completed", "length": "completed"}.get(got.finish.value, "aborted")
        return TokenOutput(token_ids=got.token_ids, log_probs=got.logprobs, stop_reason=reason)


class BrokenTool(BaseTool):
    """A tool whose instances cannot be created."""

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        raise RuntimeError("the shelf is empty")


class CountingTool(BaseTool):
    """Records the instances created and released."""

    created: list[str]
    released: list[str]
    closed: int
    made: list[CountingTool] = []  # noqa: RUF012

    def __init__(self, config: dict[str, Any], tool_schema: Any = None) -> None:
        super().__init__(config, tool_schema)
        self.created, self.released, self.closed = [], [], 0
        self.made.append(self)

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        created, response = await super().create(instance_id)
        self.created.append(created)
        return created, response

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        return ToolResponse(text="counted"), 0.25, {}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self.released.append(instance_id)

    async def close(self) -> None:
        self.closed += 1


def ask_twice(task: AgentTask) -> None:
    """An agent with no SDK: it asks the task's question, and then back."""
    messages = list(task.messages)
    for doubt in ("Are you sure?", None):
        body = json.dumps({"model": "any", "messages": messages}).encode()
        headers = {"content-type": "application/json", "authorization": f"Bearer {task.api_key}"}
        url = f"{task.base_url}/chat/completions"
        with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
            messages.append(json.load(answer)["choices"][0]["message"])
        messages.append({"role": "user", "content": doubt})


class AgainOnce(BaseInteraction):
    """A user who asks back, once."""

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float | None, dict[str, Any]]:
        return len(messages) > 2, "Are you sure?", None, {}


async def fragile_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    """A reward that breaks when the model says so."""
    if "broken" in solution_str:
        raise RuntimeError("the judge is ill")
    return 1.0 if str(ground_truth) in solution_str else 0.0


@dataclass
class Played:
    """One row of what a trainer gets, without the padding."""

    prompt: list[int]
    response: list[int]
    mask: list[int]
    logprobs: list[float] | None
    reward: float | None
    turns: int
    told: dict[str, Any]
    metrics: dict[str, Any]

    def parts(self, decode: Callable[[Sequence[int]], str]) -> list[tuple[int, str]]:
        """The response in pieces: 1 with sampled text, 0 with given text."""
        found: list[tuple[int, list[int]]] = []
        for token, mask in zip(self.response, self.mask, strict=True):
            if not found or found[-1][0] != mask:
                found.append((mask, []))
            found[-1][1].append(token)
        return [(mask, decode(ids)) for mask, ids in found]


def batch_of(rows: Sequence[dict[str, Any]]) -> DataProto:
    columns = {key: np.empty(len(rows), dtype=object) for key in rows[0]}
    for key, column in columns.items():
        column[:] = [row[key] for row in rows]
    return DataProto.from_dict(non_tensors=columns)


async def play(worker: AgentLoopWorker, *rows: dict[str, Any]) -> list[Played]:
    """One trajectory for each row, all at the same time, as verl's trainer has them played."""
    return unpadded(await worker.generate_sequences(batch_of(rows)))


def unpadded(output: DataProto) -> list[Played]:
    batch, others = output.batch, output.non_tensor_batch
    width = batch["prompts"].shape[1]
    found: list[Played] = []
    for index in range(len(output)):
        attended = batch["attention_mask"][index].bool()
        response = attended[width:]
        found.append(
            Played(
                prompt=batch["prompts"][index][attended[:width]].tolist(),
                response=batch["responses"][index][response].tolist(),
                mask=batch["response_mask"][index][response].tolist(),
                logprobs=batch["rollout_log_probs"][index][response].tolist() if "rollout_log_probs" in batch else None,
                reward=batch["rm_scores"][index].sum().item() if "rm_scores" in batch else None,
                turns=int(others["__num_turns__"][index]),
                told={key: column[index] for key, column in others.items()},
                metrics=output.meta_info["metrics"][index],
            )
        )
    return found


# Workers of verl's ----------------------------------------------------------------------------------------------------

LOOP = "toolyard.train.verl.ToolyardAgentLoop"
ROLLOUT = "actor_rollout_ref.rollout"
COUNTING = {
    "class_name": "serving.CountingTool",
    "config": {"type": "native"},
    "tool_schema": {
        "type": "function",
        "function": {
            "name": "count",
            "description": "Counts.",
            "parameters": {"type": "object", "properties": {}, "required": []},
        },
    },
}
BROKEN = {**COUNTING, "class_name": "serving.BrokenTool"}
FRAGILE = "serving:fragile_score"

MakeOurs = Callable[..., AgentLoopWorker]


def row(question: str, truth: Any = "18", **others: Any) -> dict[str, Any]:
    """As verl's data set hands it over: numpy's objects in it, and its own fields beside."""
    return {
        "raw_prompt": np.array([{"role": "user", "content": question}], dtype=object),
        "data_source": "openai/gsm8k",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": "train", "index": np.int64(3)},
        "tools_kwargs": {},
        "uid": f"uid of {question}",
        "index": np.int64(3),
        **others,
    }


def with_our_loop(
    configure: Configure, folder: Path, tools: list[dict[str, Any]], *overrides: str, **settings: Any
) -> Any:
    """verl's configuration with our loop, whose YAML, in `folder`, has `settings`."""
    file = folder / "agent_loop.yaml"
    file.write_text(yaml.safe_dump([{"name": "toolyard", "_target_": LOOP, **settings}]))
    agent = f"{ROLLOUT}.agent"
    ours = (f"{agent}.agent_loop_config_path={file}", f"{agent}.default_agent_loop=toolyard")
    return configure(tools, *ours, *overrides)


@pytest_asyncio.fixture(name="make")
async def make_fixture(model: str, configure: Configure, tmp_path: Path) -> AsyncIterator[MakeOurs]:
    """verl's worker with our loop, whose YAML has `settings`; and servers that keep to `script`."""
    await ours.close()
    CountingTool.made.clear()

    def make(
        script: dict[str, list[Line]] | Any,
        tools: list[dict[str, Any]],
        *overrides: str,
        together: int = 1,
        **settings: Any,
    ) -> AgentLoopWorker:
        limits = ("max_parallel_calls=4", "max_tool_response_length=1000")
        given = [*(f"{ROLLOUT}.multi_turn.{limit}" for limit in limits), *overrides]
        config = with_our_loop(configure, tmp_path, tools, *given, **settings)
        servers = ScriptedServers(model, script, together=together) if isinstance(script, dict) else script
        return AgentLoopWorker(config, servers)

    yield make
    await ours.close()


def is_masked(played: Played) -> bool:
    return len(played.response) > 0 and not any(played.mask)
