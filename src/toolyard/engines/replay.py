"""An engine that replays a recording: it returns what was sampled once, without a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from toolyard.engines.protocol import Generation, Ids, Sampling
from toolyard.errors import DivergenceError, EngineError
from toolyard.images import Image
from toolyard.tokens import ids_crc


@dataclass(frozen=True, slots=True)
class RecordedGeneration:
    """One answer, and its prompt."""

    prompt_crc: int
    """`toolyard.tokens.ids_crc` of the prompt: enough to detect a different prompt."""
    prompt_tokens: int
    generation: Generation

    @classmethod
    def of(cls, prompt_ids: Ids, generation: Generation) -> RecordedGeneration:
        return cls(ids_crc(prompt_ids), len(prompt_ids), generation)


class ReplayEngine:
    """Returns the recorded answers of each request, in order. Ignores sampling settings, which were applied before."""

    def __init__(self, recorded: Mapping[str, Sequence[RecordedGeneration]]) -> None:
        self._recorded = recorded
        self._turns: dict[str, int] = {}
        self._is_open = False

    async def __aenter__(self) -> Self:
        self._is_open = True
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_open = False

    async def generate(self, prompt_ids: Ids, sampling: Sampling, *, request_id: str) -> Generation:
        """Return the next recorded answer.

        Raises:
            DivergenceError: the recording has no such request or turn, or a different prompt there.
            EngineError: the engine is not open.
        """
        if not self._is_open:
            error = EngineError("the engine is not open: use `async with ReplayEngine(…)`")
            error.retryable = False
            raise error
        turns = self._recorded.get(request_id)
        if turns is None:
            raise DivergenceError(f"request {request_id!r} is not in the recording")
        turn = self._turns.get(request_id, 0)
        if turn >= len(turns):
            raise DivergenceError(
                f"request {request_id!r}, turn {turn}: the recording ends after {len(turns)} turns, but a prompt of "
                f"{len(prompt_ids)} tokens was sent"
            )
        then = turns[turn]
        if len(prompt_ids) != then.prompt_tokens or ids_crc(prompt_ids) != then.prompt_crc:
            then_it = "as many, but different" if len(prompt_ids) == then.prompt_tokens else f"{then.prompt_tokens}"
            now = f"request {request_id!r}, turn {turn}: the prompt has {len(prompt_ids)} tokens"
            raise DivergenceError(f"{now}; in the recording it had {then_it}")
        self._turns[request_id] = turn + 1
        return then.generation

    async def generate_with_images(
        self, prompt_ids: Ids, images: Sequence[Image], sampling: Sampling, *, request_id: str
    ) -> Generation:
        """Like `generate`: the recorded answers do not depend on images."""
        return await self.generate(prompt_ids, sampling, request_id=request_id)

    async def abort(self, request_id: str) -> None:
        """Do nothing: answers are returned immediately."""
