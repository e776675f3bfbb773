"""Load tools from a YAML file, by class name.

    tools:
      - class_name: toolyard.tools.code_interpreter.SandboxFusionTool
        config: {type: native, num_workers: 10}
        tool_schema: {type: function, function: {…}}        # optional if the class has its own
      - class_name: toolyard.tools.mcp.MCPTool
        config: {type: mcp}
        mcp: {mcp_servers_config_path: mcp.json, tool_selected_list: [search]}

Your own class only needs to be importable, and so does a function decorated with `@tool`.
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
from toolyard.tools.verl_names import TOOLS, is_verl_module, replacement_hint

_OWN_TOOLS = ("toolyard.tools.code_interpreter.SandboxFusionTool", "toolyard.tools.gsm8k.Gsm8kTool")
_VALUE_CHARS = 80


class McpEntry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    mcp_servers_config_path: str
    """Relative to the YAML file; if it does not exist there, to the current directory, as in verl."""
    tool_selected_list: list[str] | None = None
    """None: all tools of all servers."""


class ToolEntry(BaseModel):
    """One entry of the list `tools`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    class_name: str = Field(min_length=1)
    config: dict[str, Any] = Field(default_factory=lambda: {"type": ToolType.NATIVE.value})
    tool_schema: OpenAIFunctionToolSchema | None = None
    """Not for MCP: the schemas come from its servers."""
    mcp: McpEntry | None = None


def initialize_tools_from_config(tools_config_file: str | Path) -> list[BaseTool]:
    """Load all tools of the file, in order. Blocks while MCP servers start.

    Raises:
        ConfigError: the file, an entry or a field is wrong; the message names it.
        ToolError: an MCP server does not answer.
    """
    path = Path(tools_config_file)
    # The whole file is checked first, so that an error in the last entry does not start the servers of the first.
    checked = read_entries(path)
    tools: list[BaseTool] = []
    places: dict[str, str] = {}
    try:
        for place, entry in checked:
            made = _build(place, path, entry)
            tools += made
            for tool in made:
                if tool.name in places:
                    raise ConfigError(f"{place}: a second tool named {tool.name!r}; the first is {places[tool.name]}")
                places[tool.name] = place.rpartition(" ")[2]
    except BaseException:
        background().run(_close(tools)).result()
        raise
    return tools


def read_entries(path: Path) -> list[tuple[str, ToolEntry]]:
    """The entries of a tools file, each with its place for messages. Nothing is imported or opened.

    Raises:
        ConfigError: the file, an entry or a field is wrong.
    """
    entries = [(f"{path}: tools[{index}]", raw) for index, raw in enumerate(_read(path))]
    return [(place, _validated(place, raw)) for place, raw in entries]


def builtin_tools() -> list[BaseTool]:
    """Return the two built-in tools, `code_interpreter` and `calc_gsm8k_reward`, with their default config."""
    return [get_tool_class(name)({"type": ToolType.NATIVE.value}) for name in _OWN_TOOLS]


def get_tool_class(cls_name: str) -> Any:
    """Import the class, or the function decorated with `@tool`, with that dotted name.

    Raises:
        ConfigError: it does not exist, or is not a tool.
    """
    what = f"class_name {cls_name!r}"
    not_provided = f"{what}: Toolyard does not provide this tool of verl's; it provides {', '.join(TOOLS)}"
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
            if is_verl_module(missing):
                raise ConfigError(not_provided) from None
            raise ConfigError(
                f"{what}: no module named {missing!r}; install it, or add its folder to PYTHONPATH"
            ) from None
        if isinstance(error, ModuleNotFoundError) and is_verl_module(missing):
            raise ConfigError(f"{what}: {replacement_hint(error)}") from None
        raise ConfigError(f"{what}: importing {module_name} failed: {type(error).__name__}: {error}") from error
    if is_verl_module(module_name):  # verl is installed, but its tools are not compatible
        raise ConfigError(not_provided)
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


def _validated(place: str, raw: Any) -> ToolEntry:
    """Check an entry as far as possible without importing its class."""
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{place}: expected a mapping with the key 'class_name', not {_short(raw)}")
    try:
        entry = ToolEntry.model_validate(raw)
    except ValidationError as error:
        in_mcp = error.errors()[0]["loc"][0] == "mcp"
        raise ConfigError(_describe_error(place, error, McpEntry if in_mcp else ToolEntry)) from None
    given = entry.config.get("type", ToolType.NATIVE.value)
    kinds = [kind.value for kind in ToolType]
    if given not in kinds:
        raise ConfigError(f"{place}.config.type: unknown type {_short(given)}; expected one of {', '.join(kinds)}")
    if given == ToolType.MCP and entry.mcp is None:
        raise ConfigError(f"{place}: the key 'mcp' is missing, which config.type mcp needs")
    if given != ToolType.MCP and entry.mcp is not None:
        raise ConfigError(f"{place}.mcp: only allowed with config.type mcp, but this entry has {given}")
    if entry.mcp is not None and entry.tool_schema is not None:
        raise ConfigError(f"{place}.tool_schema: not allowed with config.type mcp; the schemas come from the server")
    try:
        CallPolicy.model_validate(entry.config.get("call", {}))
    except ValidationError as error:
        raise ConfigError(_describe_error(f"{place}.config.call", error, CallPolicy)) from None
    return entry


def _build(place: str, path: Path, entry: ToolEntry) -> list[BaseTool]:
    try:
        found = get_tool_class(entry.class_name)
        if entry.mcp is not None:
            from toolyard.tools.mcp.tool import mcp_tools

            servers = path.parent / entry.mcp.mcp_servers_config_path
            if not servers.exists() and Path(entry.mcp.mcp_servers_config_path).exists():
                servers = Path(entry.mcp.mcp_servers_config_path)
            return mcp_tools(found, entry.config, servers, entry.mcp.tool_selected_list)
        tool = _factory(found)(config=entry.config, tool_schema=entry.tool_schema)
        handle_of(tool)  # finds an invalid schema now, not in the first trajectory
        return [tool]
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from error
    except ToolyardError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{place}: {entry.class_name} could not be created: {type(error).__name__}: {error}"
        ) from error


def _factory(found: Any) -> Callable[..., BaseTool]:
    return found.configured if isinstance(found, FunctionTool) else found


async def _close(tools: Iterable[BaseTool]) -> None:
    for tool in tools:
        with contextlib.suppress(Exception):  # the error that led here is reported
            await tool.close()


# Messages -------------------------------------------------------------------------------------------------------------


def _describe_error(place: str, error: ValidationError, model: type[BaseModel]) -> str:
    """Describe the first error; `model` is the model whose key is unknown."""
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
