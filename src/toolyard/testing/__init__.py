"""Conformance suites for your own sandboxes, engines and limiters; Toolyard's own parts pass them too.

Your `Sandbox` keeps the promises of `toolyard.sandbox.protocol` if this passes:

    class TestMySandbox(SandboxContract, SessionContract, PythonSemantics):
        @pytest_asyncio.fixture(scope="class", loop_scope="class")
        @classmethod
        async def sandbox(cls):
            async with MySandbox() as sandbox:
                yield sandbox

The suites need pytest and pytest-asyncio; the rest of Toolyard does not, so they are imported on first use.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolyard.testing.engine.contract import EngineContract
    from toolyard.testing.limiter.contract import LimiterContract
    from toolyard.testing.sandbox.contract import SandboxContract
    from toolyard.testing.sandbox.each import EachContract
    from toolyard.testing.sandbox.python_semantics import PythonSemantics
    from toolyard.testing.sandbox.sessions import SessionContract

__all__ = ["EachContract", "EngineContract", "LimiterContract", "PythonSemantics", "SandboxContract", "SessionContract"]

_HOMES = {
    "EachContract": "toolyard.testing.sandbox.each",
    "EngineContract": "toolyard.testing.engine.contract",
    "LimiterContract": "toolyard.testing.limiter.contract",
    "PythonSemantics": "toolyard.testing.sandbox.python_semantics",
    "SandboxContract": "toolyard.testing.sandbox.contract",
    "SessionContract": "toolyard.testing.sandbox.sessions",
}
_PARTS = {
    "toolyard.testing.limiter.permits",
    "toolyard.testing.limiter.sharing",
    "toolyard.testing.limiter.terms",
    "toolyard.testing.sandbox.python_runtime",
}
"""Modules with further tests, imported by those above."""


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'toolyard.testing' has no attribute {name!r}")
    import pytest

    # Otherwise a failing assertion would not show its values.
    pytest.register_assert_rewrite(*({*_HOMES.values(), *_PARTS} - sys.modules.keys()))
    return getattr(import_module(home), name)
