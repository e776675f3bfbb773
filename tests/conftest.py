"""What all tests share: the machine's capabilities, and the rule about skipping.

A test marked `toolchain("go")` or `kernel("landlock")` is skipped with its reason on a machine without it. In CI
(CI=true) it fails instead, and so does the whole run if anything was skipped for a reason that is not accepted below:
a test that silently stopped running guards nothing.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import material
from expensive import LONGEST, REPEATED, TOGETHER
from ray_node import HOST as RAY_HOST
from ray_node import ray_node
from toolyard import settings
from toolyard.errors import ToolchainMissingError
from toolyard.sandbox import languages
from toolyard.sandbox.isolation import GUEST_MAIN, Grants, Level
from toolyard.sandbox.languages.toolchains import INSTALLED_BY

with contextlib.suppress(ModuleNotFoundError):  # not in every environment
    import hypothesis

    # No deadline per example: the machine may be slow.
    hypothesis.settings.register_profile(
        "patient",
        parent=hypothesis.settings(),
        deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.register_profile("quick", parent=hypothesis.settings.get_profile("patient"), max_examples=20)
    hypothesis.settings.load_profile("patient")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as for what a shell starts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # or all that tests start would ignore it as well

# Ray starts its workers with a niceness of 15: beside the other tests, they would get a thirtieth of a processor.
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - Ray's own name

IN_CI = os.environ.get("CI") == "true"

REQUIRED_LANGUAGES = frozenset(
    row.name for row in languages.ALL if not any("://" in INSTALLED_BY.get(name, "") for name in row.ways[0].needs)
)
"""What CI has: all but julia, lean, swift, cuda and python_gpu, which neither Debian nor npm nor PyPI has."""

_other_titles = "|".join(re.escape(row.title) for row in languages.ALL if row.name not in REQUIRED_LANGUAGES)
ACCEPTED_IN_CI = (
    re.compile(rf"^({_other_titles}) needs '"),
    re.compile(r"needs a GPU"),
    re.compile(r"(not|only as|needs) root"),
    re.compile(r"no IPv6 here"),
    re.compile(r"no Python 3\.\d+ here"),
    re.compile(r"this architecture"),
    re.compile(r"the labelled GSM8K solutions are not here"),
    re.compile(r"the engine does not promise it|the engine's context is not known"),
)
"""What no CI machine can be expected to change: hardware, the user it runs as, languages we do not insist on."""

skipped_tests = pytest.StashKey[list[tuple[str, str]]]()


@functools.cache
def machine_grants() -> Grants:
    # In a process of its own, and without an event loop: this may be asked between the tests of one.
    done = subprocess.run([sys.executable, GUEST_MAIN, "probe"], capture_output=True, check=True, timeout=60)
    return Grants.model_validate_json(done.stdout)


@pytest.fixture(scope="session")
def grants() -> Grants:
    """What the kernel lets us do here."""
    return machine_grants()


@pytest.fixture(scope="session")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables under which importing torch and other large packages fails at once, for tests that are not about them.

    `toolyard doctor` imports each extra in a process of its own, and together they take seconds.
    """
    folder = tmp_path_factory.mktemp("without-torch")
    for package in ("accelerate", "datasets", "math_verify", "matplotlib", "mcp", "torch", "transformers", "trl"):
        (folder / f"{package}.py").write_text("raise ImportError('left out')\n")
    return {"PYTHONPATH": str(folder)}


@pytest.fixture(autouse=True, scope="module")
def nothing_stays_open() -> Iterator[None]:
    """Close what sync callers of rewards opened for the process, and find limiters that a test left open: the next file
    must not share them."""
    yield
    for name in ("toolyard.rewards.blocking", "toolyard.rewards.math"):
        if name in sys.modules:
            sys.modules[name].close()
    limits = sys.modules.get("toolyard.limits.local")
    if limits is not None and limits._named:
        gc.collect()
        assert not limits._named, f"left open: limiters {', '.join(limits._named)}"


# Ray ------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    """The address of a Ray of one node, for all files that need one and kill no part of it."""
    with ray_node() as node:
        yield node.address


@pytest.fixture(scope="module")
def ray_connection(ray_address: str) -> Iterator[str]:
    """This process is connected to it, while the tests of one file run."""
    import ray

    with pytest.MonkeyPatch.context() as environment:
        environment.delenv("RAY_ADDRESS", raising=False)
        ray.init(
            ray_address, namespace="tests", log_to_driver=False, configure_logging=False, _node_ip_address=RAY_HOST
        )
        yield ray_address
        for actor in ray.util.list_named_actors(all_namespaces=True):  # or the next file finds them
            with contextlib.suppress(ValueError):  # it is gone already
                ray.kill(ray.get_actor(actor["name"], actor["namespace"]))
        ray.shutdown()


# Markers --------------------------------------------------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("toolchain"):
        for name in marker.args:
            _insist(_why_no_toolchain(name), required=name in REQUIRED_LANGUAGES)
    if item.get_closest_marker("material"):
        _insist(material.missing(), required=True)
    for marker in item.iter_markers("kernel"):
        for feature in marker.args:
            _insist(_why_not_granted(feature), required=True)


def _insist(reason: str | None, *, required: bool) -> None:
    if reason is None:
        return
    if IN_CI and required:
        pytest.fail(f"CI must have it: {reason}", pytrace=False)
    pytest.skip(reason)


def _why_no_toolchain(name: str) -> str | None:
    try:
        languages.resolve(languages.find_language(name), settings.search_path())
    except ToolchainMissingError as error:
        return str(error)
    return None


def _why_not_granted(feature: str) -> str | None:
    """`feature`: one that is probed ("landlock", "user namespace", …), or a level: "full", "namespaces", "confined"."""
    found = machine_grants()
    if feature in found.features:
        reason = found.features[feature]
        return f"{feature}: {reason}" if reason else None
    order = [Level.NONE, Level.CONFINED, Level.NAMESPACES, Level.FULL]
    wanted = Level(feature)
    if order.index(found.level) >= order.index(wanted):
        return None
    return f"isolation {wanted.value}, but this machine grants {found.level.value}: {found.missing}"


# The order of files ---------------------------------------------------------------------------------------------------


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadFileScheduling

    class Sharing(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return next((scope for scope, files in TOGETHER.items() if Path(file).stem in files), file)

    return Sharing(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        # Of a suite that is run against several implementations, an expensive one names those that CI runs, too.
        quick = getattr(getattr(item, "cls", None), "quick_tests", None)
        if quick is not None and getattr(item, "originalname", None) not in quick:
            item.add_marker(pytest.mark.exhaustive)
    seen = Counter[str]()
    for item in items:
        if item.get_closest_marker("exhaustive") is not None:
            item.add_marker(pytest.mark.slow)
        name = f"{item.path.stem}::{getattr(item, 'originalname', '')}"
        if item.get_closest_marker("slow") is None:
            seen[name] += 1
            few = REPEATED.get(name, len(items))
            if seen[name] > few:
                item.add_marker(pytest.mark.slow)
            # CI tries every attack at every level.
            if seen[name] > max(few, 1) and item.path.parent.name != "isolation":
                item.add_marker(pytest.mark.exhaustive)
    if hasattr(config, "workerinput"):  # one of several processes, which get one file after the other
        items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))


# No silent skips in CI ------------------------------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    config.stash[skipped_tests] = []
    config.pluginmanager.register(_Skipped(config.stash[skipped_tests]))


class _Skipped:
    """Hears of every report, also of those that come from other processes."""

    def __init__(self, found: list[tuple[str, str]]) -> None:
        self._found = found

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._remember(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._remember(report)

    def _remember(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail") and isinstance(report.longrepr, tuple):
            self._found.append((report.nodeid, str(report.longrepr[2]).removeprefix("Skipped: ")))


def unaccepted(config: pytest.Config) -> list[tuple[str, str]]:
    if not IN_CI:
        return []
    return [
        (test, reason)
        for test, reason in config.stash[skipped_tests]
        if not any(pattern.search(reason) for pattern in ACCEPTED_IN_CI)
    ]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if unaccepted(session.config) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for test, reason in unaccepted(config):
        terminalreporter.write_line(f"SKIPPED IN CI, which is a failure: {test}: {reason}", red=True)
