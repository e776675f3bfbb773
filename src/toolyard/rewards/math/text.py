"""The answer in a text, and the ground truth, as expressions in LaTeX. Pure, and in time linear in the text."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from toolyard.rewards.protocol import GroundTruthError

MAX_EXPRESSION = 10_000
"""Characters. A longer answer is not checked, and is not right."""
_SEARCHED = 200_000
"""Characters at the end of a text, in which boxes are looked for."""
_TAIL = 10_000
"""Characters at its end, in which an answer without a box is looked for."""
_BARE = 200
"""Characters of a text that may be nothing but an expression."""
_GAP = 40
"""Characters between two boxes that belong together."""

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
"""A vector in angles, which math-verify takes for a decimal number, is written as it reads it."""


@dataclass(frozen=True, slots=True)
class Expression:
    """One side of a comparison."""

    text: str
    """As it was written."""
    number: Decimal | None = None
    """If it is nothing but a number."""

    @property
    def is_integer(self) -> bool:
        return self.number is not None and self.number.as_tuple().exponent == 0

    @property
    def latex(self) -> str:
        """For math-verify, which takes `1.5e3` for a product with Euler's number, and `1 000` for zero."""
        if self.number is not None:
            return f"{self.number:f}"
        latex = self.text
        for misread, written in _MISREAD.items():
            latex = latex.replace(misread, written)
        return latex


def find_answer(text: str) -> Expression | str | None:
    """The expression that `text` names as its answer; the end of the text, if that is to be found out; None: no answer.

    The last complete `\\boxed{…}` counts, and those before it that it is joined to by a comma, "and" or "or". Without
    one, a short text that is nothing but an expression is the answer, or a matrix of any length.
    """
    boxes = _last_boxes(text[-_SEARCHED:])
    if boxes:
        return _expression(", ".join(boxes))
    end = _clean(text[-_TAIL:])
    if len(text) > _TAIL:  # not in the middle of a formula
        end = end.partition("\n")[2] or end
    # For math-verify a formula between dollars ends with its line.
    end = _MATRIX.sub(lambda found: " ".join(["", *found[0].split(), ""]), end).strip()
    if 0 < len(end) <= _BARE and not _PROSE.search(end):
        return _expression(end)
    without, environments = _ENVIRONMENT.subn(" ", end)
    if environments and not _PROSE.search(without):
        return _expression(end)
    return end or None


def read_truth(ground_truth: Any) -> Expression:
    """The ground truth: a number, an expression in LaTeX, or a whole solution with a `\\boxed{…}`.

    Raises:
        GroundTruthError: it is none of these. Whether LaTeX is an expression is not known before it is parsed.
    """
    item: Any = getattr(ground_truth, "item", None)  # of numpy's numbers
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
    except Exception:  # an integer of too many digits has none
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
            # A data frame makes 18 a float, and 1e-07 is not how one writes it in LaTeX.
            return f"{Decimal(repr(plain)):f}".removesuffix(".0")
        case _:
            return None


def _last_boxes(text: str) -> list[str]:
    """What is in the last complete box that is not empty, and in those joined to it. Of nested ones, the innermost."""
    if "boxed" not in text and "fbox" not in text:
        return []
    opened: list[tuple[int, int] | None] = []
    boxes: list[tuple[int, int, int, int]] = []  # where it and its content begin, and where content and it end
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
    if text[-1:] in (".", ",", ";") and text[-2:-1] != "\\":  # the sentence's, not the expression's
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
    """Without what cannot be written down: half characters."""
    return text.encode("utf-8", "replace").decode()
