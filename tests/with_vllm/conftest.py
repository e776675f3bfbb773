"""A real vLLM, serving the embedded model on a CPU: `make test-vllm`.

Everything is real. One server runs at a time: tests are ordered by the kind of server that they want.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from vllm_server import KINDS, START_SECONDS, VllmServer, free_port, serving

from toolyard.chat.protocol import Tokenizer
from toolyard.chat.tokenizers.opening import load_tokenizer
from toolyard.engines.http.vllm import VllmEngine
from toolyard.engines.models import resolve_model
from toolyard.engines.protocol import Sampling


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The first test of a server also waits for its start.
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(START_SECONDS + 120))


@pytest.fixture(scope="session")
def model() -> Path:
    return Path(resolve_model("smollm2-135m"))


@pytest.fixture(scope="session")
def tokenizer(model: Path) -> Tokenizer:
    return load_tokenizer(model)


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest, model: Path) -> Iterator[VllmServer]:
    """The server of the kind that the test names: `parametrize("server", ["tokens"], indirect=True,
    scope="session")`."""
    with serving(model, free_port(), KINDS[request.param]) as server:
        asyncio.run(_warm_up(server))
        yield server


async def _warm_up(server: VllmServer) -> None:
    """Its first answer takes many seconds, which are none of the tests' concern."""
    async with VllmEngine(server.url) as engine:
        for length in (1, 100):
            await engine.generate([1] * length, Sampling(max_tokens=2, seed=1), request_id="warm-up")


@pytest_asyncio.fixture
async def engine(server: VllmServer) -> AsyncIterator[VllmEngine]:
    async with VllmEngine(server.url) as engine:
        yield engine
