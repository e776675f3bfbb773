"""The only module that reads environment variables. Everything else takes its settings as arguments, except that
`sandbox.guest`, which cannot import this module, reads `TOOLYARD_NATIVE`.

`TOOLYARD_SANDBOX_TOKEN`: bearer token for `toolyard sandbox serve` and `RemoteSandbox`.
`TOOLYARD_SANDBOX_TOKENS`: more tokens for `toolyard sandbox serve`, each `NAME SECRET`, separated by commas or lines.
`TOOLYARD_SANDBOX_CA_FILE`: certificates (PEM) that `RemoteSandbox` trusts in place of the system's.
`TOOLYARD_GATEWAY_TOKEN`: API key for `toolyard gateway`; several are separated by commas.
`TOOLYARD_VIEW_TOKEN`: token in the URL of `toolyard view --web`.
`TOOLYARD_JUDGE_API_KEY`: API key for the server of the reward `judge`, which can name another variable.
`TOOLYARD_CACHE_DIR`: directory for precompiled headers, models, judges' verdicts and indexes of read-only dumps
(default: `$XDG_CACHE_HOME/toolyard`).
`TOOLYARD_NATIVE`: 0 runs the cases of a batch one by one, without the compiled library.
Any variable that a user's file refers to as `${NAME}`: see `expanded`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, cast

_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}", re.ASCII)


def sandbox_token() -> str | None:
    return os.environ.get("TOOLYARD_SANDBOX_TOKEN") or None


def sandbox_tokens() -> list[str]:
    return os.environ.get("TOOLYARD_SANDBOX_TOKENS", "").replace(",", "\n").splitlines()


def sandbox_ca_file() -> str | None:
    return os.environ.get("TOOLYARD_SANDBOX_CA_FILE") or None


def gateway_tokens() -> list[str]:
    return os.environ.get("TOOLYARD_GATEWAY_TOKEN", "").replace(",", " ").split()


def view_token() -> str | None:
    return os.environ.get("TOOLYARD_VIEW_TOKEN") or None


def judge_api_key() -> str | None:
    return variable("TOOLYARD_JUDGE_API_KEY")


def variable(name: str) -> str | None:
    """A variable that the user's settings name, because its value must not be in a file."""
    return os.environ.get(name) or None


def cache_dir() -> Path:
    explicit = os.environ.get("TOOLYARD_CACHE_DIR")
    if explicit:
        return Path(explicit).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "toolyard"


def inherited_environment() -> dict[str, str]:
    """For programs of the user's own, such as agents. Sandboxed programs never get it."""
    return dict(os.environ)


def search_path() -> str:
    """Where toolchains are looked up: the caller's PATH, or the system default if PATH is not set."""
    return os.environ.get("PATH") or os.defpath


class UnsetVariableError(LookupError):
    """A user's file refers to a variable that is not set."""


def expanded(value: Any, place: str) -> Any:
    """Replace `${NAME}` and `${NAME:-default}` in all strings of parsed JSON or YAML with values from the environment.
    Everything else stays as it is.

    Raises:
        UnsetVariableError: one is not set and has no default. The message begins with `place`, where `value` is.
    """

    def variable_in(found: re.Match[str]) -> str:
        name, default = found.groups()
        if default is None and name not in os.environ:
            raise UnsetVariableError(f"{place}: the environment variable {name!r} is not set")
        return os.environ[name] if default is None else os.environ.get(name) or default

    if isinstance(value, str):
        return _VARIABLE.sub(variable_in, value)
    if isinstance(value, list):
        return [expanded(one, f"{place}[{index}]") for index, one in enumerate(cast("list[Any]", value))]
    if isinstance(value, dict):
        return {key: expanded(one, f"{place}.{key}") for key, one in cast("dict[Any, Any]", value).items()}
    return value
