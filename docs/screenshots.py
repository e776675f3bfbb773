"""Makes the pictures in docs/images from a dump: by default the recorded one of the demo.

    python docs/screenshots.py [DIR]

Pictures of many trajectories are made from a made-up dump, light and dark, at 1440 and 1024 pixels. Needs Chromium,
`playwright` and `textual`.
"""

from __future__ import annotations

import asyncio
import gzip
import shutil
import sys
import tempfile
from pathlib import Path

from made_up_dump import write_made_up_dump
from playwright.async_api import Browser, Page, async_playwright

from toolyard.cli.view.run import decoder_for
from toolyard.viewer.library import Library
from toolyard.viewer.query import parse_query
from toolyard.viewer.tui.app import Viewer
from toolyard.viewer.web.answers import Answers
from toolyard.viewer.web.server import Server

DOCS = Path(__file__).parent
RECORDED = DOCS.parent / "tests" / "data" / "embedded.jsonl.gz"
WEB = {
    "web-conversation": "#/t/0.jsonl%3A7",
    "web-tokens": "#/t/0.jsonl%3A1?tab=tokens",
    "web-step": "#/step/0",
    "web-compare": "#/compare/0.jsonl%3A3/0.jsonl%3A7",
}
TERMINAL = {"terminal": "nnnnnn", "terminal-groups": "2"}
MANY = {
    "web-groups": "#/groups",
    "web-calls": "#/calls",
    "web-changes": "#/changes",
    "web-waterfall": "#/step/2",
}


async def main(folder: Path) -> None:
    with Library.open(folder) as library:
        decode = decoder_for(library, None)
        async with async_playwright() as playwright:
            chromium = shutil.which("chromium")
            browser = await playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            page = await browser.new_page(viewport={"width": 1366, "height": 768})
            async with Server(Answers(library, title="rollouts/demo", decode=decode)) as server:
                for name, address in WEB.items():
                    await page.goto("about:blank")
                    await page.goto(server.url + address)
                    await page.wait_for_selector("body[data-ready]")
                    await _save(page, name)
                await page.goto("about:blank")
            await _terminal(library, decode, page)
            await _many(browser)
            await browser.close()


async def _many(browser: Browser) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        write_made_up_dump(RECORDED, Path(scratch))
        with Library.open(scratch) as library:
            async with Server(Answers(library, title="made-up")) as server:
                for theme, width in (("light", 1440), ("dark", 1024)):
                    page = await browser.new_page(viewport={"width": width, "height": 760}, color_scheme=theme)
                    for name, address in MANY.items():
                        await page.goto("about:blank")
                        await page.goto(server.url + address)
                        await page.wait_for_selector("body[data-ready]")
                        if name == "web-waterfall":
                            await page.locator("section.waterfall").scroll_into_view_if_needed()
                            await page.evaluate("document.querySelector('.waterfall').scrollIntoView()")
                        await _save(page, name if theme == "light" else f"{name}-dark")
                    await page.close()


async def _terminal(library: Library, decode: object, page: Page) -> None:
    for name, keys in TERMINAL.items():
        viewer = Viewer(library, query=parse_query(""), title="rollouts/demo", decode=decode)
        async with viewer.run_test(size=(132, 38)) as pilot:
            await pilot.pause(1.0)
            await pilot.press(*keys)
            await pilot.pause(1.0)
            picture = viewer.export_screenshot(title="toolyard view")
        await page.set_content(picture)
        await page.locator("svg").screenshot(path=DOCS / "images" / f"{name}.png")


async def _save(page: Page, name: str) -> None:
    await page.wait_for_timeout(300)
    await page.screenshot(path=DOCS / "images" / f"{name}.png")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asyncio.run(main(Path(sys.argv[1])))
    else:
        with tempfile.TemporaryDirectory() as scratch:
            (Path(scratch) / "0.jsonl").write_bytes(gzip.decompress(RECORDED.read_bytes()))
            asyncio.run(main(Path(scratch)))
