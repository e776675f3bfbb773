"""A fenced Python block is a call of the code tool: for models that were not trained to call in JSON.

ReTool's models write `<code>`, with or without a fence in it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from toolyard.chat.protocol import MalformedCall, ParsedCall, Tools
from toolyard.chat.syntax.base import Found, ProseSyntax, Region
from toolyard.chat.syntax.scanning import Finder, quote
from toolyard.errors import ChatError
from toolyard.messages import decode_arguments

_LANGUAGE = r"(?i:python3?|py)"
_LINE = rf"(?P<fence>`{{3,}}){_LANGUAGE}(?:[ \t][^`\n]*+)?\r?(?:\n|\Z)"
_BEGIN = re.compile(
    rf"(?P<indent>^[ \t]*+){_LINE}"
    rf"|(?<!`)(?P<inline>`{{3,}}){_LANGUAGE}[ \t]*+\r?\n"
    r"|(?P<tag>(?:^|(?<=</think>))[ \t]*+<code>)"
    r"|^[ \t]*+(?P<other>`{3,})(?P<language>[^`\n]*+)$",
    re.MULTILINE,
)
"""Small models also open a block in the middle of a line."""
_PYTHON_LINE = re.compile(rf"^[ \t]*+{_LINE}", re.MULTILINE)
_FENCE_IN_TAG = re.compile(rf"\s*+{_LINE}")
_LONGEST = 32
"""A longer fence is closed by one of this length, and is never written."""
_CLOSE = {count: re.compile(rf"^[ \t]*+`{{{count},}}[ \t\r]*+$", re.MULTILINE) for count in range(3, _LONGEST + 1)}
_TAG_END = re.compile("</code>")
_TAG_AFTER_FENCE = re.compile(r"\s*+</code>")
_LEXEME = re.compile(
    r"#[^\n]*+|(?P<quotes>\"{3}|'{3})|\"[^\"\\\n]*+(?:\\[^\n][^\"\\\n]*+)*\"?|'[^'\\\n]*+(?:\\[^\n][^'\\\n]*+)*'?"
    r"|(?P<fence>^[ \t]*+`{3,}[ \t\r]*+$)",
    re.MULTILINE,
)
"""Parts of Python that may hide a fence or quotes; and fences."""
_QUOTES = {quotes: re.compile(rf"(?<!\\){quotes}") for quotes in ('"""', "'''")}
_FENCE_LINE = re.compile(r"^[ \t]*+(`{3,})[ \t\r]*+$", re.MULTILINE)


class CodeBlock(ProseSyntax):
    """A closed block of ```` ```python ```` (or py, or python3), or `<code>…</code>` at the start of a line.

    Blocks in other languages or without one are prose. A fence closes a block if it is alone on its line and not within
    a triple-quoted string; the turn may end right after it. Only calls of one tool with one argument can be expressed,
    and only with code that is not blank.

    The turn ends where a block closes, so that the model sees what its code printed. Since a stop string does not
    indicate what it closes, the turn also ends at a bare opening fence.
    """

    name = "code_block"
    rewrites_arguments = True
    stop = ("\n```\n", "</code>")

    def __init__(
        self, *, tool: str = "code_interpreter", argument: str = "code", calls_end_thinking: bool = True
    ) -> None:
        """`tool` is called with the code as its `argument`."""
        super().__init__(calls_end_thinking=calls_end_thinking)
        self.tool = tool
        self.argument = argument

    def regions(self, text: str, start: int, tools: Tools) -> list[Region]:
        finder, found, at = Finder(text), list[Region](), start
        while (begin := finder.find(_BEGIN, at)) is not None:
            if begin["other"]:
                at = _after_other(finder, begin)
                continue
            if begin["tag"]:
                fenced = _FENCE_IN_TAG.match(text, begin.end())
                region = self._fenced(finder, begin, fenced) if fenced else self._tagged(finder, begin)
            else:
                region = self._fenced(finder, begin, begin)
            found.append(region)
            at = region.end
        return found

    def _fenced(self, finder: Finder, begin: re.Match[str], fence: re.Match[str]) -> Region:
        text, start = finder.text, begin.start()
        ticks = fence["fence"] or fence["inline"]
        close = _closing_fence(finder, fence.end(), min(len(ticks), _LONGEST))
        if close is None:
            why = f"the block was not closed: end the code with a line that contains only {ticks}"
            return Region(start, len(text), (MalformedCall(text[start:], why),))
        tag = _TAG_AFTER_FENCE.match(text, close.end()) if begin["tag"] else None
        end = close.end() if tag is None else tag.end()
        code = text[fence.end() : close.start()].removesuffix("\n")
        if begin["indent"]:
            code = "\n".join(line.removeprefix(begin["indent"]) for line in code.split("\n"))
        return Region(start, end, (self._call(text[start:end], code),))

    def _tagged(self, finder: Finder, tag: re.Match[str]) -> Region:
        text, start = finder.text, tag.start()
        close = finder.find(_TAG_END, tag.end())
        if close is None:
            why = "the block was not closed: end the code with </code>"
            return Region(start, len(text), (MalformedCall(text[start:], why),))
        code = text[tag.end() : close.start()].removeprefix("\n").removesuffix("\n")
        return Region(start, close.end(), (self._call(text[start : close.end()], code),))

    def _call(self, text: str, code: str) -> Found:
        if not code.strip():
            return MalformedCall(text, "there is no code in the block")
        return ParsedCall(self.tool, f"{{{quote(self.argument)}: {quote(code)}}}")

    def spell(self, calls: Sequence[ParsedCall]) -> str:
        return "\n\n".join(map(self._spell, calls))

    def _spell(self, call: ParsedCall) -> str:
        arguments, _ = decode_arguments(call.arguments)
        code = arguments.get(self.argument)
        if call.name != self.tool or arguments.keys() != {self.argument} or not isinstance(code, str):
            raise ChatError(
                f"code_block cannot express this call of {call.name!r}: "
                f"only {self.tool!r} can be called, with {self.argument!r} alone, which is text"
            )
        longest = max((len(line[1]) for line in _FENCE_LINE.finditer(code)), default=0)
        if longest >= _LONGEST:
            raise ChatError(f"code with a line of {longest} backticks cannot be written as a block")
        fence = "`" * max(3, longest + 1)
        return f"{fence}python\n{code}\n{fence}"

    def introduce(self, tools: Tools) -> str:
        if all(tool.function.name != self.tool for tool in tools):
            return ""
        return (
            "You can run Python code. To run code, write it like this:\n\n"
            "```python\nprint(12 * 7)\n```\n\n"
            "The code is run and its output is shown to you. Print the result. Then give the final answer."
        )

    def unoffered(self, tools: Tools) -> dict[str, str]:
        """All but the one tool that runs code; and that one, if it is not in `tools` or does not take the code."""
        known = {tool.function.name: tool.function.parameters for tool in tools}
        why = f"code_block can call only {self.tool!r}: leave this tool out, or use another format, such as hermes"
        found = {name: why for name in known if name != self.tool}
        parameters = known.get(self.tool)
        if parameters is None:
            if known:
                found[self.tool] = (
                    f"code_block calls it, but it is not among the tools ({', '.join(known)}): name the one that runs "
                    "code with syntax_options: {tool: NAME}, or use another format, such as hermes"
                )
        elif parameters.properties and self.argument not in parameters.properties:
            found[self.tool] = (
                f"code_block gives it the code as {self.argument!r}, but it takes {', '.join(parameters.properties)}: "
                "name the right one with syntax_options: {argument: NAME}"
            )
        elif others := [name for name in parameters.required if name != self.argument]:
            found[self.tool] = f"code_block gives it {self.argument!r} alone, but it requires {', '.join(others)}"
        return found


def _after_other(finder: Finder, begin: re.Match[str]) -> int:
    """Return the end of a block that is not Python. A bare fence may be stray: it does not hide Python code before the
    next fence."""
    close = finder.find(_CLOSE[3], begin.end())
    if close is None:
        return begin.end()
    if not begin["language"].strip() and finder.start(_PYTHON_LINE, begin.end()) < close.start():
        return begin.end()
    return close.end()


def _closing_fence(finder: Finder, at: int, count: int) -> re.Match[str] | None:
    """Return the fence that closes the code starting at `at`."""
    text, close = finder.text, _CLOSE[count]
    while (lexeme := _LEXEME.search(text, at)) is not None:
        at = lexeme.end()
        if lexeme["fence"] and len(lexeme["fence"].strip()) >= count:
            return close.match(text, lexeme.start())
        if lexeme["quotes"]:
            end = finder.find(_QUOTES[lexeme["quotes"]], at)
            # Quotes that are only closed after the last fence do not form a string of this block.
            if end is not None and finder.find(close, end.end()) is not None:
                at = end.end()
    return None
