"""What Toolyard holds its own parts to, for parts that others write.

A `Sandbox` of your own keeps the promises of `toolyard.sandbox.protocol` if this passes:

    class TestMySandbox(SandboxContract, SessionContract, PythonSemantics):
        @pytest_asyncio.fixture(scope="class", loop_scope="class")
        @classmethod
        async def sandbox(cls):
            async with MySandbox() as sandbox:
                yield sandbox

The suites need pytest and pytest-asyncio; nothing else of Toolyard does, so they are imported on first use.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolyard.testing.each_contract import EachContract
    from toolyard.testing.engine_contract import EngineContract
    from toolyard.testing.limiter_contract import LimiterContract
    from toolyard.testing.python_semantics import PythonSemantics
    from toolyard.testing.sandbox_contract import SandboxContract
    from toolyard.testing.session_contract import SessionContract

__all__ = ["EachContract", "EngineContract", "LimiterContract", "PythonSemantics", "SandboxContract", "SessionContract"]

_HOMES = {
    "EachContract": "toolyard.testing.each_contract",
    "EngineContract": "toolyard.testing.engine_contract",
    "LimiterContract": "toolyard.testing.limiter_contract",
    "PythonSemantics": "toolyard.testing.python_semantics",
    "SandboxContract": "toolyard.testing.sandbox_contract",
    "SessionContract": "toolyard.testing.session_contract",
}
_PARTS = {
    "toolyard.testing.limiter_contract_permits",
    "toolyard.testing.limiter_contract_sharing",
    "toolyard.testing.limiter_contract_terms",
    "toolyard.testing.python_runtime",
}
"""They have claims as well, and are imported by their homes."""


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'toolyard.testing' has no attribute {name!r}")
    import pytest

    # Or a failing claim would not say what was found instead.
    pytest.register_assert_rewrite(*({*_HOMES.values(), *_PARTS} - sys.modules.keys()))
    return getattr(import_module(home), name)
