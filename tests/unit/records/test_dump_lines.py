"""A trajectory's line: what it looks like, and that nothing is lost on the way there and back."""

from __future__ import annotations

import contextlib
import json
import math
from collections import OrderedDict
from dataclasses import replace
from enum import StrEnum
from types import MappingProxyType

import numpy
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from expensive import examples
from toolyard.errors import RecordError
from toolyard.messages import Message, ToolCall
from toolyard.records import jsonl
from toolyard.records.lines import to_line, trajectory_of
from toolyard.records.trajectory import CallRecord, Failure, Sampled, Tokens, Trajectory, Turn
from trajectory_samples import failed_trajectory, good_trajectory

QUICK = settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])

FIELDS = [
    "input", "output", "gts", "score", "step", "request_id", "finish_reason", "messages", "tokens", "turns", "rewards",
    "metrics", "format_version", "state", "batch_data_id", "rollout_offset", "data_source", "token_exact", "failure",
]  # fmt: skip

VERL = (
    '{"input": "system\\nYou are a math expert.", "output": "assistant\\n#### 220000.0", "gts": "220000", "score": 0, '
    '"step": 1, "request_id": "abc", "acc": true, "metrics": "a reward function of theirs called it so"}\n'
)

# Half a surrogate pair is kept; two halves that meet become one character, as JSON has it.
texts = st.text(max_size=20) | st.just("half an emoji \ud83d, alone")
numbers = st.floats(allow_nan=False, allow_infinity=False)
integers = st.integers(-(2**70), 2**70)
json_values = st.recursive(
    st.none() | st.booleans() | integers | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(texts, json_values, max_size=3)
ids = st.text("abcxyz0123456789", min_size=1, max_size=8)
optional_text = st.none() | texts
calls = st.builds(
    CallRecord, ids, texts, texts, texts, texts, st.none() | numbers, objects, numbers, st.integers(0, 9),
    st.booleans(), optional_text,
)  # fmt: skip
sampled = st.builds(
    Sampled, st.integers(), st.integers(), texts, texts, st.integers(0, 2**32), st.lists(texts, max_size=2).map(tuple),
    st.none() | st.integers(), st.integers(),
)  # fmt: skip
trajectories = st.builds(
    Trajectory,
    request_id=texts,
    batch_data_id=texts,
    rollout_offset=st.integers(),
    state=st.sampled_from(["COMPLETED", "FAILED"]),
    finish_reason=texts,
    input=texts,
    output=texts,
    ground_truth=json_values,
    score=st.none() | numbers,
    step=st.integers(0, 10**6),
    messages=st.lists(
        st.builds(
            Message, st.sampled_from(["system", "user", "assistant", "tool"]), texts, optional_text,
            st.lists(st.builds(ToolCall, ids, texts, texts), max_size=2).map(tuple), optional_text, optional_text,
        ),
        max_size=3,
    ).map(tuple),
    tokens=st.builds(
        Tokens,
        st.lists(st.integers(0, 200_000)),
        st.lists(st.integers(0, 200_000)),
        st.lists(st.integers(0, 1)),
        st.none() | st.lists(numbers),
    ),
    turns=st.lists(
        st.builds(
            Turn, sampled, st.lists(calls, max_size=2).map(tuple), st.dictionaries(texts, numbers, max_size=2)
        ),
        max_size=2,
    ).map(tuple),
    rewards=st.dictionaries(texts, st.none() | numbers, max_size=3),
    metrics=objects,
    data_source=texts,
    token_exact=st.booleans(),
    failure=st.none() | st.builds(Failure, texts, texts, texts),
    reward_details=objects,
    started_at=st.none() | st.floats(0, 4e9),
    extra=st.dictionaries(texts | st.sampled_from([*FIELDS, "reward_details"]), json_values, max_size=3),
)  # fmt: skip


@QUICK
@given(trajectories)
def test_what_is_written_is_read_back(trajectory: Trajectory) -> None:
    line = to_line(trajectory)
    assert line.count(b"\n") == 1
    assert trajectory_of(line) == trajectory
    assert to_line(trajectory_of(line)) == line
    json.loads(line, parse_constant=pytest.fail)


def test_the_fields_stand_in_the_order_of_the_contract() -> None:
    line = json.loads(to_line(good_trajectory()))
    assert list(line) == FIELDS
    assert list(line["tokens"]) == ["prompt_ids", "response_ids", "response_mask", "response_logprobs"]
    assert list(line["turns"][0]) == ["sampled", "tool_calls", "timings"]
    assert line["messages"][2]["tool_calls"][0]["function"]["name"] == "code_interpreter"


def test_equal_trajectories_have_equal_bytes_whatever_the_order_of_their_mappings() -> None:
    one = replace(good_trajectory(), rewards={"a": 1.0, "b": None}, metrics={"x": {"p": 1, "q": [{"s": 1, "t": 2}]}})
    other = replace(one, rewards={"b": None, "a": 1.0}, metrics={"x": {"q": [{"t": 2, "s": 1}], "p": 1}})
    one = replace(one, reward_details={"a": {"weight": 1.0, "reason": "so"}, "b": {}})
    other = replace(other, reward_details={"b": {}, "a": {"reason": "so", "weight": 1.0}})
    assert one == other
    assert to_line(one) == to_line(other)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("text", ["plain", "half an emoji \ud83d"])
def test_nan_and_infinity_become_null_whoever_writes_the_line(number: float, text: str) -> None:
    given_one = good_trajectory()
    tokens = replace(given_one.tokens, response_logprobs=[number])
    line = to_line(
        replace(given_one, score=number, rewards={"r": number}, metrics={"m": number}, tokens=tokens, input=text)
    )
    found = json.loads(line, parse_constant=pytest.fail)
    assert found["score"] is None
    assert found["rewards"] == {"r": None}
    assert found["metrics"] == {"m": None}
    assert found["tokens"]["response_logprobs"] == [None]


class Colour(StrEnum):
    RED = "red"


class Sulking:
    def __str__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize("text", ["plain", "half an emoji \ud83d"])
@pytest.mark.parametrize(
    ("value", "written"),
    [
        (numpy.float64(0.5), 0.5),
        (numpy.int64(3), 3),
        (numpy.array([[1, 2]]), [[1, 2]]),
        (Colour.RED, "red"),
        ((1, (2,)), [1, [2]]),
        ({2, 1}, [1, 2]),
        (b"a\xff", "a\\xff"),
        (MappingProxyType({"k": OrderedDict(a=1)}), {"k": {"a": 1}}),
        ({1: "a", None: "b", False: "c"}, {"1": "a", "null": "b", "false": "c"}),
        (Sulking(), "<Sulking>"),
        (2**64, 2**64),
    ],
)
def test_whatever_a_tool_put_into_its_metrics_is_written(value: object, written: object, text: str) -> None:
    line = to_line(replace(good_trajectory(), metrics={"m": value}, output=text))
    assert json.loads(line)["metrics"]["m"] == written


def test_what_contains_itself_is_refused_by_name() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(RecordError, match="'request-0' cannot be written"):
        to_line(replace(good_trajectory(), ground_truth=loop))


def test_integers_beyond_64_bits_are_read_as_they_were() -> None:
    # orjson alone would silently make it a float.
    assert orjson.loads(b"[36893488147419103232]") == [3.6893488147419103e19]
    for number in (2**65, -(2**63) - 1, 2**63, 10**400):
        for value in ({"n": number}, {"n": [0, number]}, [[number]]):
            assert repr(jsonl.decode(jsonl.encode(value))) == repr(value)


# Lines of others ------------------------------------------------------------------------------------------------------


def test_a_line_of_verl_is_a_trajectory_without_tokens() -> None:
    found = trajectory_of(VERL)
    assert (found.input, found.output) == ("system\nYou are a math expert.", "assistant\n#### 220000.0")
    assert (found.score, found.step, found.request_id, found.ground_truth) == (0.0, 1, "abc", "220000")
    assert (found.token_exact, found.finish_reason, found.tokens, found.turns) == (False, "unknown", Tokens(), ())
    assert found.extra == {"acc": True, "metrics": "a reward function of theirs called it so"}
    assert trajectory_of(to_line(found)) == found


def test_the_four_fields_of_the_seeds_are_enough() -> None:
    found = trajectory_of(b'{"input": "i", "output": "o", "score": NaN, "step": 12}')
    assert (found.input, found.output, found.score, found.step, found.request_id) == ("i", "o", None, 12, "")


def test_a_line_of_verl_may_say_null_where_it_has_no_request_id() -> None:
    assert trajectory_of(b'{"input": "i", "output": "o", "score": 1, "step": 1, "request_id": null}').request_id == ""


def test_a_line_of_a_newer_version_is_read_as_far_as_it_is_known() -> None:
    said = json.loads(to_line(good_trajectory()))
    said |= {"format_version": 2, "mood": "good"}
    said["turns"][0]["sampled"]["entropy"] = 1.5
    assert trajectory_of(json.dumps(said)) == replace(good_trajectory(), extra={"mood": "good"})


def test_what_cannot_be_read_of_a_newer_version_names_the_version() -> None:
    said = json.loads(to_line(good_trajectory())) | {"format_version": 2, "tokens": "base64"}
    with pytest.raises(RecordError, match=r"tokens is text, not an object; .* newer Toolyard \(format_version 2"):
        trajectory_of(json.dumps(said))


def test_fields_that_an_older_version_lacked_get_their_defaults() -> None:
    said = json.loads(to_line(good_trajectory()))
    said["format_version"] = 0
    del said["data_source"], said["turns"][0]["sampled"]["cached_tokens"], said["turns"][0]["timings"]
    found = trajectory_of(json.dumps(said))
    assert (found.data_source, found.turns[0].sampled.cached_tokens, found.turns[0].timings) == ("unknown", None, {})


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe\x00garbage", "byte 0 (0xff) is not UTF-8"),
        (b"\x00" * 100, "not JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"input":' * 100_000, "nested too deeply"),
        (b"9" * 5_000, "not JSON"),
        (b"[1]", "not a trajectory, but an array"),
        (b"null", "not a trajectory, but null"),
        (b"{}", "not a trajectory: input is missing"),
        (b'{"input": 1, "output": ""}', "input is 1, not text"),
        (b'{"input": "", "output": "", "score": "high"}', "score is text, not a number"),
        (b'{"input": "", "output": "", "score": 1' + b"0" * 400 + b"}", "score is 1000"),
        (b'{"format_version": 1, "request_id": "a", "state": "FAILED"}', "not a trajectory: input is missing"),
    ],
)
def test_what_is_no_trajectory_is_refused_with_the_reason(line: bytes, why: str) -> None:
    with pytest.raises(RecordError) as caught:
        trajectory_of(line)
    assert why in str(caught.value)
    assert len(str(caught.value)) < 300


def paths_of(value: object, path: tuple = ()):
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from paths_of(inner, (*path, key))


@pytest.mark.parametrize("wrong", [None, True, 7, "text", [1], {"a": 1}], ids=repr)
def test_a_field_of_any_other_type_is_read_or_refused_but_never_breaks_the_reader(wrong: object) -> None:
    whole = json.loads(to_line(replace(failed_trajectory(), turns=good_trajectory().turns)))
    for path in list(paths_of(whole))[1:]:
        said = json.loads(json.dumps(whole))
        place = said
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = wrong
        with contextlib.suppress(RecordError):
            trajectory_of(json.dumps(said))


@QUICK
@given(st.integers(0, 10**6), st.binary(max_size=4), st.integers(0, 4))
def test_a_damaged_line_is_read_or_refused_but_never_breaks_the_reader(at: int, new: bytes, instead_of: int) -> None:
    line = to_line(good_trajectory(turns=2))
    at %= len(line)
    with contextlib.suppress(RecordError):
        trajectory_of(line[:at] + new + line[at + instead_of :])


def test_a_line_of_fifty_megabytes_goes_there_and_back() -> None:
    long = replace(good_trajectory(), output="é" * 25_000_000)
    line = to_line(long)
    assert len(line) > 50_000_000
    assert trajectory_of(line) == long


def test_a_number_that_no_float_holds_is_refused_by_name():
    line = json.loads(to_line(good_trajectory()))
    line["turns"][0]["tool_calls"] = [{"id": "c", "name": "t", "seconds": 10**400}]
    with pytest.raises(RecordError, match=r"turns\[0\].tool_calls\[0\].seconds .* 64 bits"):
        trajectory_of(json.dumps(line))
