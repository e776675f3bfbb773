"""Finding stop texts while tokens arrive, in time that does not grow with the answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
_LONGEST_CHARACTER = 8
"""Tokens after which a character that will not end is taken for broken. UTF-8 has four bytes at most."""


class StopTexts:
    """The stop texts of one answer.

    The text of tokens is not the sum of their texts: characters span tokens, and some tokenizers treat the first token
    of a text specially. So each token is decoded together with some before it, and what it adds is the difference.
    """

    def __init__(self, stops: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._decode = decode
        self._longest = max(map(len, self._stops), default=0)
        self._context: list[int] = []
        """Tokens whose text has been read, and which the next ones are decoded after."""
        self._pending: list[int] = []
        self._tail = ""
        """The end of what has been read, one character shorter than the longest stop text: no stop fits into it."""

    def add(self, token: int) -> str | None:
        """The stop text that `token` completes, if it completes one."""
        if not self._stops:
            return None
        self._pending.append(token)
        before = self._decode(self._context) if self._context else ""
        added = self._decode([*self._context, *self._pending])[len(before) :]
        text = self._tail + added
        found = min(
            ((at + len(stop), stop) for stop in self._stops if (at := text.find(stop)) >= 0), default=(0, None)
        )[1]
        if not added.endswith(_UNFINISHED) or len(self._pending) >= _LONGEST_CHARACTER:
            self._tail = text[-(self._longest - 1) :] if self._longest > 1 else ""
            self._context, self._pending = self._pending, []
        return found
