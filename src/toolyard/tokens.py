"""Checksums of token ids, for records that do not list them all."""

from __future__ import annotations

import sys
import zlib
from array import array
from collections.abc import Sequence


def ids_crc(ids: Sequence[int], crc: int = 0) -> int:
    """Return the CRC-32 of `ids`, continuing from `crc`: `ids_crc(b, ids_crc(a)) == ids_crc([*a, *b])`.

    A conversation's checksum can thus be updated each turn at the cost of the new ids. It is the same on every
    platform: each id counts as eight bytes, little-endian.

    Raises:
        TypeError: an id is not an integer.
        OverflowError: an id does not fit into eight bytes.
    """
    words = array("q", ids)
    if sys.byteorder == "big":
        words.byteswap()
    return zlib.crc32(words, crc)
