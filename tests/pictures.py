"""Small image files, made by hand."""

from __future__ import annotations

import struct
import zlib


def png(width: int = 2, height: int = 3, *, pad: int = 0) -> bytes:
    """A grey PNG. `pad`: extra bytes in a chunk that readers skip."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    rows = zlib.compress((b"\0" + b"\x80" * min(width, 4096)) * min(height, 4096))
    padding = chunk(b"prVt", bytes(pad)) if pad else b""
    return b"\x89PNG\r\n\x1a\n" + head + padding + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def jpeg(width: int, height: int) -> bytes:
    """The parts of a JPEG that say how large it is."""
    segment = b"\xff\xe0\x00\x10JFIF\0\x01\x01\0\0\x01\0\x01\0\0"
    frame = b"\xff\xc2\x00\x11\x08" + struct.pack(">HH", height, width) + b"\x03\x01\x22\0\x02\x11\x01\x03\x11\x01"
    return b"\xff\xd8" + segment + b"\xff" + frame + b"\xff\xda\0\x02\0\xff\xd9"


def gif(width: int, height: int) -> bytes:
    return b"GIF89a" + struct.pack("<HH", width, height) + b"\x80\0\0" + b"\0\0\0\xff\xff\xff" + b"\x3b"


def webp(width: int, height: int) -> bytes:
    """Lossless, its header only."""
    bits = (width - 1) | (height - 1) << 14
    body = b"WEBPVP8L" + struct.pack("<I", 10) + b"\x2f" + struct.pack("<I", bits) + bytes(5)
    return b"RIFF" + struct.pack("<I", len(body)) + body
