"""Task files, good and bad: the messages, and the rows that survive."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import textwrap
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from expensive import examples
from toolyard.errors import ConfigError, TaskError
from toolyard.messages import Message
from toolyard.tasks.files import MAX_LINE_BYTES, BadRow, open_tasks, read_tasks
from toolyard.tasks.protocol import Task
from toolyard.tasks.rows import Shape

GOOD = b'{"prompt": "a", "answer": 1}\n'


@pytest.fixture
def file(tmp_path: Path):
    def write(content: bytes | list, name: str = "tasks.jsonl") -> Path:
        path = tmp_path / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in content))
        return path

    return write


def skipped(path: Path, **options) -> tuple[list[Task], list[BadRow]]:
    bad: list[BadRow] = []
    reader = read_tasks(path, on_bad_row="skip", report=bad.append, **options)
    tasks = list(reader)
    assert reader.bad == len(bad)
    assert reader.tasks == len(tasks)
    return tasks, bad


# Kinds of files -------------------------------------------------------------------------------------------------------


def test_shapes_may_be_mixed_in_one_file(file):
    rows = [
        {"prompt": [{"role": "user", "content": "a"}], "reward_model": {"ground_truth": "1"}, "data_source": "x"},
        {"question": "b", "answer": "#### 2"},
        {"prompt": "c", "answer": "3"},
    ]
    reader = read_tasks(file(rows))
    assert [task.ground_truth for task in reader] == ["1", "2", "3"]
    assert reader.shapes == {Shape.VERL: 1, Shape.GSM8K: 1, Shape.PLAIN: 1}
    assert reader.ended


@pytest.mark.parametrize("name", ["t.jsonl", "t.ndjson", "t.json", "T.JSONL"])
def test_lines_of_json_are_read_whatever_the_suffix(file, name):
    assert len(list(read_tasks(file(GOOD * 3, name)))) == 3


@pytest.mark.parametrize("name", ["t.jsonl.gz", "t.json.gz", "t.ndjson.gz"])
def test_packed_files_are_read(file, name):
    tasks = list(read_tasks(file(gzip.compress(GOOD * 3), name)))
    assert [task.id for task in tasks] == ["t-000001", "t-000002", "t-000003"]


def test_an_array_is_read(file):
    content = (
        b'\xef\xbb\xbf \n[{"prompt": "a", "answer": 1},\n {"prompt": 5, "answer": 1}, {"prompt": "c", "answer": 1}]'
    )
    tasks, bad = skipped(file(content, "t.json"))
    assert [task.id for task in tasks] == ["t-000001", "t-000003"]
    assert str(bad[0]).endswith("t.json: row 2: prompt: expected a string or a list of messages, not 5")


def test_an_array_that_is_no_json_is_told(file):
    with pytest.raises(TaskError, match=r"t\.json: not valid JSON: .*near"):
        list(read_tasks(file(b'[{"prompt": "a"', "t.json")))


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b" \t\n\n\n", b"\n\r\n"])
def test_line_ends_blank_lines_and_a_byte_order_mark_do_not_matter(file, end):
    content = b"\xef\xbb\xbf" + end.join([GOOD.strip()] * 3)
    assert len(list(read_tasks(file(content)))) == 3


def test_numbers_of_bad_lines_count_blank_lines(file):
    _, bad = skipped(file(b"\n\n" + GOOD + b"\nnonsense\n"))
    assert [(row.unit, row.number) for row in bad] == [("line", 5)]


def test_separators_that_are_no_line_ends_are_text(file):
    text = "a\u2028b\x85c"
    row = json.dumps({"prompt": text, "answer": 1}, ensure_ascii=False).encode()
    (task,) = read_tasks(file(row))
    assert task.messages == (Message("user", text),)


def test_large_whole_numbers_are_exact(file):
    (task,) = read_tasks(file(b'{"prompt": "a", "answer": 123456789012345678901234567890}'))
    assert task.ground_truth == 123456789012345678901234567890


# Bad lines ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b"{", "not valid JSON: .* near '{'"),
        (b"null", "expected an object with fields, not None"),
        (b'"text"', "expected an object with fields, not 'text'"),
        (b'{"prompt": "a", "answer": NaN}', "not valid JSON: NaN is not a JSON number"),
        (b'{"prompt": "\xff", "answer": 1}', "not UTF-8: byte 0xff at byte 13"),
        ('{"prompt": "ä"}'.encode("utf-16"), "not UTF-8"),
        (b'{"prompt": "\\ud83d", "answer": 1}', "half a character"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"prompt": "a", "answer": ' + b"9" * 10_000 + b"}", "integer string conversion"),
        (b'{"prompt": "a\x00", "answer": 1}', "not valid JSON: Invalid control character"),
    ],
)
def test_a_bad_line_is_told_and_its_neighbours_live(file, line, told):
    path = file(GOOD + line + b"\n" + GOOD)
    with pytest.raises(TaskError, match=rf"tasks\.jsonl: line 2: .*{told}"):
        list(read_tasks(path))
    tasks, bad = skipped(path)
    assert [task.id for task in tasks] == ["tasks-000001", "tasks-000003"]
    assert bad[0].number == 2
    assert all(len(str(row)) < 1000 for row in bad)


def test_a_pair_of_surrogates_is_a_character(file):
    (task,) = read_tasks(file(b'{"prompt": "\\ud83d\\ude00", "answer": 1}'))
    assert task.messages[0].content == "\U0001f600"


def test_a_huge_line_is_a_bad_row_and_is_never_held_in_whole(tmp_path):
    path = tmp_path / "tasks.jsonl"
    with path.open("wb") as file:
        file.write(GOOD + b'{"prompt": "')
        for _ in range(5):
            file.write(b"a" * (MAX_LINE_BYTES // 2))
        file.write(b'", "answer": 1}\n' + GOOD)
    tracemalloc.start()
    tasks, bad = skipped(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [task.id for task in tasks] == ["tasks-000001", "tasks-000003"]
    assert bad[0].problem == "has more than 67,108,864 bytes; does it have line ends?"
    assert peak < 2.2 * MAX_LINE_BYTES


def test_lines_are_read_one_by_one(file):
    path = file((b'{"prompt": "' + b"a" * 8000 + b'", "answer": 1}\n') * 2000)
    tracemalloc.start()
    for _ in read_tasks(path):
        pass
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2_000_000  # the file has 16 MB; what stays is ids


def test_a_bad_row_behind_the_limit_is_not_met(file):
    assert len(list(read_tasks(file(GOOD * 2 + b"nonsense"), limit=2))) == 2


def test_the_limit_counts_tasks_not_rows(file):
    tasks, bad = skipped(file(b"nonsense\n" + GOOD * 3), limit=2)
    assert (len(tasks), len(bad)) == (2, 1)


# Bad files ------------------------------------------------------------------------------------------------------------


def test_a_file_that_is_missing_names_the_bundled_sets(tmp_path):
    with pytest.raises(TaskError, match=r"wordproblems: no such file; names of bundled sets: word-problems"):
        read_tasks(tmp_path / "wordproblems")


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b.jsonl"])
def test_a_name_that_no_file_can_have_is_a_missing_file(name):
    with pytest.raises(TaskError, match="no such file"):
        open_tasks(name)


def test_a_file_of_another_kind_is_told(file):
    with pytest.raises(TaskError, match=r"c\.csv: unknown file type; .*\.jsonl"):
        read_tasks(file(GOOD, "c.csv"))


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf"])
def test_an_empty_file_is_an_error(file, content):
    with pytest.raises(TaskError, match=r"tasks\.jsonl: it has no rows"):
        list(read_tasks(file(content)))


def test_a_file_of_nothing_but_bad_rows_is_an_error_even_if_they_are_skipped(file):
    with pytest.raises(TaskError, match="all 2 rows are bad"):
        skipped(file(b"x\ny\n"))


@pytest.mark.parametrize("damage", [lambda b: b[:-10], lambda b: b[:30] + b"\0" * 20 + b[50:], lambda b: b"nothing"])
def test_a_damaged_archive_is_an_error_even_if_bad_rows_are_skipped(file, damage):
    rows = b"".join(b'{"prompt": "%d", "answer": 1}\n' % number for number in range(1000))
    with pytest.raises(TaskError, match="cannot be read"):
        skipped(file(damage(gzip.compress(rows)), "t.jsonl.gz"))


@pytest.mark.parametrize("options", [{"limit": 0}, {"limit": -1}, {"on_bad_row": "ignore"}])
def test_wrong_options_are_told(file, options):
    with pytest.raises(ConfigError, match=f"{next(iter(options))}.*expected"):
        read_tasks(file(GOOD), **options)


# Ids ------------------------------------------------------------------------------------------------------------------


def test_ids_are_the_rows_own_or_of_its_index_or_of_its_place(file):
    row = {"prompt": "a", "answer": 1}
    rows = [{**row, "id": "x"}, {**row, "extra_info": {"split": "test", "index": 4}}, row]
    path = file(rows)
    ids = [task.id for task in read_tasks(path)]
    assert ids == ["x", "test-4", "tasks-000003"]
    assert [task.id for task in read_tasks(path)] == ids


def test_an_id_twice_is_a_bad_row(file):
    row = {"prompt": "a", "answer": 1, "id": "x"}
    _, bad = skipped(file([row, row]))
    assert bad[0].problem == "id: 'x' is also the id of an earlier row; ids must be unique or omitted"


def test_an_index_twice_gives_way_to_the_place(file):
    row = {"prompt": "a", "answer": 1, "extra_info": {"index": 0, "split": "train"}}
    assert [task.id for task in read_tasks(file([row, row]))] == ["train-0", "tasks-000002"]


def test_an_id_that_is_anothers_place_is_told(file):
    row = {"prompt": "a", "answer": 1}
    _, bad = skipped(file([{**row, "id": "tasks-000002"}, row, row]))
    assert "its position in the file, 'tasks-000002', is the id of an earlier row" in bad[0].problem


def test_skipping_does_not_move_ids(file):
    tasks, _ = skipped(file(GOOD + b"nonsense\n" + GOOD))
    assert [task.id for task in tasks] == ["tasks-000001", "tasks-000003"]


# Wording --------------------------------------------------------------------------------------------------------------


def test_system_and_instruction_reach_every_task(file):
    for task in read_tasks(file(GOOD * 2), system="S", instruction="I"):
        assert task.messages == (Message("system", "S"), Message("user", "a I"))


# Parquet --------------------------------------------------------------------------------------------------------------


def write_parquet(path: Path, rows: list, **options) -> Path:
    pq.write_table(pa.Table.from_pylist(rows, **options), path)
    return path


def test_rows_of_parquet_make_the_same_tasks_as_lines(file, tmp_path):
    """Though parquet fills every struct with the keys of all rows."""
    rows = [
        {
            "data_source": "d",
            "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": f"q{number}"}],
            "reward_model": {"style": "rule", "ground_truth": str(number)},
            "extra_info": {"index": number, "tools_kwargs": {tool: {"create_kwargs": {name: number}}}},
        }
        for number, (tool, name) in enumerate([("code", "x"), ("search", "y"), ("code", "z")] * 200)
    ]
    of_lines = list(read_tasks(file(rows, "t.jsonl")))
    of_parquet = list(read_tasks(write_parquet(tmp_path / "t.parquet", rows)))
    assert of_parquet == of_lines
    assert of_parquet[0].tools_kwargs == {"code": {"create_kwargs": {"x": 0}}}
    assert of_parquet[1].tools_kwargs == {"search": {"create_kwargs": {"y": 1}}}


def test_bad_rows_of_parquet_are_told_by_their_number(tmp_path):
    path = write_parquet(tmp_path / "t.parquet", [{"prompt": "a", "answer": "1"}, {"prompt": "", "answer": "1"}] * 300)
    tasks, bad = skipped(path)
    assert [row.number for row in bad] == list(range(2, 601, 2))
    assert str(bad[0]) == f"{path}: row 2: prompt: the user message is empty"
    assert tasks[-1].id == "t-000599"


def test_maps_of_parquet_are_objects(tmp_path):
    kinds = pa.schema(
        [("prompt", pa.string()), ("answer", pa.string()), ("extra_info", pa.map_(pa.string(), pa.string()))]
    )
    rows = [{"prompt": "a", "answer": "1", "extra_info": [("level", "3")]}]
    (task,) = read_tasks(write_parquet(tmp_path / "t.parquet", rows, schema=kinds))
    assert task.extra_info == {"level": "3"}


def test_a_row_of_parquet_that_cannot_be_decoded_costs_no_other(tmp_path):
    raw = pa.array([b"a", b"\xff\xfe", b"c"], pa.binary())
    prompts = pa.Array.from_buffers(pa.string(), len(raw), raw.buffers())
    pq.write_table(pa.table({"prompt": prompts, "answer": ["1", "2", "3"]}), tmp_path / "t.parquet")
    tasks, bad = skipped(tmp_path / "t.parquet")
    assert [task.ground_truth for task in tasks] == ["1", "3"]
    assert bad[0].number == 2
    assert "cannot be decoded" in bad[0].problem


@pytest.mark.parametrize("content", [b"", b"PAR1", b"nothing of the kind", b"PAR1" + b"\0" * 100 + b"PAR1"])
def test_what_is_no_parquet_is_told(file, content):
    with pytest.raises(TaskError, match=r"t\.parquet: cannot be read as parquet"):
        list(read_tasks(file(content, "t.parquet")))


def test_parquet_without_rows_is_an_error(tmp_path):
    path = write_parquet(tmp_path / "t.parquet", [], schema=pa.schema([("prompt", pa.string())]))
    with pytest.raises(TaskError, match="it has no rows"):
        list(read_tasks(path))


def test_without_pyarrow_only_parquet_fails_and_says_what_to_install(file, tmp_path):
    file(GOOD, "a.jsonl"), file(GOOD, "b.parquet")
    code = f"""
        import sys
        sys.modules["pyarrow"] = None
        from toolyard.errors import MissingDependencyError
        from toolyard.tasks.files import read_tasks
        print(len(list(read_tasks({str(tmp_path / "a.jsonl")!r}))))
        try:
            read_tasks({str(tmp_path / "b.parquet")!r})
        except MissingDependencyError as error:
            print(error)
        assert not {{"numpy", "pyarrow.lib", "torch"}} & sys.modules.keys()
    """
    run = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, check=True)
    reading = "reading and writing parquet and Arrow files"
    assert done.stdout.splitlines() == [
        "1",
        f"{reading} needs 'pyarrow', which is not installed: pip install 'toolyard[parquet]'",
    ]


# Whatever is in a file ------------------------------------------------------------------------------------------------

pieces = st.sampled_from(
    [GOOD, b"\n", b"\r", b"\xef\xbb\xbf", b"[", b"]", b"{", b"}", b'"', b",", b"1", b"\x00", b"\\ud8"]
)


@settings(max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.lists(pieces | st.binary(max_size=10), max_size=8).map(b"".join), name=st.sampled_from(["jsonl", "json"])
)
def test_whatever_bytes_a_file_has_they_are_tasks_or_a_task_error(file, content, name):
    path = file(content, f"t.{name}")
    try:
        tasks, _ = skipped(path)
    except TaskError as error:
        told = str(error)
    else:
        told, ids = None, {task.id for task in tasks}
        assert len(ids) == len(tasks) > 0
    assert told is None or told.startswith(str(path))
