"""Who may use the viewer's page: attacks on a server with a token, and on its notes."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from browsing import Window, opened_browser, until, visit
from viewing import VERL_LINE, demo_dump, demo_lines, served, write_lines

from patience import patient
from toolyard.cli.view.run import WebOptions
from toolyard.errors import ConfigError
from toolyard.hosts import raise_open_files_limit
from toolyard.viewer.notes import FILE
from toolyard.viewer.web import server as server_module
from toolyard.viewer.web.access import Access, new_token

TOOLYARD = str(Path(sys.executable).parent / "toolyard")
TOKEN = "Zx7-secret_token-0123456789"
ROUTES = ("", "static/app.js", "static/nothing", "api/overview", "api/rows", "api/changes", "api/note", "nothing")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo_dump(tmp_path_factory.mktemp("dump"))


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    """With its token."""
    with served(folder, token=TOKEN) as url:
        yield url


def fetch(url: str, told: object = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
    """GET, or POST what is told."""
    data = None if told is None else told if isinstance(told, bytes) else json.dumps(told).encode()
    kind = {} if told is None else {"Content-Type": "application/json"}
    request = urllib.request.Request(url, data, headers=kind | headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, dict(error.headers), error.read()


def root(url: str) -> str:
    return url.removesuffix(f"{TOKEN}/")


@contextmanager
def ending(process: subprocess.Popen[str]) -> Generator[None]:
    """Also if the test fails."""
    try:
        yield
    finally:
        process.kill()
        process.wait()


# The token ------------------------------------------------------------------------------------------------------------


def test_with_its_token_the_page_and_all_it_asks_for_are_answered(url: str) -> None:
    assert url.endswith(f"/{TOKEN}/")
    _, headers, page = fetch(url)
    assert headers["Referrer-Policy"] == "no-referrer"
    assert "Set-Cookie" not in headers
    for name in re.findall(r'(?:src|href)="(static/[\w.]+)"', page.decode()):
        assert fetch(url + name)[0] == 200
    assert json.loads(fetch(f"{url}api/overview")[2])["count"] == len(demo_lines())
    assert fetch(f"{url}api/nothing")[0] == 404


@pytest.mark.parametrize(
    "given",
    [
        "",
        "wrong/",
        f"{TOKEN.swapcase()}/",
        f"{TOKEN.lower()}/",
        f"{TOKEN[:-1]}/",
        f"{TOKEN}x/",
        f"{TOKEN}%00/",
        f"%20{TOKEN}/",
        f"x/../{TOKEN}/",
        f"./{TOKEN}x/",
        "%2e%2e/",
        "\u00e9/".encode().decode("latin-1").encode("latin-1").hex() + "/",
        "{token}/",
        f"?token={TOKEN}&x=",
    ],
)
def test_without_it_no_route_answers(url: str, given: str) -> None:
    for route in ROUTES:
        status, headers, body = fetch(root(url) + given + route)
        assert status == 403, (given, route)
        assert headers["Content-Type"].startswith("text/plain")
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert TOKEN.encode() not in body
    assert fetch(f"{root(url)}{given}api/note", {"key": "0.jsonl:1", "text": "x"})[0] == 403
    assert "needs its complete URL, with the token" in body.decode()


def test_it_is_accepted_nowhere_else(url: str) -> None:
    for headers in ({"Authorization": f"Bearer {TOKEN}"}, {"Cookie": f"token={TOKEN}"}, {"Referer": url}):
        assert fetch(f"{root(url)}api/overview", **headers)[0] == 403


def test_no_path_leaves_the_page_with_a_token_either(url: str) -> None:
    for path in ("static/../answers.py", "static/..%2fanswers.py", "static/%2e%2e/%2e%2e/etc/passwd", "api/../../x"):
        status, _, body = fetch(url + path)
        assert status in (403, 404)
        assert b"root:" not in body
        assert b"def " not in body


def test_rebinding_and_other_origins_are_refused_also_with_the_token(url: str) -> None:
    host = url.split("/")[2]
    for headers in (
        {"Host": "evil.example"},
        {"Host": f"{host}.evil.example"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ):
        assert fetch(f"{url}api/overview", **headers)[0] == 403, headers
        assert fetch(f"{url}api/note", {"key": "0.jsonl:1", "text": "x"}, **headers)[0] == 403, headers
    assert fetch(f"{url}api/overview", Origin=f"http://{host}")[0] == 200


@pytest.mark.parametrize(
    "said",
    [
        f"GET /{TOKEN}/ HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil.example",
        f"GET http://evil.example/{TOKEN}/ HTTP/1.1\r\nHost: evil.example",
        "OPTIONS * HTTP/1.1\r\nHost: 127.0.0.1",
        f"GET //{TOKEN}/ HTTP/1.1\r\nHost: 127.0.0.1",
        "GET / HTTP/1.0",
    ],
)
def test_what_no_browser_sends_is_refused_too(url: str, said: str) -> None:
    host, port = url.split("/")[2].split(":")
    with socket.create_connection((host, int(port)), timeout=10) as client:
        client.sendall(f"{said}\r\n\r\n".encode())
        assert client.recv(100).split()[1] in (b"400", b"403")


def test_the_token_is_random_and_a_chosen_one_must_be_hard_to_guess() -> None:
    assert len({new_token() for _ in range(50)}) == 50
    for bad in ("short", "x" * 15, "with space in the token", "../../../../../../etc", "é" * 20, "x" * 129, ""):
        with pytest.raises(ConfigError, match="16 to 128 characters"):
            Access("127.0.0.1", bad)
    assert Access("127.0.0.1", new_token()).route == "/{token}"


def test_beyond_loopback_there_is_a_token_and_nothing_is_written_unless_one_insists(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def options(host: str, token: bool | None = None, notes: bool | None = None) -> WebOptions:
        return WebOptions(host, 0, browser=False, token=token, notes=notes)

    monkeypatch.delenv("TOOLYARD_VIEW_TOKEN", raising=False)
    for host in ("0.0.0.0", "::", "10.1.2.3", "node7.example", ""):
        assert options(host).secret, host
        assert "--notes" in options(host).read_only
        assert options(host, token=False).secret is None
        assert options(host, notes=True).read_only == ""
    for host in ("127.0.0.1", "::1", "localhost", "127.9.9.9"):
        assert options(host).secret is None, host
        assert options(host, token=True).secret
        assert options(host).read_only == ""
        assert "--read-only" in options(host, notes=False).read_only
    monkeypatch.setenv("TOOLYARD_VIEW_TOKEN", TOKEN)
    assert options("0.0.0.0").secret == options("127.0.0.1").secret == TOKEN
    assert options("127.0.0.1", token=False).secret is None


def test_the_command_prints_the_whole_url_once_and_the_browser_is_not_given_it_on_its_command_line(
    folder: Path, tmp_path: Path
) -> None:
    opened = tmp_path / "opened"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}.new; cat "${{1#file://}}" > {opened}.page\n')
    browser.write_text(browser.read_text() + f"mv {opened}.new {opened}\n")
    browser.chmod(0o755)
    process = subprocess.Popen(
        [TOOLYARD, "view", folder, "--web", "--token", "--port", "0", "-q", "score=1"],
        stderr=subprocess.PIPE,
        text=True,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "BROWSER": f"{browser} %s"},
    )
    assert process.stderr is not None
    with ending(process), process.stderr:
        told = process.stderr.readline()
        address = re.search(r"(http://127\.0\.0\.1:\d+/[\w-]{32}/)#/\?q=score%3A1 ", told)
        assert address, told
        assert fetch(f"{address[1]}api/overview")[0] == 200
        deadline = time.monotonic() + patient(30)
        while not opened.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert opened.read_text().startswith("file://")
        assert f"url={address[1]}#/?q=score%3A1" in Path(f"{opened}.page").read_text()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert process.stderr.read() == "interrupted\n"
    assert not Path(opened.read_text().strip().removeprefix("file://")).exists()


@pytest.mark.slow
def test_the_page_works_with_its_token_and_sends_it_to_nobody_else(folder: Path) -> None:
    with (
        opened_browser() as browser,
        served(folder, token=TOKEN) as url,
        Window(browser).watched("403 (Forbidden)") as page,
    ):
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        visit(page, url)
        assert page.locator(".row").count() == len(demo_lines())
        assert {address.startswith(url) for address in asked} == {True}
        assert page.context.cookies() == []
        page.keyboard.press("n")
        until(page, "location.hash.startsWith('#/t/')")
        page.reload()
        page.wait_for_selector(".row")
        page.goto(root(url))
        assert "needs its complete URL" in page.locator("body").inner_text()


# Slow and many clients ------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_a_thousand_idle_and_half_said_requests_disturb_nobody_and_are_closed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raise_open_files_limit()  # both ends are in this process
    monkeypatch.setattr(server_module, "_IDLE_SECONDS", 2.0)
    with ExitStack() as stack, served(folder, token=TOKEN) as url:
        host, port = url.split("/")[2].split(":")
        clients: list[socket.socket] = []
        for at in range(1000):
            clients.append(stack.enter_context(closing(socket.create_connection((host, int(port)), timeout=30))))
            clients[-1].sendall(b"" if at % 2 else f"GET /{TOKEN}/ HTTP/1.1\r\nHost: loc".encode())
        began = time.monotonic()
        assert fetch(f"{url}api/overview")[0] == 200
        assert time.monotonic() - began < patient(5)
        for client in clients:
            client.settimeout(patient(30))
            with suppress(ConnectionResetError):
                assert client.recv(1) == b""


def test_a_body_that_is_slow_or_huge_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_BODY_SECONDS", 0.2)
    with served(folder) as url:
        host, port = url.split("/")[2].split(":")
        with socket.create_connection((host, int(port)), timeout=30) as client:
            kind = "Content-Type: application/json\r\nContent-Length: 100"
            client.sendall(f"POST /api/note HTTP/1.1\r\nHost: {host}\r\n{kind}\r\n\r\n{{".encode())
            assert client.recv(100).split()[1] == b"408"
        assert fetch(f"{url}api/note", {"key": "0.jsonl:1", "text": "x" * 300_000})[0] == 413
        assert fetch(f"{url}api/note", b"[" * 200_000)[0] == 400
        assert fetch(f"{url}api/overview")[0] == 200


# Writing notes --------------------------------------------------------------------------------------------------------


def written(url: str, route: str, /, **told: Any) -> tuple[int, Any]:
    status, _, body = fetch(f"{url}api/{route}", told)
    return status, json.loads(body)


def test_notes_and_views_are_written_and_shown_to_all(tmp_path: Path) -> None:
    demo_dump(tmp_path)
    with served(tmp_path, token=TOKEN) as url:
        revision = json.loads(fetch(f"{url}api/overview")[2])["revision"]
        assert written(url, "note", key="0.jsonl:2", text=" look ") == (200, {"note": "look"})
        assert json.loads(fetch(f"{url}api/changes?revision={revision}")[2])["changed"]
        assert json.loads(fetch(f"{url}api/row?key=0.jsonl:2")[2])["note"] == "look"
        rows = json.loads(fetch(f"{url}api/rows?limit=3")[2])["rows"]
        assert [row["noted"] for row in rows] == [False, True, False]
        assert written(url, "note", key="0.jsonl:2", text="mine", was="") == (200, {"note": "look\n\nmine"})
        assert written(url, "view", name="a", query="score=1")[1]["views"] == {"a": "score=1"}
        assert json.loads(fetch(f"{url}api/overview")[2])["notes"] == {"views": {"a": "score=1"}, "read_only": ""}
        assert written(url, "view", name="a")[1]["views"] == {}
        for route, told in (
            ("note", {"text": "x"}),
            ("note", {"key": "../../x:1", "text": "x"}),
            ("note", {"key": "0.jsonl:1", "text": 7}),
            ("note", {"key": "0.jsonl:1", "text": "x" * 20_001}),
            ("view", {"name": "b", "query": "scroe<1"}),
            ("view", {"name": " ", "query": ""}),
        ):
            status, said = written(url, route, **told)
            assert status in (400, 404)
            assert said["error"]
    assert json.loads((tmp_path / FILE).read_text())["views"] == {}


def test_a_form_of_another_site_cannot_write(tmp_path: Path) -> None:
    demo_dump(tmp_path)
    with served(tmp_path) as url:
        told = {"key": "0.jsonl:1", "text": "x"}
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
            assert fetch(f"{url}api/note", told, **{"Content-Type": kind})[0] == 415
        opened = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "document", "Sec-Fetch-Mode": "navigate"}
        assert fetch(f"{url}api/note", told, **opened)[0] == 403
        assert fetch(url, told, **opened)[0] == 403
    assert not (tmp_path / FILE).exists()


def test_a_server_that_only_reads_says_why(tmp_path: Path) -> None:
    write_lines(tmp_path / "0.jsonl", [VERL_LINE])
    with served(tmp_path, read_only="it is Sunday") as url:
        assert written(url, "note", key="0.jsonl:1", text="x") == (403, {"error": "it is Sunday"})
        assert written(url, "view", name="a", query="") == (403, {"error": "it is Sunday"})
    (tmp_path / FILE).write_text("{")
    with served(tmp_path) as url:  # the dump opens nevertheless
        assert "is not a file of notes" in json.loads(fetch(f"{url}api/overview")[2])["notes"]["read_only"]
        assert "correct it" in written(url, "note", key="0.jsonl:1", text="x")[1]["error"]
        assert json.loads(fetch(f"{url}api/rows")[2])["count"] == 1
