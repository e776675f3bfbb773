"""Images are what their bytes say, and nothing is decoded that is too large."""

from __future__ import annotations

import base64
import time
import tracemalloc
from typing import Any

import pytest

from patience import processor_time
from pictures import gif, jpeg, png, webp
from toolyard.images import image_of
from toolyard.messages import Message

PNG = png(2, 3)
TEXT = base64.b64encode(PNG).decode()


class Drawn:
    """As Pillow has them."""

    def __init__(self, size: tuple[int, int]) -> None:
        self.size = size

    def save(self, file: Any, format: str, **_: Any) -> None:  # noqa: A002 - Pillow's name
        assert format == "PNG"
        file.write(png(*self.size))


@pytest.mark.parametrize(
    "given",
    [
        PNG,
        bytearray(PNG),
        f"data:image/png;base64,{TEXT}",
        {"mime_type": "image/png", "data": TEXT},
        {"mimeType": "image/png", "data": PNG},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{TEXT}"}},
        {"bytes": PNG, "path": None},
        {"data": "\n".join((TEXT[:40], TEXT[40:]))},
        Drawn((2, 3)),
    ],
    ids=lambda given: type(given).__name__,
)
def test_images_of_all_kinds_are_understood(given: Any) -> None:
    image = image_of(given)
    assert (str(image), image.data) == (f"image/png, 2x3, {len(PNG)} bytes", PNG)
    assert image_of(image.as_json()) == image_of(image.url) == image_of(image) == image


@pytest.mark.parametrize(("data", "kind"), [(jpeg(640, 480), "jpeg"), (gif(640, 480), "gif"), (webp(640, 480), "webp")])
def test_the_type_is_what_the_bytes_say_whatever_the_tool_says(data: bytes, kind: str) -> None:
    image = image_of({"mime_type": "image/png", "data": base64.b64encode(data).decode()})
    assert (image.mime_type, image.width, image.height) == (f"image/{kind}", 640, 480)


SVG = b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (b"", "an empty image"),
        (SVG, "not a PNG, JPEG, GIF or WebP"),
        (f"data:image/svg+xml;base64,{base64.b64encode(SVG).decode()}", "not a PNG, JPEG, GIF or WebP"),
        (PNG[:30], "a broken image/png"),
        (PNG[:-12], "a broken image/png"),
        (jpeg(2, 3)[:-2], "a broken image/jpeg"),
        (jpeg(2, 3)[:6], "a broken image/jpeg"),
        (b"\xff\xd8\xff" + b"\xff" * 5000, "a broken image/jpeg"),
        (webp(2, 3)[:-4], "a broken image/webp"),
        (gif(2, 3)[:10], "a broken image/gif"),
        ({"data": TEXT[:-1]}, "base64 is invalid"),
        ({"data": "§" * 100}, "base64 is invalid"),
        ({"data": 5}, "no image in an object with data"),
        ({}, "no image in an object with nothing"),
        ("https://example.com/cat.png", "not fetched"),
        ("/etc/passwd", "not fetched"),
        ("data:image/png,abc", "not base64"),
        ("data:", "not fetched"),
        (7, "int is not an image"),
        (png(100_000, 100_000), "100000x100000 pixels"),
        (Drawn((100_000, 100_000)), "100000x100000 pixels"),
        (png(0, 5), "a broken image/png"),
        (png(pad=5 << 20), "at most 4,194,304 are allowed"),
    ],
)
def test_what_is_no_image_is_refused_in_words(given: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        image_of(given)


def test_fifty_megabytes_are_refused_before_they_are_decoded() -> None:
    text = "A" * (50 << 20)
    url = f"data:image/png;base64,{text}"
    tracemalloc.start()
    began = time.process_time()
    with pytest.raises(ValueError, match="about 39,321,600 bytes"):
        image_of({"mime_type": "image/png", "data": text})
    with pytest.raises(ValueError, match="about 39,321,"):
        image_of(url)
    seconds, peak = time.process_time() - began, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert seconds < processor_time(1)
    assert peak < 1 << 20, "no copy was made"


def test_messages_have_images_in_openais_parts_and_come_back() -> None:
    said = Message("tool", "two dots", tool_call_id="c1", name="draw", images=(image_of(PNG), image_of(gif(1, 1))))
    written = said.as_openai()
    assert [part["type"] for part in written["content"]] == ["text", "image_url", "image_url"]
    assert Message.from_openai(written, max_image_bytes=1000) == said
    with pytest.raises(ValueError, match="not text"):
        Message.from_openai(written)
    with pytest.raises(ValueError, match="at most 50"):
        Message.from_openai(written, max_image_bytes=50)
