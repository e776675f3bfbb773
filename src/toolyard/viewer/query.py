r"""The query language of the viewers: `score<0.5 tools>2 finish:length text:"220000" sort:-time`.

    several conditions          all must hold
    a or b                      one side must hold; `or` binds weaker than conditions in a row
    score<0.5, score:0.2..0.8   numbers: score, tools, failed_calls, turns, length, prompt, chars, time, started, step,
                                line, sample, group
    reward.final<1              a reward by its name
    score:none, time:none       unknown: the score could not be computed, the line does not say
    finish:length, finish=stop  text contains, text equals: finish, state, source, task, truth, id, file, run
    tool:search call_time>2     a call of a tool; tool, verdict, error and call_time in a row are about the same call
    failed:yes                  ended by something that says nothing about the model
    damaged:yes                 lines that cannot be read
    220000, "a b", text:"a b"   text in any message
    -finish:stop, score!=1      negation; `!=` is `-` with `=`, so it also matches rows without a score
    sort:score, sort:-time      order; the first key counts most, and rows without a value come last

Text is matched without regard to case. In quotes, `\"` is a quote, `\\` a backslash, `\n` a newline and `\t` a tab.
"""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass, replace
from enum import Enum
from typing import NoReturn

from toolyard.errors import ConfigError


class Kind(Enum):
    """The type of a field. It decides which operators and values are allowed."""

    NUMBER = "a number"
    TEXT = "text"
    FLAG = "yes or no"
    CONTENT = "text to search for"


_ALWAYS = ("chars", "step", "line", "sample", "group")
"""Numbers that every line has."""
FIELDS = {
    **dict.fromkeys(("score", "tools", "failed_calls", "turns", "length", "prompt", "time", "started"), Kind.NUMBER),
    **dict.fromkeys(_ALWAYS, Kind.NUMBER),
    **dict.fromkeys(("finish", "state", "source", "task", "truth", "id", "file", "run"), Kind.TEXT),
    **dict.fromkeys(("tool", "verdict", "error"), Kind.TEXT),
    "call_time": Kind.NUMBER,
    "failed": Kind.FLAG,
    "damaged": Kind.FLAG,
    "text": Kind.CONTENT,
}
OF_CALLS = frozenset(("tool", "verdict", "error", "call_time"))
"""Fields of calls. In a row, they are about the same call."""
REWARD = "reward."
"""`reward.final` is the reward named `final`."""
SORTABLE = tuple(name for name, kind in FIELDS.items() if kind in (Kind.NUMBER, Kind.TEXT) and name not in OF_CALLS)
MAX_CONDITIONS = 100
"""More than anyone types, and few enough for any SQLite."""

_OTHER_NAMES = {
    "reward": "score",
    "gts": "truth",
    "ground_truth": "truth",
    "call_seconds": "call_time",
    "calls": "tools",
    "tokens": "length",
    "response_tokens": "length",
    "prompt_tokens": "prompt",
    "seconds": "time",
    "duration": "time",
    "finish_reason": "finish",
    "data_source": "source",
    "batch_data_id": "task",
    "request_id": "id",
    "request": "id",
    "rollout_offset": "sample",
    "order": "sort",
}
"""Names people may try, and the fields they mean."""
_FLAGS = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}
_NAME = re.compile(r"([A-Za-z_][A-Za-z_0-9]*(?:\.[^\s:=<>!\"]+)?)(!=|<=|>=|[:=<>])")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_SPACE = re.compile(r"\s*")
_BARE = re.compile(r"\S*")
_ESCAPE = re.compile(r'\\(["\\nt])')
_ESCAPED = {"n": "\n", "t": "\t"}


class QueryError(ConfigError):
    """The text is not a valid query. The message says where, and how to fix it."""

    def __init__(self, problem: str, position: int) -> None:
        super().__init__(f"at character {position + 1}: {problem}")
        self.position = position
        """In the text, from 0."""


@dataclass(frozen=True, slots=True)
class Range:
    """Both ends are included; None means open."""

    low: float | None
    high: float | None

    def __str__(self) -> str:
        return "..".join("" if end is None else _number_text(end) for end in (self.low, self.high))


@dataclass(frozen=True, slots=True)
class Condition:
    """`field operator value`, possibly negated."""

    field: str
    operator: str
    """`:` `=` `<` `<=` `>` `>=`. For text, `:` is contains and `=` equals; for other fields `=` becomes `:`."""
    value: float | Range | str | bool | None
    negated: bool = False

    def __str__(self) -> str:
        value = self.value
        if isinstance(value, str):
            text = quoted(value)
        elif isinstance(value, bool):
            text = "yes" if value else "no"
        else:
            text = "none" if value is None else str(value) if isinstance(value, Range) else _number_text(value)
        return f"{'-' if self.negated else ''}{self.field}{self.operator}{text}"


@dataclass(frozen=True, slots=True)
class SortKey:
    field: str
    descending: bool = False

    def __str__(self) -> str:
        return f"sort:{'-' if self.descending else ''}{self.field}"


@dataclass(frozen=True, slots=True)
class Query:
    """A parsed query. `str(query)` is its normalized text, which parses as the same query."""

    alternatives: tuple[tuple[Condition, ...], ...] = ()
    """A row matches if all conditions of one alternative hold. Empty: every row matches."""
    sort: tuple[SortKey, ...] = ()
    """Ties, and queries without a key, are in the order of the files and their lines."""

    def __str__(self) -> str:
        filters = " or ".join(" ".join(map(str, conditions)) for conditions in self.alternatives)
        return " ".join([*([filters] if filters else []), *map(str, self.sort)])

    @property
    def needles(self) -> tuple[str, ...]:
        """The texts that a row may have matched, for highlighting."""
        found = [
            condition.value
            for conditions in self.alternatives
            for condition in conditions
            if condition.field == "text" and not condition.negated and isinstance(condition.value, str)
        ]
        return tuple(dict.fromkeys(found))

    def sorted_by(self, field: str, *, descending: bool = False) -> Query:
        """The same rows in another order."""
        if field not in SORTABLE:
            raise ConfigError(f"cannot sort by {field!r}; expected one of {', '.join(SORTABLE)}")
        return replace(self, sort=(SortKey(field, descending),))


def parse_query(text: str) -> Query:
    """Parse `text`; see the module's docstring for the language.

    Raises:
        QueryError: `text` is not a valid query.
    """
    return _Parser(text).query()


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._term = 0
        """Start of the current term: the position of most errors."""
        self._alternatives: list[list[Condition]] = [[]]
        self._sort: dict[str, SortKey] = {}
        self._last_word = ""

    def query(self) -> Query:
        while self._skip_space():
            self._term = self._at
            self._one()
        if len(self._alternatives) > 1 and not self._alternatives[-1]:
            self._refuse("a condition is missing after `or`", len(self._text))
        if sum(map(len, self._alternatives)) > MAX_CONDITIONS:
            self._refuse(f"a query has at most {MAX_CONDITIONS} conditions", 0)
        found = tuple(tuple(conditions) for conditions in self._alternatives if conditions)
        return Query(found, tuple(self._sort.values()))

    def _one(self) -> None:
        if self._word().lower() == "or":
            if not self._alternatives[-1]:
                self._refuse('a condition is missing before `or`; to search for the word, write "or"')
            self._at += 2
            self._alternatives.append([])
            return
        negated = self._text[self._at] == "-" and bool(self._word()[1:])
        self._at += negated
        name = _NAME.match(self._text, self._at)
        if name is None:
            self._bare(negated)
        elif name[1].lower() == "sort":
            self._at = name.end()
            self._sorting(name[2], negated)
        else:
            self._field(name, negated)

    def _bare(self, negated: bool) -> None:
        word = self._word()
        if word[0] in "<>=!:" and self._last_word.lower() in FIELDS:
            self._refuse(f"remove the spaces around the operator: {self._last_word}{word}")
        quoted = self._text[self._at] == '"'
        self._content(self._value(), ":", negated)
        self._last_word = "" if quoted or negated else word

    def _field(self, name: re.Match[str], negated: bool) -> None:
        field, operator = name[1].lower(), name[2]
        if field.startswith(REWARD):
            field = REWARD + name[1][len(REWARD) :]
        kind = Kind.NUMBER if field.startswith(REWARD) else FIELDS.get(field)
        if kind is None:
            self._unknown(name[1])
        self._last_word = ""
        self._at = name.end()
        if operator == "!=":
            negated, operator = not negated, "="
        if self._at == len(self._text) or self._text[self._at].isspace():
            self._refuse(f"{self._text[self._term : self._at]} must be followed by {kind.value}, without a space")
        start, quoted, value = self._at, self._text[self._at] == '"', self._value()
        if kind is Kind.CONTENT:
            self._content(value, operator, negated)
        elif kind is Kind.TEXT:
            self._text_field(field, operator, value, negated)
        elif operator not in ":=" and kind is Kind.FLAG:
            self._refuse(f"{field} is {kind.value}: write {field}:yes or {field}:no")
        elif quoted:
            self._refuse(f"{field} is {kind.value}: remove the quotes", start)
        elif kind is Kind.FLAG:
            if value.lower() not in _FLAGS:
                self._refuse(f"{field} is {kind.value}: write {field}:yes or {field}:no", start)
            self._add(Condition(field, ":", _FLAGS[value.lower()], negated))
        else:
            self._number(field, operator, value, start, negated)

    def _text_field(self, field: str, operator: str, value: str, negated: bool) -> None:
        if operator not in ":=":
            self._refuse(
                f"{field} is text: write {field}:{quoted(value)} for contains or {field}={quoted(value)} for equals"
            )
        if not value and operator == ":":
            self._refuse(f'the text is empty; {field}="" finds rows whose {field} is empty')
        self._add(Condition(field, operator, value, negated))

    def _content(self, value: str, operator: str, negated: bool) -> None:
        if operator not in ":=":
            self._refuse(f"text can only be searched: write text:{quoted(value)}")
        if not value:
            self._refuse("the text to search for is empty")
        self._add(Condition("text", ":", value, negated))

    def _number(self, field: str, operator: str, value: str, start: int, negated: bool) -> None:
        operator = ":" if operator == "=" else operator
        if value.lower() == "none":
            if field in _ALWAYS:
                self._refuse(f"{field} is always a number, never none", start)
            if operator != ":":
                self._refuse(f"none cannot be compared: write {field}:none or {field}!=none")
            self._add(Condition(field, ":", None, negated))
        elif ".." in value:
            if operator != ":":
                self._refuse(f"a range cannot be compared: write {field}:{value}")
            self._add(Condition(field, ":", self._range(field, value, start), negated))
        else:
            self._add(Condition(field, operator, self._float(field, value, start), negated))

    def _range(self, field: str, value: str, start: int) -> Range:
        first, _, second = value.partition("..")
        low = self._float(field, first, start) if first else None
        high = self._float(field, second, start + len(first) + 2) if second else None
        if low is None and high is None:
            self._refuse(f"a range needs at least one end: {field}:1..5, {field}:1.. or {field}:..5", start)
        if low is not None and high is not None and low > high:
            self._refuse(f"the range is empty; did you mean {field}:{_number_text(high)}..{_number_text(low)}?", start)
        return Range(low, high)

    def _float(self, field: str, value: str, start: int) -> float:
        number = float(value) if _NUMBER.fullmatch(value) else math.nan
        if not math.isfinite(number):
            example = "3" if field in ("tools", "turns", *_ALWAYS) else "0.5"
            none = "" if field in _ALWAYS else ", or none"
            self._refuse(
                f"{value!r} is not a number; {field} takes a number such as {example}, a range such as 1..5{none}",
                start,
            )
        return number + 0.0  # no negative zero: equal queries have equal text

    def _sorting(self, operator: str, negated: bool) -> None:
        if negated or operator not in ":=":
            self._refuse("write sort:score, or sort:-score for descending order")
        start, value = self._at, self._bare_value()
        descending = value.startswith("-")
        field = value.removeprefix("-").lower()
        if field not in SORTABLE:
            guess = _closest(field, SORTABLE)
            meant = f"did you mean sort:{'-' if descending else ''}{guess}? " if guess else ""
            self._refuse(f"cannot sort by {field!r}; {meant}Expected one of {', '.join(SORTABLE)}", start)
        self._sort.setdefault(field, SortKey(field, descending))

    def _value(self) -> str:
        if self._at == len(self._text) or self._text[self._at] != '"':
            return self._bare_value()
        opened = self._at
        at = opened + 1
        while at < len(self._text) and self._text[at] != '"':
            at += 2 if self._text[at] == "\\" else 1
        if at >= len(self._text):
            self._refuse("the quote is not closed", opened)
        self._at = at + 1
        if self._at < len(self._text) and not self._text[self._at].isspace():
            self._refuse('a space is missing after the quote; write \\" for a quote in the text', self._at)
        return _ESCAPE.sub(lambda found: _ESCAPED.get(found[1], found[1]), self._text[opened + 1 : at])

    def _bare_value(self) -> str:
        word = self._word()
        self._at += len(word)
        return word

    def _word(self) -> str:
        """From here to the next space."""
        found = _BARE.match(self._text, self._at)
        return found[0] if found else ""

    def _skip_space(self) -> bool:
        """Whether something is left."""
        found = _SPACE.match(self._text, self._at)
        self._at = found.end() if found else self._at
        return self._at < len(self._text)

    def _add(self, condition: Condition) -> None:
        self._alternatives[-1].append(condition)

    def _unknown(self, name: str) -> NoReturn:
        guess = _closest(name.lower(), (*FIELDS, "sort"))
        meant = f"did you mean {guess}? " if guess else ""
        word = self._text[self._at : self._at + len(self._word())]
        self._refuse(
            f"unknown field {name!r}; {meant}The fields are {', '.join(FIELDS)} and sort. "
            f"To search for this text, put it in quotes: {_in_quotes(word)}",
            self._at,
        )

    def _refuse(self, problem: str, position: int | None = None) -> NoReturn:
        raise QueryError(problem, self._term if position is None else position)


def _closest(name: str, names: tuple[str, ...]) -> str | None:
    other = _OTHER_NAMES.get(name)
    if other in names:
        return other
    found = difflib.get_close_matches(name[:40], names, n=1, cutoff=0.6)
    return found[0] if found else None


def _number_text(number: float) -> str:
    return str(int(number)) if number.is_integer() and abs(number) < 1e15 else repr(number)


def quoted(value: str) -> str:
    """`value` as written after an operator, quoted if necessary."""
    return value if value and not re.search(r'\s|^"', value) else _in_quotes(value)


def _in_quotes(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
    return f'"{escaped}"'


DAMAGED = parse_query("damaged:yes")
"""Lines that cannot be read."""
