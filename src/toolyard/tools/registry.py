"""Tools from a YAML file, by class name.

    tools:
      - class_name: toolyard.tools.code_interpreter.SandboxFusionTool
        config: {type: native, num_workers: 10}
        tool_schema: {type: function, function: {…}}        # may be left out where the class has its own
      - class_name: toolyard.tools.mcp.MCPTool
        config: {type: mcp}
        mcp: {mcp_servers_config_path: mcp.json, tool_selected_list: [search]}

A class of your own needs nothing but to be importable. So does a function decorated with `@tool`.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from toolyard.errors import ConfigError, ToolyardError
from toolyard.limits.background import background
from toolyard.messages import OpenAIFunctionToolSchema
from toolyard.tools.base import BaseTool, ToolType
from toolyard.tools.calls import handle_of
from toolyard.tools.function import FunctionTool
from toolyard.tools.policy import CallPolicy
from toolyard.tools.verl_names import TOOLS, instead_of_verl, is_of_verl

_OWN_TOOLS = ("toolyard.tools.code_interpreter.SandboxFusionTool", "toolyard.tools.gsm8k.Gsm8kTool")
_VALUE_CHARS = 80


class McpEntry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    mcp_servers_config_path: str
    """Relative to the YAML file; if it is not there, to the current directory, as in verl."""
    tool_selected_list: list[str] | None = None
    """None: all tools of all servers."""


class ToolEntry(BaseModel):
    """One entry of the list `tools`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    class_name: str = Field(min_length=1)
    config: dict[str, Any] = Field(default_factory=lambda: {"type": ToolType.NATIVE.value})
    tool_schema: OpenAIFunctionToolSchema | None = None
    """Not for MCP: its servers have the schemas."""
    mcp: McpEntry | None = None


def initialize_tools_from_config(tools_config_file: str | Path) -> list[BaseTool]:
    """All tools of the file, in its order. Blocks while MCP servers start.

    Raises:
        ConfigError: the file, an entry or a field is wrong; the message names it.
        ToolError: an MCP server does not answer.
    """
    path = Path(tools_config_file)
    # All of the file is read before anything is made: a mistake in the last entry starts no server of the first.
    entries = [(f"{path}: tools[{index}]", raw) for index, raw in enumerate(_read(path))]
    checked = [(place, _checked(place, raw)) for place, raw in entries]
    tools: list[BaseTool] = []
    places: dict[str, str] = {}
    try:
        for place, entry in checked:
            made = _made(place, path, entry)
            tools += made
            for tool in made:
                if tool.name in places:
                    raise ConfigError(f"{place}: a second tool named {tool.name!r}; the first is {places[tool.name]}")
                places[tool.name] = place.rpartition(" ")[2]
    except BaseException:
        background().run(_close(tools)).result()
        raise
    return tools


def own_tools() -> list[BaseTool]:
    """Toolyard's two, `code_interpreter` and `calc_gsm8k_reward`, as they are without a file."""
    return [get_tool_class(name)({"type": ToolType.NATIVE.value}) for name in _OWN_TOOLS]


def get_tool_class(cls_name: str) -> Any:
    """The class, or the function with `@tool`, of that dotted name.

    Raises:
        ConfigError: there is none, or it is no tool.
    """
    what = f"class_name {cls_name!r}"
    none_such = f"{what}: Toolyard has no such tool; of verl's it has {', '.join(TOOLS)}"
    module_name, _, name = TOOLS.get(cls_name, cls_name).rpartition(".")
    if not module_name:
        raise ConfigError(f"{what}: expected a dotted name, module.Class")
    try:
        module = importlib.import_module(module_name)
    except ToolyardError as error:
        raise ConfigError(f"{what}: importing {module_name} failed: {error}") from error
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{module_name}.".startswith(f"{missing}."):
            if is_of_verl(missing):
                raise ConfigError(none_such) from None
            raise ConfigError(
                f"{what}: there is no module {missing!r} where Python looks for them; install it, or name its folder "
                "in PYTHONPATH"
            ) from None
        if isinstance(error, ModuleNotFoundError) and is_of_verl(missing):
            raise ConfigError(f"{what}: {instead_of_verl(error)}") from None
        raise ConfigError(f"{what}: importing {module_name} failed: {type(error).__name__}: {error}") from error
    if is_of_verl(module_name):  # it is installed, and its tools are not ours
        raise ConfigError(none_such)
    if not hasattr(module, name):
        raise ConfigError(f"{what}: module {module_name!r} has no {name!r}")
    found: Any = getattr(module, name)
    if not (isinstance(found, FunctionTool) or (isinstance(found, type) and issubclass(found, BaseTool))):
        raise ConfigError(f"{what}: {name} is neither a subclass of toolyard.tools.BaseTool nor a function with @tool")
    return found  # pyright: ignore[reportUnknownVariableType]


# The file -------------------------------------------------------------------------------------------------------------


def _read(path: Path) -> list[Any]:
    try:
        content: Any = yaml.safe_load(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    if content is None:
        raise ConfigError(f"{path}: the file is empty; expected a list under the key 'tools'")
    if not isinstance(content, Mapping) or not isinstance(content.get("tools"), list):  # pyright: ignore[reportUnknownMemberType]
        raise ConfigError(f"{path}: expected a list under the key 'tools'")
    unknown = [str(key) for key in content if key != "tools"]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if unknown:
        raise ConfigError(f"{path}: unknown key {unknown[0]!r}; expected only 'tools'")
    return content["tools"]  # pyright: ignore[reportUnknownVariableType]


def _checked(place: str, raw: Any) -> ToolEntry:
    """What can be said of an entry without importing its class."""
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{place}: expected a mapping with the key 'class_name', not {_short(raw)}")
    try:
        entry = ToolEntry.model_validate(raw)
    except ValidationError as error:
        in_mcp = error.errors()[0]["loc"][0] == "mcp"
        raise ConfigError(_told(place, error, McpEntry if in_mcp else ToolEntry)) from None
    given = entry.config.get("type", ToolType.NATIVE.value)
    kinds = [kind.value for kind in ToolType]
    if given not in kinds:
        raise ConfigError(f"{place}.config.type: unknown type {_short(given)}; expected one of {', '.join(kinds)}")
    if given == ToolType.MCP and entry.mcp is None:
        raise ConfigError(f"{place}: the key 'mcp' is missing, which config.type mcp needs")
    if given != ToolType.MCP and entry.mcp is not None:
        raise ConfigError(f"{place}.mcp: only for config.type mcp, and this entry's is {given}")
    if entry.mcp is not None and entry.tool_schema is not None:
        raise ConfigError(f"{place}.tool_schema: not for config.type mcp; the server has the schemas")
    try:
        CallPolicy.model_validate(entry.config.get("call", {}))
    except ValidationError as error:
        raise ConfigError(_told(f"{place}.config.call", error, CallPolicy)) from None
    return entry


def _made(place: str, path: Path, entry: ToolEntry) -> list[BaseTool]:
    try:
        found = get_tool_class(entry.class_name)
        if entry.mcp is not None:
            from toolyard.tools.mcp.tool import mcp_tools

            servers = path.parent / entry.mcp.mcp_servers_config_path
            if not servers.exists() and Path(entry.mcp.mcp_servers_config_path).exists():
                servers = Path(entry.mcp.mcp_servers_config_path)
            return mcp_tools(found, entry.config, servers, entry.mcp.tool_selected_list)
        tool = _maker(found)(config=entry.config, tool_schema=entry.tool_schema)
        handle_of(tool)  # so that a schema that is none is found now, not by the first trajectory
        return [tool]
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from error
    except ToolyardError:
        raise
    except Exception as error:
        raise ConfigError(f"{place}: {entry.class_name} could not be made: {type(error).__name__}: {error}") from error


def _maker(found: Any) -> Callable[..., BaseTool]:
    return found.configured if isinstance(found, FunctionTool) else found


async def _close(tools: Iterable[BaseTool]) -> None:
    for tool in tools:
        with contextlib.suppress(Exception):  # why they are closed is what is told
            await tool.close()


# Words ----------------------------------------------------------------------------------------------------------------


def _told(place: str, error: ValidationError, model: type[BaseModel]) -> str:
    """The first thing that is wrong; `model` is whose key it is, if a key is unknown."""
    first = error.errors()[0]
    *parents, last = [str(step) for step in first["loc"]] or [""]
    parent = ".".join([place, *parents])
    match first["type"]:
        case "extra_forbidden":
            return f"{parent}: unknown key {last!r}; expected one of {', '.join(model.model_fields)}"
        case "missing":
            return f"{parent}: the key {last!r} is missing"
        case _:
            return f"{parent}{'.' if last else ''}{last}: {first['msg']}, not {_short(first['input'])}"


def _short(value: Any) -> str:
    written = repr(value)
    return written if len(written) <= _VALUE_CHARS else written[:_VALUE_CHARS] + "…"
