"""What is published: the sdist and the wheel, built from a clean checkout and installed into fresh environments.

The tests of the running Python need no network: its environments take what the wheel depends on, and nothing else, from
the environment that runs the tests. The matrix of all supported Pythons installs with pip.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from toolyard import __version__
from toolyard.testing.engine.servers import OPENAI, EngineServer

ROOT = Path(__file__).parents[2]
GUEST_LIBRARY = "toolyard/sandbox/guest/native/guest.so"
SECONDS = 300
TO_RUN_PROGRAMS = ("awk", "bash", "env", "grep", "head", "sh", "sleep", "sort", "tr", "uniq", "wc")
SUPPORTED = sorted(
    re.findall(r"Programming Language :: Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text()),
    key=lambda version: int(version.partition(".")[2]),
)

pytestmark = pytest.mark.timeout(SECONDS * 2)


def run(*command: str | Path, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Without the checkout's `src` on its path."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**inherited, **env},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


def succeeded(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, f"{done.args}\n{done.stdout}\n{done.stderr}"
    return done.stdout


# What is built --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    """The files of a clean checkout, with what is about to be committed."""
    if not (ROOT / ".git").exists():
        pytest.skip("this is no git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def without_compiler(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PATH with what small programs use, and no compiler."""
    folder = tmp_path_factory.mktemp("bin")
    for name in TO_RUN_PROGRAMS:
        found = shutil.which(name)
        assert found, f"{name} is not on PATH"
        (folder / name).symlink_to(found)
    return str(folder)


@pytest.fixture(scope="module")
def sdist(tracked: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkout = tmp_path_factory.mktemp("checkout")
    for name in tracked:
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, checkout / name)
    return build("sdist", checkout, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheels(sdist: Path, without_compiler: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Built from the sdist, as pip does it: on a machine with a C compiler, and on one without."""
    made: dict[str, Path] = {}
    for kind, env in (("with a compiler", {}), ("without a compiler", {"PATH": without_compiler})):
        source = tmp_path_factory.mktemp("source")
        with tarfile.open(sdist) as opened:
            opened.extractall(source, filter="data")
        [unpacked] = source.iterdir()
        made[kind] = build("wheel", unpacked, tmp_path_factory.mktemp("wheel"), **env)
    return made


def build(target: str, checkout: Path, into: Path, **env: str) -> Path:
    succeeded(run(sys.executable, "-m", "hatchling", "build", "-t", target, "-d", into, cwd=checkout, **env))
    [built] = into.iterdir()
    return built


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as opened:
        return {name for name in opened.namelist() if not name.endswith("/")}


def test_the_sdist_holds_the_checkout_and_nothing_else(sdist: Path, tracked: list[str]) -> None:
    with tarfile.open(sdist) as opened:
        found = {member.name.partition("/")[2] for member in opened.getmembers() if member.isfile()}
    assert found == {*tracked, "PKG-INFO"}


@pytest.mark.toolchain("c")
def test_the_wheel_holds_the_package_its_c_library_and_nothing_else(
    wheels: dict[str, Path], tracked: list[str]
) -> None:
    package = {name.removeprefix("src/") for name in tracked if name.startswith("src/toolyard/")}
    about = {
        f"toolyard-{__version__}.dist-info/{name}"
        for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")
    }
    assert {
        "toolyard/py.typed",
        "toolyard/viewer/web/static/index.html",
        "toolyard/sandbox/guest/native/guest.c",
    } <= package
    assert names_in(wheels["with a compiler"]) == package | about | {GUEST_LIBRARY}
    assert names_in(wheels["without a compiler"]) == package | about


@pytest.mark.toolchain("c")
def test_only_a_wheel_with_the_c_library_is_tied_to_a_platform_and_none_to_a_python(wheels: dict[str, Path]) -> None:
    machine = os.uname().machine
    assert wheels["with a compiler"].name == f"toolyard-{__version__}-py3-none-linux_{machine}.whl"
    assert wheels["without a compiler"].name == f"toolyard-{__version__}-py3-none-any.whl"


def test_the_wheel_is_small(wheels: dict[str, Path]) -> None:
    assert max(wheel.stat().st_size for wheel in wheels.values()) < 2_000_000


def test_the_metadata_names_every_extra_and_supported_python(wheels: dict[str, Path]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    with zipfile.ZipFile(wheels["without a compiler"]) as opened:
        metadata = opened.read(f"toolyard-{__version__}.dist-info/METADATA").decode()
    assert set(re.findall(r"^Provides-Extra: (.+)$", metadata, re.MULTILINE)) == project["optional-dependencies"].keys()
    assert re.findall(r"^Classifier: .* :: (3\.\d+)$", metadata, re.MULTILINE) == SUPPORTED
    assert f"Requires-Python: >={SUPPORTED[0]}\n" in metadata


# What a new user gets -------------------------------------------------------------------------------------------------


class Environment:
    """A virtual environment with a wheel of ours, and a folder to work in."""

    def __init__(self, folder: Path, python: str | Path = sys.executable) -> None:
        self.bin = folder / "venv" / "bin"
        self.work = folder / "work"
        self.work.mkdir(parents=True)
        succeeded(run(python, "-m", "venv", "--without-pip", folder / "venv", cwd=folder))

    @property
    def site_packages(self) -> Path:
        [found] = self.bin.parent.glob("lib/python3*/site-packages")
        return found

    def toolyard(self, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        return run(self.bin / "toolyard", *args, cwd=self.work, **env)


def install(environment: Environment, *what: str | Path, **env: str) -> None:
    """With the pip of the running environment, under the other's Python: a pip in each would take longer than ours."""
    pip = ("-m", "pip", "--python", environment.bin / "python", "install", "--quiet", "--disable-pip-version-check")
    succeeded(run(sys.executable, *pip, "--no-compile", *what, cwd=environment.work, **env))  # few modules are imported


def installed_offline(folder: Path, wheel: Path, extra: str = "") -> Environment:
    """Gives it what the wheel needs from the running environment, by links."""
    environment = Environment(folder)
    install(environment, "--no-deps", "--no-index", wheel)
    for distribution in needed("toolyard", extra):
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}:
            place = environment.site_packages / top
            if not place.exists():
                place.symlink_to(Path(str(distribution.locate_file(top))))
    return environment


def needed(name: str, extra: str) -> Iterator[importlib.metadata.Distribution]:
    """What that distribution depends on, all the way down."""
    seen, waiting = {(name, extra)}, [(name, extra)]
    while waiting:
        name, extra = waiting.pop()
        distribution = importlib.metadata.distribution(name)
        if name != "toolyard":
            yield distribution
        for requirement in map(Requirement, distribution.requires or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                found = canonicalize_name(requirement.name)
                wanted = {(found, extra) for extra in ("", *requirement.extras)} - seen
                seen |= wanted
                waiting += wanted


def check_tour(environment: Environment, **env: str) -> None:
    """What the tour needs and this PATH lacks is left out, and the rest ends as it should."""
    done = environment.toolyard("sandbox", "tour", **env)
    if "the machine is too busy" in done.stdout:  # and the program can be run again, it says
        done = environment.toolyard("sandbox", "tour", **env)
    said = succeeded(done)
    assert re.search(r"✔  Python, well behaved +Python +ok ", said), said
    assert re.search(r"✔  Fork bomb ", said), said
    assert "All ended as expected." in said


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """A model that computes with its tool, then says what it got."""
    last = request["messages"][-1]
    if last["role"] == "tool":
        return {"role": "assistant", "content": f"#### {last['content'].strip()}"}
    call = {"name": "code_interpreter", "arguments": json.dumps({"code": "print(6 * 7)"})}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": call}]}


async def check_rollout_at_a_server(environment: Environment, **env: str) -> None:
    async with EngineServer((OPENAI,), chat=answer) as server:
        ask = ("rollout", "--engine", "openai", "--url", server.url, "--model", "m", "--limit", "2", "-n", "1")
        done = await asyncio.to_thread(environment.toolyard, *ask, "--out", "served", **env)
    assert "accounting: 2 planned = 2 in the dump + 0 missing" in succeeded(done)
    lines = [json.loads(line) for line in (environment.work / "served" / "0.jsonl").read_text().splitlines()]
    assert [line["messages"][-1]["content"] for line in lines] == ["#### 42", "#### 42"]


def check_help_without_torch(environment: Environment) -> None:
    done = environment.toolyard("rollout")
    assert done.returncode == 1
    assert "pip install 'toolyard[hf]', or sample from a server: --engine openai" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.toolchain("c")
async def test_the_core_runs_the_tour_and_rollouts_at_a_server(wheels: dict[str, Path], tmp_path: Path) -> None:
    environment = installed_offline(tmp_path, wheels["with a compiler"])
    check_tour(environment)
    check_help_without_torch(environment)
    await check_rollout_at_a_server(environment)


@pytest.mark.slow
async def test_nothing_but_batches_in_c_is_lost_without_a_compiler(
    wheels: dict[str, Path], without_compiler: str, tmp_path: Path
) -> None:
    environment = installed_offline(tmp_path, wheels["without a compiler"])
    check_tour(environment, PATH=without_compiler)
    await check_rollout_at_a_server(environment, PATH=without_compiler)


@pytest.mark.toolchain("c")
@pytest.mark.slow
def test_the_c_library_can_be_built_after_the_installation(wheels: dict[str, Path], tmp_path: Path) -> None:
    environment = installed_offline(tmp_path, wheels["without a compiler"])
    why_not = (environment.bin / "python", "-c", "from toolyard.sandbox.guest import native; print(native.why_not())")
    assert "not built" in succeeded(run(*why_not, cwd=tmp_path))
    succeeded(run(environment.bin / "python", "-m", "toolyard.sandbox.guest.native.build", cwd=tmp_path))
    assert succeeded(run(*why_not, cwd=tmp_path)) == "\n"


@pytest.mark.exhaustive
@pytest.mark.toolchain("c")
def test_with_the_extra_hf_a_rollout_needs_no_server(wheels: dict[str, Path], tmp_path: Path) -> None:
    environment = installed_offline(tmp_path, wheels["with a compiler"], "hf")
    succeeded(environment.toolyard("models", "fetch"))
    said = succeeded(environment.toolyard("rollout", "--limit", "1", "-n", "2", "--out", "run", OMP_NUM_THREADS="1"))
    assert "accounting: 2 planned = 2 in the dump + 0 missing" in said
    assert "no problems" in succeeded(environment.toolyard("audit", "run"))


# Every supported Python -----------------------------------------------------------------------------------------------


def interpreter(version: str) -> str:
    """That Python: on PATH, or among pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [
        *filter(None, [shutil.which(f"python{version}")]),
        *(str(folder / "bin" / "python") for folder in sorted(pyenv.glob(f"{version}.*"))),
    ]
    for candidate in candidates:
        tried = run(candidate, "-c", "import sys, venv, ensurepip; print(*sys.version_info[:2], sep='.')", cwd=ROOT)
        if tried.stdout.strip() == version:
            return candidate
    pytest.skip(f"no Python {version} here: neither on PATH as python{version} nor from pyenv")


@pytest.mark.exhaustive
@pytest.mark.timeout(SECONDS * 4)
@pytest.mark.parametrize(
    ("version", "kind"),
    # What a machine without a compiler lacks does not depend on its Python.
    [(SUPPORTED[0], "without a compiler"), *((version, "with a compiler") for version in SUPPORTED[1:])],
)
async def test_pip_installs_it_for_every_supported_python(
    version: str, kind: str, sdist: Path, wheels: dict[str, Path], without_compiler: str, tmp_path: Path
) -> None:
    """With a compiler from the sdist, without one from the wheel that others would get from the index."""
    compiles = kind == "with a compiler"
    path = {} if compiles else {"PATH": without_compiler}
    environment = Environment(tmp_path, interpreter(version))
    install(environment, sdist if compiles else wheels[kind], **path)
    assert (environment.site_packages / GUEST_LIBRARY).exists() == compiles
    (environment.work / "program.py").write_text("print(6 * 7)")
    assert succeeded(environment.toolyard("sandbox", "run", "program.py", **path)).splitlines()[0] == "42"
    check_help_without_torch(environment)
    await check_rollout_at_a_server(environment, **path)
