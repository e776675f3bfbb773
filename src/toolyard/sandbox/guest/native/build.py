"""Builds `guest.so` beside its source: `python -m toolyard.sandbox.guest.native.build`. Requires a C compiler.

Installing from source runs it (see hatch_build.py), and so does `make`. It depends only on the standard library, since
it runs before the package is installed.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SOURCE = Path(__file__).with_name("guest.c")
LIBRARY = Path(__file__).with_name("guest.so")
WARNINGS = ("-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wshadow", "-Wstrict-prototypes", "-Werror")
FLAGS = ("-std=c11", "-O2", "-fPIC", "-fvisibility=hidden", "-fstack-protector-strong")
LINKED = ("-shared", "-Wl,-z,now,-z,relro,-z,noexecstack")


def build(compiler: Sequence[str] | None = None, library: Path = LIBRARY, *, strict: bool = False) -> None:
    """`compiler`: a command; default: $CC or `cc`. `strict`: treat warnings as errors.

    Raises:
        OSError: there is no compiler.
        subprocess.CalledProcessError: it failed; `stderr` says why.
    """
    command = [*(compiler or shlex.split(os.environ.get("CC", "cc"))), *FLAGS, *(WARNINGS if strict else ())]
    unfinished = library.with_suffix(f".{os.getpid()}")
    try:
        subprocess.run(
            [*command, *LINKED, "-o", str(unfinished), str(SOURCE)], check=True, capture_output=True, text=True
        )
        unfinished.replace(library)  # atomically: a sandbox may be using the old one
    finally:
        unfinished.unlink(missing_ok=True)


def main() -> int:
    try:
        build(strict="--strict" in sys.argv[1:])
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"{getattr(error, 'stderr', '') or error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
