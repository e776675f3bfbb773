"""Chat templates: Jinja, with the names that they are written against. They come from models, so they run sandboxed."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from toolyard.errors import ChatError, ConfigError
from toolyard.messages import JSON

_HELLO: list[JSON] = [{"role": "user", "content": "Hello"}]


class ChatTemplate:
    """A compiled template. It has no state: `render` may be called from anywhere."""

    def __init__(self, source: str, variables: Mapping[str, Any], *, name: str) -> None:
        """`variables`: what else the template may ask for: bos_token, eos_token, enable_thinking, date_string…

        A template that is only for conversations with tools fails without any: it is then given an empty list.

        Raises:
            ConfigError: it is no template.
        """
        self.source = source
        self._name = name
        self._variables = dict(variables)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template of {name} is not valid: {error}") from None
        self._no_tools: list[JSON] | None = None
        with contextlib.suppress(ChatError):
            try:
                self.render(_HELLO, prompt=True)
            except ChatError:
                self._no_tools = []
                self.render(_HELLO, prompt=True)

    def render(self, messages: Sequence[JSON], *, tools: Sequence[JSON] | None = None, prompt: bool) -> str:
        """The conversation as text. `prompt`: up to where the assistant begins to speak. How many images a message has
        is its `images`; templates get them as parts behind its content.

        Raises:
            ChatError: the template refuses it.
        """
        said = [_in_parts(message) if "images" in message else message for message in messages]
        told = {"messages": said, "tools": tools or self._no_tools, "add_generation_prompt": prompt}
        variables = {**self._variables, **told}
        try:
            return self._template.render(variables)
        except Exception as error:  # a template can raise anything that Python can
            roles = ", ".join(str(message["role"]) for message in messages)
            raise ChatError(f"the chat template of {self._name} refuses a conversation of {roles}: {error}") from None


def _in_parts(message: JSON) -> JSON:
    said = [{"type": "text", "text": message["content"]}] if message["content"] else []
    parts = [*said, *({"type": "image"} for _ in range(message["images"]))]
    return {**{key: value for key, value in message.items() if key != "images"}, "content": parts}


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what an assistant said, for others; here it is what stands in it."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Lets a template change lists, as Kimi's do. They are its own, or made for one rendering."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return (isinstance(obj, list) and attr in ("append", "pop")) or super().is_safe_attribute(obj, attr, value)


def _environment() -> jinja2.Environment:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation])
    environment.filters["tojson"] = _to_json
    names: dict[str, Any] = environment.globals  # pyright: ignore[reportAssignmentType] - typed for its defaults only
    names.update(raise_exception=_refuse, strftime_now=_now)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own writes `<` as \u003c, which models were not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)  # noqa: DTZ005 - the day where the user is, as templates expect
