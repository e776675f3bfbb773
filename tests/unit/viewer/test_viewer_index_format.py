"""An index that older code built must not be read as if this code had built it."""

from __future__ import annotations

import gzip
import hashlib
import re
from pathlib import Path

from toolyard.viewer.index import place, store
from toolyard.viewer.index.rows import entry_of

DEMO = Path(__file__).parents[2] / "data" / "embedded.jsonl.gz"
DAMAGED = [b"half a li", b"{}", b'{"input": 3}']
VERLS = b'{"input": "user\\nq\\nassistant\\n", "output": "a", "gts": "1", "score": 1.0, "step": 3}'


def test_the_format_number_changes_with_what_an_index_says() -> None:
    lines = [*gzip.decompress(DEMO.read_bytes()).splitlines(), VERLS, *DAMAGED]
    entries = [entry_of(line, 0) for line in lines]
    said = repr((store.SCHEMA, [(entry.columns, entry.calls, entry.rewards, entry.text) for entry in entries]))
    said = re.sub(r"\d+\.\d{6,}", lambda found: f"{float(found[0]):.6f}", said)  # sum() is more exact since Python 3.12
    digest = hashlib.sha256(said.encode()).hexdigest()[:16]
    # If this fails, indexes say something else now: raise place.FORMAT, and put both here.
    assert (place.FORMAT, digest) == (4, "1abc7b46e4341a24")
