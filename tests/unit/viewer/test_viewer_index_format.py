"""An index that older code built must not be read as if this code had built it."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path

from toolyard.viewer.index import place, store
from toolyard.viewer.index.rows import entry_of

DEMO = Path(__file__).parents[2] / "data" / "embedded.jsonl.gz"
DAMAGED = [b"half a li", b"{}", b'{"input": 3}']
VERLS = b'{"input": "user\\nq\\nassistant\\n", "output": "a", "gts": "1", "score": 1.0, "step": 3}'


def test_the_format_number_changes_with_what_an_index_says() -> None:
    lines = [*gzip.decompress(DEMO.read_bytes()).splitlines(), VERLS, *DAMAGED]
    said = repr((store.SCHEMA, [entry_of(line, 0) for line in lines]))
    digest = hashlib.sha256(said.encode()).hexdigest()[:16]
    # If this fails, indexes say something else now: raise place.FORMAT, and put both here.
    assert (place.FORMAT, digest) == (2, "2f4b4cfcca75917d")
