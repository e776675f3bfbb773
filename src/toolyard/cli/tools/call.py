"""What `toolyard tools` does: load tools, list them, and call one as a trajectory would."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolyard.cli.console import print_json, print_text
from toolyard.cli.outcomes import duration
from toolyard.errors import ConfigError
from toolyard.messages import JSON, decode_arguments
from toolyard.tools.base import BaseTool, ToolResponse
from toolyard.tools.function import FunctionTool
from toolyard.tools.instance import ToolInstance, ToolOutcome, ToolResult, open_instance
from toolyard.tools.registry import builtin_tools, initialize_tools_from_config

if TYPE_CHECKING:
    from rich.console import Console

_REQUEST_ID = "command-line"
_COLORS = {ToolOutcome.OK: "green", ToolOutcome.RAISED: "red", ToolOutcome.FAILED: "red"}


def load(file: Path | None) -> list[BaseTool]:
    """The tools of `file`, or the built-in ones.

    Raises:
        ConfigError: the file is invalid.
        ToolError: an MCP server does not respond.
    """
    if file is None:
        return builtin_tools()
    for folder in (os.getcwd(), str(file.absolute().parent)):
        if folder not in sys.path:
            sys.path.append(folder)  # last, so that a json.py there does not shadow the standard library's
    return initialize_tools_from_config(file)


def find(tools: Sequence[BaseTool], name: str) -> BaseTool:
    for tool in tools:
        if tool.name == name:
            return tool
    known = ", ".join(tool.name for tool in tools) or "none"
    raise ConfigError(f"unknown tool {name!r}; known tools: {known}")


async def close(tools: Sequence[BaseTool]) -> None:
    """Close all tools, even if closing one of them fails."""
    async with AsyncExitStack() as stack:
        for tool in tools:
            stack.push_async_callback(tool.close)


def read_object(text: str) -> JSON:
    found, problem = decode_arguments(text)
    if problem is not None:
        raise ValueError(problem.replace("the arguments are", "this is"))
    return found


# Lists ----------------------------------------------------------------------------------------------------------------


def print_list(tools: Sequence[BaseTool], console: Console | None) -> None:
    """Print a table to `console`, or JSON to stdout if it is None."""
    rows = [_fields(tool) for tool in tools]
    if console is None:
        print_json(rows)
        return
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in ("name", "type", "class", "parameters", "description"):
        table.add_column(title, overflow="fold", style="bold" if title == "name" else None)
    for row in rows:
        parameters = [name if name in row["required"] else f"{name}?" for name in row["parameters"]]
        first = (row["description"].strip().splitlines() or [""])[0]
        table.add_row(*map(escape, (row["name"], row["type"], row["class"], ", ".join(parameters), first)))
    console.print(table)


def print_schemas(tools: Sequence[BaseTool], *, one: bool) -> None:
    schemas = [tool.tool_schema.model_dump(mode="json") for tool in tools]
    print_json(schemas[0] if one else schemas)


def _fields(tool: BaseTool) -> dict[str, Any]:
    function = tool.tool_schema.function
    implementation: Any = tool.function if isinstance(tool, FunctionTool) else type(tool)
    return {
        "name": tool.name,
        "type": str(tool.config.get("type", "native")),
        "class": f"{implementation.__module__}.{implementation.__qualname__}",
        "parameters": list(function.parameters.properties),
        "required": function.parameters.required,
        "description": function.description,
    }


# Calls ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CalledTool:
    """A tool's instance and the results of its calls."""

    instance: ToolInstance
    results: Sequence[ToolResult]

    @property
    def ok(self) -> bool:
        return not self.instance.problems and all(result.outcome is ToolOutcome.OK for result in self.results)


async def call_tool(
    tools: Sequence[BaseTool], name: str, arguments: str, create_kwargs: Mapping[str, Any], repeat: int
) -> CalledTool:
    """Call the tool `name`, then close all `tools`.

    Raises:
        ConfigError: there is no such tool.
        ToolError: its instance could not be created.
    """
    async with AsyncExitStack() as stack:
        stack.push_async_callback(close, tools)
        async with open_instance(find(tools, name), _REQUEST_ID, {"create_kwargs": dict(create_kwargs)}) as instance:
            results = [await instance.call(arguments) for _ in range(repeat)]
        return CalledTool(instance, results)


def print_calls(called: CalledTool, console: Console | None) -> int:
    """Print what the model would read on stdout and the rest on `console`, or all as JSON if it is None.

    Returns the exit status.
    """
    instance, status = called.instance, 0 if called.ok else 1
    if console is None:
        print_json(_call_fields(called))
        return status
    if not instance.creation.is_empty():
        print_text(instance.creation.text or "")
        console.print(f"[{' · '.join(['create', *_media(instance.creation)])}]", markup=False)
    for result in called.results:
        print_text(result.response.text or "")
        if result.outcome is ToolOutcome.RAISED:  # a bug in the tool: show its author the traceback
            console.print(result.error, style="dim", markup=False)
        elif result.outcome is ToolOutcome.FAILED:
            console.print(_reason(result.error or ""), markup=False)
        console.print(_line(result), style=_COLORS.get(result.outcome, "yellow"), markup=False)
    for problem in instance.problems:
        console.print(problem, style="red", markup=False)
    console.print(f"[calc_reward {'none' if instance.reward is None else instance.reward}]", markup=False)
    return status


def _line(result: ToolResult) -> str:
    parts = [result.outcome.value, duration(result.seconds)]
    if result.attempts > 1:
        parts.append(f"{result.attempts} attempts")
    parts += _media(result.response)
    if result.truncated:
        parts.append("truncated")
    parts.append("no step reward" if result.reward is None else f"step reward {result.reward:g}")
    parts += [f"{name} {_metric(value)}" for name, value in result.metrics.items()]
    return f"[{' · '.join(parts)}]"


def _reason(trace: str) -> str:
    """The last line of a traceback: the kind of error, and its message."""
    last = next((line for line in reversed(trace.splitlines()) if line.strip(" |+-")), "")  # exception groups use |+-
    kind, colon, message = last.lstrip(" |").partition(": ")
    return kind.rpartition(".")[2] + colon + message


def _metric(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _media(response: ToolResponse) -> list[str]:
    return [
        f"{len(shown)} {kind}{'' if len(shown) == 1 else 's'}"
        for kind, shown in (("image", response.image), ("video", response.video))
        if shown
    ]


def _call_fields(called: CalledTool) -> dict[str, Any]:
    instance = called.instance
    return {
        "tool": instance.tool.name,
        "instance_id": instance.instance_id,
        "create": instance.creation.model_dump(exclude_none=True),
        "calls": [
            {
                "outcome": result.outcome.value,
                "response": result.response.model_dump(exclude_none=True),
                "reward": result.reward,
                "metrics": dict(result.metrics),
                "seconds": round(result.seconds, 6),
                "attempts": result.attempts,
                "truncated": result.truncated,
                "error": result.error,
            }
            for result in called.results
        ],
        "reward": instance.reward,
        "problems": instance.problems,
    }
