"""Which expressions are equal, where the answer is in a text, and what is wrong with a ground truth."""

import subprocess
import sys
import time
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolyard.errors import ConfigError, RewardError
from toolyard.rewards.math import scorer as math
from toolyard.rewards.math.scorer import MathChecker, MathScore
from toolyard.rewards.math.text import Expression, find_answer
from toolyard.rewards.protocol import GroundTruthError

SIZE = 1_000_000
TOO_LONG = "\\boxed{" + "x" * 20_000 + "}"


@pytest.fixture(scope="module")
def checker():
    with MathChecker() as checker:
        yield checker


# Equal, and not -------------------------------------------------------------------------------------------------------

EQUAL = [
    (r"\frac{1}{2}", "0.5"),
    ("1/2", r"\frac12"),
    (r"\dfrac{3}{6}", r"\tfrac{1}{2}"),
    (r"-\frac{1}{2}", r"\frac{-1}{2}"),
    (r"2\frac{1}{3}", r"\frac73"),
    ("0.3333333", r"\frac13"),
    (r"50\%", "0.5"),
    ("5.0", "5"),
    ("5.", "5"),
    ("+5", "5"),
    ("−5", "-5"),
    ("007", "7"),
    ("1,234", "1234"),
    ("1{,}234,567", "1234567"),
    (r"1,\!234", "1234"),
    ("10 000", "10000"),
    (r"10\,000", "10000"),
    ("1.5e3", "1500"),
    ("1e-7", "0.0000001"),
    (r"3\times10^5", "300000"),
    (r"1.2\times10^{-6}", "0.0000012"),
    ("2^{10}", "1024"),
    ("5!", "120"),
    (r"\log_2 8", "3"),
    (r"\ln(e^2)", "2"),
    (r"\binom{5}{2}", "10"),
    (r"\sqrt{8}", r"2\sqrt{2}"),
    (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{2}}{2}"),
    (r"\frac{\pi}{4}", r"0.25\pi"),
    ("3+4i", "4i+3"),
    (r"90^\circ", "90"),
    (r"5\text{ cm}", "5"),
    (r"\$5", "5"),
    (r"\mathbf{5}", "5"),
    ("x^2+2x+1", "(x+1)^2"),
    (r"\sin^2 x+\cos^2 x", "1"),
    ("a+b", "b+a"),
    ("x=5", "5"),
    ("5", "x=5"),
    ("f(x)=x^2", "x^2"),
    ("y=2x+1", "2x+1=y"),
    ("x>2", "2<x"),
    (r"\{3,1,2\}", r"\{1,2,3\}"),
    ("3, 1, 2", "1,2,3"),
    (r"\pm 3", "-3, 3"),
    (r"1\text{ and }2", "1,2"),
    ("[1,2)", r"\left[1,2\right)"),
    (r"x \in (1,2)", "(1,2)"),
    (r"(-\infty,3]\cup[5,\infty)", r"[5,\infty)\cup(-\infty,3]"),
    (r"\left(\frac{1}{2},3\right)", "(0.5,3)"),
    (r"\langle 1,2,3\rangle", "(1,2,3)"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1&2\\3&4\end{bmatrix}"),
    (r"\text{(A)}", "A"),
    (r"\text{Evelyn}", "Evelyn"),
    ("$5$", "5"),
]
DIFFERENT = [
    ("1/3", "0.5"),
    ("0.33", r"\frac13"),
    ("3.14", r"\pi"),
    ("-5", "5"),
    ("50", "0.5"),
    ("5.001", "5"),
    ("1000001", "1000000"),
    ("0", "0.0000012"),
    ("0.000001", "0.0000012"),
    ("0", r"\frac{1}{10000000}"),
    ("0", "10 000"),
    ("1.2", r"\langle 1,2\rangle"),
    ("x^2+1", "x^2"),
    ("2x", "x"),
    ("x", "5"),
    ("5", "x"),
    ("x=5", "x=6"),
    ("5=6", "5"),
    ("5,6", "5"),
    (r"5\text{ or }6", "5"),
    ("y=2x", "y=2x+1"),
    ("x>2", "x<2"),
    (r"\{1,2\}", r"\{1,2,3\}"),
    ("[1,2]", "[1,2)"),
    ("(2,1)", "(1,2)"),
    ("(1,2,3)", "(3,2,1)"),
    (r"\begin{pmatrix}1&2\\3&5\end{pmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    ("1+i", "1-i"),
    (r"\sin(x)", r"\cos(x)"),
    (r"\infty", "5"),
    (r"\mathbb{R}", "5"),
    (r"\emptyset", "0"),
    (r"\frac{5}{0}", "5"),
    ("0/0", "5"),
    ("B", "A"),
    (r"\text{no}", r"\text{yes}"),
    ("", "5"),
    ("*", "5"),
    (r"\frac{", "5"),
]


@pytest.mark.parametrize(("answer", "truth"), EQUAL)
def test_these_are_the_same(checker, answer, truth):
    assert checker.check(f"So it is $\\boxed{{{answer}}}$.", truth).value == 1.0


@pytest.mark.parametrize(("answer", "truth"), DIFFERENT)
def test_these_are_not_the_same(checker, answer, truth):
    found = checker.check(f"So it is $\\boxed{{{answer}}}$.", truth)
    assert (found.value, found.timed_out) == (0.0, False)


def test_the_score_says_what_was_compared(checker):
    found = checker.check(r"Thus \boxed{ \frac{2}{4} }.", r"Half of it: $\boxed{0.5}$")
    assert found == MathScore(1.0, extracted=r"\frac{2}{4}", expected="0.5", timed_out=False)
    assert checker.check("The answer is $x+1$, I think.", "1+x").extracted == "x+1"
    assert checker.check("I do not know.", "5") == MathScore(0.0, extracted=None, expected="5")


# What needs no process ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "truth", "value"),
    [("5", "5", 1.0), ("5", "6", 0.0), ("5.0", 5, 1.0), ("1,234", 1234.0, 1.0), (r"\int_0^1 x", r"\int_0^1 x", 1.0)],
)
def test_numbers_and_the_same_text_are_decided_without_a_process(answer, truth, value):
    with MathChecker() as checker:
        assert checker.check(f"\\boxed{{{answer}}}", truth).value == value
        assert checker.pids() == []


@given(st.integers(-(10**12), 10**12), st.integers(-(10**12), 10**12))
def test_integers_are_right_if_and_only_if_they_are_equal(answer, truth):
    for written in (f"{answer}", f"{answer:,}", f"{answer:,}".replace(",", r"\,"), f"{answer}.0", f" {answer}"):
        assert math.compute_score(f"\\boxed{{{written}}}", answer) == 1.0
    assert math.compute_score(f"\\boxed{{{answer:,}}}", truth) == float(answer == truth)


# Where the answer is --------------------------------------------------------------------------------------------------


def boxed(text):
    found = find_answer(text)
    return found.text if isinstance(found, Expression) else None


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"first \boxed{4}, no: \boxed{5}.", "5"),
        (r"$\boxed{1}$ and $\boxed{2}$", "1, 2"),
        (r"\boxed{1} or \boxed{2}", "1, 2"),
        (r"\(\boxed{1}\), \(\boxed{2}\), and \(\boxed{3}\)", "1, 2, 3"),
        ("\\boxed{1}\nhence\n\\boxed{2}", "2"),
        (r"\boxed{1} \boxed{2}", "2"),
        (r"\boxed{x = \boxed{5}}", "5"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{5} is to be written as \boxed{}", "5"),
        (r"\boxed{5} or rather \boxed{7", "5"),
        (r"a stray } and { then \boxed{5}", "5"),
        (r"\boxed {5}", "5"),
        (r"\fbox{5}", "5"),
        ("\\\\boxed{5}", "5"),
        ("x^2 + 1", "x^2 + 1"),
        (r" \frac{x}{2}. ", r"\frac{x}{2}"),
    ],
)
def test_the_last_complete_box_is_the_answer(text, answer):
    assert boxed(text) == answer


@pytest.mark.parametrize("text", [r"\boxed{5", r"\boxed{", r"\boxed{}", r"\boxed{{5}", "boxed{5}", r"It is \\boxed 5"])
def test_what_is_not_a_complete_box_is_none(text):
    assert boxed(text) is None


@pytest.mark.parametrize(
    ("text", "truth"),
    [
        ("The final answer is $\\frac{1}{2}$.", "0.5"),
        ("The final answer is 42.", "42"),
        ("Answer: 42", "42"),
        ("#### 18", "18"),
        ("She has 18 dollars.", "18"),
        ("With $x=3$ and $y=4$ the answer is $7$", "7"),
        ("It is \\(\\frac{3}{4}\\).", "0.75"),
        ("\\[ x = 12 \\]", "12"),
        ("x + x", "2x"),
        ("long ago " * 10_000 + "\nThe answer is $7$.", "7"),
    ],
)
def test_without_a_box_the_answer_is_found_in_the_text(checker, text, truth):
    assert checker.check(text, truth).value == 1.0


ROWS = r"-7 & 6 \\ 11 & -9"
LINES = "\n -7 & 6 \\\\\n 11 & -9 \n"


@pytest.mark.parametrize("rows", [ROWS, LINES], ids=["one line", "several lines"])
@pytest.mark.parametrize("kind", ["bmatrix", "pmatrix", "matrix"])
@pytest.mark.parametrize("around", ["{}", "${}$", "$\n{}\n$", "$${}$$", "A = {}", "So it is\n\n$${}$$", "Thus ${}$."])
def test_a_matrix_needs_no_box(checker, around, kind, rows):
    matrix = f"\\begin{{{kind}}}{rows}\\end{{{kind}}}"
    assert checker.check(around.replace("{}", matrix), f"\\begin{{bmatrix}}{LINES}\\end{{bmatrix}}").value == 1.0
    assert checker.check(around.replace("{}", matrix), matrix).value == 1.0
    assert checker.check(around.replace("{}", matrix.replace("6", "7")), matrix).value == 0.0


def test_a_matrix_is_all_of_the_answer_or_none_of_it(checker):
    matrix = f"\\begin{{bmatrix}}{ROWS}\\end{{bmatrix}}"
    assert checker.check(f"2{matrix}", matrix).value == 0.0
    assert checker.check(f"2{matrix}", r"\begin{bmatrix}-14 & 12 \\ 22 & -18\end{bmatrix}").value == 1.0
    assert checker.check(f"I have no idea {matrix}", matrix).value == 0.0


# Any text -------------------------------------------------------------------------------------------------------------

HOSTILE = {
    "ten megabytes": "x" * 10_000_000,
    "a box in ten megabytes": "x" * 10_000_000 + "\\boxed{" + "y" * 100_000 + "}",
    "nested braces": "\\boxed{" + "{" * 100_000 + "5" + "}" * 100_000 + "}",
    "open braces": "{" * 100_000 + "\\boxed{5",
    "open boxes": "\\boxed{" * 100_000,
    "closing braces": "}" * 100_000,
    "a control character": "\\boxed{\0}",
    "half a character": "\\boxed{\ud800}",
    "half a character without a box": "it is \ud800",
    "nothing": "",
    "white space": " \n\t" * 1000,
    "dollars": "$" * 10_001,
    "backslashes": "\\" * 100_001,
    "a number of many digits": "\\boxed{" + "9" * 5000 + "}",
    "a million digits": "9" * 1_000_000,
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_texts_are_wrong_answers_and_nothing_else(checker, text):
    found = checker.check(text, r"\frac{1}{2}")
    assert (found.value, found.timed_out) == (0.0, False)
    (found.extracted or "").encode()
    assert len(found.extracted or "") <= 1000


def test_the_last_of_ten_thousand_boxes_counts(checker):
    assert checker.check("\\boxed{7} " * 10_000 + "\\boxed{5}", "5").value == 1.0
    assert checker.check("\\boxed{7}, " * 10_000 + "\\boxed{5}", "5").value == 0.0


PIECES = [
    "\\boxed{",
    "\\fbox {",
    "{",
    "}",
    "\\",
    "\\\\",
    "\\boxed{5}",
    "$",
    ",",
    " and ",
    "1,234",
    "\ud800",
    "\0",
    "e5",
    "−",
]


@given(st.lists(st.sampled_from(PIECES)).map("".join))
def test_any_text_has_an_answer_or_none_that_can_be_written_down(text):
    found = find_answer(text)
    if isinstance(found, Expression):
        found.latex.encode()
        assert found.number is None or isinstance(found.number, Decimal)
        assert not found.is_integer or int(found.latex) == found.number
    elif found is not None:
        found.encode()
        assert found


@pytest.mark.parametrize(
    "piece",
    [
        *PIECES,
        "\\boxed{5} and ",
        "0",
        "1,",
        "1,111",
        "1\\,",
        "boxed",
        "\\boxed{\\boxed{5}}",
        ".",
        "\\begin{bmatrix}",
        " \n",
    ],
)
def test_megabytes_of_nasty_text_are_searched_in_linear_time(piece):
    for text in (piece * (SIZE // len(piece)), "\\boxed{" + piece * (100_000 // len(piece)) + "}"):
        start = time.thread_time()
        find_answer(text)
        assert time.thread_time() - start < 2  # anything quadratic takes far longer


# Ground truths --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "truth", [r"\frac{1}{2}", "$0.5$", r"\(1/2\)", 0.5, r"We get $\boxed{\frac{1}{2}}$ of it.", "0.50"]
)
def test_ground_truths_may_be_numbers_expressions_and_solutions(checker, truth):
    assert checker.check(r"\boxed{0.5}", truth).value == 1.0
    assert checker.check(r"\boxed{0.4}", truth).value == 0.0


def test_numbers_of_other_libraries_are_numbers(checker):
    numpy = pytest.importorskip("numpy")
    assert (
        checker.check(r"\boxed{5}", numpy.int64(5)).value
        == checker.check(r"\boxed{0.1}", numpy.float64(0.1)).value
        == 1
    )


@pytest.mark.parametrize(
    "truth",
    [None, "", "  ", True, [], ["5"], {"a": 1}, b"5", float("nan"), float("inf"), 10**5000, "x" * 10_001],
    ids=lambda truth: type(truth).__name__,
)
def test_what_cannot_be_a_ground_truth_is_named_at_once(truth):
    with MathChecker() as checker:
        with pytest.raises(GroundTruthError, match="ground_truth"):
            checker.check("no answer", truth)
        assert checker.pids() == []


@pytest.mark.parametrize("truth", [r"\frac{", "***", "$$", r"\begin{cases}1\\2\end{cases}"])
@pytest.mark.parametrize(
    "answer", [r"\boxed{7}", "", "I do not know", TOO_LONG], ids=["wrong", "empty", "none", "long"]
)
def test_a_ground_truth_that_is_no_expression_is_a_mistake_whatever_the_answer_is(checker, truth, answer):
    with pytest.raises(GroundTruthError, match="cannot be parsed as an expression") as raised:
        checker.check(answer, truth)
    assert isinstance(raised.value, RewardError)
    assert isinstance(raised.value, ConfigError)


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_a_deadline_is_a_positive_number(seconds):
    with pytest.raises(ConfigError, match="deadline_seconds"):
        math.compute_score(r"\boxed{5}", "5", deadline_seconds=seconds)


@pytest.mark.parametrize("setting", [{"children": 0}, {"memory_limit_mb": 100}, {"checks_per_child": 0}])
def test_settings_that_cannot_work_are_named(setting):
    with pytest.raises(ConfigError, match=next(iter(setting))):
        MathChecker(**setting)


# Packages -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["math_verify", "latex2sympy2_extended", "antlr4"])
def test_a_missing_package_is_named_with_the_pip_command_before_a_process_is_started(module):
    script = f"""
import sys
sys.modules[{module!r}] = None
from toolyard.errors import MissingDependencyError
from toolyard.rewards.math import MathChecker
checker = MathChecker()
try:
    checker.check(r"\\boxed{{5}}", "5")
except MissingDependencyError as error:
    assert "pip install 'toolyard[math]'" in str(error), error
else:
    raise SystemExit("no error")
assert checker.pids() == []
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_a_package_that_is_there_but_does_not_import_is_our_failure(tmp_path):
    (tmp_path / "math_verify.py").write_text("raise ImportError('half installed')\n")
    script = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from toolyard.errors import RewardError
from toolyard.rewards.math import check
try:
    check(r"\\boxed{{x}}", "5")
except RewardError as error:
    assert "half installed" in str(error), error
else:
    raise SystemExit("no error")
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
