"""An engine that says what its script says: for tests, and to measure what is around an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Self, TypeAlias

from toolyard.engines.protocol import Finish, Generation, Ids, Sampling
from toolyard.errors import EngineError, EngineRequestError
from toolyard.images import Image

Line: TypeAlias = "str | Sequence[int] | Generation | Exception"
"""What one turn is: a text, its tokens, the whole answer, or what `generate` raises."""
Script: TypeAlias = "Callable[[str, int, Ids], Line] | Mapping[str, Sequence[Line]] | Sequence[Line]"
"""A function of the request, the number of its turn (from 0) and the prompt; or the turns of each request, by its name;
or the turns of every request."""


class ScriptedEngine:
    """Says `script`, turn by turn; every call of `generate` for a request is a turn of it, whatever became of it.

    What is said is cut like a sampled answer: at `max_tokens` (then the finish is LENGTH), after a stop token or, if it
    can `decode`, a stop text (STOP), at the end of the context (LENGTH). A script that ends without any of these is
    taken to have said all: STOP. A `Generation` is returned as it stands.
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
        """`encode` is needed for texts, `decode` for stop texts. `logprob` is every token's; None: the engine has none.
        An answer takes `seconds` and, for each token, `token_seconds`: aborted on the way, it is what was said by then.
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
        """Of each answer that takes time: whether it was aborted."""
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
        said = line if isinstance(line, Generation) else self._cut(self._ids(line), most, sampling)
        if self._seconds or self._token_seconds:
            done = await self._wait(request_id, len(said.token_ids))
            if done is not None:
                return Generation(
                    said.token_ids[:done],
                    said.logprobs[:done] if said.logprobs is not None else None,
                    Finish.ABORT,
                    said.weight_version,
                )
        return said

    async def generate_with_images(
        self, prompt_ids: Ids, images: Sequence[Image], sampling: Sampling, *, request_id: str
    ) -> Generation:
        """The same: what is said does not depend on them."""
        return await self.generate(prompt_ids, sampling, request_id=request_id)

    async def abort(self, request_id: str) -> None:
        for waiting in self._waiting.get(request_id, ()):
            _settle(waiting, True)

    def _room(self, prompt_ids: Ids, sampling: Sampling) -> int:
        if not prompt_ids:
            raise EngineRequestError("the prompt is empty")
        known = self._vocabulary
        if known is not None and not (min(prompt_ids) >= 0 and max(prompt_ids) < known):
            raise EngineRequestError(f"the prompt has an id that is none of the {known} tokens")
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
            raise EngineRequestError(f"the script knows no request {request_id!r}")
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
        # A line without a stop token was cut short, as far as an engine can tell.
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
        """As long as the answer takes. How many tokens were said if it was aborted on the way, None if not."""
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
