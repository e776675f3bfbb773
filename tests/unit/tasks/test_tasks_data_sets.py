"""Tasks from folders of data files, from what `datasets` saved, and from the Hugging Face hub.

Tests cannot reach the hub. What `datasets.load_dataset` would return is made here; everything around it is ours.
"""

from __future__ import annotations

import gzip
import json
import socket
import sys
import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from patience import patient
from toolyard.errors import MissingDependencyError, TaskError
from toolyard.tasks import hub_datasets
from toolyard.tasks.files import open_tasks, read_tasks
from toolyard.tasks.prepare import prepare_gsm8k


def rows(*numbers: int) -> list[dict[str, Any]]:
    return [{"question": f"{number} + 0?", "answer": f"#### {number}"} for number in numbers]


def write(path: Path, found: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        from toolyard.tasks.parquet_pyarrow import write_parquet

        write_parquet(path, found)
        return path
    text = "".join(json.dumps(row) + "\n" for row in found).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def truths(source: object, **options: Any) -> list[str]:
    return [task.ground_truth for task in open_tasks(str(source), **options)]


# Folders --------------------------------------------------------------------------------------------------------------


def test_all_files_of_a_folder_are_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for number in (10, 2, 1):
        write(tmp_path / f"part-{number}.jsonl", rows(number, 100 * number))
    write(tmp_path / "part-3.parquet", rows(3))
    write(tmp_path / "part-4.jsonl.gz", rows(4))
    (tmp_path / "README.md").write_text("not data")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / ".hidden.jsonl").write_text("not a row")
    assert truths(tmp_path) == ["1", "100", "2", "200", "3", "4", "10", "1000"]
    ids = [task.id for task in read_tasks(tmp_path)]
    assert ids[:3] == [f"{tmp_path.name}-{place:06d}" for place in (1, 2, 3)]
    assert len(set(ids)) == len(ids)


def test_a_bad_row_is_named_by_its_file_and_line(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", rows(1, 2))
    write(tmp_path / "b.jsonl", [*rows(3), {"what": "?"}])
    with pytest.raises(TaskError, match=rf"^{tmp_path}/b\.jsonl: line 2: it has neither"):
        truths(tmp_path)


@pytest.mark.parametrize(
    "layout",
    [
        {"train": "data/train-00000-of-00001.parquet", "test": "data/test-00000-of-00001.parquet"},
        {"train": "train.jsonl", "test": "test.jsonl"},
        {"train": "train/0.jsonl", "test": "test/0.jsonl"},
        {"train": "gsm8k_train.jsonl", "test": "gsm8k_eval.jsonl"},
    ],
)
def test_splits_are_found_as_on_the_hub(tmp_path: Path, layout: dict[str, str]) -> None:
    write(tmp_path / layout["train"], rows(1))
    write(tmp_path / layout["test"], rows(2))
    assert truths(f"{tmp_path}:train") == ["1"]
    assert truths(f"{tmp_path}:test") == ["2"]
    assert next(read_tasks(f"{tmp_path}:test")).id == f"{tmp_path.name}-test-000001"
    with pytest.raises(TaskError, match=rf"has several splits \(test, train\); name one: {tmp_path}:train"):
        read_tasks(tmp_path)
    with pytest.raises(TaskError, match="no split 'dev'; available: test, train"):
        read_tasks(f"{tmp_path}:dev")


def test_the_only_split_needs_no_name(tmp_path: Path) -> None:
    write(tmp_path / "validation.jsonl", rows(5))
    assert truths(tmp_path) == truths(f"{tmp_path}:val") == ["5"]


def test_two_configurations_of_a_data_set_are_not_mixed(tmp_path: Path) -> None:
    for name in ("main", "socratic"):
        write(tmp_path / name / "test-00000.jsonl", rows(1))
    with pytest.raises(TaskError, match="has data in several folders; name one of them: main, socratic"):
        read_tasks(tmp_path)
    assert truths(tmp_path / "main") == ["1"]


def test_a_file_with_a_colon_in_its_name_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    write(tmp_path / "x:test.jsonl", rows(7))
    assert truths(tmp_path / "x:test.jsonl") == ["7"]


def test_an_empty_folder_says_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"the folder has no data files; expected \.parquet"):
        read_tasks(tmp_path)


def test_a_folder_is_streamed(tmp_path: Path) -> None:
    padding = "x" * 100_000
    for part in range(4):
        write(tmp_path / f"{part}.jsonl", [{**row, "padding": padding} for row in rows(*range(100))])
    tracemalloc.start()
    try:
        count = sum(1 for _ in read_tasks(tmp_path))
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == 400
    assert most < 10_000_000  # all rows have 40 MB


# Saved by `datasets` --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """By the library itself: one data set in two shards, two splits together, and one that was filtered."""
    datasets: Any = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    folder = tmp_path_factory.mktemp("saved")
    whole = datasets.Dataset.from_list(rows(*range(600)))
    whole.save_to_disk(folder / "one", num_shards=2)
    datasets.DatasetDict({"train": whole, "test": whole.select(range(2))}).save_to_disk(folder / "both")
    whole.select([5, 3]).save_to_disk(folder / "selected")
    return folder


def test_a_saved_data_set_is_read_without_the_library(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert truths(saved / "one") == [str(number) for number in range(600)]
    assert truths(f"{saved / 'both'}:test") == ["0", "1"]
    assert truths(saved / "both" / "test") == ["0", "1"]
    assert truths(saved / "selected") == ["5", "3"]
    with pytest.raises(TaskError, match=r"has several splits \(test, train\)"):
        read_tasks(saved / "both")
    with pytest.raises(TaskError, match="no split 'train'; available: none"):
        read_tasks(f"{saved / 'one'}:train")


def test_an_arrow_file_can_be_read_alone(saved: Path) -> None:
    assert len(truths(saved / "one" / "data-00001-of-00002.arrow")) == 300


def test_damaged_saves_are_refused(saved: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(saved / "one", tmp_path / "a")
    (tmp_path / "a" / "data-00000-of-00002.arrow").unlink()
    with pytest.raises(TaskError, match=r"the data file 'data-00000-of-00002.arrow' is not there"):
        read_tasks(tmp_path / "a")
    (tmp_path / "a" / "state.json").write_text("{")
    with pytest.raises(TaskError, match=r"state\.json: not valid JSON"):
        read_tasks(tmp_path / "a")
    (tmp_path / "a" / "state.json").write_text(json.dumps({"_data_files": [{"filename": "../one.arrow"}]}))
    with pytest.raises(TaskError, match="is not there"):
        read_tasks(tmp_path / "a")
    whole = (saved / "one" / "data-00001-of-00002.arrow").read_bytes()
    (tmp_path / "half.arrow").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TaskError, match="cannot be read as Arrow"):
        truths(tmp_path / "half.arrow")


# Fields ---------------------------------------------------------------------------------------------------------------


def test_fields_of_rows_can_be_renamed(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [{"problem": "6 * 7?", "solution": "by hand", "answer": "42"}])
    [task] = open_tasks(file, fields={"prompt": "problem"})
    assert (task.messages[0].content, task.ground_truth) == ("6 * 7?", "42")
    assert dict(task.extra_info) == {"solution": "by hand"}
    with pytest.raises(
        TaskError, match=r"line 1: it has no field 'problems' to rename; fields: problem, solution, answer"
    ):
        list(open_tasks(file, fields={"prompt": "problems"}))


# The hub --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("hf://openai/gsm8k", ("openai/gsm8k", None, None, None)),
        ("hf://openai/gsm8k/main:test", ("openai/gsm8k", None, "main", "test")),
        ("hf://openai/gsm8k:test", ("openai/gsm8k", None, None, "test")),
        ("hf://datasets/openai/gsm8k@v1.0/main", ("openai/gsm8k", "v1.0", "main", None)),
        ("hf://openai/gsm8k@refs/convert/parquet:test", ("openai/gsm8k", "refs/convert/parquet", None, "test")),
        ("hf://openai/gsm8k@refs/pr/3/main", ("openai/gsm8k", "refs/pr/3", "main", None)),
        ("hf://HuggingFaceH4/MATH-500:test", ("HuggingFaceH4/MATH-500", None, None, "test")),
    ],
)
def test_names_on_the_hub(source: str, expected: tuple[str | None, ...]) -> None:
    assert hub_datasets.parse_name(source) == expected


@pytest.mark.parametrize(
    "source", ["hf://", "hf://gsm8k", "hf://a/b/c/d", "hf://a/b:x:y", "hf://a/../../b", "hf://a/b?x"]
)
def test_other_names_are_refused(source: str) -> None:
    with pytest.raises(TaskError, match=r"expected hf://OWNER/NAME\[@REVISION\]\[/CONFIG\]\[:SPLIT\]"):
        open_tasks(source)


class Hub:
    """In place of `datasets` and `huggingface_hub`, at the two calls that Toolyard makes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, found: Any, *, offline: bool = False) -> None:
        self.found, self.asked, self.checked = found, list[Any](), list[Any]()
        errors = SimpleNamespace(RepositoryNotFoundError=KeyError, RevisionNotFoundError=IndexError)
        hub = SimpleNamespace(
            constants=SimpleNamespace(HF_HUB_OFFLINE=offline, ENDPOINT="https://hub.example"),
            HfApi=lambda: SimpleNamespace(dataset_info=self._info),
            errors=errors,
        )
        monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=self._load))  # type: ignore
        monkeypatch.setitem(sys.modules, "huggingface_hub", hub)  # type: ignore

    def _info(self, name: str, **options: Any) -> None:
        self.checked.append((name, options))

    def _load(self, name: str, config: str | None = None, **options: Any) -> Any:
        self.asked.append((name, config, options))
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


def test_a_data_set_of_the_hub_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    def stream() -> Any:
        for number in range(10**9):
            taken.append(number)
            yield rows(number)[0]

    hub = Hub(monkeypatch, stream())
    tasks = list(open_tasks("hf://openai/gsm8k@abc/main:test", limit=3))
    assert [task.ground_truth for task in tasks] == ["0", "1", "2"]
    assert [task.id for task in tasks] == [f"gsm8k-main-test-{place:06d}" for place in (1, 2, 3)]
    assert len(taken) == 3
    assert hub.asked == [("openai/gsm8k", "main", {"split": "test", "revision": "abc", "streaming": True})]
    assert hub.checked == [("openai/gsm8k", {"revision": "abc", "timeout": 10.0})]


def test_the_data_source_is_the_name_on_the_hub_by_which_rewards_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"prompt": "6 * 7?", "answer": "42"}
    Hub(monkeypatch, [row, {**row, "data_source": "mine"}])
    found = [task.data_source for task in open_tasks("hf://HuggingFaceH4/MATH-500:test")]
    assert found == ["HuggingFaceH4/MATH-500", "mine"]


def test_without_a_split_the_only_one_is_taken_and_several_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    Hub(monkeypatch, {"train": rows(1)})
    assert truths("hf://a/b") == ["1"]
    Hub(monkeypatch, {"train": rows(1), "test": rows(2)})
    with pytest.raises(TaskError, match=r"hf://a/b: has several splits; .*available: test, train"):
        open_tasks("hf://a/b")


def test_offline_the_cache_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(monkeypatch, rows(1), offline=True)
    assert truths("hf://a/b:test") == ["1"]
    assert hub.checked == []
    assert hub.asked[0][2]["streaming"] is False
    Hub(monkeypatch, ConnectionError("Couldn't reach it"), offline=True)
    with pytest.raises(TaskError, match="HF_HUB_OFFLINE is set, and it is not in the cache"):
        open_tasks("hf://a/b:test")


def test_what_goes_wrong_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    Hub(monkeypatch, ValueError("Unknown split 'tset'.\nShould be one of ['test']."))
    with pytest.raises(TaskError, match=r"^hf://a/b:tset: ValueError: Unknown split 'tset'\. Should be one of"):
        open_tasks("hf://a/b:tset")

    def broken() -> Any:
        yield rows(1)[0]
        raise OSError("connection lost")

    Hub(monkeypatch, broken())
    reader = open_tasks("hf://a/b:test")
    assert next(reader).ground_truth == "1"
    with pytest.raises(TaskError, match="reading stopped: OSError: connection lost"):
        next(reader)


def test_a_data_set_that_is_not_there_says_how_to_log_in(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(monkeypatch, rows(1))

    def missing(name: str, **_: Any) -> None:
        raise KeyError(name)

    monkeypatch.setattr(hub, "_info", missing)
    with pytest.raises(TaskError, match="no such data set or revision, or it is private: `hf auth login`"):
        open_tasks("hf://a/b")


def test_a_hub_that_cannot_be_reached_is_an_error_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real libraries, and an address where nobody listens."""
    pytest.importorskip("datasets")
    constants: Any = pytest.importorskip("huggingface_hub").constants
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{nobody.getsockname()[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", address)
    began = time.monotonic()
    with pytest.raises(TaskError, match=rf"{address} cannot be asked: .*Without the hub, name a local folder"):
        open_tasks("hf://openai/gsm8k/main:test")
    assert time.monotonic() - began < patient(30)


def test_without_the_library_the_pip_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingDependencyError, match=r"hf://a/b needs 'datasets'.*pip install 'toolyard\[datasets\]'"):
        open_tasks("hf://a/b")


def test_a_data_set_of_the_hub_can_be_prepared_for_verl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Hub(monkeypatch, rows(1, 2))
    done = prepare_gsm8k("hf://openai/gsm8k/main:test", tmp_path / "out.jsonl")
    assert done.written == 2
    assert json.loads((tmp_path / "out.jsonl").read_text().splitlines()[0])["extra_info"]["split"] == "gsm8k-main-test"
