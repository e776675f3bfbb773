"""What a zygote imports, and what it hears of a worker that it starts."""

from __future__ import annotations

import os
import socket
import threading

import pytest

from toolyard.sandbox.guest.zygote import Zygote, preload


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


def test_a_module_that_fails_to_import_is_reported_unless_it_is_not_installed(tmp_path, monkeypatch) -> None:
    (tmp_path / "broken.py").write_text("import no_such_module")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("toolyard.sandbox.guest.zygote.os.listdir", lambda _: ["one thread"])
    assert preload(["no_such_package", "no_such_package.part", "json"]) == []
    assert preload(["broken"]) == ["broken: ModuleNotFoundError: No module named 'no_such_module'"]
