"""`RemoteSandbox`: the `Sandbox` protocol over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolyard._lazy import exports

if TYPE_CHECKING:
    from toolyard.sandbox.remote.sandbox import RemoteSandbox

__all__ = ["RemoteSandbox"]

__getattr__, __dir__ = exports(
    __name__,
    {
        "toolyard.sandbox.remote.sandbox": "RemoteSandbox",
    },
)
