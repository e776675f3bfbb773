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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from toolyard.errors import ToolchainMissingError

DEFAULT_ROOTS = ("/usr", "/bin", "/sbin", "/lib", "/lib64")
"""What every jail shows of the host, read-only. A toolchain outside of them is listed in `Toolchain.binds`."""

PACKAGES: Mapping[str, str] = {
    "go": "golang-go",
    "javac": "default-jdk-headless",
    "java": "default-jdk-headless",
    "node": "nodejs",
    "cc": "gcc",
    "php": "php-cli",
    "Rscript": "r-base-core",
    "mcs": "mono-mcs",
    "mono": "mono-runtime",
    "lua": "lua5.4",
    "julia": "https://julialang.org/downloads",
}
"""The Debian package of an executable, where it does not have its name; an address where Debian has none."""

_TOKEN = re.compile(r"\{([\w+.]+)\}")

Found = dict[str, str]
"""Tokens of a command: the name of each executable to its absolute path, and what `Way.adapt` adds."""


@dataclass(frozen=True, slots=True)
class Way:
    """One toolchain that can run a language: commands in shell notation, `{name}` standing for what was found."""

    needs: tuple[str, ...]
    """Executables. Those after the first are taken from beside it where they exist, so that versions agree."""
    run: str
    version: str
    compile: str | None = None
    artifacts: tuple[str, ...] = ()
    """What the compile stage leaves for the run stage: files or directories in the working directory."""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
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
    """Prints `SELF_TEST_STDOUT` when given `SELF_TEST_STDIN`."""
    aliases: tuple[str, ...] = ()
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


def resolve(language: Language, search_path: str) -> Toolchain:
    """Find the language's toolchain on `search_path`. Reads a few files, starts nothing.

    Raises:
        ToolchainMissingError: it is not installed; the message names the executable and the package that has it.
    """
    for way in language.ways:
        found = _locate(way.needs, search_path)
        if found is not None and way.adapt is not None:
            found = way.adapt(found, search_path)
        if found is not None:
            return _toolchain(language, way, found)
    raise ToolchainMissingError(_missing(language, search_path))


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


def _locate(names: tuple[str, ...], search_path: str) -> Found | None:
    found: Found = {}
    beside = ""
    for name in names:
        path = sys.executable if name == "python3" else shutil.which(name, path=beside + search_path)
        if not path:
            return None
        found[name] = _stable(path)
        beside = beside or os.path.dirname(os.path.realpath(path)) + os.pathsep
    return found


def _toolchain(language: Language, way: Way, found: Found) -> Toolchain:
    def fill(command: str) -> tuple[str, ...]:
        parts = (_TOKEN.sub(lambda token: found[token[1]], part) for part in shlex.split(command))
        return tuple(part for part in parts if part)

    compile_argv, run_argv = fill(way.compile) if way.compile else None, fill(way.run)
    paths = [value for value in found.values() if os.path.isabs(value)]
    binds = {bind for path in paths if (bind := _exposure(path))} | {path for p in way.etc for path in glob.glob(p)}
    identity: list[object] = [language.name, compile_argv, run_argv, sorted(way.env.items())]
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
        env=way.env,
        binds=tuple(sorted(binds)),
        artifacts=way.artifacts,
        fingerprint=hashlib.sha256(repr(identity).encode()).hexdigest()[:24],
    )


def _missing(language: Language, search_path: str) -> str:
    needs = language.ways[0].needs
    absent = [name for name in needs if _locate((name,), search_path) is None] or [needs[0]]
    packages = " ".join(dict.fromkeys(PACKAGES.get(name, name) for name in absent))
    how = f"install it: {packages}" if "://" in packages else f"on Debian: apt-get install {packages}"
    others = [" + ".join(way.needs) for way in language.ways[1:]]
    instead = f" ({' or '.join(dict.fromkeys(others))} would do, too)" if others else ""
    missing = " and ".join(map(repr, absent))
    return f"{language.title} needs {missing}, which PATH ({search_path}) does not offer; {how}{instead}"


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
