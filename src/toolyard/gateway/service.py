"""The gateway's routes: finds the session of a request, has it answered, and sends the answer.

    /s/SESSION/v1/…             the session named in the URL
    /v1/…                       the session named in X-Toolyard-Session, or by the API key
    POST /sessions              create a session, with its task
    GET  /sessions/SESSION      how it is doing
    POST /sessions/SESSION/end  end it, with a score; its branches are dumped

A turn is sampled and parsed as a whole before any of it is sent, streaming or not: what the client sees is what is
recorded. Prompts and answers are never logged.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar, cast
from urllib.parse import unquote

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
)
from starlette.types import Receive, Scope, Send

from toolyard.errors import RecordError, summarize
from toolyard.gateway.api.chat_completions import ChatCompletions
from toolyard.gateway.api.completions import Completions
from toolyard.gateway.api.exchange import Api, ApiError, Question, written
from toolyard.gateway.api.messages import Messages
from toolyard.gateway.api.responses import Responses
from toolyard.gateway.config import GatewayConfig
from toolyard.gateway.records import trajectories_of
from toolyard.gateway.sessions import Answered, Session, SessionEnd, Sessions, SessionTask
from toolyard.hosts import OwnNames, Secrets
from toolyard.messages import JSON
from toolyard.records.trajectory import BRANCH, Trajectory
from toolyard.sandbox.service.http import (
    BodyBudget,
    BodyReservation,
    ClientGone,
    HttpResponse,
    Refusal,
    RunningRequests,
    header,
    json_response,
    read_body,
)

_log = logging.getLogger("toolyard.gateway")
M = TypeVar("M", bound=BaseModel)
_SESSION = re.compile(rf"(?!\.)(?!.*{BRANCH})[A-Za-z0-9._~:@+-]{{1,200}}")
_IN_URL = re.compile(r"/s/([^/]+)(/.*)")
_STREAM_HEADERS = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
APIS: dict[str, Api] = {api.path: api for api in (ChatCompletions(), Completions(), Responses(), Messages())}
_ANTHROPIC = APIS[Messages.path]
_OPENAI = APIS[ChatCompletions.path]

Finish = Callable[[list[Trajectory]], Awaitable[None]]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class NewSession(_Body):
    """The body of `POST /sessions`."""

    session: str | None = None
    """Its name; None: one is made up."""
    task: str = ""
    sample: NonNegativeInt = 0
    ground_truth: Any = None
    data_source: str = "unknown"
    step: NonNegativeInt = 0
    seed: int | None = None
    max_turns: PositiveInt | None = None
    max_tokens: PositiveInt | None = None
    max_seconds: PositiveFloat | None = None
    idle_seconds: PositiveFloat | None = None


class EndOfSession(_Body):
    """The body of `POST /sessions/SESSION/end`."""

    score: FiniteFloat | None = None
    rewards: dict[str, FiniteFloat] = Field(default_factory=dict[str, float])
    """The parts of the score, by name."""
    metadata: JSON = Field(default_factory=dict[str, Any])
    """Kept in the metrics of every branch."""


class Gateway:
    """The ASGI application. `finish` is called with the trajectories of every session that ends over HTTP, or because
    it is idle."""

    def __init__(self, config: GatewayConfig, sessions: Sessions, finish: Finish, model: str) -> None:
        self.running = RunningRequests()
        self.sessions = sessions
        self._config = config
        self._finish = finish
        self._model = model
        self._names = OwnNames(config.host, config.allow_hosts)
        self._tokens = Secrets()
        for token in config.tokens:
            self._tokens.add(token.encode(), "client")
        self._bodies = BodyBudget(config.max_buffered_bytes, busy_status=503)
        self._made = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reservation = BodyReservation(self._bodies)
        path: str = scope["path"]
        api = _ANTHROPIC if "/v1/messages" in path or header(scope, b"anthropic-version") else _OPENAI
        try:
            try:
                await self._route(scope, receive, send, reservation)
            except Refusal as refusal:
                raise _as_api_error(refusal) from None
        except ApiError as error:
            headers = ((b"retry-after", b"1"),) if error.status in (429, 503) else ()
            await json_response(error.status, api.error(error), *headers).send(send)
        except ClientGone:
            pass
        except Exception as error:
            _log.exception("a request failed")
            await json_response(500, api.error(ApiError(500, f"internal error: {summarize(error)}"))).send(send)
        finally:
            reservation.release()

    async def end(self, session: Session, end: SessionEnd, said: EndOfSession | None = None) -> list[Trajectory]:
        """End a session and pass on its trajectories.

        Raises:
            RecordError: they could not be written; the session stays open.
        """
        said = said or EndOfSession()
        found = trajectories_of(
            session,
            session.limit or end if end is SessionEnd.STOP else end,
            self.sessions.chat,
            score=said.score,
            rewards=said.rewards or None,
            metadata=said.metadata,
        )
        # Removed first: it is passed on once, however often it is ended, and nothing is sampled that would be lost.
        self.sessions.remove(session, end.value)
        try:
            await self._finish(found)
        except RecordError:
            self.sessions.restore(session)
            raise
        return found

    async def end_idle_sessions(self) -> None:
        """End sessions that have had no request for too long, as long as it runs."""
        while True:
            await asyncio.sleep(_IDLE_CHECK_SECONDS)
            for session in self.sessions.idle:
                try:
                    await self.end(session, SessionEnd.IDLE)
                except RecordError as error:
                    _log.error("session %s is idle but could not be dumped, and stays open: %s", session.id, error)
                    session.last_used = time.monotonic()

    # Routes -----------------------------------------------------------------------------------------------------------

    async def _route(self, scope: Scope, receive: Receive, send: Send, reservation: BodyReservation) -> None:
        self._check_names(scope)
        path, method = unquote(scope["path"]), scope["method"]
        if path == "/healthz":
            await json_response(200, {"status": "ok", "sessions": len(self.sessions.open)}).send(send)
            return
        key = _api_key(scope)
        named = _IN_URL.fullmatch(path)
        if named is None and (path == "/sessions" or path.startswith("/sessions/")):
            self._check_token(key)
            body = await self._json(scope, receive, reservation) if method == "POST" else {}
            # Not cancelled if the client disconnects: a dump that was begun is finished.
            response = await self._manage(method, path, body)
            await response.send(send)
            return
        rest = path if named is None else named[2]
        if not rest.startswith("/v1/"):
            raise ApiError(404, f"there is nothing at {path}; the APIs are below /s/SESSION/v1 and /v1")
        name, secret = self._session_name(scope, named[1] if named else None, key)
        session = self._session(name, secret)
        rest = rest.removeprefix("/v1")
        if method == "GET" and (rest == "/models" or rest.startswith("/models/")):
            await json_response(200, self._models(rest)).send(send)
            return
        api = APIS.get(rest)
        if api is None and rest != f"{Messages.path}/count_tokens":
            raise ApiError(404, f"there is no {rest} here; known: {', '.join(APIS)}, /models")
        if method != "POST":
            raise ApiError(405, f"{rest} takes POST, not {method}")
        body = await self._json(scope, receive, reservation)
        if api is None:
            await json_response(200, self._count_tokens(session, body)).send(send)
            return
        await self._answer(api, session, body, scope, receive, send)

    async def _answer(self, api: Api, session: Session, body: JSON, scope: Scope, receive: Receive, send: Send) -> None:
        question = api.read(body)
        again = (header(scope, b"x-stainless-retry-count") or b"0") != b"0"
        answered: Answered | None = None

        async def work() -> Exception | None:
            """Errors are values here: raised, they would come out of the task group of `run` in an exception group."""
            nonlocal answered
            try:
                sampling = self.sessions.ask(session, question, again=again)
                if question.stream:
                    answered = await self._stream(api, question, sampling, send)
                else:
                    answered = await sampling
                    await _send_whole(written(api.answer(question, answered.reply)).encode(), send)
            except Exception as error:
                return error
            return None

        try:
            failure = await self.running.run(receive, work())
        except ClientGone:
            session.counts.disconnected += 1
            raise
        if failure is not None:
            raise failure
        if answered is not None:
            answered.delivered()

    async def _stream(self, api: Api, question: Question, sampling: Awaitable[Answered], send: Send) -> Answered | None:
        """Send a stream. Errors have a status of their own as long as nothing was sent."""
        begun = False

        async def write(data: bytes) -> None:
            nonlocal begun
            if not begun:
                begun = True
                await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
            await send({"type": "http.response.body", "body": data, "more_body": True})

        answered: Answered | None = None
        try:
            async with aclosing(_with_pings(sampling, self._config.ping_seconds)) as waiting:
                async for found in waiting:
                    if found is None:
                        await write(api.ping)
                    else:
                        answered = found
            assert answered is not None
            for event in api.events(question, answered.reply):
                await write(event)
        except ApiError as error:
            if not begun:
                raise
            await write(api.error_event(error))
        await send({"type": "http.response.body", "body": b""})
        return answered

    async def _manage(self, method: str, path: str, body: JSON) -> HttpResponse:
        _, _, rest = path.partition("/sessions")
        name, _, act = rest.strip("/").partition("/")
        match method, bool(name), act:
            case "POST", False, "":
                return json_response(201, self._create(_read(NewSession, body)))
            case "GET", False, "":
                return json_response(200, {"sessions": [_status(session) for session in self.sessions.open]})
            case "GET", True, "":
                return json_response(200, _status(self.sessions.get(name, opens=False)))
            case "POST", True, "end":
                said = _read(EndOfSession, body)
                try:
                    found = await self.end(self.sessions.get(name, opens=False), SessionEnd.STOP, said)
                except RecordError as error:
                    raise ApiError(503, f"the session could not be dumped, and stays open: {error}") from None
                return json_response(200, {"session": name, "branches": [_summary(one) for one in found]})
            case _:
                raise ApiError(404, f"there is no {method} {path}")

    def _create(self, new: NewSession) -> JSON:
        if new.session is not None and not _SESSION.fullmatch(new.session):
            raise _bad_name(new.session)
        given = {name: value for name in _LIMITS if (value := getattr(new, name)) is not None}
        self._made += 1
        session = self.sessions.create(
            new.session or f"session-{int(time.time() * 1000):x}-{self._made}",
            SessionTask(new.task, new.sample, new.ground_truth, new.data_source, new.step),
            limits=self._config.limits.model_copy(update=given),
            seed=new.seed,
        )
        return {"session": session.id, "path": f"/s/{session.id}/v1"}

    def _models(self, rest: str) -> JSON:
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "toolyard"}
        if rest != "/models":
            return {**model, "id": rest.removeprefix("/models/"), "type": "model", "display_name": self._model}
        anthropic = {"type": "model", "display_name": self._model, "created_at": "1970-01-01T00:00:00Z"}
        return {"object": "list", "data": [{**model, **anthropic}], "has_more": False}

    def _count_tokens(self, session: Session, body: JSON) -> JSON:
        question = _ANTHROPIC.read({"max_tokens": 1, **body})
        return {"input_tokens": len(session.conversations.place(question.messages, question.tools).prompt_ids)}

    # Who is asking ----------------------------------------------------------------------------------------------------

    def _check_names(self, scope: Scope) -> None:
        """Refuse requests for other hosts and from their web pages: see `toolyard.hosts`."""
        hosts = [value for key, value in scope["headers"] if key == b"host"]
        if len(hosts) > 1 or (hosts and not self._names.include(hosts[0].decode("latin-1"))):
            raise ApiError(421, "the request is for another host; to accept this name, use --allow-host NAME")
        origin = header(scope, b"origin")
        if origin is not None and not self._names.include_origin(origin.decode("latin-1")):
            raise ApiError(403, "the request comes from a web page of another host")

    def _check_token(self, key: str) -> None:
        if self._tokens and self._tokens.holder_of(key.encode()) is None:
            raise ApiError(401, "this gateway requires a token as the API key")

    def _session_name(self, scope: Scope, in_url: str | None, key: str) -> tuple[str, str]:
        """The session that a request belongs to, and the rest of the API key."""
        secret, _, in_key = key.partition("/")
        named = in_url or (header(scope, b"x-toolyard-session") or b"").decode("latin-1") or in_key
        if not named:
            # An API key without tokens to check is only a name.
            named = secret if secret and not self._tokens else "default"
        if not _SESSION.fullmatch(named):
            raise _bad_name(named)
        return named, secret

    def _session(self, name: str, secret: str) -> Session:
        """
        Raises:
            ApiError: the API key is not valid for it, or there is no such session.
        """
        try:
            session = self.sessions.get(name, opens=False)
        except ApiError as error:
            self._check_token(secret)  # first: who has no token learns nothing of sessions
            if error.status == 404:
                return self.sessions.get(name, opens=True)
            raise
        if session.key is not None:
            if not session.opens(secret):
                raise ApiError(401, f"session {name} requires its own API key")
        else:
            self._check_token(secret)
        return session

    async def _json(self, scope: Scope, receive: Receive, reservation: BodyReservation) -> JSON:
        raw = await read_body(
            scope,
            receive,
            limit=self._config.max_request_bytes,
            seconds=self._config.max_request_seconds,
            reservation=reservation,
        )
        try:
            body: Any = json.loads(raw or b"{}")
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"the body is not JSON: {error}") from None
        if not isinstance(body, dict):
            raise ApiError(400, "the body must be a JSON object")
        return cast("JSON", body)


_IDLE_CHECK_SECONDS = 0.5
_LIMITS = ("max_turns", "max_tokens", "max_seconds", "idle_seconds")


async def _send_whole(body: bytes, send: Send) -> None:
    """Send an answer, and return when the client has read enough of it: the empty end waits for the buffer's turn."""
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def _with_pings(work: Awaitable[Answered], seconds: float) -> AsyncGenerator[Answered | None]:
    """The result of `work`, and None before it as often as `seconds` pass."""
    task = asyncio.ensure_future(work)
    try:
        while True:
            done, _ = await asyncio.wait([task], timeout=seconds)
            if done:
                yield task.result()
                return
            yield None
    finally:
        task.cancel()
        await asyncio.wait([task])


def _read(model: type[M], body: JSON) -> M:
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ApiError(400, f"{place}: {first['msg']}", code="invalid_value", param=place) from None


def _bad_name(name: str) -> ApiError:
    known = f"expected letters, digits and . _ ~ : @ + -, without a dot first and without {BRANCH!r}"
    return ApiError(400, f"{name[:80]!r} is not a valid session name: {known}")


def _api_key(scope: Scope) -> str:
    """What OpenAI's clients send as a bearer token, and Anthropic's in a header of their own."""
    given = header(scope, b"x-api-key") or (header(scope, b"authorization") or b"").removeprefix(b"Bearer ")
    return given.decode("latin-1").strip()


def _as_api_error(refusal: Refusal) -> ApiError:
    said: Any = json.loads(refusal.response.body or b"{}")
    return ApiError(refusal.response.status, str(said.get("detail", "refused")))


def _status(session: Session) -> JSON:
    return {
        "session": session.id,
        "task": session.task.task or session.id,
        "turns": len(session.conversations.turns),
        "branches": len(session.conversations.leaves()),
        "sampled_tokens": session.sampled_tokens,
        "in_progress": session.in_progress,
        "seconds": session.now(),
        "limit": session.limit,
        **session.counts.as_json(),
    }


def _summary(trajectory: Trajectory) -> JSON:
    return {
        "request_id": trajectory.request_id,
        "state": trajectory.state,
        "finish_reason": trajectory.finish_reason,
        "turns": len(trajectory.turns),
        "tokens": len(trajectory.tokens.prompt_ids) + len(trajectory.tokens.response_ids),
        "score": trajectory.score,
        **({} if trajectory.failure is None else {"error": trajectory.failure.error}),
    }
