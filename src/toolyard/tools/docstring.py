"""What a docstring says of a function and its parameters, in Google's style or in reST."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_SECTION = re.compile(r"(Args|Arguments|Parameters|Params):\s*")
_GOOGLE = re.compile(r"\*{0,2}(\w+)\s*(?:\(.*?\))?\s*:\s*(.*)")
"""`name: text` or `name (type, optional): text`."""
_REST = re.compile(r":(?:param|parameter|arg|argument)\s+(?:[^:]*\s)?\*{0,2}(\w+)\s*:\s*(.*)")
"""`:param name: text` or `:param type name: text`."""
_OTHER = re.compile(r":\w+[^:]*:|[A-Z]\w+:\s*$")
"""Another field or section: no paragraph for the model."""


@dataclass(frozen=True, slots=True)
class Docstring:
    description: str = ""
    """The first paragraph, on one line."""
    parameters: dict[str, str] = field(default_factory=dict[str, str])


def read_docstring(text: str) -> Docstring:
    """`text` is dedented, as `inspect.getdoc` gives it."""
    lines = text.strip().splitlines()
    first: list[str] = []
    for line in lines:
        if not line.strip() or _OTHER.match(line):
            break
        first.append(line.strip())
    return Docstring(" ".join(first), {**_from_rest(lines), **_from_google(lines)})


def _from_google(lines: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    inside, indent, name = False, 0, ""
    for line in lines:
        depth = len(line) - len(line.lstrip())
        if not line.strip():
            continue
        if depth == 0:
            inside, indent, name = _SECTION.fullmatch(line) is not None, 0, ""
        elif inside:
            indent = indent or depth
            entry = _GOOGLE.match(line.strip()) if depth <= indent else None
            if entry:
                name, found[entry[1]] = entry[1], entry[2]
            elif name:
                found[name] = f"{found[name]} {line.strip()}".strip()
    return found


def _from_rest(lines: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    name = ""
    for line in lines:
        entry = _REST.match(line.strip())
        if entry:
            name, found[entry[1]] = entry[1], entry[2]
        elif not line.strip() or line.strip().startswith(":"):
            name = ""
        elif name:
            found[name] = f"{found[name]} {line.strip()}".strip()
    return found
