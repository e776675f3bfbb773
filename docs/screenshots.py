"""Makes pictures of the viewers from a dump: by default the recorded one of the demo, with failures added to it.

    python docs/screenshots.py [--dump DIR] [--to DIR]

Every page is pictured in light and dark, 1440 and 1024 pixels wide, in a folder of its own (`--to`). The best are
copied to docs/images. Needs Chromium, `playwright`, `pillow` and `textual`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import shutil
import sys
import tempfile
from pathlib import Path

from made_up_dump import write_made_up_dump
from PIL import Image
from playwright.async_api import Browser, Page, async_playwright

from toolyard.cli.view.run import decoder_for
from toolyard.viewer.library import Library
from toolyard.viewer.query import parse_query
from toolyard.viewer.tui.app import Viewer
from toolyard.viewer.web.answers import Answers
from toolyard.viewer.web.server import Server

DOCS = Path(__file__).parent
RECORDED = DOCS.parent / "tests" / "data" / "embedded.jsonl.gz"
WIDTHS = (1440, 1024)
THEMES = ("light", "dark")
WEB = {
    "list": ("#/t/0.jsonl%3A7", ""),
    "failure": ("#/t/1.jsonl%3A2", ""),
    "conversation": ("#/t/0.jsonl%3A12", ""),
    "episode": ("#/t/0.jsonl%3A9", "."),
    "tokens": ("#/t/0.jsonl%3A1?tab=tokens", "u"),
    "timeline": ("#/t/0.jsonl%3A1?tab=timeline", ""),
    "rewards": ("#/t/0.jsonl%3A1?tab=rewards", ""),
    "charts": ("#/charts", ""),
    "one-step": ("#/charts?q=step%3A0", ""),
    "step": ("#/step/0", ""),
    "compare": ("#/compare/0.jsonl%3A4/0.jsonl%3A2?by=token", "d"),
}
"""Address and keys, by name."""
MANY = {
    "groups": ("#/groups", ""),
    "calls": ("#/calls", ""),
    "changes": ("#/changes", ""),
    "waterfall": ("#/step/2", ""),
}
"""The same of a made-up dump, for pages about many trajectories."""
TERMINAL = {"terminal": "nnnnnn", "terminal-groups": "2"}
IN_DOCS = {
    "web-failure": "failure-light-1440",
    "web-conversation": "conversation-light-1440",
    "web-conversation-dark": "conversation-dark-1024",
    "web-tokens": "tokens-light-1440",
    "web-charts": "charts-light-1440",
    "web-one-step": "one-step-dark-1024",
    "web-step": "step-light-1440",
    "web-compare": "compare-light-1440",
    **{f"web-{name}": f"{name}-light-1440" for name in MANY},
    **{f"web-{name}-dark": f"{name}-dark-1024" for name in MANY},
    **{name: name for name in TERMINAL},
}


async def main(folder: Path, many: Path, target: Path) -> None:
    with Library.open(folder) as library, Library.open(many) as made_up:
        decode = decoder_for(library, None)
        async with async_playwright() as playwright:
            browser = await playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            async with Server(Answers(library, title="rollouts/demo", decode=decode)) as server:
                await _web(browser, server.url, WEB, target)
            async with Server(Answers(made_up, title="made-up")) as server:
                await _web(browser, server.url, MANY, target)
            page = await browser.new_page(viewport={"width": 1366, "height": 768})
            await _terminal(library, decode, page, target)
            await browser.close()
    for name, picture in IN_DOCS.items():
        with Image.open(target / f"{picture}.png") as image:  # 256 colors are enough, and a third of the size
            image.convert("RGB").quantize(256).save(DOCS / "images" / f"{name}.png", optimize=True)


async def _web(browser: Browser, url: str, pages: dict[str, tuple[str, str]], target: Path) -> None:
    for width, theme in itertools.product(WIDTHS, THEMES):
        page = await browser.new_page(viewport={"width": width, "height": 800}, color_scheme=theme)
        for name, (address, keys) in pages.items():
            await page.goto("about:blank")
            await page.goto(url + address)
            await page.wait_for_selector("body[data-ready]")
            for key in keys:
                await page.keyboard.press(key)
            if name == "waterfall":
                await page.evaluate("document.querySelector('.waterfall').scrollIntoView()")
            await page.wait_for_timeout(300)
            await page.screenshot(path=target / f"{name}-{theme}-{width}.png")
        await page.close()


async def _terminal(library: Library, decode: object, page: Page, target: Path) -> None:
    for name, keys in TERMINAL.items():
        viewer = Viewer(library, query=parse_query(""), title="rollouts/demo", decode=decode)
        async with viewer.run_test(size=(132, 38)) as pilot:
            await pilot.pause(1.0)
            await pilot.press(*keys)
            await pilot.pause(1.0)
            picture = viewer.export_screenshot(title="toolyard view")
        await page.set_content(picture)
        await page.locator("svg").screenshot(path=target / f"{name}.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--dump", type=Path)
    parser.add_argument("--to", type=Path, default=DOCS.parent / "build" / "screenshots")
    options = parser.parse_args()
    options.to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        if options.dump is None:
            sys.path.insert(0, str(DOCS.parent / "tests" / "e2e"))
            from viewing import troubled_dump

            options.dump = Path(scratch) / "demo"
            options.dump.mkdir()
            troubled_dump(options.dump)
        many = Path(scratch) / "many"
        many.mkdir()
        write_made_up_dump(RECORDED, many)
        asyncio.run(main(options.dump, many, options.to))
