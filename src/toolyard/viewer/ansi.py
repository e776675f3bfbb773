"""Styles and cursor moves in programs' output: escape sequences that carry no text of their own."""

from __future__ import annotations

import re

_SEQUENCE = re.compile(r"(?:\x1b\[|\x9b)[0-?]{0,64}[ -/]{0,8}[@-~]|\x1b[()][0-9A-Za-z]")
"""Control sequences such as `\\x1b[31m`, and choices of a character set. Commands that carry text, such as titles and
clipboard contents, are not among them: nothing that could be read is removed."""


def without_styles(text: str) -> str:
    return _SEQUENCE.sub("", text) if "\x1b" in text or "\x9b" in text else text
