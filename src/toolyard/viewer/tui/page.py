"""The reading pane: a page of drawn lines, of which only the visible ones are rendered."""

from __future__ import annotations

from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding, BindingType
from textual.events import Click, Resize
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.selection import Selection
from textual.strip import Strip

from toolyard.viewer.tui.drawing import FOLD, MATCH, WHOLE, Line
from toolyard.viewer.tui.pages import Page
from toolyard.viewer.tui.palette import palette_of

_MARGIN = 1
_ABOVE = 3
"""Lines to show above a match."""


class PageView(ScrollView, can_focus=True):
    ALLOW_SELECT = True
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("space", "page_down", show=False),
        Binding("ctrl+d", "page_down", show=False),
        Binding("ctrl+u", "page_up", show=False),
    ]

    class Turned(Message):
        """The user clicked something that folds or unfolds."""

        def __init__(self, key: str) -> None:
            super().__init__()
            self.key = key

    class WholeWanted(Message):
        """The user clicked the note that says how much was cut."""

    class Widened(Message):
        """The width changed: the page must be drawn again."""

    def __init__(self) -> None:
        super().__init__(id="page")
        self._page = Page([])
        self._match: int | None = None
        """Index of the current match in the page's matches."""
        self._width = 0

    @property
    def room(self) -> int:
        """Maximum width of lines."""
        width = self.scrollable_content_region.width - 2 * _MARGIN
        return max(20, width if self.size.width else self._width)  # while it is hidden, as wide as it was

    @property
    def matches(self) -> int:
        return len(self._page.matches)

    @property
    def match(self) -> int | None:
        """Index of the current match, from 0."""
        return self._match

    @property
    def text(self) -> str:
        """The whole page as text."""
        return "\n".join("".join(segment.text for segment in line).rstrip() for line in self._page.lines)

    def show(self, page: Page, *, keep: bool) -> None:
        """Show `page`. `keep`: keep the scroll position and the current match."""
        self._page = page
        if not keep or (self._match is not None and self._match >= len(page.matches)):
            self._match = None
        self.virtual_size = Size(self.scrollable_content_region.width, len(page.lines))
        if not keep:
            self.scroll_to(0, 0, animate=False)
        self.refresh()

    # Matches ----------------------------------------------------------------------------------------------------------

    def go_to_match(self, match: int) -> None:
        """Go to a match by its index; negative indexes count from the end."""
        if not self._page.matches:
            return
        self._match = match % len(self._page.matches)
        line = self._page.matches[self._match][1]
        top, height = round(self.scroll_y), self.scrollable_content_region.height
        if not top <= line < top + height - 1:
            self.scroll_to(0, max(0, line - _ABOVE), animate=False)
        self.refresh()

    def go_to_near_match(self) -> None:
        """Go to the first match on the screen or below it."""
        below = (at for at, (_, line) in enumerate(self._page.matches) if line >= round(self.scroll_y))
        self.go_to_match(next(below, 0))

    def go_on(self, *, backwards: bool) -> bool:
        """Go to the next match. False if there is none on this page."""
        here = self._match
        if here is None:
            here = self.matches if backwards else -1
        following = here - 1 if backwards else here + 1
        if not 0 <= following < self.matches:
            return False
        self.go_to_match(following)
        return True

    # Turns ------------------------------------------------------------------------------------------------------------

    def go_to_turn(self, turn: int) -> None:
        """Scroll to a turn, from 0; to the last one if there are not so many."""
        if self._page.turns:
            self.scroll_to(0, self._page.turns[min(turn, len(self._page.turns) - 1)], animate=False)

    def go_on_turns(self, by: int) -> None:
        """Scroll to the next or previous turn."""
        here = round(self.scroll_y)
        lines = [line for line in self._page.turns if (line > here if by > 0 else line < here)]
        if lines:
            self.scroll_to(0, lines[0] if by > 0 else lines[-1], animate=False)

    # Drawing ----------------------------------------------------------------------------------------------------------

    def render_line(self, y: int) -> Strip:
        at = round(self.scroll_y) + y
        width = self.scrollable_content_region.width
        ground = self.rich_style
        if at >= len(self._page.lines):
            return Strip.blank(width, ground)
        line: Line = [Segment(" " * _MARGIN), *self._page.lines[at]]
        if self._match is not None and self._page.matches:
            line = self._with_current(line, self._page.matches[self._match][0])
        strip = Strip(line).apply_style(ground) if line else Strip.blank(width, ground)
        strip = self._with_selection(strip, at)
        return strip.crop_extend(0, width, ground).apply_offsets(0, at)

    def _with_current(self, line: Line, name: int) -> Line:
        current = palette_of(self).current
        return [
            Segment(segment.text, segment.style + current)
            if segment.style is not None and segment.style.meta.get(MATCH) == name
            else segment
            for segment in line
        ]

    def _with_selection(self, strip: Strip, at: int) -> Strip:
        selection = self.text_selection
        span = None if selection is None else selection.get_span(at)
        if span is None:
            return strip
        text = strip.text
        start, end = span[0], len(text) if span[1] == -1 else span[1]
        style = Style.from_color(bgcolor=self.screen.get_component_rich_style("screen--selection").bgcolor)
        cells = [Strip([Segment(piece)]).cell_length for piece in (text[:start], text[:end])]
        before, inside, after = (
            strip.divide([*cells, strip.cell_length]) if cells[0] < cells[1] else (strip, None, None)
        )
        if inside is None or after is None:
            return strip
        marked = Strip([Segment(part.text, (part.style or Style()) + style) for part in inside])
        return Strip.join([before, marked, after])

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        lines = ("".join(segment.text for segment in line) for line in self._page.lines)
        return selection.extract("\n".join(" " * _MARGIN + line for line in lines)), "\n"

    def selection_updated(self, selection: Selection | None) -> None:
        self.refresh()

    # Events -----------------------------------------------------------------------------------------------------------

    def on_click(self, event: Click) -> None:
        meta = event.style.meta
        if isinstance(key := meta.get(FOLD), str):
            self.post_message(self.Turned(key))
        elif meta.get(WHOLE):
            self.post_message(self.WholeWanted())

    def on_resize(self, event: Resize) -> None:
        if self.room != self._width:
            self._width = self.room
            self.post_message(self.Widened())
