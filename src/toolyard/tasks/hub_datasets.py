"""Data sets of the Hugging Face hub, read with the library `datasets`: `hf://OWNER/NAME[@REVISION][/CONFIG][:SPLIT]`.

Rows are streamed: nothing is downloaded before it is needed. With HF_HUB_OFFLINE=1, what was downloaded before is read
from the cache. Tokens for private data sets are those of `hf auth login` or HF_TOKEN.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any, NamedTuple

from toolyard.errors import MissingDependencyError, TaskError, summarize

SCHEME = "hf://"
_NAME = re.compile(
    r"hf://(?:datasets/)?(?P<name>[\w.-]+/[\w.-]+?)"
    r"(?:@(?P<revision>refs/(?:convert|pr)/[\w.-]+|[\w./-]+?))?(?:/(?P<config>[\w.-]+))?"
    r"(?::(?P<split>[\w.-]+))?",
    re.ASCII,
)
_FORM = "hf://OWNER/NAME[@REVISION][/CONFIG][:SPLIT]"
_HUB_SECONDS = 10.0
"""How long the hub may take to answer at all. Without this question, `datasets` tries for most of a minute."""


class HubName(NamedTuple):
    name: str
    revision: str | None = None
    config: str | None = None
    split: str | None = None


def parse_name(source: str) -> HubName:
    """
    Raises:
        TaskError: it does not have the form above.
    """
    found = _NAME.fullmatch(source)
    if found is None:
        raise TaskError(f"{source}: expected {_FORM}, for example hf://openai/gsm8k/main:test")
    return HubName(**found.groupdict())


def hub_rows(source: str) -> Iterator[Any]:
    """The rows of a data set on the hub, as they arrive.

    Raises:
        TaskError: the hub cannot be reached, or has no such data set, configuration or split; or, while iterating, the
            connection is lost.
        MissingDependencyError: `datasets` is not installed.
    """
    asked = parse_name(source)
    try:
        datasets, hub = import_module("datasets"), import_module("huggingface_hub")
    except ImportError as error:
        raise MissingDependencyError("datasets", "datasets", f"reading {source}") from error
    offline = bool(hub.constants.HF_HUB_OFFLINE)
    if not offline:
        _check_hub(hub, source, asked)
    try:
        # Streaming needs the hub; without it, there may be a copy in the cache.
        found = datasets.load_dataset(
            asked.name, asked.config, split=asked.split, revision=asked.revision, streaming=not offline
        )
    except Exception as error:  # whatever `datasets`, the hub's client or a data set's files raise
        hint = "; HF_HUB_OFFLINE is set, and it is not in the cache" if offline else ""
        raise TaskError(f"{source}: {_told(error)}{hint}") from error
    if isinstance(found, dict):  # by split
        if len(found) != 1:  # pyright: ignore[reportUnknownArgumentType]
            names = ", ".join(sorted(found))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
            raise TaskError(f"{source}: has several splits; name one, as in {source}:test; available: {names}")
        [found] = found.values()  # pyright: ignore[reportUnknownVariableType]
    return _rows(source, found)


def _rows(source: str, rows: Any) -> Iterator[Any]:
    try:
        yield from rows
    except Exception as error:
        raise TaskError(f"{source}: reading stopped: {_told(error)}") from error


def _check_hub(hub: Any, source: str, asked: HubName) -> None:
    try:
        hub.HfApi().dataset_info(asked.name, revision=asked.revision, timeout=_HUB_SECONDS)
    except (hub.errors.RepositoryNotFoundError, hub.errors.RevisionNotFoundError) as error:
        private = "there is no such data set or revision, or it is private: `hf auth login`, or set HF_TOKEN"
        raise TaskError(f"{source}: {private}") from error
    except Exception as error:  # the client's errors depend on its version
        raise TaskError(
            f"{source}: {hub.constants.ENDPOINT} cannot be asked: {_told(error)}. Without the hub, name a local folder "
            "with the files, or set HF_HUB_OFFLINE=1 to read what was downloaded before"
        ) from error


def _told(error: Exception) -> str:
    return " ".join(summarize(error).split())
