"""What the viewer's page must live through: hostile and huge content, a dump and a server that come and go, races."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsing import Window, at, chosen, go, key_shown, opened_browser, served_to, until, visit
from playwright.sync_api import Page
from viewing import VERL_LINE, demo_dump, demo_lines, hostile_line, served, write_lines

from toolyard.messages import JSON
from toolyard.viewer.query import Query
from toolyard.viewer.web.answers import Answers


@pytest.fixture(scope="module")
def window() -> Iterator[Window]:
    with opened_browser() as browser:
        yield Window(browser)


@pytest.fixture
def page(window: Window) -> Iterator[Page]:
    with window.watched() as page:
        yield page


# Hostile content ------------------------------------------------------------------------------------------------------


def test_what_a_model_wrote_stays_text(page: Page, tmp_path: Path) -> None:
    other = hostile_line()
    other["tokens"]["response_ids"][3] += 1
    other["input"] += "<svg onload=\"document.title='run'\">"
    write_lines(tmp_path / "7.jsonl", [hostile_line(), {**other, "request_id": "h2"}])
    with served_to(page, tmp_path, decode=lambda ids: "<img src=x onerror=\"document.title='run'\">" * len(ids)) as url:
        visit(page, url)
        for tab in ("conversation", "tokens", "timeline", "rewards", "raw"):
            go(page, at("7.jsonl:1", tab=tab, find="document.title", unfold="1"))
            inert(page)
            if tab == "conversation":
                shown = page.locator(".bubble.role-assistant").last.inner_text()
                assert "<script>document.title" in shown
                assert "⟨U+202E⟩" in shown
                assert "␛" in shown
        for hash_ in (
            "#/charts",
            "#/step/7",
            "#/compare/7.jsonl%3A1/7.jsonl%3A2",
            "#/compare/7.jsonl%3A1/7.jsonl%3A2?by=token",
        ):
            go(page, hash_)
            inert(page)
        for hash_ in (
            "#/t/<img src=x onerror=alert(1)>",
            "#/step/<svg onload=alert(1)>",
            "#/?q=<script>",
            "#/t/__proto__",
            "#/constructor",
        ):
            go(page, hash_)
            inert(page)


def inert(page: Page) -> None:
    assert page.title() != "run"
    assert page.locator("#view :is(img, script, iframe, style, link), #list img, [onload], [onerror]").count() == 0
    assert page.evaluate("({}).polluted === undefined && Object.keys(Object.prototype).length === 0")
    assert "\u202e" not in page.locator("body").inner_text()
    assert page.locator('a[href]:not([href^="#/"])').count() == 0


def test_names_of_javascript_are_names_like_others(page: Page, tmp_path: Path) -> None:
    lines = demo_lines()[:3]
    for line, name in zip(lines, ("__proto__", "constructor", "toString"), strict=True):
        line["finish_reason"] = name
        line["turns"][0]["tool_calls"][0]["outcome"] = name
        line["turns"][0]["tool_calls"][0]["arguments"] = json.dumps({"code": "x", "language": name})
        line["batch_data_id"] = line["data_source"] = name
    write_lines(tmp_path / "0.jsonl", [*lines, {**demo_lines()[3], "step": 1}])
    with served_to(page, tmp_path) as url:
        visit(page, url, "#/charts")
        for legend in (2, 3):
            said = page.locator(".chart").nth(legend).locator(".legend").inner_text()
            assert all(f"{name} (1)" in said for name in ("__proto__", "constructor", "toString"))
        heights = page.locator(".chart rect").evaluate_all(
            "nodes => nodes.map(node => Number(node.getAttribute('height')))"
        )
        assert heights
        assert all(height >= 0 for height in heights)
        go(page, "#/step/0")
        assert page.locator("table.tally").first.locator("tr").count() == 3
        go(page, at("0.jsonl:1"))
        assert page.locator(".call .badge").inner_text() == "__proto__"
        assert page.locator(".call .program .bar span").first.inner_text() == "__proto__"


@pytest.mark.slow
def test_runs_may_be_called_anything(page: Page, tmp_path: Path) -> None:
    names = ["<img src=x>", 'a "b" \\ c', "100%2F?#&=+;é", "\u202etxt.exe", "__proto__"]
    for name in names:
        (tmp_path / name).mkdir()
        write_lines(tmp_path / name / "0.jsonl", [demo_lines()[0]])
    with served_to(page, tmp_path) as url:
        visit(page, url, "#/step/0")
        assert page.locator("#view p a").count() == 1 + len(names)
        for index in range(len(names)):
            if index:
                go(page, "#/step/0")
            page.locator("#view p a").nth(index + 1).click()
            until(page, "document.querySelector('#view p')?.textContent.startsWith('1 trajectory,')")
        go(page, "#/")
        for _ in names:
            until(page, "document.querySelector('.conversation')")
            inert(page)
            before = page.evaluate("document.body.dataset.ready")
            page.keyboard.press("n")
            until(
                page, f"document.body.dataset.ready !== {before!r} || document.querySelector('.row:last-child.chosen')"
            )
        assert page.locator(".row").last.get_attribute("aria-selected") == "true"


@pytest.mark.slow
def test_scores_at_the_ends_of_all_numbers_are_drawn(page: Page, tmp_path: Path) -> None:
    scores = [1.7e308, -1.7e308, 5e-324, 0.0, float("nan"), float("inf")]
    lines = [{**VERL_LINE, "score": score, "step": step} for step in (0, 1) for score in scores]
    write_lines(tmp_path / "0.jsonl", [*lines, {**VERL_LINE, "score": 5e-324, "step": 2}])
    with served_to(page, tmp_path) as url:
        visit(page, url, "#/charts")
        assert page.locator(".chart svg").count() == 4
        page.locator(".chart svg").first.hover(position={"x": 120, "y": 60})
        go(page, "#/step/0")
        assert page.locator(".chart").first.locator("rect").count() == 20
        assert "2 unknown" in page.locator("#view .charts").inner_text()
        go(page, "#/step/2")


# Huge content ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_huge_trajectories_stay_usable(page: Page, tmp_path: Path) -> None:
    many = demo_lines()[0]
    ids = (many["tokens"]["response_ids"] * 2000)[:50_000]
    many["tokens"] |= {"response_ids": [*ids, 77], "response_mask": [1] * 50_001, "response_logprobs": [-0.5] * 50_001}
    many["turns"][0]["tool_calls"] *= 200
    long = demo_lines()[1]
    long["messages"][-1]["content"] = (
        "A line without a break. " * 80_000 + "\n```python\n" + "x = 1  # code\n" * 100_000 + "the very end\n```\n"
    )
    write_lines(tmp_path / "0.jsonl", [many, long])
    with served_to(page, tmp_path) as url:
        visit(page, url)
        go(page, at("0.jsonl:1", tab="tokens"))
        assert page.locator(".t").count() < 15_000
        page.evaluate("document.getElementById('view').scrollTo(0, 1e9)")
        until(page, "document.querySelector('.t[data-at=\"49966\"]')")
        go(page, at("0.jsonl:1"))
        assert page.locator(".call").count() == 200
        assert (
            "200 calls: 200 ok"
            in page.locator(".bubble").last.inner_text() + page.locator(".conversation").inner_text()
        )
        go(page, at("0.jsonl:2"))
        assert page.locator("details.long").count() == 2
        page.fill("#find", "the very end")
        page.press("#find", "Enter")
        page.wait_for_selector("mark.here")
        go(page, at("0.jsonl:2", tab="raw"))


@pytest.mark.slow
def test_thousands_of_steps_are_drawn_together(page: Page, tmp_path: Path) -> None:
    lines = [
        {**VERL_LINE, "step": step, "score": float("nan") if step % 7 == 0 else step / 2500} for step in range(2500)
    ]
    write_lines(tmp_path / "0.jsonl", lines)
    with served_to(page, tmp_path) as url:
        visit(page, url, "#/charts")
        assert page.locator("#view h2").inner_text() == "2,500 steps, 2,500 trajectories"
        assert page.locator(".chart *").count() < 12_000
        assert page.locator("table.steps tbody tr").count() == 200
        page.locator(".chart svg").first.hover(position={"x": 300, "y": 60})
        assert page.locator(".readout").first.inner_text().startswith("steps ")
        page.get_by_role("button", name="show 2,300 more steps").click()
        assert page.locator("table.steps tbody tr").count() == 2500


# What changes while somebody looks ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_dump_that_grows_is_followed_and_what_is_read_stays(page: Page, tmp_path: Path) -> None:
    demo_dump(tmp_path)
    with served_to(page, tmp_path) as url:
        visit(page, url, at("0.jsonl:3"))
        write_lines(tmp_path / "1.jsonl", [{**VERL_LINE, "step": 1, "input": "user\nquite new\n"}])
        until(page, f"document.querySelectorAll('.row').length === {len(demo_lines()) + 1}")
        assert "quite new" in page.locator(".row").last.inner_text()
        assert key_shown(page) == "0.jsonl:3"


@pytest.mark.slow
def test_curves_follow_without_moving_and_without_taking_away_what_is_typed(page: Page, tmp_path: Path) -> None:
    demo_dump(tmp_path)
    with served_to(page, tmp_path) as url:
        visit(page, url, "#/charts")
        page.evaluate("document.getElementById('view').scrollTo(0, 200)")
        page.fill("#query", "score<0.")
        write_lines(tmp_path / "1.jsonl", [{**VERL_LINE, "step": 1}])
        until(page, "document.querySelector('h2').textContent.startsWith('2 steps')")
        assert page.input_value("#query") == "score<0."
        assert page.evaluate("document.getElementById('view').scrollTop") == 200


@pytest.mark.slow
def test_a_dump_that_is_replaced_is_shown_anew(page: Page, tmp_path: Path) -> None:
    write_lines(tmp_path / "0.jsonl", [{**VERL_LINE, "input": f"user\nold {number}\n"} for number in range(150)])
    with served_to(page, tmp_path) as url:
        visit(page, url, at("0.jsonl:2"))
        assert "old 1" in page.locator(".bubble").first.inner_text()
        new = tmp_path / "new"
        write_lines(new, [{**VERL_LINE, "input": f"user\nnew {number}\n"} for number in range(3)])
        new.replace(tmp_path / "0.jsonl")
        until(page, "document.querySelectorAll('.row').length === 3")
        until(page, "document.querySelector('.bubble').textContent.includes('new 1')")
        assert key_shown(page) == "0.jsonl:2"


@pytest.mark.slow
def test_a_server_that_comes_back_is_found_again(window: Window, tmp_path: Path) -> None:
    demo_dump(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with window.watched("ERR_", "Server unreachable") as page:
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        with served(tmp_path, port=port) as url:
            visit(page, url, at("0.jsonl:2"))
        until(page, "!document.getElementById('away').hidden")
        page.keyboard.press("n")
        until(page, "document.getElementById('view').textContent.includes('Server unreachable')")
        before = len(asked)
        time.sleep(1.5)
        assert len(asked) - before <= 3
        write_lines(tmp_path / "1.jsonl", [VERL_LINE])
        with served(tmp_path, port=port):
            page.evaluate("dispatchEvent(new Event('online'))")
            until(page, "document.getElementById('away').hidden")
            until(page, f"document.querySelectorAll('.row').length === {len(demo_lines()) + 1}")
            chosen(page, "0.jsonl:3")
            until(page, "document.querySelector('.bubble')")
            page.goto("about:blank")


class SlowAnswers(Answers):
    """Those about the first trajectory, and to a query for it, take their time."""

    def rows(self, query: Query, offset: int, limit: int) -> JSON:
        if "line:1" in str(query):
            time.sleep(0.4)
        return super().rows(query, offset, limit)

    def detail(self, key: str) -> JSON:
        if key.endswith(":1"):
            time.sleep(0.4)
        return super().detail(key)


@pytest.mark.slow
def test_answers_that_come_too_late_are_not_shown(page: Page, tmp_path: Path) -> None:
    demo_dump(tmp_path)
    with served_to(page, tmp_path, of=SlowAnswers) as url:
        visit(page, url, at("0.jsonl:3"))
        page.evaluate("hash => { location.hash = hash; }", at("0.jsonl:1", q="line:1"))
        time.sleep(0.1)
        page.evaluate("hash => { location.hash = hash; }", at("0.jsonl:2", q="line:2..3"))
        chosen(page, "0.jsonl:2")
        time.sleep(0.9)
        until(page, "document.querySelectorAll('.row').length === 2")
        assert "line 2" in page.locator(".detail-head").inner_text()
        page.evaluate("hash => { location.hash = hash; }", at("0.jsonl:1", q="line:2..3"))
        time.sleep(0.1)
        page.go_back()
        time.sleep(0.6)
        chosen(page, "0.jsonl:2")
        assert "line 2" in page.locator(".detail-head").inner_text()


@pytest.mark.slow
def test_two_windows_show_what_each_was_asked_for(page: Page, tmp_path: Path) -> None:
    demo_dump(tmp_path)
    other = page.context.new_page()
    with served_to(page, tmp_path) as url:
        visit(page, url, at("0.jsonl:1"))
        visit(other, url, "#/?q=line%3A2")
        write_lines(tmp_path / "1.jsonl", [VERL_LINE])
        until(page, f"document.querySelectorAll('.row').length === {len(demo_lines()) + 1}")
        assert other.locator(".row").count() == 1
        other.close()


@pytest.mark.slow
def test_a_page_that_nobody_sees_waits_for_nothing(page: Page, tmp_path: Path) -> None:
    demo_dump(tmp_path)
    hidden = """Object.defineProperty(document, 'hidden', {value: %s, configurable: true});
        document.dispatchEvent(new Event('visibilitychange', {bubbles: true}))"""
    with served_to(page, tmp_path) as url:
        visit(page, url)
        asked: list[Any] = []
        page.on("request", lambda request: asked.append(request))
        page.evaluate(hidden % "true")
        write_lines(tmp_path / "1.jsonl", [VERL_LINE])
        time.sleep(1.2)
        assert asked == []
        page.evaluate(hidden % "false")
        until(page, f"document.querySelectorAll('.row').length === {len(demo_lines()) + 1}")
