"""Choose the chat format for a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from toolyard.chat.protocol import TOOL_WRAPPER, ChatFormat, Tokenizer
from toolyard.errors import ConfigError, MissingDependencyError

_PLAIN_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def open_format(
    tokenizer: Tokenizer,
    *,
    format: str = "auto",  # noqa: A002 - the option's name everywhere
    chat_template: str | Path | None = None,
    tool_role: Literal["auto", "tool", "user"] = "auto",
    tool_wrapper: str = TOOL_WRAPPER,
    template_kwargs: Mapping[str, Any] | None = None,
    syntax_options: Mapping[str, Any] | None = None,
) -> ChatFormat:
    """Open the chat format for the model of `tokenizer`.

    `format`: "auto" or "template" is the chat template with the call syntax it writes, or hermes if it does not support
    tools. A syntax ("hermes", "code_block", …) is the chat template with that syntax. Or "renderers" or
    "renderers:FAMILY".
    `chat_template`: a Jinja file to use instead of the tokenizer's own. `tool_role`, `tool_wrapper`: see
    `TemplateFormat`. `syntax_options`: see `toolyard.chat.syntax`. None of these apply to renderers.
    `template_kwargs`: further variables for the template or the family, for example enable_thinking.

    Raises:
        ConfigError: there is no such format, or not for this tokenizer; or the template writes calls in an unknown
            syntax.
    """
    kind, _, detail = format.partition(":")
    if kind == "renderers":
        try:
            from toolyard.chat.renderers import open_renderer
        except ModuleNotFoundError as error:
            raise _missing(error) from None
        return open_renderer(tokenizer, detail or None, template_kwargs)
    source = _template(tokenizer, chat_template)
    try:
        from toolyard.chat.template import TemplateFormat, native_syntax
    except ModuleNotFoundError as error:
        raise _missing(error) from None
    from toolyard.chat.syntax import SYNTAXES, syntax_of

    native, knows_tools = native_syntax(tokenizer, source, template_kwargs)
    name = detail if kind == "template" else "" if format == "auto" else format
    if not name and native is None and knows_tools:
        raise ConfigError(
            f"the chat template of {tokenizer.name} supports tools, but writes calls in no known syntax; name the "
            f"format in which the model calls: {', '.join(SYNTAXES)}"
        )
    name = name or native or "hermes"
    return TemplateFormat(
        tokenizer,
        syntax_of(name, **(syntax_options or {})),
        template=source,
        without_tools=getattr(tokenizer, "plain_template", None) if chat_template is None else None,
        native=name == native,
        tool_role=tool_role,
        tool_wrapper=tool_wrapper,
        template_kwargs=template_kwargs,
    )


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
        f"the tokenizer of {tokenizer.name} has neither a chat template nor ChatML's tokens: the model was not trained "
        "to chat, or its template is in another file: name it with chat_template"
    )


def _missing(error: ModuleNotFoundError) -> MissingDependencyError:
    return MissingDependencyError(error.name or "jinja2", "chat", "chat formats")
