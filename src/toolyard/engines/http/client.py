"""What engines over HTTP share: choosing a server for each request, retries, aborts, and a time limit for all of it.

An answer counts only if it arrives complete, so a retry is always safe. These are retried: no connection, a broken
connection, an invalid answer, and the server's own "busy" (429, 503) and "failed" (5xx). A refusal (4xx) would be
repeated, so it is raised immediately.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypedDict, TypeVar

from toolyard.engines.http.exchange import (
    Exchanges,
    RefusedError,
    ServerFailedError,
    a_list,
    an_object,
    base_url,
    permanent,
)
from toolyard.engines.http.survey import Survey, version_number
from toolyard.engines.http.watchdog import Watchdog
from toolyard.engines.protocol import Load, ServerLoad
from toolyard.errors import ConfigError, EngineError, EngineRequestError
from toolyard.failover import Router
from toolyard.messages import JSON
from toolyard.supervision import Scope, loop_clock

T = TypeVar("T")
_log = logging.getLogger(__name__)

_FIRST_DELAY, _LONGEST_DELAY = 0.05, 5.0
_MAX_RETRY_AFTER = 60.0
"""If a server asks to wait longer than this, it is not waited for: the caller may have better use of the time."""
_ABORT_PATIENCE = (0.05, 0.2, 0.75)
"""Fractions of `abort_timeout`. An abort can overtake its request, so it is repeated."""
_TEND_SECONDS = 2.0
"""Time between two looks at which servers can join, and at the versions of the others' weights."""
_random = random.SystemRandom()


class HttpOptions(TypedDict, total=False):
    """Options of every engine over HTTP; see `HttpEngine`."""

    api_key: str | None
    request_timeout: float
    connect_timeout: float
    abort_timeout: float
    retries: int
    max_connections: int
    max_response_bytes: int
    silence_seconds: float
    waits_for_servers: bool


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What `/v1/models` says about the first model; None if it does not say."""

    name: str | None = None
    context: int | None = None


@dataclass(slots=True, eq=False)
class _Run:
    """A request in progress."""

    hang_up: Scope
    deadline: float
    """On the event loop's clock."""
    base: str | None = None
    """The server that has it; None while none does."""
    rid: str = ""
    attempt: Scope | None = None
    tries: int = 0
    failures: int = 0
    """Tries that count against `retries`."""
    left_because: str = ""
    last_error: str = ""
    is_aborted: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def __str__(self) -> str:
        where = self.base or "a server"
        failed = f" (last error: {self.last_error})" if self.last_error else ""
        return f"{where}, try {self.tries}{failed}"


class HttpEngine:
    """The base of engines over HTTP. Opened and closed in one task, used from any task of its loop."""

    def __init__(
        self,
        urls: Sequence[str] | str,
        *,
        api_key: str | None = None,
        request_timeout: float = 600.0,
        connect_timeout: float = 5.0,
        abort_timeout: float = 2.0,
        retries: int = 5,
        max_connections: int = 0,
        max_response_bytes: int = 64 * 2**20,
        silence_seconds: float = 30.0,
        waits_for_servers: bool = False,
    ) -> None:
        """Args:
        urls: Servers of the same model. A request stays at one of them, and moves if that one fails.
        request_timeout: Time limit for a whole request: waiting for the server, sampling, all attempts.
        abort_timeout: How long an aborted request may take to end by itself, with what was sampled; then the
            connection is closed.
        retries: Maximum attempts after the first.
        max_connections: Maximum concurrent requests; others wait. 0: no limit.
        max_response_bytes: A longer answer counts as broken.
        silence_seconds: With several servers, requests leave one that has answered nothing for this long while others
            answer. One that also fails its health checks is left after about 15 s.
        waits_for_servers: Servers come and go (`set_urls`). One is used from when it passes its health check, and
            `urls` may be empty. Without a server that can be reached, requests wait for one until `request_timeout`.

        Raises:
            ConfigError: a URL is invalid.
        """
        self._bases = [self._base_of(url) for url in ([urls] if isinstance(urls, str) else urls)]
        if not self._bases and not waits_for_servers:
            raise ConfigError(f"{type(self).__name__} needs the URL of a server")
        self._request_timeout = request_timeout
        self._connect_timeout = connect_timeout
        self._abort_timeout = abort_timeout
        self._retries = retries
        self._exchanges = Exchanges(
            api_key=api_key,
            connect_timeout=connect_timeout,
            max_connections=max_connections,
            max_bytes=max_response_bytes,
        )
        self._waits = waits_for_servers
        self._router = Router(() if waits_for_servers else self._bases, probe_seconds=connect_timeout)
        self._survey = Survey(self._exchanges, seconds=connect_timeout)
        self._arrived = asyncio.Event()
        """A server has joined."""
        self._changed = asyncio.Event()
        """`set_urls` was called."""
        self._unhealthy: set[str] = set()
        """Servers that have not joined yet, and about which the log says so."""
        self._watchdog = Watchdog(
            self._router,
            is_healthy=self._is_healthy,
            move=self._move,
            silence_seconds=silence_seconds,
        )
        self._watching: list[asyncio.Task[None]] = []
        self._is_open = False
        self._running: dict[str, set[_Run]] = {}
        self._chores: set[asyncio.Task[Any]] = set()
        self._models: dict[str, asyncio.Task[ServedModel]] = {}
        self.retried = 0
        """Number of attempts beyond the first of each request, since the engine was created."""
        self._rid_prefix = secrets.token_hex(4)
        self._rid_count = 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self._bases)})"

    # ------------------------------------------------------------------------------------------------------ lifetime
    async def __aenter__(self) -> Self:
        await self._exchanges.open()
        self._is_open = True
        if self._waits:
            # Before the first request, or all would settle on the server that joins first.
            try:
                await self._look_at_servers()
            except BaseException:
                await self._exchanges.close()
                raise
        if self._waits or len(self._bases) > 1:
            self._watch()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_open = False
        for watching in self._watching:
            watching.cancel()
        if self._watching:
            await asyncio.wait(self._watching)
            self._watching.clear()
        try:
            async with asyncio.TaskGroup() as ending:
                for run in [run for runs in self._running.values() for run in runs]:
                    ending.create_task(self._end(run))
            if self._chores:
                await asyncio.wait(self._chores, timeout=self._abort_timeout)
        finally:
            left = list(self._chores)
            for chore in left:
                chore.cancel()
            if left:
                await asyncio.wait(left)
            self._models.clear()
            await self._exchanges.close()

    async def abort(self, request_id: str) -> None:
        """Tell the server to abort it. If that is impossible, close the connection, which ends the request on every
        server: then what was sampled is lost. Returns when `generate` is about to, within a few seconds."""
        for run in list(self._running.get(request_id, ())):
            await self._end(run)

    def activity(self, request_id: str) -> str:
        """Return which server has it, which attempt it is, and the last error."""
        return "; ".join(map(str, self._running.get(request_id, ())))

    def servers(self) -> list[ServerLoad]:
        """The servers with their load. Can be called from any thread."""
        return [ServerLoad(*load) for load in self._router.loads(time.monotonic())]

    # ------------------------------------------------------------------------------------- servers that come and go
    @property
    def urls(self) -> list[str]:
        """The servers in use: those that have joined."""
        return self._router.servers

    def set_urls(self, urls: Sequence[str]) -> None:
        """Use these servers from now on. New ones join when they pass their health check. Those that are missing get
        nothing more; what they are sampling may end.

        Raises:
            ConfigError: a URL is invalid; nothing has changed.
        """
        bases = list(dict.fromkeys(self._base_of(url) for url in urls))
        for base in self._bases:
            if base not in bases:
                self._router.remove(base)
                self._models.pop(base, None)
                self._unhealthy.discard(base)
        self._bases = bases
        self._changed.set()
        if self._is_open and not self._watching:
            self._watch()

    async def loads(self) -> list[Load]:
        """What the servers in use say about their load; those that say nothing are left out."""
        async with asyncio.TaskGroup() as asking:
            asked = [asking.create_task(self._survey.load(base)) for base in self.urls]
        return [load for load in (task.result() for task in asked) if load is not None]

    def _watch(self) -> None:
        start = asyncio.get_running_loop().create_task
        self._watching = [start(self._watchdog.watch()), start(self._tend())]

    async def _tend(self) -> None:
        while True:
            self._changed.clear()
            await self._look_at_servers()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TEND_SECONDS):
                    await self._changed.wait()

    async def _look_at_servers(self) -> None:
        """Let healthy servers join, and note the versions of all weights."""
        async with asyncio.TaskGroup() as asking:
            for base in self._bases:
                asking.create_task(self._look_at(base))

    async def _look_at(self, base: str) -> None:
        joined = base in self.urls
        if not joined and not await self._is_healthy(base):
            if base not in self._unhealthy:
                self._unhealthy.add(base)
                _log.warning("%s does not pass its health check; it gets requests as soon as it does", base)
            return
        version = await self._survey.version(base)
        if base not in self._bases:
            return  # removed meanwhile
        self._router.add(base)
        self._router.know_version(base, version_number(version))
        self._unhealthy.discard(base)
        self._arrived.set()

    # ------------------------------------------------------------------------------------------- for subclasses
    _health_path = "/health"

    def _base_of(self, url: str) -> str:
        return base_url(url).removesuffix("/v1")

    async def _abort_at(self, base: str, rid: str) -> bool:
        """Tell a server to abort `rid`. False if it has no way to be told."""
        return False

    # ---------------------------------------------------------------------------------------------- a whole request
    async def _perform(self, request_id: str, prefix: str, attempt: Callable[[str, str], Awaitable[T]]) -> T | None:
        """Return what `attempt` returns for a server and the request's id there. None if it was aborted.

        `prefix`: the same for requests with the same prompt, which share a server if its load allows.

        Raises:
            EngineRequestError: a server refused.
            EngineError: no attempt succeeded, or time ran out.
        """
        if not self._is_open:
            raise self._not_open()
        task, clock = asyncio.current_task(), loop_clock()
        assert task is not None
        seconds = self._request_timeout
        run = _Run(Scope(task, clock, seconds), clock.now() + seconds)
        runs = self._running.setdefault(request_id, set())
        try:
            with run.hang_up:
                runs.add(run)
                return await self._try_until_answered(request_id, prefix, run, attempt)
            if run.is_aborted:
                return None
            if run.base is not None:
                self._router.failed(run.base, _now(), gone=False)
            elif not self.urls:
                raise EngineError(f"no server for {request_id!r} within {seconds:g} s: {self._why_none()}")
            raise _at(run.base, f"{run}: no answer to {request_id!r} within {seconds:g} s")
        finally:
            run.ended.set()
            runs.discard(run)
            if not runs and self._running.get(request_id) is runs:
                del self._running[request_id]

    async def _try_until_answered(
        self, request_id: str, prefix: str, run: _Run, attempt: Callable[[str, str], Awaitable[T]]
    ) -> T | None:
        task, clock = asyncio.current_task(), loop_clock()
        assert task is not None
        asked = _now()
        while True:
            while not self.urls:
                run.last_error = self._why_none()
                self._arrived.clear()
                await self._arrived.wait()
            run.tries += 1
            base = self._router.pick(request_id, _now(), prefix)
            run.base, run.rid, run.left_because = base, self._new_rid(request_id), ""
            run.attempt = Scope(task, clock, self._request_timeout)
            began, answered = _now(), False
            answer: Any = None
            self._watchdog.sent(base)
            try:
                with run.attempt:
                    answer = await attempt(base, run.rid)
                    answered = True
                if not answered:
                    self._chore(self._tell_abort(base, run.rid))
                    raise ServerFailedError(f"{base}: left, because {run.left_because}", gone=True)
            except ServerFailedError as error:
                answered = not error.gone
                self._note_failure(base, error)
                if run.is_aborted:
                    return None
                run.last_error = str(error)
                run.failures += not (self._waits and error.gone)
                delay = error.retry_after + _random.uniform(
                    0, min(_LONGEST_DELAY, _FIRST_DELAY * 2 ** min(run.tries, 10))
                )
                left = run.deadline - clock.now()
                if run.failures > self._retries or delay > left or error.retry_after > _MAX_RETRY_AFTER:
                    raise _at(base, f"{error} (tries: {run.tries})") from error
            except EngineRequestError as error:
                answered = True
                self._router.answered(base)
                error.source = base
                raise
            except asyncio.CancelledError:
                # Cancelled, out of time, or aborted without effect. The server may be behind a proxy that does not
                # forward the disconnect, so it is also told to abort; nobody waits for that.
                self._chore(self._tell_abort(base, run.rid))
                raise
            else:
                self._router.answered(base)
                return answer if run.tries == 1 else replace(answer, queue_seconds=round(began - asked, 6))
            finally:
                run.attempt = None
                self._watchdog.ended(base, answered=answered, seconds=_now() - began)
                self._router.done(base)
            run.base = None
            self.retried += 1
            await asyncio.sleep(delay)

    def _why_none(self) -> str:
        if not self._bases:
            return "there is no server; add one to the engine directory"
        return f"no server passes its health check: {', '.join(self._bases)}"

    def _note_failure(self, base: str, error: ServerFailedError) -> None:
        if error.busy:
            return
        self._router.failed(base, _now(), gone=error.gone)
        if error.gone:
            self._models.pop(base, None)  # it may come back with another model

    def _new_rid(self, request_id: str) -> str:
        """Return the request's id at the server: different for each attempt, and never a prefix of another, since
        SGLang aborts by prefix."""
        self._rid_count += 1
        return f"{self._rid_prefix}{self._rid_count:08x}-{request_id}"

    async def _end(self, run: _Run) -> None:
        run.is_aborted = True
        try:
            for share in _ABORT_PATIENCE:
                if run.base is None or not await self._tell_abort(run.base, run.rid):
                    break
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(share * self._abort_timeout):
                        await run.ended.wait()
                if run.ended.is_set():
                    break
        finally:
            if not run.ended.is_set():
                run.hang_up.expire()

    def _move(self, base: str, why: str) -> None:
        """Move all requests away from a server."""
        for run in [run for runs in self._running.values() for run in runs if run.base == base]:
            run.left_because = why
            if run.attempt is not None:
                run.attempt.expire()

    async def _is_healthy(self, base: str) -> bool:
        return await self._survey.is_healthy(base, self._health_path)

    async def _tell_abort(self, base: str, rid: str) -> bool:
        try:
            async with asyncio.timeout(self._abort_timeout):
                return await self._abort_at(base, rid)
        except (EngineError, TimeoutError):
            return False

    def _chore(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start background work. The engine owns it, and waits for it before it closes."""
        task = asyncio.get_running_loop().create_task(work)
        self._chores.add(task)
        task.add_done_callback(self._chore_done)
        return task

    def _chore_done(self, task: asyncio.Task[Any]) -> None:
        self._chores.discard(task)
        if not task.cancelled():
            task.exception()  # mark it as retrieved: waiters, if any, have it

    # --------------------------------------------------------------------------------------------------- all servers
    async def _ask_all(self, path: str, body: JSON | None = None) -> dict[str, JSON]:
        """Ask every server in use concurrently; if one fails, this fails too, naming one that did."""
        if not self._is_open:
            raise self._not_open()
        if not self.urls:
            raise EngineError(f"{path}: {self._why_none()}")

        async def one(base: str) -> JSON | EngineError:
            try:
                async with asyncio.timeout(self._request_timeout):
                    return await self._exchanges.ask(f"{base}{path}", body)
            except TimeoutError:
                return EngineError(f"{base}{path}: no answer within {self._request_timeout:g} s")
            except EngineError as error:
                return error

        async with asyncio.TaskGroup() as tasks:
            asked = {base: tasks.create_task(one(base)) for base in self.urls}
        answers: dict[str, JSON] = {}
        for base, task in asked.items():
            found = task.result()
            if isinstance(found, EngineError):
                raise found
            answers[base] = found
        return answers

    # ----------------------------------------------------------------------------------------------------- the model
    async def _model_at(self, base: str) -> ServedModel:
        """Ask once for all requests; ask again after the server was unavailable."""
        asked = self._models.get(base)
        if asked is None or (asked.done() and (asked.cancelled() or asked.exception() is not None)):
            asked = self._models[base] = self._chore(self._ask_model(base))
        return await asyncio.shield(asked)

    async def _ask_model(self, base: str) -> ServedModel:
        where = f"{base}{self._models_path}"
        try:
            async with asyncio.timeout(self._connect_timeout + 5.0):
                answer = await self._exchanges.ask(where)
        except TimeoutError:
            raise ServerFailedError(f"{where}: no answer", gone=True) from None
        except RefusedError as refused:
            if refused.status in (401, 403):
                raise
            return ServedModel()
        card = an_object(next(iter(a_list(answer.get("data")) or ()), None)) or {}
        name, context = card.get("id"), card.get("max_model_len")
        return ServedModel(
            name if isinstance(name, str) else None,
            context if type(context) is int and context > 0 else None,
        )

    _models_path = "/v1/models"

    def _not_open(self) -> EngineError:
        return permanent(f"the engine is not open: use `async with {type(self).__name__}(…)`")


def _at(base: str | None, message: str) -> EngineError:
    error = EngineError(message)
    error.source = base or ""
    return error


def _now() -> float:
    return asyncio.get_running_loop().time()
