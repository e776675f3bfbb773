"""The rule about skipping, tried on small test suites."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from expensive import LONGEST, REPEATED

CONFTEST = Path(__file__).parent.parent / "conftest.py"


def run_suite(folder: Path, *bodies: str, ci: bool) -> subprocess.CompletedProcess[str]:
    """Each body is a file of tests."""
    shutil.copy(CONFTEST, folder)
    for number, body in enumerate(bodies):
        (folder / f"test_{number}.py").write_text(f"import pytest\n{body}")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    toolchain(name)\n    kernel(feature)\n")
    paths = filter(None, (str(CONFTEST.parent), os.environ.get("PYTHONPATH")))
    environment = {**os.environ, "CI": "true" if ci else "", "PYTHONPATH": os.pathsep.join(paths)}
    if any("toolchain" in body for body in bodies):
        environment["PATH"] = str(folder)  # where nothing is installed
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", str(folder)],
        env=environment, capture_output=True, text=True, timeout=60, cwd=folder,
    )  # fmt: skip


NO_GO = "@pytest.mark.toolchain('go')\ndef test_go(): assert False, 'it ran'\n"
NO_JULIA = "@pytest.mark.toolchain('julia')\ndef test_julia(): assert False, 'it ran'\n"
SILENT = "def test_network(): pytest.skip('the mirror is away')\n"
SILENT_FILE = "pytest.skip('not today', allow_module_level=True)\n"
NO_GPU = "@pytest.mark.skipif(True, reason='needs a GPU')\ndef test_gpu(): pass\n"
OPEN_BUG = "@pytest.mark.xfail(reason='known')\ndef test_bug(): assert False\n"


def test_on_a_laptop_all_of_them_are_skipped_and_a_missing_toolchain_says_what_to_install(tmp_path: Path) -> None:
    done = run_suite(tmp_path, NO_GO, SILENT, SILENT_FILE, ci=False)
    assert done.returncode == 0, done.stdout
    assert "3 skipped" in done.stdout
    assert "golang-go" in done.stdout


def test_a_missing_toolchain_fails_in_ci(tmp_path: Path) -> None:
    done = run_suite(tmp_path, NO_GO, ci=True)
    assert done.returncode == 1
    assert "CI must have it" in done.stdout
    assert "it ran" not in done.stdout


@pytest.mark.parametrize("body", [SILENT, SILENT_FILE], ids=["test", "file"])
def test_a_silent_skip_fails_in_ci(tmp_path: Path, body: str) -> None:
    done = run_suite(tmp_path, body, ci=True)
    assert done.returncode != 0
    assert "SKIPPED IN CI" in done.stdout


@pytest.mark.slow
def test_languages_that_we_do_not_insist_on_accepted_reasons_and_expected_failures_pass_in_ci(tmp_path: Path) -> None:
    done = run_suite(tmp_path, NO_JULIA, NO_GPU, OPEN_BUG, ci=True)
    assert done.returncode == 0, done.stdout
    assert "2 skipped, 1 xfailed" in done.stdout
    assert "SKIPPED IN CI" not in done.stdout


@pytest.mark.slow
def test_an_unknown_kernel_feature_is_an_error_and_not_a_skip(tmp_path: Path) -> None:
    done = run_suite(tmp_path, "@pytest.mark.kernel('teleport')\ndef test_it(): pass\n", ci=False)
    assert done.returncode == 1
    assert "teleport" in done.stdout


def test_make_test_runs_every_test_once_and_slow_ones_on_demand() -> None:
    for level, asked in enumerate(("", "yes", "all")):
        command = ["make", "--dry-run", "test", f"SLOW={asked}"]
        said = subprocess.run(command, cwd=CONFTEST.parent.parent, capture_output=True, text=True, check=True).stdout
        parts = re.findall(r'-m "(.*?)"', said)
        assert len(parts) == 2
        for wanted, alone in product(range(3), (True, False)):
            marks = {"slow": wanted > 0, "exhaustive": wanted > 1, "alone": alone}
            chosen = [eval(part, marks) for part in parts].count(True)
            assert chosen == (1 if level >= wanted else 0)
    # What is to be alone is looked for in one folder.
    marked = [path for path in CONFTEST.parent.rglob("test_*.py") if "pytest.mark.alone" in path.read_text()]
    assert {path.parent.name for path in marked if not path.samefile(__file__)} == {"isolation"}


def test_every_name_in_the_lists_of_long_and_repeated_tests_is_there() -> None:
    files = {path.stem: path.read_text() for path in CONFTEST.parent.rglob("test_*.py")}
    assert set(LONGEST) <= files.keys()
    for name in REPEATED:
        file, _, function = name.partition("::")
        assert f"def {function}(" in files[file], name
