"""What docs/migrating_from_sandbox_fusion.md says of our server, by plain HTTP, as SandboxFusion's users ask."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from serving import service_in_thread

from toolyard.rewards.code.submissions import SubmissionJudge
from toolyard.sandbox.local import LocalSandbox
from toolyard.sandbox.protocol import MIB, Limits, Program
from toolyard.sandbox.remote.sandbox import RemoteSandbox

pytestmark = pytest.mark.kernel("confined")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with service_in_thread(lambda: LocalSandbox(workers=2), judge=SubmissionJudge()) as base:
        yield base


def ran(url: str, code: str, **fields: Any) -> dict[str, Any]:
    answer = requests.post(f"{url}/run_code", json={"code": code, "language": "python", **fields}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize(
    ("method", "route"),
    [
        ("GET", "list_datasets"),
        ("POST", "list_ids"),
        ("POST", "get_prompts"),
        ("POST", "get_prompt_by_id"),
        ("POST", "get_metrics"),
    ],
)
def test_routes_about_data_sets_are_not_there(url: str, method: str, route: str) -> None:
    answer = requests.request(method, f"{url}/{route}", json={"dataset": "mine", "config": {}}, timeout=30)
    assert answer.status_code == 404


def test_numpy_starts_under_a_memory_limit(url: str) -> None:
    pytest.importorskip("numpy")
    done = ran(url, "import numpy\nprint(numpy.arange(3).sum())", memory_limit_MB=1024, run_timeout=30)
    assert (done["status"], done["run_result"]["stdout"]) == ("Success", "3\n")


@pytest.mark.parametrize("limit", [-1, 0])
def test_no_memory_limit_is_the_servers_own(url: str, limit: int) -> None:
    done = ran(url, "x = bytearray(1100 << 20)", memory_limit_MB=limit, run_timeout=30)
    assert done["status"] == "Failed"
    assert done["run_result"]["stderr"] == "Killed: the memory limit was exceeded.\n"


def test_outputs_up_to_a_mebibyte_come_back_whole(url: str) -> None:
    done = ran(url, f"print('x' * {MIB - 1})", run_timeout=30)
    assert len(done["run_result"]["stdout"]) == MIB
    done = ran(url, f"print('x' * {MIB})", run_timeout=30)
    assert len(done["run_result"]["stdout"]) == MIB


def test_a_client_of_ours_gets_more_and_learns_what_was_cut(url: str) -> None:
    async def run(limits: Limits) -> tuple[int, bool]:
        async with RemoteSandbox(url) as sandbox:
            done = await sandbox.run(Program(f"print('x' * {3 * MIB})"), limits)
        assert done.run is not None
        return len(done.stdout), done.run.stdout_truncated

    assert asyncio.run(run(Limits(output_bytes=4 * MIB))) == (3 * MIB + 1, False)
    assert asyncio.run(run(Limits(output_bytes=2 * MIB))) == (2 * MIB, True)
