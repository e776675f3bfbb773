"""An engine directory: a file with the URLs of a run's servers, one per line, that may change while the run goes on.

A line may begin with `- `, so that the file is YAML, too; `#` begins a comment. Replace the file as a whole (write
another one and rename it), as `add_urls` and `remove_urls` do.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from toolyard.engines.http.exchange import base_url
from toolyard.errors import ConfigError

_LOOK_SECONDS = 1.0
_MAX_BYTES = 1 << 20


def read_directory(path: str | Path) -> tuple[str, ...]:
    """Return the URLs; a file without any is valid.

    Raises:
        ConfigError: the file cannot be read, or a line is not a URL.
    """
    return tuple(url for url, _ in _entries(path, _text(path)) if url)


def add_urls(path: str | Path, urls: Sequence[str]) -> list[str]:
    """Add what is missing, creating the file if needed, and return it. Others may change the file at the same time.

    Raises:
        ConfigError: the file is invalid or cannot be written, or a URL is invalid.
    """
    wanted = dict.fromkeys(map(base_url, urls))
    with _locked(path, "ab") as text:
        known = {url for url, _ in _entries(path, text)}
        missing = [url for url in wanted if url not in known]
        if missing:
            dash = "- " if text.lstrip().startswith("- ") else ""
            joint = "\n" if text and not text.endswith("\n") else ""
            _replace(path, text + joint + "".join(f"{dash}{url}\n" for url in missing))
    return missing


def remove_urls(path: str | Path, urls: Sequence[str]) -> list[str]:
    """Remove what is there and return it. Comments stay.

    Raises:
        ConfigError: the file is invalid or cannot be written, or a URL is invalid.
    """
    unwanted = set(map(base_url, urls))
    with _locked(path, "rb+") as text:
        entries = list(_entries(path, text))
        found = [url for url, _ in entries if url in unwanted]
        if found:
            _replace(path, "".join(line for url, line in entries if url not in unwanted))
    return found


async def watch_directory(
    path: str | Path, urls: tuple[str, ...], change: Callable[[tuple[str, ...]], None], note: Callable[[str], None]
) -> None:
    """Call `change` with the new URLs whenever they change, until cancelled. While the file is bad, nothing changes,
    and `note` gets the reason once.

    `urls`: those that are in use now.
    """
    complaint = ""
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        try:
            # Read each time: on a network file system, the file's times may be cached, but not what is read after open.
            now = await asyncio.to_thread(read_directory, path)
        except ConfigError as error:
            if complaint != str(error):
                complaint = str(error)
                note(f"{complaint}; the last good list stays in use: {', '.join(urls) or 'empty'}")
            continue
        complaint = ""
        if set(now) != set(urls):
            told = [f"added {url}" for url in now if url not in urls]
            told += [f"removed {url}" for url in urls if url not in now]
            urls = now
            note(f"engine.directory {str(path)!r}: {', '.join(told)}")
            change(urls)


def _text(path: str | Path) -> str:
    try:
        with Path(path).open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise ConfigError(f"engine.directory {str(path)!r}: the file is larger than {_MAX_BYTES} bytes")
        return content.decode()
    except OSError as error:
        hint = "; create it: an empty file will do" if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(f"engine.directory {str(path)!r}: {error.strerror or error}{hint}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"engine.directory {str(path)!r}: the file is not UTF-8") from None


def _entries(path: str | Path, text: str) -> Iterator[tuple[str, str]]:
    """Each line, with its URL, or an empty string if it has none."""
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        said = line.partition("#")[0].strip().removeprefix("- ").strip().strip("'\"")
        try:
            yield base_url(said) if said else "", line
        except ConfigError as error:
            raise ConfigError(f"engine.directory {str(path)!r}, line {number}: {error}") from None


@contextmanager
def _locked(path: str | Path, mode: Literal["ab", "rb+"]) -> Generator[str]:
    """Lock the file, and give its text."""
    try:
        while True:
            with open(path, mode) as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                # Whoever had the lock before may have replaced the file: then the lock is that of a file nobody sees.
                if os.path.exists(path) and os.path.samestat(os.stat(path), os.fstat(file.fileno())):
                    yield _text(path)
                    return
    except OSError as error:
        raise ConfigError(f"engine.directory {str(path)!r}: {error.strerror or error}") from None


def _replace(path: str | Path, text: str) -> None:
    new = Path(f"{path}.new")
    new.write_text(text, encoding="utf-8")
    shutil.copymode(path, new)
    new.replace(path)
