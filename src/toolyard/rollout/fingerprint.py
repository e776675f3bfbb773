"""The settings of a dump, saved in its folder, so that a resumed run continues with the same ones.

Settings are compared key by key, the files they name by content, and tasks line by line: every line of a dump holds a
digest of its task. A difference is an error unless it is accepted; then every new line names it. Code is not compared:
neither Toolyard's nor that of tools and rewards.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

import yaml

from toolyard.engines.models import EMBEDDED
from toolyard.errors import ConfigError
from toolyard.messages import JSON
from toolyard.records.dump import EndedRequest
from toolyard.records.jsonl import encode
from toolyard.records.writer import write_json
from toolyard.rollout.config import SETTINGS_BESIDE_DUMP, RolloutConfig
from toolyard.tasks.protocol import Task

_CONTENTS, _ACCEPTED = "contents", "accepted_changes"
_NOT_PLAYED = (
    "accept_changes", "adaptive_concurrency", "cluster", "concurrency", "logs", "metrics", "n", "otel", "record",
    "replay", "retry_failed", "rollout_data_dir", "step", "tasks.path", "tasks.limit", "tasks.skip_bad_rows",
    "engine.api_key", "engine.directory", "engine.urls", "engine.request_timeout_seconds", "engine.silence_seconds",
    "limits.grace_seconds", "limits.stuck_after_seconds",
)  # fmt: skip
"""Settings that do not affect a request. For tasks, the contents count, not the path."""
_SHOWN = 5
_SAMPLES, _SAMPLE_BYTES = 256, 1 << 16


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The settings of a run, and digests of the files they name."""

    settings: JSON
    contents: dict[str, str]

    @classmethod
    def of(cls, config: RolloutConfig) -> Fingerprint:
        settings = config.model_dump(mode="json")
        for key in _NOT_PLAYED:
            holder: JSON = settings
            *path, last = key.split(".")
            for name in path:
                holder = holder[name]
            holder.pop(last, None)
        named = {
            "tools": config.tools,
            "chat.chat_template": config.chat.chat_template,
            "engine.script": config.engine.script,
            "engine.tape": config.engine.tape,
            "faults": config.faults,
            "rewards.options.rubric_file": (config.rewards.options or {}).get("rubric_file"),
        }
        contents = {key: _digest_of_file(path) for key, path in named.items() if path is not None}
        for path in _servers_of(config.tools):
            contents[f"tools: {path.name}"] = _digest_of_file(path)
        for key, model in (("engine.model", config.engine.model), ("engine.adapter", config.engine.adapter)):
            if model is not None and model not in EMBEDDED and (path := Path(model).expanduser()).exists():
                contents[key] = _digest_of_model(path)
        return cls(settings, contents)

    def differences(self, before: Mapping[str, Any]) -> list[str]:
        """The settings that have changed, as `key: before → now`."""
        now, then = dict(_flat(self.settings)), dict(_flat({key: before.get(key) for key in self.settings}))
        told = [
            f"{key}: {_in_short(then.get(key))} → {_in_short(now.get(key))}"
            for key in sorted(now.keys() | then.keys())
            if now.get(key) != then.get(key)
        ]
        kept: Mapping[str, str] = before.get(_CONTENTS) or {}
        told += [
            f"{key}: the contents have changed"
            for key, digest in self.contents.items()
            if key in kept and kept[key] != digest
        ]
        return told


def saved_differences(before: JSON, after: JSON) -> list[str]:
    """The differences between the settings of two dumps, as they were saved."""
    settings = {key: value for key, value in after.items() if key not in (_CONTENTS, _ACCEPTED)}
    return Fingerprint(settings, after.get(_CONTENTS) or {}).differences(before)


def saved_settings(path: str | os.PathLike[str]) -> JSON | None:
    """The settings that a dump, or the dump in a training run's folder, was played with; None if they are not known."""
    path = Path(path)
    folder = path if path.is_dir() else path.parent
    below = [*folder.glob(f"*/{SETTINGS_BESIDE_DUMP}")] if path.is_dir() else []
    own = _read(folder / SETTINGS_BESIDE_DUMP)
    return _read(below[0]) if own is None and len(below) == 1 else own


def save_settings(config: RolloutConfig, folder: Path, accepted: Sequence[str] = ()) -> None:
    """Save the settings beside a dump, with the changes that were accepted since it was started.

    Raises:
        RecordError: they cannot be written.
    """
    mark, file = Fingerprint.of(config), folder / SETTINGS_BESIDE_DUMP
    kept = {**mark.settings, _CONTENTS: mark.contents, _ACCEPTED: list(accepted)}
    if kept != _read(file):
        write_json(file, kept)


def task_digest(task: Task) -> str:
    """A digest of every part of a task that a model, a tool or a reward can see."""
    said = [
        [message.as_openai() for message in task.messages],
        task.ground_truth,
        task.data_source,
        dict(task.extra_info),
        {name: dict(kwargs) for name, kwargs in task.tools_kwargs.items()},
        task.interaction_kwargs,
    ]
    return blake2b(encode(said), digest_size=8).hexdigest()


def check_resumed(
    config: RolloutConfig, folder: Path, existing: Mapping[str, EndedRequest], tasks: Mapping[str, str]
) -> list[str]:
    """Compare with the settings the dump was started with, and save them for the next run. Returns the changes accepted
    now and earlier, which belong into every new line.

    Args:
        config: The settings of this run.
        folder: The dump's folder.
        existing: The dump's lines, by request id.
        tasks: Digests of the tasks, by request id.

    Raises:
        ConfigError: something has changed, and `accept_changes` is not set.
        RecordError: the settings cannot be saved.
    """
    before = _read(folder / SETTINGS_BESIDE_DUMP)
    changes = [] if before is None else Fingerprint.of(config).differences(before)
    edited = [
        ended.batch_data_id
        for request_id, ended in existing.items()
        if ended.task_digest and tasks.get(request_id, ended.task_digest) != ended.task_digest
    ]
    if edited:
        names = list(dict.fromkeys(edited))
        changes.append(f"tasks: the contents of {len(names)} have changed: {', '.join(names[:_SHOWN])}")
    if changes and not config.accept_changes:
        raise ConfigError(
            f"{folder} was started with other settings, and its groups would mix both: {'; '.join(changes)}. Choose "
            "another --out, or continue with --accept-changes; each new line will record the changes"
        )
    accepted = [*(before or {}).get(_ACCEPTED, ()), *changes]
    save_settings(config, folder, accepted)
    return accepted


def _read(file: Path) -> JSON | None:
    try:
        found: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return cast("JSON", found) if isinstance(found, dict) else None


def _flat(settings: Mapping[str, Any], above: str = "") -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for key, value in settings.items():
        inner = cast("JSON", value) if isinstance(value, Mapping) else {}
        flat += _flat(inner, f"{above}{key}.") if inner else [(f"{above}{key}", value)]
    return flat


def _in_short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _digest_of_file(path: str | os.PathLike[str]) -> str:
    """Empty if the file does not exist; opening it later raises the error."""
    try:
        return blake2b(Path(path).read_bytes(), digest_size=8).hexdigest()
    except OSError:
        return ""


def _digest_of_model(path: Path) -> str:
    """Of a file, or of the files in a folder. Large ones by samples: training changes all weights of a layer, and
    gigabytes would take too long to read. Empty if it cannot be read; opening it later raises the error."""
    try:
        return _samples_of(path)
    except OSError:
        return ""


def _samples_of(path: Path) -> str:
    digest = blake2b(digest_size=8)
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    for file in files:
        if not file.is_file() or file.suffix == ".md" or file.name.startswith("."):
            continue
        with file.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            digest.update(f"{file.name} {size}\0".encode())
            if size <= _SAMPLES * _SAMPLE_BYTES:
                digest.update(opened.read())
                continue
            for number in range(_SAMPLES):
                opened.seek((size - _SAMPLE_BYTES) * number // (_SAMPLES - 1))
                digest.update(opened.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _servers_of(tools: str | None) -> Sequence[Path]:
    """The MCP server files that a tools file names."""
    if tools is None:
        return ()
    try:
        found: Any = yaml.safe_load(Path(tools).read_text(encoding="utf-8"))
        entries = found["tools"]
        named = [entry["mcp"]["mcp_servers_config_path"] for entry in entries if "mcp" in entry]
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError):
        return ()  # opening it later raises the error
    return [Path(tools).parent / path for path in map(str, named)]
