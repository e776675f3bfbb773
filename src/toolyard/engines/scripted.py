"""An engine that follows a script: for tests, and to measure everything around an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Self, TypeAlias

from toolyard.engines.protocol import Finish, Generation, Ids, Sampling
from toolyard.errors import EngineError, EngineRequestError
from toolyard.images import Image

Line: TypeAlias = "str | Sequence[int] | Generation | Exception"
"""One turn: its text, its tokens, the whole answer, or the exception that `generate` raises."""
Script: TypeAlias = "Callable[[str, int, Ids], Line] | Mapping[str, Sequence[Line]] | Sequence[Line]"
"""A function of the request, the turn's number (from 0) and the prompt; or the turns of each request, by request id;
or the turns of every request."""


class ScriptedEngine:
    """Follows `script`, turn by turn; every call of `generate` for a request is a turn, whatever its outcome.

    Turns are cut like sampled answers: at `max_tokens` (finish LENGTH), after a stop token or, if it can `decode`, a
    stop string (STOP), at the end of the context (LENGTH). A turn that ends without any of these is complete: STOP. A
    `Generation` is returned unchanged.
    """

    def __init__(
        self,
        script: Script,
        *,
        encode: Callable[[str], Sequence[int]] | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
        logprob: float | None = -0.5,
        seconds: float = 0.0,
        token_seconds: float = 0.0,
        vocabulary: int | None = None,
        context: int | None = None,
        weight_version: str | None = None,
    ) -> None:
        """`encode` is needed for text, `decode` for stop strings. `logprob` is used for every token; None: no logprobs.
        An answer takes `seconds` plus `token_seconds` per token; if aborted, it has the tokens up to then.
        """
        self._script = script
        self._encode = encode
        self._decode = decode
        self._logprob = logprob
        self._seconds = seconds
        self._token_seconds = token_seconds
        self._vocabulary = vocabulary
        self._context = context
        self.weight_version = weight_version
        self._turns: dict[str, int] = {}
        self._waiting: dict[str, set[asyncio.Future[bool]]] = {}
        """For each answer that takes time: whether it was aborted."""
        self._is_open = False

    async def __aenter__(self) -> Self:
        self._is_open = True
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_open = False
        for request_id in list(self._waiting):
            await self.abort(request_id)

    async def generate(self, prompt_ids: Ids, sampling: Sampling, *, request_id: str) -> Generation:
        if not self._is_open:
            raise _not_open()
        most = self._room(prompt_ids, sampling)
        turn = self._turns.get(request_id, 0)
        self._turns[request_id] = turn + 1
        line = self._line(request_id, turn, prompt_ids)
        if isinstance(line, Exception):
            raise line
        generation = line if isinstance(line, Generation) else self._cut(self._ids(line), most, sampling)
        if self._seconds or self._token_seconds:
            done = await self._wait(request_id, len(generation.token_ids))
            if done is not None:
                return Generation(
                    generation.token_ids[:done],
                    generation.logprobs[:done] if generation.logprobs is not None else None,
                    Finish.ABORT,
                    generation.weight_version,
                )
        return generation

    async def generate_with_images(
        self, prompt_ids: Ids, images: Sequence[Image], sampling: Sampling, *, request_id: str
    ) -> Generation:
        """Like `generate`: the script does not depend on images."""
        return await self.generate(prompt_ids, sampling, request_id=request_id)

    async def abort(self, request_id: str) -> None:
        for waiting in self._waiting.get(request_id, ()):
            _settle(waiting, True)

    def _room(self, prompt_ids: Ids, sampling: Sampling) -> int:
        if not prompt_ids:
            raise EngineRequestError("the prompt is empty")
        known = self._vocabulary
        if known is not None and not (min(prompt_ids) >= 0 and max(prompt_ids) < known):
            raise EngineRequestError(f"the prompt has an id that is not one of the {known} tokens")
        if self._context is None:
            return sampling.max_tokens
        left = self._context - len(prompt_ids)
        if left <= 0:
            raise EngineRequestError(f"a prompt of {len(prompt_ids)} tokens; the context has {self._context}")
        return min(left, sampling.max_tokens)

    def _line(self, request_id: str, turn: int, prompt_ids: Ids) -> Line:
        script = self._script
        if callable(script):
            return script(request_id, turn, prompt_ids)
        lines = script.get(request_id) if isinstance(script, Mapping) else script
        if lines is None:
            raise EngineRequestError(f"the script has no request {request_id!r}")
        if turn >= len(lines):
            raise EngineRequestError(f"the script of {request_id!r} has {len(lines)} turns; this is another one")
        return lines[turn]

    def _ids(self, line: str | Sequence[int]) -> list[int]:
        if not isinstance(line, str):
            return list(line)
        if self._encode is None:
            raise EngineRequestError("the script has a text, but the engine was given no `encode`")
        return list(self._encode(line))

    def _cut(self, ids: list[int], most: int, sampling: Sampling) -> Generation:
        # To an engine, a turn without a stop token looks truncated.
        finish = Finish.LENGTH if len(ids) > most or sampling.stop_token_ids else Finish.STOP
        ids, stop_text = ids[:most], None
        if sampling.stop_token_ids:
            ends = [ids.index(token) for token in sampling.stop_token_ids if token in ids]
            if ends:
                ids, finish = ids[: min(ends) + 1], Finish.STOP
        if sampling.stop and self._decode is not None:
            text = self._decode(ids)
            if any(stop in text for stop in sampling.stop):
                ids, stop_text = self._cut_at_text(ids, sampling.stop, self._decode)
                finish = Finish.STOP
        logprobs = None if self._logprob is None else [self._logprob] * len(ids)
        return Generation(ids, logprobs, finish, self.weight_version, None, stop_text)

    def _cut_at_text(
        self, ids: list[int], stops: Sequence[str], decode: Callable[[Sequence[int]], str]
    ) -> tuple[list[int], str | None]:
        for end in range(1, len(ids) + 1):
            text = decode(ids[:end])
            found = next((stop for stop in stops if stop in text), None)
            if found is not None:
                return ids[:end], found
        return ids, None

    async def _wait(self, request_id: str, tokens: int) -> int | None:
        """Wait as long as the answer takes. Return the number of tokens if it was aborted, otherwise None."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        aborted: asyncio.Future[bool] = loop.create_future()
        self._waiting.setdefault(request_id, set()).add(aborted)
        timer = loop.call_later(self._seconds + tokens * self._token_seconds, _settle, aborted, False)
        try:
            if not await aborted:
                return None
        finally:
            timer.cancel()
            self._waiting[request_id].discard(aborted)
            if not self._waiting[request_id]:
                del self._waiting[request_id]
        spent = loop.time() - began - self._seconds
        return max(0, min(tokens, int(spent / self._token_seconds) if self._token_seconds else 0))


def _settle(future: asyncio.Future[bool], value: bool) -> None:
    if not future.done():
        future.set_result(value)


def _not_open() -> EngineError:
    error = EngineError("the engine is not open: use `async with ScriptedEngine(…)`")
    error.retryable = False
    return error
