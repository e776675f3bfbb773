"""A report: the viewer's page in one file, which must do what the page of a server does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from browsing import Window, at, chosen, go, opened_browser, until, visit
from playwright.sync_api import Page
from viewing import DAMAGED, VERL_LINE, demo_dump, demo_lines, hostile_line, served, write_lines

from toolyard.viewer.library import Library
from toolyard.viewer.query import QueryError, parse_query
from toolyard.viewer.web.answers import Answers, key_of
from toolyard.viewer.web.export import write_report

QUERIES = [
    "",
    "score=1",
    "score!=1",
    "score<0.5 step:0",
    "score:0.2..0.8 or line:3..4",
    "score:none",
    "-score:none step:1..",
    "tools>1 sort:-time",
    "turns>=3 sort:sample sort:-length",
    "finish:STO",
    "finish=sto",
    "-finish:stop",
    "verdict:ok",
    "-verdict=ok",
    "tool:code call_time>0.001 verdict:ok",
    "tool:code -call_time>0.1",
    "call_time:none or tool=nothing",
    "failed:yes or failed_calls>0",
    "error:error or run=nowhere sort:run",
    'run="" -error:name',
    "truth:1 sort:truth",
    "reward.final>0.5",
    "reward.Final:none time!=none",
    "group>2000000000 sort:group",
    "started:none sort:-started",
    "id:0001",
    "task:word-problem-03 sort:task sort:-id",
    "file:7. sort:-line",
    "damaged:yes",
    "damaged:no source:word chars>10",
    'text:"5 red marbles"',
    '"5 RED" -"no such thing"',
    'text:"{\\"input\\"" or half',
    "marbles or plums sort:score",
    "state:FAILED or prompt>0 sort:-chars",
    "time>20 time<1e2 sort:time",
]
BAD = [
    "scroe<1",
    "score<x",
    "score:5..1",
    'text:"open',
    "sort:nothing",
    "or x",
    "x or",
    "score: 1",
    "constructor:1",
    'text:"a"b',
    "damaged:maybe",
]


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
def report(folder: Path) -> Path:
    target = folder / "report.html"
    with Library.open(folder) as library:
        write_report(Answers(library, title="demo"), target, parse_query(""))
    return target


@pytest.mark.exhaustive
def test_filters_find_in_a_report_what_the_server_finds(page: Page, folder: Path, report: Path) -> None:
    visit(page, report.as_uri())
    with Library.open(folder) as library:
        for query in QUERIES:
            wanted = [key_of(row) for row in library.rows(parse_query(query), limit=1000)]
            told = page.evaluate("q => Toolyard.ask('rows', {q, limit: 1000})", query)
            assert [row["key"] for row in told["rows"]] == wanted, query
    for query in BAD:
        with pytest.raises(QueryError) as refusal:
            parse_query(query)
        said = page.evaluate("q => Toolyard.ask('rows', {q}).then(() => '', error => error.message)", query)
        assert said.startswith("at character ")
        assert said.split(":")[0] == str(refusal.value).split(":")[0], query


@pytest.mark.slow
def test_statistics_of_a_report_are_those_of_the_server(page: Page, folder: Path, report: Path) -> None:
    visit(page, report.as_uri())
    with Library.open(folder) as library:
        answers = Answers(library, title="demo")
        for query in ("score<0.5", "step:0 or step:7", "finish:stop verdict:ok"):
            wanted = json.loads(json.dumps(answers.statistics(parse_query(query))["steps"]))
            told = page.evaluate("q => Toolyard.ask('statistics', {q})", query)["steps"]
            for one, other in zip(wanted, told, strict=True):
                if query != "score<0.5":  # whose bins differ: a report keeps those of all its trajectories
                    assert one["histogram"] == other["histogram"]
                assert sum(one.pop("histogram")["counts"]) == sum(other.pop("histogram")["counts"])
                assert {
                    name: value if not isinstance(value, float) else pytest.approx(value) for name, value in one.items()
                } == other
        for query in ("step:0", "step:7"):  # one step: distributions
            wanted = answers.statistics(parse_query(query))["distributions"]
            told = page.evaluate("q => Toolyard.ask('statistics', {q})", query)["distributions"]
            assert wanted.keys() == told.keys()
            for name, one in wanted.items():
                assert told[name] == {**one, "edges": pytest.approx(one["edges"])}, name


def test_a_report_works_from_a_file_alone(page: Page, report: Path) -> None:
    asked: list[str] = []
    visit(page, report.as_uri())
    page.on("request", lambda request: asked.append(request.url))
    assert page.locator(".row").count() == 2 * len(demo_lines()) + 3
    page.fill("#query", 'score=1 step:0 text:"marbles"')
    page.press("#query", "Enter")
    until(page, "document.querySelectorAll('.row').length < 6")
    page.fill("#query", "scroe<1")
    page.press("#query", "Enter")
    until(page, "document.getElementById('query-error').textContent.includes(\"unknown field 'scroe'\")")
    go(page, at("0.jsonl:1", tab="tokens"))
    assert page.locator(".t.o-sampled").count() > 0
    go(page, at("0.jsonl:1", find="marbles"))
    page.keyboard.press("[")
    until(page, "document.querySelector('.row.chosen')?.dataset.key !== '0.jsonl:1'")
    for key, wanted in (("g", "0.jsonl:1"), ("N", "1.jsonl:1"), ("G", "7.jsonl:3")):
        page.keyboard.press(key)
        chosen(page, wanted)
    assert page.title() != "run"
    assert page.locator("#view :is(img, script)").count() == 0
    go(page, "#/charts?q=step%3A0")
    assert page.locator("#view h2").inner_text() == f"1 step, {len(demo_lines())} trajectories"
    go(page, "#/step/0?q=line%3A1")
    assert "the filter does not apply here" in page.locator("#view").inner_text()
    go(page, at("0.jsonl:1"))
    page.locator("select.compare").select_option(index=1)
    page.wait_for_selector("#divergence")
    page.locator('[data-by="token"]').click()
    page.wait_for_selector(".t.first")
    for hash_ in ("#/t/__proto__", "#/t/constructor", "#/step/constructor", "#/compare/a/b"):
        go(page, hash_)
        assert "is not part of this report" in page.locator("#view").inner_text()
    assert asked == []


@pytest.mark.slow
def test_a_link_into_a_report_opens_the_same_view(page: Page, report: Path) -> None:
    visit(page, report.as_uri(), at("0.jsonl:2", q="step:0 sort:-line", tab="timeline"))
    assert page.locator(".row").first.get_attribute("data-key") == f"0.jsonl:{len(demo_lines())}"
    chosen(page, "0.jsonl:2")
    assert page.locator("svg.timeline").count() == 1


@pytest.mark.slow
def test_a_report_of_a_part_says_so(page: Page, folder: Path, tmp_path: Path) -> None:
    with Library.open(folder) as library:
        write_report(Answers(library, title="demo"), tmp_path / "part.html", parse_query("step:0"), limit=3)
    visit(page, (tmp_path / "part.html").as_uri(), "#/charts")
    assert (
        f"Covers all {len(demo_lines())} trajectories; this report contains 3 of them."
        in page.locator("#view").inner_text()
    )
    go(page, at("0.jsonl:1"))
    assert page.locator("select.compare").count() == 0  # the other sample was left out


@pytest.mark.slow
def test_the_server_and_the_report_draw_the_same_page(page: Page, folder: Path, report: Path) -> None:
    places = [
        at("0.jsonl:1"),
        at("0.jsonl:1", tab="tokens"),
        at("7.jsonl:3", unfold="1"),
        "#/charts",
        "#/groups",
        "#/calls",
        "#/changes",
        "#/step/0",
        f"#/compare/{quote('0.jsonl:1', safe='')}/{quote('0.jsonl:12', safe='')}",
    ]
    with served(folder, read_only="like a report") as url:
        shown: list[list[str]] = []
        for start in (url, report.as_uri()):
            visit(page, start)
            shown.append([])
            for hash_ in places:
                go(page, hash_)
                shown[-1].append(page.locator("#view").inner_text().replace("swap sides\n", ""))
        assert shown[0] == shown[1]
        page.goto("about:blank")
