"""How the viewer's page looks, in headless Chromium: what comes first, what colors mean, what must not move or hide."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from itertools import combinations
from math import dist
from pathlib import Path
from typing import Any

import pytest
from browsing import Window, at, go, opened_browser, served_to, until, visit
from playwright.sync_api import Page
from viewing import VERL_LINE, demo_lines, failed_fields, served, troubled_dump, write_lines

from patience import patient
from toolyard.messages import JSON
from toolyard.rollout.finish import FinishReason
from toolyard.sandbox.protocol import Verdict
from toolyard.tools.calls import ToolOutcome
from toolyard.viewer.web.answers import Answers
from toolyard.viewer.web.server import STATIC

FAILED = 7  # of the troubled dump's four steps


@pytest.fixture(scope="module")
def window() -> Iterator[Window]:
    with opened_browser() as browser:
        yield Window(browser)


@pytest.fixture
def page(window: Window) -> Iterator[Page]:
    with window.watched() as page:
        yield page


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(troubled_dump(tmp_path_factory.mktemp("dump"))) as url:
        yield url


# Four questions, from a cold start, with at most two clicks or keys ---------------------------------------------------


def test_one_click_shows_which_failed_and_why(page: Page, url: str) -> None:
    visit(page, url)
    page.click("#failed")
    until(page, f"document.querySelectorAll('.row').length === {FAILED}")
    assert page.input_value("#query") == "failed:yes"
    for row in page.locator(".row").all():
        assert "engine_failure: all 3 attempts failed: Connection refused" in row.inner_text()
    said = page.locator("#view .failure").inner_text()
    assert said.startswith("Infrastructure failure while GENERATING: all 3 attempts failed: Connection refused")
    order = [page.locator(f"#view {one}").bounding_box() for one in (".failure", ".facts", ".tab-bar", ".conversation")]
    tops = [box["y"] for box in order if box]
    assert len(tops) == 4
    assert tops == sorted(tops)


@pytest.mark.slow
def test_failures_are_the_loudest_rows(page: Page, url: str) -> None:
    visit(page, url, at("0.jsonl:1"))
    failed = page.locator('.row[data-key="0.jsonl:2"]')
    assert color(failed.locator(".reason"), "color") == token(page, "--bad")
    assert color(failed, "background-color") != color(page.locator('.row[data-key="0.jsonl:3"]'), "background-color")
    assert failed.locator(".score").evaluate("one => getComputedStyle(one, '::before').content").startswith('"✕ "')
    assert color(page.locator('.row[data-key="0.jsonl:6"] .finish'), "color") == token(page, "--cut")


def test_one_key_shows_why_this_score(page: Page, url: str) -> None:
    visit(page, url)
    page.keyboard.press("4")
    page.wait_for_selector("table.rewards")
    assert "final" in page.locator("table.rewards").inner_text()


@pytest.mark.slow
def test_two_keys_lead_to_the_least_likely_token_and_more_to_the_next(page: Page, url: str) -> None:
    visit(page, url)
    page.keyboard.press("2")
    page.wait_for_selector(".t")
    assert page.locator(".t.o-prompt").count() == 0  # folded: the page starts at the response
    page.keyboard.press("u")
    sampled = [
        (logprob, id_)
        for logprob, id_, mask in zip(
            *(demo_lines()[0]["tokens"][name] for name in ("response_logprobs", "response_ids", "response_mask")),
            strict=True,
        )
        if mask
    ]
    ranked = sorted(sampled)
    for key, rank in (("", 0), ("u", 1), ("u", 2), ("U", 1)):
        if key:
            page.keyboard.press(key)
        note = page.locator(".token-note").inner_text()
        assert f"id {ranked[rank][1]} " in note, (key, note)
        assert f"of {len(ranked)}" in note
        assert page.locator(".t.at").count() == 1
    page.click("#least-likely")
    assert page.locator(".token-note").inner_text().startswith("least likely of")
    go(page, at("0.jsonl:2", tab="tokens"))
    page.keyboard.press("U")
    assert page.locator(".token-note").inner_text().startswith("least likely of")


@pytest.mark.slow
def test_two_keys_compare_two_samples(page: Page, url: str) -> None:
    visit(page, url)
    page.keyboard.press("d")
    page.keyboard.press("ArrowDown")
    page.wait_for_selector("#divergence")
    assert "First difference" in page.locator("#divergence").inner_text()
    page.locator('[data-by="token"]').click()
    page.wait_for_selector(".t.first")
    headings = page.locator("#tab-body h3").all_inner_texts()
    assert any(heading.startswith("Turn 1, not sampled (masked)") for heading in headings), headings


@pytest.mark.slow
def test_a_long_episode_has_an_outline_that_leads_to_its_turns(page: Page, url: str) -> None:
    visit(page, url, at("0.jsonl:9"))
    for width in (1440, 1024):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.locator(".outline button").count() == 14
        assert page.locator(".outline .fault").count() == 4
        page.locator('.outline [data-to="9"]').click()
        box, bar = page.locator('.bubble[data-turn="8"]').bounding_box(), page.locator(".tab-bar").bounding_box()
        assert box
        assert bar
        assert bar["y"] + bar["height"] <= box["y"] < 300
    page.keyboard.press(".")
    tops = page.locator('.bubble[data-turn="8"], .bubble[data-turn="9"]').evaluate_all(
        "nodes => nodes.map(node => node.getBoundingClientRect().top)"
    )
    assert tops[0] < 100 < tops[1]
    go(page, at("0.jsonl:1"))
    assert page.locator(".outline").count() == 0


# What is unknown ------------------------------------------------------------------------------------------------------


def test_unknown_is_a_dash_and_a_chart_without_data_is_not_drawn(page: Page, tmp_path: Path) -> None:
    line = {**VERL_LINE, "input": "What is 2 + 2?"}  # without the marks of a chat template
    write_lines(tmp_path / "0.jsonl", [{**line, "step": step} for step in (0, 1)])
    with served_to(page, tmp_path) as url:
        visit(page, url)
        facts = page.locator(".detail-head .facts").inner_text()
        assert "– turns · – calls" in facts
        assert not re.search(r"\b0 (turns|calls|tokens|s)\b", facts)
        assert not re.search(r"turn|call|token| s\b", page.locator(".row .facts").first.inner_text())
        go(page, "#/charts")
        assert page.locator(".chart figcaption").all_inner_texts() == [
            "Score: mean, min and max",
            "Score distribution",
            "Finish reasons",
        ]
        cells = page.locator("table.steps tbody tr").first.locator("td").all_inner_texts()
        assert cells[6:10] == ["–", "–", "–", "–"]
        go(page, "#/step/0")
        assert page.locator(".chart figcaption").all_inner_texts() == ["Score distribution", "Finish reasons"]
        assert "No timings in this dump" in page.locator("#view").inner_text()


@pytest.mark.slow
def test_failed_requests_are_counted_in_every_step(page: Page, url: str) -> None:
    visit(page, url, "#/charts")
    assert f"{FAILED} failed" in page.locator("#view h2").inner_text()
    counts = page.locator("table.steps td:nth-child(3)").all_inner_texts()
    assert counts == ["1", "2", "3", "1"]
    page.locator('svg[aria-label="Failed requests"]').hover(position={"x": 60, "y": 60})
    assert page.locator(".readout").first.inner_text() == "step 0: failed 6.3 %"
    go(page, "#/step/2")
    page.get_by_role("link", name="3 failed").click()
    until(page, "document.querySelectorAll('.row').length === 3")


@pytest.mark.slow
def test_a_run_of_one_step_has_distributions_instead_of_dots(page: Page, url: str) -> None:
    visit(page, url, "#/charts?q=step%3A0")
    assert page.locator(".chart .dot").count() == 0
    titles = page.locator(".chart figcaption").all_inner_texts()
    assert titles[:5] == [
        "Score distribution",
        "Turns per request",
        "Tool calls per request",
        "Response tokens",
        "Request time",
    ]
    turns = page.locator('svg[aria-label="Turns per request"] title').all_text_contents()
    assert turns[:2] == ["2: 13", "3: 2"]
    assert turns[-1] == "14: 1"


# Colors ---------------------------------------------------------------------------------------------------------------

MEANINGS = ("green", "red", "amber", "purple", "grey")
STAGES = ("grey", "blue", "slate", "brown", "sky", "violet")
EYES = {  # how colors look to people without one kind of cone (Machado and others, 2009), and with all
    "all": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no red": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    "no green": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "no blue": ((1.256, -0.077, -0.179), (-0.078, 0.931, 0.148), (0.005, 0.691, 0.304)),
}


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_eye_can_tell_the_meanings_apart(theme: str) -> None:
    style = (STATIC / "style.css").read_text()
    light, dark = style.split('[data-theme="dark"] {')
    colors = dict(re.findall(r"--(\w+): (#\w{6});", light))
    if theme == "dark":
        colors |= dict(re.findall(r"--(\w+): (#\w{6});", dark.partition("}")[0]))
    for eye, matrix in EYES.items():
        for names, enough in ((MEANINGS, 0.07), (STAGES, 0.045)):
            for one, other in combinations(names, 2):
                assert dist(*(_seen(colors[name], matrix) for name in (one, other))) > enough, (eye, one, other)


def _seen(color: str, eye: tuple[tuple[float, ...], ...]) -> tuple[float, ...]:
    """The color as that eye sees it, in OKLab, where distances are as people judge them."""
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    red, green, blue = (max(0.0, sum(a * b for a, b in zip(row, linear, strict=True))) for row in eye)
    cones = [
        (0.4122 * red + 0.5363 * green + 0.0514 * blue) ** (1 / 3),
        (0.2119 * red + 0.6807 * green + 0.1074 * blue) ** (1 / 3),
        (0.0883 * red + 0.2817 * green + 0.6300 * blue) ** (1 / 3),
    ]
    rows = ((0.2105, 0.7936, -0.0041), (1.9780, -2.4286, 0.4506), (0.0259, 0.7828, -0.8087))
    return tuple(sum(a * b for a, b in zip(row, cones, strict=True)) for row in rows)


def test_every_finish_reason_verdict_and_outcome_has_its_meaning(page: Page, url: str) -> None:
    visit(page, url)
    kinds = page.evaluate(
        "names => Object.fromEntries(names.map(name => [name, Toolyard.kind(name)]))",
        [*FinishReason, *Verdict, *ToolOutcome],
    )
    failed = {name for name, kind in kinds.items() if kind == "bad"}
    assert failed == {reason.value for reason in FinishReason if reason.state == "FAILED"}
    assert {name for name, kind in kinds.items() if kind == "good"} == {"stop", "ok"}
    assert {name for name, kind in kinds.items() if kind == "none"} == {"interaction_ended"}
    limits = {verdict.value for verdict in Verdict if verdict.endswith("_exceeded")}
    assert limits <= {name for name, kind in kinds.items() if kind == "cut"}


@pytest.mark.slow
def test_a_name_has_one_color_on_every_page(page: Page, url: str) -> None:
    visit(page, url, "#/charts")
    over_steps = legend(page)
    go(page, "#/step/1")
    rows = page.locator("table.tally tr").evaluate_all(
        "rows => rows.map(row => [row.querySelector('th').textContent,"
        " getComputedStyle(row.querySelector('i')).backgroundColor])"
    )
    assert {name: over_steps[name] for name, _ in rows} == dict(rows)
    assert over_steps["engine_failure"] == token(page, "--red", mixed=True)
    assert over_steps["length"] == token(page, "--amber", mixed=True)
    assert over_steps["stop"] == over_steps["ok"] == token(page, "--green", mixed=True)
    other = page.evaluate("['a reason of somebody else', 'another'].map(name => Toolyard.hue(name))")
    assert all(re.fullmatch(r"further-\d", hue) for hue in other)


def legend(page: Page) -> dict[str, str]:
    pairs: list[list[str]] = page.locator(".chart .legend span").evaluate_all(
        "nodes => nodes.map(one => [one.textContent.replace(/ \\(.*/, ''),"
        " getComputedStyle(one.querySelector('i')).backgroundColor])"
    )
    return {one[0]: one[1] for one in pairs}


def color(one: Any, name: str) -> str:
    return one.evaluate("(one, name) => getComputedStyle(one)[name]", name)


def token(page: Page, name: str, *, mixed: bool = False) -> str:
    """The color of that name, as the browser writes it; differently if `color-mix` made it."""
    return page.evaluate(
        """([name, mixed]) => {
            const one = document.createElement("i");
            one.style.color = mixed ? `color-mix(in srgb, var(${name}) 100%, white)` : `var(${name})`;
            document.body.append(one);
            const { color } = getComputedStyle(one);
            one.remove();
            return color;
        }""",
        [name, mixed],
    )


# Charts, waiting, widths ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_pointing_at_a_chart_moves_nothing_and_cuts_nothing(page: Page, url: str) -> None:
    for width in (1440, 1024):
        page.set_viewport_size({"width": width, "height": 800})
        visit(page, url, "#/charts")
        charts = page.locator(".chart svg.steps")
        places = "nodes => nodes.map(node => node.getBoundingClientRect().y + view.scrollTop)"
        for index in range(charts.count()):
            page.mouse.move(1, 1)
            before = charts.evaluate_all(places)
            charts.nth(index).hover()
            assert page.locator(".readout").nth(index).inner_text().startswith("step")
            assert charts.evaluate_all(places) == before
            cut = page.locator(".readout").nth(index).evaluate("one => one.scrollHeight - one.clientHeight")
            assert cut <= 0, (width, index)


class SlowComparisons(Answers):
    gate = threading.Event()

    def comparison(self, left: str, right: str) -> JSON:
        assert self.gate.wait(60)
        return super().comparison(left, right)


@pytest.mark.slow
def test_a_slow_comparison_says_that_it_is_loading_under_its_address(page: Page, tmp_path: Path) -> None:
    SlowComparisons.gate.clear()
    with served_to(page, troubled_dump(tmp_path, steps=1), of=SlowComparisons) as url:
        try:
            visit(page, url, at("0.jsonl:1"))
            page.locator("select.compare").select_option(index=1)
            until(page, "location.hash.startsWith('#/compare/') && view.getAttribute('aria-busy') === 'true'")
            until(page, "Number(getComputedStyle(view.firstElementChild).opacity) < 0.5")
            assert page.locator("#loading").is_visible()
        finally:
            SlowComparisons.gate.set()
        page.wait_for_selector("#divergence")
        assert page.locator("#view").get_attribute("aria-busy") is None
        assert not page.locator("#loading").is_visible()
        go(page, "#/compare/0.jsonl%3A1/nowhere%3A1")
        assert page.locator("#view").get_attribute("aria-busy") is None


PLACES = (at("0.jsonl:2"), at("0.jsonl:9"), at("0.jsonl:1", tab="tokens"), at("0.jsonl:1", tab="timeline"), "#/charts")
PLACES = (*PLACES, "#/step/0", "#/compare/0.jsonl%3A4/0.jsonl%3A2", "#/compare/0.jsonl%3A4/0.jsonl%3A2?by=token")
READ = ".row :is(.facts, .time, .step, .finish), #view :is(.facts, .badge, .tab-bar, th, td)"
CUT = """read => [...document.querySelectorAll(read)]
    .filter(one => one.offsetParent && getComputedStyle(one).display !== 'inline')
    .filter(one => one.scrollWidth > one.clientWidth + 1)
    .map(one => `${one.className}: ${one.textContent}`)"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 1024])
def test_nothing_is_cut_on_any_page(page: Page, url: str, width: int, theme: str) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    visit(page, url)
    page.evaluate("theme => { document.documentElement.dataset.theme = theme; }", theme)
    for place in PLACES:
        go(page, place)
        assert page.evaluate(CUT, READ) == [], place
        assert page.evaluate("view.scrollWidth <= view.clientWidth"), place
    assert page.locator(".row.failed").count() == FAILED


# Terminal colors ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_colors_of_programs_are_shown_and_their_other_sequences_left_out(page: Page, tmp_path: Path) -> None:
    lines = demo_lines()[:2]
    response = "\x1b[1;31mFAILED\x1b[0m 1 of 2\x1b[K\x1b[2J\x1b[38;5;208m done\x1b[39m\n\x9b32mok\x9b0m"
    lines[0]["turns"][0]["tool_calls"][0] |= {"response": response, "error": "\x1b[31mTraceback\x1b[0m"}
    lines[1] |= failed_fields("tool_failure", "TOOL_CALLING", "\x1b[35mno workers\x1b[0m left")
    lines[1]["turns"][0]["tool_calls"][0]["response"] = response.replace("FAILED", "PASSED")
    write_lines(tmp_path / "0.jsonl", lines)
    with served_to(page, tmp_path) as url:
        visit(page, url, at("0.jsonl:1"))
        result = page.locator("pre.result").first
        assert result.inner_text() == "FAILED 1 of 2 done\nok"
        assert result.locator(".ansi-bold.ansi-red").inner_text() == "FAILED"
        assert result.locator(".ansi-green").inner_text() == "ok"
        assert page.locator("pre.error").inner_text() == "Traceback"
        page.keyboard.press("s")
        page.keyboard.type("FAILED 1 of")
        page.wait_for_selector("mark")
        go(page, at("0.jsonl:2"))
        assert "while TOOL_CALLING: no workers left" in page.locator(".failure").inner_text()
        assert "tool_failure: no workers left" in page.locator(".row.failed").inner_text()
        go(page, "#/compare/0.jsonl%3A1/0.jsonl%3A2")
        assert "[1;31m" not in page.locator("#tab-body").inner_text()
        assert "␛" not in page.locator("#tab-body").inner_text()


HOSTILE = {
    "conceals": ("\x1b[8mhidden\x1b[0m", "hidden"),
    "paints over": ("\x1b[30;40mhidden\x1b[0m", "hidden"),
    "never ends": ("\x1b[" + "1;" * 500 + "x", "␛["),
    "a title": ("\x1b]0;owned\x07", "␛]0;owned␇"),
    "a link": ("\x1b]8;;javascript:alert(1)\x1b\\click\x1b]8;;\x1b\\", "click"),
    "many numbers": ("\x1b[38;2;999;-1;x;1mtext", "text"),
    "markup": ("\x1b[31m<img src=x onerror=alert(1)>", "<img src=x onerror=alert(1)>"),
    "erases": ("kept\x1b[2K\x1b[1A\x1b[10D", "kept"),
}


@pytest.mark.slow
def test_hostile_sequences_hide_nothing_and_start_nothing(page: Page, url: str) -> None:
    visit(page, url)
    for name, (text, seen) in HOSTILE.items():
        shown = page.evaluate(
            """text => {
                const box = document.createElement("pre");
                box.append(...Toolyard.ansi(text));
                view.append(box);
                const made = [...box.querySelectorAll("*")];
                const hidden = made.some(one => getComputedStyle(one).visibility !== "visible");
                return [box.innerText, hidden, made.some(one => one.tagName !== "SPAN")];
            }""",
            text,
        )
        assert seen in shown[0], name
        assert "\x1b" not in shown[0]
        assert shown[1:] == [False, False], name
    many = page.evaluate(
        "() => { const at = performance.now(); Toolyard.ansi('\\x1b[31mx'.repeat(200000));"
        " Toolyard.ansi('\\x1b['.repeat(200000)); return performance.now() - at; }"
    )
    assert many < patient(10) * 1000
