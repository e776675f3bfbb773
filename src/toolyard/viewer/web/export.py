"""A self-contained report in one file: the page, its styles, its scripts and the data, without a server."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable
from os import PathLike
from pathlib import Path

from toolyard.errors import ConfigError
from toolyard.messages import JSON
from toolyard.records.jsonl import encode
from toolyard.viewer.protocol import Row
from toolyard.viewer.query import Query
from toolyard.viewer.web.answers import Answers, key_of
from toolyard.viewer.web.server import STATIC
from toolyard.whole_file import whole_file

_STYLE = re.compile(r'<link rel="stylesheet" href="static/([\w.-]+)">')
_SCRIPT = re.compile(r'<script defer src="static/([\w.-]+)"></script>')
_PAIRS = 400
"""Maximum comparisons in a report."""
_BYTES = 256 << 20
"""Maximum size of the data; browsers struggle with more in one file."""

Progress = Callable[[int, int], None]


def write_report(
    answers: Answers, path: str | PathLike[str], query: Query, *, limit: int = 500, progress: Progress | None = None
) -> int:
    """Write the first `limit` trajectories that match `query`, in its order; returns how many. The file appears only
    when it is complete.

    Raises:
        ConfigError: it cannot be written, or would be too large for a browser.
    """
    rows = answers.library.rows(query, limit=limit)
    page = _page(_data(answers, query, rows, progress))
    with whole_file(Path(path)) as file:
        file.write(page.encode())
    return len(rows)


def _data(answers: Answers, query: Query, rows: list[Row], progress: Progress | None) -> bytes:
    details: JSON = {}
    size = 0
    for done, row in enumerate(rows):
        key = key_of(row)
        told = answers.detail(key)
        if told.get("has_tokens"):
            told["tokens"] = answers.tokens(key)
        size += len(encode(told))
        if size > _BYTES:
            raise ConfigError(
                f"a report of {len(rows)} trajectories would be larger than {_BYTES >> 20} MiB; "
                "reduce it with --query or --limit"
            )
        details[key] = told
        if progress is not None:
            progress(done + 1, len(rows))
    steps = sorted({row.step for row in rows})
    data = {
        "overview": answers.overview(),
        "query": str(query),
        "matching": answers.library.count(query),
        "rows": answers.marked(rows),
        "details": details,
        "calls": _calls(answers, rows),
        "steps": {str(step): answers.step(step, query) for step in steps},
        "statistics": answers.statistics(query),
        "comparisons": _comparisons(answers, details, _BYTES - size),
    }
    return encode(data)


def _calls(answers: Answers, rows: list[Row]) -> JSON:
    keys = {row.number: key_of(row) for row in rows}
    found: JSON = {}
    for call in answers.library.calls_of(list(keys)):
        told = call._asdict()
        found.setdefault(keys[told.pop("number")], []).append({**told, "failed": bool(call.failed)})
    return found


def _comparisons(answers: Answers, details: JSON, room: int) -> JSON:
    """The comparisons of pairs in a group, up to a maximum number and size."""
    found: JSON = {}
    for left, told in details.items():
        for near in (*told.get("group", ()), *told.get("twins", ())):
            right = near["key"]
            if right in details and f"{right}|{left}" not in found and not details[right].get("damaged"):
                pair = answers.comparison(left, right)
                room -= len(encode(pair))
                if room < 0 or len(found) >= _PAIRS:
                    return found
                found[f"{left}|{right}"] = pair
    return found


def _page(data: bytes) -> str:
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    inlined: list[str] = []

    def inline(name: str, kind: str) -> str:
        content = (STATIC / name).read_text(encoding="utf-8")
        if f"</{kind}" in content.lower():
            raise ConfigError(f"static/{name} contains </{kind}, so it cannot be inlined")
        inlined.append(f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'")
        return content

    # Scripts go to the end of the body: without `src` they cannot be deferred.
    names = _SCRIPT.findall(page)
    page = _STYLE.sub(lambda found: f"<style>{inline(found[1], 'style')}</style>", _SCRIPT.sub("", page))
    scripts = "".join(f"<script>{inline(name, 'script')}</script>" for name in names)
    allowed = " ".join(inlined)
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src {allowed}; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    # In JSON `<` occurs only in strings: escaped like this, none can end the script element.
    escaped = data.decode().replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    block = f'<script type="application/json" id="toolyard-data">{escaped}</script>'
    page = page.replace("<head>", f"<head>{head}", 1)
    before, end, after = page.rpartition("</body>")
    return f"{before}{block}{scripts}{end}{after}"
