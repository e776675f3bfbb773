"""The logs of a run: which lines name which request, and what they look like."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import sys
from pathlib import Path

import pytest

from playing import Echo, call, request_for, scripted, setting, task
from toolyard.errors import ConfigError
from toolyard.rollout.config import LogConfig
from toolyard.rollout.request import CURRENT
from toolyard.rollout.run_many import RolloutRun
from toolyard.rollout.watching.logs import logging_to
from toolyard.tools.base import ToolResponse


class Chatty(Echo):
    """Logs from the task of its call, and from a thread."""

    async def execute(self, instance_id, parameters, **kwargs):
        logging.getLogger("mine").info("hello\nfrom %s", instance_id)
        await asyncio.to_thread(logging.getLogger("mine").warning, "from a thread")
        logging.getLogger("mine").debug("too much")
        return ToolResponse(text="x"), None, {}


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def play(count: int) -> list[str]:
    async with scripted([call("echo", {"text": "x"}), "#### 42"]) as engine:
        place = setting(engine, [Chatty()])
        requests = [request_for(place, task(id=f"task-{number}")) for number in range(count)]
        async with RolloutRun(place, requests) as run:
            return [trajectory.request_id async for trajectory in run]


async def test_lines_of_tools_name_their_request_also_from_threads(tmp_path: Path) -> None:
    with logging_to(LogConfig(format="json", file=str(tmp_path / "log"))):
        ids = await play(20)
        assert CURRENT.get() is None
        logging.getLogger("mine").info("of no request")
    found = lines(tmp_path / "log")
    said = [line for line in found if line["logger"] == "mine"]
    assert sorted(line["request_id"] for line in said if line["message"] == "from a thread") == sorted(ids)
    for line in said[:-1]:
        assert (line["state"], line["turn"]) == ("TOOL_CALLING", 1)
        if line["level"] == "info":
            assert line["message"].startswith("hello\nfrom ")
    assert "request_id" not in said[-1]
    assert not [line for line in found if line["level"] == "debug"]


async def test_at_debug_every_change_of_state_is_a_line_of_ours_alone(tmp_path: Path) -> None:
    with logging_to(LogConfig(format="json", file=str(tmp_path / "log"), level="debug")):
        [request_id] = await play(1)
    found = lines(tmp_path / "log")
    own = [line["message"] for line in found if line.get("request_id") == request_id]
    entered = [message for message in own if "entered" in message]
    assert entered == ["entered GENERATING", "entered TOOL_CALLING", "entered GENERATING", "entered COMPLETED"]
    assert not [line for line in found if line["message"] == "too much"], "other libraries may log secrets at debug"


def test_what_was_set_before_is_set_again(tmp_path: Path) -> None:
    root, own = logging.getLogger(), logging.getLogger("toolyard")
    before = root.level, own.level, list(root.handlers)
    with pytest.raises(ZeroDivisionError), logging_to(LogConfig(file=str(tmp_path / "log"))):
        raise ZeroDivisionError
    assert (root.level, own.level, list(root.handlers)) == before
    with pytest.raises(ConfigError, match=r"logs\.file"), logging_to(LogConfig(file=str(tmp_path))):
        pass
    assert (root.level, own.level, list(root.handlers)) == before


@pytest.mark.parametrize("how", ["json", "text"])
def test_hostile_text_stays_on_its_line(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # or pytest-xdist would try to send it
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with logging_to(LogConfig(format=how)):
        other = io.StringIO()
        monkeypatch.setattr(sys, "stderr", other)  # as a progress display does
        logging.getLogger("x").warning("a\r\nb\u2028c \x1b[31m \ud800 %s", "{}", extra={"fields": {"key": object()}})
    text = other.getvalue()
    assert text.count("\n") == 1
    assert len(text.splitlines()) == 1
    if how == "json":
        assert json.loads(text)["message"].startswith("a\r\nb")


def test_an_exception_is_part_of_its_line(tmp_path: Path) -> None:
    with logging_to(LogConfig(format="json", file=str(tmp_path / "log"))):
        try:
            raise ZeroDivisionError("division by zero")
        except ZeroDivisionError:
            logging.getLogger("x").exception("it failed")
    [line] = lines(tmp_path / "log")
    assert line["error"].endswith("ZeroDivisionError: division by zero")
