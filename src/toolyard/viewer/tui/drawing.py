"""Drawing text as lines of segments: wrapped, highlighted, with search matches marked.

Nothing here interprets markup: text is drawn character by character.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import islice, pairwise

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from rich.syntax import Syntax

from toolyard.viewer.tui.palette import Palette
from toolyard.viewer.tui.text import TAB, Cut, counted, cut, spans, visible

Line = list[Segment]
Ink = tuple[int, int, Style]
"""The style of the characters from one index up to another."""

MATCH, TURN, FOLD, WHOLE = "match", "turn", "fold", "whole"
"""Keys of a style's meta data: the id of a match, the number of a turn, and what a click does."""

_TEXT_CHARS, _PAGE_CHARS = 20_000, 300_000
_WHOLE_CHARS = 5_000_000
_HIGHLIGHTED_CHARS = 10_000
"""Longer programs are not highlighted: it takes too long."""
_MOST_MATCHES = 5_000
_LANGUAGES = {
    *("bash", "c", "cpp", "csharp", "css", "diff", "go", "html", "java", "javascript", "json", "kotlin", "lua"),
    *("markdown", "perl", "php", "python", "r", "ruby", "rust", "scala", "sql", "swift", "toml", "typescript"),
    *("xml", "yaml"),
}
_ALIASES = {
    "c++": "cpp",
    "console": "bash",
    "js": "javascript",
    "md": "markdown",
    "nodejs": "javascript",
    "py": "python",
    "python3": "python",
    "sh": "bash",
    "shell": "bash",
    "ts": "typescript",
    "yml": "yaml",
}


class Pen:
    """Draws the text of one page, and counts how much was drawn."""

    def __init__(self, palette: Palette, *, needles: Sequence[str] = (), whole: bool = False) -> None:
        """`whole`: do not cut long text, except at a limit that protects the terminal."""
        self.palette = palette
        self.whole = whole
        self.wanted = wanted(needles)
        self._left = _WHOLE_CHARS if whole else _PAGE_CHARS
        self._matches = 0

    def text(self, text: str, width: int, style: Style | None = None, *, words: bool = True) -> list[Line]:
        """Wrapped text. Long text is cut, with a note."""
        part = self._taken(text)
        ink = style or self.palette.text
        return self._noted(part, width, self._lines(visible(part.text), width, ink, words=words))

    def code(self, text: str, language: str | None, width: int) -> list[Line]:
        """Highlighted code on a background as wide as `width`."""
        part = self._taken(text)
        shown = "\n".join(line.expandtabs(TAB) for line in visible(part.text).split("\n"))
        palette = self.palette
        inks = inks_of(shown, language, palette.code_theme)
        lines = self._lines(shown, width, palette.text + palette.block, words=False, inks=inks)
        return self._noted(part, width, [filled(line, width, palette.block) for line in lines])

    def heading(self, key: str, label: str, *, is_open: bool) -> Line:
        """The heading of something that a click folds or unfolds."""
        style = self.palette.muted + Style(italic=True) + Style.from_meta({FOLD: key})
        return [Segment(f"{'▾' if is_open else '▸'} {visible(label)}", style)]

    def note(self, text: str, width: int) -> Line:
        """A note about what was left out, and how to show it."""
        if self.whole:
            return clipped([Segment(text, self.palette.accent)], width)
        return clipped(
            [Segment(f"{text} · press a to show all", self.palette.accent + Style.from_meta({WHOLE: True}))], width
        )

    def spend(self, chars: int) -> bool:
        """Count `chars` against the page's limit. False if it is used up. Parts without text have a cost, too."""
        self._left -= chars
        return self._left > 0

    def holds(self, *texts: str | None) -> bool:
        """Whether one of the texts has a match."""
        search = self.wanted
        return search is not None and any(text and search.search(text) for text in texts)

    def _taken(self, text: str) -> Cut:
        most = self._left if self.whole else min(_TEXT_CHARS, self._left)
        part = cut(text, max(0, most), self.wanted)
        self._left -= len(part.text)
        return part

    def _noted(self, part: Cut, width: int, lines: list[Line]) -> list[Line]:
        if not part.before and not part.after:
            return lines
        if part.before:
            lines.insert(0, self.note(f"… {counted(part.before, 'character')} before this", width))
        if part.after:
            lines.append(self.note(f"… {counted(part.after, 'more character')}", width))
        return lines

    def _lines(self, text: str, width: int, style: Style, *, words: bool, inks: Sequence[Ink] = ()) -> list[Line]:
        lines: list[Line] = []
        before = 0
        for source in text.split("\n"):
            line = source.expandtabs(TAB)
            own = _within(inks, before, before + len(line))
            matches = self._found(line)
            before += len(line) + 1
            for start, end in spans(line, width, words=words):
                piece = line[start:end]
                if own or matches:
                    lines.append(_inked(piece, style, _within(own, start, end), _within(matches, start, end)))
                else:
                    lines.append([Segment(piece, style)])
        return lines

    def _found(self, line: str) -> list[Ink]:
        if self.wanted is None:
            return []
        found: list[Ink] = []
        for place in islice(self.wanted.finditer(line), max(0, _MOST_MATCHES - self._matches)):
            found.append((*place.span(), self.palette.match + Style.from_meta({MATCH: self._matches})))
            self._matches += 1
        return found


def wanted(needles: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern that finds the needles in drawn text. Needles with several lines match line by line."""
    lines = [line.expandtabs(TAB) for needle in needles for line in visible(needle).split("\n") if line.strip()]
    return re.compile("|".join(map(re.escape, lines)), re.IGNORECASE) if lines else None


# Colors ---------------------------------------------------------------------------------------------------------------


def inks_of(code: str, language: str | None, theme: str) -> Sequence[Ink]:
    """The syntax highlighting of a program; none if it is long, or in an unknown language."""
    name = (language or "").lower()
    name = _ALIASES.get(name, name)
    if name not in _LANGUAGES or len(code) > _HIGHLIGHTED_CHARS:
        return ()
    return _highlighted(code, name, theme)


@lru_cache(maxsize=256)
def _highlighted(code: str, language: str, theme: str) -> tuple[Ink, ...]:
    text = Syntax("", language, theme=theme).highlight(code)
    if not text.plain.startswith(code):
        return ()
    return tuple((span.start, span.end, _plain(span.style)) for span in text.spans)


@lru_cache(maxsize=1024)
def _plain(style: str | Style) -> Style:
    """The style without its background."""
    style = Style.parse(style) if isinstance(style, str) else style
    return Style(color=style.color, bold=style.bold, italic=style.italic)


def _within(inks: Sequence[Ink], start: int, end: int) -> list[Ink]:
    """The inks between `start` and `end`, relative to `start`."""
    found: list[Ink] = []
    for at in range(max(0, bisect_right(inks, start, key=lambda ink: ink[0]) - 1), len(inks)):
        low, high, style = inks[at]
        if low >= end:
            break
        if high > start:
            found.append((max(low, start) - start, min(high, end) - start, style))
    return found


def _inked(line: str, style: Style, *layers: Sequence[Ink]) -> Line:
    """The line with its styles. Later layers cover earlier ones."""
    edges = {0, len(line)}
    for layer in layers:
        edges |= {edge for low, high, _ in layer for edge in (low, high)}
    ordered = sorted(edges)
    segments: Line = []
    for low, high in pairwise(ordered):
        ink = style
        for layer in layers:
            for first, last, over in layer:
                if first <= low < last:
                    ink += over
                    break
        segments.append(Segment(line[low:high], ink))
    return segments


# Lines ----------------------------------------------------------------------------------------------------------------


def length(line: Iterable[Segment]) -> int:
    return sum(cell_len(segment.text) for segment in line)


def filled(line: Line, width: int, style: Style | None = None) -> Line:
    """Padded to at least `width`."""
    missing = width - length(line)
    return [*line, Segment(" " * missing, style)] if missing > 0 else line


def clipped(line: Line, width: int) -> Line:
    """Cut to at most `width`."""
    if length(line) <= width:
        return line
    kept: Line = []
    left = width - 1
    for segment in line:
        size = cell_len(segment.text)
        if size > left:
            start, end = spans(segment.text, left, words=False)[0] if left > 1 else (0, 0)
            return [*kept, Segment(f"{segment.text[start:end]}…", segment.style)]
        kept.append(segment)
        left -= size
    return kept


def spread(left: Line, right: Line, width: int) -> list[Line]:
    """`left` and `right` at both ends of one line, or on two lines if there is no room."""
    room = width - length(left) - length(right)
    if room >= 2:
        return [[*left, Segment(" " * room), *right]]
    return [clipped(left, width), clipped(right, width)] if right else [clipped(left, width)]


def prefixed(lines: Iterable[Line], prefix: Segment) -> list[Line]:
    return [[prefix, *line] for line in lines]


def beside(left: Sequence[Line], right: Sequence[Line], width: int, between: Segment) -> list[Line]:
    """Lines side by side; `width` is that of the left column."""
    return [
        [*filled(left[at] if at < len(left) else [], width), between, *(right[at] if at < len(right) else [])]
        for at in range(max(len(left), len(right)))
    ]
