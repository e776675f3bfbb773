"""Score answers to GSM8K, whose solutions end in `#### 18`.

Numbers are read in English notation: `1,234.50`, `$18`, `-$5`, `25%`, `1.5e3`, with ASCII digits. A fraction is not
evaluated, and the parts of `1/2` are not answers. The whole text is searched, in time linear in its length.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Literal

from toolyard.errors import ConfigError
from toolyard.rewards.explanation import Explanation, explain

Method = Literal["strict", "flexible"]
"""How an answer is extracted and compared: see `extract_solution` and `compute_score`."""

_MARK = "#### "
_METHODS: tuple[str, ...] = ("strict", "flexible")

# Every repetition is possessive: a number is matched to its end or not at all, so "12/3" never matches as 1, and no
# input causes backtracking.
_NUMBER = r"""
    (?= [-−+\\$€£¥₹.0-9] )  # for speed: what a number can begin with
    # 9-4, x-4 and $9$-$4$ subtract, and -- is a dash: there the number has no sign.
    (?: (?<! [\w)\]}%−-] ) (?<! [0-9]\$ ) (?P<sign>[-−+]) )?+
    (?: (?<! [0-9] ) \\?+ [$€£¥₹] (?P<inner_sign>[-−])?+ )?+
    (?: (?P<whole> [0-9]++ (?:,[0-9]++)*+ ) | (?<! [\w.] ) (?=\.[0-9]) )   # Rs.500 is 500, not .500
    (?P<rest> (?: \.[0-9]++ )?+ (?: [eE][-+]?+[0-9]{1,3}+ (?!\w) )?+ )
"""
_MARKED = re.compile(_NUMBER + r"(?! [.,/][0-9] | [eE][0-9] )", re.VERBOSE)
_ANYWHERE = re.compile(_NUMBER + r"(?P<divisor> (?: / [0-9]++ (?:\.[0-9]++)?+ )*+ )", re.VERBOSE)
_GROUPED = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})*+")
_DIGIT = re.compile(r"[0-9]")


def extract_solution(solution_str: str, method: Method = "strict") -> str | None:
    """Return the answer as a plain number: a minus if negative, no separators, no currency. None if there is none.

    `strict` takes the number right after the last `#### ` that has one, and removes all its commas, as GSM8K does.
    `flexible` takes the same number if there is one, otherwise the last number of the text; there commas belong to a
    number only if they separate thousands, so that `1,2,3` ends in 3.

    Raises:
        ConfigError: there is no such method.
    """
    if method not in _METHODS:
        raise ConfigError(f"method {method!r}: expected one of {', '.join(map(repr, _METHODS))}")
    found = _after_mark(solution_str)
    return _last(solution_str) if found is None and method == "flexible" else found


def compute_score(
    solution_str: str,
    ground_truth: str | float,
    method: Method = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """Return 0.0 without an answer, `format_score` for a wrong one, `score` for the right one.

    `strict` compares the text of the two numbers, as GSM8K does: `18.0` is not `18`. `flexible` compares their values,
    exactly: `18`, `18.`, `18.0` and `$18.00` are the same. What is right under `strict` is right under `flexible`.

    Raises:
        ConfigError: the ground truth is not a number, or there is no such method.
    """
    return explained_score(solution_str, ground_truth, method, format_score, score)[0]


def explained_score(
    solution_str: str,
    ground_truth: str | float,
    method: Method = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> tuple[float, Explanation]:
    """Return what `compute_score` returns, and why."""
    truth = final_answer(ground_truth)
    answer = extract_solution(solution_str, method)
    if answer is None:
        missing = f"no number after {_MARK!r}" if method == "strict" else "no number in the answer"
        return 0.0, explain(missing, expected=truth)
    same = answer == truth or Decimal(answer) == Decimal(truth)
    right = answer == truth or (method == "flexible" and same)
    how = "equals" if right else "is written differently from" if same else "is not"
    why = explain(f"the answer {_cut(answer)} {how} {_cut(truth)}", extracted=answer, expected=truth)
    return score if right else format_score, why


def final_answer(ground_truth: str | float) -> str:
    """Return the ground truth as a plain number. It is a number, its text (also `1,234` or `$18`) or a full solution.

    Raises:
        ConfigError: it is none of these. A mistake in the task must not look like a wrong answer.
    """
    # A data frame turns 18 into a float, which is not how the task writes it.
    text = ground_truth if isinstance(ground_truth, str) else str(ground_truth).removesuffix(".0")
    number = text[text.rfind(_MARK) + len(_MARK) :] if _MARK in text else text.strip()
    match = _MARKED.match(number)
    if match is None or _DIGIT.search(number, match.end()):
        raise ConfigError(f"ground_truth {_short(text)}: expected a number, or a solution that ends in '#### number'")
    return _plain(match)


def _after_mark(text: str) -> str | None:
    place = text.rfind(_MARK)
    while place >= 0:
        match = _MARKED.match(text, place + len(_MARK))
        if match is not None:
            return _plain(match)
        place = text.rfind(_MARK, 0, place)
    return None


def _last(text: str) -> str | None:
    last = None
    for match in _ANYWHERE.finditer(_without_latex_spacing(text)):
        if not match["divisor"]:
            last = match
    if last is None:
        return None
    whole: str = last["whole"] or ""
    if "," not in whole or _GROUPED.fullmatch(whole):
        return _plain(last)
    return whole.rpartition(",")[2] + last["rest"]


def _plain(match: re.Match[str]) -> str:
    negative = match["sign"] in ("-", "−") or match["inner_sign"] is not None
    return ("-" if negative else "") + (match["whole"] or "").replace(",", "") + match["rest"]


def _without_latex_spacing(text: str) -> str:
    """`1{,}234` and `1,\\!234` are LaTeX for 1,234."""
    return text.replace("{,}", ",").replace("\\!", "")


def _short(text: str) -> str:
    return repr(_cut(text))


def _cut(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:40]}…{text[-40:]}"
