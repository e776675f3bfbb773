"""Tapes: recordings come back bit-identical, and a replay that diverges learns where."""

from __future__ import annotations

import gzip
import json
import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from expensive import examples
from toolyard import __version__
from toolyard.errors import DivergenceError, RecordError
from toolyard.records.differences import json_difference
from toolyard.records.jsonl import encode
from toolyard.records.tape import Replay, Tape, TapeEntry, TapeWriter

texts = st.text(max_size=12) | st.just("half an emoji \ud83d, alone")


def json_of(floats: st.SearchStrategy[float]) -> st.SearchStrategy:
    return st.recursive(
        st.none() | st.booleans() | st.integers(-(2**70), 2**70) | floats | texts,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=3),
        max_leaves=10,
    )


json_values = json_of(st.floats())
without_minus_zero = json_of(st.floats().map(lambda number: number + 0.0))


@pytest.fixture(params=["tape.jsonl", "tape.jsonl.gz"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / request.param


def record(path: Path, *entries: TapeEntry, meta: dict | None = None) -> Tape:
    with TapeWriter(path, meta) as tape:
        for entry in entries:
            tape.record(entry.request_id, entry.kind, entry.asked, entry.got)
    return Tape.read(path)


# Writing and reading --------------------------------------------------------------------------------------------------


def test_entries_come_back_by_request_in_their_order(path: Path) -> None:
    entries = [TapeEntry(f"r{at % 3}", "sample", {"turn": at}, [at, at / 7]) for at in range(9)]
    ends = [TapeEntry(name, "ended", None, None) for name in ("r2", "r0", "r1")]
    tape = record(path, *entries, *ends, meta={"seed": 7})
    assert (tape.meta, tape.request_ids, tape.ended, tape.notes) == (
        {"seed": 7}, ("r0", "r1", "r2"), ("r2", "r0", "r1"), (),
    )  # fmt: skip
    assert tape.entries("r1") == (entries[1], entries[4], entries[7], ends[2])
    assert tape.entries("nobody") == ()


def test_the_first_line_is_the_header_and_each_entry_is_a_line_of_json(tmp_path: Path) -> None:
    record(tmp_path / "tape", TapeEntry("r", "tool", {"b": 1, "a": 2}, None), meta={"seed": 7})
    lines = (tmp_path / "tape").read_text().splitlines()
    assert json.loads(lines[0]) == {"tape_version": 1, "toolyard": __version__, "meta": {"seed": 7}}
    assert lines[1] == '{"request_id":"r","kind":"tool","asked":{"b":1,"a":2},"got":null}'


@settings(max_examples=examples(80), deadline=None)
@given(json_values, json_values)
@example(math.nan, [math.inf, None, {"a": (-math.inf)}])
@example(["half \ud83d", math.nan, 2**70], -0.0)
def test_every_value_comes_back_to_the_bit_and_is_found_again(tmp_path_factory, asked, got) -> None:
    tape = record(tmp_path_factory.mktemp("tape") / "tape", TapeEntry("r", "k", asked, got))
    found = tape.entries("r")[0]
    assert repr(found.asked) == repr(asked)  # NaN, -0.0 and 1.0 beside 1 included
    assert repr(Replay(tape, "r").next("k", asked)) == repr(got)


def test_a_line_is_in_the_file_when_record_returns(tmp_path: Path) -> None:
    with TapeWriter(tmp_path / "tape") as tape:
        tape.record("r", "k", 1, 2)
        assert Tape.read(tmp_path / "tape").entries("r") == (TapeEntry("r", "k", 1, 2),)


def test_threads_may_record_at_the_same_time(path: Path) -> None:
    with TapeWriter(path) as tape, ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda at: tape.record(f"r{at % 8}", "k", at, "x" * 1000), range(800)))
    assert sum(len(Tape.read(path).entries(f"r{at}")) for at in range(8)) == 800


def test_an_existing_tape_is_not_overwritten(path: Path) -> None:
    record(path, TapeEntry("r", "k", 1, 2))
    with pytest.raises(RecordError, match="already exists"):
        TapeWriter(path)
    assert Tape.read(path).request_ids == ("r",)


def test_nothing_is_recorded_on_a_closed_tape(path: Path) -> None:
    with TapeWriter(path) as tape:
        pass
    tape.close()
    with pytest.raises(RecordError, match="closed"):
        tape.record("r", "k", 1, 2)


def test_a_torn_end_is_dropped_with_a_note(path: Path) -> None:
    record(path, *(TapeEntry("r", "k", at, "x" * at) for at in range(300)))
    data = path.read_bytes()
    path.write_bytes(data[:-30])
    tape = Tape.read(path)
    assert 0 < len(tape.entries("r")) <= 299
    assert [entry.asked for entry in tape.entries("r")] == list(range(len(tape.entries("r"))))
    assert len(tape.notes) == 1
    assert str(path) in tape.notes[0]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is not a tape"),
        (b'{"input": "", "output": ""}\n', "is not a tape"),
        (b"\xff\n", ":1: not JSON"),
        (b"[]\n", ":1: expected an object, not []"),
        (
            b'{"tape_version": 2, "toolyard": "9.0"}\n',
            "version 2, made by toolyard 9.0; this version of toolyard plays version 1",
        ),
        (b'{"tape_version": 1}\n{"kind": "k"}\n', ":2: not a tape entry"),
        (b'{"tape_version": 1}\nrubbish\n{}\n', ":2: not JSON"),
    ],
)
def test_what_is_no_tape_is_refused_with_the_reason(tmp_path: Path, content: bytes, why: str) -> None:
    (tmp_path / "tape").write_bytes(content)
    (tmp_path / "tape.gz").write_bytes(gzip.compress(content))
    for name in ("tape", "tape.gz"):
        with pytest.raises(RecordError) as caught:
            Tape.read(tmp_path / name)
        assert why in str(caught.value)


def test_a_compressed_tape_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tape.gz").write_bytes(b"plain text")
    with pytest.raises(RecordError, match="gzip"):
        Tape.read(tmp_path / "tape.gz")
    record(tmp_path / "whole.gz", TapeEntry("r", "k", "x" * 1000, list(range(1000))))
    data = bytearray((tmp_path / "whole.gz").read_bytes())
    data[100:110] = b"\xff" * 10
    (tmp_path / "whole.gz").write_bytes(data)
    with pytest.raises(RecordError, match=r"whole\.gz"):
        Tape.read(tmp_path / "whole.gz")
    with pytest.raises(RecordError, match="No such file"):
        Tape.read(tmp_path / "nowhere.gz")


FULL = """
import resource, sys
from toolyard.errors import RecordError
from toolyard.records.tape import TapeWriter
tape = TapeWriter(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
for at in range(10_000):
    try:
        tape.record("r", "k", at, "x" * 100)
    except RecordError as error:
        print(at, error)
        break
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
try:
    tape.record("r", "k", -1, "after half a line")
except RecordError as error:
    print(error)
tape.close()
"""


def test_a_full_disk_ends_the_tape_where_it_can_still_be_read(tmp_path: Path) -> None:
    path = tmp_path / "tape"
    done = subprocess.run([sys.executable, "-c", FULL, path], capture_output=True, text=True, timeout=60, check=True)
    first, second = done.stdout.splitlines()
    assert second in first
    assert "File too large" in first
    assert len(Tape.read(path).entries("r")) == int(first.split()[0])


# Replaying ------------------------------------------------------------------------------------------------------------


def replay_of(*entries: tuple[str, object, object]) -> Replay:
    return Replay(Tape({}, tuple(TapeEntry("req-1", *entry) for entry in entries)), "req-1")


def test_the_same_questions_get_the_same_answers() -> None:
    replay = replay_of(("sample", {"crc": 5, "seed": 1}, [1, 2]), ("tool", ("a", math.nan), "out"))
    assert replay.next("sample", {"seed": 1, "crc": 5}) == [1, 2]
    assert replay.next("tool", ["a", math.nan]) == "out"
    replay.finish()


def test_python_objects_are_compared_as_the_json_they_become() -> None:
    tape_says = {"1": "é", "list": [1, [2]], "nan": None}
    replay = replay_of(("k", tape_says, "got"))
    assert replay.next("k", {1: "é", "list": (1, (2,)), "nan": None}) == "got"


@pytest.mark.parametrize(
    ("was", "now", "said"),
    [
        (
            {"messages": [{"content": "abc"}]},
            {"messages": [{"content": "abd"}]},
            "asked.messages[0].content is 'abd'; ",
        ),
        ({"a": 1}, {"a": 1, "b": 2}, "asked.b is 2; the tape has nothing"),
        ({"a": 1, "b c": 2}, {"a": 1}, "asked.'b c' is nothing; the tape has 2"),
        ([1, 2, 3], [1, 2], "asked[2] is nothing; the tape has 3"),
        ([[1], {"x": True}], [[1], {"x": 1}], "asked[1].x is 1; the tape has True"),
        (1, 1.0, "asked is 1.0; the tape has 1"),
        (0.0, -0.0, "asked: -0.0"),
        ("x" * 500 + "a" + "y" * 500, "x" * 500 + "b" + "y" * 500, "…'" + "x" * 24 + "b" + "y" * 55 + "'…; the tape"),
    ],
)
def test_a_divergence_shows_the_first_difference(was: object, now: object, said: str) -> None:
    replay = replay_of(("sample", 0, 0), ("tool", was, "got"))
    replay.next("sample", 0)
    with pytest.raises(DivergenceError) as caught:
        replay.next("tool", now)
    assert str(caught.value).startswith("request 'req-1', entry 2 of 2 (tool): ")
    assert said in str(caught.value)
    assert len(str(caught.value)) < 400


def test_another_kind_a_missing_entry_an_unplayed_one_and_an_unknown_request_are_divergences() -> None:
    replay = replay_of(("sample", {"seed": 1}, 0))
    with pytest.raises(DivergenceError, match=r"entry 1 of 1 \(tool\): the tape has 'sample' here, asked: {'seed': 1}"):
        replay.next("tool", {"seed": 1})
    with pytest.raises(DivergenceError, match=r"the replay ended, but the tape has 1 more"):
        replay.finish()
    replay.next("sample", {"seed": 1})
    with pytest.raises(DivergenceError, match=r"the tape has ended; asked: 'x'"):
        replay.next("sample", "x")
    with pytest.raises(
        DivergenceError, match=r"no entries for request 'other'; it has 1 other requests, the first is 'req'"
    ):
        Replay(Tape({}, (TapeEntry("req", "k", 0, 0),)), "other")


def test_what_was_asked_at_the_same_time_may_be_asked_in_any_order() -> None:
    entries = [("sample", 0, 0), ("tool", "a", 1), ("tool", "b", 2), ("tool", "b", 3), ("ended", None, None)]
    replay = replay_of(*entries)
    replay.next("sample", 0)
    assert [replay.next("tool", one, any_order=True) for one in "bab"] == [2, 1, 3]
    replay.next("ended", None)
    replay.finish()


def test_any_order_does_not_reach_beyond_entries_of_the_same_kind() -> None:
    replay = replay_of(("tool", "a", 1), ("sample", 0, 0), ("tool", "b", 2))
    with pytest.raises(DivergenceError, match="asked is 'b'; the tape has 'a'"):
        replay.next("tool", "b", any_order=True)
    strict = replay_of(("tool", "a", 1), ("tool", "b", 2))
    with pytest.raises(DivergenceError, match="asked is 'b'; the tape has 'a'"):
        strict.next("tool", "b")


@settings(max_examples=examples(100), deadline=None)
@given(without_minus_zero, without_minus_zero)
def test_a_difference_is_found_exactly_where_values_are_not_the_same(one, other) -> None:
    assert json_difference(one, one) is None
    same = encode(one, sort=True, nan=True) == encode(other, sort=True, nan=True)
    assert (json_difference(one, other) is None) == same


def test_nesting_without_end_is_compared_without_recursion() -> None:
    one: list = []
    other: list = [1]
    for _ in range(50_000):
        one, other = [one], [other]
    found = json_difference(one, other)
    assert found is not None
    assert found.now == "1"
