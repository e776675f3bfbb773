"""Read test cases in the forms that datasets use, and reject anything ambiguous.

`read_suite` accepts a mapping, or JSON text of one (even nested text), with arrays as parquet gives them:

* `{"inputs": […], "outputs": […]}`: stdin and stdout. Each is text, a number, or a list of lines.
* The same with `"fn_name": "f"` (or `"Solution.f"`): calls. An input is the list of arguments, or text with one
  argument per line, as JSON or a Python literal. If inputs are text, so are outputs; an output that is neither JSON nor
  a literal is the text itself, unless it starts like one. If inputs are lists, outputs are values and text is text;
  only if every output is text that contains a list or a mapping, those are meant.
  APPS wraps each value in a list of one. A single output does not show whether `[3]` means 3 or [3], but if another
  output of the suite is not a list of one, none is wrapped. If all are, either meaning is accepted (`Wrapped`).
* `{"assert_case": […]}`, `{"asserts": […]}`, `{"test_list": […]}`: test code, one case each. verl's placeholders beside
  it (empty inputs, no outputs) are ignored.
* `{"test": "…", "entry_point": "f"}`: test code that defines `check(candidate)`, as in HumanEval. Without
  `entry_point`: test code that runs as is.
* `[{"input": …, "output": …, "testtype": "stdin" | "functional"}, …]`, as in LiveCodeBench; functional cases name the
  function in `metadata.func_name`.
* `{"input_output": …}`, a row of APPS or TACO that contains one of the above.

Further keys: `language`, `checker`, `comparison`, and code to run first (`setup`, `test_setup_code`, `import_prefix`,
`test_imports`; text or a list of lines). A key whose value is null or empty text counts as absent. Unknown keys are
ignored unless they look like misspellings of these. Python code is parsed here; test code that cannot fail is rejected.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from pydantic import ValidationError

from toolyard.errors import ProgramError
from toolyard.rewards.code.protocol import Case, Comparison, Suite, SuiteKind
from toolyard.rewards.code.reading import decoded, encodable, items_of, literal, plain, python_code, text_of, wrong
from toolyard.rewards.code.values import Wrapped
from toolyard.sandbox.languages import find_language

_ASSERT_LISTS = ("assert_case", "asserts", "test_list")
_SETUPS = ("setup", "test_setup_code", "import_prefix", "test_imports")
_KEYS = (
    *("inputs", "outputs", "fn_name", *_ASSERT_LISTS, "test", "entry_point", "input_output"),
    *("language", "checker", "comparison", *_SETUPS),
)
_ITEM_KEYS = ("input", "output", "testtype", "metadata", "fn_name")
_LONGEST_KEY = 40
"""Maximum characters of a key that may be a misspelling."""
_MEANT = {
    **dict.fromkeys(("function_name", "func_name", "function", "method_name", "method"), "fn_name"),
    **dict.fromkeys(("expected_outputs", "expected", "stdout"), "outputs"),
    "stdin": "inputs",
    "lang": "language",
}
_NAME = re.compile(r"[^\W\d]\w*+(?:\(\))?+(?:\.[^\W\d]\w*+)?+")
_CHECK = re.compile(r"^def check\b", re.MULTILINE)
_CALLED_CHECK = re.compile(r"^check\(", re.MULTILINE)


def read_suite(tests: str | bytes | Mapping[str, Any] | list[Any] | Suite) -> Suite:
    """Read test cases in any of the forms above.

    Raises:
        ConfigError: they have none of the forms above, are empty, or contradict themselves. A mistake in the task must
            not look like a wrong answer.
    """
    if isinstance(tests, Suite):
        if not tests.cases:
            raise wrong("cases", tests.cases, "there are none")
        return tests
    try:
        value = decoded(tests, "")
        row = _mapping(value)
        if row.get("input_output") is not None and "inputs" not in row:
            value = decoded(row["input_output"], "input_output")
        if isinstance(value, list):
            return _read_items(cast("list[Any]", value))
        if isinstance(value, Mapping):
            return _read_mapping(_mapping(value))
    except RecursionError:
        raise wrong("", "…", "nested too deeply") from None
    raise wrong("", value, f"expected a mapping or a list of them, not {type(value).__name__}")


def _mapping(value: Any) -> dict[str, Any]:
    """Drop keys without a value, which parquet gives every row. Empty for what is not a mapping."""
    if not isinstance(value, Mapping):
        return {}
    items = cast("Mapping[str, Any]", value).items()
    return {key: item for key, item in items if item is not None and not (isinstance(item, str) and not item.strip())}


def _read_mapping(tests: dict[str, Any]) -> Suite:
    _refuse_misspelt(tests, _KEYS, "")
    options = _read_options(tests)
    named = [key for key in (*_ASSERT_LISTS, "test") if not _is_empty(tests.get(key))]
    if len(named) > 1:
        raise wrong(" and ".join(named), "…", "two forms of test code; keep one")
    if named:
        _refuse_pairs(tests, named[0])
        return options.suite(SuiteKind.ASSERTS, _read_asserts(tests, named[0], options))
    missing = [key for key in ("inputs", "outputs") if key not in tests]
    if missing:
        empty = next((key for key in (*_ASSERT_LISTS, "test") if key in tests), None)
        if empty and len(missing) == 2:
            raise wrong(empty, tests[empty], "it has no test cases")
        raise wrong(missing[0], sorted(tests), "missing")
    if "entry_point" in tests:
        raise wrong("entry_point", tests["entry_point"], 'only allowed with "test"; for calls use "fn_name"')
    pairs = _Pairs(items_of(tests["inputs"], "inputs"), items_of(tests["outputs"], "outputs"))
    return pairs.suite(tests.get("fn_name"), options)


def _is_empty(value: Any) -> bool:
    return value is None or (hasattr(value, "__len__") and len(value) == 0)


def _read_items(items: Sequence[Any]) -> Suite:
    """Read LiveCodeBench's list."""
    kinds: set[str] = set()
    names: set[str] = set()
    for index, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise wrong(f"[{index}]", item, "expected a mapping")
        item = cast("Mapping[str, Any]", item)
        case = _mapping(item)
        _refuse_misspelt(case, _ITEM_KEYS, f"[{index}].")
        for key in ("input", "output"):
            if item.get(key) is None:
                raise wrong(f"[{index}].{key}", None, "missing")
        kind = case.get("testtype", "stdin")
        if kind not in ("stdin", "functional"):
            raise wrong(f"[{index}].testtype", kind, "expected 'stdin' or 'functional'")
        metadata = _mapping(decoded(case.get("metadata", {}), f"[{index}].metadata"))
        kinds.add(kind)
        names.add(str(case.get("fn_name", metadata.get("func_name", ""))))
    if len(kinds) > 1:
        raise wrong("testtype", sorted(kinds), "expected the same for all cases")
    function = None
    if kinds == {"functional"}:
        if len(names) != 1 or "" in names:
            raise wrong("metadata.func_name", sorted(names), "expected one name, the same for all cases")
        function = names.pop()
    pairs = _Pairs([i["input"] for i in items], [i["output"] for i in items], "[{}].input", "[{}].output")
    return pairs.suite(function, _Options())


# Options of every form -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Options:
    language: str | None = None
    checker: str | None = None
    setup: str = ""
    comparison: Comparison | None = None

    @property
    def python(self) -> bool:
        return self.language in (None, "python")

    def suite(self, kind: SuiteKind, cases: Sequence[Case], function: str | None = None) -> Suite:
        if kind is SuiteKind.STDIO and self.setup:
            raise wrong("setup", self.setup, "only for calls and test code; a program that reads stdin runs as is")
        if kind is not SuiteKind.STDIO and self.checker is not None:
            raise wrong("checker", self.checker, "only for stdin and stdout")
        return Suite(kind, tuple(cases), function, self.language, self.checker, self.setup, self.comparison)


def _read_options(tests: Mapping[str, Any]) -> _Options:
    language = tests.get("language")
    if language is not None:
        try:
            language = find_language(text_of(language, "language")).name
        except ProgramError as error:
            raise wrong("language", language, str(error)) from None
    checker = tests.get("checker")
    if checker is not None:
        checker = python_code(encodable(text_of(checker, "checker"), "checker"), "checker", must_run=True)
    setup = "\n".join(filter(None, (text_of(tests[key], key).rstrip() for key in _SETUPS if key in tests)))
    if encodable(setup, "setup") and language in (None, "python"):
        python_code(setup, "setup")
    comparison = tests.get("comparison")
    if comparison is not None and not isinstance(comparison, Comparison):
        try:
            given = decoded(comparison, "comparison")
            comparison = Comparison.model_validate(_mapping(given) if isinstance(given, Mapping) else given)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, ("comparison", *first["loc"])))
            known = ", ".join(Comparison.model_fields)
            raise wrong(where, first["input"], f"{first['msg']} (known: {known})") from None
    return _Options(language, checker, setup, comparison)


def _refuse_misspelt(given: Mapping[Any, Any], known: Sequence[str], where: str) -> None:
    for key in given:
        if key in known:
            continue
        if not isinstance(key, str):
            raise wrong(f"key {where}{key!r}", given[key], "expected a string as key")
        # Long keys are skipped: comparing takes time, and they are not misspellings.
        close = difflib.get_close_matches(key[:_LONGEST_KEY].casefold(), known, n=1, cutoff=0.8)
        meant = _MEANT.get(key.casefold()) if known is _KEYS else None
        if meant or close:
            raise wrong(f"{where}{key}", given[key], f"unknown; did you mean {meant or close[0]!r}?")


# Test code -----------------------------------------------------------------------------------------------------------


def _read_asserts(tests: Mapping[str, Any], key: str, options: _Options) -> list[Case]:
    if key == "test":
        codes, where = [_with_check(text_of(tests[key], key), tests.get("entry_point"))], "test"
    else:
        codes, where = items_of(tests[key], key), key + "[{}]"
    cases: list[Case] = []
    for index, code in enumerate(codes):
        place = where.format(index)
        text = encodable(text_of(code, place), place)
        if not text.strip():
            raise wrong(place, text, "it has no code")
        cases.append(Case(test=python_code(text, place, must_run=True) if options.python else text))
    return cases


def _with_check(test: str, entry_point: Any) -> str:
    if entry_point is not None:
        if not isinstance(entry_point, str) or not _NAME.fullmatch(entry_point):
            raise wrong("entry_point", entry_point, "expected the name of a function")
        if not _CHECK.search(test):
            raise wrong("test", test, "with entry_point it must define check(candidate)")
        return f"{test}\n\ncheck({entry_point})\n"
    if _CHECK.search(test) and not _CALLED_CHECK.search(test):
        raise wrong("entry_point", None, "missing: the test defines check(candidate), and nothing calls it")
    return test


def _refuse_pairs(tests: Mapping[str, Any], key: str) -> None:
    for pairs in ("inputs", "outputs"):
        given = items_of(tests.get(pairs, []), pairs)
        if any(item is not None and item != "" for item in plain(given, pairs)):
            raise wrong(f"{key} and {pairs}", given, "two forms at once; keep one")


# Inputs and outputs --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Pairs:
    inputs: Sequence[Any]
    outputs: Sequence[Any]
    input_place: str = "inputs[{}]"
    output_place: str = "outputs[{}]"

    def suite(self, function: Any, options: _Options) -> Suite:
        if len(self.inputs) != len(self.outputs):
            count = f"{len(self.inputs)} inputs and {len(self.outputs)} outputs"
            raise wrong("inputs and outputs", count, "expected the same number of both")
        if not self.inputs:
            raise wrong("inputs", self.inputs, "there are no test cases")
        if function is None:
            return options.suite(SuiteKind.STDIO, [Case(stdin=i, expected=o) for i, o in self._texts()])
        if not isinstance(function, str) or not _NAME.fullmatch(function):
            raise wrong("fn_name", function, "expected the name of a function, or of a method like 'Solution.f'")
        as_text = self._inputs_are_text()
        arguments = [self._arguments(index, given) for index, given in enumerate(self.inputs)]
        pairs = zip(arguments, self._values(as_text), strict=True)
        cases = [Case(arguments=given, expected=value) for given, value in pairs]
        return options.suite(SuiteKind.FUNCTION, cases, function.replace("()", ""))

    def _texts(self) -> Iterator[tuple[str, str]]:
        for index, (given, expected) in enumerate(zip(self.inputs, self.outputs, strict=True)):
            yield _text(given, self.input_place, index), _text(expected, self.output_place, index)

    def _inputs_are_text(self) -> bool:
        texts = [isinstance(given, str | bytes) for given in self.inputs]
        if any(texts) and not all(texts):
            index = texts.index(not texts[0])
            raise wrong(self.input_place.format(index), self.inputs[index], "some inputs are text and some are not")
        return all(texts)

    def _arguments(self, index: int, given: Any) -> tuple[Any, ...]:
        place = self.input_place.format(index)
        given = plain(given, place)
        if isinstance(given, list):
            return tuple(cast("list[Any]", given))
        if not isinstance(given, str):
            raise wrong(place, given, "expected a list of arguments, or text with one per line")
        try:
            return tuple(literal(line, place) for line in given.split("\n") if line.strip())
        except ValueError as error:
            problem = str(error)
        try:  # one argument, written on several lines
            return (literal(given, place),)
        except ValueError:
            raise wrong(place, given, f"expected one argument per line: {problem}") from None

    def _values(self, as_text: bool) -> list[Any]:
        """Return the expected return values, by the rules at the top."""
        places = list(map(self.output_place.format, range(len(self.outputs))))
        values = [plain(value, place, other_keys=True) for value, place in zip(self.outputs, places, strict=True)]
        if all(isinstance(value, list) and len(cast("list[Any]", value)) == 1 for value in values):
            return [Wrapped(value) for value in values]
        if as_text:
            pairs = zip(values, places, strict=True)
            return [_value_of(value, place) if isinstance(value, str) else value for value, place in pairs]
        if all(isinstance(value, str) and value.lstrip()[:1] in ("[", "{") for value in values):
            try:
                return [literal(value, place, other_keys=True) for value, place in zip(values, places, strict=True)]
            except ValueError:
                return values
        return values


def _text(value: Any, place: str, index: int) -> str:
    if type(value) is str and value.isascii():  # the common case
        return value
    where = place.format(index)
    return encodable(text_of(value, where), where)


def _value_of(text: str, place: str) -> Any:
    try:
        return literal(text, place, other_keys=True)
    except ValueError as error:
        if text.lstrip()[:1] in tuple("[{('\""):
            raise wrong(place, text, str(error)) from None
        return text
