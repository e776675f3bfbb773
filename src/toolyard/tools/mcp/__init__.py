"""Tools of MCP servers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolyard._lazy import exports

if TYPE_CHECKING:
    from toolyard.tools.mcp.tool import MCPTool

__all__ = ["MCPTool"]

__getattr__, __dir__ = exports(
    __name__,
    {
        "toolyard.tools.mcp.tool": "MCPTool",
    },
)
