"""Images: recognize them by their bytes, and check their size before anything is decoded.

Only the header is read: type, width and height. Whether the rest is valid shows when it is decoded.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

MAX_IMAGE_BYTES = 4 << 20
"""Default maximum size of one image."""
MAX_PIXELS = 50_000_000
"""A file of a few kilobytes may claim to be 100,000 pixels wide; decoding it would exhaust memory."""
_SHOWN = 40


@dataclass(frozen=True, slots=True)
class Image:
    """A PNG, JPEG, GIF or WebP file. Created by `image_of`, which checks it."""

    mime_type: str
    data: bytes
    width: int
    height: int

    def __str__(self) -> str:
        return f"{self.mime_type}, {self.width}x{self.height}, {len(self.data):,} bytes"

    @property
    def url(self) -> str:
        """`data:image/png;base64,…`, as servers and browsers expect it."""
        return f"data:{self.mime_type};base64,{base64.b64encode(self.data).decode()}"

    def as_json(self) -> dict[str, str]:
        """MCP's fields; `image_of` reads them."""
        return {"mime_type": self.mime_type, "data": base64.b64encode(self.data).decode()}


def image_of(given: Any, max_bytes: int = MAX_IMAGE_BYTES) -> Image:
    """Convert to an image: bytes, a data URL, `{"mime_type": …, "data": base64}`, OpenAI's part `{"type": "image_url",
    …}`, `{"bytes": …}`, or a Pillow image. Its type is determined from its bytes.

    Raises:
        ValueError: it is not an image, or too large; the message is fit for a model.
    """
    if isinstance(given, Image):
        data = given.data
    elif isinstance(given, bytes | bytearray | memoryview):
        data = bytes(cast("bytes", given))
    elif isinstance(given, str):
        data = _of_url(given, max_bytes)
    elif isinstance(given, Mapping):
        return _of_fields(cast("Mapping[str, Any]", given), max_bytes)
    elif callable(getattr(given, "save", None)):
        data = _of_pillow(given)
    else:
        raise ValueError(f"{type(given).__name__} is not an image")
    if len(data) > max_bytes:
        raise ValueError(f"{len(data):,} bytes; at most {max_bytes:,} are allowed")
    kind, width, height = _recognize(data)
    if width * height > MAX_PIXELS:
        raise ValueError(f"{width}x{height} pixels; at most {MAX_PIXELS:,} are allowed")
    return Image(kind, data, width, height)


def _of_fields(given: Mapping[str, Any], max_bytes: int) -> Image:
    inner = given.get("image_url")
    url: Any = cast("Mapping[str, Any]", inner).get("url") if isinstance(inner, Mapping) else inner
    for found in (url, given.get("bytes"), given.get("data")):
        if isinstance(found, str) and not found.startswith("data:") and found is not url:
            return image_of(_decoded(found, max_bytes), max_bytes)
        if isinstance(found, str | bytes):
            return image_of(found, max_bytes)
    raise ValueError(f"no image in an object with {', '.join(map(str, given))[:_SHOWN] or 'nothing'}")


def _of_url(text: str, max_bytes: int) -> bytes:
    head, comma, _ = text[:100].partition(",")
    if not comma or not head.startswith("data:"):
        raise ValueError(f"{text[:_SHOWN]!r} is not fetched; an image must be bytes or a data URL")
    if not head.endswith(";base64"):
        raise ValueError("its data URL is not base64")
    return _decoded(text, max_bytes, len(head) + 1)


def _decoded(text: str, max_bytes: int, start: int = 0) -> bytes:
    size = (len(text) - start) * 3 // 4
    if size > max_bytes + (max_bytes >> 4) + 4:  # allows for line breaks; checked before a copy is made
        raise ValueError(f"about {size:,} bytes; at most {max_bytes:,} are allowed")
    try:
        return base64.b64decode("".join(text[start:].split()), validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("its base64 is invalid") from None


def _of_pillow(given: Any) -> bytes:
    size = cast("Sequence[int]", getattr(given, "size", (0, 0)))
    if size[0] * size[1] > MAX_PIXELS:
        raise ValueError(f"{size[0]}x{size[1]} pixels; at most {MAX_PIXELS:,} are allowed")
    file = io.BytesIO()
    try:
        given.save(file, format="PNG", compress_level=1)
    except Exception as error:  # any object may have a `save` method
        raise ValueError(f"{type(given).__name__} could not be saved as PNG: {error}"[:200]) from None
    return file.getvalue()


def _recognize(data: bytes) -> tuple[str, int, int]:
    for read in (_png, _jpeg, _gif, _webp):
        if (found := read(data)) is not None:
            kind, width, height = found
            if width <= 0 or height <= 0:
                raise ValueError(f"a broken {kind}")
            return found
    raise ValueError("not a PNG, JPEG, GIF or WebP image" if data else "an empty image")


ImageHeader = tuple[str, int, int] | None
"""Type, width and height; both 0 if the file is broken or truncated. None if it is of another type."""


def _png(data: bytes) -> ImageHeader:
    if not data.startswith(b"\x89PNG\r\n\x1a\n"):
        return None
    if data[12:16] != b"IHDR" or data.rfind(b"IEND") < 0:
        return "image/png", 0, 0
    return "image/png", int.from_bytes(data[16:20]), int.from_bytes(data[20:24])


def _jpeg(data: bytes) -> ImageHeader:
    if not data.startswith(b"\xff\xd8\xff"):
        return None
    at = 2
    while at + 9 < len(data) and data[at] == 0xFF:
        kind = data[at + 1]
        if 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC):  # start of a frame
            if data.rfind(b"\xff\xd9") < at:
                break
            return "image/jpeg", int.from_bytes(data[at + 7 : at + 9]), int.from_bytes(data[at + 5 : at + 7])
        if kind == 0xFF:  # padding
            at += 1
        elif kind == 1 or 0xD0 <= kind <= 0xD8:  # has no length
            at += 2
        else:
            at += 2 + int.from_bytes(data[at + 2 : at + 4])
    return "image/jpeg", 0, 0


def _gif(data: bytes) -> ImageHeader:
    if data[:6] not in (b"GIF87a", b"GIF89a"):
        return None
    if data.rfind(b"\x3b") < 13:
        return "image/gif", 0, 0
    return "image/gif", int.from_bytes(data[6:8], "little"), int.from_bytes(data[8:10], "little")


def _webp(data: bytes) -> ImageHeader:
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP":
        return None
    if len(data) < max(30, int.from_bytes(data[4:8], "little") + 8):
        return "image/webp", 0, 0
    match data[12:16]:
        case b"VP8X":
            width, height = (1 + int.from_bytes(data[at : at + 3], "little") for at in (24, 27))
        case b"VP8L":
            bits = int.from_bytes(data[21:25], "little")
            width, height = 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
        case b"VP8 ":
            width, height = (int.from_bytes(data[at : at + 2], "little") & 0x3FFF for at in (26, 28))
        case _:
            width = height = 0
    return "image/webp", width, height
