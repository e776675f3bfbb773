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
    with_call(
        second[8], 30.0, name="search", outcome="timed_out", response="", error="no answer within 30 s", metrics={}
    )
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


@pytest.mark.slow
def test_a_group_shows_its_scores_and_leads_to_its_trajectories(page: Page, url: str) -> None:
    visit(page, url, "#/groups?kind=mixed")
    rows = page.locator(".groups tbody tr")
    assert rows.nth(0).locator(".cell").all_inner_texts() == ["0", "1", "0"]
    assert rows.nth(3).locator(".cell").all_inner_texts() == ["1", "×", "0"]
    assert "failed: connection refused" in (rows.nth(3).locator(".cell").nth(1).get_attribute("title") or "")
    assert rows.nth(0).locator("td").all_inner_texts()[1:4] == ["0.333", "0.577", "0"]
    assert rows.nth(3).locator("td").all_inner_texts()[3] == "1"
    assert "truth: truth of some" in rows.nth(0).inner_text()
    page.get_by_label("show advantages").check()
    until(page, "document.querySelector('.cells .cell').textContent === '−0.58'")
    assert texts(page, ".groups tbody tr:first-child .cell") == ["−0.58", "+1.2", "−0.58"]
    click(page, "td.task a")
    assert texts(page, ".list-head strong") == ["3"]
    chosen(page, "0.jsonl:7")
    page.go_back()
    until(page, "document.body.dataset.view === 'groups' && document.querySelector('.cell')")
    page.locator(".groups tbody tr").nth(3).locator(".cell").nth(2).click()
    chosen(page, "1.jsonl:15")


@pytest.mark.slow
def test_groups_are_sorted_and_filtered(page: Page, url: str) -> None:
    visit(page, url, "#/groups")
    click(page, 'th a:text-is("mean")')
    means = texts(page, ".groups tbody td:nth-child(2)")
    assert means[:2] == ["1", "1"]
    assert means[-1] == "–", "unknown comes last, and is not 0"
    click(page, 'th a:text("mean")')
    assert texts(page, ".groups tbody td:nth-child(2)")[0] == "0"
    assert page.locator('th[aria-sort="ascending"]').inner_text() == "mean ↑"
    page.fill("#query", "step:1 failed:no")
    page.press("#query", "Enter")
    until(page, "document.querySelectorAll('.groups tbody tr').length === 5")
    assert page.locator("p.verdict").inner_text().startswith("3 of 5 groups")
    page.fill("#query", "score>7")
    page.press("#query", "Enter")
    until(page, "document.querySelector('p.verdict').textContent === 'No matches'")


@pytest.mark.slow
def test_groups_of_several_runs_are_kept_apart(page: Page, tmp_path: Path) -> None:
    for run in ("a", "ba"):
        (tmp_path / run).mkdir()
        write_lines(tmp_path / run / "0.jsonl", [line_of(0, "task", at, at % 2) for at in range(2)])
    with served_to(page, tmp_path) as url:
        visit(page, url, "#/groups")
        assert [text.split("\n")[0] for text in texts(page, "td.task")] == [
            "task a · step 0 · truth: truth of task",
            "task ba · step 0 · truth: truth of task",
        ]
        click(page, "td.task a")
        assert page.locator(".row").count() == 2
        assert page.input_value("#query").endswith(" step:0 run=a")


CORNERS: list[tuple[list[float | None], str]] = [
    ([0.0], "Every task has one sample: GRPO needs several."),
    ([0.0, 0.0], "None of 1 group is mixed: GRPO learns nothing from them."),
    ([0.0, 1.0], "The only group is mixed."),
    ([None, None], "No group has scores."),
]


@pytest.mark.slow
def test_the_answer_about_groups_is_right_in_the_corners(page: Page, tmp_path: Path) -> None:
    for step, (scores, _) in enumerate(CORNERS):
        write_lines(tmp_path / f"{step}.jsonl", [line_of(step, "task", at, score) for at, score in enumerate(scores)])
    with served_to(page, tmp_path) as url:
        visit(page, url)
        for step, (_, said) in enumerate(CORNERS):
            go(page, f"#/groups?q=step:{step}")
            assert page.locator("p.verdict").inner_text() == said


@pytest.mark.slow
def test_many_groups_are_shown_in_pages_and_a_huge_one_not_whole(page: Page, tmp_path: Path) -> None:
    lines = [{"input": f"question {at // 2}", "output": "x", "score": at % 3, "step": 0} for at in range(520)]
    huge = [{"input": "the same", "output": "x", "score": at % 2, "step": 1} for at in range(250)]
    write_lines(tmp_path / "0.jsonl", [*lines, *huge])
    with served_to(page, tmp_path) as url:
        visit(page, url, "#/groups?q=step:0")
        assert page.locator(".groups tbody tr").count() == 100
        assert page.locator(".pages").inner_text().split("\n")[-2:] == ["1 to 100 of 260", "next ›"]
        click(page, '.pages a:text("next")')
        click(page, '.pages a:text("next")')
        assert page.locator(".groups tbody tr").count() == 60
        assert page.evaluate("view.scrollTop") == 0
        click(page, '.chip[data-kind="mixed"]')
        assert "page=" not in page.evaluate("location.hash")
        go(page, "#/groups?q=step:1")
        assert page.locator(".cells .cell").count() == 100
        click(page, '.cells a:text-is("and 150 more")')
        assert texts(page, ".list-head strong") == ["250"]


# Calls ----------------------------------------------------------------------------------------------------------------


def test_which_calls_fail_and_why(page: Page, url: str) -> None:
    visit(page, url)
    open_view(page, "calls")
    said = page.locator("p.verdict").inner_text()
    assert said == f"3 of 29 calls failed (10 %), most often code_interpreter: {ERROR} (2)."
    first = page.locator(".tools tbody tr").first.locator("td").all_inner_texts()
    assert first[:4] == ["code_interpreter", "28", "2", "93 %"]
    assert first[4:9] == ["858 ms", "2 s", "4 s", "824 ms", "1 s"]
    assert first[9].split("\n") == ["ok 26", "failed 2"]
    search = page.locator(".tools tbody tr").nth(1).locator("td").all_inner_texts()
    assert search[7:9] == ["–", "–"], "no wait is known"
    assert texts(page, ".errors tbody tr") == [
        f"2\tcode_interpreter\t{ERROR}",
        "1\tsearch\tno answer within 30 s",
    ]
    click(page, ".errors a")
    assert page.input_value("#query") == f'tool=code_interpreter error="{ERROR}"'
    assert page.locator(".row").count() == 2
    assert page.locator("mark.here").inner_text() == ERROR


@pytest.mark.slow
def test_which_calls_are_slow(page: Page, url: str) -> None:
    visit(page, url)
    open_view(page, "calls")
    slowest = texts(page, ".slow-calls tbody tr")
    assert slowest[0] == "30 s\t–\tsearch\ttimed_out\t1\t1\t1-some-2"
    assert slowest[1].startswith("4 s\t1 s\tcode_interpreter\tfailed")
    click(page, ".slow-calls a")
    chosen(page, "1.jsonl:9")
    top = "document.querySelector('[data-turn=\"0\"]').getBoundingClientRect().top"
    until(page, f"{top} < innerHeight / 2")


@pytest.mark.slow
def test_the_filter_is_about_calls_too(page: Page, url: str) -> None:
    visit(page, url, "#/calls?q=call_time%3E3")
    assert texts(page, ".tools tbody td:first-child") == ["code_interpreter", "search"]
    click(page, '.verdict-names a:text("timed_out")')
    assert page.input_value("#query") == "call_time>3 tool=search verdict=timed_out"
    assert texts(page, ".tools tbody td:first-child") == ["search"]
    click(page, "header [data-view=list]")
    assert page.locator(".row").count() == 1
    go(page, "#/calls?q=tool%3Anothing")
    assert "No calls match the filter." in page.locator("#view").inner_text()


# Steps ----------------------------------------------------------------------------------------------------------------


def test_what_changed_between_two_steps(page: Page, url: str) -> None:
    visit(page, url)
    open_view(page, "changes")
    assert page.locator("p.verdict").inner_text() == (
        "Mean score 0.458 → 0.483 over 4 tasks: 1 solved, 1 broken from step 0 to step 1."
    )
    chips = dict(text.rsplit(" ", 1) for text in texts(page, ".chip"))
    assert chips == {"all": "6", "broken": "1", "solved": "1", "better": "1", "same": "1", "new": "1", "gone": "1"}
    first = page.locator(".changes tbody tr").first
    assert first.locator("td").all_inner_texts()[:5] == ["broken", "▼ −0.333", "0.333", "0", "3 → 3"]
    gone = page.locator(".changes tbody tr", has_text="gone").locator("td").all_inner_texts()
    assert gone[1:5] == ["–", "–", "–", "2 → 0"]
    click(page, '.chip[data-kind="broken"]')
    assert page.locator(".changes tbody tr").count() == 1
    click(page, ".changes tbody td:nth-child(4) a")
    assert page.locator(".row").count() == 3
    chosen(page, "1.jsonl:7")
    page.go_back()
    until(page, "document.querySelector('.changes tbody tr')")
    page.select_option('select[name="before"]', "step:1")
    until(page, "document.querySelector('p.verdict').textContent.includes('from step 1 to step 1')")


@pytest.mark.slow
def test_if_there_is_one_step_runs_are_compared(page: Page, tmp_path: Path) -> None:
    write_lines(tmp_path / "0.jsonl", [line_of(0, "task", 0, 0.0)])
    with served_to(page, tmp_path) as url:
        visit(page, url, "#/changes")
        assert "This dump has only one step." in page.locator("#view").inner_text()
        for run in ("with words", "b"):
            (tmp_path / run).mkdir()
            write_lines(tmp_path / run / "0.jsonl", [line_of(0, "task", 0, 1.0)])
    with served_to(page, tmp_path) as url:
        visit(page, url, '#/changes?before=run=""&after=run="with words"')
        assert "1 solved" in page.locator("p.verdict").inner_text()
        click(page, ".changes tbody td:nth-child(4) a")
        assert page.locator(".row").count() == 1
        chosen(page, "with words/0.jsonl:1")


def test_what_the_step_waited_for_by_wall_clock(page: Page, url: str) -> None:
    visit(page, url)
    page.keyboard.press("c")
    page.wait_for_selector("table.steps")
    click(page, "table.steps tbody tr:last-child a")
    marked = page.locator("tr.critical")
    assert "ended last" in marked.inner_text()
    assert "1-some-2" in marked.inner_text()
    assert "1-some-2" in page.locator("p.verdict").inner_text()
    assert page.locator(".waterfall tbody tr").count() == 15
    starts = page.locator(".waterfall tbody tr svg").evaluate_all(
        "bars => bars.map(bar => Number(bar.querySelector('rect').getAttribute('x')))"
    )
    assert starts == sorted(starts)
    assert starts[0] == 0 < starts[1]
    assert page.locator(".axis span").first.inner_text() == "0 s"
    go(page, "#/step/0")
    assert "This dump has no start times; bars start at 0." in page.locator("#view").inner_text()
    assert page.locator(".waterfall").count() == 0


# Marks and the filter -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_marks_lead_to_the_trajectories_they_stand_for(page: Page, url: str) -> None:
    visit(page, url, "#/charts")
    click(page, '.legend a:text("engine_failure")')
    assert page.input_value("#query") == "finish=engine_failure"
    assert page.locator(".row").count() == 3
    go(page, "#/charts")
    click(page, 'rect[data-filter*="timed_out"]')
    assert page.input_value("#query") == "step:1 verdict=timed_out"
    assert page.locator(".row").count() == 1
    go(page, "#/step/0?q=failed%3Ano")
    click(page, 'table.tally a:text-is("length")')
    assert page.input_value("#query") == "failed:no step:0 finish=length"
    go(page, "#/step/1")
    click(page, 'figure rect[data-filter*="score>=0.8"]')
    assert page.input_value("#query") == "step:1 score>=0.8 score<0.85"
    assert page.locator(".row").count() == 1


@pytest.mark.slow
def test_conditions_are_added_to_any_filter(page: Page, url: str) -> None:
    visit(page, url)
    for query, conditions, wanted in (
        ("", ["step:1"], "step:1"),
        ("step:0 score<1 sort:-time", ["step:1"], "score<1 step:1 sort:-time"),
        ('"a or b" or tools>1', ["finish=stop"], '"a or b" finish=stop or tools>1 finish=stop'),
        ("finish=stop or score=0", ["finish=length"], "finish=length"),
        ("-finish=stop", ["finish=length"], "-finish=stop finish=length"),
        ("not a query:", ["finish=length"], "finish=length"),
    ):
        found = page.evaluate("([query, all]) => Toolyard.narrowed(query, ...all)", [query, conditions])
        assert found == wanted
        parse_query(found)


def test_fields_and_values_are_suggested(page: Page, url: str) -> None:
    visit(page, url)
    page.keyboard.press("/")
    page.keyboard.type("fin")
    page.wait_for_selector("#suggestions li")
    assert page.get_attribute("#query", "aria-expanded") == "true"
    page.keyboard.press("Tab")
    assert page.input_value("#query") == "finish:"
    until(page, "document.querySelectorAll('#suggestions li').length === 3")
    assert texts(page, "#suggestions li")[0].split() == ["stop", "25"]
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    assert (
        page.evaluate(
            "document.getElementById(document.querySelector('#query').getAttribute('aria-activedescendant')).dataset.text"
        )
        == "engine_failure"
    )
    page.keyboard.press("Enter")
    assert page.input_value("#query") == "finish:engine_failure "
    assert page.locator("#suggestions").is_hidden()
    page.keyboard.type("err")
    page.wait_for_selector("#suggestions li")
    page.keyboard.press("Escape")
    assert page.locator("#suggestions").is_hidden()
    assert page.evaluate("document.activeElement.id") == "query", "the first Escape only closes the list"
    page.keyboard.type('or:"zero')
    page.wait_for_selector("#suggestions li")
    page.locator("#suggestions li").click()
    assert page.input_value("#query") == f'finish:engine_failure error:"{ERROR}" '
    page.fill("#query", "")
    page.keyboard.type("step:1")
    page.keyboard.press("Enter")
    until(page, "document.querySelector('.list-head strong').textContent === '15'")
    assert page.locator("#suggestions").is_hidden()


# Looks ----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_no_page_is_cut_or_wider_than_the_window(page: Page, tmp_path: Path, theme: str) -> None:
    dump(tmp_path)
    long = with_call(
        line_of(2, "t" * 190, 0, 0.123456), 1.0, name="n" * 190, response="e" * 300, metrics={"verdict": "v" * 99}
    )
    many = [line_of(2, "many", at, at / 100) for at in range(100)]
    write_lines(tmp_path / "2.jsonl", [long, *many])
    with served_to(page, tmp_path) as url:
        visit(page, url)
        page.evaluate("theme => { document.documentElement.dataset.theme = theme; }", theme)
        for hash_ in ("#/groups", "#/calls", "#/changes", "#/step/1", "#/step/2", "#/charts"):
            go(page, hash_)
            for width in (1440, 1024):
                page.set_viewport_size({"width": width, "height": 900})
                assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (hash_, width)
                assert page.evaluate("view.scrollWidth <= view.clientWidth"), (hash_, width)
                assert cut(page) == [], (hash_, width)
                assert overlapping(page) == [], (hash_, width)


def cut(page: Page) -> list[str]:
    """Numbers and links of tables that do not fit into their cells."""
    return page.locator("#view :is(td.right, .cell, .chip, .kind)").evaluate_all(
        "all => all.filter(one => one.scrollWidth > one.clientWidth + 1 && one.clientWidth).map(one => one.textContent)"
    )


def overlapping(page: Page) -> list[str]:
    """Cells of a row, and links of the header, that lie over each other."""
    return page.evaluate(
        """() => [...document.querySelectorAll('#view tr, header nav')].flatMap(row => {
            const boxes = [...row.children].map(one => [one.getBoundingClientRect(), one.textContent]);
            return boxes.slice(1).filter(([box], at) => box.left < boxes[at][0].right - 1).map(([, text]) => text);
        })"""
    )


def test_hostile_names_are_only_text(page: Page, tmp_path: Path) -> None:
    write_lines(tmp_path / "0.jsonl", [hostile_line(), {**hostile_line(), "step": 8}, VERL_LINE, DAMAGED])
    with served_to(page, tmp_path) as url:
        visit(page, url)
        for hash_ in ("#/groups", "#/changes", "#/step/7", "#/calls"):
            go(page, hash_)
            assert page.locator("#view :is(img, script)").count() == 0
            assert page.title() != "run"
        assert SCRIPT[:20] in page.locator(".errors").inner_text()
        click(page, ".errors a")
        assert page.locator(".row").count() == 2
        assert page.title() != "run"


@pytest.mark.slow
def test_a_growing_dump_is_counted_again(page: Page, tmp_path: Path) -> None:
    write_lines(tmp_path / "0.jsonl", [line_of(0, "task", 0, 0.0)])
    with served_to(page, tmp_path) as url:
        visit(page, url, "#/groups")
        assert page.locator(".cells .cell").count() == 1
        write_lines(tmp_path / "0.jsonl", [line_of(0, "task", 1, 1.0)])
        until(page, "document.querySelectorAll('.cells .cell').length === 2")


# Reports --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def report(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("report") / "report.html"
    with Library.open(folder) as library:
        write_report(Answers(library, title="demo"), target, parse_query(""))
    return target


@pytest.mark.slow
def test_a_report_answers_as_the_server_does(page: Page, folder: Path, report: Path) -> None:
    visit(page, report.as_uri())
    with Library.open(folder) as library:
        answers = Answers(library, title="demo")

        def told(name: str, **asked: object) -> Any:
            answer = page.evaluate("([name, asked]) => Toolyard.ask(name, asked)", [name, asked])
            assert answer.pop("part", None) is None
            return answer

        for query in ("", "step:1", "score>0 or tool:search", "-verdict=ok", "call_time>1.5 -verdict:timed"):
            for asked in ({}, {"sort": "-mean"}, {"sort": "failed", "kind": "mixed"}, {"offset": 2, "limit": 3}):
                server = answers.groups(parse_query(query), **asked)
                assert close(told("groups", q=query, **asked)) == close(server), (query, asked)
            assert close(told("calls", q=query)) == close(answers.calls(parse_query(query))), query
        for before, after in (("step:0", "step:1"), ("step:1", "failed:no"), ("score:1", "step:7")):
            server = answers.changes(parse_query(before), parse_query(after))
            for change in server["changes"]:
                change.pop("number")
            assert close(told("changes_between", before=before, after=after)) == close(server), (before, after)
        for field, part in (
            ("", "re"),
            ("", ""),
            ("sort", "s"),
            ("failed", ""),
            ("score", ""),
            ("task", "o"),
            ("tool", ""),
            ("error", "ZERO"),
            ("run", ""),
            ("file", "1"),
            ("id", "some"),
            ("truth", ""),
        ):
            assert told("suggestions", field=field, part=part) == json.loads(
                json.dumps(answers.suggestions(field, part))
            )


def close(value: Any) -> Any:
    """As JSON, with numbers that allow for the order in which they were added."""
    told = json.loads(json.dumps(value))

    def rounded(one: Any) -> Any:
        if isinstance(one, dict):
            return {name: rounded(inner) for name, inner in one.items()}
        if isinstance(one, list):
            return [rounded(inner) for inner in one]
        return round(one, 9) if isinstance(one, float) else one

    return rounded(told)


@pytest.mark.slow
def test_the_pages_work_in_a_report(page: Page, folder: Path, report: Path, tmp_path: Path) -> None:
    visit(page, report.as_uri())
    open_view(page, "groups")
    assert page.locator("p.verdict").inner_text().startswith("4 of 10 groups")
    open_view(page, "calls")
    assert page.locator(".errors tbody tr").count() == 2
    open_view(page, "changes")
    assert "1 solved, 1 broken" in page.locator("p.verdict").inner_text()
    go(page, "#/step/1")
    assert page.locator("tr.critical").count() == 1
    page.keyboard.press("/")
    page.keyboard.type("tool:")
    until(page, "document.querySelectorAll('#suggestions li').length === 2")
    with Library.open(folder) as library:
        write_report(Answers(library, title="demo"), tmp_path / "part.html", parse_query("step:1"), limit=6)
    for hash_ in ("#/groups", "#/calls"):
        visit(page, (tmp_path / "part.html").as_uri(), hash_)
        assert "Covers the 6 of 15 trajectories that this report contains." in page.locator("#view").inner_text()
    go(page, "#/changes")
    assert "This dump has only one step." in page.locator("#view").inner_text()
