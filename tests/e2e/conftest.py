"""What several tests of whole commands need."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from byte_model import make_model


@pytest.fixture(autouse=True)
def no_run_is_left() -> Iterator[None]:
    yield
    if "faulting" in sys.modules:
        sys.modules["faulting"].end_runs()


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(folder)
    return folder
