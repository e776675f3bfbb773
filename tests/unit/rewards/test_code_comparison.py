"""When two outputs are the same, and the message when they are not."""

import itertools
import random
import time
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expensive import examples
from patience import processor_time
from toolyard.rewards.code.comparison import difference
from toolyard.rewards.code.protocol import Comparison
from toolyard.rewards.code.values import value_difference

LINES = Comparison()
TRIMMED = Comparison(mode="trimmed")
TOKENS = Comparison(mode="tokens")
EXACT = Comparison(mode="exact")
NEAR = Comparison(absolute_tolerance=1e-6)
ROUGH = Comparison(relative_tolerance=0.01)
ANY_LINES = Comparison(unordered="lines")
ANY_TOKENS = Comparison(unordered="tokens")
ANY_NEAR_LINES = Comparison(mode="tokens", unordered="lines", absolute_tolerance=0.1)
ANY_NEAR_WORDS = Comparison(mode="tokens", unordered="tokens", relative_tolerance=0.1)
ANY_WORDS = Comparison(mode="tokens", unordered="tokens")


# Text


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        ("", ""),
        ("a", "a\n"),
        ("a\n\n\n", "a"),
        ("a  \nb\t\n", "a\nb"),
        ("a\r\nb\r\n", "a\nb\n"),
        ("a\rb", "a\nb"),
        ("a \r\n \r\n", "a"),
        ("\n \n", ""),
        (" a\n\nb", " a\n\nb  "),
        ("a\x0b\x0c", "a"),
    ],
)
def test_ends_of_lines_and_of_the_text_never_count(actual, expected):
    for comparison in (LINES, TRIMMED, TOKENS, NEAR, ANY_LINES, ANY_TOKENS, ANY_WORDS):
        assert difference(actual, expected, comparison) is None
        assert difference(expected, actual, comparison) is None
    assert (difference(actual, expected, EXACT) is None) == (actual == expected)


@pytest.mark.parametrize(
    ("actual", "expected", "said"),
    [
        ("a\nb\nc", "a\nx\nc", "line 2: got 'b', expected 'x'"),
        (" a", "a", "line 1: got ' a', expected 'a'"),
        ("a  b", "a b", "line 1: got 'a  b', expected 'a b'"),
        ("\na", "a", "line 1: got '', expected 'a'"),
        ("a\n\nb", "a\nb", "line 2: got '', expected 'b'"),
        ("", "x", "line 1: got the end, expected 'x'"),
        ("x", "", "line 1: got 'x', expected the end"),
        ("a", "a\nb", "line 2: got the end, expected 'b'"),
        ("a\nb", "a", "line 2: got 'b', expected the end"),
        ("a b", "ab", "line 1: got 'a b', expected 'ab'"),
        ("1.0", "1", "line 1: got '1.0', expected '1'"),
        ("A", "a", "line 1: got 'A', expected 'a'"),
        ("a\u2028b", "a\nb", r"line 1: got 'a\u2028b', expected 'a'"),
    ],
)
def test_everything_else_counts_in_lines(actual, expected, said):
    assert difference(actual, expected, LINES) == said


@pytest.mark.parametrize(
    ("actual", "expected", "said"),
    [
        (" a\n\n\tb c", "a\nb c", None),
        ("\n \n a", "a", None),
        ("a\n b", "a\nb  c", "line 2: got 'b', expected 'b  c'"),
        ("a  b", "a b", "line 1: got 'a  b', expected 'a b'"),
        ("a b", "a\nb", "line 1: got 'a b', expected 'a'"),
        ("\n\na", "a\nb", "line 2: got the end, expected 'b'"),
    ],
)
def test_in_trimmed_neither_empty_lines_count_nor_white_space_around_lines(actual, expected, said):
    assert difference(actual, expected, TRIMMED) == said


def test_a_long_line_is_shown_where_it_differs():
    said = difference("0\n" + "a" * 1000 + "b" + "c" * 1000, "0\n" + "a" * 1000 + "d" + "c" * 1000, LINES)
    assert said == f"line 2: got …'{'a' * 15}b{'c' * 44}'…, expected …'{'a' * 15}d{'c' * 44}'…"
    for comparison in (LINES, TOKENS, EXACT, ANY_LINES, ANY_WORDS, NEAR):
        assert len(difference("x" * 10_000 + "\ny", "z" * 10_000, comparison) or "") < 250


@pytest.mark.parametrize(
    ("actual", "expected", "said"),
    [
        ("a b\n c", "a\nb c", None),
        ("a\n\n\nb", "a b", None),
        ("ab", "a b", "line 1: got 'ab', expected 'a'"),
        ("a\nb\nc", "a b x", "line 3: got 'c', expected 'x'"),
        ("a\nb", "a b c", "line 2: got the end, expected 'c'"),
        ("a\nb\nc", "a b", "line 3: got 'c', expected the end"),
        ("", "a", "line 1: got the end, expected 'a'"),
    ],
)
def test_in_tokens_white_space_only_separates(actual, expected, said):
    assert difference(actual, expected, TOKENS) == said


@pytest.mark.parametrize(
    ("actual", "expected", "said"),
    [
        ("a\n", "a", "line 1, character 2: got 'a\\n', expected the end"),
        ("a\r\n", "a\n", "line 1, character 2: got 'a\\r\\n', expected 'a\\n'"),
        ("x\ny ", "x\ny", "line 2, character 2: got 'y ', expected the end"),
        ("x\nab", "x\nac", "line 2, character 2: got 'ab', expected 'ac'"),
        ("A", "a", "line 1, character 1: got 'A', expected 'a'"),
    ],
)
def test_in_exact_every_character_counts_and_no_other_setting(actual, expected, said):
    for comparison in (EXACT, Comparison(mode="exact", ignore_case=True, absolute_tolerance=9, unordered="lines")):
        assert difference(actual, expected, comparison) == said


def test_case_can_be_ignored_and_is_shown_as_it_was():
    folded = Comparison(ignore_case=True)
    assert difference("YES\nStraße", "yes\nSTRASSE\n", folded) is None
    assert difference("Yes\nNo", "yes\nYES", folded) == "line 2: got 'No', expected 'YES'"
    assert difference("B\nA", "a\nb", Comparison(ignore_case=True, unordered="lines")) is None


# Numbers in text


@pytest.mark.parametrize(
    ("actual", "expected", "same"),
    [
        ("1.0000001", "1", True),
        ("1.00001", "1", False),
        ("1e0", "1.0", True),
        ("100000", "1e5", True),
        ("1E5", "100000.0", True),
        (".5", "0.5", True),
        ("5.", "5", True),
        ("+5.0", "5", True),
        ("-0.0", "0", True),
        ("-0.0", "0.0", True),
        ("nan", "NaN", True),
        ("-nan", "nan", True),
        ("nan", "1.0", False),
        ("1.0", "nan", False),
        ("inf", "Infinity", True),
        ("-inf", "inf", False),
        ("inf", "1e308", False),
        ("inf", "1e999", False),
        ("1e999", "2e999", False),
        ("1e999", "1e999", True),
        ("9" * 400, "9" * 400 + ".0", False),
        ("1", "2", False),
        ("1", "01", False),
        ("1", "+1", False),
        ("10000000", "10000001", False),
        ("1_0.0", "10", False),
        ("0x10", "16.0", False),
        ("١.0", "1.0", False),
        ("1.0,", "1,", False),
        ("1.0a", "1a", False),
        ("1.0 x", "1 x", True),
        ("1.0  x", "1 x", False),
        (" 1.0", "1", False),
        ("x 1.0\ny", "x 1\ny ", True),
        ("1.0 2.0", "1 2 3", False),
        ("infinit", "inf", False),
        ("e5", "1e5", False),
        ("", "0.0", False),
    ],
)
def test_numbers_may_differ_by_the_tolerance_and_nothing_else_may(actual, expected, same):
    assert (difference(actual, expected, NEAR) is None) == same
    if " " not in expected + actual:
        assert (difference(actual, expected, NEAR.model_copy(update={"mode": "tokens"})) is None) == same
        assert (difference(actual, expected, NEAR.model_copy(update={"unordered": "lines"})) is None) == same
        assert (difference(actual, expected, NEAR.model_copy(update={"unordered": "tokens"})) is None) == same


@pytest.mark.parametrize(
    ("actual", "expected", "same"),
    [
        ("100.9", "100", True),
        ("101.1", "100", False),
        ("-100.9", "-100", True),
        ("100.9", "-100", False),
        ("0.000001", "0.0", False),
        ("1e-300", "1.005e-300", True),
    ],
)
def test_a_relative_tolerance_is_of_the_expected_number(actual, expected, same):
    assert (difference(actual, expected, ROUGH) is None) == same


def test_the_larger_of_two_tolerances_holds():
    both = Comparison(absolute_tolerance=0.1, relative_tolerance=0.01)
    assert difference("0.1", "0.0", both) is None
    assert difference("1.1", "1.0", both) is None  # 1.1 - 1.0 > 0.1 in binary
    assert difference("1009.0", "1000", both) is None
    assert difference("1011.0", "1000", both) is not None


def test_the_first_number_outside_the_tolerance_is_shown():
    actual = "1.0 " * 30 + "5.0 7"
    expected = "1 " * 30 + "6.0 7"
    said = difference(actual, expected, NEAR)
    assert said == "line 1: got …'.0 1.0 1.0 1.0 5.0 7', expected …' 1 1 1 1 1 1 1 6.0 7'"


@given(st.floats(-1e300, 1e300), st.integers(1, 17))
@settings(deadline=None)
def test_a_number_in_any_spelling_is_itself(number, digits):
    spellings = [repr(number), f"{number:.25e}", f"{number:+.17g}"]
    for one, other in itertools.product(spellings, spellings):
        assert difference(one, other, Comparison(relative_tolerance=1e-12)) is None
    assert difference(f"{number:.{digits}e}", repr(number), Comparison(relative_tolerance=10.0**-digits)) is None


# In any order


@pytest.mark.parametrize(
    ("actual", "expected", "comparison", "said"),
    [
        ("b\na", "a\nb", ANY_LINES, None),
        ("a\na\nb", "a\nb\nb", ANY_LINES, "line 1: got 'a', expected 'b'"),
        ("c\nb", "a\nb", ANY_LINES, "line 1: got 'c', expected 'a'"),
        ("b\nc\na", "a\nb", ANY_LINES, "line 2: got 'c', expected the end"),
        ("b", "a\nb", ANY_LINES, "line 2: got the end, expected 'a'"),
        ("b a\nc", "c\na b", ANY_LINES, "line 1: got 'b a', expected 'a b'"),
        ("b\n\na", "a\nb", ANY_LINES, "line 2: got '', expected the end"),
        ("b\n\na", "\nb\na", ANY_LINES, None),
        ("b\n\n a", "a\nb", Comparison(mode="tokens", unordered="lines"), None),
        ("b  x\n\na", "a\nb x", Comparison(mode="tokens", unordered="lines"), None),
        ("x b\na", "a\nb x", Comparison(mode="tokens", unordered="lines"), "line 1: got 'x b', expected 'b x'"),
        ("b a\nc d", "a b\nd c", ANY_TOKENS, None),
        ("c d\nb a", "a b\nd c", ANY_TOKENS, "line 1: got 'c d', expected 'a b'"),
        ("a a b", "a b b", ANY_TOKENS, "line 1: got 'a a b', expected 'a b b'"),
        ("c b\na", "a b c", ANY_WORDS, None),
        ("c b\nx", "a b c", ANY_WORDS, "line 2: got 'x', expected 'a'"),
        ("c b", "a b c", ANY_WORDS, "line 1: got the end, expected 'a'"),
    ],
)
def test_order_does_not_count_where_asked(actual, expected, comparison, said):
    assert difference(actual, expected, comparison) == said


@pytest.mark.parametrize(
    ("actual", "expected", "same"),
    [
        ("2.0\n1", "1.0000001\n2", True),
        ("2.0\n2", "1.0\n2", False),
        # Pairing by size alone, or the nearest first, would fail here.
        ("0.4999999 3.2\n0.5 1.1", "0.5 1.1\n0.5 3.2", True),
        ("1.0 b\n1.0000001 a", "1.00000005 a\n1.0 b", True),
        ("nan\ninf\n1.0", "1\nNaN\nInf", True),
        ("nan\n-inf", "NaN\n-Infinity", True),
        ("nan\nnan", "NaN\n-Infinity", False),
        ("3\n3.0", "3.0\n3", True),
        ("3\n4", "4.0\n3", True),
        ("a\n1.0", "1\na", True),
        ("a\n1.0", "1\nb", False),
    ],
)
def test_order_and_tolerance_together(actual, expected, same):
    near = Comparison(absolute_tolerance=1e-6, unordered="lines")
    assert (difference(actual, expected, near) is None) == same
    assert (difference(expected, actual, near) is None) == same


def matched_by_trial(actual: list[float], expected: list[float], tolerance: float) -> bool:
    """Whether some order fits, by trying all."""
    return any(
        all(abs(one - other) <= tolerance + 1e-9 for one, other in zip(order, expected, strict=True))
        for order in itertools.permutations(actual)
    )


GRID = st.lists(st.integers(0, 30), min_size=1, max_size=5)


@given(GRID, st.data())
@settings(max_examples=examples(150), deadline=None)
def test_numbers_in_any_order_fit_exactly_if_some_order_does(expected, data):
    actual = data.draw(st.lists(st.integers(0, 30), min_size=len(expected), max_size=len(expected)))
    one, other = [n / 4 for n in actual], [n / 4 for n in expected]
    near = Comparison(absolute_tolerance=0.5, unordered="lines")
    fits = matched_by_trial(one, other, 0.5)
    assert (value_difference(one, other, near) is None) == fits
    assert (difference("\n".join(map(repr, one)), "\n".join(map(repr, other)), near) is None) == fits
    words = Comparison(mode="tokens", absolute_tolerance=0.5, unordered="tokens")
    assert (difference(" ".join(map(repr, one)), " ".join(map(repr, other)), words) is None) == fits


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=5), st.randoms())
@settings(max_examples=examples(100), deadline=None)
def test_lines_of_several_numbers_are_matched_however_they_are_shaken(rows, randomly):
    shaken = [[n + randomly.uniform(-0.4, 0.4) for n in row] for row in rows]
    randomly.shuffle(shaken)
    near = Comparison(absolute_tolerance=0.4, unordered="lines")
    assert value_difference(shaken, [[float(n) for n in row] for row in rows], near) is None
    text, other = ("\n".join(" ".join(map(str, row)) for row in side) for side in (shaken, rows))
    assert difference(text, other, near) is None


TEXT = st.text(alphabet="ab \n1.", max_size=12)


@given(
    TEXT,
    TEXT,
    st.sampled_from(["lines", "trimmed", "tokens"]),
    st.sampled_from(["no", "lines", "tokens"]),
    st.booleans(),
)
@settings(max_examples=examples(200), deadline=None)
def test_looser_settings_accept_what_stricter_ones_do(one, other, mode, unordered, tolerant):
    loose = Comparison(mode=mode, unordered=unordered, absolute_tolerance=0.1 if tolerant else 0.0)
    strict = Comparison(mode=mode)
    if difference(one, other, strict) is None:
        assert difference(one, other, loose) is None
    if difference(one, other, LINES) is None:
        assert difference(one, other, TRIMMED) is None
    if difference(one, other, TRIMMED) is None:
        assert difference(one, other, TOKENS) is None
    for comparison in (loose, strict):
        assert difference(one, one, comparison) is None
        said = difference(one, other, comparison)
        assert (said is None) == (difference(other, one, comparison) is None)
        assert said is None or (said.startswith("line ") and "\n" not in said)


# Size


@pytest.fixture(scope="module")
def numbers() -> str:
    return "\n".join(map(str, range(1_400_000)))  # 10 MB


@pytest.mark.parametrize("comparison", [LINES, TRIMMED, TOKENS, EXACT, NEAR, ANY_LINES, ANY_TOKENS])
def test_ten_equal_megabytes_are_compared_at_once(numbers, comparison):
    again = numbers[:1000] + numbers[1000:]
    started = time.process_time()
    assert difference(again, numbers, comparison) is None
    assert comparison is EXACT or difference(f"{again}\r\n", numbers, comparison) is None
    assert time.process_time() - started < processor_time(3)


@pytest.mark.parametrize(
    ("change", "comparison"),
    [
        (lambda text: (text.replace("\n", " \n"), text), LINES),
        (lambda text: (text[:-1] + "x", text), LINES),
        (lambda text: (text[:-1] + "x", text), NEAR),
        (lambda text: (text[:-1] + "x", text), TOKENS),
        (lambda text: (text[:-1] + "x", text), ANY_LINES),
        (lambda text: (text.replace("\n", " ")[:-1] + "x", text.replace("\n", " ")), EXACT),
        (lambda text: (text.replace("\n", " ")[:-1] + "x", text.replace("\n", " ")), NEAR),
        (lambda text: (text.replace("\n", " ")[:-1] + "x", text.replace("\n", " ")), ANY_TOKENS),
        (lambda text: (" " * len(text) + "a", " " * len(text) + "b"), NEAR),
        (lambda text: ("\n" * len(text) + "a", "b"), LINES),
        (lambda text: (" " * len(text) + "a" + " " * len(text) + "c", "b"), TRIMMED),
        (lambda text: ("a" + " \n" * len(text) + "c", "b"), TRIMMED),
        (lambda text: ("1" * len(text) + ".0", "1" * len(text) + ".5"), NEAR),
        (lambda text: ("e" * len(text), "1" + "e" * len(text)), NEAR),
    ],
)
def test_outputs_that_differ_take_linear_time(numbers, change, comparison):
    actual, expected = change(numbers[:700_000])
    started = time.process_time()
    difference(actual, expected, comparison)
    assert time.process_time() - started < processor_time(3)


def test_many_near_lines_in_any_order_take_no_quadratic_time():
    numbers = [n / 7 for n in range(20_000)]
    shaken = [n + 1e-9 for n in numbers]
    random.Random(7).shuffle(shaken)
    near = Comparison(absolute_tolerance=1e-8, unordered="lines")
    started = time.process_time()
    assert difference("\n".join(map(str, shaken)), "\n".join(map(str, numbers)), near) is None
    assert difference("\n".join(map(str, [*shaken[1:], 5.0])), "\n".join(map(str, numbers)), near) is not None
    assert time.process_time() - started < processor_time(8)


@pytest.mark.parametrize(
    "comparison", [LINES, TRIMMED, TOKENS, EXACT, NEAR, ANY_LINES, ANY_TOKENS, ANY_NEAR_LINES, ANY_NEAR_WORDS]
)
@pytest.mark.parametrize("flood", ["\n", "ab\n", "ab ", "1.5\n", "1.5 ", " \n", "ab\r"])
def test_a_flood_of_output_takes_no_more_memory_than_a_few_copies_of_it(flood, comparison):
    actual, expected = flood * (400_000 // len(flood)) + "x", "1.5 ab\n" * 10
    tracemalloc.start()
    assert difference(actual, expected, comparison) is not None
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * len(actual)
