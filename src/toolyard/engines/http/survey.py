"""What servers say about themselves: the version of their weights, and how much they have to do.

SGLang says it at `/model_info` and `/v1/loads`, vLLM at `/weight_info` (in development mode) and `/metrics`. Other
servers say nothing, which is no error.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import orjson

from toolyard.engines.http.exchange import Exchanges, RefusedError, a_list, an_object
from toolyard.engines.protocol import Load
from toolyard.errors import EngineError
from toolyard.messages import JSON

T = TypeVar("T")
_GAUGE = re.compile(r"(?m)^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc)(?:{.*})? (\S+)$")


class Survey:
    """Asks servers, each question for at most `seconds`, and remembers which routes they do not have."""

    def __init__(self, exchanges: Exchanges, *, seconds: float) -> None:
        self._exchanges = exchanges
        self._seconds = seconds
        self._lacks: set[str] = set()

    async def is_healthy(self, base: str, path: str = "/health") -> bool:
        """Any answer counts as healthy, unless it reports a failure."""
        try:
            async with asyncio.timeout(self._seconds):
                await self._exchanges.get(base + path)
        except RefusedError:
            return True
        except (EngineError, TimeoutError):
            return False
        return True

    async def version(self, base: str) -> str | None:
        """The version of its weights; None if it does not say."""
        return await self._first(base, {"/model_info": _version, "/weight_info": _version})

    async def load(self, base: str) -> Load | None:
        """None if it does not say."""
        return await self._first(base, {"/v1/loads": _of_loads, "/metrics": _of_metrics})

    async def _first(self, base: str, routes: Mapping[str, Callable[[bytes], T | None]]) -> T | None:
        for path, read in routes.items():
            where = base.removesuffix("/v1") + path
            if where in self._lacks:
                continue
            try:
                async with asyncio.timeout(self._seconds):
                    found = read(await self._exchanges.get(where))
            except RefusedError:
                self._lacks.add(where)
            except (EngineError, TimeoutError):
                return None  # requests will find out
            else:
                if found is not None:
                    return found
        return None


def version_number(version: str | None) -> int | None:
    """The number that a version ends with, to tell which of two is newer. A version without one, such as SGLang's
    `default`, is older than any with one."""
    if version is None:
        return None
    digits = re.search(r"[0-9]{1,18}$", version)
    return int(digits.group()) if digits else -1


def _version(content: bytes) -> str | None:
    version = (_json(content) or {}).get("weight_version")
    return None if version is None else str(version)


def _of_loads(content: bytes) -> Load | None:
    """SGLang's: a row for each data-parallel rank."""
    rows = [an_object(row) or {} for row in a_list((_json(content) or {}).get("loads")) or ()]
    names = ("num_running_reqs", "num_waiting_reqs", "token_usage")
    return _summed({name: [row.get(name) for row in rows] for name in names}, *names)


def _of_metrics(content: bytes) -> Load | None:
    """vLLM's: a gauge for each engine."""
    found: dict[str, list[Any]] = {}
    for name, value in _GAUGE.findall(content.decode("utf-8", "replace")):
        found.setdefault(name, []).append(value)
    return _summed(found, "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


def _summed(found: Mapping[str, list[Any]], running: str, waiting: str, usage: str) -> Load | None:
    """None if a figure is missing or not a number."""
    try:
        runs, waits = ([float(value) for value in found[name]] for name in (running, waiting))
        uses = [float(value) for value in found.get(usage, ()) if value is not None]
        return Load(int(sum(runs)), int(sum(waits)), max(uses, default=0.0)) if runs and waits else None
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def _json(content: bytes) -> JSON | None:
    try:
        return an_object(orjson.loads(content))
    except ValueError:
        return None
