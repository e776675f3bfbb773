"""Tags: what attempts are divided by. Some are in the dump; all others come from the rows of the task file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from toolyard.errors import ConfigError
from toolyard.tasks.files import open_tasks
from toolyard.viewer.protocol import Attempt

TagsOf = Callable[[Attempt], tuple[str, ...]]
"""The values of one tag that an attempt has; none if they are unknown."""

SOURCE = "source"
_UNKNOWN_SOURCE = "unknown"
_OF_THE_DUMP: Mapping[str, TagsOf] = {
    SOURCE: lambda attempt: () if attempt.source == _UNKNOWN_SOURCE else (attempt.source,),
    "step": lambda attempt: (str(attempt.step),),
    "run": lambda attempt: (attempt.run,) if attempt.run else (),
    "task": lambda attempt: (attempt.task,) if attempt.task else (),
}
_OTHER_NAMES = {"data_source": SOURCE}
_SHOWN = 12


class TaskTags:
    """The fields of a task file's rows by task id, as far as they can be tags: `extra_info`, and fields without a
    meaning of their own, such as `ability` or `level`."""

    def __init__(self, path: str | Path) -> None:
        """
        Raises:
            TaskError: the file cannot be read.
        """
        self.path = str(path)
        self._fields = {task.id: task.extra_info for task in open_tasks(path, on_bad_row="skip")}

    def tags(self, name: str) -> TagsOf:
        """
        Raises:
            ConfigError: no task has such a field.
        """
        values = {task: _values(fields, name) for task, fields in self._fields.items()}
        if not any(values.values()):
            named = sorted({key for fields in self._fields.values() for key in fields if _values(fields, key)})
            listed = ", ".join(named[:_SHOWN]) + (", …" if len(named) > _SHOWN else "")
            raise ConfigError(f"--by {name}: no task of {self.path} has such a field; available: {listed or 'none'}")
        return lambda attempt: values.get(attempt.task, ())


def tags_by(name: str, tasks: TaskTags | None = None) -> TagsOf:
    """
    Raises:
        ConfigError: the dump does not have this tag, and there is no task file that has it.
    """
    name = _OTHER_NAMES.get(name, name)
    if name in _OF_THE_DUMP:
        return _OF_THE_DUMP[name]
    if tasks is None:
        raise ConfigError(
            f"--by {name}: a dump has only {', '.join(_OF_THE_DUMP)}; name the rollout's task file: --tasks FILE"
        )
    return tasks.tags(name)


def _values(fields: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """A value, or each of a list of values. Objects are no tags; `a.b` is the field b of a."""
    found: Any = fields
    for part in name.removeprefix("extra_info.").split("."):
        found = cast("Mapping[str, Any]", found).get(part) if isinstance(found, Mapping) else None
    values = cast("list[Any]", found) if isinstance(found, list) else [found]
    return tuple(dict.fromkeys(str(value) for value in values if isinstance(value, str | int | float) and value != ""))
