"""A scripted engine, its tokenizer, and the results of a trajectory."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from verl.experimental.agent_loop import AgentLoopManager, AgentLoopWorker
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.rollout.replica import TokenOutput

from verl import DataProto

Script = dict[str, list[str]]
Configure = Callable[..., Any]
MakeWorker = Callable[..., AgentLoopWorker]

LOG_PROB = -0.5
"""Of whatever the engine says."""

CHAT_TEMPLATE = r"""
{%- if tools %}
    {{- "<|im_start|>system\n<tools>" }}
    {%- for tool in tools %}{{- "\n" + tool | tojson }}{%- endfor %}
    {{- "\n</tools><|im_end|>\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{- "<|im_start|>user" }}{%- endif %}
        {{- "\n<tool_response>\n" + message.content + "\n</tool_response>" }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- "<|im_end|>\n" }}{%- endif %}
    {%- else %}
        {{- "<|im_start|>" + message.role + "\n" + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- "\n<tool_call>\n" + call.function | tojson + "\n</tool_call>" }}
        {%- endfor %}
        {{- "<|im_end|>\n" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\n" }}{%- endif %}"""
"""ChatML with Hermes calls, as the Qwen family has it."""


def save_model(folder: str) -> None:
    """A tokenizer with a token for each byte, and a configuration that lets verl take it for a Qwen model."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
    )
    fast.save_pretrained(folder)
    config = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": len(fast)}
    (Path(folder) / "config.json").write_text(json.dumps(config))


def call(name: str, **arguments: Any) -> str:
    """What a model writes to call a tool."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class ScriptedEngine:
    """In place of verl's LLMServerClient. `script`: a question, and what is replied to it, turn by turn."""

    def __init__(self, model: str, script: Script, *, together: int = 1) -> None:
        self._tokenizer = hf_tokenizer(model)
        self._script = script
        self._together = asyncio.Barrier(together)
        """That many trajectories take each of their turns at the same time."""
        self._turns: dict[str, int] = defaultdict(int)
        self.requests: list[str] = []

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **others: Any
    ) -> TokenOutput:
        await self._together.wait()
        prompt = self._tokenizer.decode(prompt_ids)
        [replies] = [replies for question, replies in self._script.items() if question in prompt]
        reply = replies[self._turns[request_id]]
        self._turns[request_id] += 1
        self.requests.append(request_id)
        ids = self._tokenizer.encode(reply + self._tokenizer.eos_token)
        return TokenOutput(token_ids=ids, log_probs=[LOG_PROB] * len(ids), stop_reason="completed")


@dataclass
class Trajectory:
    """What a trainer gets."""

    prompt: str
    said: list[str]
    """By the model: response_mask is 1."""
    heard: list[str]
    """From the tools, between what was said: response_mask is 0."""
    tool_rewards: list[float]
    log_probs: list[set[float]]
    """Of each part of the response."""


async def roll_out(worker: AgentLoopWorker | AgentLoopManager, *rows: dict[str, Any]) -> list[Trajectory]:
    """One trajectory for each row of a data set, all at the same time."""
    columns = {key: np.empty(len(rows), dtype=object) for key in rows[0]}
    for key, column in columns.items():
        column[:] = [row[key] for row in rows]
    output = await worker.generate_sequences(DataProto.from_dict(non_tensors=columns))
    tokenizer = hf_tokenizer(worker.model_config.path)
    found: list[Trajectory] = []
    batch = output.batch
    width = batch["prompts"].shape[1]
    for row in range(len(output)):
        attended = batch["attention_mask"][row].bool()
        prompt = batch["prompts"][row][attended[:width]]
        response = attended[width:]
        tokens = zip(
            batch["response_mask"][row][response].tolist(),
            batch["responses"][row][response].tolist(),
            batch["rollout_log_probs"][row][response].tolist(),
            strict=True,
        )
        parts = [(mask, [*part]) for mask, part in itertools.groupby(tokens, key=lambda token: token[0])]
        texts = [(mask, tokenizer.decode([token for _, token, _ in part])) for mask, part in parts]
        assert [mask for mask, _ in parts] == [index % 2 ^ 1 for index in range(len(parts))], "said, heard, said, …"
        found.append(
            Trajectory(
                prompt=tokenizer.decode(prompt),
                said=[text for mask, text in texts if mask],
                heard=[text for mask, text in texts if not mask],
                tool_rewards=output.non_tensor_batch["tool_rewards"][row],
                log_probs=[{log_prob for _, _, log_prob in part} for _, part in parts],
            )
        )
    return found
