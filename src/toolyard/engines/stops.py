"""Find stop strings while tokens arrive, in time that does not grow with the answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
_LONGEST_CHARACTER = 8
"""Number of tokens after which an incomplete character is taken as broken. UTF-8 has at most four bytes."""


class StopTexts:
    """The stop strings of one answer.

    The text of tokens is not the concatenation of their texts: characters span tokens, and some tokenizers treat the
    first token of a text specially. So each token is decoded together with some before it, and adds the difference.
    """

    def __init__(self, stops: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._decode = decode
        self._longest = max(map(len, self._stops), default=0)
        self._context: list[int] = []
        """Tokens already read, as context for decoding the next ones."""
        self._pending: list[int] = []
        self._tail = ""
        """The end of what was read, one character shorter than the longest stop string, so no stop string fits."""

    def add(self, token: int) -> str | None:
        """Return the stop string that `token` completes, if any."""
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
