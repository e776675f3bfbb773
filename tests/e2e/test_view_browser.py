"""The viewer's page in a real browser: headless Chromium, over a real socket."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsing import Window, at, chosen, go, key_shown, opened_browser, served_to, until, visit
from playwright.sync_api import Page
from viewing import (
    DAMAGED,
    VERL_LINE,
    demo_dump,
    demo_lines,
    explained_line,
    hostile_line,
    pictured_line,
    served,
    write_lines,
)

from pictures import png
from toolyard.images import image_of

ALL = 2 * len(demo_lines()) + 3


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
    folder = demo_dump(tmp_path_factory.mktemp("dump"), steps=2)
    write_lines(folder / "7.jsonl", [VERL_LINE, DAMAGED, hostile_line()])
    return folder


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with served(folder) as url:
        yield url


# The list -------------------------------------------------------------------------------------------------------------


def test_it_opens_with_the_list_and_the_first_trajectory_as_a_conversation(page: Page, url: str) -> None:
    visit(page, url)
    assert page.locator(".list-head strong").inner_text() == str(ALL)
    assert page.locator(".row").count() == ALL
    assert page.locator(".bubble.role-user").last.inner_text().startswith("User")
    assert page.locator(".call .badge").inner_text() == "ok"
    assert page.locator(".call .program .c-number").first.inner_text() == "5"


@pytest.mark.slow
def test_below_the_score_stands_how_it_is_made_and_why(page: Page, tmp_path: Path) -> None:
    write_lines(tmp_path / "0.jsonl", [explained_line(), VERL_LINE])
    with served_to(page, tmp_path) as url:
        visit(page, url)
        assert page.locator(".detail-head .why").inner_text().splitlines() == [
            "score 0 = 1 × final 0 + 0 × tool/code_interpreter 0",
            "final: the answer 8 is not 9",
        ]
        go(page, at("0.jsonl:1", tab="rewards"))
        said = page.locator("table.rewards tr", has_text="extracted").inner_text()
        assert " ".join(said.split()) == "final 0 × 1 reason the answer 8 is not 9 extracted 8 expected 9"
        go(page, at("0.jsonl:2"))
        assert page.locator(".detail-head .why").count() == 0  # nothing but the score, which stands above


@pytest.mark.slow
def test_a_picture_that_a_tool_returned_is_drawn_and_described(page: Page, tmp_path: Path) -> None:
    picture = image_of(png(20, 30))
    write_lines(tmp_path / "0.jsonl", [pictured_line(picture.url)])
    with served_to(page, tmp_path) as url:
        visit(page, url)
        drawn = page.locator(".answered .picture img")
        until(page, "document.querySelector('.picture img').complete")
        assert (drawn.evaluate("one => [one.naturalWidth, one.naturalHeight]")) == [20, 30]
        assert page.locator(".answered .picture").inner_text() == str(picture)


def test_filters_narrow_the_list_and_stand_in_the_address(page: Page, url: str) -> None:
    visit(page, url)
    page.keyboard.press("/")
    page.keyboard.type("score=1 step:0")
    page.keyboard.press("Enter")
    wanted = sum(line["score"] == 1 for line in demo_lines())
    until(page, f"document.querySelectorAll('.row').length === {wanted}")
    visit(page, url, page.evaluate("location.hash"))
    assert page.locator(".row").count() == wanted
    page.fill("#query", "scroe<1")
    page.press("#query", "Enter")
    until(page, "document.getElementById('query-error').textContent.includes('score')")
    page.locator(".tabs a").nth(1).click()
    page.wait_for_selector(".t")
    assert "score" in page.locator("#query-error").inner_text()
    page.fill("#query", "score>5")
    page.press("#query", "Enter")
    until(page, "document.querySelector('.more').textContent.startsWith('No matches')")
    page.go_back()
    page.go_back()
    page.go_back()
    until(page, f"document.querySelectorAll('.row').length === {wanted}")
    assert page.input_value("#query") == "score=1 step:0"


@pytest.mark.slow
def test_sorting_is_a_part_of_the_filter(page: Page, url: str) -> None:
    visit(page, url)
    page.select_option(".list-head select", "-time")
    until(page, "document.getElementById('query').value === 'sort:-time'")
    longest = max(demo_lines(), key=lambda line: sum(line["metrics"]["seconds"].values()))
    until(page, f"document.querySelector('.row').dataset.key.endsWith(':{demo_lines().index(longest) + 1}')")


@pytest.mark.slow
def test_keys_move_through_samples_and_steps(page: Page, url: str) -> None:
    visit(page, url, at("0.jsonl:1", tab="rewards"))
    for key, wanted in (
        ("n", "0.jsonl:2"),
        ("N", "1.jsonl:1"),
        ("P", "0.jsonl:1"),
        ("G", "7.jsonl:3"),
        ("p", "7.jsonl:2"),
    ):
        page.keyboard.press(key)
        chosen(page, wanted)
    page.keyboard.press("g")
    chosen(page, "0.jsonl:1")
    page.wait_for_selector('.tabs a[data-tab="rewards"][aria-selected="true"]')
    page.keyboard.press("?")
    assert page.locator("dialog[open]").count() == 1
    page.keyboard.press("Escape")
    assert page.locator("dialog[open]").count() == 0
    page.keyboard.press("i")
    page.keyboard.type("hosti")
    page.keyboard.press("Enter")
    chosen(page, "7.jsonl:3")


@pytest.mark.slow
def test_it_can_be_used_with_the_keyboard_alone_and_says_what_things_are(page: Page, url: str) -> None:
    visit(page, url, at("0.jsonl:2"))
    page.locator(".row.chosen").focus()
    assert page.locator('.row[tabindex="0"]').count() == 1
    page.keyboard.press("ArrowDown")
    chosen(page, "0.jsonl:3")
    until(page, "document.activeElement.dataset.key === '0.jsonl:3'")
    page.keyboard.press("End")
    chosen(page, "7.jsonl:3")
    assert page.get_by_role("listbox").get_by_role("option", selected=True).get_attribute("data-key") == "7.jsonl:3"
    page.keyboard.press("g")
    page.keyboard.press("2")
    page.wait_for_selector(".t")
    page.locator(".tokens").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    tokens = demo_lines()[0]["tokens"]
    assert f"id {tokens['response_ids'][1]}" in page.locator(".token-note").inner_text()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert f"id {tokens['prompt_ids'][-1]} · prompt" in page.locator(".token-note").inner_text()
    page.keyboard.press("Escape")
    page.keyboard.press("c")
    page.wait_for_selector(".chart svg")
    page.keyboard.press("Escape")
    until(page, "document.body.dataset.view === 'list'")
    names = page.evaluate(
        """[...document.querySelectorAll('input, select, button, dialog, svg[role]')].filter(node => !(
            node.ariaLabel || node.labels?.length || node.textContent.trim() || node.getAttribute('aria-labelledby')
        )).map(node => node.outerHTML)"""
    )
    assert names == []


@pytest.mark.slow
def test_of_thousands_only_what_is_seen_is_fetched_and_every_place_can_be_reached(page: Page, tmp_path: Path) -> None:
    rows = [
        {"input": f"question {number}", "output": "x", "score": 0.0, "step": number // 1000} for number in range(3000)
    ]
    write_lines(tmp_path / "0.jsonl", rows)
    with served_to(page, tmp_path) as url:
        visit(page, url, at("0.jsonl:2500"))
        assert page.locator(".list-head strong").inner_text() == "3,000"
        chosen(page, "0.jsonl:2500")
        assert page.locator(".row.chosen").is_visible()
        assert page.locator(".row").count() <= 300
        for key, wanted in (("n", 2501), ("P", 1001), ("P", 1), ("N", 1001), ("G", 3000), ("p", 2999)):
            page.keyboard.press(key)
            chosen(page, f"0.jsonl:{wanted}")
            until(page, "document.querySelector('.row.chosen').getBoundingClientRect().top > 90")
        page.evaluate("document.getElementById('list').scrollTo(0, 54 * 1500)")
        page.locator('.row[data-key="0.jsonl:1505"]').click()
        chosen(page, "0.jsonl:1505")


# A trajectory ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_search_marks_matches_and_goes_on_to_the_next_trajectory(page: Page, url: str) -> None:
    visit(page, url, at("0.jsonl:1"))
    page.keyboard.press("s")
    page.keyboard.type("marbles")
    page.wait_for_selector("mark")
    count = page.locator("mark").count()
    assert count >= 2
    for _ in range(count):
        page.keyboard.press("Enter")
    assert page.locator("mark.here").inner_text().lower() == "marbles"
    assert page.locator("#matches").inner_text() == f"{count} of {count}"
    before = key_shown(page)
    page.keyboard.press("Enter")
    until(page, f"document.querySelector('.row.chosen').dataset.key !== {before!r}")
    page.wait_for_selector("mark.here")
    page.locator("#view").focus()
    page.keyboard.press("Escape")
    until(page, "!document.querySelector('mark')")


@pytest.mark.slow
def test_search_finds_what_colours_and_tokens_divide(page: Page, url: str) -> None:
    visit(page, url, at("0.jsonl:1", find="TOTAL = 5 + 4"))
    assert page.locator("#matches").inner_text() == "1 of 1"
    assert "".join(page.locator("mark.here").all_inner_texts()) == "total = 5 + 4"
    wanted = " ".join(map(str, demo_lines()[0]["tokens"]["response_ids"][:12]))
    go(page, at("0.jsonl:1", find=wanted, tab="tokens"))
    assert page.locator("#matches").inner_text() == "1 of 1"
    assert page.locator("mark.here").count() >= 12


@pytest.mark.slow
def test_parts_can_be_left_out_and_the_link_remembers_which(page: Page, url: str) -> None:
    visit(page, url, at("0.jsonl:1"))
    page.keyboard.press("f")
    page.uncheck('#parts input[name="results"]')
    until(page, "!document.querySelector('.answered')")
    until(page, "document.activeElement.name === 'results' && document.querySelector('#parts').open")
    page.uncheck('#parts input[name="prompt"]')
    until(page, "!document.querySelector('details.prompt')")
    assert page.locator(".asked").count() == 1
    visit(page, url, page.evaluate("location.hash"))
    assert page.locator(".answered, details.prompt").count() == 0
    page.keyboard.press("n")
    chosen(page, "0.jsonl:2")
    until(page, "!document.querySelector('.answered') && document.querySelector('.asked')")


@pytest.mark.slow
def test_looking_otherwise_at_the_same_keeps_the_place_and_the_focus(page: Page, url: str) -> None:
    visit(page, url, at("0.jsonl:1", unfold="1"))
    page.evaluate("view.scrollTo(0, 300)")
    page.locator("#plain").focus()
    page.keyboard.press("Space")
    page.wait_for_selector("pre.raw")
    assert page.evaluate("view.scrollTop") == 300
    assert page.evaluate("document.activeElement.id") == "plain"
    page.locator("#tab-rewards").focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("table.rewards")
    assert page.evaluate("view.scrollTop") == 0
    assert page.evaluate("document.activeElement.id") == "tab-rewards"


@pytest.mark.slow
def test_what_was_unfolded_is_unfolded_when_the_link_is_opened(page: Page, url: str) -> None:
    visit(page, url, at("0.jsonl:1"))
    page.locator(".answered summary").click()
    until(page, "location.hash.includes('open=')")
    visit(page, url, page.evaluate("location.hash"))
    assert page.locator(".answered details[open]").count() == 1
    assert page.locator("details.prompt[open]").count() == 0
    page.keyboard.press("x")
    until(page, "document.querySelectorAll('.tab-body details:not([open])').length === 0")
    page.keyboard.press("n")
    chosen(page, "0.jsonl:2")
    until(page, "document.querySelector('.tab-body details.prompt[open]')")


@pytest.mark.slow
def test_the_message_as_it_was_sampled_can_be_seen(page: Page, url: str) -> None:
    visit(page, url, at("0.jsonl:1"))
    page.keyboard.press("r")
    page.wait_for_selector("pre.raw")
    assert "```python" in page.locator("pre.raw").first.inner_text()


def test_tokens_tell_origin_id_and_logprob_on_hover(page: Page, url: str) -> None:
    visit(page, url, at("0.jsonl:1", tab="tokens"))
    tokens = demo_lines()[0]["tokens"]
    assert page.locator(".t.o-sampled").count() == sum(tokens["response_mask"])
    page.locator(".t.o-sampled").first.hover()
    note = page.locator(".token-note").inner_text()
    assert f"id {tokens['response_ids'][0]}" in note
    assert "sampled, turn 1" in note
    assert f"({100 * math.exp(tokens['response_logprobs'][0]):.0f} %)" in note
    assert page.locator(".t.o-prompt").count() == 0
    page.locator(".tokens summary").click()
    until(page, f"document.querySelectorAll('.t.o-prompt').length === {len(tokens['prompt_ids'])}")
    shown = page.locator(".t.o-sampled").evaluate_all(
        "nodes => nodes.map(node => getComputedStyle(node).backgroundColor)"
    )
    assert len(set(shown)) > 3  # the less likely, the stronger


@pytest.mark.slow
def test_the_line_itself_is_shown_to_the_digit(page: Page, tmp_path: Path) -> None:
    write_lines(
        tmp_path / "0.jsonl", [{**VERL_LINE, "seed": 9007199254740993, "low": 1e-7, "n": [1, 2], "o": {"a": '{"[,'}}]
    )
    with served_to(page, tmp_path) as url:
        visit(page, url, at("0.jsonl:1", tab="raw"))
        shown = page.locator("pre.raw").inner_text()
        assert '  "seed": 9007199254740993,\n  "low": 1e-07,\n  "n": [1, 2],\n' in shown
        assert json.loads(shown)["o"] == {"a": '{"[,'}


def test_damaged_lines_are_shown_with_their_number_and_verls_as_a_conversation(page: Page, url: str) -> None:
    visit(page, url, at("7.jsonl:2"))
    assert "Damaged: 7.jsonl, line 2" in page.locator("#view h2").inner_text()
    assert "half a li" in page.locator("pre.raw").inner_text()
    go(page, at("7.jsonl:1"))
    assert "It is 4." in page.locator(".bubble.role-assistant").inner_text()
    go(page, at("nowhere.jsonl:1"))
    assert "there is no line" in page.locator("#view").inner_text()


# Times, steps, differences --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_request_and_a_step_show_where_the_time_went(page: Page, url: str) -> None:
    visit(page, url, at("0.jsonl:1"))
    page.keyboard.press("t")
    page.wait_for_selector("svg.timeline")
    assert page.locator("svg.timeline rect.stage-engine").count() == 2
    assert page.locator(".scale span").first.inner_text() == "0 s"
    go(page, "#/step/0?q=line%3A1..3")
    assert "The step waited" in page.locator(".verdict").inner_text()
    assert page.locator("table.slowest tr").count() == 3
    page.locator("table.slowest a").first.click()
    page.wait_for_selector('.tabs a[data-tab="timeline"][aria-selected="true"]')
    assert page.input_value("#query") == "line:1..3"


@pytest.mark.slow
def test_curves_over_steps_tell_their_numbers_and_lead_to_the_step(page: Page, url: str) -> None:
    visit(page, url, "#/charts?q=step%3A..1")
    assert page.locator(".chart svg").count() == 7
    drawn = page.locator(".chart svg").first
    drawn.hover(position={"x": 120, "y": 60})
    assert page.locator(".readout").first.inner_text() == "step 0: mean 0.313 (0 to 1)"
    drawn.click(position={"x": 120, "y": 60})
    until(page, "location.hash.startsWith('#/step/0?q=')")
    page.wait_for_selector("table.tally")
    assert "stop" in page.locator("table.tally").first.inner_text()


def test_two_samples_of_a_task_are_compared_with_the_first_difference_marked(page: Page, url: str) -> None:
    visit(page, url, at("0.jsonl:1"))
    page.locator("select.compare").select_option(index=1)
    page.wait_for_selector("#divergence")
    assert "First difference: token" in page.locator("#divergence").inner_text()
    assert page.locator("table.diff .d-changed ins").count() >= 2
    assert page.locator("tr.first").count() == 1
    page.locator('[data-by="token"]').click()
    page.wait_for_selector(".t.first")
    visit(page, url, page.evaluate("location.hash"))
    assert page.locator(".t.first").count() == 2
    lines = demo_lines()
    one, other = lines[0], next(line for line in lines[1:] if line["batch_data_id"] == lines[0]["batch_data_id"])
    place = next(i for i, (a, b) in enumerate(zip(_ids(one), _ids(other), strict=False)) if a != b)
    for index, line in enumerate((one, other)):
        page.locator(".t.first").nth(index).hover()
        assert f"token {place} · id {_ids(line)[place]} · sampled" in page.locator(".token-note").inner_text()
    page.locator(".t.o-sampled:not(.differs)").first.hover()
    said = page.locator(".token-note").inner_text()
    assert said.count("logprob") == 2
    assert page.locator(".t.partner").count() == 1
    page.keyboard.press("d")
    until(page, "document.querySelector('.t.first').getBoundingClientRect().top < innerHeight")


def _ids(line: dict[str, Any]) -> list[int]:
    return [*line["tokens"]["prompt_ids"], *line["tokens"]["response_ids"]]


@pytest.mark.slow
def test_the_same_request_of_two_runs_is_offered_for_comparison(page: Page, tmp_path: Path) -> None:
    for run in ("a", "b"):
        (tmp_path / run).mkdir()
        write_lines(tmp_path / run / "0.jsonl", [{**demo_lines()[0], "score": 0.5 if run == "a" else 1.0}])
    with served_to(page, tmp_path) as url:
        visit(page, url, at("a/0.jsonl:1"))
        assert "same request in b/0.jsonl, score 1" in page.locator("select.compare").inner_text()
        page.locator("select.compare").select_option(index=1)
        page.wait_for_selector(".divergence.same")
        go(page, "#/step/0")
        page.get_by_role("link", name="a", exact=True).click()
        until(page, "document.getElementById('query').value === 'run=a'")


# Looks ----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_light_and_dark_are_remembered(page: Page, url: str) -> None:
    visit(page, url)
    first = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.keyboard.press("T")
    second = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert first != second
    visit(page, url)
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == second
    page.click("#theme")


@pytest.mark.slow
def test_nothing_is_wider_than_the_window(page: Page, tmp_path: Path) -> None:
    line = demo_lines()[0]
    line["turns"][0]["tool_calls"][0]["name"] = "n" * 300
    line["messages"][-1]["content"] = "W" * 3000
    line |= {"request_id": "w" * 190, "batch_data_id": "y" * 190, "finish_reason": "f" * 150}
    write_lines(tmp_path / "0.jsonl", [line, {**line, "request_id": "v" * 190, "output": "x"}])
    places = (at("0.jsonl:1"), "#/charts", "#/step/0", at("0.jsonl:1", tab="rewards"), "#/compare/0.jsonl:1/0.jsonl:2")
    with served_to(page, tmp_path) as url:
        visit(page, url)
        for hash_ in places:
            go(page, hash_)
            for width in (700, 1100):
                page.set_viewport_size({"width": width, "height": 900})
                assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (hash_, width)
                assert page.evaluate("view.scrollWidth <= view.clientWidth"), (hash_, width)
