"""Small real tokenizers and chat templates modeled on well-known ones, for the tests of chat formats."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from material import template_files
from toolyard.chat.formats import open_format
from toolyard.chat.protocol import CallSyntax, MalformedCall, ParsedCall, ParsedTurn, Tools
from toolyard.chat.template import TemplateFormat
from toolyard.chat.tokenizers.fast import FastTokenizer
from toolyard.messages import OpenAIFunctionToolSchema, decode_arguments

CONTROL = (
    "<|endoftext|> <|im_start|> <|im_end|> <|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> "
    "<|eot_id|> <|eom_id|> <|python_tag|> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS] "
    "[TOOL_RESULTS] [/TOOL_RESULTS] [gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|> "
    "<start_of_turn> <end_of_turn> <|start|> <|message|> <|channel|> <|constrain|> <|end|> <|return|> <|call|> "
    "]~!b[ ]~b] [e~[ <｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <|im_user|> <|im_assistant|> <|im_system|> "
    "<|im_middle|> <|tool_calls_section_begin|> <|tool_calls_section_end|> <|tool_call_begin|> <|tool_call_end|> "
    "<|tool_call_argument_begin|> [EOS] [BOS] <|vision_start|> <|vision_end|> <|image_pad|> <|video_pad|>"
)
WORDS = (
    "<think> </think> <tool_call> </tool_call> <tool_response> </tool_response> <arg_key> </arg_key> <arg_value> "
    "</arg_value> <minimax:tool_call> </minimax:tool_call> <｜User｜> <｜Assistant｜> "
    "<｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁sep｜> "
    "<｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜>"
)

QWEN = (
    "{%- if tools %}{{- '<|im_start|>system\\n' }}"
    "{%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- else %}{{- 'You help.' }}{%- endif %}"
    "{{- '\\n\\n# Tools\\n<tools>' }}{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}"
    '{{- \'\\n</tools>\\nCall as <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call><|im_end|>\\n\' }}'
    "{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}"
    "{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- elif message.role == 'assistant' %}"
    "{{- '<|im_start|>assistant' }}{%- if message.content %}{{- '\\n' + message.content }}{%- endif %}"
    "{%- for call in message.tool_calls %}"
    '{{- \'\\n<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}"
    "{%- endfor %}{{- '<|im_end|>\\n' }}"
    "{%- elif message.role == 'tool' %}"
    "{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""Qwen2.5's shape: tools in the system message, results of parallel calls grouped in one message of the user."""

LLAMA = (
    "{{- bos_token }}{%- for message in messages %}"
    "{%- if message.role == 'tool' %}"
    "{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}{{- message.content | tojson }}{{- '<|eot_id|>' }}"
    "{%- else %}"
    "{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)
"""Llama 3's shape: contents are trimmed, results are quoted."""

MISTRAL = (
    "{{- bos_token }}{%- for message in messages %}"
    "{%- if message.role == 'user' %}"
    "{%- if loop.index0 and messages[loop.index0 - 1].role == 'user' %}"
    "{{- raise_exception('roles must alternate') }}{%- endif %}"
    "{%- if tools and loop.last %}"
    "{{- '[AVAILABLE_TOOLS] ' }}{{- tools | tojson }}{{- '[/AVAILABLE_TOOLS]' }}{%- endif %}"
    "{{- '[INST] ' + message.content + '[/INST]' }}"
    "{%- elif message.role == 'assistant' and message.tool_calls %}"
    "{{- '[TOOL_CALLS] [' }}{%- for call in message.tool_calls %}"
    "{%- if call.id | length != 9 %}{{- raise_exception('ids have nine characters') }}{%- endif %}"
    "{{- {'name': call.function.name, 'arguments': call.function.arguments, 'id': call.id} | tojson }}"
    "{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- ']' + eos_token }}"
    "{%- elif message.role == 'assistant' %}{{- ' ' + message.content + eos_token }}"
    "{%- elif message.role == 'tool' %}"
    "{%- if message.tool_call_id | length != 9 %}{{- raise_exception('ids have nine characters') }}{%- endif %}"
    "{{- '[TOOL_RESULTS] {\"content\": ' + message.content + ', \"call_id\": \"' + message.tool_call_id + '\"}' }}"
    "{{- '[/TOOL_RESULTS]' }}"
    "{%- else %}{{- raise_exception('no role ' + message.role) }}{%- endif %}{%- endfor %}"
)
"""Mistral's shape: no system message, alternating roles, ids of nine characters, no prompt for the assistant."""

GEMMA = (
    "{{- bos_token }}{%- for message in messages %}"
    "{%- if message.role == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}"
    "{%- if message.role not in ['user', 'assistant'] or (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{%- endif %}"
    "{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}"
    "{{- message.content | trim + '<end_of_turn>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"
)
"""Gemma's shape: neither system nor tool, alternating roles, trimmed contents."""

GLM = (
    "{{- '[gMASK]<sop>' }}{%- for message in messages %}"
    "{%- if message.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|observation|>' }}{%- endif %}"
    "{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}"
    "{%- else %}{{- '<|' + message.role + '|>\\n' + message.content }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}"
)
"""GLM's shape: nothing ends a turn but the first token of the next."""

TEMPLATES = {"qwen": QWEN, "llama": LLAMA, "mistral": MISTRAL, "gemma": GEMMA, "glm": GLM}
NAMED = {
    "qwen": {"eos_token": "<|im_end|>"},
    "llama": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "mistral": {"bos_token": "<s>", "eos_token": "</s>"},
    "gemma": {"bos_token": "<s>", "eos_token": "<end_of_turn>"},
    "glm": {"eos_token": "<|endoftext|>"},
}


@cache
def bpe() -> Tokenizer:
    """A byte-level BPE with the control tokens of many families, trained on this file."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=CONTROL.split(),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(Path(__file__).read_text(encoding="utf-8").splitlines(), trainer)
    made.add_tokens([AddedToken(word, special=False, normalized=False) for word in WORDS.split()])
    return made


def tokenizer(family: str) -> FastTokenizer:
    return FastTokenizer(bpe(), name=f"tests/{family}", chat_template=TEMPLATES[family], variables=NAMED[family])


def write_folder(folder: Path, family: str = "qwen", **config: Any) -> Path:
    """A model's folder, as the hub has them."""
    bpe().save(str(folder / "tokenizer.json"))
    said = {"chat_template": TEMPLATES[family], **NAMED[family], **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(said), encoding="utf-8")
    return folder


CODE_TOOL = OpenAIFunctionToolSchema.model_validate(
    {
        "type": "function",
        "function": {
            "name": "code_interpreter",
            "description": "Runs a program.",
            "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
        },
    }
)


class TinySyntax:
    """`CALL name {…}` on a line of its own."""

    name = "tiny"
    stop: tuple[str, ...] = ()

    def parse(self, text: str, tools: Tools = ()) -> ParsedTurn:
        calls: list[ParsedCall] = []
        malformed: list[MalformedCall] = []
        said: list[str] = []
        for line in text.split("\n"):
            if not line.lstrip().startswith("CALL "):
                said.append(line)
                continue
            name, _, arguments = line.lstrip().removeprefix("CALL ").partition(" ")
            problem = decode_arguments(arguments)[1]
            if problem:
                malformed.append(MalformedCall(line, problem))
            else:
                calls.append(ParsedCall(name, arguments))
        return ParsedTurn("\n".join(said), calls=tuple(calls), malformed=tuple(malformed))

    def introduce(self, tools: Tools) -> str:
        return f"You can call {', '.join(tool.function.name for tool in tools)}." if tools else ""

    def write(self, calls: Any) -> str:
        return "\n".join(f"CALL {call.name} {call.arguments}" for call in calls)


TINY: CallSyntax = TinySyntax()


# Real templates -------------------------------------------------------------------------------------------------------

LOOKS_SPECIAL = re.compile(
    r"<[|｜][^<>|｜\s']{1,40}[|｜]>|<\|[a-z_]+>|<[a-z_]+\|>|\[/?[A-Z_]{2,20}\]|</?s>|<(?:start|end)_of_turn>|｜DSML｜"
    r"|\[e~\[|\]~b\]|\]~!b\[|<\|\"\|>|</assistant>|<SPECIAL_\d+>|<seed:[be]os>|\]<\]minimax\[>\["
)


def open_template(name: str) -> tuple[FastTokenizer, TemplateFormat]:
    """With a small vocabulary, and everything in the template that looks like a special token."""
    source = next(file for file in template_files() if file.stem == name).read_text(encoding="utf-8")
    backend = Tokenizer.from_str(bpe().to_str())
    tokens = [*sorted(set(LOOKS_SPECIAL.findall(source))), "<BOS>", "<EOS>", "<｜hy_eos:opensource｜>"]
    backend.add_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    named = {"bos_token": "<BOS>", "eos_token": "<EOS>"}
    made = FastTokenizer(backend, name=name, chat_template=source, variables=named)
    chat = open_format(made)
    assert isinstance(chat, TemplateFormat)
    return made, chat
