"""Extract the program from a completion, and wrap it to call one function, by verl's rules."""

from __future__ import annotations

import re

_FENCE = "```"
_PYTHON = "```python"
_VERSION = re.compile(r"3(\.\d+)?(?=\s)")
_LANGUAGE = re.compile(r"[A-Za-z][\w+#.-]*")

STAR_IMPORTS = (
    "string re datetime collections heapq bisect copy math random statistics itertools functools operator io sys json "
    "builtins typing"
)
"""Modules that solutions to LiveCodeBench expect to be imported: all their names, then the modules themselves."""

_READ = """\
import ast, json, sys

def argument(line):
    try:
        return json.loads(line)
    except ValueError:
        return ast.literal_eval(line)

text = sys.stdin.read()
arguments = [argument(line) for line in text.split("\\n")] if text.strip() else []
"""
_LOAD = """\
import importlib, sys, types

given = {{}}
modules = [importlib.import_module(name) for name in {modules!r}.split()]
for module in modules:
    names = getattr(module, "__all__", None) or [name for name in vars(module) if name[0] != "_"]
    given.update((name, getattr(module, name)) for name in names)
given.update((module.__name__, module) for module in modules)
solution = sys.modules["solution"] = types.ModuleType("solution")
vars(solution).update(given)
exec(compile({code!r}, "solution.py", "exec"), vars(solution))
"""
_CALL = """\
found = vars(solution).get({function!r})
if found is None or found is given.get({function!r}):  # `search` is also a function of re
    if "Solution" not in vars(solution):
        sys.exit("there is no function " + {function!r} + ", and no class Solution")
    found = getattr(solution.Solution(), {function!r})
value = found(*arguments)
print(json.dumps(value) if value is None or isinstance(value, (bool, dict, list, tuple)) else value)
"""


def program_in(completion: str) -> str | None:
    """Return the last block fenced as python; without one, the first fenced block; None without any.

    A block whose fence is never closed ends with the text. This is verl's rule, not that of `rewards.code.extraction`,
    so that the same program is scored as in verl: three backticks end a block anywhere.
    """
    if _PYTHON in completion:
        block = completion.rpartition(_PYTHON)[2].partition(_FENCE)[0]
        return _VERSION.sub("", block, count=1) if _VERSION.match(block) else block
    if _FENCE not in completion:
        return None
    block = completion.partition(_FENCE)[2].partition(_FENCE)[0]
    first, line_end, rest = block.partition("\n")
    return rest if line_end and _LANGUAGE.fullmatch(first.strip()) else block


def loading(code: str) -> str:
    """Return a Python program that runs `code` with the imports that solutions to LiveCodeBench expect.

    `code` is not `__main__`: its script part does not run.
    """
    return _LOAD.format(code=code, modules=STAR_IMPORTS)


def calling(code: str, function: str) -> str:
    """Return a Python program that reads arguments, one per line, loads `code` and prints what `function` returns.

    `function` may also be a method of a class `Solution`. Lists, dicts, booleans and None are printed as JSON. An
    exception, a missing function or an unreadable argument is exit code 1.
    """
    return _READ + loading(code) + _CALL.format(function=function)
