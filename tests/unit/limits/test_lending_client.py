"""A borrower's connection to the lender, when the lender is not as it should be."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Generator
from typing import Any

import pytest

from lost_connection import LOOPS, listening, reset
from patience import patient
from toolyard.limits.background import Background
from toolyard.limits.cluster import client as clients
from toolyard.limits.cluster.client import Address, Client

WELCOME = {
    "granted": 0, "epoch": "1", "term": 4.0, "limit": 4, "version": 0, "max_hold": None, "adaptive": False,
    "identity": None,
}  # fmt: skip


@pytest.fixture(params=LOOPS)
def background(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Generator[Background]:
    monkeypatch.setattr(asyncio, "new_event_loop", LOOPS[request.param])
    background = Background()
    monkeypatch.undo()
    monkeypatch.setattr(clients, "background", lambda: background)
    yield background
    background.soon(background.loop.stop)
    background._thread.join(10)
    background.loop.close()


class Lender:
    """A scripted one, who grants everything. With `dying`, the first grants nothing, and is killed once it is set."""

    def __init__(self, dying: threading.Event | None = None) -> None:
        self._dying = dying

    def serve(self, connection: socket.socket, number: int) -> None:
        hear(connection)
        say(connection, WELCOME)
        if number == 0 and self._dying is not None:
            hear(connection)
            self._dying.wait(20)
            reset(connection)
            return
        while (message := hear(connection)) is not None:
            if "seq" in message:
                say(connection, {
                    "ack": message["seq"], "granted": message["returned"] + message["in_use"] + message["waiting"],
                    "target": -1, "limit": 4, "version": 0, "pause": 0.0, "rate": None, "burst": None, "shares": {},
                })  # fmt: skip


def say(connection: socket.socket, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    connection.sendall(struct.pack("!I", len(data)) + data)


def hear(connection: socket.socket) -> dict[str, Any] | None:
    try:
        head = connection.recv(4, socket.MSG_WAITALL)
    except ConnectionError:
        return None
    if len(head) < 4:
        return None
    return json.loads(connection.recv(struct.unpack("!I", head)[0], socket.MSG_WAITALL))


def borrow(client: Client, permits: int) -> None:
    with contextlib.ExitStack() as held:
        for _ in range(permits):
            held.enter_context(client.desk.permit("", 1.0, patient(10), ""))


@contextlib.contextmanager
def connected(port: int) -> Generator[Client]:
    async def resolve() -> Address:
        return Address("127.0.0.1", port, "right")

    client = Client("test", 4, resolve=resolve)
    client.connect(patient(20))
    try:
        yield client
    finally:
        client.close().result(10)


def test_a_lender_dies_while_a_process_is_about_to_report(background: Background) -> None:
    dying = threading.Event()
    with listening(Lender(dying).serve) as port, connected(port) as client:
        time.sleep(0.1)  # it has reported
        background.soon(time.sleep, 0.4)  # what follows, it sees at once
        dying.set()
        time.sleep(0.2)
        borrow(client, 1)


@pytest.mark.parametrize("place", ["_resolve", "hello", "welcomed", "answered", "report"])
def test_whatever_goes_wrong_in_a_client_it_connects_again(
    background: Background, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    """If it ended, everyone who waits for a permit would wait forever."""
    with listening(Lender().serve) as port, connected(port) as client:
        borrow(client, 1)
        thing = client if place == "_resolve" else client.desk
        real, failed = getattr(thing, place), threading.Event()

        def fail(*args: Any, **options: Any) -> Any:
            if failed.is_set():
                return real(*args, **options)
            failed.set()
            raise RuntimeError("unexpected")

        setattr(thing, place, fail)
        assert client._writer is not None
        background.soon(client._writer.close)  # it connects again, and in doing so fails
        assert failed.wait(patient(10))
        borrow(client, 3)  # more than it has
        assert any("connects again" in record.message for record in caplog.records)
