"""Notes and saved views in the browser, and in a report."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from browsing import Window, at, chosen, go, opened_browser, served_to, until, visit
from playwright.sync_api import Page
from viewing import SCRIPT, demo_dump, demo_lines, served

from toolyard.viewer.library import Library
from toolyard.viewer.notes import FILE, Notes
from toolyard.viewer.query import parse_query
from toolyard.viewer.web.answers import Answers
from toolyard.viewer.web.export import write_report


@pytest.fixture(scope="module")
def window() -> Iterator[Window]:
    with opened_browser() as browser:
        yield Window(browser)


@pytest.fixture
def page(window: Window) -> Iterator[Page]:
    with window.watched() as page:
        yield page


def noted(folder: Path, line: int, text: str) -> None:
    with Library.open(folder) as library:
        row = library.at("0.jsonl", line)
        assert row is not None
        Notes(folder).write(row, text)


def texts(folder: Path) -> list[str]:
    return [note["text"] for note in json.loads((folder / FILE).read_text())["notes"]]


@pytest.mark.exhaustive
def test_a_note_is_written_with_one_key_and_its_row_is_marked(page: Page, tmp_path: Path) -> None:
    demo_dump(tmp_path)
    with served_to(page, tmp_path) as url:
        visit(page, url, at("0.jsonl:2"))
        assert page.locator(".noted").count() == 0
        page.keyboard.press("m")
        page.keyboard.type(f"never asks {SCRIPT}")
        page.keyboard.press("Control+Enter")
        until(page, "document.querySelector('.note [role=status]').textContent === 'saved'")
        assert texts(tmp_path) == [f"never asks {SCRIPT}"]
        until(page, "document.querySelector('.row.chosen .noted')")
        assert page.locator(".noted").count() == 1
        page.keyboard.press("Escape")
        page.keyboard.press("n")
        chosen(page, "0.jsonl:3")
        until(page, "document.querySelector('#note')?.value === ''")
        page.keyboard.press("p")
        until(page, f"document.querySelector('#note')?.value === {json.dumps(f'never asks {SCRIPT}')}")
        page.fill("#note", "")
        page.click("#save-note")
        until(page, "document.querySelectorAll('.noted').length === 0")
        assert texts(tmp_path) == []
        assert page.title() != "run"


@pytest.mark.slow
def test_what_is_typed_is_kept_until_it_is_saved_and_what_others_wrote_too(page: Page, tmp_path: Path) -> None:
    demo_dump(tmp_path)
    with served_to(page, tmp_path) as url:
        visit(page, url, at("0.jsonl:2"))
        page.keyboard.press("m")
        page.keyboard.type("my draft")
        page.keyboard.press("Escape")
        go(page, at("0.jsonl:3"))
        go(page, at("0.jsonl:2"))
        assert page.input_value("#note") == "my draft"
        noted(tmp_path, 2, "written elsewhere")
        page.click("#save-note")
        until(page, "document.querySelector('.note [role=status]').textContent.includes('both texts are kept')")
        assert page.input_value("#note") == "written elsewhere\n\nmy draft"
        assert texts(tmp_path) == ["written elsewhere\n\nmy draft"]


@pytest.mark.slow
def test_a_filter_is_saved_under_a_name_and_found_again(page: Page, tmp_path: Path) -> None:
    demo_dump(tmp_path)
    ones = sum(line["score"] == 1 for line in demo_lines())
    with served_to(page, tmp_path) as url:
        visit(page, url, "#/?q=score%3D1")
        page.keyboard.press("v")
        page.keyboard.type("solved <b>")
        page.keyboard.press("Enter")
        until(page, "document.querySelectorAll('#views li').length === 1")
        assert Notes(tmp_path).views() == {"solved <b>": "score=1"}
        visit(page, url)
        page.click("#views summary")
        page.get_by_role("link", name="solved <b>").click()
        until(page, f"document.querySelectorAll('.row').length === {ones}")
        assert page.input_value("#query") == "score=1"
        Notes(tmp_path).save_view("by another", "step:0")
        page.click("#views summary")
        until(page, "document.querySelectorAll('#views li').length === 2")
        page.get_by_role("button", name="remove solved <b>").click()
        until(page, "document.querySelectorAll('#views li').length === 1")
        assert Notes(tmp_path).views() == {"by another": "step:0"}
        page.set_viewport_size({"width": 1024, "height": 700})
        box = page.locator("#views .menu-body").bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 1024


@pytest.mark.slow
def test_a_server_that_only_reads_shows_notes_and_offers_no_field(page: Page, tmp_path: Path) -> None:
    demo_dump(tmp_path)
    noted(tmp_path, 2, "look\nhere")
    with served(tmp_path, read_only="it is Sunday") as url:
        visit(page, url, at("0.jsonl:2"))
        assert page.locator("div.note p").inner_text() == "look\nhere"
        assert page.locator("#note, #save-note, #view-name").count() == 0
        page.keyboard.press("m")
        page.keyboard.press("v")
        assert "it is Sunday" in page.locator("#views .menu-body").inner_text()
        page.goto("about:blank")


@pytest.mark.slow
def test_a_report_shows_notes_and_views_and_can_write_neither(page: Page, tmp_path: Path) -> None:
    demo_dump(tmp_path)
    noted(tmp_path, 2, f"look {SCRIPT}")
    Notes(tmp_path).save_view("solved", "score=1")
    with Library.open(tmp_path) as library:
        write_report(Answers(library, title="demo"), tmp_path / "report.html", parse_query(""))
    visit(page, (tmp_path / "report.html").as_uri(), at("0.jsonl:2"))
    assert page.locator("div.note p").inner_text() == f"look {SCRIPT}"
    assert page.locator(".noted").count() == 1
    assert page.locator("#note, #view-name").count() == 0
    page.click("#views summary")
    page.get_by_role("link", name="solved").click()
    until(page, f"document.querySelectorAll('.row').length === {sum(line['score'] == 1 for line in demo_lines())}")
