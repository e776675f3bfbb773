"""Folders of data files: which files belong to a split, and in which order.

saved/dataset_dict.json, saved/train/state.json, …      written by `datasets`' save_to_disk
data/train-00000-of-00002.parquet, data/test-….parquet  as on the Hugging Face hub
mine/*.jsonl                                            all of them, if their names say no split
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, cast

from toolyard.errors import TaskError

ARROW = ".arrow"
SUFFIXES = (".parquet", ARROW, ".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
"""Data files. A .json in a folder is rather a description of it."""
_SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
"""Words in the names of files and folders, and the splits that they mean: the hub's."""
_WORDS = re.compile(r"[^a-z]+")
_DIGITS = re.compile(r"(\d+)")
_DICT, _STATE = "dataset_dict.json", "state.json"
_SHOWN = 5


class FolderFiles(NamedTuple):
    files: list[Path]
    """In their order; at least one."""
    split: str
    """Empty if the folder has none."""


def files_in(folder: Path, split: str | None) -> FolderFiles:
    """The data files of `split`, or all of them if the folder has at most one split.

    Raises:
        TaskError: there are no data files, no such split, several splits and none was chosen, or the folder has
            several data sets.
    """
    try:
        named = _saved_splits(folder)
        if named is not None:
            chosen = _choose(folder, named, split)
            return FolderFiles(_saved_files(folder / chosen) or [], chosen)
        saved = _saved_files(folder)
        if saved is not None:
            _choose(folder, [""], split)
            return FolderFiles(saved, "")
        return _plain_files(folder, split)
    except OSError as error:
        raise TaskError(f"{folder}: cannot be read: {error.strerror or error}") from None


def _plain_files(folder: Path, split: str | None) -> FolderFiles:
    by_split: dict[str, list[Path]] = {}
    for file in _data_files(folder):
        by_split.setdefault(_split_of(folder, file), []).append(file)
    if not by_split:
        raise TaskError(f"{folder}: the folder has no data files; expected {', '.join(SUFFIXES)}")
    chosen = _choose(folder, by_split, split)
    files = by_split[chosen]
    # Two configurations of one data set have the same splits, and are not one.
    places = sorted({str(file.parent.relative_to(folder)) for file in files})
    if len(places) > 1:
        raise TaskError(f"{folder}: has data in several folders; name one of them: {', '.join(places[:_SHOWN])}")
    return FolderFiles(sorted(files, key=_natural), chosen)


def _data_files(folder: Path) -> Iterable[Path]:
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "_")))
        yield from (Path(place, name) for name in names if name.lower().endswith(SUFFIXES) and name[0] not in "._")


def _split_of(folder: Path, file: Path) -> str:
    """By the file's name, otherwise by the folders it is in."""
    for part in reversed(file.relative_to(folder).parts):
        found = [_SPLITS[word] for word in _WORDS.split(part.lower()) if word in _SPLITS]
        if found:
            return found[0]
    return ""


def _choose(folder: Path, splits: Iterable[str], wanted: str | None) -> str:
    known = sorted(splits)
    told = ", ".join(name for name in known if name) or "none"
    if wanted is not None:
        chosen = wanted if wanted in known else _SPLITS.get(wanted, wanted)
        if chosen not in known:
            raise TaskError(f"{folder}: no split {wanted!r}; available: {told}")
        return chosen
    if not known:
        raise TaskError(f"{folder}: the saved data sets have no data")
    if len(known) > 1:
        raise TaskError(f"{folder}: has several splits ({told}); name one: {folder}:{known[-1]}")
    return known[0]


def _natural(path: Path) -> list[tuple[int, int | str]]:
    """part-2 before part-10."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in _DIGITS.split(str(path))]


# Saved by the library datasets ----------------------------------------------------------------------------------------


def _saved_splits(folder: Path) -> list[str] | None:
    """None: not several splits saved together."""
    said = _description(folder / _DICT)
    if said is None:
        return None
    splits = cast("list[Any]", said.get("splits") or [])
    return [split for split in splits if isinstance(split, str) and (folder / split / _STATE).is_file()]


def _saved_files(folder: Path) -> list[Path] | None:
    """None: not a saved data set.

    Raises:
        TaskError: a file is missing, or leads outside the folder.
    """
    said = _description(folder / _STATE)
    if said is None or not isinstance(said.get("_data_files"), list):
        return None
    files: list[Path] = []
    for entry in said["_data_files"]:
        name = cast("Any", entry).get("filename") if isinstance(entry, dict) else None
        if not isinstance(name, str) or Path(name).name != name or not (folder / name).is_file():
            raise TaskError(f"{folder / _STATE}: the data file {name!r} is not there")
        files.append(folder / name)
    if not files:
        raise TaskError(f"{folder}: the saved data set has no data files")
    return files


def _description(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        said: Any = json.loads(path.read_bytes())
    except ValueError as error:
        raise TaskError(f"{path}: not valid JSON: {error}") from None
    return cast("dict[str, Any]", said) if isinstance(said, dict) else None
