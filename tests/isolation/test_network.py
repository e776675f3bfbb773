"""There is no network: not the internet, not the machine's own, not its local services."""

from __future__ import annotations

import contextlib
import os
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from hostile import open_to_everybody, run, words
from ways import Way

from toolyard.sandbox.local import LocalSandbox

pytestmark = pytest.mark.asyncio(loop_scope="session")


@contextlib.contextmanager
def listening(family: int, kind: int, address: object) -> Iterator[socket.socket]:
    with socket.socket(family, kind) as listener:
        listener.bind(address)
        listener.setblocking(False)
        if kind != socket.SOCK_DGRAM:
            listener.listen()
        yield listener


def nobody_came(listener: socket.socket) -> bool:
    try:
        if listener.type == socket.SOCK_DGRAM:
            listener.recv(1)
        else:
            listener.accept()[0].close()
    except BlockingIOError:
        return True
    return False


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM], ids=["tcp", "udp"])
async def test_a_service_on_the_hosts_loopback_cannot_be_reached(any_way: Way, kind: int) -> None:
    with listening(socket.AF_INET, kind, ("127.0.0.1", 0)) as listener:
        told = await words(
            any_way,
            f"""
            import socket
            def reach():
                with socket.socket(socket.AF_INET, {int(kind)}) as client:
                    client.settimeout(1)
                    client.connect(("127.0.0.1", {listener.getsockname()[1]}))
                    client.send(b"hello")
            print(attempt(reach))
            """,
        )
        assert nobody_came(listener)
    assert set(told) <= {"ENETUNREACH", "EACCES", "EPERM"}


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET])
@pytest.mark.parametrize("named", ["abstract", "path"])
async def test_a_unix_socket_of_the_host_cannot_be_reached(any_way: Way, tmp_path: Path, kind: int, named: str) -> None:
    """Neither directly, nor by way of a socket pair that is connected or sent from elsewhere."""
    open_to_everybody(tmp_path)
    address = "\0" + uuid.uuid4().hex if named == "abstract" else str(tmp_path / "socket")
    with listening(socket.AF_UNIX, kind, address) as listener:
        if named == "path":
            os.chmod(address, 0o777)
        execution = await run(
            any_way,
            f"""
            import socket
            kind, address = {int(kind)}, {address!r}
            def directly():
                client = socket.socket(socket.AF_UNIX, kind)
                client.connect(address)
                client.send(b"hello")
            def by_reconnecting():
                client, _ = socket.socketpair(socket.AF_UNIX, kind)
                client.connect(address)
                client.send(b"hello")
            def by_sending_elsewhere():
                client, _ = socket.socketpair(socket.AF_UNIX, kind)
                client.sendto(b"hello", address)
            def by_message():
                client, _ = socket.socketpair(socket.AF_UNIX, kind)
                client.sendmsg([b"hello"], [], 0, address)
            for way in (directly, by_reconnecting, by_sending_elsewhere, by_message):
                try:
                    way()
                except OSError:
                    pass
            print("tried")
            """,
        )
        assert execution.stdout == "tried\n", execution
        assert nobody_came(listener)


async def test_no_other_kind_of_socket_can_be_made(any_way: Way) -> None:
    told = await words(
        any_way,
        """
        for family in [*range(2, 46), 255, -1]:
            for kind in (1, 2, 3, 5, 10):
                for protocol in (0, 1, 255):
                    print(call("socket", family, kind, protocol))
            print(call("socketpair", family, 1, 0, ctypes.create_string_buffer(8)))
        """,
        open_files=1024,
    )
    assert set(told) <= {"ENETUNREACH", "EPERM", "EACCES"}


async def test_names_are_not_resolved(any_way: Way) -> None:
    execution = await run(
        any_way,
        "import socket\ntry:\n    print(socket.getaddrinfo('example.com', 80))\nexcept OSError:\n    print('none')",
    )
    assert execution.stdout == "none\n"


@pytest.mark.kernel("namespaces")
async def test_no_interface_of_the_host_is_visible(full_way: Way) -> None:
    execution = await run(
        full_way,
        """
        import re
        print(re.findall(r"^ *(\\w+):", open("/proc/net/dev").read(), re.M))
        for name in ("tcp", "udp", "route", "arp", "raw", "packet"):
            try:
                print(name, len(open(f"/proc/net/{name}").read().splitlines()) - 1)
            except OSError:
                pass
        """,
    )
    lines = execution.stdout.splitlines()
    assert lines[0] == "['lo']"
    assert all(line.endswith((" 0", " -1")) for line in lines[1:])


async def test_commands_have_no_network_either(any_level: LocalSandbox) -> None:
    with listening(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)) as listener:
        execution = await run(any_level, f"echo hello > /dev/tcp/127.0.0.1/{listener.getsockname()[1]}", "bash")
        assert nobody_came(listener)
    assert execution.exit_code == 1
