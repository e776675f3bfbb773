"""Small dumps for tests of the viewer's library."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from toolyard.records.lines import to_line
from toolyard.records.trajectory import Trajectory
from toolyard.viewer.library import Library
from toolyard.viewer.query import parse_query
from trajectory_samples import good_trajectory


def small(seed: int, **changes) -> Trajectory:
    return replace(good_trajectory(seed, turns=1, tokens=3), **changes)


def verl_line(**fields) -> bytes:
    return json.dumps(
        {"input": "user\nHow many?\nassistant\n", "output": "7", "score": 0.5, "step": 1} | fields
    ).encode()


def write(path: Path, *trajectories: Trajectory) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(map(to_line, trajectories)))


def replaced(path: Path, seeds: range) -> None:
    """By another file of the same name."""
    write(path.with_name("new"), *map(small, seeds))
    path.with_name("new").rename(path)


def append(path: Path, text: bytes) -> None:
    with path.open("ab") as file:
        file.write(text)


def dump_of(folder: Path, count: int, files: int = 4) -> list[str]:
    """The ids of its requests, in their order."""
    size = -(-count // files)
    for file in range(files):
        write(folder / f"{file}.jsonl", *map(small, range(file * size, min(count, (file + 1) * size))))
    return [f"request-{seed}" for seed in range(count)]


def ids(library: Library, query: str = "") -> list[str]:
    return [row.request_id for row in library.rows(parse_query(query), limit=1_000_000)]


def index_folder(folder: Path) -> Path:
    (found,) = (path for path in (folder / ".toolyard-index").iterdir() if path.is_dir())
    return found
