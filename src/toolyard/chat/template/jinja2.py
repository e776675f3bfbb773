"""Chat templates: Jinja with the variables they expect, sandboxed because they come from models."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from toolyard.errors import ChatError, ConfigError
from toolyard.messages import JSON

_LONGEST = 100_000_000
"""Maximum characters of a rendered conversation."""
_LONGEST_LOOPS = 1_000_000
_LARGEST_POWER = 64
_HELLO: list[JSON] = [{"role": "user", "content": "Hello"}]


class ChatTemplate:
    """A compiled template. It is stateless: `render` may be called from anywhere."""

    def __init__(self, source: str, variables: Mapping[str, Any], *, name: str) -> None:
        """`variables`: what else the template may use: bos_token, eos_token, enable_thinking, date_string…

        A template that only supports conversations with tools fails without any; it is then given an empty list.

        Raises:
            ConfigError: it is not a valid template.
        """
        self.source = source
        self._name = name
        self.variables = dict(variables)
        try:
            self._template = _compile(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template of {name} is not valid: {error}") from None
        self.no_tools: list[JSON] | None = None
        with contextlib.suppress(ChatError):
            try:
                self.render(_HELLO, prompt=True)
            except ChatError:
                self.no_tools = []
                self.render(_HELLO, prompt=True)

    def render(self, messages: Sequence[JSON], *, tools: Sequence[JSON] | None = None, prompt: bool) -> str:
        """Render the conversation as text. `prompt`: up to where the assistant's turn starts. A message's `images` is
        its number of images; templates get them as parts after its content.

        Raises:
            ChatError: the template refuses it.
        """
        converted = [_in_parts(message) if "images" in message else message for message in messages]
        given = {"messages": converted, "tools": tools or self.no_tools, "add_generation_prompt": prompt}
        variables = {"range": _Range(), **self.variables, **given}
        try:
            return _join(self._template.generate(variables))
        except Exception as error:  # a template can raise anything that Python can
            roles = ", ".join(str(message["role"]) for message in messages)
            raise ChatError(f"the chat template of {self._name} refuses a conversation of {roles}: {error}") from None


def _in_parts(message: JSON) -> JSON:
    converted = [{"type": "text", "text": message["content"]}] if message["content"] else []
    parts = [*converted, *({"type": "image"} for _ in range(message["images"]))]
    return {**{key: value for key, value in message.items() if key != "images"}, "content": parts}


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for other libraries; here it only renders its content."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _join(pieces: Iterable[str]) -> str:
    written: list[str] = []
    size = 0
    for piece in pieces:
        size += len(piece)
        if size > _LONGEST:
            raise jinja2.TemplateError(f"it writes more than {_LONGEST} characters")
        written.append(piece)
    return "".join(written)


class _Range:
    """`range` with a limit: all ranges of one rendering share a budget."""

    def __init__(self) -> None:
        self._left = _LONGEST_LOOPS

    def __call__(self, *limits: int) -> range:
        made = range(*limits)
        self._left -= 1 + len(made)
        if self._left < 0:
            raise jinja2.TemplateError(f"it loops more than {_LONGEST_LOOPS} times")
        return made


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Lets a template change lists, as Kimi's do: they are its own, or copies for one rendering. Limits the size of
    strings, lists and numbers, so that they cannot exhaust memory."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        one, other = (len(side) if hasattr(side, "__len__") else side for side in (left, right))
        repeats = operator == "*" and (one is not left or other is not right)
        if (repeats and one * other > _LONGEST) or (operator == "**" and other > _LARGEST_POWER):
            raise jinja2.TemplateError(f"the result of {operator} is too large")
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return (isinstance(obj, list) and attr in ("append", "pop")) or super().is_safe_attribute(obj, attr, value)


@functools.lru_cache(maxsize=8)
def _compile(source: str) -> jinja2.Template:
    """Cached: it takes 0.1 s, and a template is compiled to choose a format and again to open it."""
    return _environment().from_string(source)


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
    # Jinja's own filter writes `<` as \u003c, which models were not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)  # noqa: DTZ005 - the day where the user is, as templates expect
