"""Notes and saved views in the terminal: their keys and dialogs."""

from __future__ import annotations

import asyncio
from typing import ClassVar

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input, Label, TextArea

from toolyard.errors import RecordError
from toolyard.viewer.notes import MAX_NAME
from toolyard.viewer.query import parse_query
from toolyard.viewer.tui.browser import Browser
from toolyard.viewer.tui.screens import Menu
from toolyard.viewer.tui.text import visible


class NoteEditor(ModalScreen[str | None]):
    """A note to write. Returns its text, or None if nothing is to be changed."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", show=False, priority=True),
        Binding("ctrl+s", "save", show=False, priority=True),
    ]

    def __init__(self, text: str) -> None:
        super().__init__()
        self._field = TextArea(text, id="note")

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog wide"):
            yield Label("Note  (ctrl+s to save, esc to cancel; empty: no note)", classes="dialog-title")
            yield self._field

    def on_mount(self) -> None:
        self._field.focus()
        self._field.move_cursor(self._field.document.end)

    def action_save(self) -> None:
        self.dismiss(self._field.text)


class NameInput(ModalScreen[str | None]):
    """The name of a view to save; None if it is not to be saved."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(None)", show=False)]

    def __init__(self, query: str) -> None:
        super().__init__()
        self._query = query

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog wide"):
            yield Label(Text(f"Save {visible(self._query)!r} as"), classes="dialog-title")
            yield Input(placeholder="name", max_length=MAX_NAME, compact=True)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        if event.value.strip():
            self.dismiss(event.value)


class NoteKeys(Browser):
    """The browser with notes and saved views."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("m", "note", show=False),
        Binding("v", "views", show=False),
    ]

    @work(exclusive=True, group="menu")
    async def action_note(self) -> None:
        row, notes = self._row, self._notes
        if row is None:
            return
        with self._saying():
            if notes.read_only:
                raise RecordError(f"cannot write notes: {notes.read_only}")
            was = await asyncio.to_thread(notes.of, row)
            text = await self.push_screen_wait(NoteEditor(was))
            if text is None or text.strip() == was:
                return
            now = await asyncio.to_thread(notes.write, row, text, was=was)
            merged = "; somebody else changed it meanwhile: both texts are kept" if now != text.strip() else ""
            self._say(("note saved" if now else "note removed") + merged)
            self._samples.forget()
            self._draw()

    @work(exclusive=True, group="menu")
    async def action_views(self) -> None:
        with self._saying():
            views = await asyncio.to_thread(self._notes.views)
            names = list(views)
            extra = [] if self._notes.read_only else ["save this filter …", *(["remove a view …"] if names else [])]
            shown = [f"{name} · {query}" for name, query in views.items()]
            if not shown and not extra:
                raise RecordError(f"there are no saved views, and none can be saved: {self._notes.read_only}")
            at = await self.push_screen_wait(Menu("Saved views", [*shown, *extra]))
            if at is None:
                return
            if at < len(names):
                self._query, self._step = parse_query(views[names[at]]), None
                self._look(first=True)
            elif at == len(names):
                await self._save_view()
            else:
                gone = await self.push_screen_wait(Menu("Remove", shown))
                if gone is not None:
                    await asyncio.to_thread(self._notes.remove_view, names[gone])
                    self._say(f"removed {names[gone]!r}")

    async def _save_view(self) -> None:
        query = str(self.asked)
        name = await self.push_screen_wait(NameInput(query))
        if name is not None:
            await asyncio.to_thread(self._notes.save_view, name, query)
            self._say(f"saved as {name.strip()!r}")
