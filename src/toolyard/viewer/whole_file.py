"""Files that appear only when they are complete."""

from __future__ import annotations

import os
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from toolyard.errors import ConfigError


@contextmanager
def whole_file(path: Path, *, overwrite: bool = True) -> Generator[BinaryIO]:
    """Open a file to write. It appears under its name when the block ends; if the block raises, nothing is left.

    Raises:
        ConfigError: it cannot be written, is not a regular file, or exists and may not be overwritten.
    """
    partial = path.with_name(f".{path.name[:200]}.{os.getpid()}.part")
    try:
        _check(path, overwrite=overwrite)
        try:
            with partial.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())  # otherwise a power failure could leave an empty file
            _check(path, overwrite=overwrite)
            partial.replace(path)
        finally:
            with suppress(OSError):  # it was renamed, or could not be created
                partial.unlink()
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from None


def _check(path: Path, *, overwrite: bool) -> None:
    if os.path.lexists(path):
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise ConfigError(f"cannot write {path}: it is not a regular file")
        if not overwrite:
            raise ConfigError(f"{path} exists; choose another name, or overwrite it with --force")
