"""`toolyard top`: what it draws fits the screen, and what is not a rollout is refused."""

from __future__ import annotations

import asyncio
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from rich.console import Console

from toolyard.cli.top import watching
from toolyard.cli.top.screen import Rates, frame
from toolyard.cli.top.watching import endpoint_of
from toolyard.errors import ConfigError, ToolyardError
from toolyard.rollout.watching.page import StatusPage

HOSTILE = "\x1b[2J\x1b]0;pwned\x07\u202egnp.exe\n" + "ö" * 500


def page(text: str = "x", **changes: Any) -> StatusPage:
    """A page with everything, much of it, and `text` wherever there is text."""
    node = {"name": f"8f3a2b1c-{text}", "host": text, "pid": 7, "states": {"GENERATING": 3}, "turns": 5}
    node |= {"sampled_tokens": 10**12, "tool_calls": 9}
    slow = {"request_id": 24 * "a" + text, "task": text, "node": "n", "state": "TOOL_CALLING", "seconds": 12345.6}
    slow |= {"turn": 3, "waits_for": text}
    server = {"url": f"http://10.0.0.1:30000/{text}", "in_flight": 100, "answered": 10**9, "failed": 3, "is_up": False}
    given = {
        "toolyard": "0.1.0", "pid": 1, "seconds": 100.0, "planned": 10_000, "done": 5000, "done_before": 1000,
        "failed": 7, "mean_score": 0.5, "finish_reasons": {f"{text}{n}": 5 for n in range(30)},
        "states": {"GENERATING": 200, "TOOL_CALLING": 56, text: 1}, "turns": 20_000, "sampled_tokens": 10**7,
        "tool_calls": 15_000, "is_blocked": True, "nodes": [node] * 256, "node_count": 1000,
        "ledger": {"workers": 1000, "open": 5000, text: 3}, "servers": [server] * 40,
        "sandbox": {"workers": 8, "busy": 8, "waiting": 30, "sessions": 0, "executions": {"ok": 10, text: 1}},
        "limiters": [
            {"name": text, "limit": 10, "in_flight": 10, "waiting": 99, "wait_p50": 0.1, "wait_p99": 3.0}
        ] * 2,
        "slowest": [slow] * 20,
    }  # fmt: skip
    return StatusPage.model_validate({**given, **changes})


@pytest.mark.parametrize("text", ["x", HOSTILE], ids=["plain", "hostile"])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (140, 45), (40, 10)])
def test_a_frame_fits_the_screen_and_fills_it(width: int, height: int, text: str) -> None:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)
    rates, seen = Rates(), page(text)
    rates.add(seen)
    console.print(frame(seen, rates, "http://127.0.0.1:9464", console.size, "no answer"))
    shown = console.file.getvalue()
    lines = shown.rstrip("\n").split("\n")
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    if height >= 24:
        assert len(lines) >= height - 3
        for part in ("done 5000/10000 (50 %)", "generating 200", "servers (", "nodes (", "slowest requests ("):
            assert part in shown, part
        assert shown.count(24 * "a") >= 4, "requests have room"
        hidden = re.search(r"nodes \((\d+) more\)", shown)
        assert hidden is not None
        assert int(hidden[1]) > 900, "also those that the page leaves out"


def test_rates_are_over_the_last_seconds_and_begin_anew_with_another_run() -> None:
    rates = Rates()
    for second in range(60):
        rates.add(page(seconds=second, sampled_tokens=second**2, turns=second, tool_calls=0, done=1000 + 2 * second))
    assert str(rates) == "108 tokens/s  1.0 turns/s  0.0 tool calls/s  2.00 requests/s"
    rates.add(page(seconds=1.0, sampled_tokens=5, turns=0))
    assert str(rates).startswith("0 tokens/s")
    since = Rates.since_start(page(seconds=100.0, sampled_tokens=1000, done=1100, turns=0, tool_calls=0))
    assert str(since) == "10 tokens/s  0.0 turns/s  0.0 tool calls/s  1.00 requests/s"
    assert "tokens/s" in str(Rates.since_start(page(seconds=0.0)))


def test_where_a_run_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for given in ("http://h:1", "http://h:1/", "http://h:1/metrics", "http://h:1/status/", "h:1"):
        assert endpoint_of(given) == "http://h:1"
    assert endpoint_of("[::1]:9464") == "http://[::1]:9464"
    for given in ("nowhere", "h:port", "ftp://h:1"):
        with pytest.raises(ConfigError, match="neither a URL nor the folder"):
            endpoint_of(given)
    with pytest.raises(ConfigError, match="no rollout with metrics"):
        endpoint_of(None)
    folder = tmp_path / "rollouts/a"
    folder.mkdir(parents=True)
    with pytest.raises(ConfigError, match="start one with --metrics-port"):
        endpoint_of(str(folder))
    (folder / ".metrics").write_text("http://127.0.0.1:9464")
    assert endpoint_of(str(folder)) == endpoint_of(None) == "http://127.0.0.1:9464"
    (folder / ".metrics").write_bytes(b"\xff\x00" * 10_000)
    with pytest.raises(ConfigError, match="not the address"):
        endpoint_of(None)


def test_a_run_that_ends_while_it_is_looked_for_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there, gone = tmp_path / "a/.metrics", tmp_path / "b/.metrics"
    there.parent.mkdir()
    there.write_text("http://127.0.0.1:9464")
    monkeypatch.setattr(Path, "glob", lambda *_: iter([there, gone]))
    assert endpoint_of(None) == "http://127.0.0.1:9464"
    there.unlink()
    with pytest.raises(ConfigError, match="no rollout with metrics is running"):
        endpoint_of(None)


async def read(answer: web.StreamResponse | None, stream: bytes | None = None) -> StatusPage:
    """What `top` makes of a server that answers so."""

    async def status(request: web.Request) -> web.StreamResponse:
        if answer is not None:
            return answer
        endless = web.StreamResponse()
        await endless.prepare(request)
        while stream:
            await endless.write(stream)
            await asyncio.sleep(0)
        await asyncio.sleep(60)
        return endless

    app = web.Application()
    app.router.add_get("/status", status)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        return await watching._read_once(f"http://127.0.0.1:{runner.addresses[0][1]}")
    finally:
        await runner.cleanup()


async def test_what_is_not_a_rollout_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    good = page().model_dump()
    assert (await read(web.json_response(good))).planned == 10_000
    assert (await read(web.json_response({**good, "added_later": 1}))).done == 5000
    wrong: list[web.StreamResponse] = [
        web.Response(text="<html>hello</html>"),
        web.Response(body=b"\xff\xfe\x00"),
        web.json_response([1, 2]),
        web.json_response({}),
        web.json_response({**good, "seconds": "soon"}),
        web.Response(text=json.dumps({**good, "seconds": float("nan")})),
        web.json_response({**good, "nodes": [{"name": 7}]}),
        web.Response(status=404, text="no"),
        web.Response(status=302, headers={"Location": "http://example.com"}),
    ]
    for answer in wrong:
        with pytest.raises(ConfigError, match="not the status of a rollout") as caught:
            await read(answer)
        assert len(str(caught.value)) < 500
    with pytest.raises(ConfigError, match="4194305 bytes"):
        await read(None, stream=b"a" * 65536)
    monkeypatch.setattr(watching, "_ANSWER_SECONDS", 0.2)
    with pytest.raises(ToolyardError, match="no answer within"):
        await read(None)
    with pytest.raises(ToolyardError, match="has the rollout ended"):
        await watching._read_once("http://127.0.0.1:1")
    with pytest.raises(ToolyardError):
        await watching._read_once("http://[bad")
