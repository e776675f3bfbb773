from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from toolyard.cli.app import app


@pytest.mark.kernel("confined")
def test_the_bench_measures_the_sandbox_beside_plain_subprocesses():
    done = CliRunner().invoke(app, ["bench", "--seconds", "0.2", "--json"])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    assert [row["times"] == 1.0 for row in rows] == [True, False, True, False]
    assert all(row["per_second"] > 0 and row["p50_seconds"] > 0 for row in rows)
