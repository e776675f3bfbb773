"""What the filter answers, on both architectures: its program is run here as the kernel would run it."""

import errno
import struct

import pytest

from toolyard.sandbox.guest import seccomp

ALLOW, ERROR = 0x7FFF0000, 0x00050000
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
COLUMN = {"x86_64": 0, "aarch64": 1}
ANONYMOUS, SHARED, PRIVATE, GROWS_DOWN = 0x20, 0x1, 0x2, 0x100
TRUNCATES, CORE, OPEN_FILES = 0x200, 4, 7


def answer(program: bytes, machine: str, number: int, *arguments: int) -> int | None:
    """The error number; 0: success without effect; None: the kernel carries the call out."""
    words = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("<IIQ6Q", number, ARCHITECTURES[machine], 0, *words)
    steps = list(struct.iter_unpack("HBBI", program))
    at = loaded = 0
    while True:
        code, if_true, if_false, value = steps[at]
        at += 1
        if code == 0x20:
            (loaded,) = struct.unpack_from("<I", data, value)
        elif code == 0x54:
            loaded &= value
        elif code == 0x05:
            at += value
        elif code == 0x06:
            return None if value == ALLOW else value - ERROR
        else:
            holds = {0x15: loaded == value, 0x35: loaded >= value, 0x45: loaded & value != 0}[code]
            at += if_true if holds else if_false


@pytest.mark.parametrize("machine", ARCHITECTURES)
@pytest.mark.parametrize(
    ("numbers", "arguments", "expected"),
    [
        ((39, 172), (), None),  # getpid
        ((206, 0), (100,), errno.ENOSYS),  # io_setup
        ((294, 26), (0,), errno.ENOSYS),  # inotify_init1
        ((72, 25), (3, 1024), errno.EPERM),  # fcntl: a lease
        ((72, 25), (3, 1031), errno.EPERM),  # a larger pipe
        ((72, 25), (3, 1032), None),  # its size
        ((72, 25), (3, 2), None),  # close-on-exec
        ((160, 164), (CORE,), 0),  # setrlimit
        ((160, 164), (OPEN_FILES,), None),
        ((302, 261), (0, CORE, 1 << 32), 0),  # prlimit64
        ((302, 261), (0, CORE, 0), None),
        ((302, 261), (0, OPEN_FILES, 1), None),
        ((302, 261), (1, OPEN_FILES, 1 << 32), errno.EPERM),
        ((302, 261), (1, OPEN_FILES, 0), None),
        ((9, 222), (0, 4096, 3, SHARED | ANONYMOUS), errno.EPERM),  # mmap
        ((9, 222), (0, 4096, 3, PRIVATE | ANONYMOUS | GROWS_DOWN), errno.EPERM),
        ((9, 222), (0, 4096, 3, PRIVATE | ANONYMOUS), None),
        ((9, 222), (0, 4096, 3, SHARED), None),
        ((319, 279), (), errno.ENOSYS),  # memfd_create
        ((76, 45), (0, 0), errno.EACCES),  # truncate
        ((77, 46), (3, 0), None),  # ftruncate
        ((257, 56), (0, 0, 0 | TRUNCATES), errno.EACCES),  # openat, for reading
        ((257, 56), (0, 0, 3 | TRUNCATES), errno.EACCES),
        ((257, 56), (0, 0, 1 | TRUNCATES), None),  # for writing, which Landlock mediates
        ((257, 56), (0, 0, 2 | TRUNCATES), None),
        ((257, 56), (0, 0, 0), None),
        ((437, 437), (0, 0, 0), errno.ENOSYS),  # openat2
    ],
)
def test_the_strictest_filter_answers(
    monkeypatch: pytest.MonkeyPatch,
    machine: str,
    numbers: tuple[int, int],
    arguments: tuple[int, ...],
    expected: int | None,
):
    monkeypatch.setattr(seccomp, "MACHINE", machine)
    program = seccomp.build_filter(cgroup=False, namespaces=False, own_user=True, landlock=2)
    assert answer(program, machine, numbers[COLUMN[machine]], *arguments) == expected


@pytest.mark.parametrize("machine", ARCHITECTURES)
@pytest.mark.parametrize("numbers", [(9, 222), (76, 45), (257, 56), (437, 437), (319, 279)])
def test_what_only_weaker_levels_refuse_is_free_in_full(
    monkeypatch: pytest.MonkeyPatch, machine: str, numbers: tuple[int, int]
):
    monkeypatch.setattr(seccomp, "MACHINE", machine)
    program = seccomp.build_filter(cgroup=True)
    assert answer(program, machine, numbers[COLUMN[machine]], 0, 0, TRUNCATES, SHARED | ANONYMOUS) is None


def test_opening_by_the_old_call_of_x86_is_refused_alike(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(seccomp, "MACHINE", "x86_64")
    program = seccomp.build_filter(cgroup=False, namespaces=False, landlock=1)
    assert answer(program, "x86_64", 2, 0, TRUNCATES) == errno.EACCES
    assert answer(program, "x86_64", 2, 0, 1 | TRUNCATES) is None
    assert answer(program, "x86_64", 253) == errno.ENOSYS  # inotify_init


@pytest.mark.parametrize("machine", ARCHITECTURES)
@pytest.mark.parametrize(
    ("numbers", "arguments", "expected"),
    [
        ((41, 198), (1, 2, 0), None),  # socket: unix
        ((41, 198), (2, 1, 0), None),  # TCP
        ((41, 198), (2, 1 | 0o2000000 | 0o4000, 6), None),
        ((41, 198), (2, 2, 0), errno.ENETUNREACH),  # UDP
        ((41, 198), (2, 3, 6), errno.ENETUNREACH),  # raw
        ((41, 198), (2, 1, 262), errno.ENETUNREACH),  # MPTCP
        ((41, 198), (10, 1, 0), errno.ENETUNREACH),  # IPv6
        ((41, 198), (16, 3, 0), errno.ENETUNREACH),  # netlink
        ((53, 199), (2, 1, 0), errno.ENETUNREACH),  # socketpair
        ((54, 208), (3, 6, 1), None),  # setsockopt: TCP_NODELAY
        ((54, 208), (3, 6, 31), errno.ENOPROTOOPT),  # TCP_ULP
        ((54, 208), (3, 1, 7), 0),  # SO_SNDBUF
        ((54, 208), (3, 1, 31), None),
        ((54, 208), (3, 0, 7), None),
    ],
)
def test_tcp_is_all_that_a_reachable_address_adds(
    monkeypatch: pytest.MonkeyPatch,
    machine: str,
    numbers: tuple[int, int],
    arguments: tuple[int, ...],
    expected: int | None,
):
    monkeypatch.setattr(seccomp, "MACHINE", machine)
    program = seccomp.build_filter(cgroup=True, tcp=True)
    assert answer(program, machine, numbers[COLUMN[machine]], *arguments) == expected
