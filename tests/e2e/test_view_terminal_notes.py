"""Notes and saved views in the terminal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from textual.widgets import Input, TextArea
from viewing import demo_dump, demo_lines
from viewing_terminal import viewing

from toolyard.viewer.notes import FILE, Notes
from toolyard.viewer.tui.notes import NoteEditor


def texts(folder: Path) -> list[str]:
    return [note["text"] for note in json.loads((folder / FILE).read_text())["notes"]]


async def test_a_note_is_written_read_and_removed_in_the_terminal(tmp_path: Path) -> None:
    demo_dump(tmp_path)
    async with viewing(tmp_path, size=(80, 24)) as terminal:
        await terminal.press("n", "m")
        await terminal.until(lambda: isinstance(terminal.app.screen, NoteEditor))
        await terminal.press(*"why q?", "enter", *"no", "ctrl+s")
        await terminal.until(lambda: "why q?" in terminal.page.text)
        assert texts(tmp_path) == ["why q?\nno"]
        await terminal.until(lambda: "✎" in terminal.screen)
        await terminal.press("m")
        await terminal.until(lambda: isinstance(terminal.app.screen, NoteEditor))
        await terminal.press("x", "escape")
        assert texts(tmp_path) == ["why q?\nno"]
        await terminal.press("m")
        await terminal.until(lambda: isinstance(terminal.app.screen, NoteEditor))
        terminal.app.screen.query_one(TextArea).text = ""
        await terminal.press("ctrl+s")
        await terminal.until(lambda: "✎" not in terminal.screen and "why q?" not in terminal.page.text)
        assert texts(tmp_path) == []


@pytest.mark.exhaustive
async def test_a_filter_is_saved_shown_and_removed_in_the_terminal(tmp_path: Path) -> None:
    demo_dump(tmp_path)
    async with viewing(tmp_path, query="score=1") as terminal:
        found = terminal.samples.count
        await terminal.press("v")
        await terminal.until(lambda: "save this filter" in terminal.screen)
        await terminal.press("enter")
        await terminal.until(lambda: terminal.app.screen.query(Input))
        await terminal.press(*"solved", "enter")
        await terminal.until(lambda: Notes(tmp_path).views() == {"solved": "score:1"})
        await terminal.enter("/", "")
        assert terminal.samples.count == len(demo_lines())
        await terminal.press("v")
        await terminal.until(lambda: "solved · score:1" in terminal.screen)
        await terminal.press("enter")
        await terminal.until(lambda: terminal.samples.count == found)
        await terminal.press("v")
        await terminal.until(lambda: "remove a view" in terminal.screen)
        await terminal.press("j", "j", "enter")
        await terminal.until(lambda: "Remove" in terminal.screen)
        await terminal.press("enter")
        await terminal.until(lambda: Notes(tmp_path).views() == {})


@pytest.mark.slow
async def test_a_terminal_that_only_reads_and_a_damaged_file_say_why(tmp_path: Path) -> None:
    demo_dump(tmp_path)
    async with viewing(tmp_path, notes=Notes(tmp_path, read_only="it is Sunday")) as terminal:
        await terminal.press("m")
        await terminal.until(lambda: "it is Sunday" in terminal.screen)
        assert not isinstance(terminal.app.screen, NoteEditor)
    (tmp_path / FILE).write_text("{")
    async with viewing(tmp_path) as terminal:
        await terminal.until(lambda: "is not a file of notes" in terminal.screen)
        assert "ASSISTANT" in terminal.page.text
