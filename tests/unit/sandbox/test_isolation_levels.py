"""Which isolation level a machine supports, and when the sandbox refuses to open."""

import platform
import re
from pathlib import Path

import pytest

from toolyard.errors import IsolationError, SandboxError
from toolyard.sandbox.guest import seccomp
from toolyard.sandbox.isolation import Grants, Level, Python, choose_level, probe

FEATURES = (
    "user namespace", "mount namespace", "pid namespace", "network namespace", "ipc namespace", "uts namespace",
    "private root", "landlock", "seccomp", "own user id", "cgroup",
)  # fmt: skip


def grants(*missing: str) -> Grants:
    features = {name: "refused" if name in missing else "" for name in FEATURES}
    python = Python(executable="/usr/bin/python3", version="3.11", prefixes=("/usr",))
    return Grants(features=features, cgroup=None, landlock_abi=6, root=False, python=python)


@pytest.mark.parametrize(
    ("missing", "level"),
    [
        ((), Level.FULL),
        (("cgroup", "own user id"), Level.FULL),
        (("landlock",), Level.NAMESPACES),
        (("seccomp",), Level.NAMESPACES),
        (("user namespace",), Level.CONFINED),
        (("private root",), Level.CONFINED),
        (("pid namespace", "landlock"), Level.NONE),
    ],
)
def test_a_level_is_named_after_what_is_missing(missing: tuple[str, ...], level: Level):
    assert grants(*missing).level is level


def test_required_refuses_everything_below_full_and_says_why():
    with pytest.raises(IsolationError, match=r"supports only 'confined' \(user namespace: refused.*toolyard doctor"):
        choose_level(grants("user namespace"), "required")


def test_no_isolation_at_all_is_refused_unless_asked_for_by_name():
    with pytest.raises(IsolationError, match="isolation='none'"):
        choose_level(grants("user namespace", "landlock"), "best")
    assert choose_level(grants("user namespace", "landlock"), "none") is Level.NONE


def test_confined_needs_something_that_keeps_signals_inside():
    """Else a program could kill whatever its user runs: an own user id, or a Landlock that knows of signals."""
    container = grants("user namespace")
    old = container.model_copy(update={"landlock_abi": 5})
    assert old.level is Level.NONE
    assert old.model_copy(update={"root": True}).level is Level.CONFINED
    with pytest.raises(IsolationError, match="Landlock 5"):
        choose_level(old, "confined")


def test_confined_needs_something_that_limits_the_processes_of_a_shared_user():
    """The kernel's limit does not bind root: where programs keep root's id, only a cgroup counts them."""
    root = grants("user namespace", "own user id").model_copy(update={"root": True})
    assert root.level is Level.CONFINED
    unlimited = root.model_copy(update={"limits_processes": False})
    assert unlimited.level is Level.NONE
    with pytest.raises(IsolationError, match="own user id: refused"):
        choose_level(unlimited, "confined")


def test_confined_is_refused_where_landlock_or_seccomp_is_missing():
    for missing in ("landlock", "seccomp"):
        with pytest.raises(IsolationError, match=f"{missing}: refused"):
            choose_level(grants(missing), "confined")


async def test_an_interpreter_that_is_not_there_is_named():
    with pytest.raises(SandboxError, match="/no/such/python"):
        await probe("/no/such/python")


async def test_an_interpreter_that_is_none_is_told_by_what_it_said():
    with pytest.raises(SandboxError, match="/bin/false"):
        await probe("/bin/false")


HEADERS = {  # by architecture: its column in the tables, and where the kernel's numbers are
    "x86_64": (0, Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")),
    "aarch64": (1, Path("/usr/include/asm-generic/unistd.h")),
}


def test_the_filters_numbers_are_the_kernels():
    column, header = HEADERS[platform.machine()]
    if not header.exists():
        pytest.skip("linux headers are not installed")
    known = {name: int(number) for name, number in re.findall(r"#define __NR_(\w+)\s+(\d+)", header.read_text())}
    table = {**seccomp._REFUSED, **seccomp._ABSENT, **seccomp._TIMES, **seccomp._MODES, **seccomp._ATTRIBUTES}
    wrong = {name: row[column] for name, row in table.items() if known.get(name, row[column]) != row[column]}
    assert not wrong
    assert sum(name in known for name in table) > 70


def test_no_two_refused_calls_share_a_number():
    for column in (0, 1):
        numbers = [row[column] for row in {**seccomp._REFUSED, **seccomp._ABSENT}.values() if row[column] is not None]
        assert len(numbers) == len(set(numbers))
