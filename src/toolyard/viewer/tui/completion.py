"""Completes the last word of a filter: fields, and the values that they have in the dump."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from toolyard.viewer.query import FIELDS, OF_CALLS, REWARD, SORTABLE, Kind, quoted

ValuesOf = Callable[[str, str], list[tuple[str, int]]]
"""Called with a text field and a part of the value; returns values and how often they occur."""
_LAST = re.compile(r'(?:^|\s)(-?)(?:([A-Za-z_]+)(!=|[:=]))?("(?:[^"\\]|\\.)*|\S*)$')
"""The last word: negation, field, operator, and the beginning of a value, in which a quote may be open."""


class Completions(NamedTuple):
    before: str = ""
    """The text before the last word."""
    words: Sequence[str] = ()
    """What the last word may become, the likeliest first."""

    @property
    def texts(self) -> list[str]:
        return [f"{self.before}{word}" for word in self.words]


def completions(text: str, values_of: ValuesOf, rewards: Callable[[], Iterable[str]]) -> Completions:
    found = _LAST.search(text)
    if found is None:
        return Completions()
    negation, field, operator, said = found.groups()
    if field is None:
        words = _fields(said.lower(), rewards) if said and not said.startswith('"') else []
    else:
        words = [f"{field}{operator}{value}" for value in _values(field.lower(), said, values_of)]
    return Completions(text[: found.start(1)], [f"{negation}{word}" for word in words if word != found[0].strip()])


def _fields(start: str, rewards: Callable[[], Iterable[str]]) -> list[str]:
    names = [*(name if kind is Kind.NUMBER else f"{name}:" for name, kind in FIELDS.items()), "sort:"]
    if start.startswith(REWARD[:3]):
        names += [f"{REWARD}{name}" for name in rewards() if re.fullmatch(r'[^\s:=<>!"]+', name)]
    return [name for name in names if name.lower().startswith(start)]


def _values(field: str, said: str, values_of: ValuesOf) -> list[str]:
    kind = FIELDS.get(field)
    if field == "sort":
        fixed = [f"{sign}{name}" for name in SORTABLE for sign in ("", "-")]
    elif kind is Kind.TEXT:
        part = said.removeprefix('"').replace('\\"', '"').replace("\\\\", "\\")
        return [quoted(value) for value, _ in values_of(field, part)]
    else:
        fixed = (
            ["yes", "no"] if kind is Kind.FLAG else ["none"] if kind is Kind.NUMBER and field not in OF_CALLS else []
        )
    return [value for value in fixed if value.startswith(said.lower())]
