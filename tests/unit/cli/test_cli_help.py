"""The help of every command, as `toolyard … --help` prints it."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from enum import Enum
from pathlib import Path
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


def test_the_docs_of_the_service_name_every_option_with_its_default() -> None:
    page = (Path(__file__).parents[3] / "docs" / "service.md").read_text()
    told = dict(re.findall(r"^\| `(--[\w-]+)` \| (.*?) \|", page, re.MULTILINE))
    found: dict[str, str] = {}
    for option in command().commands["sandbox"].commands["serve"].params:
        default = option.default.value if isinstance(option.default, Enum) else option.default
        found[option.opts[0]] = f"{default:g}" if isinstance(default, float) else str(default)
    own_words = {
        "--workers": "one per processor",
        "--python": "Toolyard's own",
        "--allow-remote": "off",
        "--gpu": "off",
    }
    assert told == {name: own_words.get(name, default).replace("None", "none") for name, default in found.items()}
