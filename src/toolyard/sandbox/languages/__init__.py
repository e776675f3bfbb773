"""The languages programs may be written in, and this machine's toolchains for them.

`find_language` turns a name into a row of the table (`table`); `resolve` turns a row into the `Toolchain` installed
here (`toolchains`). `compilers` keeps them for a sandbox, with caches that speed up compiling: `builds` and `headers`.
"""

from toolyard.sandbox.languages.table import ALL, find_language, own_name, refuse_unknown
from toolyard.sandbox.languages.toolchains import (
    SELF_TEST_STDIN,
    SELF_TEST_STDOUT,
    Language,
    Toolchain,
    probe_version,
    remedy,
    resolve,
)

__all__ = [
    "ALL",
    "SELF_TEST_STDIN",
    "SELF_TEST_STDOUT",
    "Language",
    "Toolchain",
    "find_language",
    "own_name",
    "probe_version",
    "refuse_unknown",
    "remedy",
    "resolve",
]
