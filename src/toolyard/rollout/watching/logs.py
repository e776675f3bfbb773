"""The logs of a run: lines of text or JSON that name the request they are about.

A line logged while a request is played names it, also if the line is a tool's: `CURRENT` follows the request into the
tasks and threads that work for it.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from toolyard.errors import ConfigError
from toolyard.records.trajectory import Trajectory
from toolyard.rollout.config import LogConfig
from toolyard.rollout.observer import Observer
from toolyard.rollout.request import CURRENT
from toolyard.rollout.run_many import Stuck
from toolyard.rollout.summary import Summary
from toolyard.supervision import Stall

_log = logging.getLogger("toolyard.rollout")


@contextmanager
def logging_to(config: LogConfig) -> Generator[None]:
    """Write the logs of this process as `config` says, until the block is left.

    Raises:
        ConfigError: the file cannot be written.
    """
    handler = _handler(config)
    handler.setFormatter(_JsonFormatter() if config.format == "json" else _TextFormatter())
    level = getattr(logging, config.level.upper())
    root, own = logging.getLogger(), logging.getLogger("toolyard")
    before = root.level, own.level
    # At debug, other libraries log what they send, headers with keys included.
    root.setLevel(max(level, logging.INFO))
    own.setLevel(level)
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(before[0])
        own.setLevel(before[1])
        handler.close()


def _handler(config: LogConfig) -> logging.Handler:
    if config.file is None:
        return _Stderr()
    try:
        return logging.FileHandler(config.file, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ConfigError(f"logs.file {config.file!r}: {error.strerror or error}") from None


class _Stderr(logging.StreamHandler[Any]):
    """Looks up `sys.stderr` for every line: a progress display may have replaced it."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def _context(record: logging.LogRecord) -> dict[str, Any]:
    """The request that the line is about, and the fields that were logged with it."""
    found: dict[str, Any] = {}
    request = CURRENT.get()
    if request is not None:
        found = {
            "request_id": request.request_id,
            "task": request.batch_data_id,
            "state": request.state.value,
            "turn": len(request.turns) + 1,
        }
    fields: Mapping[str, Any] = getattr(record, "fields", {})
    return {**found, **fields}


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_context(record),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)  # ASCII: no text can break the line


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        context = " ".join(f"{key}={value}" for key, value in _context(record).items())
        text = f"{_time(record)} {record.levelname.lower()} {record.name}: {record.getMessage()}"
        text = " ".join(part for part in (*text.splitlines(), context) if part)
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def _time(record: logging.LogRecord) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z"


class LogObserver(Observer):
    """Logs what happens in a run."""

    def stage(self, text: str) -> None:
        _log.info("%s", text)

    def note(self, text: str) -> None:
        _log.info("%s", text)

    def opened(self, total: int, done: int) -> None:
        _log.info("the run starts", extra={"fields": {"planned": total, "done_before": done}})

    def told(self, kind: str, text: str) -> None:
        _log.warning("%s: %s", kind, text)

    def ended(self, trajectory: Trajectory, summary: Summary) -> None:
        failure = trajectory.failure
        fields = {
            "request_id": trajectory.request_id,
            "task": trajectory.batch_data_id,
            "state": trajectory.state,
            "finish_reason": trajectory.finish_reason,
            "turns": len(trajectory.turns),
            "sampled_tokens": trajectory.metrics.get("sampled_tokens", 0),
            "tool_calls": sum(len(turn.tool_calls) for turn in trajectory.turns),
            "seconds": round(sum(trajectory.metrics.get("seconds", {}).values()), 3),
            "score": trajectory.score,
        }
        if failure is not None:
            fields |= {"failed_in": failure.stage, "source": failure.source, "whose": failure.whose}
        _log.log(
            logging.INFO if failure is None else logging.WARNING,
            "the request ended" if failure is None else "the request failed",
            extra={"fields": fields},
        )

    def stuck(self, stuck: Stuck) -> None:
        _log.warning("%s", stuck, extra={"fields": {"request_id": stuck.request_id, "state": stuck.state.value}})

    def stalled(self, stall: Stall) -> None:
        _log.warning("blocked: %s", stall)
