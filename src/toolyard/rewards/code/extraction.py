"""Find the program in an answer: a fenced Markdown block, chosen by its language and position.

Fences are CommonMark's: three or more backticks or tildes at the start of a line, indented by at most three columns
(in a list item: from where its text starts), closed by at least as many of the same character alone on a line, or by
the end of the text. The fence's own indentation is removed from the lines of the block. Two differences: HTML and block
quotes are treated like other text, so that `<answer>` right before a fence does not hide it; and a block ends only at
its fence, not at a line that leaves its list, because models indent carelessly.

Line ends become `\\n`, and each line of the program has one. Time is linear in the length of the answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from toolyard.errors import ConfigError
from toolyard.rewards.code.protocol import ExtractedCode
from toolyard.sandbox import languages

Choice = Literal["last", "first", "longest", "joined"]

_FENCE = re.compile(r"(?P<fence>`{3,}+|~{3,}+)(?P<info>.*+)")
_MARKER = re.compile(r"(?:[-*+]|[0-9]{1,9}[.)])(?P<gap>[ \t]++|$)")
_INDENT = re.compile(r"[ \t]*+")
_ITEMS_IN_A_LINE = 8
# In quotes or single backticks it is only a mention; three backticks are the fence of a following block.
_END_OF_REASONING = re.compile(r"""</think>(?!["'\\]|`(?!``))""")
_CLASS = re.compile(r"\.(?P<word>[^\s.,:;={}\"']+)")
_WORD = re.compile(r"[{.\s]*+(?P<word>[^\s,:;={}\"']+)")

_SHELL = "bash"


@dataclass(frozen=True, slots=True)
class _Block:
    code: str
    word: str | None
    """The language as written in the fence, in lower case."""
    language: str | None
    """The table's name for it; None: it is not in the table, or not given."""
    closed: bool

    @property
    def name(self) -> str | None:
        return self.language or self.word


def extract_code(
    answer: str,
    *,
    language: str | None = None,
    block: Choice = "last",
    without_fences: Literal["refuse", "whole"] = "refuse",
) -> ExtractedCode:
    """Extract the program from an answer.

    Blocks without code never count. Of the others:

    1. If the answer has `</think>` (the last one; not in quotes or backticks), the blocks after it, if there are any.
    2. Of these, the first of the following kinds that occurs. With `language`: blocks in it (under any alias, with a
       version or without); blocks without a language; those in another language of the table; the rest (`text`,
       `output`, `haskell`). With None: blocks in a language of the table other than the shell's; blocks without a
       language; the shell's, which mostly show how to start the program; the rest.
    3. Of these, the `last`, the `first`, or the `longest` (in characters; the last of several). `joined`: those in the
       language of the last, in order, with an empty line between them; `chosen` is the last of them.

    `blocks` counts all blocks, and `chosen` is an index among all. An answer without any fence has no program; with
    `without_fences="whole"` it is the program, without its reasoning.

    Raises:
        ConfigError: `block` is unknown.
    """
    text = answer.replace("\r\n", "\n").replace("\r", "\n")
    ends = list(_END_OF_REASONING.finditer(text))
    reasoning = _find_blocks(text[: ends[-1].start()]) if ends else []
    visible = text[ends[-1].end() :] if ends else text
    blocks = reasoning + _find_blocks(visible)
    written = [index for index, found in enumerate(blocks) if found.code.strip()]
    candidates = [index for index in written if index >= len(reasoning)] or written
    if not candidates:
        whole = without_fences == "whole" and not blocks and visible.strip()
        return ExtractedCode(code=visible if whole else None, language=None, blocks=len(blocks), chosen=None)
    wanted = None if language is None else _known(language.casefold()) or language.casefold()
    best = min(_rank(blocks[index], wanted) for index in candidates)
    chosen = _choose(blocks, [index for index in candidates if _rank(blocks[index], wanted) == best], block)
    return ExtractedCode(
        code="\n".join(blocks[index].code for index in chosen),
        language=blocks[chosen[-1]].language,
        blocks=len(blocks),
        chosen=chosen[-1],
        unclosed=not all(blocks[index].closed for index in chosen),
    )


def _rank(block: _Block, wanted: str | None) -> int:
    name = block.name
    if wanted is not None:
        return 0 if name == wanted else 1 if name is None else 2 if block.language else 3
    return 1 if name is None else 3 if block.language is None else 2 if block.language == _SHELL else 0


def _choose(blocks: Sequence[_Block], candidates: list[int], choice: str) -> list[int]:
    match choice:
        case "last":
            return candidates[-1:]
        case "first":
            return candidates[:1]
        case "longest":
            return [max(candidates, key=lambda index: (len(blocks[index].code), index))]
        case "joined":
            last = blocks[candidates[-1]].name
            return [index for index in candidates if blocks[index].name == last]
        case _:
            raise ConfigError(f"block {choice!r}: expected one of 'last', 'first', 'longest', 'joined'")


# Fences --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Opening:
    fence: str
    info: str
    column: int
    base: int
    """Where the text of the surrounding list item starts; 0 outside lists."""

    def is_closed_by(self, line: str) -> bool:
        if self.fence not in line:
            return False
        bare = line.strip(" \t")
        return bare == self.fence[0] * len(bare) and _columns(line, _indent(line)) - self.base <= 3


def _find_blocks(text: str) -> list[_Block]:
    blocks: list[_Block] = []
    items: list[int] = []
    lines = text.split("\n")
    at = 0
    while at < len(lines):
        opening = _opening(lines[at], items)
        at += 1
        if opening is None:
            continue
        first = at
        while at < len(lines) and not opening.is_closed_by(lines[at]):
            at += 1
        code = lines[first:at]
        closed = at < len(lines)
        if not closed and code and not code[-1]:
            code.pop()  # there is no line after the last line end
        word = _named(opening.info)
        written = "".join(f"{_unindented(line, opening.column)}\n" for line in code)
        blocks.append(_Block(written, word, _known(word) if word else None, closed))
        at += 1
    return blocks


def _opening(line: str, items: list[int]) -> _Opening | None:
    """Return the fence that this line opens, if any. Updates `items`, the text columns of the open list items."""
    at = _indent(line)
    if at == len(line):
        return None
    column = _columns(line, at)
    while items and items[-1] > column:
        items.pop()
    for _ in range(_ITEMS_IN_A_LINE):
        base = items[-1] if items else 0
        if column - base > 3:
            return None
        if line[at] in "`~":
            found = _FENCE.match(line, at)
            # With a backtick in the rest of the line it is inline code.
            if found is None or (line[at] == "`" and "`" in found["info"]):
                return None
            return _Opening(found["fence"], found["info"], column, base)
        marker = _MARKER.match(line, at)
        if marker is None:
            return None
        behind = _columns(line, marker.end())
        marked = _columns(line, marker.start("gap"))
        if marker.end() == len(line) or behind - marked > 4:  # the text starts on the next line, or is indented code
            items.append(marked + 1)
            return None
        items.append(behind)
        at, column = marker.end(), behind
    return None


def _indent(line: str) -> int:
    found = _INDENT.match(line)
    assert found
    return found.end()


def _columns(line: str, length: int) -> int:
    """Return the column after the first `length` characters, with tab stops every four columns."""
    return len(line[:length].expandtabs(4)) if "\t" in line[:length] else length


def _unindented(line: str, columns: int) -> str:
    """Remove that much white space from the start, or as much as there is."""
    if columns == 0:
        return line
    at = min(_indent(line), columns)
    while at > 0 and _columns(line, at) > columns:
        at -= 1
    if _columns(line, at) < columns and line[at : at + 1] == "\t":  # a tab across the limit: the rest becomes spaces
        return " " * (_columns(line, at + 1) - columns) + line[at + 1 :]
    return line[at:]


# Languages -----------------------------------------------------------------------------------------------------------


def _named(info: str) -> str | None:
    """`python title="x"`, `{.python}`, `{#id .python}`, `python:main.py`, `{python, echo=FALSE}`: python."""
    found = (_CLASS.search(info) if info.lstrip().startswith("{") else None) or _WORD.match(info)
    return found["word"].casefold().removeprefix("language-") or None if found else None


def _known(word: str) -> str | None:
    """Return the table's name for a language, even with a version: `python3.11`, `c++17`."""
    return languages.own_name(word) or languages.own_name(word.rstrip("0123456789.-"))
