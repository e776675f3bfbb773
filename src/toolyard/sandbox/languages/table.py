"""The language table: rows by family, and lookup by name."""

from __future__ import annotations

import difflib

from toolyard.errors import ProgramError
from toolyard.sandbox.languages import compiled, jvm, nodejs, python, scripts
from toolyard.sandbox.languages.toolchains import Language

ALL: tuple[Language, ...] = (*python.ROWS, *scripts.ROWS, *nodejs.ROWS, *compiled.ROWS, *jvm.ROWS)
"""`c` and the aliases are ours; every other name is SandboxFusion's."""

_EXACT = {name: row for row in ALL for name in (row.name, *row.aliases)}
_BY_NAME = {name.casefold(): row for name, row in _EXACT.items()}
_SHOWN_CHARS = 40
"""How much of an unknown name is shown."""


def own_name(name: str) -> str | None:
    """The table's name for a language or alias. None: it is not in the table; a service may still support it."""
    language = _BY_NAME.get(name.casefold())
    return None if language is None else language.name


def find_language(name: str) -> Language:
    """The row for a language's name or alias, ignoring case.

    Raises:
        ProgramError: there is none; the message lists the languages.
    """
    language = _BY_NAME.get(name.casefold())
    if language is None:
        raise ProgramError(_unknown(name))
    return language


def refuse_unknown(name: str) -> str | None:
    """Why a service refuses a language; None if it does not. Unlike `find_language`, names are case-sensitive there,
    as in SandboxFusion."""
    return None if name in _EXACT else _unknown(name)


def _unknown(name: str) -> str:
    if len(name) > _SHOWN_CHARS:  # too long for a typo, and comparing takes time
        name = f"{name[:_SHOWN_CHARS]}…"
    close = difflib.get_close_matches(name.casefold(), _BY_NAME)
    near = list(dict.fromkeys(_BY_NAME[match].name for match in close))
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
    return f"unknown language {name!r}{hint} (expected one of: {', '.join(row.name for row in ALL)})"
