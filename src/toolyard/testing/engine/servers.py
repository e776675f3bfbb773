"""A stand-in for inference servers: real HTTP on loopback, real routes, no model.

`EngineServer` answers in the formats of SGLang 0.5.23, vLLM 0.32 and OpenAI's chat completions, with tokens from a
`ByteModel`. It is for testing clients of those servers, including network failures (`Fault`). It proves nothing about
the servers themselves: it covers only the fields that Toolyard sends and reads.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import orjson
from aiohttp import web

from toolyard.engines.protocol import Sampling
from toolyard.messages import JSON
from toolyard.testing.engine.byte_model import BYTE_EOS, ByteModel, byte_decode, byte_encode

__all__ = ["OPENAI", "SGLANG", "VLLM", "VLLM_TOKENS", "EngineServer", "Fault"]


SGLANG, VLLM, VLLM_TOKENS, OPENAI = "sglang", "vllm", "vllm-tokens", "openai"
_PACE = 32
_FROM_DISK = {"model_path": str, "weight_version": str, "flush_cache": bool, "abort_all_requests": bool}
_CHAT_FIELDS = {"model", "messages", "tools", "tool_choice", "max_tokens", "temperature", "top_p", "seed", "stop"}


@dataclass(slots=True)
class _Run:
    """One answer being sampled."""

    prompt: list[int]
    sampling: Sampling
    ignore_eos: bool
    answer: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    finish: str = "length"
    matched: int | str | None = None
    aborted: asyncio.Event = field(default_factory=asyncio.Event)


class _RefusedError(Exception):
    def __init__(self, words: str, answer: JSON | None = None) -> None:
        super().__init__(words)
        self.answer = answer or {"error": {"message": words}}


class EngineServer:
    """Use it with `async with`; then `url` is its address. Each request takes the first of `faults`."""

    def __init__(
        self,
        speaks: Collection[str] = (SGLANG, VLLM, VLLM_TOKENS, OPENAI),
        *,
        model: ByteModel | None = None,
        context: int = 4096,
        token_seconds: float = 0.0,
        slots: int | None = None,
        api_key: str | None = None,
        refuses_unknown: bool = False,
        chat: Callable[[JSON], JSON] | None = None,
    ) -> None:
        """
        Args:
            token_seconds: Time per token; 32 are sampled at a time.
            slots: Maximum requests that are sampled at the same time; others wait. None: no limit.
            refuses_unknown: Reject chat requests with fields other than OpenAI's oldest.
            chat: Makes the message that answers a chat request, in OpenAI's format.
        """
        self.url = ""
        self.faults: list[Fault | None] = []
        """None: no fault for that request."""
        self.rewrite: Callable[[JSON], Any] | None = None
        """Replaces answers, to imitate servers that answer differently."""
        self.requests: list[tuple[str, JSON, dict[str, str]]] = []
        """Path, body and headers (with lower-case names) of every POST."""
        self.aborted: list[str] = []
        """Ids of the requests that were aborted, in order."""
        self.hung_up = 0
        """Number of clients that disconnected before their answer."""
        self.running: dict[str, _Run] = {}
        self.weight_version = "default"
        self.is_healthy = True
        self.waiting = 0
        """Requests that wait for a slot."""
        self.most_waiting = 0
        self._model = model or ByteModel()
        self._context = context
        self.token_seconds = token_seconds
        self._slots = asyncio.Semaphore(slots or 1 << 30)
        self._api_key = api_key
        self._refuses_unknown = refuses_unknown
        self._chat = chat
        self._speaks = frozenset(speaks)
        self._port = 0
        self._runner: web.AppRunner | None = None
        self._connections: set[asyncio.BaseTransport] = set()
        self._paused = False
        self._loading = False

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    async def start(self) -> None:
        """Listen; after `kill`, at the same address as before."""
        application = web.Application(client_max_size=1 << 30)
        application.add_routes(self._routes())
        self._runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.01, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()
        self._port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self._port}"

    async def kill(self) -> None:
        """Imitate a crash: connections break, and nothing listens."""
        for connection in self._connections:
            connection.abort()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
        self._connections.clear()
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    def posts(self, path: str) -> list[JSON]:
        """The bodies that were sent to `path`, in order."""
        return [body for sent, body, _ in self.requests if sent == path]

    # -------------------------------------------------------------------------------------------------------- routes
    def _routes(self) -> list[web.RouteDef]:
        listed = web.get("/v1/models", self._get(self._models))
        answers: dict[str, dict[str, Callable[[JSON], Awaitable[Any]]]] = {
            SGLANG: {"/generate": self._sglang_generate, "/update_weights_from_disk": self._sglang_from_disk},
            VLLM: {"/v1/completions": self._vllm_completions},
            VLLM_TOKENS: {"/inference/v1/generate": self._vllm_generate},
            OPENAI: {"/v1/chat/completions": self._chat_completions},
        }
        orders: dict[str, dict[str, Callable[[JSON], Awaitable[Any]]]] = {
            SGLANG: {
                "/abort_request": self._sglang_abort,
                "/pause_generation": self._sglang_pause,
                "/continue_generation": self._sglang_continue,
                "/update_weight_version": self._sglang_version,
            },
            VLLM_TOKENS: {"/inference/v1/abort_requests": self._vllm_abort},
        }
        posts = [
            web.post(path, self._post(act, faulty))
            for table, faulty in ((answers, True), (orders, False))
            for dialect, routes in table.items()
            if dialect in self._speaks
            for path, act in routes.items()
        ]
        own: list[web.RouteDef] = []
        if SGLANG in self._speaks:
            own += [web.get("/model_info", self._get(self._model_info)), web.get("/v1/loads", self._get(self._loads))]
        if VLLM in self._speaks:
            own += [web.get("/metrics", self._metrics)]
        if VLLM_TOKENS in self._speaks:
            own += [web.get("/weight_info", self._get(lambda: {"weight_version": self.weight_version}))]
        off = [web.post("/inference/v1/{route}", _switched_off)] if VLLM_TOKENS not in self._speaks else []
        return [listed, web.get("/health", self._health), *own, *posts, *off]

    def _get(self, answer: Callable[[], JSON]) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def serve(request: web.Request) -> web.StreamResponse:
            return self._turned_away(request) or web.json_response(answer())

        return serve

    def _post(
        self, act: Callable[[JSON], Awaitable[Any]], faulty: bool
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def serve(request: web.Request) -> web.StreamResponse:
            if away := self._turned_away(request):
                return away
            try:
                body: Any = orjson.loads(await request.read())
            except ValueError:
                return web.json_response({"error": {"message": "the body is not JSON"}}, status=400)
            headers = {name.lower(): value for name, value in request.headers.items()}
            self.requests.append((request.path, body, headers))
            fault = self.faults.pop(0) if faulty and self.faults else None
            try:
                if fault is not None and (fault.silent or fault.body is not None or fault.status != 200):
                    return await misbehave(request, fault, fault.body or b'{"error": {"message": "as told"}}')
                answer = await act(body)
            except _RefusedError as error:
                return web.json_response(error.answer, status=400)
            except asyncio.CancelledError:
                self.hung_up += 1
                raise
            if faulty and self.rewrite is not None:
                answer = self.rewrite(answer)
            return await misbehave(request, fault or Fault(), orjson.dumps(answer))

        return serve

    def _turned_away(self, request: web.Request) -> web.StreamResponse | None:
        if request.transport is not None:
            self._connections.add(request.transport)
        given = request.headers.get("Authorization", "")
        if self._api_key is None or given == f"Bearer {self._api_key}":
            return None
        # OpenAI's servers repeat the rejected key, and so does this: clients must not pass it on.
        return web.json_response({"error": {"message": f"Incorrect API key provided: {given}"}}, status=401)

    # ------------------------------------------------------------------------------------------------------ sampling
    async def _answer(self, name: str, prompt: Any, sampling: Sampling, *, ignore_eos: bool = False) -> _Run:
        known = range(self._model.vocabulary)
        if not isinstance(prompt, list) or not prompt:
            raise _RefusedError("the prompt is empty")
        ids: list[Any] = prompt  # pyright: ignore[reportUnknownVariableType]
        if not all(type(token) is int and token in known for token in ids):
            raise _RefusedError("the prompt has a token that is out of vocabulary")
        if len(ids) + sampling.max_tokens > self._context or len(ids) >= self._context:
            asked = f"{len(ids)} tokens of the prompt and {sampling.max_tokens} of the answer"
            raise _RefusedError(f"the maximum context length is {self._context} tokens; you asked for {asked}")
        while self._loading:  # noqa: ASYNC110 - until the test continues
            await asyncio.sleep(0.005)
        run = _Run(ids, sampling, ignore_eos)
        self.waiting += 1
        self.most_waiting = max(self.most_waiting, self.waiting if self._slots.locked() else 0)
        try:
            await self._slots.acquire()
        finally:
            self.waiting -= 1
        self.running[name] = run
        try:
            await self._run(run)
        finally:
            self.running.pop(name, None)
            self._slots.release()
        return run

    async def _run(self, run: _Run) -> None:
        rng = random.Random(run.sampling.seed)  # noqa: S311
        ids = list(run.prompt)
        longest = max((len(text) for text in run.sampling.stop), default=0)
        for n in range(run.sampling.max_tokens):
            if n and n % _PACE == 0:
                await asyncio.sleep(_PACE * self.token_seconds)
            while self._paused and not run.aborted.is_set():  # noqa: ASYNC110 - waits for two conditions
                await asyncio.sleep(0.005)
            if run.aborted.is_set():
                run.finish = "abort"
                return
            token, logprob = self._model.next(ids, len(run.prompt), run.sampling, rng)
            ids.append(token)
            run.answer.append(token)
            run.logprobs.append(logprob)
            tail = byte_decode(run.answer[-4 * longest - 4 :]) if longest else ""
            said = next((text for text in run.sampling.stop if text in tail), None)
            if token in run.sampling.stop_token_ids or (token == BYTE_EOS and not run.ignore_eos):
                run.finish, run.matched = "stop", token
                return
            if said is not None:
                run.finish, run.matched = "stop", said
                return

    def _abort(self, name: str) -> None:
        if name in self.running:
            self.aborted.append(name)
            self.running[name].aborted.set()

    # -------------------------------------------------------------------------------------------------------- shared
    def _models(self) -> JSON:
        return {"object": "list", "data": [{"id": "byte-model", "object": "model", "max_model_len": self._context}]}

    def _model_info(self) -> JSON:
        return {"model_path": "byte-model", "is_generation": True, "weight_version": self.weight_version}

    async def _health(self, request: web.Request) -> web.StreamResponse:
        return self._turned_away(request) or web.Response(status=200 if self.is_healthy else 503)

    # -------------------------------------------------------------------------------------------------------- SGLang
    def _loads(self) -> JSON:
        row = {"dp_rank": 0, "num_running_reqs": len(self.running), "num_waiting_reqs": self.waiting}
        return {"version": "0.5.23", "loads": [row | {"token_usage": 0.1}]}

    async def _sglang_generate(self, body: JSON) -> JSON:
        given: JSON = body.get("sampling_params") or {}
        sampling = _sampling(given, most="max_new_tokens", seed="sampling_seed")
        name: str = body["rid"]
        run = await self._answer(name, body.get("input_ids"), sampling, ignore_eos=bool(given.get("ignore_eos")))
        finish: JSON = {"type": run.finish, "matched": run.matched}
        meta: JSON = {
            "id": name,
            "finish_reason": finish,
            "prompt_tokens": len(run.prompt),
            "completion_tokens": len(run.answer),
            "cached_tokens": 0,
            "weight_version": self.weight_version,
        }
        if body.get("return_logprob"):
            pairs = zip(run.answer, run.logprobs, strict=True)
            meta["output_token_logprobs"] = [[logprob, token, None] for token, logprob in pairs]
        return {"text": byte_decode(run.answer), "output_ids": run.answer, "meta_info": meta}

    async def _sglang_abort(self, body: JSON) -> JSON:
        for name in list(self.running):
            if body.get("abort_all") or name.startswith(body["rid"]):
                self._abort(name)
        return {}

    async def _sglang_pause(self, body: JSON) -> JSON:
        self._paused = True
        if body.get("mode", "abort") == "abort":
            for name in list(self.running):
                self._abort(name)
        return {"status": "ok"}

    async def _sglang_continue(self, body: JSON) -> JSON:
        self._paused = False
        return {"status": "ok"}

    async def _sglang_version(self, body: JSON) -> JSON:
        self.weight_version = body["new_version"]
        return {"success": True, "new_version": self.weight_version}

    async def _sglang_from_disk(self, body: JSON) -> JSON:
        """The weights make no difference to a `ByteModel`; only the version changes."""
        wrong = [name for name, value in body.items() if not isinstance(value, _FROM_DISK.get(name, ()))]
        if wrong or "model_path" not in body:
            raise _RefusedError(f"invalid or missing: {wrong or 'model_path'}")
        if body.get("abort_all_requests"):
            for name in list(self.running):
                self._abort(name)
        self._loading = not self._paused
        try:
            while self._loading and self.running:  # noqa: ASYNC110 - waits for any number of requests
                await asyncio.sleep(0.005)
        finally:
            self._loading = False
        if not _has_weights(body["model_path"]):
            words = f"Failed to get weights iterator: Cannot find any model weights with `{body['model_path']}`."
            raise _RefusedError(words, {"success": False, "message": words, "num_paused_requests": 0})
        self.weight_version = body.get("weight_version", self.weight_version)
        return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    # ---------------------------------------------------------------------------------------------------------- vLLM
    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        labels = '{engine="0",model_name="byte-model"}'
        lines = [
            "# TYPE vllm:num_requests_running gauge",
            f"vllm:num_requests_running{labels} {float(len(self.running))}",
            f"vllm:num_requests_waiting{labels} {float(self.waiting)}",
            f'vllm:num_requests_waiting_by_reason{{engine="0",reason="capacity"}} {float(self.waiting)}',
            f"vllm:kv_cache_usage_perc{labels} 0.1",
        ]
        return self._turned_away(request) or web.Response(text="\n".join(lines) + "\n")

    async def _vllm_completions(self, body: JSON) -> JSON:
        sampling = _sampling(body, most="max_tokens", seed="seed")
        run = await self._answer(f"cmpl-{body['request_id']}-0", body.get("prompt"), sampling)
        choice = _vllm_choice(run) | {"text": byte_decode(run.answer)}
        if body.get("logprobs") is not None:
            choice["logprobs"] = {
                "token_logprobs": run.logprobs,
                "tokens": [byte_decode([token]) for token in run.answer],
                "text_offset": [],
                "top_logprobs": [],
            }
        if not body.get("return_token_ids"):
            choice["token_ids"] = None
        return {"object": "text_completion", "model": "byte-model", "choices": [choice], "usage": _usage(run)}

    async def _vllm_generate(self, body: JSON) -> JSON:
        given: JSON = body["sampling_params"]
        sampling = _sampling(given, most="max_tokens", seed="seed")
        run = await self._answer(f"generate-tokens-{body['request_id']}", body.get("token_ids"), sampling)
        choice = _vllm_choice(run)
        if given.get("logprobs") is not None:
            pairs = zip(run.answer, run.logprobs, strict=True)
            choice["logprobs"] = {"content": [{"token_id": token, "logprob": logprob} for token, logprob in pairs]}
        choice["weight_versions"] = [{"version": self.weight_version, "start": 0, "end": len(run.answer)}]
        return {"request_id": body["request_id"], "choices": [choice], "usage": _usage(run)}

    async def _vllm_abort(self, body: JSON) -> JSON:
        for name in body["request_ids"]:
            self._abort(name)
        return {}

    # -------------------------------------------------------------------------------------------------------- OpenAI
    async def _chat_completions(self, body: JSON) -> JSON:
        if self._refuses_unknown and (unknown := sorted(body.keys() - _CHAT_FIELDS)):
            raise _RefusedError(f"Unrecognized request arguments supplied: {', '.join(unknown)}")
        asked = "".join(f"{message['role']}: {message.get('content') or ''}\n" for message in body["messages"])
        run = await self._answer(
            f"chatcmpl-{len(self.requests)}", byte_encode(asked), _sampling(body, most="max_tokens", seed="seed")
        )
        message = self._chat(body) if self._chat else {"role": "assistant", "content": byte_decode(run.answer)}
        finish = "tool_calls" if message.get("tool_calls") else run.finish
        choice: JSON = {"index": 0, "message": message, "finish_reason": finish}
        if body.get("logprobs"):
            pairs = zip(run.answer, run.logprobs, strict=True)
            choice["logprobs"] = {"content": [{"token": byte_decode([t]), "logprob": logprob} for t, logprob in pairs]}
        answer: JSON = {"object": "chat.completion", "model": "byte-model", "choices": [choice], "usage": _usage(run)}
        if body.get("return_token_ids"):
            choice["token_ids"] = run.answer
            answer["prompt_token_ids"] = run.prompt
        return answer


def _has_weights(folder: str) -> bool:
    return any(Path(folder).glob("*.safetensors"))


async def _switched_off(request: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": "Scale-out endpoints are disabled.", "code": 403}}, status=403)


def _sampling(given: JSON, *, most: str, seed: str) -> Sampling:
    fields = {name: given[name] for name in Sampling.model_fields if given.get(name) is not None}
    try:
        return Sampling.model_validate(fields | {"max_tokens": given.get(most, 16), "seed": given.get(seed)})
    except ValueError as error:
        raise _RefusedError(str(error)) from error


def _vllm_choice(run: _Run) -> JSON:
    # vLLM does not report the end-of-text token as the reason, only stop tokens and texts of the request.
    asked = run.matched in (*run.sampling.stop_token_ids, *run.sampling.stop)
    reason = run.matched if asked else None
    return {"index": 0, "finish_reason": run.finish, "stop_reason": reason, "token_ids": run.answer}


def _usage(run: _Run) -> JSON:
    prompt, answer = len(run.prompt), len(run.answer)
    return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}


# Faults ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault in the answer to one request."""

    status: int = 200
    body: bytes | None = None
    """Replaces the answer."""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    silent: bool = False
    """Never answer."""
    hang_up_after: int | None = None
    """Drop the connection after this many bytes of the body."""
    piece_seconds: float = 0.0
    """Send the body in sixteen pieces with this delay before each."""


async def misbehave(request: web.Request, fault: Fault, body: bytes) -> web.StreamResponse:
    """Send `body` with the fault."""
    if fault.silent:
        await asyncio.Event().wait()
    headers = {"Content-Type": "application/json", **fault.headers}
    if fault.hang_up_after is None and not fault.piece_seconds:
        return web.Response(status=fault.status, body=body, headers=headers)
    response = web.StreamResponse(status=fault.status, headers={**headers, "Content-Length": str(len(body))})
    await response.prepare(request)
    sent = body if fault.hang_up_after is None else body[: fault.hang_up_after]
    piece = max(1, len(body) // 16)
    for at in range(0, len(sent), piece):
        await asyncio.sleep(fault.piece_seconds)
        await response.write(sent[at : at + piece])
    if fault.hang_up_after is not None and request.transport is not None:
        request.transport.abort()
    return response
