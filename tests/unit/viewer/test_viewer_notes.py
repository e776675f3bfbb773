"""Notes and saved views: what people wrote is never lost, whatever others do meanwhile."""

from __future__ import annotations

import json
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from viewer_dumps import dump_of, replaced, small, verl_line, write

from patience import patient
from toolyard.errors import ConfigError, RecordError
from toolyard.viewer.library import Library
from toolyard.viewer.notes import FILE, MAX_TEXT, Notes
from toolyard.viewer.protocol import Row
from toolyard.viewer.query import QueryError


def rows_of(folder: Path) -> list[Row]:
    with Library.open(folder) as library:
        return library.rows(limit=1000)


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    dump_of(tmp_path / "dump", 4, files=2)
    return tmp_path / "dump"


def test_the_file_is_readable_by_people_and_by_the_next_viewer(dump: Path) -> None:
    notes, (first, second, *_) = Notes(dump), rows_of(dump)
    notes.write(second, "  zählt doppelt\nand stops  ")
    notes.save_view("hard  ones", "score<0.5 sort:-time")
    assert json.loads((dump / FILE).read_text()) == {
        "views": {"hard ones": "score<0.5 sort:-time"},
        "notes": [{"request_id": "request-1", "step": second.step, "text": "zählt doppelt\nand stops"}],
    }
    assert "zählt" in (dump / FILE).read_text()
    again = Notes(dump)
    assert (again.of(first), again.of(second)) == ("", "zählt doppelt\nand stops")
    assert again.noted([first, second]) == {second.number}
    again.write(second, "", was="zählt doppelt\nand stops")
    again.remove_view("hard ones")
    assert (notes.of(second), notes.views()) == ("", {})


def test_a_note_survives_a_new_index_and_a_line_that_moves(dump: Path) -> None:
    Notes(dump).write(rows_of(dump)[3], "look here")
    shutil.rmtree(dump / ".toolyard-index")
    (dump / "1.jsonl").write_bytes(b"{}\n" + (dump / "1.jsonl").read_bytes())
    rows = rows_of(dump)
    assert [row.request_id for row in rows if Notes(dump).of(row)] == ["request-3"]
    replaced(dump / "1.jsonl", range(9, 11))
    assert not any(map(Notes(dump).of, rows_of(dump)))


def test_each_run_has_its_own_notes_wherever_it_is_opened(tmp_path: Path) -> None:
    for run in ("a", "b"):
        write(tmp_path / run / "0.jsonl", small(1))
    here, there = rows_of(tmp_path)
    Notes(tmp_path).write(here, "only in a")
    assert (Notes(tmp_path).of(here), Notes(tmp_path).of(there)) == ("only in a", "")
    assert Notes(tmp_path / "a").of(rows_of(tmp_path / "a")[0]) == "only in a"
    assert not (tmp_path / FILE).exists()


def test_lines_without_a_request_id_are_named_by_their_place(tmp_path: Path) -> None:
    (tmp_path / "7.jsonl").write_bytes(verl_line() + b"\n" + verl_line() + b"\n")
    first, second = rows_of(tmp_path)
    Notes(tmp_path).write(second, "this one")
    assert (Notes(tmp_path).of(first), Notes(tmp_path).of(second)) == ("", "this one")
    assert json.loads((tmp_path / FILE).read_text())["notes"][0]["request_id"] == "7.jsonl:2"


def test_the_file_is_no_part_of_the_dump(dump: Path) -> None:
    before = rows_of(dump)
    Notes(dump).write(before[0], "x")
    assert rows_of(dump) == before


# Several editors ------------------------------------------------------------------------------------------------------


def write_some(folder: Path, rows: list[Row], numbers: range) -> None:
    for number in numbers:
        Notes(folder).write(rows[number], f"note {number}")
        Notes(folder).save_view(f"view {number}", f"line:{number}")


def test_editors_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    """Threads instead of processes: the lock belongs to an open file, not to a process."""
    dump_of(tmp_path, 24)
    parts = [range(at, at + 6) for at in range(0, 24, 6)]
    rows = rows_of(tmp_path)
    with ThreadPoolExecutor(4) as editors:
        assert list(editors.map(lambda part: write_some(tmp_path, rows, part), parts)) == [None] * 4
    assert [Notes(tmp_path).of(row) for row in rows] == [f"note {number}" for number in range(24)]
    assert len(Notes(tmp_path).views()) == 24
    assert not list(tmp_path.glob("*.part")) + list(tmp_path.glob(".*.part"))


def test_two_who_edit_the_same_note_both_keep_their_text(dump: Path) -> None:
    row, one, other = rows_of(dump)[0], Notes(dump), Notes(dump)
    one.write(row, "first")
    assert one.write(row, "first, and more", was="first") == "first, and more"
    assert other.write(row, "first, but", was="first") == "first, and more\n\nfirst, but"
    assert one.write(row, "", was="first, and more") == "first, and more\n\nfirst, but"
    assert one.write(row, "", was=other.of(row)) == ""


def test_what_another_program_wrote_is_seen_and_what_it_added_is_kept(dump: Path) -> None:
    row, notes = rows_of(dump)[0], Notes(dump)
    notes.write(row, "mine")
    told = json.loads((dump / FILE).read_text())
    told["notes"][0]["text"] = "edited by hand"
    told["author"] = {"name": "somebody"}
    (dump / FILE).write_text(json.dumps(told))
    assert notes.of(row) == "edited by hand"
    notes.save_view("all", "")
    assert json.loads((dump / FILE).read_text())["author"] == {"name": "somebody"}


# Files that are not as they should be ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "Expecting"),
        ("[]", "expected an object"),
        ('{"views": []}', "views as an object"),
        ('{"views": {"a": 1}}', "views as an object"),
        ('{"notes": {}}', "notes as a list"),
        ('{"notes": [{"request_id": "a", "step": "1", "text": "x"}]}', r"notes\[0\]: expected request_id"),
        ("\udcff", "utf-8"),
        ("[" * 100_000, "not a file of notes"),
    ],
)
def test_a_file_that_cannot_be_read_is_never_overwritten(dump: Path, content: str, why: str) -> None:
    (dump / FILE).write_bytes(content.encode("utf-8", "surrogateescape"))
    row = rows_of(dump)[0]
    for attempt in (lambda notes: notes.of(row), lambda notes: notes.write(row, "x"), lambda notes: notes.views()):
        with pytest.raises(RecordError, match=why) as refusal:
            attempt(Notes(dump))
        assert "correct it, or move it away" in str(refusal.value)
    assert (dump / FILE).read_bytes() == content.encode("utf-8", "surrogateescape")


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_nothing_else_under_its_name_is_read_or_written(dump: Path, tmp_path: Path, kind: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text('{"views": {"secret": ""}}')
    if kind == "link":
        (dump / FILE).symlink_to(secret)
    elif kind == "pipe":
        os.mkfifo(dump / FILE)
    else:
        (dump / FILE).mkdir()
    row = rows_of(dump)[0]
    began = time.monotonic()
    for attempt in (lambda notes: notes.views(), lambda notes: notes.write(row, "x")):
        with pytest.raises(RecordError):
            attempt(Notes(dump))
    assert time.monotonic() - began < patient(5)
    assert secret.read_text() == '{"views": {"secret": ""}}'


def test_what_makes_no_sense_is_refused_before_anything_is_written(dump: Path) -> None:
    notes, row = Notes(dump), rows_of(dump)[0]
    with pytest.raises(QueryError):
        notes.save_view("bad", "scroe<1")
    for name in ("", "  ", "x" * 101):
        with pytest.raises(ConfigError, match="1 to 100 characters"):
            notes.save_view(name, "")
    with pytest.raises(ConfigError, match="at most 20000 characters"):
        notes.write(row, "x" * (MAX_TEXT + 1))
    assert not (dump / FILE).exists()


def test_read_only_says_why(dump: Path) -> None:
    notes, row = Notes(dump, read_only="it is Sunday"), rows_of(dump)[0]
    Notes(dump).write(row, "before")
    assert notes.of(row) == "before"
    for attempt in (lambda: notes.write(row, "x"), lambda: notes.save_view("a", "")):
        with pytest.raises(RecordError, match="cannot write notes: it is Sunday"):
            attempt()


def test_a_folder_that_is_gone_says_so(dump: Path) -> None:
    row = rows_of(dump)[0]
    shutil.rmtree(dump)
    with pytest.raises(RecordError, match="is not writable"):
        Notes(dump).write(row, "x")
