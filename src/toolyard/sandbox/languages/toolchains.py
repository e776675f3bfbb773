"""How a row of the language table meets this machine: looking for its executables and filling in its commands.

Nothing here starts a process, but for `probe_version`. A toolchain outside the directories that every jail shows is
listed in `Toolchain.binds`, as its installation prefix where that is safe to show.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from toolyard.errors import ToolchainMissingError
from toolyard.sandbox.protocol import Program

DEFAULT_ROOTS = ("/usr", "/bin", "/sbin", "/lib", "/lib64")
"""What every jail shows of the host, read-only. A toolchain outside of them is listed in `Toolchain.binds`."""

INSTALLED_BY: Mapping[str, str] = {
    "go": "golang-go",
    "javac": "default-jdk-headless",
    "java": "default-jdk-headless",
    "junit-platform-console-standalone.jar": "junit5",
    "scalac": "scala",
    "scala-library.jar": "scala",
    "kotlinc": "kotlin",
    "node": "nodejs",
    "jest": "npm:jest",
    "cc": "gcc",
    "ldc2": "ldc",
    "vvp": "iverilog",
    "php": "php-cli",
    "Rscript": "r-base-core",
    "mcs": "mono-mcs",
    "mono": "mono-runtime",
    "lua": "lua5.4",
    "python:pytest": "pip:pytest",
    "julia": "https://julialang.org/downloads",
    "swiftc": "https://www.swift.org/install",
    "lean": "https://lean-lang.org/install",
    "nvcc": "https://developer.nvidia.com/cuda-downloads",
    "nvidia-smi": "https://www.nvidia.com/drivers",
}
"""What has a need of `Way.needs`, where it is not the Debian package of that name: another one, a package of npm's or
pip's, or an address where none of the three has it."""

SELF_TEST_STDIN = b"20 22\n"
SELF_TEST_STDOUT = b"42\n"
"""Every row's self test adds the two numbers it is given: it proves the compiler, the runtime, stdin and stdout."""

_TOKEN = re.compile(r"\{([\w+.-]+)\}")

Found = dict[str, str]
"""Tokens of a command: the name of each executable to its absolute path, and what `Way.adapt` adds."""


@dataclass(frozen=True, slots=True)
class Way:
    """One toolchain that can run a language: commands in shell notation, `{name}` standing for what was found."""

    needs: tuple[str, ...]
    """Executables; `*.jar` and `python:module` are what they look like. Executables after the first are taken from
    beside it where they exist, so that versions agree."""
    run: str
    version: str
    compile: str | None = None
    artifacts: tuple[str, ...] = ()
    """What the compile stage leaves for the run stage: files or directories in the working directory."""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    """Values may hold `{name}` too. What comes out empty is left out."""
    etc: tuple[str, ...] = ()
    """Glob patterns of host configuration that the toolchain's own files link to or read."""
    adapt: Callable[[Found, str], Found | None] | None = None
    """Adds or replaces tokens, given what was found and the search path. None: this way does not work here."""


@dataclass(frozen=True, slots=True)
class Language:
    """A row of the table."""

    name: str
    """SandboxFusion's name, where it has the language."""
    title: str
    source_name: str
    ways: tuple[Way, ...]
    self_test: str
    """Prints `SELF_TEST_STDOUT`, among other things if it is a test runner's, when given `SELF_TEST_STDIN`."""
    aliases: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    """Packages, named as in `INSTALLED_BY`, that programs may use where they are installed."""
    in_python: Callable[[Program], Program] | None = None
    """Set where a warm interpreter runs it and no command does: the Python program to run in its place."""
    gpu: bool = False
    """Whether its programs want the machine's GPUs."""
    sparse: bool = False
    """Reserves far more address space than it uses, so RLIMIT_AS cannot stand in for a limit on memory."""
    fit: Callable[[Toolchain, str, int], Toolchain] | None = None
    """Adjusts the commands to one program, given its code and memory limit."""


@dataclass(frozen=True, slots=True)
class Toolchain:
    """How a language is compiled and run on this machine."""

    language: Language
    source_name: str
    compile_argv: tuple[str, ...] | None
    run_argv: tuple[str, ...]
    version_argv: tuple[str, ...]
    env: Mapping[str, str]
    binds: tuple[str, ...]
    """Host paths to show read-only in the jail besides `DEFAULT_ROOTS`, at the same place."""
    artifacts: tuple[str, ...]
    fingerprint: str
    """Changes when the toolchain or its flags do. With `source_name`, the code and the files it names a build."""

    def fitted(self, code: str, memory_bytes: int) -> Toolchain:
        """The same toolchain with file names and sizes that suit this program. Most languages need nothing."""
        return self.language.fit(self, code, memory_bytes) if self.language.fit else self


def resolve(language: Language, search_path: str, modules: Container[str] | None = None) -> Toolchain:
    """Find the language's toolchain on `search_path`. Reads a few files, starts nothing.

    `modules` are those that the programs' Python has; None asks this interpreter.

    Raises:
        ToolchainMissingError: it is not installed; the message names the executable and the package that has it.
    """
    for way in language.ways:
        found = _locate(way.needs, search_path, modules)
        if found is not None and way.adapt is not None:
            found = way.adapt(found, search_path)
        if found is not None:
            return _toolchain(language, way, found)
    raise ToolchainMissingError(_missing(language, search_path, modules))


def probe_version(toolchain: Toolchain, *, seconds: float = 10.0) -> str | None:
    """The first line the toolchain prints about its version; None where it cannot even do that."""
    env = {"PATH": os.defpath, "HOME": "/nonexistent", "LANG": "C.UTF-8", **toolchain.env}
    try:
        done = subprocess.run(
            toolchain.version_argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    lines = (done.stdout or done.stderr).decode("utf-8", "replace").strip().splitlines()
    return lines[0].strip() if lines else None


def remedy(language: Language, search_path: str, modules: Container[str] | None = None) -> str:
    """How to install the toolchain that is preferred for a language."""
    absent = _absent(language.ways[0].needs, search_path, modules)
    return installation(INSTALLED_BY.get(name, name) for name in absent)


def installation(packages: Iterable[str]) -> str:
    """The commands that install packages named as in `INSTALLED_BY`."""
    by_tool: dict[str, list[str]] = {}
    for package in dict.fromkeys(packages):
        tool, separator, name = package.partition(":")
        if name.startswith("//"):
            by_tool.setdefault("see", []).append(package)
        elif separator:
            by_tool.setdefault("npm install -g" if tool == "npm" else "pip install", []).append(name)
        else:
            by_tool.setdefault("apt-get install", []).append(package)
    return "; ".join(f"{command} {' '.join(names)}" for command, names in sorted(by_tool.items()))


def beside_path(search_path: str, folder: str) -> list[str]:
    """Where an installation prefix keeps what is no executable: `folder` beside each directory of `search_path`."""
    prefixes = dict.fromkeys(os.path.dirname(part.rstrip("/")) for part in search_path.split(os.pathsep) if part)
    return [path for prefix in prefixes if os.path.isdir(path := f"{prefix}/{folder}")]


def find_jar(name: str, search_path: str) -> str | None:
    places = (f"{folder}/{name}" for folder in beside_path(search_path, "share/java"))
    return next(filter(os.path.isfile, places), None)


def _locate(names: tuple[str, ...], search_path: str, modules: Container[str] | None) -> Found | None:
    found: Found = {}
    beside = ""
    for name in names:
        if name.startswith("python:"):
            module = name.removeprefix("python:")
            if module not in modules if modules is not None else find_spec(module) is None:
                return None
            continue
        if name.endswith(".jar"):
            path = find_jar(name, search_path)
        else:
            path = sys.executable if name == "python3" else shutil.which(name, path=beside + search_path)
        if not path:
            return None
        found[name] = path if name == "python3" else _stable(path)  # whose environment a link would lead out of
        beside = beside or os.path.dirname(os.path.realpath(path)) + os.pathsep
    return found


def _absent(names: tuple[str, ...], search_path: str, modules: Container[str] | None) -> list[str]:
    return [name for name in names if _locate((name,), search_path, modules) is None] or [names[0]]


def _toolchain(language: Language, way: Way, found: Found) -> Toolchain:
    def fill_in(text: str) -> str:
        return _TOKEN.sub(lambda token: found[token[1]], text)

    def fill(command: str) -> tuple[str, ...]:
        return tuple(part for part in map(fill_in, shlex.split(command)) if part)

    compile_argv, run_argv = fill(way.compile) if way.compile else None, fill(way.run)
    env = {name: value for name, text in way.env.items() if (value := fill_in(text))}
    paths = [path for value in found.values() for path in value.split(os.pathsep) if os.path.isabs(path)]
    binds = {bind for path in paths if (bind := _exposure(path))} | {path for p in way.etc for path in glob.glob(p)}
    identity: list[object] = [language.name, compile_argv, run_argv, sorted(env.items())]
    for path in paths:
        real = os.path.realpath(path)
        stat = os.stat(real)
        identity += [real, stat.st_size, stat.st_mtime_ns]
    return Toolchain(
        language=language,
        source_name=language.source_name,
        compile_argv=compile_argv,
        run_argv=run_argv,
        version_argv=fill(way.version),
        env=env,
        binds=tuple(sorted(binds)),
        artifacts=way.artifacts,
        fingerprint=hashlib.sha256(repr(identity).encode()).hexdigest()[:24],
    )


def _missing(language: Language, search_path: str, modules: Container[str] | None) -> str:
    names = _absent(language.ways[0].needs, search_path, modules)
    absent = " and ".join(repr(name.removeprefix("python:")) for name in names)
    modules_only = all(name.startswith("python:") for name in names)
    where = "the programs' Python" if modules_only else f"PATH ({search_path})"
    others = [" + ".join(way.needs) for way in language.ways[1:]]
    instead = f" ({' or '.join(dict.fromkeys(others))} would do, too)" if others else ""
    how = remedy(language, search_path, modules)
    return f"{language.title} needs {absent}, which {where} does not offer; to install it: {how}{instead}"


def inside(path: str) -> bool:
    return any(path == root or path.startswith(f"{root}/") for root in DEFAULT_ROOTS)


def _stable(path: str) -> str:
    # A link outside of what the jail shows would dangle there.
    real = os.path.realpath(path)
    return path if inside(path) and inside(real) else real


def _exposure(path: str) -> str | None:
    """What a jail must show so that this executable works: nothing, its installation prefix, or the file alone."""
    real = Path(os.path.realpath(path))
    if inside(str(real)):
        return None
    if "node_modules" in real.parts:  # packages there load each other
        return str(Path(*real.parts[: real.parts.index("node_modules") + 1]))
    home = Path.home()
    prefix = real.parent.parent
    # ~/bin/node must not expose the home directory, nor ~/.local/bin/node everything installed under ~/.local.
    personal = prefix in (home, *home.parents, home / ".local")
    return str(real if personal or real.parent.name not in ("bin", "lib") else prefix)
