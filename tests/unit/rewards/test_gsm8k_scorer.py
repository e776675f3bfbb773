"""Which answers count as right: a scorer's mistakes are what a model learns."""

import time
from decimal import Decimal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from toolyard.errors import ConfigError
from toolyard.rewards.gsm8k import compute_score, extract_solution, final_answer

SOLUTION = "She has 16 - 3 - 4 = <<16-3-4=9>>9 eggs.\nShe makes 9 * 2 = $<<9*2=18>>18.\n#### 18"
SIZE = 1_000_000


def strict(text):
    return extract_solution(text, "strict")


def flexible(text):
    return extract_solution(text, "flexible")


# Strict ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (SOLUTION, "18"),
        ("#### 18.", "18"),
        ("#### 18,", "18"),
        ("#### 1,234", "1234"),
        ("#### 1,234,567.89.", "1234567.89"),
        ("#### $18.00", "18.00"),
        ("#### €5", "5"),
        ("#### \\$18", "18"),
        ("#### 18 dollars for 3 people", "18"),
        ("#### 25%", "25"),
        ("#### -5", "-5"),
        ("#### −5", "-5"),
        ("#### $-5", "-5"),
        ("#### -$5", "-5"),
        ("#### +5", "5"),
        ("#### .5", ".5"),
        ("#### $5/hour", "5"),
        ("#### 1.5e3", "1.5e3"),
    ],
)
def test_strict_reads_the_number_after_the_mark(text, answer):
    assert strict(text) == answer


@pytest.mark.parametrize("text", ["", "18", "The answer is 18.", "####18", "#### **18**", "#### eighteen", "### 18"])
def test_strict_finds_nothing_without_mark_space_and_number(text):
    assert strict(text) is None


@pytest.mark.parametrize("text", ["#### 1/2", "#### 12/34", "#### 1.2.3", "#### 1.234,56", "#### 1e9999"])
def test_strict_never_takes_the_beginning_of_something_longer_for_a_number(text):
    assert strict(text) is None


def test_strict_takes_the_last_mark_that_has_a_number():
    assert strict("#### 17\nwait\n#### 18\n#### Explanation\nthere are 3") == "18"


def test_strict_removes_commas_wherever_they_are_as_gsm8k_does():
    assert strict("#### 1,00,000") == "100000"


def test_an_answer_far_from_the_end_is_found():
    text = "#### 18\n" + "and so on " * 10_000
    assert strict(text) == flexible(text) == "18"
    assert flexible("It is 18.\n" + "and so on " * 10_000) == "18"


# Flexible -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("18", "18"),
        ("18.", "18"),
        ("18...", "18"),
        ("18,", "18"),
        ("It is 18.0", "18.0"),
        ("She makes $18.00.", "18.00"),
        ("\\boxed{18}", "18"),
        ("$\\boxed{\\$1,234}$", "1234"),
        ("\\boxed{1{,}234}", "1234"),
        ("\\boxed{1,\\!234}", "1234"),
        ("\\$18", "18"),
        ("**18**", "18"),
        ("**$18**.", "18"),
        ("€5", "5"),
        ("18 dollars", "18"),
        ("18km", "18"),
        ("Rs.500", "500"),
        ("$.50", ".50"),
        ("25%", "25"),
        ("1,234", "1234"),
        ("$1,234,567.50,", "1234567.50"),
        ("3 + 15 = 18", "18"),
        ("18 . , - $", "18"),
        ("2.5e3", "2.5e3"),
        ("5 each", "5"),
        ("3/4 = 0.75", "0.75"),
    ],
)
def test_flexible_reads_the_last_number(text, answer):
    assert flexible(text) == answer


@pytest.mark.parametrize("text", ["", ".", ",", "-", "$", "...", "-$.", "#### ", "none", "²", "½"])
def test_flexible_takes_no_punctuation_for_a_number(text):
    assert flexible(text) is None


@pytest.mark.parametrize("text", ["-5", "−5", "$-5", "-$5", "−€5", "\\$-5", "x = -5", "=-5", "**-5**", "\\boxed{-5}"])
def test_flexible_reads_the_sign_of_a_negative_number(text):
    assert flexible(text) == "-5"


@pytest.mark.parametrize("text", ["9-5", "9 - 5", "x-5", "$9-$5", "$9$-$5$", "(4)-5", "25%-5", "it is--5", "COVID-5"])
def test_flexible_takes_no_subtraction_or_dash_for_a_sign(text):
    assert flexible(text) == "5"


@pytest.mark.parametrize(
    ("text", "answer"),
    [("1,2,3", "3"), ("1,2,300", "300"), ("-1,2", "2"), ("12,34", "34"), ("1.5,2.5", "2.5"), ("1234,567", "567")],
)
def test_commas_that_part_no_thousands_part_numbers(text, answer):
    assert flexible(text) == answer


@pytest.mark.parametrize("text", ["1/2", "24/7", "1/2/3", "0.5/2.5"])
def test_the_parts_of_a_fraction_are_no_answers(text):
    assert flexible(text) is None
    assert flexible(f"18, open {text}") == "18"


def test_flexible_prefers_the_marked_number_to_a_later_one():
    assert flexible("#### 18\nCheck: 9 * 2, with 3 eaten") == "18"


@pytest.mark.parametrize("text", ["#### eighteen, that is 18", "#### **18**", "####18"])
def test_flexible_takes_the_last_number_if_the_mark_has_none(text):
    assert flexible(text) == "18"


def test_digits_of_other_scripts_are_not_read_and_do_no_harm():
    assert flexible("٣ and ３ and ²") is None
    assert compute_score("#### ١٨", "18", "flexible") == 0.0


# Scores ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["strict", "flexible"])
def test_none_wrong_and_right_answers_have_their_own_scores(method):
    def score(text):
        return compute_score(text, "18", method, format_score=0.1, score=2.0)

    assert score("no idea") == 0.0
    assert score("#### 17") == 0.1
    assert score("#### 18") == 2.0


@pytest.mark.parametrize("truth", ["18", " 18\n", "18.", "$18", "18 dollars", "#### 18", SOLUTION, 18, 18.0])
@pytest.mark.parametrize("method", ["strict", "flexible"])
def test_ground_truths_may_be_numbers_their_texts_and_whole_solutions(truth, method):
    assert compute_score(SOLUTION, truth, method) == 1.0
    assert compute_score("#### 19", truth, method) == 0.0


@pytest.mark.parametrize("answer", ["18", "18.", "18.0", "$18.00", "018", "1.8e1", "#### 18.0"])
@pytest.mark.parametrize("truth", ["18", "18.0", 18, 18.0, "18.00"])
def test_flexible_compares_values(answer, truth):
    assert compute_score(answer, truth, "flexible") == 1.0


def test_strict_compares_texts():
    assert compute_score("#### 18.0", "18") == 0.0
    assert compute_score("#### 18", "18.0") == 0.0
    assert compute_score("#### 18.0", "18.0") == 1.0
    assert compute_score("#### $1,234", "1234") == compute_score("#### 1234", "1,234") == 1.0


def test_values_are_compared_exactly():
    assert compute_score("0.30000000000000001", "0.3", "flexible") == 0.0
    assert compute_score("10000000000000001", "10000000000000000", "flexible") == 0.0
    assert compute_score("0.1", 0.1, "flexible") == 1.0


@pytest.mark.parametrize("truth", ["", "eighteen", "1/2", "3 + 15 = 18", "18 or 19", "####", float("nan"), True])
def test_a_ground_truth_that_is_no_number_is_a_mistake_and_no_score(truth):
    with pytest.raises(ConfigError, match="ground_truth"):
        compute_score("no answer at all", truth, "flexible")


@pytest.mark.parametrize("method", ["lenient", "", None])
def test_an_unknown_method_is_named(method):
    with pytest.raises(ConfigError, match=f"method {method!r}: expected one of 'strict', 'flexible'"):
        extract_solution("#### 18", method)
    with pytest.raises(ConfigError, match=f"{method!r}"):
        compute_score("no answer", "18", method)


# Any text -------------------------------------------------------------------------------------------------------------

NUMBERS = st.decimals(allow_nan=False, allow_infinity=False, places=2, min_value=-(10**12), max_value=10**12)
PIECES = st.sampled_from([*"0123456789.,-−+$€\\/%eE# {}()!x", "#### ", "{,}", "\\!", "1,234", "٣", "\ud800"])


@given(NUMBERS, st.sampled_from(["{}", "It is {}.", "**{}**", "\\boxed{{{}}}", "#### {}", "{} dollars", "${}$"]))
def test_every_number_is_found_in_every_dress(number, dress):
    for written in (f"{number}", f"{number:,}", f"{number:,}".replace("-", "−"), f"{number:e}"):
        assert compute_score(dress.format(written), f"{number}", "flexible") == 1.0, written


@given(st.lists(PIECES).map("".join))
@example("-.e1")
@example("1,.5")
@example("#### -$-.5e-9")
def test_any_text_gives_a_number_or_nothing_and_what_strict_finds_flexible_finds(text):
    marked, found = strict(text), flexible(text)
    assert marked is None or marked == found
    if found is not None:
        assert Decimal(found).is_finite()
        assert flexible(final_answer(found)) == found
        assert compute_score(text, found, "flexible") == 1.0


NASTY = ["1,", "#### ", "-", "7", "$", "1 ", "1-", "1.", "1e", "1/", "-$", "\\$", "#", "#### 1/2", "#### $", "9,999,"]


@pytest.mark.parametrize("method", ["strict", "flexible"])
@pytest.mark.parametrize("piece", NASTY)
@pytest.mark.slow
def test_megabytes_of_nasty_text_are_scored_in_linear_time(piece, method):
    text = piece * (SIZE // len(piece))
    start = time.thread_time()
    compute_score(text, "18", method)
    assert time.thread_time() - start < 4  # anything quadratic takes far longer


def test_numbers_of_millions_of_digits_are_compared_in_linear_time():
    digits = "7" * SIZE
    start = time.thread_time()
    assert compute_score(f"#### {digits}", f"{digits}.0", "flexible") == 1.0
    assert compute_score(f"#### {digits}", f"{digits}.1", "flexible") == 0.0
    assert time.thread_time() - start < 4
