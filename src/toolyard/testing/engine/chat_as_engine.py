"""Adapts a `ChatEngine`, whose server has a message API, to the `Engine` protocol, so that it can run the same
contract.

The prompt's text becomes a user message, and the answer's ids are those that the server returns. A chat cannot continue
from given tokens, and neither can this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self

from toolyard.engines.protocol import ChatEngine, Finish, Generation, Ids, Sampling
from toolyard.errors import EngineError
from toolyard.messages import Message


class ChatAsEngine:
    """An `Engine` over a `ChatEngine` whose server returns ids."""

    def __init__(self, chat: ChatEngine, decode: Callable[[Sequence[int]], str]) -> None:
        self._chat = chat
        self._decode = decode

    async def __aenter__(self) -> Self:
        await self._chat.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._chat.__aexit__(*exc)

    async def generate(self, prompt_ids: Ids, sampling: Sampling, *, request_id: str) -> Generation:
        said = [Message("user", self._decode(prompt_ids))] if prompt_ids else []
        got = await self._chat.chat(said, (), sampling, request_id=request_id)
        if got.token_ids is None and got.finish is not Finish.ABORT:
            raise EngineError("the server returned no token ids")
        ids = got.token_ids or []
        text = self._decode(ids) if got.finish is Finish.STOP else ""
        stop_text = next((stop for stop in sampling.stop if text.endswith(stop)), None)
        logprobs = got.logprobs if ids else []
        return Generation(ids, logprobs, got.finish, got.weight_version, stop_text=stop_text)

    async def abort(self, request_id: str) -> None:
        await self._chat.abort(request_id)
