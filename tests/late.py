"""Packages that tests import at their first use: collecting all tests must not load torch into every process."""

from __future__ import annotations

from typing import Any

import pytest


class Late:
    """A module, or a skipped test where it is not installed."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest looks for marks and fixtures
            raise AttributeError(name)
        return getattr(pytest.importorskip(self._name), name)
