"""The pages about everything at once, in a real browser: each question is answered from a cold start in at most two
clicks or keys."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsing import Window, chosen, go, opened_browser, served_to, until, visit
from playwright.sync_api import Page
from viewing import DAMAGED, SCRIPT, VERL_LINE, demo_lines, hostile_line, served, write_lines

from toolyard.viewer.library import Library
from toolyard.viewer.query import parse_query
from toolyard.viewer.web.answers import Answers
from toolyard.viewer.web.export import write_report

SCORES: list[dict[str, list[float | None]]] = [
    {"none": [0, 0, 0], "all": [1, 1, 1], "some": [0, 1, 0], "half": [0.5, 0.5, 0.5], "lost": [None, None]},
    {"none": [0, 1, 0], "all": [1, 1, 1], "some": [0, 0, 0], "half": [0.5, 0.5, 0.8], "new": [1, None, 0]},
]
ERROR = "ZeroDivisionError: division by zero"
LINE = demo_lines()[0]


def line_of(step: int, task: str, sample: int, score: float | None) -> dict[str, Any]:
    """A trajectory with one call."""
    line = copy.deepcopy(LINE)
    line |= {"step": step, "batch_data_id": task, "rollout_offset": sample, "score": score, "gts": f"truth of {task}"}
    line["request_id"] = f"{step}-{task}-{sample}"
    if score is None:
        line |= {"state": "FAILED", "finish_reason": "engine_failure"}
        line["failure"] = {"whose": "ours", "stage": "GENERATING", "error": "connection refused"}
    return line


def with_call(line: dict[str, Any], seconds: float, **changes: Any) -> dict[str, Any]:
    line["turns"][0]["tool_calls"][0] |= {"seconds": seconds, **changes}
    line["turns"][0]["timings"]["tool_calling"] = seconds
    return line


def lines_of(step: int) -> list[dict[str, Any]]:
    return [line_of(step, task, at, score) for task, all_ in SCORES[step].items() for at, score in enumerate(all_)]


def dump(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    first, second = lines_of(0), lines_of(1)
    first[0]["finish_reason"] = "length"
    failed = {"verdict": "failed", "queue_seconds": 1.0}
    with_call(second[6], 4.0, response=f"Traceback …\n{ERROR}\n", metrics=failed)
    with_call(second[7], 2.0, response=f"Traceback …\n{ERROR}\n", metrics=failed)
    with_call(second[8], 30.0, name="search", outcome="timed_out", response="", error="no answer within 30 s", metrics={})
    for at, line in enumerate(second):
        line["started_at"] = 1_700_000_000.0 + at
    write_lines(folder / "0.jsonl", first)
    write_lines(folder / "1.jsonl", second)
    return folder


@pytest.fixture(scope="module")
def window() -> Iterator[Window]:
    with opened_browser() as browser:
        yield Window(browser)


@pytest.fixture
def page(window: Window) -> Iterator[Page]:
    with window.watched() as page:
        yield page


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dump(tmp_path_factory.mktemp("dump"))


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with served(folder) as url:
        yield url


def open_view(page: Page, name: str) -> None:
    """One click."""
    ready = page.evaluate("document.body.dataset.ready")
    page.locator(f'header [data-view="{name}"]').click()
    until(page, f"document.body.dataset.ready !== {ready!r} && document.body.dataset.view === {name!r}")


def texts(page: Page, selector: str) -> list[str]:
    return page.locator(selector).all_inner_texts()


def queried(page: Page, query: str) -> None:
    """Wait until the filter is this one, and the view is drawn."""
    until(page, f"document.getElementById('query').value === {query!r}")
    until(page, f"document.querySelectorAll('.row').length || document.body.dataset.view !== 'list' || {query!r} === ''")


def click(page: Page, selector: str) -> None:
    """Click something that leads to another address, and wait until that is shown."""
    ready = page.evaluate("document.body.dataset.ready")
    page.locator(selector).first.click()
    until(page, f"document.body.dataset.ready !== {ready!r}")


# Groups ---------------------------------------------------------------------------------------------------------------


def test_which_tasks_are_all_0_all_1_or_mixed(page: Page, url: str) -> None:
    visit(page, url)
    open_view(page, "groups")
    assert page.locator("p.verdict").inner_text() == "4 of 10 groups are mixed: only these teach GRPO anything."
    chips = dict(text.rsplit(" ", 1) for text in texts(page, ".chip"))
    assert chips == {"all": "10", "mixed": "4", "all 0": "2", "all 1": "2", "all equal": "1", "unscored": "1"}
    click(page, '.chip[data-kind="all 0"]')
    assert texts(page, "td.task a") == ["none", "some"]
    assert page.locator(".chip[aria-current]").inner_text() == "all 0 2"
