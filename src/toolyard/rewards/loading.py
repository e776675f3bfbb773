"""A user's function, by `package.module:function` or `path/to/file.py:function`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from toolyard.errors import ConfigError


def load_function(spec: str) -> Callable[..., Any]:
    """The function. A file is run anew each time; a module is imported once, as modules are.

    Raises:
        ConfigError: there is no such module, file or name, or it is no function; importing it failed.
    """
    place, _, name = spec.rpartition(":")
    if not place or not name:
        raise ConfigError("expected module:function or path/to/file.py:function")
    module = _from_file(Path(place)) if place.endswith(".py") else _module(place)
    found: Any = module
    for step in name.split("."):
        if not hasattr(found, step):
            public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
            there = ", ".join(public) or "none"
            raise ConfigError(f"{place} has no {name!r}; functions in it: {there}")
        found = getattr(found, step)
    if not callable(found):
        raise ConfigError(f"{name} is a {type(found).__name__}, and cannot be called")
    return found


def _module(name: str) -> ModuleType:
    _search(os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"there is no module {error.name!r} where Python looks for them, nor in the current folder; install "
                "it, name its folder in PYTHONPATH, or write path/to/file.py:function"
            ) from None
        raise ConfigError(f"importing {name} failed: {error}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"importing {name} failed: {type(error).__name__}: {error}") from error


def _from_file(path: Path) -> ModuleType:
    if not os.path.isfile(path):
        raise ConfigError(f"there is no file {str(path)!r} (current folder: {os.getcwd()})")
    path = path.absolute()
    _search(os.getcwd())
    _search(str(path.parent))
    # A name that no module has, so that a file called json.py is nobody's json.
    name = f"toolyard_reward_{path.stem}_{hashlib.sha256(os.fsencode(path)).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look there
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, Exception | SystemExit):
            raise ConfigError(f"running {path} failed: {type(error).__name__}: {error}") from error
        raise
    return module


def _search(folder: str) -> None:
    if folder not in sys.path:
        sys.path.append(folder)  # last, so that a file called json.py there is nobody's json
