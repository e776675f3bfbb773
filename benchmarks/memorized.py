"""A model that has memorized a few conversations with a tool, for benchmarks: its samples are known in advance, and any
two correct loops sample the same. See train.py."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import yaml

from toolyard.chat.formats import open_format
from toolyard.chat.tokenizers.opening import load_tokenizer
from toolyard.engines.models import resolve_model
from toolyard.messages import Message, OpenAIFunctionToolSchema
from toolyard.rollout.config import RolloutConfig, load_config
from toolyard.tools.base import BaseTool, ToolResponse

TOWNS = ("Bern", "Ulm", "Lyon", "Graz", "Oslo", "Turin", "Ghent", "Porto")
SYSTEM = "You plan journeys. Ask for distances with the tool, one after the other, then give the sum after ####."
FAR = "40"
ANSWER = "Both ways are 40 km long, so the whole journey is 80 km.\n#### 80"
CALLS = 2
"""Calls per conversation, one after the other."""
TAIL_SHARE, TAIL_SECONDS = 0.05, 2.0
"""Of a heavy tail: how many calls take how long."""
RESPONSE = 256
"""Maximum tokens after the prompt; the conversations have about 130."""


def distance_in(seconds: float) -> Any:
    async def distance(town: str):  # no return annotation: it would be part of the schema
        """How far it is to a town, in km.

        Args:
            town: Its name.
        """
        await asyncio.sleep(seconds)
        return FAR

    return distance


class Distance(BaseTool):
    """The same tool for Toolyard."""

    async def execute(self, instance_id, parameters, **kwargs):
        seconds = self.config["seconds"]
        if self.config.get("tail") and self._is_late(instance_id, parameters):
            seconds = TAIL_SECONDS
        return ToolResponse(text=await distance_in(seconds)(**parameters)), None, {}

    def _is_late(self, instance_id: str, parameters: dict[str, Any]) -> bool:
        """The same calls in every run."""
        return crc32(f"{instance_id}{parameters}".encode()) % 1000 < 1000 * TAIL_SHARE


@dataclass(frozen=True)
class Setup:
    model: str | None
    """None: a small one with random weights."""
    prompts: int
    group: int
    """Samples of each prompt."""
    device: str

    @property
    def name(self) -> str:
        return f"{self.model or 'random weights'}, {self.device}"


@dataclass(frozen=True)
class Workspace:
    """A folder with everything that both loops use."""

    folder: Path
    schema: dict[str, Any]
    """The tool's schema, as written by `transformers` and shown by TRL."""
    prompts: list[list[dict[str, str]]]
    setup: Setup

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def template(self) -> Path:
        return self.folder / "template.jinja"

    @property
    def samples(self) -> int:
        return self.setup.group * self.setup.prompts

    def settings(self, seconds: float, *, tail: bool = False) -> RolloutConfig:
        """`seconds`: how long a call takes. `tail`: some take `TAIL_SECONDS`."""
        tools = self.folder / f"tools-{seconds:g}-{tail}.yaml"
        tool = {"class_name": "memorized.Distance", "config": {"type": "native", "seconds": seconds, "tail": tail}}
        tools.write_text(yaml.safe_dump({"tools": [{**tool, "tool_schema": self.schema}]}))
        return load_config(
            None,
            {
                "tasks": {"path": str(self.folder / "tasks.jsonl")},
                "engine": {"model": str(self.model), "device": self.setup.device, "max_batch_size": self.samples},
                "chat": {"format": "hermes", "chat_template": str(self.template)},
                "sampling": {"temperature": 1.0, "top_k": 1, "max_tokens": RESPONSE},
                "limits": {"response_length": RESPONSE},
                "tools": str(tools),
                "n": self.setup.group,
            },
        )


def prepare(folder: Path, setup: Setup) -> Workspace:
    """Write prompts, a template, and a model that has memorized its conversations."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import get_json_schema
    from trl.chat_template_utils import qwen2_5_chat_template

    pairs = [(TOWNS[at % len(TOWNS)], TOWNS[(at * 3 + 1) % len(TOWNS)]) for at in range(setup.prompts)]
    asked = [
        [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"{at}: to {one}, then to {two}."}]
        for at, (one, two) in enumerate(pairs)
    ]
    schema = get_json_schema(distance_in(0))
    place = Workspace(folder, schema, asked, setup)
    # Toolyard's schemas add `strict: false`. TRL recognizes templates by their text, so ours is changed instead.
    said = ", ".join(f'"{key}": tool.function["{key}"]' for key in schema["function"])
    plainly = f'{{"type": "function", "function": {{{said}}} }} | tojson'
    place.template.write_text(qwen2_5_chat_template.replace("tool | tojson", plainly))
    with (folder / "tasks.jsonl").open("w") as file:
        for at, messages in enumerate(asked):
            file.write(json.dumps({"id": str(at), "prompt": messages, "answer": "80"}) + "\n")
    torch.manual_seed(0)
    if setup.model is None:
        tokenizer = small_tokenizer(json.dumps([asked, place.schema, ANSWER]) + qwen2_5_chat_template)
        made = small_model(tokenizer)
    else:
        base = resolve_model(setup.model, progress=print)
        tokenizer = AutoTokenizer.from_pretrained(base)
        made = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tokenizer.save_pretrained(place.model)
    memorize(made.to(setup.device), conversations(place, pairs), 1e-3 if setup.model is None else 1e-4)
    made.save_pretrained(place.model)
    return place


def small_tokenizer(text: str) -> Any:
    """A tokenizer of 1,000 tokens, trained on `text`: with a larger vocabulary, a small model would be mostly output
    layer."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    special, letters = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], tokenizers.pre_tokenizers.ByteLevel.alphabet()
    train = tokenizers.trainers.BpeTrainer(
        vocab_size=1000, special_tokens=special, initial_alphabet=letters, show_progress=False
    )
    made.train_from_iterator([text], train)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def small_model(tokenizer: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def conversations(place: Workspace, pairs: Iterable[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
    """The tokens of each conversation, and a mask of those that the model samples."""
    tokenizer = load_tokenizer(place.model)
    chat = open_format(tokenizer, format="hermes", chat_template=place.template)
    tools, stop = (OpenAIFunctionToolSchema.model_validate(place.schema),), chat.stop_token_ids[0]
    made: list[tuple[list[int], list[int]]] = []
    for messages, towns in zip(place.prompts, pairs, strict=True):
        ids = chat.render([Message.from_openai(message) for message in messages], tools)
        mask = [0] * len(ids)
        for town in towns:
            call = f'<tool_call>\n{{"name": "distance", "arguments": {{"town": "{town}"}}}}\n</tool_call>'
            said = [*tokenizer.encode(call), stop]
            told = chat.extension(ids, said, [Message("tool", FAR, name="distance")], tools)
            ids, mask = [*ids, *said, *told], [*mask, *[1] * len(said), *[0] * len(told)]
        said = [*tokenizer.encode(ANSWER), stop]
        made.append(([*ids, *said], [*mask, *[1] * len(said)]))
    return made


def memorize(model: Any, texts: list[tuple[list[int], list[int]]], learning_rate: float) -> None:
    """Train until each token that the model should sample is far more likely than any other."""
    import torch

    began, longest = time.perf_counter(), max(len(ids) for ids, _ in texts)
    ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in texts], device=model.device)
    said = torch.tensor([mask + [0] * (longest - len(mask)) for _, mask in texts], device=model.device)[:, 1:].bool()
    wanted = ids[:, 1:][said]
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    model.train()
    for step in range(500):
        logits = model.get_output_embeddings()(model.base_model(ids[:, :-1]).last_hidden_state[said])
        logprobs = logits.log_softmax(-1)[torch.arange(len(wanted)), wanted]
        if logprobs.min().exp() > 0.8:
            seconds = time.perf_counter() - began
            print(f"The model has memorized its {len(texts)} conversations: {step} updates, {seconds:.0f} s.")
            return
        optimizer.zero_grad()
        (-logprobs.mean()).backward()
        optimizer.step()
    raise SystemExit("the model did not memorize its conversations: try another learning rate")
