"""Our equivalents of verl's names, for tool files and modules written for verl."""

from __future__ import annotations

import ast
import traceback
from collections.abc import Iterator
from pathlib import Path

TOOLS = {
    "verl.tools.gsm8k_tool.Gsm8kTool": "toolyard.tools.gsm8k.Gsm8kTool",
    "verl.tools.mcp_base_tool.MCPBaseTool": "toolyard.tools.mcp.MCPTool",
    "verl.tools.mcp_search_tool.MCPSearchTool": "toolyard.tools.mcp.MCPTool",
    "verl.tools.sandbox_fusion_tools.SandboxFusionTool": "toolyard.tools.code_interpreter.SandboxFusionTool",
}
"""verl's classes that a YAML file may name; they mean ours, even if verl is installed."""
_MODULES = {
    "BaseTool": "toolyard.tools",
    "ToolResponse": "toolyard.tools",
    "OpenAIFunctionToolSchema": "toolyard.tools",
    "initialize_tools_from_config": "toolyard.tools",
    "OpenAIFunctionPropertySchema": "toolyard.messages",
    "OpenAIFunctionParametersSchema": "toolyard.messages",
    "OpenAIFunctionSchema": "toolyard.messages",
    "OpenAIFunctionParsedSchema": "toolyard.messages",
    "OpenAIFunctionCallSchema": "toolyard.messages",
    "OpenAIFunctionToolCall": "toolyard.messages",
}
"""Where to import the names of verl.tools.base_tool, verl.tools.schemas and its tool registry from."""


def is_verl_module(name: str | None) -> bool:
    return name is not None and name.partition(".")[0] == "verl"


def replacement_hint(error: ModuleNotFoundError) -> str:
    """Say which line imports the missing verl, and what to write instead."""
    place = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")][-1]
    lines, unknown = dict[str, list[str]](), list[str]()
    for module, name in _imports(Path(place.filename)):
        home = TOOLS[f"{module}.{name.name}"].rpartition(".")[0] if f"{module}.{name.name}" in TOOLS else None
        if home is None and module.startswith("verl.tools."):
            home = _MODULES.get(name.name)
        if home is None:
            unknown.append(f"{module}.{name.name}")
        else:
            lines.setdefault(home, []).append(ast.unparse(name))
    written = " and ".join(f"`from {home} import {', '.join(names)}`" for home, names in sorted(lines.items()))
    hint = f"write {written}" if written else "its equivalents are in toolyard.tools"
    if unknown:
        hint += f"; there is no equivalent for {', '.join(unknown)}"
    return f"{place.filename}, line {place.lineno}: this line imports verl, which is not installed; {hint}"


def _imports(file: Path) -> Iterator[tuple[str, ast.alias]]:
    """Yield the names that a Python file imports from verl."""
    try:
        source = file.read_bytes()
    except OSError:  # a module need not be a file
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and not node.level and is_verl_module(node.module):
            for name in node.names:
                yield node.module or "", name
