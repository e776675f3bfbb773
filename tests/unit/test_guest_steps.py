"""Rows of system calls: what they do, and where they end."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest

from toolyard.sandbox.guest.kernel import MACHINE
from toolyard.sandbox.guest.steps import At, Steps, address_of

pytestmark = pytest.mark.skipif(MACHINE != "x86_64", reason="there are no steps on this architecture")

READ, WRITE, CLOSE, GETPID, PIPE2 = 0, 1, 3, 39, 293


def test_results_of_one_are_arguments_of_the_next() -> None:
    row = Steps()
    pipe, text, there = row.data(bytes(8)), row.data(b"hello"), row.data(bytes(5))
    row.expect(row.call(PIPE2, pipe, 0), 0)
    written = row.call(WRITE, At(pipe + 4), text, 5)
    read = row.call(READ, At(pipe), there, 5)
    row.set(read, 2, 3)
    row.call(CLOSE, At(pipe))
    row.call(CLOSE, At(pipe + 4))
    last = row.end()
    for _ in range(3):
        assert row.run() == last
        assert (row.result(written), row.result(read)) == (5, 3)
        assert bytes(row.view(there, 5)) == b"hel\0\0"


def test_a_row_ends_where_a_result_is_not_the_expected_one() -> None:
    row = Steps()
    first = row.call(CLOSE, -1)
    row.expect(first, 0)
    second = row.call(GETPID)
    row.end()
    assert row.run() == first
    assert row.result(first) == -errno.EBADF
    assert row.result(second) == 0
    assert row.run(second) == second
    assert row.result(second) == os.getpid()


def test_a_row_goes_on_elsewhere() -> None:
    row = Steps()
    elsewhere = row.call(GETPID)
    row.end()
    start = row.call(CLOSE, -1)
    row.expect(start, 0, otherwise=elsewhere)
    row.call(GETPID)
    row.end()
    assert row.run(start) == elsewhere


def test_a_row_ends_at_a_given_result() -> None:
    row = Steps()
    pid = row.call(GETPID)
    row.end_at(pid, os.getpid())
    after = row.call(CLOSE, -1)
    row.end()
    assert row.run() == pid
    row.end_at(pid, 0)
    assert row.run() == after


def test_bytes_are_compared_by_copying_them() -> None:
    row = Steps()
    text = row.data(b"1234")
    copied = row.copy(text, text)
    row.expect(copied, int.from_bytes(b"1234", "little"))
    after = row.call(GETPID)
    row.end()
    assert row.run() == after
    row.view(text, 4)[:] = b"1235"
    assert row.run() == copied


def test_what_is_not_inherited_is_not_copied_by_a_fork() -> None:
    assert "dc" not in flags_of(Steps())
    assert "dc" in flags_of(Steps(inherited=False))


def flags_of(row: Steps) -> list[str]:
    """As the kernel notes them for the mapping where it lies."""
    address, inside = address_of(row.memory), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(hex(address))


def test_more_steps_than_there_is_room_for_are_an_error() -> None:
    row = Steps()
    for _ in range(46):
        row.call(GETPID)
    with pytest.raises(AssertionError):
        row.call(GETPID)


def test_memory_that_is_empty_has_no_address() -> None:
    assert address_of(memoryview(bytearray())) == 0
    assert address_of(memoryview(bytearray(1))) != 0
