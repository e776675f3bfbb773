"""Copies of a selection: exactly the matching lines, in the query's order, or nothing."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from viewer_dumps import dump_of, ids, index_folder, small, verl_line, write

from toolyard.errors import ConfigError
from toolyard.records.dump import read_dump
from toolyard.records.lines import to_line
from toolyard.viewer.library import Library
from toolyard.viewer.query import parse_query
from toolyard.viewer.selection import Copied, copy_lines, write_selection


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_matching_lines_are_copied_byte_for_byte_in_the_querys_order(tmp_path: Path) -> None:
    lines = [to_line(small(seed, score=seed % 3 / 2, step=0)) for seed in range(30)]
    odd = [verl_line(score=0.5, output="Ünïcödé"), b' { "input":"a", "output" : "b","score":1e0 , "step":1 }  \r\n']
    dump = tmp_path / "dump"
    dump.mkdir()
    (dump / "0.jsonl").write_bytes(b"".join(lines))
    (dump / "1.jsonl").write_bytes(b"\n\n" + odd[0] + b"\n" + odd[1])
    with Library.open(dump) as library:
        target = tmp_path / "new.jsonl"
        done = write_selection(library, target, parse_query("score>=0.5 sort:-score"))
        ones = [line for seed, line in enumerate(lines) if seed % 3 == 2]
        halves = [line for seed, line in enumerate(lines) if seed % 3 == 1]
        wanted = b"".join([*ones, odd[1], *halves, odd[0] + b"\n"])
        assert target.read_bytes() == wanted
        assert done == Copied(22, len(wanted), 0)
        assert write_selection(library, tmp_path / "few.jsonl", parse_query("sort:-score"), limit=2).lines == 2
        assert (tmp_path / "few.jsonl").read_bytes() == b"".join(ones[:2])
    with Library.open(target) as copy:
        assert ids(copy, "score=1")[:3] == ["request-2", "request-5", "request-8"]
    assert len(list(read_dump(target))) == 22


def test_a_last_line_without_its_newline_gets_one(tmp_path: Path) -> None:
    (tmp_path / "0.jsonl").write_bytes(verl_line(output="first"))
    (tmp_path / "1.jsonl").write_bytes(verl_line(output="second"))
    with Library.open(tmp_path) as library:
        copied = io.BytesIO()
        copy_lines(library, copied, parse_query("sort:-step"))
    assert copied.getvalue() == verl_line(output="first") + b"\n" + verl_line(output="second") + b"\n"


def test_damaged_lines_are_left_out_and_counted(tmp_path: Path) -> None:
    (tmp_path / "0.jsonl").write_bytes(b"{\n" + verl_line() + b"\n\xff\n" + verl_line(score=0) + b"\n")
    with Library.open(tmp_path) as library:
        assert write_selection(library, tmp_path / "new", parse_query("")).damaged == 2
    assert (tmp_path / "new").read_bytes() == verl_line() + b"\n" + verl_line(score=0) + b"\n"


@pytest.mark.parametrize("how", ["truncated", "rewritten", "deleted"])
def test_a_line_that_changed_after_it_was_indexed_is_left_out_never_replaced_by_another(
    tmp_path: Path, how: str
) -> None:
    dump_of(tmp_path, 8, files=2)
    with Library.open(tmp_path) as library:
        path = tmp_path / "1.jsonl"
        content = path.read_bytes()
        if how == "truncated":
            path.write_bytes(content[:-10])
        elif how == "rewritten":
            path.write_bytes(content.replace(b"request-5", b"request-6"))
        else:
            path.unlink()
        done = write_selection(library, tmp_path / "new", parse_query(""))
        lines = (tmp_path / "new").read_bytes().splitlines(keepends=True)
    assert done.lines == len(lines)
    assert done.lines + done.damaged == 8
    assert done.damaged == {"truncated": 1, "rewritten": 1, "deleted": 4}[how]
    known = (tmp_path / "0.jsonl").read_bytes() + content
    assert all(line in known for line in lines)


def test_more_files_than_may_be_open_are_copied_in_any_order(tmp_path: Path) -> None:
    for step in range(150):
        write(tmp_path / f"{step}.jsonl", small(2 * step, score=0.0), small(2 * step + 1, score=1.0))
    with Library.open(tmp_path) as library:
        copied = io.BytesIO()
        copy_lines(library, copied, parse_query("sort:-score"))
        wanted = [f"request-{seed}" for seed in (*range(1, 300, 2), *range(0, 300, 2))]
        assert ids(library, "sort:-score") == wanted
    (tmp_path / "copy").write_bytes(copied.getvalue())
    assert [dumped.trajectory.request_id for dumped in read_dump(tmp_path / "copy")] == wanted


def test_an_existing_file_is_overwritten_only_on_demand_and_a_file_of_the_dump_never(tmp_path: Path) -> None:
    dump = tmp_path / "dump"
    dump_of(dump, 4, files=1)
    before = (dump / "0.jsonl").read_bytes()
    target = tmp_path / "new.jsonl"
    target.write_text("mine")
    (tmp_path / "link").symlink_to(dump / "0.jsonl")
    (tmp_path / "elsewhere").symlink_to(target)
    with Library.open(dump) as library:
        with pytest.raises(ConfigError, match="exists; choose another name, or overwrite it with --force"):
            write_selection(library, target, parse_query(""))
        assert target.read_text() == "mine"
        for own in (dump / "0.jsonl", tmp_path / "link"):
            with pytest.raises(ConfigError, match="belongs to the dump"):
                write_selection(library, own, parse_query("score=7"), overwrite=True)
        for odd in (tmp_path / "elsewhere", dump):
            with pytest.raises(ConfigError, match="not a regular file"):
                write_selection(library, odd, parse_query(""), overwrite=True)
        with pytest.raises(ConfigError, match="No such file or directory"):
            write_selection(library, tmp_path / "nowhere" / "x.jsonl", parse_query(""))
        assert write_selection(library, target, parse_query("id:request-1"), overwrite=True).lines == 1
    assert (dump / "0.jsonl").read_bytes() == before
    assert names(tmp_path) == ["dump", "elsewhere", "link", "new.jsonl"]


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_a_copy_that_is_interrupted_leaves_nothing(tmp_path: Path, failure: BaseException) -> None:
    dump_of(tmp_path / "dump", 6)

    def fail(done: int, total: int) -> None:
        raise failure

    with Library.open(tmp_path / "dump") as library, pytest.raises((KeyboardInterrupt, ConfigError)):
        write_selection(library, tmp_path / "new.jsonl", parse_query(""), progress=fail)
    assert names(tmp_path) == ["dump"]


def test_a_selection_of_nothing_is_an_empty_file(tmp_path: Path) -> None:
    dump_of(tmp_path / "dump", 2)
    with Library.open(tmp_path / "dump") as library:
        assert write_selection(library, tmp_path / "new", parse_query("score=7")) == Copied(0, 0, 0)
    assert (tmp_path / "new").read_bytes() == b""
    assert index_folder(tmp_path / "dump")
