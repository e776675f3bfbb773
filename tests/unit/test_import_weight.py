"""`import toolyard` costs next to nothing; each measurement is made in a fresh interpreter."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import toolyard
from patience import processor_time

HEAVY = {
    "torch", "ray", "transformers", "trl", "verl", "mcp", "textual", "starlette", "uvicorn", "prometheus_client",
    "numpy", "aiohttp", "pydantic", "rich", "typer", "asyncio",
}  # fmt: skip


def loaded_by(statement: str) -> set[str]:
    code = f"{statement}\nimport json, sys\nprint(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60)
    return set(json.loads(done.stdout))


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert not HEAVY & loaded_by("import toolyard")


def test_importing_the_package_takes_next_to_no_time() -> None:
    code = "import time; start = time.process_time(); import toolyard; print(time.process_time() - start)"
    # Processor time, the best of three: a busy machine must not fail this.
    seconds = min(
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60).stdout)
        for _ in range(3)
    )
    assert seconds < processor_time(0.1)


def test_the_entry_point_loads_next_to_nothing_so_that_ctrl_c_is_handled_from_the_start() -> None:
    assert loaded_by("import toolyard.cli.main") - loaded_by("from __future__ import annotations") == {
        "toolyard",
        "toolyard._lazy",
        "toolyard.cli",
        "toolyard.cli.main",
    }


def test_the_commands_help_does_not_load_the_sandbox() -> None:
    loaded = loaded_by("import toolyard.cli.app")
    assert not {"toolyard.sandbox.local", "aiohttp", "asyncio", "pydantic", "uvicorn", "rich.table"} & loaded


def test_the_embedded_sandbox_needs_no_extra() -> None:
    extras = {"starlette", "uvicorn", "uvloop", "prometheus_client", "numpy", "torch", "ray", "aiohttp"}
    assert not extras & loaded_by("from toolyard import LocalSandbox")


@pytest.mark.parametrize("name", toolyard.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(toolyard, name) is not None


def test_the_package_lists_exactly_its_public_names() -> None:
    assert dir(toolyard) == sorted(toolyard.__all__)


def test_an_unknown_name_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = toolyard.no_such_name
