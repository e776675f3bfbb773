"""Tools: named capabilities of a model, with verl's life cycle for each trajectory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolyard._lazy import exports

if TYPE_CHECKING:
    from toolyard.messages import OpenAIFunctionToolSchema
    from toolyard.tools.base import BaseTool, ToolResponse, ToolType
    from toolyard.tools.function import tool
    from toolyard.tools.instance import ToolInstance, open_instance, open_instances
    from toolyard.tools.registry import get_tool_class, initialize_tools_from_config

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

__getattr__, __dir__ = exports(
    __name__,
    {
        "toolyard.messages": "OpenAIFunctionToolSchema",
        "toolyard.tools.base": "BaseTool ToolResponse ToolType",
        "toolyard.tools.function": "tool",
        "toolyard.tools.instance": "ToolInstance open_instance open_instances",
        "toolyard.tools.registry": "get_tool_class initialize_tools_from_config",
    },
)
