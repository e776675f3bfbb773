"""What is said of token ids where they are too many to say them all: a checksum."""

from __future__ import annotations

import sys
import zlib
from array import array
from collections.abc import Sequence


def ids_crc(ids: Sequence[int], crc: int = 0) -> int:
    """CRC-32 of `ids`, going on from `crc`: `ids_crc(b, ids_crc(a)) == ids_crc([*a, *b])`.

    So a conversation's checksum is kept turn by turn, at the cost of what the turn added. It is the same on every
    machine: each id counts as eight bytes, the lowest first.

    Raises:
        TypeError: an id is no integer.
        OverflowError: an id does not fit into eight bytes.
    """
    words = array("q", ids)
    if sys.byteorder == "big":
        words.byteswap()
    return zlib.crc32(words, crc)
