"""A tiny MCP server: units and a shopping list. Toolyard starts it, as configured in mcp.json."""

from typing import Literal

from mcp.server.mcpserver import MCPServer
from pydantic import BaseModel

METERS = {"m": 1.0, "km": 1000.0, "mile": 1609.344, "ft": 0.3048}
server = MCPServer("units", log_level="WARNING")


class Item(BaseModel):
    name: str
    price: float
    amount: int = 1


@server.tool()
def convert(value: float, source: Literal["m", "km", "mile", "ft"], target: Literal["m", "km", "mile", "ft"]) -> str:
    """Converts a length."""
    return f"{value * METERS[source] / METERS[target]:g} {target}"


@server.tool()
def total(items: list[Item]) -> float:
    """Adds up a shopping list."""
    return sum(item.price * item.amount for item in items)


@server.tool()
def secret() -> str:
    """Not in tool_selected_list, so no model sees it."""
    return "42"


if __name__ == "__main__":
    server.run()
