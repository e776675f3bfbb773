"""The help of every command, as `toolyard … --help` prints it."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import redirect_stdout
from typing import Any

import pytest

from toolyard.cli.app import command


def commands(root: Any, *path: str) -> Iterator[tuple[str, ...]]:
    yield path
    for name, inner in getattr(root, "commands", {}).items():
        yield from commands(inner, *path, name)


ALL = [*commands(command())]


def test_there_are_commands_to_look_at() -> None:
    assert len(ALL) > 20
    assert ("sandbox", "run") in ALL


@pytest.mark.parametrize("path", ALL, ids=lambda path: " ".join(path) or "toolyard")
def test_flags_do_not_look_as_if_they_took_a_value(path: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    with redirect_stdout(io.StringIO()) as shown:
        command().main([*path, "--help"], prog_name="toolyard", standalone_mode=False)
    said = shown.getvalue()
    assert "--help" in said
    assert "bool" not in said.lower()
