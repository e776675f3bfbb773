"""Makes text of a dump safe for a terminal: visible, cut, and wrapped.

All text of a dump goes through `visible` before it is drawn or copied. The result has its apparent width, and nothing
that moves the cursor, sets a color, or changes the writing direction.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from rich.cells import cell_len, get_character_cell_size

from toolyard.viewer.ansi import without_styles

TAB = 4
_IMPLAUSIBLE_SECONDS = 1e7
"""Durations above this are not real."""
_MARKS = (
    r"[\u0300-\u036f\u0483-\u0489\u0591-\u05bd\u0610-\u061a\u064b-\u065f"
    r"\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\ufe20-\ufe2f]"
)
"""Combining marks, drawn over the previous character."""
_RETURNS = re.compile(r"\r+\n?")
_MANY_MARKS = re.compile(rf"({_MARKS}{{3}}){_MARKS}+")
_LONELY_MARK = re.compile(rf"(?:^|(?<=[\s]))(?={_MARKS})", re.MULTILINE)
_PRESENTATION = "\ufe0e\ufe0f"
"""Variation selectors for text and emoji style: removed, since terminals disagree on the width of the latter."""
_CHANGES_WIDTH = (
    (0x034F, 0x034F),
    (0x115F, 0x1160),
    (0x180B, 0x180D),
    (0x3164, 0x3164),
    (0xFE00, 0xFE0D),
    (0xFFA0, 0xFFA0),
    (0x1F1E6, 0x1F1FF),
    (0x1F3FB, 0x1F3FF),
    (0xE0100, 0xE01EF),
)
"""Nominally printable, but invisible, or joined with the previous character by some terminals only."""


def visible(text: str) -> str:
    """Drop styles, and show other control characters as pictures (␛) and invisible ones by code (⟨U+202E⟩).

    Keeps newlines and tabs; a carriage return, as of a progress bar, starts a new line. Idempotent: applied to its own
    result, it changes nothing.
    """
    text = _RETURNS.sub("\n", without_styles(text))
    odd = {ord(char): _picture(char) for char in set(text) if not _is_fit(char)}
    text = text.translate(odd) if odd else text
    if text.isascii():
        return text
    return _LONELY_MARK.sub("◌", _MANY_MARKS.sub(r"\1", text))


def one_line(text: str, limit: int = 200) -> str:
    """`text` on one line, for lists and headings."""
    short = text[: 4 * limit]  # styles and spaces do not count
    line = " ".join(visible(short).split())
    return line if len(line) <= limit and len(short) == len(text) else f"{line[: limit - 1]}…"


def _is_fit(char: str) -> bool:
    if char in "\n\t":
        return True
    code = ord(char)
    return (
        char.isprintable()
        and (code < 0x300 or not any(low <= code <= high for low, high in _CHANGES_WIDTH))
        and (char not in _PRESENTATION)
    )


def _picture(char: str) -> str:
    code = ord(char)
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "␡"
    if char in _PRESENTATION:
        return ""
    if char.isspace() and char not in "\u2028\u2029\x85":
        return " " * max(1, get_character_cell_size(char))
    return f"⟨U+{code:04X}⟩"


# Cutting --------------------------------------------------------------------------------------------------------------


class Cut(NamedTuple):
    """An excerpt, and the number of characters before and after it."""

    before: int
    text: str
    after: int


def cut(text: str, limit: int, wanted: re.Pattern[str] | None = None) -> Cut:
    """The first `limit` characters, or an excerpt around the first match if it is not among them."""
    if len(text) <= limit:
        return Cut(0, text, 0)
    start = 0
    if wanted is not None and (found := wanted.search(text)) and found.end() > limit:
        start = max(0, found.start() - limit // 10)
    return Cut(start, text[start : start + limit], max(0, len(text) - start - limit))


# Wrapping -------------------------------------------------------------------------------------------------------------


def spans(line: str, width: int, *, words: bool) -> list[tuple[int, int]]:
    """Start and end of the pieces into which `line`, which has no newline or tab, is wrapped.

    `words`: break between words if possible. The space at a break is dropped.
    """
    width = max(2, width)  # the widest character
    if len(line) <= width and (line.isascii() or cell_len(line) <= width):
        return [(0, len(line))]
    found: list[tuple[int, int]] = []
    start = 0
    while start < len(line):
        end = _end(line, start, width)
        if end < len(line) and words and (space := line.rfind(" ", start + 1, end + 1)) > start:
            found.append((start, space))
            start = space + 1
        else:
            found.append((start, end))
            start = end
    return found


def _end(line: str, start: int, width: int) -> int:
    """The end of the piece that starts at `start`."""
    stretch = line[start : start + width]
    if stretch.isascii():
        return start + len(stretch)
    used = 0
    at = start
    while at < len(line):
        used += get_character_cell_size(line[at])
        if used > width:
            return at
        at += 1
    return at


def fitted(text: str, width: int) -> str:
    """`text` cut or padded to exactly `width`. It must be visible and have no newline."""
    size = cell_len(text)
    if size > width:
        first = _end(text, 0, width - 1) if width > 1 else 0
        text = f"{text[:first]}…" if width > 0 else ""
        size = cell_len(text)
    return text + " " * (width - size)


def counted(number: int, noun: str) -> str:
    """`1 token`, `2,000 tokens`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_seconds(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    if not seconds <= _IMPLAUSIBLE_SECONDS:
        return f"{seconds:.0e} s"
    if seconds < 0.0005:
        return "0 s"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def format_number(value: float | None) -> str:
    """At most three decimal places."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 1e6 or 0 < abs(value) < 1e-3:
        return f"{value:.2g}"
    return f"{value:.3f}".rstrip("0").rstrip(".")
