"""The zygote: a warm, single-threaded interpreter, started by the host with an empty environment.

It imports what programs are likely to use, makes itself cheap to fork, and then forks workers on request. No untrusted
code ever runs in it. It dies with the host: it notices the closed socket, and watches the host's pid in case a copy of
the socket survives somewhere.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import gc
import importlib
import marshal
import os
import select
import signal
import socket
import sys
import time
from types import FrameType, ModuleType
from typing import Any, NoReturn

from . import cgroups, descendants, frames, immortal, kernel, launch, probe, program
from .native import Native

START_SECONDS = 10.0
"""How long a worker may take to become ready."""

_WARM_UP = {
    "numpy": "import numpy as n, numpy.random; n.linalg.inv(n.eye(2) + n.ones((2, 2))); str(n.arange(3) * 1.5)",
    "sympy": "import sympy as s; x = s.symbols('x'); s.solve(x**2 - 2, x); s.simplify(s.sin(x)**2 + s.cos(x)**2);"
    "str(s.integrate(x**2, x)); s.diff(s.exp(x), x)",
    "pandas": "import pandas as p; d = p.DataFrame({'a': [1, 2], 'b': [3.0, 4.0]}); d.groupby('a').sum(); str(d)",
    "scipy": "import scipy.stats, scipy.optimize, scipy.linalg",
    "matplotlib": "import matplotlib; matplotlib.use('Agg'); import matplotlib.pyplot",
}
"""Importing is only half of it: running a few typical calls also fills caches that every child would have to fill."""


def preload(modules: list[str]) -> list[str]:
    """Import and warm up. Returns the modules that are installed but failed. A module that starts threads, which a fork
    loses, raises."""
    failed: list[str] = []
    for name in modules:
        try:
            importlib.import_module(name)
            exec(_WARM_UP.get(name, "pass"), {})  # noqa: S102
        except Exception as error:
            if not (isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}.")):
                failed.append(f"{name}: {type(error).__name__}: {error}")
        if len(os.listdir("/proc/self/task")) > 1:
            raise RuntimeError(f"importing {name!r} starts threads, which do not survive a fork: do not preload it")
    for name in sys.builtin_module_names:
        _mark_as_imported(sys.modules.get(name))
    return failed


def _mark_as_imported(module: ModuleType | None) -> None:
    """Set an attribute that importing a module sets, but that modules loaded at startup, such as `sys`, lack. Importing
    those again would raise and catch an exception internally, for which a case copies a dozen pages."""
    spec: Any = getattr(module, "__spec__", None)
    if spec is not None and not hasattr(spec, "_initializing"):
        spec._initializing = False


class Zygote:
    def __init__(self, control: socket.socket, config: dict[str, Any]) -> None:
        self._control = control
        self._config = config
        self._host = os.getppid()
        self._launchers: dict[int, tuple[int, cgroups.Group | None]] = {}
        self._groups = cgroups.Parent(config["cgroup"]) if config["cgroup"] else None

    def serve(self, host: int) -> NoReturn:
        if not self._config["namespaces"]:
            kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write)
        signal.signal(signal.SIGCHLD, _wake_up)
        poll = select.poll()
        for handle in (self._control.fileno(), wake_read, host):
            poll.register(handle, select.POLLIN)
        while True:
            for handle, _ in poll.poll():
                if handle == wake_read:
                    os.read(wake_read, 4096)
                    self._reap()
                elif handle == host or not self._request():
                    self._end()

    def _request(self) -> bool:
        try:
            data, ancillary, _, _ = self._control.recvmsg(4096, socket.CMSG_SPACE(4))
        except OSError:
            return False
        if not data:
            return False
        ticket, kill = marshal.loads(data)
        if kill:
            if kill in self._launchers:
                self._end_launcher(kill)
            return True
        handles = array.array("i")
        for _, _, content in ancillary:
            handles.frombytes(content[: len(content) - len(content) % handles.itemsize])
        with socket.socket(fileno=handles[0]) as channel:
            if not _hung_up(channel):  # cancelled while it was waiting
                self._say(ticket, *self._spawn(ticket, channel))
        return True

    def _say(self, *message: Any) -> None:
        with contextlib.suppress(OSError):
            self._control.send(marshal.dumps(message, 4))

    def _spawn(self, ticket: int, channel: socket.socket) -> tuple[int, int, str, str]:
        """Spawn a worker. Returns launcher pid, worker pid, its cgroup, and the error, if any."""
        report_read, report_write = os.pipe()
        go_read, go_write = os.pipe()
        group = None
        try:
            group = self._groups.group() if self._groups else None
            config = dict(self._config)
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _close_all_but(channel.fileno(), report_write, go_read)
                if group is not None:
                    group.join()
                self._add_own_settings(config)
                launch.launch(channel, report_write, go_read, config, group.for_worker() if group else None)
            os.close(report_write)
            self._launchers[pid] = (ticket, group)
            return (pid, *self._await_worker(pid, report_read, go_write, group))
        except OSError as error:
            return (0, 0, "", str(error))
        finally:
            for handle in (report_read, go_read, go_write):
                os.close(handle)

    def _add_own_settings(self, config: dict[str, Any]) -> None:
        """Set what depends on the launcher's pid: its own user id and, without a private root, its own directories."""
        if config["user"]:
            config["user"] = launch.OWN_USER_BASE + os.getpid()
        if not config["namespaces"]:
            base = f"{config['host_directory']}/{os.getpid()}"
            config["work"] = f"{base}/work"
            config["writable"] = _directories(base)
            places = {"HOME": f"{base}/work", "TMPDIR": f"{base}/tmp", "MPLCONFIGDIR": f"{base}/tmp"}
            config["environment"] = {**config["environment"], **places}

    def _await_worker(self, pid: int, report: int, go: int, group: cgroups.Group | None) -> tuple[int, str, str]:
        """Handle the reports of the launcher and its worker until both have come. Returns worker pid, cgroup, error."""
        worker, is_ready = 0, False
        deadline = time.monotonic() + START_SECONDS
        while True:
            ready, _, _ = select.select([report], [], [], max(deadline - time.monotonic(), 0))
            data = os.read(report, 4096) if ready else b"e" + frames.LAUNCHER_LATE.encode()
            if not data:
                return 0, "", frames.LAUNCHER_DIED
            while data:
                kind, data = data[:1], data[1:]
                if kind == b"m":
                    if self._config["namespaces"]:
                        try:
                            probe.map_ids(pid)
                        except OSError:
                            # If the launcher was killed meanwhile, these files cannot be written.
                            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                                raise
                            return 0, "", frames.LAUNCHER_DIED
                    os.write(go, b"k")
                elif kind == b"p":
                    worker, data = int.from_bytes(data[:4], "little"), data[4:]
                elif kind == b"r":  # possibly before its launcher, if that got no processor
                    is_ready = True
                else:
                    os.kill(pid, signal.SIGKILL)
                    return 0, "", data.decode("utf-8", "replace")
            if worker and is_ready:
                return worker, group.path if group else "", ""

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            _, group = self._launchers.pop(pid, (0, None))
            if status and not self._config["namespaces"]:
                self._clean_up_after(pid)
            if group is not None and self._groups is not None:
                self._groups.take_back(group)

    def _clean_up_after(self, launcher: int) -> None:
        """A killed launcher could not clean up its programs, and without a pid namespace they live on."""
        descendants.end_all(os.getpid(), spared=self._launchers)
        launch.remove_directories(_directories(f"{self._config['host_directory']}/{launcher}"))

    def _end_launcher(self, pid: int) -> None:
        os.kill(pid, signal.SIGTERM)  # not SIGKILL: it exits after its worker and all programs

    def _end(self) -> NoReturn:
        for pid in self._launchers:
            self._end_launcher(pid)
        deadline = time.monotonic() + 5
        while self._launchers and time.monotonic() < deadline:
            self._reap()
            time.sleep(0.002)
        if self._groups is not None:
            self._groups.remove()
        if os.getppid() != self._host and not self._config["namespaces"]:
            with contextlib.suppress(OSError):  # only the last of several zygotes finds it empty
                os.rmdir(self._config["host_directory"])
        os._exit(0)


def _directories(base: str) -> list[str]:
    """The writable directories of a worker without a private root."""
    return [f"{base}/work", f"{base}/tmp"]


def _hung_up(channel: socket.socket) -> bool:
    try:
        return not channel.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _wake_up(signum: int, frame: FrameType | None) -> None:
    """Does nothing: the signal's arrival wakes the loop through the wake-up descriptor."""


def _close_all_but(*kept: int) -> None:
    """A worker that kept the zygote's own descriptors would keep its socket open after the zygote's death."""
    for name in os.listdir("/proc/self/fd"):
        handle = int(name)
        if handle > program.STATUS and handle not in kept:
            with contextlib.suppress(OSError):
                os.close(handle)


def _above_streams(handle: int) -> int:
    """Move a descriptor out of the way: in every child, 0 to 4 become the program's pipes."""
    moved = fcntl.fcntl(handle, fcntl.F_DUPFD_CLOEXEC, program.STATUS + 1)
    os.close(handle)
    return moved


def main() -> NoReturn:
    """Started as `python zygote-entry HOST_PID CONTROL_FD`; the first message is the configuration."""
    host = _above_streams(os.pidfd_open(int(sys.argv[1])))
    control = socket.socket(fileno=_above_streams(int(sys.argv[2])))
    config = marshal.loads(control.recv(1 << 20))
    null = _above_streams(os.open(os.devnull, os.O_RDWR))
    for stream in (0, 1, program.COMMAND, program.STATUS):
        os.dup2(null, stream, False)
    try:
        failed = preload(config["modules"])
        config["library"] = None
        with contextlib.suppress(OSError):  # built for another machine: `doctor` reports it
            config["library"] = Native(config["native"]) if config["native"] else None
        config["sessions"] = None
        if config["with_sessions"]:
            from . import cells

            config["sessions"] = cells
        zygote = Zygote(control, config)
        del sys.argv[1:]
        gc.collect()

        immortal.immortalize()
        gc.freeze()
        control.send(marshal.dumps((0, failed, ""), 4))
    except BaseException as error:
        control.send(marshal.dumps((0, [], f"{type(error).__name__}: {error}"), 4))
        raise
    zygote.serve(host)
