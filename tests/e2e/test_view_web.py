"""The viewer's server: its answers, and who gets them."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import aiohttp
import pytest
from viewing import DAMAGED, SCRIPT, VERL_LINE, demo_dump, demo_lines, hostile_line, served, write_lines

from toolyard.errors import ConfigError
from toolyard.messages import JSON
from toolyard.viewer.library import Library
from toolyard.viewer.query import Query, parse_query
from toolyard.viewer.web.answers import Answers
from toolyard.viewer.web.export import write_report

TOOLYARD = str(Path(sys.executable).parent / "toolyard")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = demo_dump(tmp_path_factory.mktemp("dump"), steps=2)
    write_lines(folder / "7.jsonl", [VERL_LINE, DAMAGED, hostile_line()])
    return folder


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with served(folder) as url:
        yield url


def fetch(url: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, dict(error.headers), error.read()


def ask(url: str, name: str, **asked: Any) -> Any:
    status, _, body = fetch(f"{url}api/{name}?{urlencode(asked)}")
    told = json.loads(body)
    assert status == 200, told
    return told


def refused(url: str, name: str, **asked: Any) -> tuple[int, str]:
    status, _, body = fetch(f"{url}api/{name}?{urlencode(asked)}")
    return status, json.loads(body)["error"]


# Answers --------------------------------------------------------------------------------------------------------------


def test_the_overview_counts_what_is_there(url: str) -> None:
    told = ask(url, "overview")
    assert told["count"] == 2 * len(demo_lines()) + 3
    assert [step["step"] for step in told["steps"] if step["count"]] == [0, 1, 7]


def test_rows_are_filtered_and_sorted(url: str) -> None:
    told = ask(url, "rows", q="score=1 step:0 sort:-time", limit=100)
    assert told["count"] == len(told["rows"]) == sum(line["score"] == 1 for line in demo_lines())
    assert [row["seconds"] for row in told["rows"]] == sorted((row["seconds"] for row in told["rows"]), reverse=True)


def test_a_bad_query_is_refused_with_what_is_wrong(url: str) -> None:
    status, error = refused(url, "rows", q="scroe<1")
    assert status == 400
    assert "score" in error


def test_a_trajectory_has_all_that_the_page_shows(url: str) -> None:
    told = ask(url, "row", key="0.jsonl:1")
    line = demo_lines()[0]
    assert told["score"] == line["score"]
    assert told["rewards"] == line["rewards"]
    assert told["timeline"]["segments"]
    assert [bubble["turn"] for bubble in told["bubbles"]][-2:] == [0, 1]
    assert all(near["task"] == line["batch_data_id"] for near in told["group"])


def test_tokens_of_all_origins_are_there(url: str) -> None:
    told = ask(url, "tokens", key="0.jsonl:1")
    assert {run["origin"] for run in told["runs"]} == {"prompt", "sampled", "tool"}
    assert not told["tokenizer"]


def test_verls_lines_and_damaged_ones_are_shown_as_what_they_are(url: str) -> None:
    assert ask(url, "row", key="7.jsonl:1")["bubbles"][0]["role"] == "user"
    damaged = ask(url, "row", key="7.jsonl:2")
    assert damaged["row"]["line"] == 2
    assert damaged["damaged"]
    assert damaged["raw"] == DAMAGED.decode().strip()


def test_a_step_says_where_its_time_went(url: str) -> None:
    told = ask(url, "step", step=0)
    assert told["summary"]["count"] == len(demo_lines())
    assert told["timeline"]["critical"]["key"].startswith("0.jsonl:")
    assert sum(told["distributions"]["score"]["counts"]) == len(demo_lines())


def test_statistics_have_a_distribution_for_each_step(url: str) -> None:
    told = ask(url, "statistics")
    assert len(told["edges"]) == 21
    assert [sum(step["histogram"]["counts"]) for step in told["steps"]][:2] == [len(demo_lines())] * 2


def test_the_same_request_of_two_steps_compares_as_the_same_but_for_nothing(url: str) -> None:
    told = ask(url, "compare", left="0.jsonl:1", right="1.jsonl:1")
    assert told["comparison"]["same"]
    other = ask(url, "compare", left="0.jsonl:1", right="0.jsonl:2")
    assert other["comparison"]["divergence"]["token"] > 0


def test_search_goes_on_to_the_next_trajectory_that_has_it(url: str) -> None:
    first = ask(url, "search", needle="marbles")["row"]["key"]
    second = ask(url, "search", needle="marbles", **{"from": first})["row"]["key"]
    assert first != second
    assert ask(url, "search", needle="marbles", backwards=1, **{"from": second})["row"]["key"] == first
    assert ask(url, "search", needle="not said anywhere")["row"] is None


def test_a_request_is_found_by_the_beginning_of_its_id(url: str) -> None:
    wanted = "0001" + demo_lines()[0]["request_id"][4:]
    assert [row["request_id"] for row in ask(url, "find", id=wanted[:12])["rows"]] == [wanted]


def test_what_is_written_meanwhile_is_told(tmp_path: Path) -> None:
    demo_dump(tmp_path)
    with served(tmp_path) as url:
        revision = ask(url, "overview")["revision"]
        write_lines(tmp_path / "1.jsonl", [VERL_LINE])
        told = ask(url, "changes", revision=revision)
        assert told["changed"]
        assert told["count"] == len(demo_lines()) + 1


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("row", {}),
        ("row", {"key": "nothing"}),
        ("row", {"key": "0.jsonl:99999999"}),
        ("row", {"key": "0.jsonl:" + "9" * 30}),
        ("rows", {"limit": "many"}),
        ("rows", {"offset": "9" * 40}),
        ("step", {"step": "x"}),
        ("step", {"step": 1234}),
        ("tokens", {"key": "7.jsonl:2"}),
        ("compare", {"left": "0.jsonl:1"}),
        ("changes", {"revision": "x"}),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(url: str, name: str, asked: dict[str, Any]) -> None:
    status, error = refused(url, name, **asked)
    assert status in (400, 404)
    assert error


def test_where_a_trajectory_stands_and_the_first_of_the_next_step_are_told(url: str) -> None:
    here = len(demo_lines())
    assert ask(url, "position", key="1.jsonl:1")["position"] == here
    assert ask(url, "position", key="1.jsonl:1", q="step:0")["position"] is None
    following = ask(url, "next_step", step=0)
    assert (following["row"]["key"], following["position"]) == ("1.jsonl:1", here)
    assert ask(url, "next_step", step=1, q="step:0 or step:7")["row"]["key"] == "7.jsonl:1"
    assert ask(url, "next_step", step=7, backwards=1)["row"]["key"] == "1.jsonl:1"
    assert ask(url, "next_step", step=7)["row"] is None


def test_the_time_of_a_step_is_that_of_the_trajectories_asked_for(url: str) -> None:
    slowest, *_, fastest = (row["key"] for row in ask(url, "rows", q="step:0 sort:-time")["rows"])
    assert ask(url, "step", step=0)["timeline"]["critical"]["key"] == slowest
    line = fastest.rpartition(":")[2]
    told = ask(url, "step", step=0, q=f"line:{line} or text:nobody-said-that")
    assert told["timeline"]["critical"]["key"] == fastest
    assert told["timeline"]["requests"] == told["summary"]["count"] == 1


def test_a_comparison_says_which_tokens_are_equal(url: str) -> None:
    told = ask(url, "compare", left="0.jsonl:1", right="0.jsonl:12")
    left, right = (ask(url, "tokens", key=key)["runs"] for key in ("0.jsonl:1", "0.jsonl:12"))
    first = told["comparison"]["divergence"]["token"]
    for one, other, equal in told["runs"]:
        for at, to, count in equal:
            assert left[one]["ids"][at : at + count] == right[other]["ids"][to : to + count]
    sampled, length = next(
        (left[one], equal[0][2]) for one, _, equal in told["runs"] if left[one]["origin"] == "sampled"
    )
    assert first == sampled["start"] + length
    assert ask(url, "compare", left="0.jsonl:1", right="7.jsonl:1")["runs"] == []


# What other programs write --------------------------------------------------------------------------------------------


def nested(levels: int) -> Any:
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("messages", -1, "content"), "half of a pair: \ud800"),
        (("metrics", "deep"), nested(600)),
        (("metrics", "seconds", "pending"), 10**400),
        (("rewards", "final"), "x"),
        (("rewards", "final"), {"a": [10**400]}),
        (("gts",), nested(900)),
        (("turns", 0, "timings", "generating"), 10**400),
        (("turns", 0, "timings", "started"), "x"),
        (("turns", 0, "tool_calls", 0, "metrics"), {"queue_seconds": 10**400, "verdict": nested(300)}),
        (("turns", 0, "sampled", "start"), -(10**30)),
        (("tokens", "response_ids", 0), "\ud800"),
        (("tokens", "prompt_ids", 0), None),
        (("tokens", "prompt_ids"), [nested(400)]),
        (("tokens", "response_logprobs"), ["x", None, 10**400]),
        (("tokens", "response_mask"), ["x"]),
    ],
)
def test_a_line_that_says_anything_is_shown(where: tuple[Any, ...], value: Any, tmp_path: Path) -> None:
    line = demo_lines()[0]
    place = line
    for name in where[:-1]:
        place = place[name]
    place[where[-1]] = value
    write_lines(tmp_path / "0.jsonl", [line, demo_lines()[1]])
    with served(tmp_path, decode=lambda ids: "".join(f"<{number + 0}>" for number in ids)) as url:
        row = ask(url, "row", key="0.jsonl:1")
        assert "damaged" not in row
        assert row["score"] == line["score"]
        spoken = [message["role"] for message in line["messages"] if message["role"] != "tool"]
        assert [bubble["role"] for bubble in row["bubbles"]] == spoken
        shown = [token for run in ask(url, "tokens", key="0.jsonl:1")["runs"] for token in run["ids"]]
        assert len(shown) == len(line["tokens"]["prompt_ids"]) + len(line["tokens"]["response_ids"])
        compared = ask(url, "compare", left="0.jsonl:1", right="0.jsonl:2")
        assert compared["left"]["score"] == line["score"]
        assert ask(url, "step", step=0)["summary"]["count"] == 2
        assert json.loads(ask(url, "raw", key="0.jsonl:1")["text"]) == json.loads(json.dumps(line))


def test_integers_that_a_browser_cannot_hold_keep_their_digits(tmp_path: Path) -> None:
    write_lines(tmp_path / "0.jsonl", [{**demo_lines()[0], "metrics": {"seed": 2**63 - 1, "turns": 2}}])
    with served(tmp_path) as url:
        assert ask(url, "row", key="0.jsonl:1")["metrics"] == {"seed": str(2**63 - 1), "turns": 2}


def test_a_line_of_many_megabytes_is_cut_and_says_so(tmp_path: Path) -> None:
    line = demo_lines()[0]
    for message in line["messages"]:
        message["content"] += "```python\nx\n```"
    line["messages"][-1]["content"] = "x" * 30_000_000 + "\n```python\nx\n```"
    line["messages"][-2]["content"] = "y" * 3_000_000
    line["tokens"] = {"prompt_ids": [1] * 400_000, "response_ids": [2] * 400_000, "response_mask": [1] * 400_000}
    write_lines(tmp_path / "0.jsonl", [line])
    with served(tmp_path) as url:
        status, _, body = fetch(f"{url}api/row?key=0.jsonl:1")
        assert status == 200
        assert len(body) < 10_000_000
        bubbles = json.loads(body)["bubbles"]
        assert bubbles[-1]["pieces"][0]["text"].endswith("(28000000 more characters)")
        assert {piece["kind"] for bubble in bubbles for piece in bubble["pieces"]} == {"text", "code"}
        told = ask(url, "tokens", key="0.jsonl:1")
        assert sum(len(run["ids"]) for run in told["runs"]) == 800_000 - told["left_out"] <= 200_000


def test_a_file_that_is_replaced_is_shown_as_it_is_now(tmp_path: Path) -> None:
    lines = demo_lines()[:2]
    write_lines(tmp_path / "0.jsonl", lines)
    with served(tmp_path) as url:
        before = ask(url, "overview")
        assert ask(url, "step", step=0)["timeline"]["requests"] == 2
        other = json.loads(json.dumps(lines[0]))
        other["turns"][0]["timings"]["generating"] += 100.0
        (tmp_path / "new").write_text(json.dumps(other) + "\n")
        (tmp_path / "new").replace(tmp_path / "0.jsonl")
        told = ask(url, "changes", revision=before["revision"])
        assert told["changed"]
        assert told["generation"] != before["generation"]
        assert ask(url, "overview")["count"] == 1
        assert ask(url, "step", step=0)["timeline"]["seconds"] > 100.0


def test_an_index_that_is_deleted_leaves_nothing_of_the_old_dump(tmp_path: Path) -> None:
    lines = demo_lines()[:1]
    write_lines(tmp_path / "0.jsonl", lines)
    with served(tmp_path) as url:
        before = ask(url, "overview")
        old = ask(url, "step", step=0)["timeline"]["seconds"]
        shutil.rmtree(tmp_path / ".toolyard-index")
        (tmp_path / "0.jsonl").unlink()
        lines[0]["turns"][0]["timings"]["generating"] += 100.0
        write_lines(tmp_path / "0.jsonl", lines)
        told = ask(url, "changes", revision=before["revision"])
        assert told["changed"]
        assert ask(url, "step", step=0)["timeline"]["seconds"] == pytest.approx(old + 100.0, abs=0.1)


# Whom it answers, and with what ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "static/../answers.py",
        "static/%2e%2e/answers.py",
        "static/..%2fanswers.py",
        "static//etc/passwd",
        "static/%00",
        "api/row?key=../../../../etc/passwd:1",
        "api/row?key=%2fetc%2fpasswd:1",
        "api/raw?key=..%2f..%2fsecret:1",
    ],
)
def test_no_path_leaves_the_folder(url: str, path: str) -> None:
    status, _, body = fetch(url + path)
    assert status == 404
    assert b"root:" not in body
    assert b"def " not in body


def test_files_that_links_lead_to_are_not_shown(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    write_lines(secret / "0.jsonl", [VERL_LINE])
    folder = tmp_path / "dump"
    folder.mkdir()
    write_lines(folder / "0.jsonl", [VERL_LINE])
    (folder / "1.jsonl").symlink_to(secret / "0.jsonl")
    (folder / "run").symlink_to(secret)
    with served(folder) as url:
        assert ask(url, "overview")["count"] == 1


def test_another_name_or_another_site_is_refused(url: str) -> None:
    assert fetch(f"{url}api/overview", Host="evil.example")[0] == 403
    assert fetch(f"{url}api/overview", **{"Sec-Fetch-Site": "cross-site"})[0] == 403
    assert fetch(f"{url}api/overview", Host="localhost:1")[0] == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("127.0.0.1:8420", 200),
        ("[::1]:8420", 200),
        ("[::1]", 200),
        ("LOCALHOST:8420", 200),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example:8420", 403),
        ("evil.example:127.0.0.1", 403),
        ("evil.example@127.0.0.1", 403),
        ("127.0.0.1:8420@evil.example", 403),
        ("192.168.1.1:8420", 403),
        ("[::ffff:192.168.1.1]", 403),
        ("0x7f000001.evil.example", 403),
        ("[]", 403),
        (":8420", 403),
        ("[::1", 403),
    ],
)
def test_names_that_lead_here_by_somebody_elses_doing_are_refused(url: str, host: str, status: int) -> None:
    assert fetch(f"{url}api/overview", Host=host)[0] == status


def test_a_link_on_another_site_opens_the_page_but_reads_nothing(url: str) -> None:
    clicked = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    assert fetch(url, **clicked)[0] == 200
    assert fetch(f"{url}api/overview", **clicked)[0] == 403
    assert fetch(f"{url}static/app.js", **clicked)[0] == 403
    assert fetch(url, **{**clicked, "Sec-Fetch-Dest": "iframe"})[0] == 403
    assert fetch(f"{url}api/overview", **{"Sec-Fetch-Site": "same-site"})[0] == 403
    assert fetch(f"{url}api/overview", **{"Sec-Fetch-Site": "same-origin"})[0] == 200


def test_what_nobody_thought_of_is_told_in_words_with_every_header(folder: Path) -> None:
    class Broken(Answers):
        def overview(self) -> JSON:
            raise ValueError("nobody thought of it")

    with served(folder, of=Broken) as url:
        status, headers, body = fetch(f"{url}api/overview")
    assert status == 500
    assert "nobody thought of it" in json.loads(body)["error"]
    assert "default-src 'none'" in headers["Content-Security-Policy"]


def test_it_reads_only(url: str) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        request = urllib.request.Request(f"{url}api/rows", method=method, data=b"{}")
        with pytest.raises(urllib.error.HTTPError) as refusal:
            urllib.request.urlopen(request, timeout=30)
        assert refusal.value.code == 405
        refusal.value.close()


def test_every_answer_forbids_what_a_model_could_smuggle_in(url: str) -> None:
    for path in ("", "static/app.js", "api/overview", "api/row?key=7.jsonl:3", "nothing"):
        _, headers, _ = fetch(url + path)
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff"


def test_hostile_text_travels_as_json_only(url: str) -> None:
    _, headers, body = fetch(f"{url}api/row?key=7.jsonl:3")
    assert headers["Content-Type"].startswith("application/json")
    assert json.loads(body)["row"]["request_id"] == "hostile"


def test_the_page_has_no_inline_script_or_style_and_asks_nobody_else(url: str) -> None:
    _, _, page = fetch(url)
    text = page.decode()
    assert not re.search(r"<script(?![^>]*src=)|style=|<style| on\w+=", text)
    assert "http" not in text.replace("http-equiv", "")
    for name in re.findall(r'static/([\w.]+)"', text):
        status, _, body = fetch(f"{url}static/{name}")
        assert status == 200
        assert b"innerHTML" not in body
        assert not re.search(rb"https?://(?!www\.w3\.org/2000/svg)", body)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_everything_that_is_read_stands_out_from_what_is_behind_it(url: str, theme: str) -> None:
    style = fetch(f"{url}static/style.css")[2].decode()
    colours = dict(re.findall(r"--([\w]+): #([0-9a-f]{6});", style.partition('[data-theme="dark"] {')[0]))
    if theme == "dark":
        colours |= dict(
            re.findall(r"--([\w]+): #([0-9a-f]{6});", style.partition('[data-theme="dark"] {')[2].partition("}")[0])
        )
    texts = {
        ("paper", "panel", "chosen"): ("ink", "soft", "accent", "good", "bad", "cut", "fault"),
        ("code",): ("ink", "soft", "word", "string", "digit", "good", "bad", "cut", "fault"),
        ("prompt", "sampled", "tool", "mark"): ("ink",),
    }
    for behind, shown in texts.items():
        pairs = [(one, other) for one in shown for other in behind]
        weak = {pair: ratio for pair in pairs if (ratio := contrast(*(colours[name] for name in pair))) < 4.5}
        assert not weak
    assert contrast(colours["edge"], colours["paper"]) >= 3


def contrast(one: str, other: str) -> float:
    """As WCAG counts it."""

    def light(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (0, 2, 4)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    dark, bright = sorted((light(one), light(other)))
    return (bright + 0.05) / (dark + 0.05)


# Many, and those who leave --------------------------------------------------------------------------------------------


async def test_a_thousand_requests_at_once_are_all_answered(url: str) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(number: int) -> int:
            async with session.get(f"{url}api/rows?q=line:{number % 20 + 1}&limit=5") as answer:
                return answer.status

        async with asyncio.timeout(50), asyncio.TaskGroup() as group:
            asked = [group.create_task(one(number)) for number in range(1000)]
        assert {task.result() for task in asked} == {200}


def test_those_who_wait_and_leave_disturb_nobody(url: str) -> None:
    host, _, port = url.removeprefix("http://").strip("/").partition(":")
    revision = ask(url, "overview")["revision"]
    for _ in range(200):
        with socket.create_connection((host, int(port)), timeout=10) as leaving:
            leaving.sendall(f"GET /api/changes?revision={revision} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    assert ask(url, "overview")["revision"] == revision


def test_ctrl_c_ends_it_at_once_also_while_somebody_waits(folder: Path) -> None:
    process = subprocess.Popen(
        [TOOLYARD, "view", folder, "--web", "--no-browser", "--port", "0"], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    with process.stderr:
        told = process.stderr.readline()
        address = re.search(r"http://127\.0\.0\.1:(\d+)/", told)
        assert address, told
        revision = ask(address[0], "overview")["revision"]
        with socket.create_connection(("127.0.0.1", int(address[1])), timeout=10) as waiting:
            waiting.sendall(f"GET /api/changes?revision={revision} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            ask(address[0], "overview")  # answered after that request was taken up
            began = time.monotonic()
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 130
            assert time.monotonic() - began < 10, "who waits, waits for 20 s"
        assert process.stderr.read() == "interrupted\n"


def test_a_server_that_ends_sends_home_who_waits(folder: Path) -> None:
    with ExitStack() as stack:
        with served(folder) as url:
            revision = ask(url, "overview")["revision"]
            address = url.removeprefix("http://").strip("/")
            waiting = [stack.enter_context(closing(HTTPConnection(address, timeout=30))) for _ in range(5)]
            for client in waiting:
                client.request("GET", f"/api/changes?revision={revision}")
            ask(url, "overview")  # answered after those requests were taken up
        assert not any(json.load(client.getresponse())["changed"] for client in waiting)


# The report -----------------------------------------------------------------------------------------------------------


def test_a_report_is_one_file_that_holds_everything_and_no_markup_of_a_model(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    with Library.open(folder) as library:
        count = write_report(Answers(library, title="demo"), target, parse_query("step:7"))
    text = target.read_text()
    assert count == 3
    assert SCRIPT not in text
    assert not re.search(r'(src|href)="(?!data:|#)', text)
    told = report_in(target)
    assert set(told["details"]) == {"7.jsonl:1", "7.jsonl:2", "7.jsonl:3"}
    assert SCRIPT in told["details"]["7.jsonl:3"]["ground_truth"]


def test_a_report_of_more_than_a_thousand_has_them_all(tmp_path: Path) -> None:
    rows = [{"input": f"question {number}", "output": "x", "score": 0.0, "step": 0} for number in range(1500)]
    write_lines(tmp_path / "0.jsonl", rows)
    with Library.open(tmp_path) as library:
        write_report(Answers(library, title="demo"), tmp_path / "report.html", parse_query(""), limit=1400)
    assert len(report_in(tmp_path / "report.html")["rows"]) == 1400


def test_a_report_that_is_interrupted_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    class InterruptedAnswers(Answers):
        def statistics(self, query: Query) -> JSON:
            raise KeyboardInterrupt

    with Library.open(folder) as library, pytest.raises(KeyboardInterrupt):
        write_report(InterruptedAnswers(library, title="demo"), tmp_path / "report.html", parse_query(""))
    assert list(tmp_path.iterdir()) == []


def test_a_report_holds_what_is_no_text_or_number_of_json(tmp_path: Path) -> None:
    line = demo_lines()[0]
    line["messages"][-1]["content"] = "\ud800 \u2028 <!-- <script> --> ]]>"
    line["metrics"] = {"__proto__": {"x": float("inf")}, "constructor": 10**400}
    write_lines(tmp_path / "0.jsonl", [line])
    with Library.open(tmp_path) as library:
        write_report(Answers(library, title="</title><script>"), tmp_path / "report.html", parse_query(""))
    text = (tmp_path / "report.html").read_text()
    assert "<!--" not in text
    assert "\u2028" not in text
    assert text.count("<script") == text.count("</script>")
    assert set(report_in(tmp_path / "report.html")["details"]["0.jsonl:1"]["metrics"]) == {"__proto__", "constructor"}


def report_in(path: Path) -> Any:
    data = re.search(r'<script type="application/json" id="toolyard-data">(.*?)</script>', path.read_text(), re.DOTALL)
    assert data is not None
    return json.loads(data[1])


def test_a_report_that_cannot_be_written_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    with Library.open(folder) as library, pytest.raises(ConfigError, match="cannot write"):
        write_report(Answers(library, title="demo"), tmp_path / "no" / "report.html", parse_query(""))
    assert list(tmp_path.iterdir()) == []


def test_the_command_writes_a_report_and_says_what_was_left_out(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    done = subprocess.run(
        [TOOLYARD, "view", folder, "--export", target, "--query", "step:0", "--limit", "5"],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "5 trajectories" in done.stderr
    assert f"{len(demo_lines()) - 5} more were left out" in done.stderr
    assert target.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "'nowhere' does not exist"),
        ([".", "-q", "scroe<1", "--web"], "score"),
        ([".", "--web", "--export", "x.html"], "cannot be used together"),
    ],
)
def test_the_command_says_what_is_wrong(arguments: list[str], said: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [TOOLYARD, "view", *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 1
    assert said in done.stderr
