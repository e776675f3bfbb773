"""What servers say about themselves, as they write it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolyard.engines.http.survey import _of_loads, _of_metrics, version_number
from toolyard.engines.protocol import Load

METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a {b} c"} 12.0
vllm:num_requests_running{engine="1",model_name="a {b} c"} 1.0
vllm:num_requests_waiting{engine="0",model_name="a {b} c"} 3.0
vllm:num_requests_waiting{engine="1",model_name="a {b} c"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="a {b} c",reason="capacity"} 3.0
vllm:kv_cache_usage_perc{engine="0",model_name="a {b} c"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="a {b} c"} 0.5
"""


def test_vllms_gauges_are_summed_over_its_engines() -> None:
    assert _of_metrics(METRICS.encode()) == Load(13, 3, 0.5)


def test_sglangs_loads_are_summed_over_its_ranks() -> None:
    rows = [{"dp_rank": n, "num_running_reqs": 4, "num_waiting_reqs": n, "token_usage": n / 10} for n in range(3)]
    assert _of_loads(json.dumps({"loads": rows}).encode()) == Load(12, 3, 0.2)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b'{"loads": []}',
        b'{"loads": [3]}',
        b'{"loads": [{"num_running_reqs": "many", "num_waiting_reqs": 1}]}',
        b'{"loads": [{"num_running_reqs": 1}]}',
        b"vllm:num_requests_running 1.0\n",
        b"vllm:num_requests_running nan\nvllm:num_requests_waiting 1.0\n",
        b"vllm:num_requests_running inf\nvllm:num_requests_waiting 1.0\n",
        b"\xff vllm:num_requests_running x\nvllm:num_requests_running x\nvllm:num_requests_waiting 1.0\n",
    ],
)
def test_what_makes_no_sense_says_nothing(content: bytes) -> None:
    assert _of_loads(content) is None
    assert _of_metrics(content) is None


@given(st.binary(max_size=200))
def test_no_answer_raises(content: bytes) -> None:
    _of_loads(content)
    _of_metrics(content + METRICS.encode() + content)


@pytest.mark.parametrize(
    ("older", "newer"), [("step-9", "step-10"), ("default", "0"), ("default", "v1"), ("a7", "b8"), ("", "1")]
)
def test_the_number_at_the_end_tells_which_version_is_newer(older: str, newer: str) -> None:
    before, after = version_number(older), version_number(newer)
    assert before is not None
    assert after is not None
    assert before < after
    assert version_number(None) is None
    assert version_number("9" * 5000) is not None
