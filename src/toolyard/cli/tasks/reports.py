"""What `toolyard tasks` prints."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolyard.cli.console import print_json
from toolyard.errors import ConfigError, TaskError
from toolyard.tasks.files import BadRow, open_tasks
from toolyard.tasks.prepare import Prepared
from toolyard.tasks.protocol import Task

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_ROLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}


def print_tasks(tasks: Iterable[Task], console: Console | None) -> None:
    """Print to `console`, or JSON to stdout if it is None."""
    if console is None:
        print_json([_fields(task) for task in tasks])
        return
    for task in tasks:
        console.print(task.id, style="bold", end="", markup=False)
        kwargs = f" · kwargs for {', '.join(task.tools_kwargs)}" if task.tools_kwargs else ""
        console.print(
            f" · {task.data_source} · ground truth {_one_line(task.ground_truth)}{kwargs}", style="dim", markup=False
        )
        for message in task.messages:
            console.print(f"  {message.role}: ", style=_ROLES.get(message.role), end="", markup=False)
            console.print(message.content, markup=False, soft_wrap=True)
            for call in message.tool_calls:
                console.print(f"    calls {call.name} {call.arguments}", style="dim", markup=False, soft_wrap=True)


def check_tasks(source: str, fields: Mapping[str, str], console: Console | None) -> int:
    """Read all of `source`, print bad rows as they are found, then counts. Returns the exit status."""
    bad: list[BadRow] = []

    def report(row: BadRow) -> None:
        if console is None:
            bad.append(row)
        else:
            console.print(str(row), style="red", markup=False, soft_wrap=True)

    reader = open_tasks(source, on_bad_row="skip", report=report, fields=fields)
    sources: Counter[str] = Counter()
    try:
        for task in reader:
            sources[task.data_source] += 1
    except TaskError:
        if not (reader.ended and reader.bad):
            raise  # unless all rows are bad, which has been reported by now
    shapes = {shape.value: count for shape, count in reader.shapes.items()}
    if console is None:
        listed = [{row.unit: row.number, "problem": row.problem} for row in bad]
        counts = {"rows": reader.tasks + reader.bad, "tasks": reader.tasks, "shapes": shapes}
        print_json({**counts, "data_sources": sources, "bad": listed})
    else:
        console.print(_counts(shapes, sources, reader.bad))
        found = "all valid" if not reader.bad else f"{reader.bad:,} of them bad"
        console.print(f"{reader.tasks + reader.bad:,} rows, {found}", style="bold red" if reader.bad else "bold green")
    return 1 if reader.bad else 0


def print_prepared(done: Prepared, destination: Path, console: Console) -> None:
    for row in done.skipped:
        console.print(f"skipped: {row}", style="yellow", markup=False)
    skipped = f", {len(done.skipped):,} skipped" if done.skipped else ""
    console.print(
        f"{done.read:,} rows read, {done.written:,} written{skipped}: {destination}",
        style="yellow" if done.skipped else "green",
        markup=False,
    )


def read_fields(given: Sequence[str]) -> dict[str, str]:
    """`NAME=FIELD` lines as a mapping.

    Raises:
        ConfigError: one has another form.
    """
    fields: dict[str, str] = {}
    for one in given:
        name, _, old = one.partition("=")
        if not name or not old:
            raise ConfigError(f"--field {one}: expected NAME=FIELD, as in prompt=problem")
        fields[name] = old
    return fields


def read_system(given: str) -> str:
    """The text of the file `given`, or `given` itself if there is no such file."""
    if not os.path.isfile(given):
        return given
    try:
        return Path(given).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--system: cannot read {given}: {error}") from None


def _counts(shapes: dict[str, int], sources: Counter[str], bad: int) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    table.add_column("", overflow="fold")
    table.add_column("rows", justify="right")
    for title, counted in (("format", shapes), ("data source", dict(sources.most_common()))):
        for name, count in counted.items():
            table.add_row(title, escape(name), f"{count:,}")
    if bad:
        table.add_row("[red]bad[/]", "", f"[red]{bad:,}[/]")
    return table


def _fields(task: Task) -> dict[str, Any]:
    return {
        "id": task.id,
        "data_source": task.data_source,
        "messages": [message.as_openai() for message in task.messages],
        "ground_truth": task.ground_truth,
        "tools_kwargs": task.tools_kwargs,
        "interaction_kwargs": task.interaction_kwargs,
        "extra_info": task.extra_info,
    }


def _one_line(value: Any) -> str:
    written = " ".join(str(value).split())
    return "none" if value is None else written if len(written) <= 60 else written[:60] + "…"
