"""`make soak-cluster`, small."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster_rollouts import ray_nodes
from soak_cluster import soak

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Ray's own processes and files
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
]


@pytest.mark.exhaustive
def test_whatever_is_killed_each_id_is_in_the_dump_once_and_finished_calls_ran_once(tmp_path: Path) -> None:
    with ray_nodes() as nodes:
        done, _ = soak(tmp_path / "job", nodes, requests=80, kills=5, seed=3)
    assert sum(done.values()) == 5
