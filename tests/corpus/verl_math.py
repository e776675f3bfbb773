"""Answers to problems in mathematics, in the forms that verl's four functions read, and to problems of GSM8K.

Each has a name that says what is special about it, a ground truth, and whether it is right. tests/verl compares what
verl and Toolyard think of it.
"""

from __future__ import annotations

from dataclasses import dataclass

COLUMNS = r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}"
BRACKETS = r"\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}"
LINES = "\\begin{bmatrix}\n1 & 2 \\\\\n3 & 4\n\\end{bmatrix}"
HALVES = r"\begin{pmatrix} \frac{1}{2} \\ 0.25 \end{pmatrix}"
DECIMALS = r"\begin{pmatrix} 0.5 \\ \frac{1}{4} \end{pmatrix}"
TRANSPOSED = r"\begin{pmatrix} 1 & 3 \\ 2 & 4 \end{pmatrix}"
AFTERTHOUGHT = " I went over every step of it once more, and found nothing to change." * 5


@dataclass(frozen=True)
class MathAnswer:
    name: str
    text: str
    truth: str
    right: bool

    def __str__(self) -> str:
        return self.name


def _boxed(name: str, answer: str, truth: str, right: bool = True) -> MathAnswer:
    return MathAnswer(name, rf"So the answer is $\boxed{{{answer}}}$.", truth, right)


def _wrong(name: str, answer: str, truth: str) -> MathAnswer:
    return _boxed(name, answer, truth, right=False)


def _plain(name: str, text: str, truth: str, right: bool = True) -> MathAnswer:
    return MathAnswer(name, text, truth, right)


MATHEMATICS = [
    # Numbers
    _boxed("an integer", "18", "18"),
    _boxed("a negative integer", "-5", "-5"),
    _boxed("thousands parted by a comma", "1,234", "1234"),
    _boxed("thousands parted by LaTeX's comma", r"1{,}234", "1234"),
    _boxed("a decimal for a fraction", "0.5", r"\frac{1}{2}"),
    _boxed("a decimal for another fraction", "0.75", r"\frac{3}{4}"),
    _boxed("a decimal with a zero too many", "2.50", "2.5"),
    _boxed("an integer as a decimal", "18.0", "18"),
    _boxed("with an exponent", r"1.5 \times 10^3", "1500"),
    _boxed("a power", "2^{10}", "1024"),
    _boxed("a factorial", "5!", "120"),
    _boxed("a binomial", r"\binom{5}{2}", "10"),
    _boxed("the full stop in the box", "18.", "18"),
    _boxed("bold", r"\mathbf{18}", "18"),
    _wrong("a wrong integer", "17", "18"),
    _wrong("the wrong sign", "5", "-5"),
    _wrong("one third, cut after two places", "0.33", r"\frac{1}{3}"),
    _wrong("pi, cut after two places", "3.14", r"\pi"),
    # Fractions and roots
    _boxed("a fraction", r"\frac{3}{4}", r"\frac{3}{4}"),
    _boxed("a large fraction", r"\dfrac{3}{4}", r"\frac{3}{4}"),
    _boxed("a fraction without braces", r"\frac34", r"\frac{3}{4}"),
    _boxed("a fraction with a slash", "3/4", r"\frac{3}{4}"),
    _boxed("a fraction that can be reduced", r"\frac{6}{8}", r"\frac{3}{4}"),
    _boxed("the minus before the fraction", r"-\frac{3}{4}", r"\frac{-3}{4}"),
    _boxed("a mixed number", r"1\frac{1}{2}", r"\frac{3}{2}"),
    _boxed("a root", r"2\sqrt{2}", r"2\sqrt{2}"),
    _boxed("a root without braces", r"2\sqrt2", r"2\sqrt{2}"),
    _boxed("a root that can be simplified", r"\sqrt{8}", r"2\sqrt{2}"),
    _boxed("a denominator made rational", r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{2}}{2}"),
    _boxed("a multiple of pi", r"\frac{\pi}{2}", r"\frac12\pi"),
    _boxed("a sine", r"\sin\frac{\pi}{6}", r"\frac{1}{2}"),
    _boxed("a complex number, the other way round", "2i + 1", "1 + 2i"),
    _wrong("a fraction upside down", r"\frac{4}{3}", r"\frac{3}{4}"),
    # Units
    _boxed("percent", r"50\%", r"50\%"),
    _wrong("percent where a number is asked for", r"50\%", "50"),
    _boxed("degrees", r"90^\circ", "90"),
    _boxed("centimetres", r"5\text{ cm}", "5"),
    _boxed("square centimetres", r"5\text{ cm}^2", "5"),
    _boxed("dollars", r"\$18", "18"),
    # More than one number
    _boxed("a point", "(1, 2)", "(1,2)"),
    _boxed("a point with large brackets", r"\left(1, \frac{1}{2}\right)", r"\left(1, \frac{1}{2}\right)"),
    _boxed("a point with a decimal", "(1, 0.5)", r"\left(1, \frac{1}{2}\right)"),
    _boxed("an interval", r"(-\infty, 2]", r"(-\infty,2]"),
    _boxed("a set in another order", r"\{2, 1\}", r"\{1, 2\}"),
    _boxed("numbers in another order", "2, 1", "1,2"),
    _boxed("numbers joined by a word", r"1 \text{ and } 2", "1,2"),
    _wrong("a point the other way round", "(2, 1)", "(1, 2)"),
    _wrong("an interval that is open", "(1, 2)", "[1, 2)"),
    _wrong("a set with a member too many", r"\{1, 2, 3\}", r"\{1, 2\}"),
    # Letters
    _boxed("an equation", "x = 5", "5"),
    _boxed("an equation on both sides", "y = 2x + 1", "y = 2x + 1"),
    _boxed("terms in another order", "2x + x^2 + 1", "x^2 + 2x + 1"),
    _boxed("factors", "(x + 1)^2", "x^2 + 2x + 1"),
    _boxed("a product with a dot", r"3 \cdot x", "3x"),
    _boxed("an inequality", "x > 2", "x>2"),
    _wrong("another letter", "2y", "2x"),
    _wrong("an inequality the other way round", "x < 2", "x > 2"),
    # Matrices
    _boxed("a matrix", COLUMNS, COLUMNS),
    _boxed("a matrix in other brackets", BRACKETS, COLUMNS),
    _boxed("a matrix on several lines", LINES, BRACKETS),
    _boxed("a matrix with other fractions", HALVES, DECIMALS),
    _plain("a matrix alone", BRACKETS, BRACKETS),
    _plain("a matrix between dollars", f"${BRACKETS}$", BRACKETS),
    _plain("a matrix in a sentence", f"So the inverse is $${BRACKETS}$$", COLUMNS),
    _wrong("a matrix transposed", TRANSPOSED, COLUMNS),
    _wrong("a matrix with a wrong entry", BRACKETS.replace("4", "5"), BRACKETS),
    _wrong("a row for a column", r"\begin{pmatrix} 1 & 2 \end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    # The text around it
    _plain("the last of two boxes", r"First \boxed{17}, but rather \boxed{18}.", "18"),
    _plain("the first of two boxes", r"It is \boxed{18}, or rather \boxed{17}.", "18", right=False),
    _plain("two boxes that belong together", r"\boxed{1} and \boxed{2}", "1, 2"),
    _plain("a box in a box", r"\boxed{\boxed{18}}", "18"),
    _plain("a box with a space", r"So it is $\boxed 18$", "18"),
    _plain("another kind of box", r"So it is \fbox{18}", "18"),
    _plain("a box with spaces in it", r"So it is \boxed{ 18 }", "18"),
    _plain("a box, and much text after it", rf"It is \boxed{{18}}.{AFTERTHOUGHT}", "18"),
    _plain("a box that was cut off", r"So it is \boxed{18", "18", right=False),
    _plain("an empty box", r"So it is \boxed{}", "18", right=False),
    _plain("after a word", "Some thoughts.\nAnswer: 18", "18"),
    _plain("after a word, between dollars", "Some thoughts.\nAnswer: $\\frac{3}{4}$", r"\frac{3}{4}"),
    _plain("a wrong one after a word", "Some thoughts.\nAnswer: 17", "18", right=False),
    _plain("a box before the word", "It is \\boxed{18}.\nAnswer: 18", "18"),
    _plain("in a sentence", "The answer is 18.", "18"),
    _plain("a formula in a sentence", r"The answer is $\frac{3}{4}$.", r"\frac{3}{4}"),
    _plain("a formula alone", r"$\frac{3}{4}$", r"\frac{3}{4}"),
    _plain("a number alone", "18", "18"),
    _plain("a wrong number alone", "17", "18", right=False),
    _plain("nothing", "I do not know.", "18", right=False),
    _plain("nothing at all", "", "18", right=False),
    # The ground truth
    _boxed("a ground truth in a box", "18", r"\boxed{18}"),
    _boxed("a ground truth between dollars", "18", "$18$"),
    _boxed("a word", r"\text{Monday}", r"\text{Monday}"),
    _wrong("another word", r"\text{Tuesday}", r"\text{Monday}"),
    _boxed("a letter to choose", r"\text{(B)}", "B"),
]

GSM8K = [
    _plain("after the mark", "6 * 3 = 18\n#### 18", "18"),
    _plain("a wrong number", "6 * 3 = 17\n#### 17", "18", right=False),
    _plain("a negative number", "#### -5", "-5"),
    _plain("thousands", "#### 1,018", "1018"),
    _plain("dollars", "#### $18", "18"),
    _plain("a unit", "#### 18 apples", "18"),
    _plain("a full stop", "The answer is #### 18.", "18"),
    _plain("a zero too many", "#### 18.0", "18", right=False),
    _plain("no space", "####18", "18", right=False),
    _plain("two marks", "#### 17\nNo:\n#### 18", "18"),
    _plain("a mark with nothing after it", "#### 18\n#### none", "18"),
    _plain("much text after it", f"#### 18\n{AFTERTHOUGHT}", "18"),
    _plain("a fraction", "#### 18/2", "18", right=False),
    _plain("no mark", "So it is 18.", "18", right=False),
    _plain("no number", "I do not know.", "18", right=False),
    _plain("nothing", "", "18", right=False),
]
"""Right means: by GSM8K's rule, a number after the last mark, written like the ground truth but for commas."""

GSM8K_FLEXIBLE = [
    _plain("after the mark", "#### 18", "18"),
    _plain("the last number", "Of 20 they keep 18 apples", "18"),
    _plain("the last number of a sentence", "They keep 18.", "18"),
    _plain("not the last number", "They keep 18 of 20", "18", right=False),
    _plain("dollars and cents", "It costs $18.00 in all", "18"),
    _plain("thousands", "They have 1,018 apples", "1018"),
    _plain("a negative number", "It is -5 degrees", "-5"),
    _plain("a number after the mark, and another", "#### 18\nThat took 3 steps", "18"),
    _plain("numbers in a list", "One of 1,2,18", "18"),
    _plain("no number", "I do not know.", "18", right=False),
]
"""Right means: the value of the number after the mark, or else of the last number."""
