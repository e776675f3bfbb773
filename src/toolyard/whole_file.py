"""Files that appear only when they are complete."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from toolyard.errors import ConfigError


@contextmanager
def replacing(path: Path) -> Generator[Path]:
    """A name beside `path` to write to, which nobody else uses. What was written there replaces `path` when the block
    ends; if the block raises, nothing is left.

    Raises:
        OSError: it cannot be written.
    """
    partial = path.with_name(f".{path.name[:200]}.{secrets.token_hex(4)}.part")
    try:
        yield partial
        with partial.open("rb") as written:
            os.fsync(written.fileno())  # otherwise a power failure could leave an empty file
        partial.replace(path)
    finally:
        with suppress(OSError):  # it was renamed, or could not be created
            partial.unlink()


@contextmanager
def whole_file(path: Path, *, overwrite: bool = True) -> Generator[BinaryIO]:
    """Open a file to write. It appears under its name when the block ends; if the block raises, nothing is left.

    Raises:
        ConfigError: it cannot be written, is not a regular file, or exists and may not be overwritten.
    """
    try:
        _check(path, overwrite=overwrite)
        with replacing(path) as partial:
            with partial.open("wb") as file:
                yield file
            _check(path, overwrite=overwrite)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from None


def _check(path: Path, *, overwrite: bool) -> None:
    if os.path.lexists(path):
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise ConfigError(f"cannot write {path}: it is not a regular file")
        if not overwrite:
            raise ConfigError(f"{path} exists; choose another name, or overwrite it with --force")
