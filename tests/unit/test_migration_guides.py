"""The tables of names in the migration guides: what stands on our side exists."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

from toolyard.tools.verl_names import TOOLS

DOCS = Path(__file__).parents[2] / "docs"
GUIDE = (DOCS / "migrating_from_verl.md").read_text()
NAMES: list[tuple[str, str]] = re.findall(r"^\| `(verl\.[\w.]+)` \| `(toolyard\.[\w.]+)` \|$", GUIDE, re.MULTILINE)


def test_there_are_names() -> None:
    assert len(NAMES) > 15
    assert len(dict(NAMES)) == len(NAMES)


@pytest.mark.parametrize(("theirs", "ours"), NAMES)
def test_every_name_on_our_side_can_be_imported(theirs: str, ours: str) -> None:
    module, _, name = ours.rpartition(".")
    assert hasattr(import_module(module), name)
    assert name in ("MCPTool", theirs.rpartition(".")[2])


def test_the_guide_has_every_class_that_tool_files_may_name() -> None:
    assert TOOLS.items() <= dict(NAMES).items()


@pytest.mark.parametrize("guide", ["migrating_from_verl.md", "migrating_from_sandbox_fusion.md"])
def test_links_lead_somewhere(guide: str) -> None:
    for target in re.findall(r"\]\(([\w-]+\.md)(?:#[\w-]+)?\)", (DOCS / guide).read_text()):
        assert (DOCS / target).is_file(), target
