"""Where `toolyard top` finds a run, and how it reads it until it ends."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from pathlib import Path

import aiohttp
from pydantic import ValidationError
from rich.live import Live

from toolyard.cli.console import out
from toolyard.cli.top.screen import Rates, frame
from toolyard.errors import ConfigError, ToolyardError
from toolyard.rollout.watching.page import ADDRESS_FILE, StatusPage

_ANSWER_SECONDS = 5.0
_SILENCE_SECONDS = 30.0
"""A run that does not answer for so long is given up."""
_MAX_BYTES = 4 << 20
_MAX_URL = 300


class _SilentError(ToolyardError):
    """The run did not answer in time: it may be busy."""


class _GoneError(ToolyardError):
    """Nobody listens there."""


def endpoint_of(run: str | None) -> str:
    """The URL of a run, given its URL, `host:port`, or the folder of its dump.

    Raises:
        ConfigError: there is no such run.
    """
    if run is None:
        begun = dict[Path, float]()
        for file in Path("rollouts").glob(f"*/{ADDRESS_FILE}"):
            with contextlib.suppress(FileNotFoundError):  # the run has just ended
                begun[file] = file.stat().st_mtime
        if not begun:
            raise ConfigError("no rollout with metrics is running in rollouts/; name a URL, or the folder of a dump")
        return _address_in(max(begun, key=begun.__getitem__))
    if Path(run).is_dir():
        return _address_in(Path(run, ADDRESS_FILE))
    if re.match("https?://", run):
        return re.sub("(/metrics|/status)?/?$", "", run)
    if re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[\w.-]+):\d+", run):
        return f"http://{run}"
    raise ConfigError(f"{run!r} is neither a URL nor the folder of a dump")


def _address_in(file: Path) -> str:
    try:
        with file.open(errors="replace") as opened:
            text = opened.read(_MAX_URL).strip()
    except OSError:
        raise ConfigError(
            f"{file.parent}: no rollout with metrics is running there; start one with --metrics-port"
        ) from None
    if not re.fullmatch(r"http://[\w.:\[\]-]+", text):
        raise ConfigError(f"{file}: not the address of a rollout; remove it")
    return text


def print_once(url: str, *, as_json: bool) -> None:
    """
    Raises:
        ToolyardError: the run cannot be read.
    """
    page = asyncio.run(_read_once(url))
    console = out()
    if as_json:
        print(page.model_dump_json(indent=2))  # noqa: T201
    else:
        console.print(frame(page, Rates.since_start(page), url))


def watch(url: str, interval: float) -> bool:
    """Show the run until it ends. False, without having done anything, if stdout is not a terminal.

    Raises:
        ToolyardError: the run cannot be read.
    """
    console = out()
    if not console.is_terminal:
        return False
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_watch(url, interval))
    return True


async def _watch(url: str, interval: float) -> None:
    console, rates = out(), Rates()
    async with _session() as session:
        page = await _read(session, url)  # fails before the screen is cleared
        heard, problem = time.monotonic(), ""
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                rates.add(page)
                live.update(frame(page, rates, url, console.size, problem), refresh=True)
                await asyncio.sleep(interval)
                try:
                    page = await _read(session, url)
                    heard, problem = time.monotonic(), ""
                except _GoneError:
                    break
                except _SilentError as error:
                    problem = str(error)
                    if time.monotonic() - heard > _SILENCE_SECONDS:
                        raise
    console.print(
        f"the rollout at {url} has ended; when last seen, {page.done} of {page.planned} requests were done, "
        f"{page.failed} failed",
        markup=False,
    )


async def _read_once(url: str) -> StatusPage:
    async with _session() as session:
        return await _read(session, url)


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_ANSWER_SECONDS))


async def _read(session: aiohttp.ClientSession, url: str) -> StatusPage:
    """
    Raises:
        ToolyardError: it is not there, does not answer, or is something else.
    """
    where = f"{url}/status"
    try:
        async with session.get(where, allow_redirects=False) as answer:
            body = await answer.content.read(_MAX_BYTES + 1)
            while len(body) <= _MAX_BYTES and not answer.content.at_eof():
                body += await answer.content.read(_MAX_BYTES + 1 - len(body))
            if answer.status != 200 or len(body) > _MAX_BYTES:
                raise ConfigError(f"{where}: not the status of a rollout (HTTP {answer.status}, {len(body)} bytes)")
    except aiohttp.ClientConnectorError:
        raise _GoneError(f"{where}: nothing answers there; has the rollout ended?") from None
    except (aiohttp.ClientConnectionError, TimeoutError):
        raise _SilentError(f"{where}: no answer within {_ANSWER_SECONDS:g} s") from None
    except (aiohttp.ClientError, ValueError) as error:
        raise ConfigError(f"{where}: not the status of a rollout: {str(error)[:200]}") from None
    try:
        return StatusPage.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "the page"
        raise ConfigError(f"{where}: not the status of a rollout: {key}: {first['msg'][:200]}") from None
