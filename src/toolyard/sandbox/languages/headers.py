"""Work that compilers would repeat for every program, done once: C++ headers and Go's standard library.

Both are built on the host from the system's own files only, at the lowest priority, after the first program that could
use them; programs never wait for them. They are stored in the cache directory under the compiler's fingerprint, are
read-only for programs, and never change what compiles or what it means:

* `PrecompiledHeaders` loads standard headers that a program includes at its very top.
* `GoPackages` is a build cache, needed since Go 1.20, whose installations no longer contain compiled packages.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import logging
import os
import re
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from toolyard import settings
from toolyard.errors import ToolyardError
from toolyard.sandbox.languages.compiled import CPP_FLAGS
from toolyard.sandbox.languages.toolchains import Toolchain
from toolyard.sandbox.protocol import MIB

HEADERS_IN_JAIL = "/opt/toolyard/headers"
GO_PACKAGES_IN_JAIL = "/opt/toolyard/go"

LEARN_AFTER = 3
"""Build a set of headers after this many programs started with it: building one costs a second of CPU time."""
HEADERS_BUDGET = 512 * MIB
"""Disk space for sets. One takes 12 to 60 MB, bits/stdc++.h 101 MB (GCC 12)."""

EVERYTHING = "bits/stdc++.h"
STARTERS = tuple(
    frozenset(names)
    for names in (["iostream"], [EVERYTHING], ["iostream", "vector"], ["algorithm", "iostream", "vector"])
)

_HEAVY = frozenset(
    {"algorithm", "any", "array", "atomic", "bitset", "chrono", "cmath", "complex", "condition_variable", "deque"}
    | {"filesystem", "forward_list", "fstream", "functional", "future", "iomanip", "iostream", "istream", "iterator"}
    | {"list", "locale", "map", "math.h", "memory", "memory_resource", "mutex", "ostream", "queue", "random", "regex"}
    | {"set", "shared_mutex", "sstream", "stack", "stdexcept", "string", "thread", "unordered_map", "unordered_set"}
    | {"valarray", "variant", "vector", EVERYTHING}
)
_LIGHT = frozenset(
    {"cassert", "cctype", "cerrno", "cfloat", "cinttypes", "climits", "cstdarg", "cstddef", "cstdint", "cstdio"}
    | {"cstdlib", "cstring", "ctime", "assert.h", "ctype.h", "errno.h", "float.h", "inttypes.h", "limits.h"}
    | {"stdarg.h", "stddef.h", "stdint.h", "stdio.h", "stdlib.h", "string.h", "time.h", "exception", "limits"}
    | {"initializer_list", "new", "numeric", "optional", "ratio", "string_view", "tuple", "type_traits", "utility"}
)
"""Parsed in a few milliseconds: skipped over, but not worth a set of their own."""

_STREAMS = frozenset({"iostream", "sstream", "fstream", "iomanip", "istream", "ostream"})

_BLANK = re.compile(r"(?:\s|//[^\n\\]*(?=\n|\Z)|/\*.*?\*/)*", re.DOTALL)
_INCLUDE = re.compile(r"#[ \t]*include[ \t]*<([\w./+]+)>[ \t]*(?=\r?\n|\Z|//|/\*)")

_GO_PACKAGES = (
    *("bufio", "bytes", "container/heap", "container/list", "context", "encoding/json", "errors", "fmt", "io", "math"),
    *("math/big", "math/bits", "math/cmplx", "math/rand", "os", "regexp", "sort", "strconv", "strings", "sync"),
    *("sync/atomic", "text/tabwriter", "time", "unicode", "unicode/utf8"),
)
_TESTIFY = "github.com/stretchr/testify/assert"
"""What most Go tests import. It depends on an HTTP server, and so takes seven seconds to compile."""
_GO_TEST = 'package main\n\nimport (\n\t"testing"\n\t%s\n)\n\nfunc TestNothing(t *testing.T) {}\n'

_log = logging.getLogger(__name__)


class _BuildFailedError(ToolyardError):
    """Never leaves this file: programs then just compile more slowly."""


def leading_includes(code: str) -> list[str]:
    """The standard headers a program includes before anything but comments.

    Anything that could change what a header means (a macro, a pragma, an unknown header) ends the list.
    """
    names: list[str] = []
    position = 0
    while True:
        blank = _BLANK.match(code, position)
        match = _INCLUDE.match(code, blank.end() if blank else position)
        if match is None or match[1] not in _HEAVY | _LIGHT:
            return names
        names.append(match[1])
        position = match.end()


class _BuildCache:
    """A directory of finished builds, filled by one builder at a time across all processes of the machine."""

    def __init__(self, kind: str, toolchain: Toolchain, cache: Path | None) -> None:
        key = hashlib.sha256(f"{toolchain.fingerprint} {_stamp('/usr/include/features.h')}".encode()).hexdigest()[:16]
        self.toolchain = toolchain
        self.directory = (cache or settings.cache_dir()) / kind / key
        """Shown read-only to compilers. Missing if the cache directory is not writable."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self.directory.chmod(0o755)
        except OSError as error:
            _log.warning("%s cannot be created, so programs compile more slowly: %s", self.directory, error)

    @asynccontextmanager
    async def _work_directory(self) -> AsyncGenerator[Path]:
        """An empty directory beside the finished builds, for one builder at a time."""
        with (self.directory / ".lock").open("w") as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    await asyncio.sleep(0.5)
            for leftover in self.directory.glob(".build-*"):  # left by a builder that was killed
                shutil.rmtree(leftover, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=".build-", dir=self.directory, ignore_cleanup_errors=True) as work:
                yield Path(work)


class PrecompiledHeaders(_BuildCache):
    """Precompiled sets of C++ headers. Each program gets the largest set that it includes itself.

    GCC can load one precompiled header, and only before the first token. So `flags` names a file to include ahead of
    the program, containing only headers the program starts with. A few common sets are built after the first call,
    others when programs keep asking for them.
    """

    def __init__(
        self, toolchain: Toolchain, *, cache: Path | None = None, starters: Sequence[frozenset[str]] = STARTERS
    ) -> None:
        super().__init__("headers", toolchain, cache)
        self._starters = starters
        self._sizes: dict[frozenset[str], int] = {}
        self._asked: Counter[frozenset[str]] = Counter()
        self._wanted: asyncio.Queue[frozenset[str]] = asyncio.Queue()
        for path in self.directory.glob("*.gch"):
            self._sizes[_names(path.name.removesuffix(".h.gch"))] = path.stat().st_size

    @property
    def ready(self) -> frozenset[frozenset[str]]:
        """The sets that can be used."""
        return frozenset(self._sizes)

    def flags(self, code: str, *, directory: str = HEADERS_IN_JAIL) -> tuple[str, ...]:
        """Flags to add to the program's compile command: nothing, or a set of headers to load.

        `directory`: where the compiler finds `self.directory`.
        """
        names = _worthwhile(leading_includes(code))
        if not names:
            return ()
        self._ask(names)
        for best in sorted((known for known in self._sizes if known <= names), key=self._sizes.__getitem__)[::-1]:
            label = _label(best)
            # GCC falls back to the text if the precompiled file is unsuitable; without either it would fail.
            if (self.directory / f"{label}.h.gch").exists() and (self.directory / f"{label}.h").exists():
                return "-include", f"{directory}/{label}.h"
        return ()

    async def maintain(self) -> None:
        """Build the sets that programs ask for, one at a time, until cancelled. Idle before the first program."""
        while True:
            names = await self._wanted.get()
            try:
                await self._build(names)
            except (OSError, _BuildFailedError) as error:
                _log.warning("no precompiled %s: %s", _label(names), error)

    def _ask(self, names: frozenset[str]) -> None:
        if not self._asked:
            for starter in self._starters:
                self._wanted.put_nowait(starter)
        self._asked[names] += 1
        if self._asked[names] == LEARN_AFTER and names not in self._starters and len(_label(names)) < 200:
            self._wanted.put_nowait(names)

    async def _build(self, names: frozenset[str]) -> None:
        label = _label(names)
        finished = self.directory / f"{label}.h.gch"
        if names in self._sizes or sum(self._sizes.values()) > HEADERS_BUDGET:
            return
        async with self._work_directory() as work:
            if not finished.exists():
                assert self.toolchain.compile_argv
                compiler = (self.toolchain.compile_argv[0], *CPP_FLAGS)
                text, compiled = work / f"{label}.h", work / finished.name
                # Compiler messages show where a header was included from: name the program, which is true.
                lines = ['#line 1 "main.cpp"', *(f"#include <{name}>" for name in sorted(names)), ""]
                text.write_text("\n".join(lines))
                await _run(*compiler, "-x", "c++-header", str(text), "-o", str(compiled))
                # Do not trust version numbers: check that GCC accepts it before offering it.
                (work / "trial.cpp").write_text("int main() {}\n")
                trial = ("-include", str(text), "-Winvalid-pch", "-Werror", "-fsyntax-only", str(work / "trial.cpp"))
                await _run(*compiler, *trial)
                for path in (text, compiled):
                    _publish(path, self.directory / path.name)
        self._sizes[names] = finished.stat().st_size


class GoPackages(_BuildCache):
    """Common packages, precompiled: 50 MB of the standard library, which would take 10 s of each program's time, and
    testify."""

    def __init__(self, toolchain: Toolchain, *, cache: Path | None = None) -> None:
        super().__init__("go", toolchain, cache)
        assert toolchain.compile_argv
        root = Path(os.path.realpath(toolchain.compile_argv[0])).parent.parent
        roots = toolchain.env.get("GOPATH", "").split(os.pathsep)
        has_testify = any(Path(path, "src", _TESTIFY).is_dir() for path in roots if path)
        self._test = _GO_TEST % (f'_ "{_TESTIFY}"' if has_testify else "")
        self.needed = has_testify or not any(root.glob("pkg/linux_*/fmt.a"))
        """Whether there is anything to compile: newer Go versions come without compiled packages."""
        self._finished = self.directory / "packages"
        self._asked = asyncio.Event()

    def env(self) -> Mapping[str, str]:
        """Variables for the compile command."""
        self._asked.set()
        return {"GOCACHE": f"{GO_PACKAGES_IN_JAIL}/packages"} if self.needed and self._finished.is_dir() else {}

    async def maintain(self) -> None:
        """Build the packages after the first program needs them. Returns when they are ready."""
        await self._asked.wait()
        if not self.needed or self._finished.is_dir():
            return
        try:
            async with self._work_directory() as work:
                if not self._finished.is_dir():
                    await self._build(work / "packages")
        except (OSError, _BuildFailedError) as error:
            _log.warning("Go programs will take seconds to compile: %s", error)

    async def _build(self, target: Path) -> None:
        assert self.toolchain.compile_argv
        go = self.toolchain.compile_argv[0]
        env = {**self.toolchain.env, "GOCACHE": str(target), "HOME": str(target.parent)}
        # `go list` leaves an index of all packages. Without it, Go cannot find packages that are not built yet in a
        # cache that it may not write to.
        await _run(go, "list", "std", env=env)
        await _run(go, "build", *_GO_PACKAGES, env=env)
        test = target.parent / "main_test.go"
        test.write_text(self._test)
        await _run(go, "test", "-c", "-o", os.devnull, str(test), env=env)
        await asyncio.to_thread(_publish, target, self._finished)


def _worthwhile(names: list[str]) -> frozenset[str]:
    heavy = _HEAVY.intersection(names)
    if EVERYTHING in heavy:
        return frozenset({EVERYTHING})
    return heavy - {"string"} if heavy & _STREAMS else heavy


def _label(names: frozenset[str]) -> str:
    return "everything" if EVERYTHING in names else ",".join(sorted(names))


def _names(label: str) -> frozenset[str]:
    return frozenset({EVERYTHING} if label == "everything" else label.split(","))


def _publish(made: Path, finished: Path) -> None:
    """Move it into place atomically, readable for the users that programs run as, whatever our umask."""
    for path in (made, *made.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    made.rename(finished)


def _stamp(path: str) -> str:
    try:
        stat = os.stat(path)
    except OSError:
        return ""
    return f"{path} {stat.st_size} {stat.st_mtime_ns}"


async def _run(*argv: str, env: Mapping[str, str] | None = None) -> None:
    """Run a build command at low priority. Cancelling kills it."""
    process = await asyncio.create_subprocess_exec(
        *("nice", "-n", "19", *argv),
        # Do not pass on our environment: CPATH or GOFLAGS would make the build differ from how programs are compiled.
        env={"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", **(env or {})},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        _, stderr = await process.communicate()
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.communicate()  # until what it started has ended as well
    if process.returncode:
        message = stderr.decode("utf-8", "replace").strip()[-500:]
        raise _BuildFailedError(f"{argv[0]} exited with {process.returncode}: {message}")
