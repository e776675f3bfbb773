"""The viewer's index: which files it covers, which lines are damaged, and how it follows them."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import json
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from viewer_dumps import append, ids, replaced, small, verl_line, write

from toolyard.errors import RecordError
from toolyard.records.dump import DumpWriter
from toolyard.records.lines import to_line, trajectory_of
from toolyard.viewer.index import place as index_place
from toolyard.viewer.index.rows import entry_of
from toolyard.viewer.library import Library
from toolyard.viewer.query import parse_query
from trajectory_samples import failed_trajectory, good_trajectory

# A line is damaged exactly if it is no trajectory ---------------------------------------------------------------------


def test_lines_that_anybody_wrote_are_damaged_exactly_if_no_trajectory_can_be_made() -> None:
    chance = random.Random(5)
    hostile = (None, True, 0, -1, 2**70, 10**400, 1.5, "", "text", [], [1], {}, {"a": 1}, [[]], [{}], [None])
    seen = Counter()
    for seed in range(1200):
        said = json.loads(to_line(good_trajectory(seed % 5) if seed % 9 else failed_trajectory()))
        for _ in range(chance.choice([1, 1, 2])):
            _change(said, chance, hostile)
        line = json.dumps(said).encode()
        try:
            good = trajectory_of(line) is not None
        except (RecordError, OverflowError):
            good = False
        assert good is not bool(entry_of(line, 0).facts.damaged), line
        seen[good] += 1
    assert min(seen.values()) > 200


def _change(said, chance: random.Random, hostile) -> None:
    """Some field, somewhere in it."""
    while True:
        keys = list(said) if isinstance(said, dict) else list(range(len(said)))
        key = chance.choice(keys)
        if isinstance(said[key], dict | list) and said[key] and chance.random() < 0.7:
            said = said[key]
            continue
        if isinstance(said, dict) and chance.random() < 0.3:
            del said[key]
        else:
            said[key] = copy.deepcopy(chance.choice(hostile))
        return


HOSTILE_LINES = {
    "deep": b'{"input": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    "huge number": b'{"input": "", "output": "", "score": 1' + b"0" * 400 + b"}",
    "not utf-8": b'{"input": "\xff\xff", "output": ""}',
    "NUL": b"\0" * 100,
    "BOM": b'\xef\xbb\xbf{"input": "", "output": ""}',
    "array": b"[1, 2, 3]",
}


def test_hostile_lines_have_rows_with_their_numbers_and_the_rest_opens(tmp_path: Path) -> None:
    surrogate = verl_line(
        input="half \ud800 of a pair", output="\x1b[31m\u202e<script>\0", request_id="\x1b]0;owned\x07"
    )
    million = verl_line(output="x" * 10_000_000, step=2**80, request_id="r" * 100_000)
    lines = [*HOSTILE_LINES.values(), b"", surrogate, b"   ", million, to_line(good_trajectory(1)).strip()]
    (tmp_path / "5.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    with Library.open(tmp_path) as library:
        rows = library.rows()
        assert [row.line for row in rows if row.damaged] == [1, 2, 3, 4, 5, 6]
        assert [row.line for row in rows if not row.damaged] == [8, 10, 11]
        assert all(row.damaged.isprintable() for row in rows)
        assert [row.step for row in rows[:6]] == [5] * 6
        escaped, large, good = rows[6:]
        assert (escaped.request_id, large.step, len(large.request_id)) == ("\ufffd]0;owned\ufffd", 2**63 - 1, 200)
        assert [library.find(row.request_id) for row in (escaped, large)] == [[escaped], [large]]
        assert library.find("r" * 100_000) == [large]
        assert ids(library, 'text:"\ud800 of"') == [escaped.request_id]
        assert ids(library, "text:<SCRIPT>") == [escaped.request_id]
        assert ids(library, 'id:"\ud800"') == []
        assert library.trajectory(good.number) == good_trajectory(1)
        assert library.trajectory(rows[0].number) is None
        assert library.raw(rows[2].number) == '{"input": "\ufffd\ufffd", "output": ""}'
        assert library.raw(large.number, 20) == '{"input": "user\\nHow'
        assert (library.raw(large.number, 0), library.raw(10**9), library.trajectory(10**9)) == ("", "", None)
        assert (library.row(10**9), library.contains(10**9, "x"), library.position(10**9)) == (None, False, None)
        for number in (2**70, -(2**70), 0, -1):  # a link may name anything
            assert library.row(number) is library.trajectory(number) is library.position(number) is None
            assert (library.raw(number), library.contains(number, "x")) == ("", False)
            assert library.related(number) == ([], [])
            assert library.next_match("pair", number, None) == escaped
            assert library.at("5.jsonl", number) is library.at("\ud800", 1) is None
        assert library.at("5.jsonl", 11) == good
        assert {step.step: (step.count, step.damaged) for step in library.steps()}[5] == (0, 6)


def test_a_line_beyond_all_measure_is_damaged_and_not_kept_in_memory(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("toolyard.viewer.index.files.MAX_LINE", 1000)
    monkeypatch.setattr("toolyard.viewer.index.files._BLOCK", 300)
    lines = [to_line(small(1))[:-1].ljust(900), b"x" * 5000, b"y" * 1001, verl_line(), b"z" * 2500]
    path = tmp_path / "0.jsonl"
    path.write_bytes(b"\n".join(lines))
    with Library.open(tmp_path) as library:
        assert [(row.line, bool(row.damaged)) for row in library.rows()] == [
            (1, False),
            (2, True),
            (3, True),
            (4, False),
        ]
        append(path, b"\n")
        assert library.refresh() == 1
        assert library.rows()[-1].line == 5


# Files ----------------------------------------------------------------------------------------------------------------


def test_runs_in_sub_folders_come_in_the_order_people_count_and_a_single_file_alone(tmp_path: Path) -> None:
    for name in (
        "10.jsonl",
        "2.jsonl",
        "run10/0.jsonl",
        "run2/3.jsonl",
        ".hidden/1.jsonl",
        "a/b/1.jsonl",
        "notes.jsonl",
    ):
        write(tmp_path / name, small(1, request_id=name))
    with Library.open(tmp_path) as library:
        assert ids(library) == ["2.jsonl", "10.jsonl", "run2/3.jsonl", "run10/0.jsonl"]
        assert library.folder == tmp_path
    with Library.open(tmp_path / "notes.jsonl") as one, Library.open(tmp_path / "2.jsonl") as other:
        assert (ids(one), ids(other), one.folder) == (["notes.jsonl"], ["2.jsonl"], tmp_path)
        assert one.rows()[0].file == "notes.jsonl"
        append(tmp_path / "notes.jsonl", to_line(small(2)))
        assert (one.refresh(), other.refresh(), one.count()) == (1, 0, 2)


def test_nothing_outside_the_folder_is_read_and_nothing_waits_for_a_pipe(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "dump"
    write(outside / "1.jsonl", small(1, request_id="secret"))
    write(folder / "run" / "1.jsonl", small(2, request_id="own"))
    (folder / "1.jsonl").symlink_to(outside / "1.jsonl")
    (folder / "2.jsonl").symlink_to("../outside/1.jsonl")
    (folder / "elsewhere").symlink_to(outside)
    (folder / "latest").symlink_to("run")
    (folder / "3.jsonl").symlink_to("3.jsonl")
    (folder / "4.jsonl").symlink_to("run/1.jsonl")
    (folder / "kept").mkdir()
    write(folder / "kept" / "deep" / "x.jsonl", small(3, request_id="deep"))
    (folder / "5.jsonl").symlink_to("kept/deep/x.jsonl")
    (folder / "6.jsonl").mkdir()
    os.mkfifo(folder / "7.jsonl")
    with Library.open(folder) as library:
        assert sorted((row.file, row.request_id) for row in library.rows()) == [
            ("5.jsonl", "deep"),
            ("run/1.jsonl", "own"),
        ]
        row = library.find("own")[0]
        (folder / "run" / "1.jsonl").unlink()
        (folder / "run" / "1.jsonl").symlink_to(outside / "1.jsonl")
        assert library.trajectory(row.number) is None
        assert library.raw(row.number) == ""
        (folder / "run").rename(folder / "gone")
        (folder / "run").symlink_to(outside)
        assert library.trajectory(row.number) is None
        assert library.refresh() > 0
        assert ids(library) == ["deep"]


def test_names_that_are_no_text_can_be_folders(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff#?%20 x"))
    write(Path(os.fsdecode(os.fsencode(folder) + b"/run\xfe'\n")) / "1.jsonl", small(1))
    with Library.open(folder) as library:
        (row,) = library.rows()
        assert row.file == "run\\udcfe'\n/1.jsonl"
        assert library.trajectory(row.number) == small(1)
        assert library.count(parse_query('file:"\\udcfe"')) == 1


def test_what_is_not_there_is_refused_and_an_empty_folder_waits(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="No such file"):
        Library.open(tmp_path / "no")
    with pytest.raises(RecordError, match="neither a folder nor a regular file"):
        Library.open("/dev/null")
    with Library.open(tmp_path) as library:
        assert (library.count(), library.rows(), library.steps(), library.refresh()) == (0, [], [], 0)
        write(tmp_path / "0.jsonl", small(1))
        assert (library.refresh(), library.count(), library.refresh()) == (1, 1, 0)


@contextlib.contextmanager
def without_rights() -> Iterator[None]:
    """Root may do everything with files, until it takes another user's rights to them; for this thread alone."""
    libc = ctypes.CDLL(None)
    if os.geteuid() == 0:
        libc.setfsuid(54321)
    try:
        yield
    finally:
        if os.geteuid() == 0:
            libc.setfsuid(0)


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that others can enter, which pytest's are not."""
    folder = Path(tempfile.mkdtemp(prefix="toolyard-library-"))
    folder.chmod(0o777)
    yield folder
    for path in folder.rglob("*"):
        path.chmod(0o700)
    shutil.rmtree(folder)


def test_a_folder_that_cannot_be_written_has_its_index_in_the_cache(public: Path, monkeypatch) -> None:
    folder, cache = public / "dump", public / "cache"
    monkeypatch.setenv("TOOLYARD_CACHE_DIR", str(cache))
    write(folder / "run" / "0.jsonl", small(1), small(2))
    folder.chmod(0o555)
    for _ in range(2):
        with without_rights(), Library.open(folder) as library:
            assert library.count() == 2
            assert library.trajectory(library.rows()[0].number) == small(1)
    assert os.listdir(folder) == ["run"]
    assert len(list((cache / "viewer").iterdir())) == 1
    with without_rights(), Library.open(folder / "run" / "0.jsonl") as library:
        assert library.count() == 2
    monkeypatch.setenv("TOOLYARD_CACHE_DIR", "/proc/nowhere")
    with without_rights(), pytest.raises(RecordError, match="TOOLYARD_CACHE_DIR"):
        Library.open(folder)


def test_a_file_that_cannot_be_read_is_one_damaged_row_until_it_can(public: Path) -> None:
    folder = public / "dump"
    write(folder / "0.jsonl", small(1), small(2))
    write(folder / "1.jsonl", small(3))
    folder.chmod(0o777)
    (folder / "0.jsonl").chmod(0)
    with without_rights(), Library.open(folder) as library:
        assert [(row.file, row.damaged) for row in library.rows()] == [
            ("0.jsonl", "cannot be read: Permission denied"),
            ("1.jsonl", ""),
        ]
        assert library.trajectory(1) is None
        assert library.refresh() == 0
        before = library.generation
    (folder / "0.jsonl").chmod(0o644)
    with without_rights(), Library.open(folder) as library:
        assert ids(library) == ["request-1", "request-2", "request-3"]
        assert library.generation > before


def test_the_index_can_be_put_anywhere(tmp_path: Path) -> None:
    write(tmp_path / "dump" / "0.jsonl", small(1))
    with Library.open(tmp_path / "dump", index_dir=tmp_path / "some" / "where") as library:
        assert library.count() == 1
    assert os.listdir(tmp_path / "dump") == ["0.jsonl"]
    with pytest.raises(RecordError, match="no writable folder for the index"):
        Library.open(tmp_path / "dump", index_dir=tmp_path / "dump" / "0.jsonl")


@pytest.mark.parametrize("what", ["folder", "index", "database", "text", "journal", "lock"])
def test_an_index_that_is_a_link_is_not_written_through(tmp_path: Path, monkeypatch, what: str) -> None:
    monkeypatch.setenv("TOOLYARD_CACHE_DIR", str(tmp_path / "cache"))
    dump, victim = tmp_path / "dump", tmp_path / "victim"
    write(dump / "0.jsonl", small(1))
    index = dump / ".toolyard-index" / index_place.fingerprint()
    if what == "folder":
        victim.mkdir()
        index.parent.symlink_to(victim)
    elif what == "index":
        victim.mkdir()
        index.parent.mkdir()
        index.symlink_to(victim)
    else:
        victim.write_bytes(b"precious")
        index.mkdir(parents=True)
        names = {"database": "index.sqlite", "text": "text", "journal": "index.sqlite-journal", "lock": "in-use"}
        (index / names[what]).symlink_to(victim)
    with Library.open(dump) as library:
        assert library.count() == 1
        append(dump / "0.jsonl", to_line(small(2)))
        assert library.refresh() == 1
    assert os.listdir(victim) == [] if victim.is_dir() else victim.read_bytes() == b"precious"


# Growing and changing -------------------------------------------------------------------------------------------------


async def test_a_dump_is_followed_while_it_is_written(tmp_path: Path) -> None:
    with Library.open(tmp_path) as library:
        async with DumpWriter(tmp_path) as dump:
            for seed in range(20):
                await dump.write(small(seed, step=seed % 3))
                assert library.refresh() == 1
                assert library.refresh() == 0
        generation = library.generation
        assert sorted(ids(library)) == sorted(f"request-{seed}" for seed in range(20))
        assert [row.file for row in library.rows()] == ["0.jsonl"] * 7 + ["1.jsonl"] * 7 + ["2.jsonl"] * 6
        assert [row.line for row in library.rows(limit=7)] == list(range(1, 8))
        assert library.generation == generation
        assert ids(library, "text:220000") == []


def test_a_torn_line_waits_until_it_is_whole_and_a_missing_newline_does_not_matter(tmp_path: Path) -> None:
    path, lines = tmp_path / "0.jsonl", [to_line(small(seed)) for seed in range(4)]
    path.write_bytes(lines[0] + lines[1][:50])
    with Library.open(tmp_path) as library:
        assert ids(library) == ["request-0"]
        append(path, lines[1][50:-2])
        assert library.refresh() == 0
        append(path, lines[1][-2:-1])
        assert library.refresh() == 1
        assert library.trajectory(library.rows()[1].number) == small(1)
        append(path, b"\n")
        assert library.refresh() == 0
        append(path, lines[2][:-1])
        assert library.refresh() == 1
        generation = library.generation
        append(path, b"\n" + lines[3])
        assert library.refresh() == 1
        assert [(row.line, row.request_id) for row in library.rows()] == [(at + 1, f"request-{at}") for at in range(4)]
        assert library.generation == generation
        append(path, b'\n{"torn": \n' + lines[0])
        assert library.refresh() == 2
        assert [(row.line, bool(row.damaged)) for row in library.rows()[4:]] == [(6, True), (7, False)]


def test_a_whole_line_that_goes_on_after_all_is_taken_in_anew(tmp_path: Path) -> None:
    path = tmp_path / "0.jsonl"
    path.write_bytes(to_line(small(0)) + b'{"input": "", "output": ""}')
    with Library.open(tmp_path) as library:
        assert library.count(parse_query("damaged:no")) == 2
        append(path, b"rubbish\n")
        library.refresh()
        assert [bool(row.damaged) for row in library.rows()] == [False, True]


def test_a_file_that_was_replaced_is_taken_in_anew_and_numbers_are_not_used_twice(tmp_path: Path) -> None:
    path, keep = tmp_path / "0.jsonl", tmp_path / "1.jsonl"
    write(path, *map(small, range(5)))
    write(keep, small(100))
    with Library.open(tmp_path) as library:
        kept, old = library.rows()[-1], library.rows()[0]
        changes = {
            "replaced by a longer one": lambda: replaced(path, range(10, 20)),
            "replaced by a shorter one": lambda: replaced(path, range(20, 23)),
            "truncated": lambda: os.truncate(path, len(to_line(small(20)))),
            "rewritten in place, and longer": lambda: write(path, *map(small, range(40, 60))),
            "rewritten in place, and as long": lambda: write(path, *map(small, range(60, 80))),
            "emptied": lambda: write(path),
            "filled": lambda: write(path, small(1)),
            "deleted": path.unlink,
            "back": lambda: write(path, small(2), small(3)),
        }
        for what, change in changes.items():
            generation, numbers = library.generation, [row.number for row in library.rows()]
            found = library.rows()
            change()
            assert library.refresh() > 0, what
            assert (library.generation > generation) is (what not in ("filled", "back")), what
            expected = (
                [trajectory_of(line).request_id for line in path.read_bytes().splitlines()] if path.exists() else []
            )
            assert ids(library) == [*expected, "request-100"], what
            assert not ({row.number for row in library.rows()} - {kept.number}) & set(numbers) or what in (
                "filled",
                "back",
            )
            assert library.row(kept.number) == kept
            gone = [row for row in found if row != kept]
            assert all(library.row(row.number) is None for row in gone), what
            hits = {row.request_id for row in library.rows(parse_query(f"text:{small(100).input}"))}
            assert hits == {"request-100"}
        assert library.trajectory(old.number) is None
    with Library.open(tmp_path) as library:
        assert ids(library) == ["request-2", "request-3", "request-100"]


def test_a_line_of_the_same_length_that_was_edited_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "0.jsonl"
    write(path, *(small(seed, output="before") for seed in range(9)))
    with Library.open(tmp_path) as library:
        row = library.rows()[4]
        text = bytearray(path.read_bytes())
        at = [index for index in range(len(text)) if text.startswith(b"before", index)][4]
        with path.open("r+b") as file:
            file.seek(at)
            file.write(b"behind")
        assert library.trajectory(row.number) is None
        assert library.refresh() > 0
        assert [row.line for row in library.rows(parse_query("text:behind"))] == [5]


def test_a_copy_that_has_grown_continues_and_a_touch_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "0.jsonl"
    write(path, small(1), small(2))
    with Library.open(tmp_path) as library:
        generation, rows = library.generation, library.rows()
        os.utime(path, (1, 1))
        assert library.refresh() == 0
        write(tmp_path / "copy", small(1), small(2), small(3))
        os.rename(tmp_path / "copy", path)
        assert library.refresh() == 1
        assert library.rows()[:2] == rows
        assert library.generation == generation


def test_an_index_that_is_deleted_with_its_dump_is_built_again(tmp_path: Path) -> None:
    folder = tmp_path / "dump"
    write(folder / "0.jsonl", small(1), small(2))
    with Library.open(folder) as library:
        generation = library.generation
        shutil.rmtree(folder)
        with pytest.raises(RecordError, match="No such file"):
            library.refresh()
        assert not folder.exists()
        write(folder / "3.jsonl", small(7))
        assert library.refresh() > 0
        assert ids(library) == ["request-7"]
        assert library.generation > generation
        write(folder / "4.jsonl", small(8))
        with library._index.store.reading():  # the only connection
            shutil.rmtree(folder / ".toolyard-index")
            assert library.refresh() > 0
        assert ids(library) == ["request-7", "request-8"]


def test_everything_fails_after_closing_with_a_word(tmp_path: Path) -> None:
    library = Library.open(tmp_path)
    library.close()
    library.close()
    for ask in (library.count, library.rows, library.steps, library.refresh, lambda: library.find("x")):
        with pytest.raises(RecordError, match="closed"):
            ask()
