"""The writable directories of a worker, between two programs."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from . import root


class Rooms:
    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self._kept = root.fixtures(config["read_only"]) if config["namespaces"] else frozenset[str]()
        self._clean_inodes = -1
        self.free_inodes = -1
        """If there are as many, and the usual file was removed, nothing else is to be done. -1: that is not enough."""

    def settle(self) -> None:
        """As they are now is how they are to be."""
        self._clean_inodes = self._inodes()
        if self._clean_inodes >= 0 and not self._config["owns_directories"]:
            self.free_inodes = os.statvfs(self._config["work"]).f_ffree

    def clean(self, usual: str) -> bool:
        """Remove everything a program wrote; `usual` is the one file that is always there. False: it cannot be done."""
        try:
            with contextlib.suppress(FileNotFoundError, IsADirectoryError, PermissionError):
                os.unlink(usual)
            dirty = self._clean_inodes < 0 or self._inodes() != self._clean_inodes
            if dirty:
                for path in self._config["writable"]:
                    root.wipe(path, self._kept)
            if self._config["owns_directories"]:
                for path in self._config["writable"]:
                    root.restore(path, self._config["directory_mode"])
            return not dirty or self._inodes() == self._clean_inodes
        except OSError:
            return False

    def forget_times(self) -> None:
        """So that the next program does not learn when this one used which directory. Nobody waits for this."""
        if not self._config["namespaces"]:
            for path in self._config["writable"]:
                root.renew_times(path)
        elif not self._config["owns_directories"]:  # else `restore` has set them
            for path in self._config["writable"]:
                os.utime(path)

    def _inodes(self) -> int:
        """How many there are. -1 where they cannot be counted."""
        if not self._config["namespaces"]:
            return -1
        space = os.statvfs(self._config["work"])
        return space.f_files - space.f_ffree
