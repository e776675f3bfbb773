"""verl's functions that fork, in a separate process.

They must not fork a process with threads, and prime_code changes the process it runs in. The process is small:
packages of verl's are there without what their `__init__` imports, which is torch and all the rest, and makes each fork
take half a second.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

MEMORY = 3 << 30
"""prime_code sets no limit, and some answers would take all there is."""
Question = tuple[str, Sequence[Any]]
"""The name of a function, and its arguments."""


def ask(module: str, questions: Sequence[Question]) -> list[Any]:
    """What functions of `verl.utils.reward_score.<module>` say: the first thing that each returns, or its exception."""
    command = [sys.executable, __file__, module]
    lines = "".join(json.dumps(question) + "\n" for question in questions)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, input=lines, stdout=subprocess.PIPE, text=True, check=True, timeout=280, env=environment
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def _load(name: str) -> Any:
    verl = find_spec("verl")
    assert verl is not None
    assert verl.submodule_search_locations is not None
    [root] = verl.submodule_search_locations
    for package in ("verl", "verl.utils", "verl.utils.reward_score"):
        empty = sys.modules[package] = ModuleType(package)
        empty.__path__ = [str(Path(root, *package.split(".")[1:]))]
    return importlib.import_module(f"verl.utils.reward_score.{name}")


def _value(function: Any, arguments: Sequence[Any]) -> Any:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            return function(*arguments)[0]
        except Exception as error:
            return type(error).__name__


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    loaded = _load(sys.argv[1])
    for line in sys.stdin:
        function, arguments = json.loads(line)
        print(json.dumps(_value(getattr(loaded, function), arguments)), flush=True)
