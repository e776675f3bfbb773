"""The input line at the bottom: for a filter, a search, or an id."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import ClassVar

from rich.text import Text
from textual import events, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.message import Message
from textual.widget import Widget
from textual.widgets import Input, Label, Static

from toolyard.viewer.query import QueryError, parse_query
from toolyard.viewer.tui.completion import Completions
from toolyard.viewer.tui.text import one_line, visible


class Asked(Enum):
    """The kind of input; the value is its label."""

    FILTER = "filter"
    SEARCH = "search"
    ID = "id"


_HINTS = {
    Asked.FILTER: 'score<0.5 tools>2 finish:length text:"220000" sort:-time · tab: complete · empty: all · esc: cancel',
    Asked.SEARCH: "search all messages; then ] and [ for the next and previous match",
    Asked.ID: "a request id, or the start of one",
}


_OFFERED = 12
"""Completions to show."""


class Field(Input):
    """An input whose keys take effect in the order in which they are typed.

    Input inserts a letter at once, but runs a key's binding only after the event has bubbled: after later letters.
    """

    _ACTIONS: ClassVar[dict[str, str]] = {
        key: binding.action
        for binding in Input.BINDINGS
        if isinstance(binding, Binding)
        for key in binding.key.split(",")
    }

    def __init__(self, complete: Callable[[], Awaitable[None]]) -> None:
        super().__init__(compact=True, id="prompt-input", select_on_focus=False)
        self._complete = complete

    async def on_key(self, event: events.Key) -> None:
        if event.key == "tab":
            event.stop()
            event.prevent_default()
            await self._complete()
        elif action := self._ACTIONS.get(event.key):
            event.stop()
            event.prevent_default()
            await self.run_action(action)


class Prompt(Vertical):
    """The input line. Hidden unless it is in use."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "leave", show=False)]

    class Answered(Message):
        def __init__(self, asked: Asked, text: str) -> None:
            super().__init__()
            self.asked = asked
            self.text = text

    def __init__(self, completions: Callable[[str], Completions]) -> None:
        """`completions` returns what a filter may be completed to; it is called in a thread."""
        super().__init__(id="prompt")
        self._completions = completions
        self._offered = Completions()
        """What Tab cycles through."""
        self._asked = Asked.FILTER
        self._focused: Widget | None = None
        """The widget that gets the focus back."""

    def compose(self) -> ComposeResult:
        with Horizontal():
            yield Label("", id="prompt-label")
            yield Field(self._complete)
        yield Static("", id="prompt-hint")

    def ask(self, asked: Asked, value: str) -> None:
        self._asked = asked
        self._focused = self.screen.focused
        self.query_one("#prompt-label", Label).update(Text(f" {asked.value} "))
        field = self.query_one(Input)
        field.value = visible(value)
        field.cursor_position = len(field.value)
        self._tell(None)
        self.display = True
        # Immediate, unlike `focus`, so that fast typing goes into this field.
        self.screen.set_focus(field)

    def action_leave(self) -> None:
        self.display = False
        self.screen.set_focus(self._focused)

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        self._tell(self._problem(event.value))
        if self._asked is not Asked.FILTER or not event.value:
            return
        if event.value in self._offered.texts:
            self._show(self._offered)
        else:
            self._offer(event.value)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        if problem := self._problem(event.value):
            self._tell(problem)
            return
        self.action_leave()
        self.post_message(self.Answered(self._asked, event.value))

    @work(exclusive=True, group="complete")
    async def _offer(self, typed: str) -> None:
        """Show how the last word may go on."""
        offered = await asyncio.to_thread(self._completions, typed)
        if offered.words and self.display and self.query_one(Input).value == typed:
            self._show(offered)

    async def _complete(self) -> None:
        """Complete the last word; again, with the next candidate."""
        if self._asked is not Asked.FILTER:
            return
        field = self.query_one(Input)
        if field.value not in self._offered.texts:
            self._offered = await asyncio.to_thread(self._completions, field.value)
        texts = self._offered.texts
        if texts:
            at = texts.index(field.value) + 1 if field.value in texts else 0
            field.value = texts[at % len(texts)]
            field.cursor_position = len(field.value)

    def _show(self, offered: Completions) -> None:
        words = [one_line(word, 60) for word in offered.words[:_OFFERED]]
        self.query_one("#prompt-hint", Static).update(Text(f"tab: {'   '.join(words)}"))

    def _problem(self, text: str) -> str | None:
        if self._asked is not Asked.FILTER:
            return None
        try:
            parse_query(text)
        except QueryError as error:
            return str(error)
        return None

    def _tell(self, problem: str | None) -> None:
        hint = self.query_one("#prompt-hint", Static)
        hint.update(Text(visible(problem or _HINTS[self._asked])))
        hint.set_class(problem is not None, "problem")
