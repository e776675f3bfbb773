"""The viewer in a simulated terminal: textual's pilot, and the screen's contents."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from textual.events import Key
from textual.keys import _character_to_key
from textual.pilot import Pilot
from textual.widgets import Input
from textual.worker import WorkerCancelled, WorkerFailed

from toolyard.viewer.library import Library
from toolyard.viewer.query import parse_query
from toolyard.viewer.tui.app import Viewer
from toolyard.viewer.tui.lists import SampleList, StepList
from toolyard.viewer.tui.page import PageView

_SHORT = ("look", "draw", "seek")
"""Work that ends by itself; menus wait for somebody."""


@dataclass
class Terminal:
    app: Viewer
    pilot: Pilot[None]
    page: PageView
    samples: SampleList
    steps: StepList

    @property
    def screen(self) -> str:
        """Every line as it would be written to a terminal, without its colours."""
        return "\n".join(strip.text for strip in self.app.screen._compositor.render_strips())

    @property
    def row(self):
        return self.samples.row(self.samples.cursor)

    async def press(self, *keys: str) -> None:
        """As the pilot does, without its pauses after every key."""
        for key in keys:
            self.post(key)
            await self._quiet()
        await self.settle()

    async def press_at_once(self, *keys: str) -> None:
        """As they arrive from a terminal whose program was too busy to read them."""
        for key in keys:
            self.post(key)
        await self.settle()

    def post(self, key: str) -> None:
        """Without waiting for what follows, which may be gone again by then, as notifications are after 4 s."""
        is_character = len(key) == 1
        self.app.post_message(Key(_character_to_key(key) if is_character else key, key if is_character else None))

    async def settle(self) -> None:
        """Until nothing is looked up or drawn any more."""
        await self._quiet()
        while running := [one for one in self.app.workers if one.group in _SHORT and not one.is_finished]:
            with suppress(WorkerFailed, WorkerCancelled):
                await running[0].wait()
            await self._quiet()
        await self.pilot.pause()

    async def _quiet(self) -> None:
        """Until no message waits anywhere."""
        quiet = 0
        while quiet < 10:
            await asyncio.sleep(0)
            pumps = (self.app, *self.app.screen.walk_children(with_self=True))
            quiet = 0 if any(pump.message_queue_size for pump in pumps) else quiet + 1

    async def until(self, holds: Callable[[], object], seconds: float = 10.0) -> None:
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, self.screen
            await asyncio.sleep(0.02)
        await self.settle()

    async def type(self, key: str, text: str) -> None:
        """Into what the key opens."""
        await self.press(key)
        self.app.query_one(Input).value = text
        await self.settle()

    async def enter(self, key: str, text: str) -> None:
        await self.type(key, text)
        await self.press("enter")


@asynccontextmanager
async def viewing(
    folder: Path, size: tuple[int, int] = (140, 40), query: str = "", **options
) -> AsyncGenerator[Terminal]:
    with Library.open(folder) as library:
        app = Viewer(library, query=parse_query(query), title=folder.name, **options)
        async with app.run_test(size=size, notifications=True) as pilot:
            found = (app.query_one(kind) for kind in (PageView, SampleList, StepList))
            terminal = Terminal(app, pilot, *found)
            await terminal.until(lambda: terminal.page.text)
            yield terminal
