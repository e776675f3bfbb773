"""The only reader of environment variables. Everything else takes its settings as arguments.

`TOOLYARD_SANDBOX_TOKEN`: bearer token of `toolyard sandbox serve` and of `RemoteSandbox`.
`TOOLYARD_CACHE_DIR`: where precompiled headers and models are kept (default: `$XDG_CACHE_HOME/toolyard`).
"""

from __future__ import annotations

import os
from pathlib import Path


def sandbox_token() -> str | None:
    return os.environ.get("TOOLYARD_SANDBOX_TOKEN") or None


def cache_dir() -> Path:
    explicit = os.environ.get("TOOLYARD_CACHE_DIR")
    if explicit:
        return Path(explicit).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "toolyard"


def search_path() -> str:
    """Where toolchains are looked for: the caller's PATH, with the usual places as a fallback."""
    return os.environ.get("PATH") or os.defpath
