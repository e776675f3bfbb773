"""Find the answer in a text, and read the ground truth, as LaTeX expressions. Pure, in time linear in the text."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from toolyard.rewards.protocol import GroundTruthError

MAX_EXPRESSION = 10_000
"""Maximum characters. A longer answer is not checked and counts as wrong."""
_SEARCHED = 200_000
"""Characters at the end of a text that are searched for boxes."""
_TAIL = 10_000
"""Characters at the end of a text that are searched for an answer without a box."""
_BARE = 200
"""Maximum characters of a text that is nothing but an expression."""
_GAP = 40
"""Maximum characters between two boxes that belong together."""

_TOKEN = re.compile(r"\\{1,2}(?P<box>boxed|fbox)\s*+\{|\\.|(?P<brace>[{}])", re.DOTALL)
_PADDING = re.compile(r"[\s${}]|\\(?:[()\[\],; ]|text|q?quad)")
_CONNECTIVES = {",", ";", "and", "or", ",and", ",or"}
_PROSE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}|[0-9]\s+[0-9]|[\n$]|boxed|fbox")
_MATRIX = re.compile(r"(?<!\s)\s*\\begin\{(?P<name>[A-Za-z]*matrix)\}.*?\\end\{(?P=name)\}\s*", re.DOTALL)
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\{[A-Za-z]*matrix\}")
_DELIMITERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))
_NUMBER = re.compile(
    r"""
    (?P<sign> [-+−]? ) \s*+
    (?P<whole> [0-9]{1,3} (?: (?: ,(?:\\!)?+ | \{,\} | \\?+[ ] | \\, | ~ ) [0-9]{3} (?![0-9]) ){1,30}+ | [0-9]{1,100}+ )
    (?P<rest> (?: \.[0-9]{1,100}+ )?+ (?: [eE][-+]?[0-9]{1,2}+ )?+ )
    """,
    re.VERBOSE,
)
_NO_DIGIT = re.compile(r"[^0-9]+")
_MISREAD = {"\\langle": "(", "\\rangle": ")"}
"""A vector in angle brackets, which math-verify takes for a decimal number, is rewritten for it."""


@dataclass(frozen=True, slots=True)
class Expression:
    """One side of a comparison."""

    text: str
    """As written."""
    number: Decimal | None = None
    """Set if it is nothing but a number."""

    @property
    def is_integer(self) -> bool:
        return self.number is not None and self.number.as_tuple().exponent == 0

    @property
    def latex(self) -> str:
        """For math-verify, which reads `1.5e3` as a product with Euler's number, and `1 000` as zero."""
        if self.number is not None:
            return f"{self.number:f}"
        latex = self.text
        for misread, written in _MISREAD.items():
            latex = latex.replace(misread, written)
        return latex


def find_answer(text: str) -> Expression | str | None:
    """Return the expression that `text` gives as its answer; the end of the text, if it must be searched; or None.

    The last complete `\\boxed{…}` counts, with those before it that are joined by a comma, "and" or "or". Without one,
    a short text that is nothing but an expression is the answer, or a matrix of any length.
    """
    boxes = _last_boxes(text[-_SEARCHED:])
    if boxes:
        return _expression(", ".join(boxes))
    end = _clean(text[-_TAIL:])
    if len(text) > _TAIL:  # do not start in the middle of a formula
        end = end.partition("\n")[2] or end
    # math-verify ends a formula between dollars at the end of its line.
    end = _MATRIX.sub(lambda found: " ".join(["", *found[0].split(), ""]), end).strip()
    if 0 < len(end) <= _BARE and not _PROSE.search(end):
        return _expression(end)
    without, environments = _ENVIRONMENT.subn(" ", end)
    if environments and not _PROSE.search(without):
        return _expression(end)
    return end or None


def read_truth(ground_truth: Any) -> Expression:
    """Read the ground truth: a number, a LaTeX expression, or a whole solution with a `\\boxed{…}`.

    Raises:
        GroundTruthError: it is none of these. Whether LaTeX is a valid expression is only known once it is parsed.
    """
    item: Any = getattr(ground_truth, "item", None)  # for numpy's numbers
    plain: Any = item() if callable(item) and getattr(ground_truth, "ndim", None) == 0 else ground_truth
    text = _written(plain)
    if text is None:
        raise GroundTruthError(f"ground_truth {_shown(plain)}: expected a number or an expression in LaTeX")
    boxes = _last_boxes(text)
    found = _expression(", ".join(boxes) if boxes else text)
    if not found.text or len(found.text) > MAX_EXPRESSION:
        raise GroundTruthError(
            f"ground_truth {_shown(plain)}: expected an expression of 1 to {MAX_EXPRESSION:,} characters"
        )
    return found


def short(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:50]}…{text[-50:]}"


def _shown(plain: Any) -> str:
    try:
        return short(repr(plain))
    except Exception:  # an integer with too many digits
        return f"of type {type(plain).__name__}"


def _written(plain: Any) -> str | None:
    match plain:
        case str():
            return plain
        case bool():
            return None
        case int() if abs(plain) < 10**100:
            return str(plain)
        case float() if math.isfinite(plain):
            # A data frame turns 18 into a float, and 1e-07 is not LaTeX.
            return f"{Decimal(repr(plain)):f}".removesuffix(".0")
        case _:
            return None


def _last_boxes(text: str) -> list[str]:
    """Return the contents of the last complete box that is not empty and of those joined to it. Innermost if nested."""
    if "boxed" not in text and "fbox" not in text:
        return []
    opened: list[tuple[int, int] | None] = []
    boxes: list[tuple[int, int, int, int]] = []  # start of box, start of content, end of content, end of box
    for token in _TOKEN.finditer(text):
        if token["box"]:
            opened.append(token.span())
        elif token["brace"] == "{":
            opened.append(None)
        elif token["brace"] == "}" and opened:
            box = opened.pop()
            if box is not None and not text[box[1] : token.start()].isspace() and box[1] < token.start():
                boxes.append((*box, *token.span()))
    if not boxes:
        return []
    last = max(boxes)
    run = [last]
    for box in reversed(boxes):  # those that end last come first
        if box[3] <= run[0][0]:
            if not _connects(text[box[3] : run[0][0]]):
                break
            run.insert(0, box)
    return [text[begin:end] for _, begin, end, _ in run]


def _connects(gap: str) -> bool:
    return len(gap) <= _GAP and _PADDING.sub("", gap) in _CONNECTIVES


def _expression(text: str) -> Expression:
    text = _clean(text).strip()
    if text[-1:] in (".", ",", ";") and text[-2:-1] != "\\":  # punctuation of the sentence, not of the expression
        text = text[:-1].rstrip()
    for begin, end in _DELIMITERS:
        inner = text[len(begin) : -len(end)]
        if text.startswith(begin) and text.endswith(end) and inner and begin not in inner and not inner.endswith("\\"):
            text = inner.strip()
            break
    return Expression(text, _number(text))


def _number(text: str) -> Decimal | None:
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    return Decimal(match["sign"].replace("−", "-") + _NO_DIGIT.sub("", match["whole"]) + match["rest"])


def _clean(text: str) -> str:
    """Remove lone surrogates, which cannot be encoded."""
    return text.encode("utf-8", "replace").decode()
