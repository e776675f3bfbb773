"""Tools: named capabilities of a model, with a life cycle for each trajectory."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolyard.messages import OpenAIFunctionToolSchema
    from toolyard.tools.base import BaseTool, ToolResponse, ToolType
    from toolyard.tools.function import tool
    from toolyard.tools.instance import ToolInstance, open_instance, open_instances
    from toolyard.tools.registry import get_tool_class, initialize_tools_from_config

_HOMES = {
    "BaseTool": "toolyard.tools.base",
    "OpenAIFunctionToolSchema": "toolyard.messages",
    "ToolInstance": "toolyard.tools.instance",
    "ToolResponse": "toolyard.tools.base",
    "ToolType": "toolyard.tools.base",
    "get_tool_class": "toolyard.tools.registry",
    "initialize_tools_from_config": "toolyard.tools.registry",
    "open_instance": "toolyard.tools.instance",
    "open_instances": "toolyard.tools.instance",
    "tool": "toolyard.tools.function",
}

__all__ = [
    "BaseTool",
    "OpenAIFunctionToolSchema",
    "ToolInstance",
    "ToolResponse",
    "ToolType",
    "get_tool_class",
    "initialize_tools_from_config",
    "open_instance",
    "open_instances",
    "tool",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'toolyard.tools' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value
