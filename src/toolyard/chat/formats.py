"""Choosing the format in which a model is spoken to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from toolyard.chat.protocol import ChatFormat, Tokenizer
from toolyard.errors import ConfigError, MissingDependencyError

TOOL_WRAPPER = "<tool_response>\n{}\n</tool_response>"

_PLAIN_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("harmony", ("<|channel|>", "<|message|>")),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("glm45", ("<arg_key>",)),
    ("qwen3_coder", ("<tool_call>", "<function=")),
    ("hermes", ("<tool_call>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("llama3", ("<|start_header_id|>", "tool_calls")),
)
"""Texts by which a template gives away in which syntax it writes calls; the first that has all of its own."""


def guess_syntax(template: str) -> str | None:
    """The syntax in which a template writes calls; None if it does not look as if it wrote any."""
    return next((name for name, signs in _SIGNS if all(sign in template for sign in signs)), None)


def open_format(
    tokenizer: Tokenizer,
    *,
    format: str = "auto",  # noqa: A002 - the name of the option, everywhere
    chat_template: str | Path | None = None,
    tool_role: Literal["auto", "tool", "user"] = "auto",
    tool_wrapper: str = TOOL_WRAPPER,
    template_kwargs: Mapping[str, Any] | None = None,
    syntax_options: Mapping[str, Any] | None = None,
) -> ChatFormat:
    """How the model of `tokenizer` is spoken to.

    `format`: "auto", the renderer of the package `renderers` if it knows the model by name, else "template".
    "template", the chat template with the syntax of calls that it seems to use, hermes if it does not seem to know
    any. A syntax ("hermes", "code_block", …), the chat template with that one. "renderers" or "renderers:FAMILY".
    `chat_template`: a Jinja file instead of the tokenizer's own. `tool_role`, `tool_wrapper`: see `TemplateFormat`.
    `syntax_options`: of the syntax; see `toolyard.chat.syntaxes`. None of these with renderers, which have their own.
    `template_kwargs`: what the template, or the family, takes besides messages: enable_thinking, say.

    Raises:
        ConfigError: there is no such format, or not for this tokenizer.
    """
    kind, _, detail = format.partition(":")
    if kind == "renderers" or (format == "auto" and chat_template is None and _known_by_name(tokenizer.name)):
        try:
            from toolyard.chat.renderers import open_renderer
        except ModuleNotFoundError as error:
            raise _missing(error) from None
        return open_renderer(tokenizer, detail or None, template_kwargs)
    template = _template(tokenizer, chat_template)
    guessed = guess_syntax(template)
    name = detail if kind == "template" else "" if format == "auto" else format
    name = name or guessed or "hermes"
    try:
        from toolyard.chat.template import TemplateFormat
    except ModuleNotFoundError as error:
        raise _missing(error) from None
    from toolyard.chat.syntaxes import syntax_of

    return TemplateFormat(
        tokenizer,
        syntax_of(name, **(syntax_options or {})),
        template=template,
        native=name == guessed,
        tool_role=tool_role,
        tool_wrapper=tool_wrapper,
        template_kwargs=template_kwargs,
    )


def _known_by_name(name: str) -> bool:
    # Only ids of the hub can be known, and the package takes a second to import: not for a folder.
    if name.count("/") != 1 or Path(name).exists():
        return False
    try:
        from toolyard.chat.renderers import family_of
    except ModuleNotFoundError:
        return False
    return family_of(name) is not None


def _template(tokenizer: Tokenizer, file: str | Path | None) -> str:
    if file is not None:
        try:
            return Path(file).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"chat_template {str(file)!r} cannot be read: {error}") from None
    if tokenizer.chat_template is not None:
        return tokenizer.chat_template
    if {"<|im_start|>", "<|im_end|>"} <= tokenizer.special_tokens.keys():
        return _PLAIN_CHATML
    raise ConfigError(
        f"the tokenizer of {tokenizer.name} has no chat template, and none of ChatML's tokens either: it belongs to a "
        "model that was not trained to chat, or the template is in another file: name it with chat_template"
    )


def _missing(error: ModuleNotFoundError) -> MissingDependencyError:
    return MissingDependencyError(error.name or "jinja2", "chat", "speaking to a model in its chat format")
