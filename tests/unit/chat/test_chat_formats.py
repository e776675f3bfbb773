"""Which format a model gets."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from chat_models import CODE_TOOL, QWEN, TEMPLATES, bpe, tokenizer
from toolyard.chat.conformance import check_format
from toolyard.chat.formats import open_format
from toolyard.chat.syntax import SYNTAXES
from toolyard.chat.tokenizers.fast import FastTokenizer
from toolyard.errors import ConfigError
from toolyard.messages import Message
from toolyard.testing.engine.byte_tokenizer import ByteTokenizer

HELLO = Message("user", "Hello")


@pytest.mark.parametrize(
    ("told", "name"),
    [
        ("<tool_call>\n<function=f>", "qwen3_coder"),
        ("<tool_call>f<arg_key>", "glm45"),
        ("<｜tool▁calls▁begin｜>", "deepseek_v3"),
        ("<|tool_calls_section_begin|>", "kimi_k2"),
        ("<minimax:tool_call>", "minimax_m2"),
    ],
)
def test_a_template_that_writes_no_calls_gives_away_its_syntax(told: str, name: str) -> None:
    made = tokenizer("qwen")
    made.chat_template = f"{{# {told} #}}{TEMPLATES['glm']}"
    assert open_format(made).name == f"template:{name}"


def test_auto_refuses_a_template_whose_calls_nobody_reads() -> None:
    made = tokenizer("qwen")
    made.chat_template = QWEN.replace("<tool_call>", "<my_call>").replace("</tool_call>", "</my_call>")
    with pytest.raises(ConfigError, match=r"writes calls in no known syntax; .* hermes, qwen3_coder, "):
        open_format(made)
    assert open_format(made, format="code_block").name == "template:code_block"


def test_auto_takes_the_template_and_what_it_knows_of_tools() -> None:
    chat = open_format(tokenizer("qwen"))
    assert chat.name == "template:hermes"
    assert "<tools>" in chat.decode(chat.render([HELLO], [CODE_TOOL]))
    assert open_format(tokenizer("gemma")).name == "template:hermes"
    assert open_format(tokenizer("mistral")).name == "template:mistral"


def test_a_syntax_of_ones_own_choice_replaces_the_templates() -> None:
    for name in ("code_block", "template:code_block"):
        chat = open_format(tokenizer("qwen"), format=name, tool_role="user", syntax_options={"tool": "python"})
        assert chat.name == "template:code_block"
        assert "<tools>" not in chat.decode(chat.render([HELLO], [CODE_TOOL]))
    assert open_format(tokenizer("qwen"), format="template:hermes").name == "template:hermes"


def test_a_hub_id_takes_the_same_road_as_a_folder() -> None:
    made = FastTokenizer(bpe(), name="Qwen/Qwen3-8B", chat_template=QWEN, variables={"eos_token": "<|im_end|>"})
    assert open_format(made).name == "template:hermes"
    assert open_format(made, format="renderers").name == "renderers:qwen3"
    assert open_format(tokenizer("qwen"), format="renderers:qwen3").name == "renderers:qwen3"


def test_a_template_for_tools_is_used_only_with_tools() -> None:
    """Hermes' `tool_use` loops over tools without asking whether there are any."""
    made = tokenizer("qwen")
    made.chat_template = "{%- for tool in tools %}{{- tool.function.name + ' ' }}{%- endfor %}" + QWEN
    alone = open_format(made)
    assert alone.decode(alone.render([HELLO])) == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    made.plain_template = TEMPLATES["glm"]
    chat = open_format(made)
    assert chat.decode(chat.render([HELLO])) == "[gMASK]<sop><|user|>\nHello<|assistant|>\n"
    assert chat.decode(chat.render([HELLO], [CODE_TOOL])).startswith("code_interpreter <|im_start|>")
    assert chat.decode(chat.extension([], [], [HELLO])) == "<|user|>\nHello<|assistant|>\n"


def test_a_template_can_be_given_as_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text(TEMPLATES["glm"])
    chat = open_format(tokenizer("qwen"), chat_template=file)
    assert chat.decode(chat.render([HELLO])) == "[gMASK]<sop><|user|>\nHello<|assistant|>\n"
    with pytest.raises(ConfigError, match=r"chat_template '.*missing.jinja' cannot be read"):
        open_format(tokenizer("qwen"), chat_template=tmp_path / "missing.jinja")


def test_without_a_template_chatml_is_taken_where_its_tokens_are() -> None:
    chat = open_format(ByteTokenizer(chat_template=None))
    assert chat.decode(chat.render([HELLO])) == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    bare = ByteTokenizer(chat_template=None)
    bare.special_tokens = {}
    with pytest.raises(ConfigError, match="name it with chat_template"):
        open_format(bare)


@pytest.mark.parametrize("wrong", ["hermess", "template:hermess", "renderers:qwen33", "renderers"])
def test_a_format_that_is_not_there_is_told_with_those_that_are(wrong: str) -> None:
    with pytest.raises(ConfigError, match=r"hermes, |qwen3, "):
        open_format(tokenizer("qwen"), format=wrong)


def test_a_family_whose_tokens_are_missing_is_told() -> None:
    with pytest.raises(ConfigError, match=r"does not fit renderers:inkling: .*format template"):
        open_format(tokenizer("qwen"), format="renderers:inkling")


@pytest.mark.parametrize(
    ("family", "syntax"),
    [("qwen", name) for name in SYNTAXES]
    + [(name, "hermes") for name in TEMPLATES]
    + [pytest.param(name, "code_block", marks=pytest.mark.slow) for name in TEMPLATES],
)
def test_every_syntax_and_every_template_is_exact(family: str, syntax: str) -> None:
    made = tokenizer(family)
    report = check_format(open_format(made, format=syntax), made, conversations=2)
    assert report.passed, [(check.name, check.seen) for check in report.checks]


def test_a_format_is_opened_without_what_it_does_not_need(tmp_path: Path) -> None:
    program = (
        "import sys; from toolyard.chat.formats import open_format;"
        "from toolyard.testing.engine.byte_tokenizer import ByteTokenizer; open_format(ByteTokenizer());"
        "print([name for name in ('torch', 'transformers', 'tokenizers', 'renderers', 'numpy') if name in sys.modules])"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert told.stdout.strip() == "[]"
