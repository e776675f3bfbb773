"""An HTTP client for a vendor's SDK that is answered without a server."""

from __future__ import annotations

import json
from typing import Any, Self

import pytest

httpx2 = pytest.importorskip("httpx2", reason="needs the vendors' SDKs")


class Answers:
    """All requests must be for `path`, and are answered with `content`."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.content: bytes | dict[str, Any] = b""
        self.status = 200
        self.body: dict[str, Any] = {}
        """Of the last request."""
        self.http = httpx2.Client(transport=httpx2.MockTransport(self._respond))

    def given(self, content: bytes | dict[str, Any], status: int = 200) -> Self:
        self.content, self.status = content, status
        return self

    def _respond(self, request: Any) -> Any:
        assert request.url.path == self._path
        self.body = json.loads(request.content)
        if isinstance(self.content, dict):
            return httpx2.Response(self.status, json=self.content)
        return httpx2.Response(self.status, content=self.content, headers={"content-type": "text/event-stream"})
