"""Calls whose arguments are tags, with plain text as values: Qwen3-Coder, GLM 4.5, MiniMax M2.

What they cannot express: a text that looks like JSON is JSON, unless the tool's schema says that it is a string. Names
and keys cannot hold the characters that end them, nor line breaks. A closing tag within a value is part of the value as
long as nothing follows that may follow a value; and no value can hold the beginning of another call. `write` refuses
what would be read back as something else.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from toolyard.chat.protocol import ParsedCall, Tools
from toolyard.chat.scanning import BrokenError, Finder, quote, scan_object, skip_space
from toolyard.chat.syntax_base import make_call
from toolyard.chat.syntax_tagged import Tagged
from toolyard.chat.syntax_values import read_value
from toolyard.errors import ChatError
from toolyard.messages import OpenAIFunctionToolSchema, decode_arguments


class _Xml(Tagged):
    head: re.Pattern[str]
    """Between the opening tag and the first argument; group 1 is the name."""
    argument: re.Pattern[str]
    """Up to a value; group 1 is its key."""
    value_end: re.Pattern[str]
    """Behind a value. What must follow is looked at as well, so that a closing tag in a value is not its end."""
    next_call: re.Pattern[str]
    """The beginning of another call: a value that was not closed must not swallow it."""
    forms: tuple[str, str]
    """Of a call's head and of an argument, for the model."""
    padding = ""
    """Stands around values, and is not part of them."""

    def body(self, finder: Finder, at: int, tools: Tools) -> tuple[ParsedCall, int]:
        text = finder.text
        head = self.head.match(text, at)
        if head is None:
            raise BrokenError(f"a call begins with {self.forms[0]}", at)
        name, arguments = head[1].strip(), dict[str, str]()
        at = skip_space(text, head.end())
        while (argument := self.argument.match(text, at)) is not None:
            key, begin = argument[1].strip(), argument.end()
            end = finder.find(self.value_end, begin)
            if end is None or finder.start(self.next_call, begin) < end.start():
                raise BrokenError(f"the argument {key!r} is not closed: write {self.forms[1]}", begin)
            value = text[begin : end.start()].removeprefix(self.padding).removesuffix(self.padding)
            arguments[key] = read_value(tools, name, key, value)
            at = end.end()
        if not text.startswith(self.call[1], at):
            if at == len(text):
                raise BrokenError(f"the call is not closed: write {self.call[1]} after its arguments", at)
            raise BrokenError(f"after the name come arguments, {self.forms[1]}, and then {self.call[1]}", at)
        members = ", ".join(f"{quote(key)}: {value}" for key, value in arguments.items())
        return make_call(name, f"{{{members}}}", at), at

    def says(self, written: str, calls: Sequence[ParsedCall]) -> bool:
        """Compares texts: whether `5` was a number or a text is not the syntax's to say."""
        texts = [_texts(call) for call in calls]
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


class Qwen3Coder(_Xml):
    """`<tool_call><function=NAME><parameter=KEY>…</parameter></function></tool_call>`, of Qwen3-Coder and Qwen3.5.

    `<tool_call>` may be missing, as the models often leave it out.
    """

    name = "qwen3_coder"
    section = ("<tool_call>", "</tool_call>")
    call = ("<function=", "</function>")
    head = re.compile(r"([^<>\n]*+)>")
    argument = re.compile(r"<parameter=([^<>\n]*+)>")
    value_end = re.compile(r"</parameter>\s*+(?=<parameter=|</function>)")
    next_call = re.compile(r"(?:<tool_call>|</function>)\s*+<function=[^<>\n]++>")
    forms = ("<function=NAME>", "<parameter=KEY>…</parameter>")
    padding = "\n"

    def spell(self, calls: Sequence[ParsedCall]) -> str:
        return "\n".join(
            f"<tool_call>\n<function={call.name}>\n"
            + "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in _texts(call).items())
            + "</function>\n</tool_call>"
            for call in calls
        )


class Glm45(_Xml):
    """`<tool_call>NAME`, then `<arg_key>KEY</arg_key><arg_value>…</arg_value>`, of GLM 4.5 and later."""

    name = "glm45"
    call = ("<tool_call>", "</tool_call>")
    head = re.compile(r"\s*+([^<>\n]*+)")
    argument = re.compile(r"<arg_key>([^<\n]*+)</arg_key>\s*+<arg_value>")
    value_end = re.compile(r"</arg_value>\s*+(?=<arg_key>|</tool_call>)")
    next_call = re.compile(r"<tool_call>\s*+[^<>\n]++\s*+(?:<arg_key>|</tool_call>)")
    forms = ("<tool_call>NAME", "<arg_key>KEY</arg_key><arg_value>…</arg_value>")

    def spell(self, calls: Sequence[ParsedCall]) -> str:
        return "\n".join(
            f"<tool_call>{call.name}\n"
            + "".join(
                f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in _texts(call).items()
            )
            + "</tool_call>"
            for call in calls
        )


class MiniMaxM2(_Xml):
    """`<minimax:tool_call><invoke name="NAME"><parameter name="KEY">…</parameter></invoke></minimax:tool_call>`."""

    name = "minimax_m2"
    section = ("<minimax:tool_call>", "</minimax:tool_call>")
    call = ("<invoke", "</invoke>")
    head = re.compile(r"""\s++name=["']?([^"'<>\n]*+)["']?>""")
    argument = re.compile(r"""<parameter\s++name=["']?([^"'<>\n]*+)["']?>""")
    value_end = re.compile(r"</parameter>\s*+(?=<parameter\s|</invoke>)")
    next_call = re.compile(r"(?:<minimax:tool_call>|</invoke>)\s*+<invoke\s++name=")
    forms = ('<invoke name="NAME">', '<parameter name="KEY">…</parameter>')

    def spell(self, calls: Sequence[ParsedCall]) -> str:
        written = "\n".join(
            f'<invoke name="{call.name}">\n'
            + "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in _texts(call).items())
            + "</invoke>"
            for call in calls
        )
        return f"<minimax:tool_call>\n{written}\n</minimax:tool_call>"


def _texts(call: ParsedCall) -> dict[str, str]:
    """The arguments as they are written: strings as they are, all else as the JSON it is.

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
