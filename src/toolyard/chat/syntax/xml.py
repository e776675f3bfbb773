"""Calls whose arguments are tags, with plain text as values: Qwen3-Coder, GLM, MiniMax, DeepSeek's DSML and others.

Limitations: text that looks like JSON is JSON, unless the tool's schema says that it is a string. Names and keys cannot
contain the characters that end them, or line breaks. A closing tag within a value is part of the value unless it is
followed by something that may follow a value; and no value can contain the start of another call. `write` refuses what
would be parsed as something else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from toolyard.chat.protocol import ParsedCall, Tools
from toolyard.chat.syntax.base import make_call
from toolyard.chat.syntax.scanning import BrokenError, Finder, decode_value, quote, scan_object, skip_space
from toolyard.chat.syntax.tagged import Tagged
from toolyard.chat.syntax.values import read_value
from toolyard.errors import ChatError
from toolyard.messages import OpenAIFunctionToolSchema, decode_arguments


class _Xml(Tagged):
    head: re.Pattern[str]
    """What is between the opening tag and the first argument; group 1 is the name."""
    argument: re.Pattern[str]
    """What precedes a value; group 1 is its key, and group 2, if present, says whether the value is a string."""
    value_end: re.Pattern[str]
    """What ends a value, including what must follow, so that a closing tag within a value does not end it."""
    next_call: re.Pattern[str]
    """The start of another call: an unclosed value must not swallow it."""
    forms: tuple[str, str]
    """The form of a call's head and of an argument, for messages to the model."""
    spelled: tuple[str, str, str]
    """A call up to its arguments, with NAME; an argument, with KEY, VALUE and TYPE; and the end of the call."""
    around = ("", "\n", "")
    """What is before, between and after the calls of a turn."""
    padding = ""
    """What surrounds values and is not part of them."""
    wrapper = ("", "")
    """What may surround values that look like tags."""
    types: Mapping[type, str] = MappingProxyType({})
    """How an argument gives the type of its value; empty if it does not."""

    def end_of(self, key: str) -> re.Pattern[str]:
        return self.value_end

    def body(self, finder: Finder, at: int, tools: Tools) -> tuple[ParsedCall, int]:
        text = finder.text
        head = self.head.match(text, at)
        if head is None:
            raise BrokenError(f"a call begins with {self.forms[0]}", at)
        name, arguments = head[1].strip(), dict[str, str]()
        at = skip_space(text, head.end())
        while (argument := self.argument.match(text, at)) is not None:
            key, begin = argument[1].strip(), argument.end()
            end = finder.find(self.end_of(key), begin)
            if end is None or finder.start(self.next_call, begin) < end.start():
                raise BrokenError(f"the argument {key!r} is not closed: write {self.forms[1]}", begin)
            value = text[begin : end.start()].removeprefix(self.padding).removesuffix(self.padding)
            given_type = argument[2] if self.types else None
            arguments[key] = self.read(tools, name, key, value, given_type)
            at = end.end()
        if not text.startswith(self.call[1], at):
            if at == len(text):
                raise BrokenError(f"the call is not closed: write {self.call[1]} after its arguments", at)
            raise BrokenError(f"after the name come arguments, {self.forms[1]}, and then {self.call[1]}", at)
        members = ", ".join(f"{quote(key)}: {value}" for key, value in arguments.items())
        return make_call(name, f"{{{members}}}", at), at

    def read(self, tools: Tools, name: str, key: str, value: str, given_type: str | None) -> str:
        """Return the JSON of a value. `given_type`: the type that the argument gives."""
        opening, closing = self.wrapper
        if opening and value.startswith(opening) and value.endswith(closing):
            return quote(value[len(opening) : -len(closing)])
        if given_type is None:
            return read_value(tools, name, key, value)
        return quote(value) if given_type == self.types[str] or not decode_value(value)[1] else value.strip()

    def spell(self, calls: Sequence[ParsedCall]) -> str:
        before, between, behind = self.around
        return before + between.join(self._spelled(*each) for each in enumerate(calls, 1)) + behind

    def _spelled(self, index: int, call: ParsedCall) -> str:
        head, argument, end = self.spelled
        values = decode_arguments(call.arguments)[0]
        written = [_fill(head, {"NAME": call.name, "INDEX": str(index)})]
        for key, value in _texts(call).items():
            kind = self._kind(values[key])
            if self.wrapper[0] and isinstance(values[key], str) and _AWKWARD.search(value):
                value = f"{self.wrapper[0]}{value}{self.wrapper[1]}"
            written.append(_fill(argument, {"KEY": key, "VALUE": value, "TYPE": kind}))
        return "".join([*written, end])

    def _kind(self, value: object) -> str:
        return self.types.get(type(value), self.types[object]) if self.types else ""

    def roundtrips(self, written: str, calls: Sequence[ParsedCall]) -> bool:
        """Compare as text: the syntax does not decide whether `5` is a number or a string, unless it gives types."""
        texts = [decode_arguments(call.arguments)[0] if self.types else _texts(call) for call in calls]
        known: dict[str, dict[str, object]] = {}
        for call, values in zip(calls, texts, strict=True):
            known.setdefault(call.name, {}).update({key: {"type": "string"} for key in values})
        if not all(known):
            return False
        functions = [{"name": name, "parameters": {"properties": keys}} for name, keys in known.items()]
        turn = self.parse(written, [OpenAIFunctionToolSchema.model_validate({"function": each}) for each in functions])
        read = [(call.name, decode_arguments(call.arguments)[0]) for call in turn.calls]
        meant = [(call.name, values) for call, values in zip(calls, texts, strict=True)]
        return read == meant and not turn.malformed and not turn.text


_PLACE = re.compile("NAME|INDEX|KEY|VALUE|TYPE")
_AWKWARD = re.compile("[<&\\n]")


def _fill(form: str, places: Mapping[str, str]) -> str:
    # In one pass: an inserted value may look like the next placeholder.
    return _PLACE.sub(lambda place: places[place[0]], form)


class Qwen3Coder(_Xml):
    """`<tool_call><function=NAME><parameter=KEY>…</parameter></function></tool_call>` (Qwen3-Coder and Qwen3.5).

    `<tool_call>` is optional, since the models often omit it.
    """

    name = "qwen3_coder"
    section = ("<tool_call>", "</tool_call>")
    call = ("<function=", "</function>")
    head = re.compile(r"([^<>\n]*+)>")
    argument = re.compile(r"<parameter=([^<>\n]*+)>")
    value_end = re.compile(r"</parameter>\s*+(?=<parameter=|</function>)")
    next_call = re.compile(r"(?:<tool_call>|</function>)\s*+<function=[^<>\n]++>")
    forms = ("<function=NAME>", "<parameter=KEY>…</parameter>")
    spelled = (
        "<tool_call>\n<function=NAME>\n",
        "<parameter=KEY>\nVALUE\n</parameter>\n",
        "</function>\n</tool_call>",
    )
    padding = "\n"


class SeedOss(Qwen3Coder):
    """Like Qwen3-Coder's, in `<seed:tool_call>`, and without line breaks around values."""

    name = "seed_oss"
    thinking = (("<seed:think>", "</seed:think>"),)
    section = ("<seed:tool_call>", "</seed:tool_call>")
    next_call = re.compile(r"(?:<seed:tool_call>|</function>)\s*+<function=[^<>\n]++>")
    spelled = (
        "<seed:tool_call>\n<function=NAME>\n",
        "<parameter=KEY>VALUE</parameter>\n",
        "</function>\n</seed:tool_call>",
    )
    padding = ""


class Glm45(_Xml):
    """`<tool_call>NAME`, then `<arg_key>KEY</arg_key><arg_value>…</arg_value>` (GLM 4.5 and later)."""

    name = "glm45"
    call = ("<tool_call>", "</tool_call>")
    head = re.compile(r"\s*+([^<>\n]*+)")
    argument = re.compile(r"<arg_key>([^<\n]*+)</arg_key>\s*+<arg_value>")
    value_end = re.compile(r"</arg_value>\s*+(?=<arg_key>|</tool_call>)")
    next_call = re.compile(r"<tool_call>\s*+[^<>\n]++\s*+(?:<arg_key>|</tool_call>)")
    forms = ("<tool_call>NAME", "<arg_key>KEY</arg_key><arg_value>…</arg_value>")
    spelled = ("<tool_call>NAME\n", "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n", "</tool_call>")


class Hy3(_Xml):
    """Like GLM's, with a separator after the name and `:opensource` in every tag (Hunyuan 3)."""

    name = "hy3"
    thinking = (("<think:opensource>", "</think:opensource>"),)
    section = ("<tool_calls:opensource>", "</tool_calls:opensource>")
    call = ("<tool_call:opensource>", "</tool_call:opensource>")
    head = re.compile(r"\s*+([^<>\n]*+)<tool_sep:opensource>")
    argument = re.compile(r"<arg_key:opensource>([^<\n]*+)</arg_key:opensource>\s*+<arg_value:opensource>")
    value_end = re.compile(r"</arg_value:opensource>\s*+(?=<arg_key:opensource>|</tool_call:opensource>)")
    next_call = re.compile(r"<tool_call:opensource>\s*+[^<>\n]++<tool_sep:opensource>")
    forms = (
        "<tool_call:opensource>NAME<tool_sep:opensource>",
        "<arg_key:opensource>KEY</arg_key:opensource><arg_value:opensource>…</arg_value:opensource>",
    )
    spelled = (
        "<tool_call:opensource>NAME<tool_sep:opensource>\n",
        "<arg_key:opensource>KEY</arg_key:opensource>\n<arg_value:opensource>VALUE</arg_value:opensource>\n",
        "</tool_call:opensource>",
    )
    around = ("<tool_calls:opensource>\n", "\n", "\n</tool_calls:opensource>")


class _Invoke(_Xml):
    """`<invoke name="NAME"><parameter name="KEY">…</parameter></invoke>`, with a model-specific mark in each tag."""

    def __init_subclass__(cls, *, mark: str, sections: tuple[str, ...]) -> None:
        """`mark`: follows each `<` and `</`. `sections`: names of the tag around calls; the first is written."""
        escaped = re.escape(mark)
        kind = r"""(?:\s++string=["']?(\w++)["']?)?""" if cls.types else ""
        cls.section = tuple(f"<{slash}{each}>" for each in sections for slash in ("", "/"))
        cls.call = (f"<{mark}invoke", f"</{mark}invoke>")
        cls.head = re.compile(r"""\s++name=["']?([^"'<>\n]*+)["']?>""")
        cls.argument = re.compile(rf"""<{escaped}parameter\s++name=["']?([^"'<>\n]*+)["']?{kind}>""")
        cls.value_end = re.compile(rf"</{escaped}parameter>\s*+(?=<{escaped}parameter\s|</{escaped}invoke>)")
        openings = "|".join(f"<{re.escape(each)}>" for each in sections)
        cls.next_call = re.compile(rf"(?:{openings}|</{escaped}invoke>)\s*+<{escaped}invoke\s++name=")
        cls.forms = (f'<{mark}invoke name="NAME">', f'<{mark}parameter name="KEY">…</{mark}parameter>')
        type_attribute = ' string="TYPE"' if cls.types else ""
        cls.spelled = (
            f'<{mark}invoke name="NAME">\n',
            f'<{mark}parameter name="KEY"{type_attribute}>VALUE</{mark}parameter>\n',
            f"</{mark}invoke>",
        )
        cls.around = (f"<{sections[0]}>\n", "\n", f"\n</{sections[0]}>")


class MiniMaxM2(_Invoke, mark="", sections=("minimax:tool_call",)):
    """`<minimax:tool_call><invoke name="NAME"><parameter name="KEY">…</parameter></invoke></minimax:tool_call>`."""

    name = "minimax_m2"


class Atem(_Invoke, mark="atem:", sections=("atem:function_calls",)):
    """Like MiniMax M2's, with `atem:` in every tag (Muse Glimmer)."""

    name = "atem"


class Dsml(_Invoke, mark="｜DSML｜", sections=("｜DSML｜function_calls", "｜DSML｜tool_calls")):
    """Like MiniMax M2's, with `｜DSML｜` in every tag; each argument says whether it is a string (DeepSeek V3.2)."""

    name = "dsml"
    types = MappingProxyType({str: "true", object: "false"})


class DsmlV4(_Invoke, mark="｜DSML｜", sections=("｜DSML｜tool_calls", "｜DSML｜function_calls")):
    """Like V3.2's, in a section of another name (DeepSeek V4)."""

    name = "dsml_v4"
    types = MappingProxyType({str: "true", object: "false"})


class MiniCpm5(_Xml):
    """`<function name="NAME"><param name="KEY">…</param></function>`; strings with `<`, `&` or line breaks in CDATA."""

    name = "minicpm5"
    call = ("<function name=", "</function>")
    head = re.compile(r"""["']?([^"'<>\n]*+)["']?>""")
    argument = re.compile(r"""<param\s++name=["']?([^"'<>\n]*+)["']?>""")
    value_end = re.compile(r"</param>\s*+(?=<param\s|</function>)")
    next_call = re.compile(r"</function>\s*+<function name=")
    forms = ('<function name="NAME">', '<param name="KEY">…</param>')
    spelled = ('<function name="NAME">', '<param name="KEY">VALUE</param>', "</function>")
    wrapper = ("<![CDATA[", "]]>")


class KimiK3(_Xml):
    """`<|open|>call tool="NAME" index="1"<|sep|>`, then arguments with their types."""

    name = "kimi_k3"
    thinking = (("<|open|>think<|sep|>", "<|close|>think<|sep|>"),)
    section = ("<|open|>tools<|sep|>", "<|close|>tools<|sep|>")
    frame = ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>")
    call = ("<|open|>call ", "<|close|>call<|sep|>")
    head = re.compile(r"""tool="([^"<>\n]*+)"(?: index="[0-9]*+")?<\|sep\|>""")
    argument = re.compile(r"""<\|open\|>argument key="([^"<>\n]*+)"(?: type="(\w++)")?<\|sep\|>""")
    value_end = re.compile(r"<\|close\|>argument<\|sep\|>\s*+(?=<\|open\|>argument |<\|close\|>call<)")
    next_call = re.compile(r"<\|close\|>call<\|sep\|>\s*+<\|open\|>call ")
    forms = ('<|open|>call tool="NAME" index="1"<|sep|>', '<|open|>argument key="KEY"<|sep|>…<|close|>argument<|sep|>')
    spelled = (
        '<|open|>call tool="NAME" index="INDEX"<|sep|>',
        '<|open|>argument key="KEY" type="TYPE"<|sep|>VALUE<|close|>argument<|sep|>',
        "<|close|>call<|sep|>",
    )
    around = ("<|open|>tools<|sep|>", "", "<|close|>tools<|sep|>")
    types = MappingProxyType(
        {str: "string", bool: "boolean", int: "number", float: "number", list: "array", dict: "object", object: "null"}
    )


class MiniMaxM3(_Xml):
    """`<invoke name="NAME"><KEY>…</KEY></invoke>`, with a token before each tag, and tags for objects and lists too.

    The token cannot be written as text, so strings need no escaping.
    """

    name = "minimax_m3"
    thinking = (("<mm:think>", "</mm:think>"),)
    section = ("]<]minimax[>[<tool_call>", "]<]minimax[>[</tool_call>")
    call = ("]<]minimax[>[<invoke", "]<]minimax[>[</invoke>")
    head = re.compile(r"""\s++name=["']?([^"'<>\n]*+)["']?>""")
    argument = re.compile(r"\]<\]minimax\[>\[<([^<>/\n][^<>\n]*+)>")
    next_call = re.compile(r"\]<\]minimax\[>\[<invoke\s")
    forms = (']<]minimax[>[<invoke name="NAME">', "]<]minimax[>[<KEY>…]<]minimax[>[</KEY>")
    spelled = (
        ']<]minimax[>[<invoke name="NAME">',
        "]<]minimax[>[<KEY>VALUE]<]minimax[>[</KEY>",
        "]<]minimax[>[</invoke>",
    )
    around = ("]<]minimax[>[<tool_call>\n", "\n", "\n]<]minimax[>[</tool_call>")

    def end_of(self, key: str) -> re.Pattern[str]:
        return re.compile(rf"\]<\]minimax\[>\[</{re.escape(key)}>\s*+")

    def read(self, tools: Tools, name: str, key: str, value: str, given_type: str | None) -> str:
        if not self.argument.match(value):
            return super().read(tools, name, key, value, given_type)
        return json.dumps(self._nested(value), ensure_ascii=False)

    def _nested(self, text: str) -> Any:
        """Parse the tags in `text`: a list of items, an object, or a value."""
        found, at = list[tuple[str, Any]](), 0
        while (tag := self.argument.match(text, at)) is not None:
            end = self.end_of(tag[1]).search(text, tag.end())
            if end is None:
                raise BrokenError(f"<{tag[1]}> is not closed within a value", at)
            found.append((tag[1], self._nested(text[tag.end() : end.start()])))
            at = end.end()
        if not found:
            value, is_json = decode_value(text)
            return value if is_json and not isinstance(value, str) else text
        items = all(key == "item" for key, _ in found)
        return [value for _, value in found] if items else dict(found)


def _texts(call: ParsedCall) -> dict[str, str]:
    """Return the arguments as written: strings as they are, everything else as JSON.

    Raises:
        ChatError: they are not a JSON object.
    """
    values, problem = decode_arguments(call.arguments)
    if problem is not None:
        raise ChatError(f"the call of {call.name!r} cannot be written: {problem}")
    spans = scan_object(call.arguments, 0).members
    return {
        key: value if isinstance(value, str) else call.arguments[spans[key][0] : spans[key][1]]
        for key, value in values.items()
    }
