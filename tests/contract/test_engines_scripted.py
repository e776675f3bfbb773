"""The scripted engine keeps the contract of engines, as far as a script can."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence

import pytest_asyncio

from toolyard.engines.protocol import Engine, Sampling
from toolyard.engines.scripted import ScriptedEngine
from toolyard.testing import EngineContract
from toolyard.testing.engine.byte_model import BYTE_VOCABULARY, ByteModel, byte_decode

GREEDY = Sampling(temperature=0)


def endless(request_id: str, turn: int, prompt_ids: Sequence[int]) -> list[int]:
    """More than anyone asks for."""
    model, chance = ByteModel(), random.Random(0)
    ids = list(prompt_ids)
    while len(ids) < 3000:
        ids.append(model.next(ids, len(prompt_ids), GREEDY, chance)[0])
    return ids[len(prompt_ids) :]


class TestScripted(EngineContract):
    vocabulary = BYTE_VOCABULARY
    context = 2900
    is_seeded = False
    crowd = 10

    @pytest_asyncio.fixture(scope="class", loop_scope="class")
    @classmethod
    async def engine(cls) -> AsyncIterator[Engine]:
        async with cls.make() as engine:
            yield engine

    @classmethod
    def make(cls) -> Engine:
        return ScriptedEngine(
            endless, decode=byte_decode, token_seconds=0.001, vocabulary=cls.vocabulary, context=cls.context
        )

    def decode(self, ids: Sequence[int]) -> str:
        return byte_decode(ids)
