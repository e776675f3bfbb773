"""The dump: one writer, repaired after a kill, readable at any time."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from toolyard.errors import RecordError
from toolyard.records.dump import DumpWriter, EndedRequest, dump_files, read_dump
from toolyard.records.lines import to_line
from toolyard.records.trajectory import Trajectory
from toolyard.records.writer import LineFile
from trajectory_samples import failed_trajectory, good_trajectory


async def write(folder: Path, *trajectories) -> DumpWriter:
    async with DumpWriter(folder) as dump:
        for trajectory in trajectories:
            await dump.write(trajectory)
    return dump


def ids_in(path: Path, **kwargs) -> list[str]:
    return [trajectory.request_id for _, _, trajectory in read_dump(path, **kwargs)]


# Writing --------------------------------------------------------------------------------------------------------------


async def test_trajectories_lie_in_the_files_of_their_steps_in_the_order_of_the_calls(tmp_path: Path) -> None:
    written = [good_trajectory(seed, step=seed % 3) for seed in range(30)]
    await write(tmp_path / "new" / "folder", *written)
    found = [trajectory for _, _, trajectory in read_dump(tmp_path / "new" / "folder")]
    assert found == sorted(written, key=lambda trajectory: trajectory.step)
    assert sorted(os.listdir(tmp_path / "new" / "folder")) == [".lock", "0.jsonl", "1.jsonl", "2.jsonl"]


async def test_concurrent_writers_of_one_run_keep_their_order_and_their_lines(tmp_path: Path) -> None:
    async with DumpWriter(tmp_path) as dump, asyncio.TaskGroup() as group:
        for seed in range(200):
            group.create_task(dump.write(good_trajectory(seed)))
    assert ids_in(tmp_path) == [f"request-{seed}" for seed in range(200)]


async def test_more_steps_than_files_are_kept_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    async with DumpWriter(tmp_path) as dump:
        for seed in range(100):
            await dump.write(good_trajectory(seed, step=seed % 25))
        assert len(os.listdir("/proc/self/fd")) < before + 16
    assert len(os.listdir("/proc/self/fd")) <= before + 1
    assert len(ids_in(tmp_path)) == 100


async def test_the_event_loop_goes_on_while_the_disk_does_not_and_who_writes_waits(tmp_path: Path) -> None:
    pipe = tmp_path / "1.jsonl"  # stands in for a disk that blocks after 64 KiB, until the pipe is read
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    line = to_line(good_trajectory(tokens=20_000))
    got = b""
    async with DumpWriter(tmp_path) as dump, asyncio.timeout(20):
        writing = asyncio.create_task(dump.write(good_trajectory(tokens=20_000)))
        await asyncio.sleep(0.2)
        assert not writing.done()
        while len(got) < len(line):
            with contextlib.suppress(BlockingIOError):
                got += os.read(reader, 1 << 16)
            await asyncio.sleep(0)
        await writing
    os.close(reader)
    assert got == line


async def test_a_write_whose_caller_is_cancelled_is_written_nevertheless(tmp_path: Path) -> None:
    async with DumpWriter(tmp_path) as dump:
        tasks = [asyncio.create_task(dump.write(good_trajectory(seed, tokens=2000))) for seed in range(20)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert any(task.cancelled() for task in tasks)
    assert len(ids_in(tmp_path)) == 20


async def test_a_failure_whose_caller_is_cancelled_is_told_at_the_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cancelled = threading.Event()

    def late(trajectory: Trajectory) -> bytes:
        cancelled.wait(20)
        return to_line(trajectory)

    monkeypatch.setattr("toolyard.records.dump.to_line", late)
    dump = DumpWriter(tmp_path)
    await dump.__aenter__()
    (tmp_path / "1.jsonl").mkdir()
    task = asyncio.create_task(dump.write(good_trajectory(tokens=2000)))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    cancelled.set()
    with pytest.raises(RecordError, match=r"cannot write .*1\.jsonl: Is a directory"):
        await dump.close()
    await dump.close()
    await asyncio.sleep(0.01)
    gc.collect()
    assert not caplog.records, "it is told once"
    await write(tmp_path, good_trajectory(step=2))


async def test_a_line_that_cannot_be_made_leaves_the_writer_as_it_was(tmp_path: Path) -> None:
    loop: list[object] = []
    loop.append(loop)
    async with DumpWriter(tmp_path) as dump:
        with pytest.raises(RecordError, match="'bad'"):
            await dump.write(replace(good_trajectory(request_id="bad"), ground_truth=loop))
        with pytest.raises(RecordError, match="step -1"):
            await dump.write(good_trajectory(step=-1))
        await dump.write(good_trajectory(1))
    with pytest.raises(RecordError, match="not open"):
        await dump.write(good_trajectory(2))
    assert ids_in(tmp_path) == ["request-1"]


async def test_a_file_that_was_deleted_under_the_writer_is_an_error_not_a_loss(tmp_path: Path) -> None:
    async with DumpWriter(tmp_path) as dump:
        await dump.write(good_trajectory(1))
        (tmp_path / "1.jsonl").unlink()
        with pytest.raises(RecordError, match="deleted"):
            await dump.write(good_trajectory(2))


# One writer -----------------------------------------------------------------------------------------------------------


async def test_a_second_writer_is_refused_and_told_who_is_the_first(tmp_path: Path) -> None:
    async with DumpWriter(tmp_path) as dump:
        with pytest.raises(RecordError, match=rf"another run is writing to .*process {os.getpid()} on .*\.lock"):
            await DumpWriter(tmp_path).__aenter__()
        with pytest.raises(RecordError, match="already open"):
            await dump.__aenter__()
        await dump.write(good_trajectory())
    await write(tmp_path, good_trajectory(1))
    assert len(ids_in(tmp_path)) == 2


FORKED = """
import asyncio, os, sys, time
from toolyard.records.dump import DumpWriter

async def main():
    async with DumpWriter(sys.argv[1]):
        if os.fork() == 0:
            print("ready", flush=True)  # by the child: before it runs, nothing can have been closed in it
            time.sleep(60)
            os._exit(0)
        time.sleep(60)

asyncio.run(main())
"""


def test_a_child_that_a_killed_run_left_behind_does_not_hold_its_lock(tmp_path: Path) -> None:
    run = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", FORKED, str(tmp_path)], stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert run.stdout is not None
        assert run.stdout.readline() == b"ready\n"
        with pytest.raises(RecordError, match="another run"):
            asyncio.run(write(tmp_path))
        run.kill()
        run.wait()
        asyncio.run(write(tmp_path, good_trajectory()))
    finally:
        os.killpg(run.pid, 9)
        run.wait()
        run.stdout.close()


# Mending --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("torn", [b"{", b'{"input":"', b"\x00" * 5000, b"x" * 200_000, b'"text"'])
async def test_a_torn_last_line_is_cut_off_and_reported(tmp_path: Path, torn: bytes) -> None:
    await write(tmp_path, good_trajectory(1))
    with (tmp_path / "1.jsonl").open("ab") as file:
        file.write(torn)
    assert ids_in(tmp_path) == ["request-1"]
    dump = await write(tmp_path, good_trajectory(2))
    assert [(repair.path, repair.cut_bytes) for repair in dump.repairs] == [(tmp_path / "1.jsonl", len(torn))]
    assert f"({len(torn)} bytes)" in str(dump.repairs[0])
    assert ids_in(tmp_path) == ["request-1", "request-2"]


@pytest.mark.parametrize("text", ["plain", "half an emoji \ud83d"])
async def test_a_whole_line_that_lost_only_its_newline_is_kept(tmp_path: Path, text: str) -> None:
    (tmp_path / "1.jsonl").write_bytes(to_line(replace(good_trajectory(1), output=text)).rstrip())
    assert ids_in(tmp_path) == ["request-1"]
    dump = await write(tmp_path, good_trajectory(2))
    assert [repair.cut_bytes for repair in dump.repairs] == [0]
    assert ids_in(tmp_path) == ["request-1", "request-2"]


async def test_a_file_of_nothing_but_a_torn_line_is_emptied(tmp_path: Path) -> None:
    (tmp_path / "1.jsonl").write_bytes(b"{" * 300_000)
    await write(tmp_path, good_trajectory(1))
    assert ids_in(tmp_path) == ["request-1"]


FULL = """
import asyncio, resource, sys
sys.path.insert(0, sys.argv[2])
from trajectory_samples import good_trajectory
from toolyard.errors import RecordError
from toolyard.records.dump import DumpWriter

async def main():
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    async with DumpWriter(sys.argv[1]) as dump:
        written = 0
        try:
            for seed in range(100):
                await dump.write(good_trajectory(seed, tokens=100))
                written += 1
        except RecordError as error:
            print(written, error)
        assert open(sys.argv[1] + "/1.jsonl", "rb").read().endswith(b"\\n")  # at once, not only at the next line
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        await dump.write(good_trajectory(1000))  # there is space again

asyncio.run(main())
"""


def test_a_line_for_which_the_disk_has_only_half_the_space_leaves_no_trace(tmp_path: Path) -> None:
    """The limit on a file's size stands in for the full disk: the kernel writes a part of the line, then fails."""
    tests = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path), tests], capture_output=True, text=True, timeout=60, check=True
    )
    written, _, message = done.stdout.partition(" ")
    assert int(written) > 1
    assert f"bytes to {tmp_path / '1.jsonl'}: File too large; " in message
    assert re.search(r"; free space: [\d.]+ MB", message)
    assert ids_in(tmp_path) == [*(f"request-{seed}" for seed in range(int(written))), "request-1000"]


def test_a_device_that_is_full_is_named_with_its_reason() -> None:
    file = LineFile(Path("/dev/full"))
    try:
        with pytest.raises(RecordError, match="cannot write a line of 2 bytes to /dev/full: No space left on device"):
            file.append(b"x\n")
    finally:
        file.close()


async def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match=r"cannot write to .*file/dump: Not a directory"):
        await write(tmp_path / "file" / "dump")


# Resuming -------------------------------------------------------------------------------------------------------------


async def test_a_resumed_run_learns_which_requests_have_a_line_and_how_they_ended(tmp_path: Path) -> None:
    done, failed = good_trajectory(3), failed_trajectory("again")
    await write(tmp_path, done, failed, replace(good_trajectory(5), request_id="again"))
    with (tmp_path / "1.jsonl").open("ab") as file:
        file.write(b'{"request_id": "torn"')
    dump = DumpWriter(tmp_path)
    assert dump.existing(1) == {
        "request-3": EndedRequest("request-3", "COMPLETED", "stop", "task-0", 3),
        "again": EndedRequest("again", "COMPLETED", "stop", "task-0", 5),
    }
    assert dump.existing(2) == {}


async def test_a_damaged_line_stops_the_resumption_by_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "1.jsonl").write_bytes(b"\xff\xff\n" + to_line(good_trajectory()))
    with pytest.raises(RecordError, match=r"1\.jsonl:1: this line is damaged \(not JSON"):
        DumpWriter(tmp_path).existing(1)


# Reading --------------------------------------------------------------------------------------------------------------


async def test_steps_are_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    await write(tmp_path, *(good_trajectory(step, step=step) for step in (10, 9, 0, 100)))
    for other in ("notes.txt", "x.jsonl", "01.jsonl", "5.jsonl.bak"):
        (tmp_path / other).write_text("not ours")
    assert [path.name for path in dump_files(tmp_path)] == ["0.jsonl", "9.jsonl", "10.jsonl", "100.jsonl"]
    assert ids_in(tmp_path) == ["request-0", "request-9", "request-10", "request-100"]
    assert ids_in(tmp_path, steps={9, 100, 7}) == ["request-9", "request-100"]


def test_one_file_of_any_name_is_read_as_well(tmp_path: Path) -> None:
    path = tmp_path / "some file"
    path.write_bytes(b"\n" + to_line(good_trajectory(1)) + b"  \n" + to_line(good_trajectory(2)) + b'{"torn')
    assert [(line.path, line.number) for line in read_dump(path)] == [(path, 2), (path, 4)]


def test_a_bad_line_is_raised_skipped_or_told_of(tmp_path: Path) -> None:
    path = tmp_path / "1.jsonl"
    path.write_bytes(to_line(good_trajectory(1)) + os.urandom(50).replace(b"\n", b"") + b"\n" + b"{}\n")
    told: list[RecordError] = []
    assert ids_in(tmp_path, on_bad_line="skip") == ids_in(tmp_path, on_bad_line=told.append) == ["request-1"]
    assert [str(error).partition(": ")[0] for error in told] == [f"{path}:2", f"{path}:3"]
    with pytest.raises(RecordError, match=r"1\.jsonl:2: not JSON"):
        ids_in(tmp_path)


def test_a_dump_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"cannot read .*nowhere: No such file"):
        ids_in(tmp_path / "nowhere")
    assert ids_in(tmp_path) == []
