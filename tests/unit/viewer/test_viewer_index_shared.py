"""The viewer's index when it is damaged, killed while being built, built by other code, or used by several
processes."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from viewer_dumps import append, dump_of, ids, index_folder, replaced, small, write

from toolyard.errors import RecordError
from toolyard.records.lines import to_line
from toolyard.viewer.index import place as index_place
from toolyard.viewer.index import store as index_store
from toolyard.viewer.library import Library
from toolyard.viewer.query import parse_query

# Damaged, foreign and wasteful indexes --------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["rubbish", "no text", "short text", "other schema", "no state", "only text", "empty"])
def test_a_damaged_index_is_built_again(tmp_path: Path, how: str) -> None:
    write(tmp_path / "0.jsonl", *map(small, range(50)))
    with Library.open(tmp_path) as library:
        rows = library.rows()
    database, text = index_folder(tmp_path) / "index.sqlite", index_folder(tmp_path) / "text"
    if how == "rubbish":
        database.write_bytes(random.Random(1).randbytes(20_000))
    elif how == "no text":
        text.unlink()
    elif how == "short text":
        os.truncate(text, 100)
    elif how == "only text":
        database.unlink()
    elif how == "empty":
        database.write_bytes(b"")
    else:
        with contextlib.closing(sqlite3.connect(database)) as connection:
            trigger = "CREATE TRIGGER t AFTER INSERT ON rows BEGIN DELETE FROM rows; END"
            connection.execute(trigger if how == "other schema" else "DELETE FROM state")
            connection.commit()
    with Library.open(tmp_path) as library:
        assert library.rows() == rows
        assert library.count(parse_query(f"text:{small(3).input}")) == 1


def test_an_index_that_proves_to_be_damaged_is_an_error_that_names_it_and_built_again_next_time(tmp_path: Path) -> None:
    dump_of(tmp_path, 500)
    Library.open(tmp_path).close()
    database = index_folder(tmp_path) / "index.sqlite"
    content = bytearray(database.read_bytes())
    content[4096 * 10 :] = b"\xff" * (len(content) - 4096 * 10)
    database.write_bytes(content)
    with Library.open(tmp_path) as library, pytest.raises(RecordError, match=r"\.toolyard-index.* is damaged"):
        library.rows(parse_query("sort:score"), limit=1000)
    with Library.open(tmp_path) as library:
        assert library.count() == 500


def test_what_is_damaged_and_used_by_another_is_left_alone(tmp_path: Path) -> None:
    dump_of(tmp_path, 5)
    with Library.open(tmp_path) as library:
        (index_folder(tmp_path) / "damaged").touch()
        with pytest.raises(RecordError, match="used by another viewer"):
            Library.open(tmp_path)
        assert library.count() == 5
    with Library.open(tmp_path) as library:
        assert library.count() == 5


def test_an_index_of_another_format_is_not_used_and_removed_when_nobody_uses_it(tmp_path: Path, monkeypatch) -> None:
    write(tmp_path / "0.jsonl", small(1))
    older = Library.open(tmp_path)
    other = index_folder(tmp_path)
    monkeypatch.setattr(index_place, "fingerprint", lambda: "0" * 12)
    with Library.open(tmp_path) as newer:
        assert other.exists()
        append(tmp_path / "0.jsonl", to_line(small(2)))
        assert (newer.refresh(), older.refresh(), newer.count(), older.count()) == (1, 1, 2, 2)
    older.close()
    (tmp_path / ".toolyard-index" / "notes").mkdir()
    Library.open(tmp_path).close()
    assert sorted(path.name for path in other.parent.iterdir()) == [".gitignore", "0" * 12, "notes"]


def test_text_of_lines_that_are_gone_does_not_pile_up(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(index_store, "_MAX_DEAD", 1000)
    sizes = []
    for round_ in range(12):
        replaced(tmp_path / "0.jsonl", range(round_ * 100, round_ * 100 + 100))
        with Library.open(tmp_path) as library:
            assert library.count() == 100
            assert library.count(parse_query("text:e")) > 10
        sizes.append((index_folder(tmp_path) / "text").stat().st_size)
    assert max(sizes) < 4 * sizes[0]


# Killed, and several at once ------------------------------------------------------------------------------------------

BUILD = """
import os, signal, sys, time
from toolyard.viewer.index import build
from toolyard.viewer.library import Library
build.BATCH_BYTES, build._REPORT_BYTES = 50_000, 5_000
calls = int(sys.argv[2])
def progress(done, total):
    global calls
    calls -= 1
    if calls == 0:
        os.kill(os.getpid(), signal.SIGKILL)
print("begin", flush=True)
with Library.open(sys.argv[1], progress=progress) as library:
    print(library.count(), flush=True)
"""


def builder(folder: Path, calls: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", BUILD, str(folder), str(calls)], stdout=subprocess.PIPE)


def test_an_index_whose_builder_was_killed_is_continued_and_right(tmp_path: Path) -> None:
    names = dump_of(tmp_path, 1000)
    taken = []
    for calls in (2, 30, 60):
        with builder(tmp_path, calls) as process:
            assert process.wait(30) == -signal.SIGKILL
        with contextlib.closing(sqlite3.connect(index_folder(tmp_path) / "index.sqlite")) as connection:
            taken.append(connection.execute("SELECT count(*) FROM rows").fetchone()[0])
    assert taken == sorted(set(taken)), "each continued where the one before was killed"
    assert 0 < taken[-1] < 1000
    told: list[tuple[int, int]] = []
    with Library.open(tmp_path, progress=lambda done, total: told.append((done, total))) as library:
        assert ids(library) == names
        assert [row.line for row in library.rows(limit=250)] == list(range(1, 251))
        assert library.count(parse_query("text:q")) == sum(
            "q" in small(seed).input + small(seed).output for seed in range(1000)
        )
    size = sum(path.stat().st_size for path in tmp_path.glob("*.jsonl"))
    assert told[0][0] > 0, "what was done is not done again"
    assert told[-1] == (size, size)


@pytest.mark.slow
def test_killed_at_any_moment_the_index_is_right(tmp_path: Path) -> None:
    names = dump_of(tmp_path, 600)
    chance = random.Random(7)
    for round_ in range(6):
        with builder(tmp_path, 0) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(chance.random() * 0.12)
            process.kill()
        if round_ == 3:
            write(tmp_path / "9.jsonl", small(10_000))
            names.append("request-10000")
        with Library.open(tmp_path) as library:
            assert ids(library) == names
            for row in library.rows(limit=len(names))[:: len(names) // 5]:
                assert library.trajectory(row.number).request_id == row.request_id
                assert library.contains(row.number, library.trajectory(row.number).output)
        if round_ % 2:
            shutil.rmtree(tmp_path / ".toolyard-index")


def test_two_processes_that_open_at_once_share_one_index(tmp_path: Path) -> None:
    dump_of(tmp_path, 600)
    builders = [builder(tmp_path, 0) for _ in range(3)]
    counts = [process.communicate(timeout=60)[0].split()[-1] for process in builders]
    assert counts == [b"600"] * 3
    with contextlib.closing(sqlite3.connect(index_folder(tmp_path) / "index.sqlite")) as connection:
        assert connection.execute("SELECT count(*), max(number) FROM rows").fetchone() == (600, 600)


def test_two_libraries_of_one_folder_see_the_same_whoever_refreshes(tmp_path: Path) -> None:
    write(tmp_path / "0.jsonl", small(1))
    with Library.open(tmp_path) as one, Library.open(tmp_path) as other:
        append(tmp_path / "0.jsonl", to_line(small(2)) + to_line(small(3)))
        assert (one.refresh(), one.count(), other.count()) == (2, 3, 3)
        write(tmp_path / "1.jsonl", small(4))
        assert (other.refresh(), one.count(), one.refresh(), one.refresh()) == (3, 4, 1, 0)
        row = one.find("request-4")[0]
        assert other.trajectory(row.number) == one.trajectory(row.number) == small(4)
        replaced(tmp_path / "0.jsonl", range(5, 6))
        assert (one.refresh(), one.generation) == (4, other.generation)
        assert ids(one) == ids(other) == ["request-5", "request-4"]


@pytest.mark.slow
def test_many_readers_are_right_while_the_dump_grows_and_files_are_replaced(tmp_path: Path) -> None:
    write(tmp_path / "0.jsonl", *map(small, range(20)))
    write(tmp_path / "1.jsonl", small(1000))
    ended = threading.Event()
    problems: list[BaseException] = []
    asked = Counter()

    def read(library: Library, seed: int) -> None:
        chance = random.Random(seed)
        try:
            while not ended.is_set():
                query = parse_query(
                    chance.choice(["", "sort:-time", "text:a sort:score", "-text:a", "tools:0 or score:1"])
                )
                rows = library.rows(query, offset=chance.randrange(5), limit=10)
                assert all(library.steps(query) for _ in range(1) if rows)
                for row in rows:
                    trajectory = library.trajectory(row.number)
                    assert trajectory is None or trajectory.request_id == row.request_id
                    asked[trajectory is None] += 1
                library.next_match("a", rows[0].number if rows else None, query)
        except BaseException as error:
            problems.append(error)

    with Library.open(tmp_path) as one, Library.open(tmp_path) as other:
        threads = [
            threading.Thread(target=read, args=(library, seed)) for seed, library in enumerate([one, one, other])
        ]
        for thread in threads:
            thread.start()
        for round_ in range(60):
            append(tmp_path / "0.jsonl", to_line(small(100 + round_)))
            if round_ % 7 == 6:
                replaced(tmp_path / "1.jsonl", range(2000 + round_, 2003 + round_))
            (one, other)[round_ % 2].refresh()
            time.sleep(0.005)
        ended.set()
        for thread in threads:
            thread.join(30)
        assert not problems
        assert asked[False] > 100
        assert one.count() == other.count() == 83


def test_an_opening_that_is_broken_off_leaves_what_it_did_and_no_lock(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("toolyard.viewer.index.build.BATCH_BYTES", 20_000)
    monkeypatch.setattr("toolyard.viewer.index.build._REPORT_BYTES", 5_000)
    names = dump_of(tmp_path, 200)

    def enough(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Library.open(tmp_path, progress=enough)
    begun: list[int] = []
    with Library.open(tmp_path, progress=lambda done, total: begun.append(done)) as library:
        assert ids(library) == names
    assert begun[0] > 0


def test_who_waits_for_another_to_build_is_told_how_far_that_is(tmp_path: Path) -> None:
    dump_of(tmp_path, 50)
    Library.open(tmp_path).close()
    append(tmp_path / "0.jsonl", to_line(small(1)))
    place = index_place.IndexFolder(index_folder(tmp_path).parent, index_folder(tmp_path).name)
    told: list[tuple[int, int]] = []
    with place.writing() as granted:
        assert granted
        waiting = threading.Thread(
            target=lambda: Library.open(tmp_path, progress=lambda done, total: told.append((done, total))).close()
        )
        waiting.start()
        while len(told) < 2:
            time.sleep(0.01)
    waiting.join(30)
    place.close()
    assert 0 < told[0][0] < told[0][1]
    assert told[-1][0] == told[-1][1]
