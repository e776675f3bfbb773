"""Parse pieces of test cases as datasets write them: lists, text, values, Python code. Reject anything doubtful."""

from __future__ import annotations

import ast
import functools
import json
import threading
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, cast

from toolyard.errors import ConfigError
from toolyard.rewards.code.values import ShortRepr, key_text

FORMS = (
    '{"inputs", "outputs"}, {"fn_name", "inputs", "outputs"}, {"assert_case" or "asserts" or "test_list"}, '
    '{"test", "entry_point"}, [{"input", "output", "testtype"}]'
)

_ATOMS = frozenset({str, int, float, bool, type(None)})
_TEXT_WITHIN_TEXT = 3
_LITERAL_CHARS, _CODE_CHARS = 2_000_000, 100_000
"""Longer text is not parsed as Python: that takes some hundred times its size in memory."""
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Pass)
_REPR = ShortRepr()
_REPR.maxlevel, _REPR.maxlist, _REPR.maxdict, _REPR.maxstring, _REPR.maxother = 3, 4, 4, 80, 80
_warnings_lock = threading.Lock()


def wrong(where: str, value: Any, problem: str) -> ConfigError:
    """Return the error that names the place, the value and the accepted forms."""
    place = f"test cases: {where}" if where else "test cases"
    return ConfigError(f"{place}: {problem}; given: {_REPR.repr(value)}; accepted forms: {FORMS}")


def decoded(value: Any, where: str) -> Any:
    """Decode JSON text, even if nested in JSON text; return anything else as it is, with an array as a list."""
    for _ in range(_TEXT_WITHIN_TEXT):
        if isinstance(value, bytes | bytearray):
            value = _from_bytes(value, where)
        if not isinstance(value, str):
            break
        try:
            value = json.loads(value.removeprefix("\ufeff"))
        except ValueError as error:
            raise wrong(where, value, f"is not JSON: {error}") from None
    as_list = getattr(value, "tolist", None)
    return as_list() if callable(as_list) else value


def items_of(value: Any, where: str) -> list[Any]:
    """Return a list, given a list, a tuple or an array, or text of one."""
    if isinstance(value, str | bytes):
        text = text_of(value, where)
        try:
            value = literal(text, where)
        except ValueError:
            raise wrong(where, text, "expected a list") from None
    as_list = getattr(value, "tolist", None)
    value = as_list() if callable(as_list) else value
    if not isinstance(value, list | tuple):
        raise wrong(where, value, "expected a list")
    return list(cast("Sequence[Any]", value))


def text_of(value: Any, where: str) -> str:
    """Return text, given text, a number, or lines."""
    value = plain(value, where)
    if isinstance(value, list):
        lines = cast("list[Any]", value)
        if all(type(line) is str for line in lines):
            return "\n".join(lines)
        if any(isinstance(line, list | dict) for line in lines):
            raise wrong(where, lines, 'expected text, or a list of lines; for calls with arguments write "fn_name"')
        return "\n".join(text_of(line, where) for line in lines)
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return str(value)
        except ValueError as error:
            raise wrong(where, value, f"cannot be written: {error}") from None
    raise wrong(where, value, "expected text, a number, or a list of lines")


def encodable(text: str, where: str) -> str:
    """Return the text if a program can read or write it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise wrong(where, text, f"cannot be a program's input or output: {error}") from None
    return text


def plain(value: Any, where: str, *, other_keys: bool = False) -> Any:
    """Return a JSON value: arrays and tuples become lists. `other_keys`: convert the keys of mappings to text."""
    if type(value) in _ATOMS:
        return value
    if isinstance(value, list | tuple):
        items = cast("Sequence[Any]", value)
        # For speed: most lists contain only numbers or text.
        if _ATOMS.issuperset(map(type, items)):
            return list(items)
        return [plain(item, where, other_keys=other_keys) for item in items]
    if isinstance(value, Mapping):
        mapping = cast("Mapping[Any, Any]", value)
        for key in mapping:
            if not isinstance(key, str) and not (other_keys and type(key) in _ATOMS):
                raise wrong(where, key, "expected text as key of a mapping, as in JSON")
        return {key_text(key): plain(item, where, other_keys=other_keys) for key, item in mapping.items()}
    if isinstance(value, bytes | bytearray):
        return _from_bytes(value, where)
    as_list = getattr(value, "tolist", None)  # an array, or a numpy number
    if callable(as_list):
        return plain(as_list(), where, other_keys=other_keys)
    raise wrong(where, value, f"JSON cannot express the type {type(value).__name__}")


def _from_bytes(value: bytes | bytearray, where: str) -> str:
    try:
        return value.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise wrong(where, bytes(value[:40]), f"is not UTF-8: {error}") from None


def literal(text: str, where: str, *, other_keys: bool = False) -> Any:
    """Return the JSON value of text that contains JSON or a Python literal.

    Raises:
        ValueError: it contains neither.
    """
    try:
        return json.loads(text)
    except ValueError as error:
        if len(text) > _LITERAL_CHARS or not text.strip():
            raise ValueError(f"not JSON: {error}") from None
    try:
        value = ast.literal_eval(_parsed(text.strip(), "eval"))
    except (ValueError, SyntaxError, TypeError, MemoryError) as error:
        why = f": {error.msg}" if isinstance(error, SyntaxError) else ""
        raise ValueError(f"neither JSON nor a Python literal{why}") from None
    return plain(value, where, other_keys=other_keys)


def python_code(code: str, where: str, *, must_run: bool = False) -> str:
    """Check that code is Python, and return it. `must_run`: also check that it can fail, or every answer would pass."""
    problem = _python_problem(code, must_run) if len(code) <= _CODE_CHARS else None
    if problem:
        raise wrong(where, code, problem)
    return code


@functools.lru_cache(maxsize=256)  # all answers of a group have the same tests
def _python_problem(code: str, must_run: bool) -> str | None:
    try:
        tree = cast("ast.Module", _parsed(code, "exec"))
    except (SyntaxError, ValueError, MemoryError) as error:
        return f"is not Python: {error}"
    if must_run and all(isinstance(node, _DEFINITIONS) or _is_mere_value(node) for node in tree.body):
        return "cannot fail: it only has definitions, or comparisons without assert"
    return None


def _is_mere_value(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant | ast.Compare)


def _parsed(code: str, mode: str) -> ast.AST:
    # Silence the parser's warnings about '\d' and the like. Filters are global to the process: one at a time.
    with _warnings_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(code, mode=mode)
