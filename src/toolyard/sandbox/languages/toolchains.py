"""Resolves a row of the language table on this machine: finds its executables and fills in its commands.

Nothing here starts a process except `probe_version`. A toolchain outside the directories that every jail can see is
listed in `Toolchain.binds`, as its installation prefix if that is safe to expose.
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
"""The host directories that every jail can read. A toolchain outside of them is listed in `Toolchain.binds`."""

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
"""What installs an entry of `Way.needs`, if not the Debian package of that name: another Debian package, an npm or pip
package, or otherwise a URL."""

SELF_TEST_STDIN = b"20 22\n"
SELF_TEST_STDOUT = b"42\n"
"""Every row's self-test adds the two numbers it reads: it proves the compiler, the runtime, stdin and stdout."""

_TOKEN = re.compile(r"\{([\w+.-]+)\}")

Found = dict[str, str]
"""Tokens of a command: executable names mapped to absolute paths, plus what `Way.adapt` adds."""


@dataclass(frozen=True, slots=True)
class Way:
    """One toolchain that can run a language: commands in shell notation, with `{name}` for what was found."""

    needs: tuple[str, ...]
    """Executables, `*.jar` files and `python:module`s. Executables after the first are taken from the same directory
    if they exist there, so that versions match."""
    run: str
    version: str
    compile: str | None = None
    artifacts: tuple[str, ...] = ()
    """What the compile stage produces for the run stage: files or directories in the working directory."""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    """Values may contain `{name}` too. Empty results are left out."""
    etc: tuple[str, ...] = ()
    """Glob patterns of host configuration that the toolchain reads or its files link to."""
    adapt: Callable[[Found, str], Found | None] | None = None
    """Adds or replaces tokens, given those found and the search path. Returns None if this way does not work here."""


@dataclass(frozen=True, slots=True)
class Language:
    """A row of the table."""

    name: str
    """SandboxFusion's name, if it has the language."""
    title: str
    source_name: str
    ways: tuple[Way, ...]
    self_test: str
    """Prints `SELF_TEST_STDOUT` when given `SELF_TEST_STDIN`; a test runner may print more."""
    aliases: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    """Packages, named as in `INSTALLED_BY`, that programs may use if they are installed."""
    in_python: Callable[[Program], Program] | None = None
    """Set if a warm interpreter runs it instead of a command: returns the Python program to run in its place."""
    gpu: bool = False
    """Whether its programs use the machine's GPUs."""
    fit: Callable[[Toolchain, str, int], Toolchain] | None = None
    """Adjusts the commands to a program, given its code and memory limit."""


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
    """Host paths to show read-only in the jail in addition to `DEFAULT_ROOTS`, at the same location."""
    artifacts: tuple[str, ...]
    fingerprint: str
    """Changes with the toolchain or its flags. Together with `source_name`, code and files it identifies a build."""

    def fitted(self, code: str, memory_bytes: int) -> Toolchain:
        """The same toolchain with file names and sizes for this program. Most languages need no changes."""
        return self.language.fit(self, code, memory_bytes) if self.language.fit else self


def resolve(language: Language, search_path: str, modules: Container[str] | None = None) -> Toolchain:
    """Find the language's toolchain on `search_path`. Reads a few files, starts no process.

    `modules`: modules of the programs' Python; None asks this interpreter.

    Raises:
        ToolchainMissingError: it is not installed; the message names the executable and the package to install.
    """
    for way in language.ways:
        found = _locate(way.needs, search_path, modules)
        if found is not None and way.adapt is not None:
            found = way.adapt(found, search_path)
        if found is not None:
            return _toolchain(language, way, found)
    raise ToolchainMissingError(_missing(language, search_path, modules))


def probe_version(toolchain: Toolchain, *, seconds: float = 10.0) -> str | None:
    """The first line of the toolchain's version output; None if it fails."""
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
    """How to install a language's preferred toolchain."""
    absent = _absent(language.ways[0].needs, search_path, modules)
    return installation(INSTALLED_BY.get(name, name) for name in absent)


def installation(packages: Iterable[str]) -> str:
    """The commands that install packages, named as in `INSTALLED_BY`."""
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
    """Where an installation keeps files that are not executables: `folder` beside each directory of `search_path`."""
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
        # Resolving Python's link would leave its virtual environment.
        found[name] = path if name == "python3" else _stable(path)
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
    instead = f" ({' or '.join(dict.fromkeys(others))} would also work)" if others else ""
    how = remedy(language, search_path, modules)
    return f"{language.title} needs {absent}, which {where} does not offer; to install it: {how}{instead}"


def inside(path: str) -> bool:
    return any(path == root or path.startswith(f"{root}/") for root in DEFAULT_ROOTS)


def _stable(path: str) -> str:
    # A link to a path that the jail does not show would dangle there.
    real = os.path.realpath(path)
    return path if inside(path) and inside(real) else real


def _exposure(path: str) -> str | None:
    """What the jail must show for this executable to work: nothing, its installation prefix, or the file alone."""
    real = Path(os.path.realpath(path))
    if inside(str(real)):
        return None
    if "node_modules" in real.parts:  # packages in it load each other
        return str(Path(*real.parts[: real.parts.index("node_modules") + 1]))
    home = Path.home()
    prefix = real.parent.parent
    # ~/bin/node must not expose the home directory, nor ~/.local/bin/node everything installed under ~/.local.
    personal = prefix in (home, *home.parents, home / ".local")
    return str(real if personal or real.parent.name not in ("bin", "lib") else prefix)
