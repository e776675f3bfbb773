"""A lost connection is an error of one kind, whatever event loop it was made in."""

from __future__ import annotations

import asyncio
from collections.abc import Generator

import pytest

from lost_connection import LOOPS, lost
from toolyard.connections import watch_peer, write
from toolyard.sandbox.cluster.node import _Users
from toolyard.sandbox.host.door import _pump


@pytest.fixture(params=LOOPS)
def runner(request: pytest.FixtureRequest) -> Generator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:
        yield runner


def test_what_is_lost_is_a_connection_error(runner: asyncio.Runner) -> None:
    async def use() -> None:
        _, writer = await lost()
        with pytest.raises(ConnectionError):
            write(writer, b"anything")
        with pytest.raises(ConnectionError):
            watch_peer(writer, 4.0)
        writer.close()

    runner.run(use())


def test_a_node_that_tells_its_load_survives_that_a_user_was_just_lost(runner: asyncio.Runner) -> None:
    async def tell() -> None:
        _, writer = await lost()
        users = _Users("secret", None, 1, 1)  # type: ignore[arg-type]
        users._writers.add(writer)
        users.tell(3)
        writer.close()

    runner.run(tell())


def test_a_door_whose_far_side_was_just_lost_says_so(runner: asyncio.Runner) -> None:
    async def pump() -> None:
        _, writer = await lost()
        reader = asyncio.StreamReader()
        reader.feed_data(b"more")
        with pytest.raises(ConnectionError):
            await _pump(reader, writer)
        reader.feed_eof()
        await _pump(reader, writer)
        writer.close()

    runner.run(pump())
