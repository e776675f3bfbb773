"""What a zygote hears of a worker that it starts."""

from __future__ import annotations

import os
import socket
import threading

import pytest

from toolyard.sandbox.guest.zygote import Zygote


@pytest.mark.parametrize("order", [(b"p\x07\0\0\0", b"r"), (b"r", b"p\x07\0\0\0")])
def test_a_worker_is_ready_when_both_it_and_its_launcher_have_said_so(order: tuple[bytes, bytes]) -> None:
    control, other = socket.socketpair()
    report_read, report_write = os.pipe()
    go_read, go_write = os.pipe()
    try:
        zygote = Zygote(control, {"cgroup": None, "namespaces": False})
        os.write(report_write, b"m" + order[0])
        late = threading.Timer(0.1, os.write, (report_write, order[1]))
        late.start()
        assert zygote._await_worker(0, report_read, go_write, None) == (7, "", "")
        late.join()
        assert os.read(go_read, 1) == b"k"
    finally:
        for handle in (report_read, report_write, go_read, go_write):
            os.close(handle)
        control.close()
        other.close()
