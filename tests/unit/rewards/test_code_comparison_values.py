"""When a returned value equals the expected one, and the message when it does not."""

import json
import math
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expensive import examples
from patience import processor_time
from toolyard.rewards.code.protocol import Comparison
from toolyard.rewards.code.values import Wrapped, value_difference

LINES = Comparison()
EXACT = Comparison(mode="exact")
NEAR = Comparison(absolute_tolerance=1e-6)
ROUGH = Comparison(relative_tolerance=0.01)
ANY_LINES = Comparison(unordered="lines")
ANY_TOKENS = Comparison(unordered="tokens")


@pytest.mark.parametrize(
    ("returned", "expected", "said"),
    [
        (3, 3, None),
        (3, 3.0, None),
        (10**22, 1e22, None),
        (True, 1, "got True, expected 1"),
        (0, False, "got 0, expected False"),
        (True, True, None),
        (True, False, "got True, expected False"),
        (None, None, None),
        (None, 0, "got None, expected 0"),
        (None, [], "got None, expected []"),
        ("5", 5, "got '5', expected 5"),
        ("a", "a", None),
        ("a ", "a", "got 'a ', expected 'a'"),
        ("A", "a", "got 'A', expected 'a'"),
        ((1, (2, 3)), [1, [2, 3]], None),
        ([1, 2], [2, 1], "at [0]: got 1, expected 2"),
        ([1, 2], [1], "got a list of 2, expected one of 1"),
        ([[1], [2, 3]], [[1], [2, 4]], "at [1][1]: got 3, expected 4"),
        ([1], 1, "got [1], expected 1"),
        ({"a": 1}, {"a": 1.0}, None),
        ({2: "x", None: 1, True: 2, 1.5: 3}, {"2": "x", "null": 1, "true": 2, "1.5": 3}, None),
        ({"b": 1, "a": 2}, {"a": 2, "b": 1}, None),
        ({"a": 1}, {"b": 1}, "key 'b' is missing"),
        ({"a": 1, "b": 1}, {"b": 1}, "key 'a' is not expected"),
        ({"a": [{"b": 2}]}, {"a": [{"b": 3}]}, "at ['a'][0]['b']: got 2, expected 3"),
        (math.nan, math.nan, None),
        ([math.nan], [math.nan], None),
        (math.nan, 0.0, "got nan, expected 0.0"),
        (math.inf, math.inf, None),
        (math.inf, 1e308, "got inf, expected 1e+308"),
        (-0.0, 0, None),
        (0.1 + 0.2, 0.3, None),
        (1e-12, 0.0, "got 1e-12, expected 0.0"),
        (1000001, 1000001.0001, None),
        (10**9, 10**9 + 1, "got 1000000000, expected 1000000001"),
        (10**400, 1.5, "expected 1.5"),
        (float(2**53), 2**53 + 1, None),
    ],
)
def test_values_are_compared_in_jsons_terms(returned, expected, said):
    found = value_difference(returned, expected, LINES)
    assert found == said or (found is not None and said is not None and said in found)


def test_numbers_that_python_does_not_write_are_compared_all_the_same():
    assert value_difference(10**5000, 10**5000, LINES) is None
    assert value_difference([10**5000], [1.5], LINES) == "at [0]: got a huge number, expected 1.5"
    assert value_difference([10**5000], [7], ANY_LINES) == "got a huge number, which was not expected; 7 is missing"


def test_in_exact_floats_must_be_equal():
    assert value_difference(0.1 + 0.2, 0.3, EXACT) == "got 0.30000000000000004, expected 0.3"
    assert value_difference([3], [3.0], EXACT) is None
    assert value_difference(math.nan, math.nan, EXACT) is None
    assert value_difference([2, 1], [1, 2], Comparison(mode="exact", unordered="lines")) is not None
    assert value_difference("A", "a", Comparison(mode="exact", ignore_case=True)) is not None


def test_tolerances_hold_for_floats_and_not_for_integers():
    assert value_difference(1e-7, 0.0, NEAR) is None
    assert value_difference([{"a": 1.0000009}], [{"a": 1}], NEAR) is None
    assert value_difference(1.1, 1.0, NEAR) is not None
    assert value_difference(100.9, 100, ROUGH) is None
    assert value_difference(101, 100, ROUGH) is not None


def test_case_of_texts_and_not_of_keys_can_be_ignored():
    folded = Comparison(ignore_case=True)
    assert value_difference(["YES", {"a": "B"}], ["yes", {"a": "b"}], folded) is None
    assert value_difference({"A": 1}, {"a": 1}, folded) == "key 'a' is missing"


@pytest.mark.parametrize("comparison", [ANY_LINES, ANY_TOKENS])
@pytest.mark.parametrize(
    ("returned", "expected", "said"),
    [
        ([3, 1, 2], [1, 2, 3], None),
        ((3, 1), [1, 3], None),
        ([[1, 2], [3]], [[3], [1, 2]], None),
        ([[2, 1], [3]], [[3], [1, 2]], "got [2, 1], which was not expected; [1, 2] is missing"),
        ([1, 1, 2], [1, 2, 2], "got 1, which was not expected; 2 is missing"),
        ([1, True], [True, 1.0], None),
        ([1, 1], [1, True], "got 1, which was not expected; True is missing"),
        ([1], [1, 2], "got a list of 1, expected one of 2, in any order"),
        ([0.1 + 0.2, None], [None, 0.3], None),
        ([{"a": 0.1 + 0.2}, {"a": 0.5}], [{"a": 0.5}, {"a": 0.3}], None),
        ([math.nan, 1], [1, math.nan], None),
        ([{"a": [2, 1]}], [{"a": [1, 2]}], "got {'a': [2, 1]}, which was not expected; {'a': [1, 2]} is missing"),
        ([None, "1", 1, [], {}, False], [{}, False, [], 1, "1", None], None),
        ({"a": [2, 1]}, {"a": [1, 2]}, "at ['a'][0]: got 2, expected 1"),
        ("ba", "ab", "got 'ba', expected 'ab'"),
    ],
)
def test_elements_of_the_returned_list_in_any_order(comparison, returned, expected, said):
    assert value_difference(returned, expected, comparison) == said


def test_a_wrapped_value_is_itself_or_its_element():
    assert value_difference(3, Wrapped([3]), LINES) is None
    assert value_difference([3], Wrapped([3]), LINES) is None
    assert value_difference([[3]], Wrapped([3]), LINES) == "got [[3]], expected 3"
    assert value_difference([2, 1], Wrapped([[1, 2]]), ANY_LINES) is None
    assert value_difference([3], [[3]], LINES) is not None
    assert json.dumps(Wrapped([3])) == "[3]"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


@given(JSON, JSON)
@settings(max_examples=examples(150), deadline=None)
def test_values_are_the_same_if_their_json_is(one, other):
    again = json.loads(json.dumps(one))
    for comparison in (LINES, EXACT, NEAR, ANY_LINES):
        assert value_difference(again, one, comparison) is None
    if json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True):
        assert value_difference(one, other, EXACT) is None
    said = value_difference(one, other, EXACT)
    assert said is None or "\n" not in said


@given(st.lists(JSON, max_size=6), st.randoms())
@settings(max_examples=examples(100), deadline=None)
def test_shuffled_lists_are_the_same_in_any_order(items, randomly):
    shuffled = randomly.sample(items, len(items))
    assert value_difference(shuffled, items, ANY_LINES) is None
    assert value_difference([*shuffled, "one more"], items, ANY_LINES) is not None


# Size


def nested(depth: int, core: object) -> object:
    for _ in range(depth):
        core = [core]
    return core


@pytest.mark.parametrize("comparison", [LINES, ANY_LINES, EXACT])
def test_values_may_be_nested_deeper_than_python_recurses(comparison):
    assert value_difference(nested(5_000, 1), nested(5_000, 1), comparison) is None
    said = value_difference(nested(5_000, 1), nested(5_000, 2), comparison)
    assert said is not None
    assert len(said) < 200


def test_many_near_values_in_any_order_take_no_quadratic_time():
    numbers = [n / 7 for n in range(20_000)]
    shaken = [n + 1e-9 for n in numbers]
    random.Random(7).shuffle(shaken)
    near = Comparison(absolute_tolerance=1e-8, unordered="lines")
    started = time.process_time()
    assert value_difference(shaken, numbers, near) is None
    assert value_difference([*shaken[1:], 5.0], numbers, near) is not None
    assert time.process_time() - started < processor_time(8)


def test_hardest_matching_that_is_tried_is_quick():
    randomly = random.Random(7)
    rows, others = ([[randomly.random() for _ in range(50)] for _ in range(100)] for _ in range(2))
    started = time.process_time()
    for tolerance in (0.9, 0.95, 0.97, 0.99):
        value_difference(rows, others, Comparison(absolute_tolerance=tolerance, unordered="lines"))
    assert time.process_time() - started < processor_time(8)
