"""What the tests of the viewer's page share: a browser, and ways to look at a page."""

from __future__ import annotations

import shutil
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import pytest
from playwright.sync_api import Browser, Page, ViewportSize, sync_playwright
from viewing import served

from patience import patient
from toolyard.records.audit import Decode
from toolyard.viewer.web.answers import Answers

SIZE = ViewportSize(width=1366, height=820)


def chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@contextmanager
def opened_browser() -> Generator[Browser]:
    path = chromium()
    if path is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


class Window:
    """A page, and what it complained about in the console."""

    def __init__(self, browser: Browser) -> None:
        self.page = browser.new_context(viewport=SIZE).new_page()
        self.page.set_default_timeout(60_000)
        self._complaints: list[str] = []
        self.page.on("console", lambda message: self._complaints.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self._complaints.append(str(error)))

    @contextmanager
    def watched(self, *accepted: str) -> Generator[Page]:
        """Whose console must stay silent meanwhile, but for lines with one of the `accepted` texts."""
        self.page.set_viewport_size(SIZE)
        yield self.page
        self.page.goto("about:blank")
        # The page shows that the server refused a request; Chromium logs it too.
        accepted = ("400 (Bad Request)", "404 (Not Found)", *accepted)
        said, self._complaints = self._complaints, []
        complaints = [line for line in said if not any(one in line for one in accepted)]
        assert complaints == [], complaints


@contextmanager
def served_to(page: Page, folder: Path, *, decode: Decode | None = None, of: type[Answers] = Answers) -> Generator[str]:
    """The URL of a server over that folder. The page leaves it before the server stops, or it would log an error."""
    with served(folder, decode=decode, of=of) as url:
        try:
            yield url
        finally:
            page.goto("about:blank")


def visit(page: Page, url: str, hash_: str = "#/") -> None:
    if page.url != "about:blank":
        page.goto("about:blank")  # another hash alone loads nothing
    page.goto(url + hash_)
    page.wait_for_selector("body[data-ready]")


def go(page: Page, hash_: str) -> None:
    """To another place of the page that is open."""
    ready = page.evaluate("document.body.dataset.ready")
    page.evaluate("hash => { location.hash = hash; }", hash_)
    until(page, f"document.body.dataset.ready !== {ready!r}")


def until(page: Page, condition: str) -> None:
    """Wait for it. Playwright's own way evaluates a text within the page, which the page's policy forbids."""
    seconds = patient(30)
    deadline = time.monotonic() + seconds
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {condition}"
        time.sleep(0.03)


def at(key: str, **options: str) -> str:
    """The address of a trajectory."""
    tail = "&".join(f"{name}={quote(value)}" for name, value in options.items())
    return f"#/t/{quote(key, safe='')}" + (f"?{tail}" if tail else "")


def key_shown(page: Page) -> str | None:
    return page.locator(".row.chosen").get_attribute("data-key")


def chosen(page: Page, key: str) -> None:
    """Wait until that row is chosen."""
    until(page, f"document.querySelector('.row.chosen')?.dataset.key === {key!r}")
