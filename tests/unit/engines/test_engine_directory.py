"""The file of a run's servers: read, changed by several at once, and watched."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from pathlib import Path

import pytest

from patience import patient
from toolyard.engines.http.directory import add_urls, read_directory, remove_urls, watch_directory
from toolyard.errors import ConfigError

A, B, C = "http://10.0.0.1:30000", "http://10.0.0.2:30000", "https://engines.example.com/v1"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "engines.yaml"


@pytest.mark.parametrize(
    "text",
    [
        f"{A}\n{B}\n{C}\n",
        f"- {A}\n- {B}\n- '{C}'",
        f"# on the first rack\n\n  {A}/  # the old one\n{B}\r\n{C}",
    ],
)
def test_urls_are_read_one_per_line_with_or_without_yamls_dashes(file: Path, text: str) -> None:
    file.write_text(text)
    assert read_directory(file) == (A, B, C)


def test_a_file_without_urls_is_valid(file: Path) -> None:
    file.write_text("# nothing yet\n")
    assert read_directory(file) == ()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (f"{A}\nengine-2:30000\n".encode(), r"line 2: .*'engine-2:30000' is invalid: expected http://HOST:PORT"),
        (f"urls: [{A}]".encode(), "line 1"),
        (b"http://user:secret@10.0.0.1:30000", "must not have a user"),
        (b"\xff\xfe", "not UTF-8"),
        (b"#" * (1 << 20) + b"\n" + A.encode(), "larger than 1048576 bytes"),
        (b"\0" * 100, "line 1"),
    ],
)
def test_a_bad_file_is_an_error_that_names_the_line(file: Path, content: bytes, why: str) -> None:
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=why) as error:
        read_directory(file)
    assert "secret" not in str(error.value)


def test_a_missing_file_is_an_error_that_says_what_to_do(file: Path) -> None:
    with pytest.raises(ConfigError, match="No such file or directory; create it"):
        read_directory(file)
    with pytest.raises(ConfigError, match="No such file"):
        remove_urls(file, [A])
    assert not file.exists()


def test_urls_are_added_once_and_comments_stay(file: Path) -> None:
    assert add_urls(file, [A, f"{A}/"]) == [A]
    file.write_text(f"# first rack\n- {A}")
    file.chmod(0o664)
    assert add_urls(file, [B, A]) == [B]
    assert file.read_text() == f"# first rack\n- {A}{B}\n".replace(f"{A}{B}", f"{A}\n{B}")
    assert file.stat().st_mode & 0o777 == 0o664
    assert remove_urls(file, [A, C]) == [A]
    assert file.read_text() == f"# first rack\n{B}\n"
    assert remove_urls(file, [A]) == []


def test_nothing_is_changed_in_a_bad_file_or_for_a_bad_url(file: Path) -> None:
    file.write_text("what?\n")
    for change in (add_urls, remove_urls):
        with pytest.raises(ConfigError, match="line 1"):
            change(file, [A])
    assert file.read_text() == "what?\n"
    with pytest.raises(ConfigError, match="ftp"):
        add_urls(file, ["ftp://10.0.0.1"])


def _add_ten(file: Path, worker: int) -> None:
    for number in range(10):
        add_urls(file, [f"http://10.0.{worker}.{number}:30000"])


def test_servers_that_register_at_the_same_time_are_all_there(file: Path) -> None:
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_add_ten, args=(file, worker)) for worker in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(patient(30))
    assert len(read_directory(file)) == 40
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def write(file: Path, text: str) -> None:
    file.write_text(text)


async def test_changes_are_told_and_a_bad_file_changes_nothing(file: Path) -> None:
    write(file, f"{A}\n")
    heard, noted = asyncio.Queue[tuple[str, ...]](), asyncio.Queue[str]()
    watching = asyncio.create_task(watch_directory(file, (A,), heard.put_nowait, noted.put_nowait))
    try:
        async with asyncio.timeout(patient(20)):
            add_urls(file, [B])
            assert await heard.get() == (A, B)
            assert f"added {B}" in await noted.get()
            write(file, "oops\n")
            assert "line 1" in (said := await noted.get())
            assert f"the last good list stays in use: {A}, {B}" in said
            os.unlink(file)
            assert "No such file" in await noted.get()
            write(file, f"# reordered is not changed\n{B}\n{A}\n")
            await asyncio.sleep(1.5)
            write(file, f"{B}\n")
            assert await heard.get() == (B,)
            assert f"removed {A}" in await noted.get()
            assert heard.empty()
            assert noted.empty()
    finally:
        watching.cancel()
        await asyncio.wait([watching])
