"""Verdicts on disk, by a digest of the question: a file each, which appears only when it is complete.

Several processes and machines may share a folder. Whoever writes a verdict replaces an equal one, and a file that
cannot be read, or is not a verdict, is as good as none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

from toolyard.rewards.judge.question import Verdict, verdict_of
from toolyard.whole_file import replacing


def key_of(asked: Mapping[str, Any]) -> str:
    """A digest of everything that determines the verdict."""
    return sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


class VerdictCache:
    """The files of one folder, which is created with the first verdict."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, key: str) -> Verdict | None:
        """None if there is none that can be read."""
        try:
            said: Any = json.loads(self._path(key).read_bytes())
            return verdict_of(cast("dict[str, Any]", said)) if isinstance(said, dict) else None
        except (OSError, ValueError):  # not there, damaged, or not a verdict
            return None

    def write(self, key: str, verdict: Verdict) -> None:
        """
        Raises:
            OSError: it cannot be written.
        """
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial:
            partial.write_text(json.dumps(verdict._asdict()), encoding="utf-8")

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.json"
