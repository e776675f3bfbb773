"""Folders in the cache that are either whole or not there.

A folder is built beside its place and renamed into it, with a manifest that lists what is in it. Whoever is killed in
the middle leaves something that nobody takes for a model, and that the next builder removes.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolyard.errors import EngineError

MANIFEST = "manifest.json"
_FORMAT = 1
_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), ": make room, or set TOOLYARD_CACHE_DIR"),
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST),
        ": set TOOLYARD_CACHE_DIR to a folder that you may write to",
    ),
}


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """One folder of the cache, and what it is made from: another source makes another folder of it."""

    path: Path
    source: str

    def fault(self, *, verify: bool = False) -> str | None:
        """Why it cannot be used, or None. `verify` reads every byte; without, sizes must do."""
        if not self.path.is_dir():
            return "it is not there"
        try:
            manifest: Any = json.loads((self.path / MANIFEST).read_text())
            if (manifest["format"], manifest["source"]) != (_FORMAT, self.source):
                return "it was made from something else"
            for name, listed in manifest["files"].items():
                file = self.path / name
                if file.stat().st_size != listed["bytes"]:
                    return f"{name} has not the size it should have"
                if verify and _digest(file) != listed["sha256"]:
                    return f"{name} has not the content it should have"
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return f"its manifest does not fit: {error}"
        return None

    def size(self) -> int:
        return sum(file.stat().st_size for file in self.path.iterdir()) if self.path.is_dir() else 0

    def ensure(
        self, build: Callable[[Path], None], *, verify: bool = False, progress: Callable[[str], None] = lambda _: None
    ) -> Path:
        """The folder, after building it if it is not whole. Of many processes that want it, one builds and the others
        wait.

        Raises:
            EngineError: the disk is full, or the cache cannot be written. And whatever `build` raises.
        """
        if not verify and self.fault() is None:
            return self.path
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._lock(progress):
                fault = self.fault(verify=verify)
                if fault is None:
                    return self.path
                if self.path.exists():
                    progress(f"building {self.path.name} again: {fault}")
                self._build(build)
        except OSError as error:
            remedy = _REMEDIES.get(error.errno or 0, "")
            raise EngineError(f"cannot prepare {self.path}: {error.strerror or error}{remedy}") from error
        return self.path

    def _build(self, build: Callable[[Path], None]) -> None:
        for left in self.path.parent.glob(f"{self.path.name}.building-*"):
            shutil.rmtree(left, ignore_errors=True)  # of builders that were killed: we hold the lock
        with tempfile.TemporaryDirectory(dir=self.path.parent, prefix=f"{self.path.name}.building-") as scratch:
            made = Path(scratch) / "made"
            made.mkdir()
            build(made)
            _write_manifest(made, self.source)
            if self.path.exists():
                self.path.rename(Path(scratch) / "old")
            made.rename(self.path)

    @contextmanager
    def _lock(self, progress: Callable[[str], None]) -> Generator[None]:
        """The kernel's, so that it ends with its holder, however that ends."""
        descriptor = os.open(
            self.path.with_name(f"{self.path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666
        )
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                progress(f"waiting for another process that prepares {self.path.name}")
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _write_manifest(folder: Path, source: str) -> None:
    files = {
        file.name: {"bytes": file.stat().st_size, "sha256": _digest(file)}
        for file in sorted(folder.iterdir())
        if file.is_file()
    }
    for name in files:
        _to_disk(folder / name)
    (folder / MANIFEST).write_text(json.dumps({"format": _FORMAT, "source": source, "files": files}, indent=2))
    _to_disk(folder / MANIFEST)


def _to_disk(file: Path) -> None:
    """Before the rename: a power cut must not leave a folder with its name, and without its content."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
