"""Following a dump that is being written."""

from __future__ import annotations

import asyncio
import os
from contextlib import aclosing
from pathlib import Path

import pytest

from toolyard.errors import RecordError
from toolyard.records.dump import DumpWriter
from toolyard.records.follower import follow
from toolyard.records.lines import to_line
from trajectory_samples import good_trajectory

PAUSE = 0.01


async def first(count: int, folder: Path, found: list[str] | None = None, **kwargs) -> list[str]:
    found = [] if found is None else found
    async with aclosing(follow(folder, pause_seconds=PAUSE, **kwargs)) as lines, asyncio.timeout(20):
        async for _, _, trajectory in lines:
            found.append(trajectory.request_id)
            if len(found) == count:
                return found
    raise AssertionError("it ends never")


async def test_what_is_there_comes_first_then_what_is_added_also_in_new_files(tmp_path: Path) -> None:
    folder = tmp_path / "later"
    following = asyncio.create_task(first(6, folder))
    await asyncio.sleep(0.05)
    async with DumpWriter(folder) as dump:
        for seed in range(6):
            await dump.write(good_trajectory(seed, step=seed // 2))
            await asyncio.sleep(0.02)
        assert await following == [f"request-{seed}" for seed in range(6)]
    assert await first(6, folder) == [f"request-{seed}" for seed in range(6)]
    assert await first(2, folder / "1.jsonl") == ["request-2", "request-3"]


async def test_a_line_comes_once_and_only_when_it_is_whole(tmp_path: Path) -> None:
    line = to_line(good_trajectory(1))
    path = tmp_path / "1.jsonl"
    path.write_bytes(line[:100])
    following = asyncio.create_task(first(2, tmp_path))
    for piece in (line[100:200], line[200:], to_line(good_trajectory(2))):
        await asyncio.sleep(0.05)
        assert not following.done()
        with path.open("ab") as file:
            file.write(piece)
    assert await following == ["request-1", "request-2"]


async def test_recovery_that_cuts_a_torn_line_is_survived(tmp_path: Path) -> None:
    path = tmp_path / "1.jsonl"
    path.write_bytes(to_line(good_trajectory(1)) + to_line(good_trajectory(9))[:-20])
    following = asyncio.create_task(first(2, tmp_path))
    await asyncio.sleep(0.05)
    async with DumpWriter(tmp_path) as dump:
        await dump.write(good_trajectory(2))
    assert await following == ["request-1", "request-2"]


async def test_a_file_that_is_replaced_or_shortened_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "1.jsonl"
    path.write_bytes(b"".join(to_line(good_trajectory(seed)) for seed in range(3)))
    found: list[str] = []
    following = asyncio.create_task(first(5, tmp_path, found))

    async def until(count: int) -> None:
        async with asyncio.timeout(20):
            while len(found) < count:  # noqa: ASYNC110 - nothing would set an event
                await asyncio.sleep(0.01)

    await until(3)
    os.truncate(path, len(to_line(good_trajectory(0))))
    await until(4)
    (tmp_path / "new").write_bytes(to_line(good_trajectory(7)))
    (tmp_path / "new").rename(path)
    assert await following == ["request-0", "request-1", "request-2", "request-0", "request-7"]


async def test_lines_longer_than_what_is_read_at_once_come_too(tmp_path: Path) -> None:
    long = good_trajectory(1, tokens=400_000, turns=2)
    (tmp_path / "1.jsonl").write_bytes(to_line(good_trajectory(0)) + to_line(long) + to_line(good_trajectory(2)))
    assert (tmp_path / "1.jsonl").stat().st_size > 8_000_000
    assert await first(3, tmp_path) == ["request-0", "request-1", "request-2"]


async def test_bad_lines_are_told_of_with_their_numbers(tmp_path: Path) -> None:
    (tmp_path / "1.jsonl").write_bytes(b"\nrubbish\n" + to_line(good_trajectory(1)))
    told: list[RecordError] = []
    assert await first(1, tmp_path, on_bad_line=told.append) == ["request-1"]
    assert "1.jsonl:2: not JSON" in str(told[0])
    with pytest.raises(RecordError, match=r"1\.jsonl:2"):
        await first(1, tmp_path)


def bytes_read() -> int:
    """By this process so far, through system calls."""
    return int(Path("/proc/self/io").read_text().split()[1])


async def test_half_a_line_that_stays_half_is_not_read_again_and_again(tmp_path: Path) -> None:
    path = tmp_path / "1.jsonl"
    path.write_bytes(b"{" + b" " * 10_000_000)
    following = asyncio.create_task(first(1, tmp_path))
    start = bytes_read()
    async with asyncio.timeout(20):
        while bytes_read() - start < 10_000_000:  # noqa: ASYNC110 - there is no event for a read
            await asyncio.sleep(PAUSE)
    await asyncio.sleep(0.1)
    before = bytes_read()
    await asyncio.sleep(0.5)
    assert bytes_read() - before < 1_000_000
    path.write_bytes(to_line(good_trajectory(1)))
    assert await following == ["request-1"]
