"""A tiny MCP server: units and a shopping list. It is started by Toolyard, as mcp.json says."""

from typing import Literal

from mcp.server.mcpserver import MCPServer
from pydantic import BaseModel

METRES = {"m": 1.0, "km": 1000.0, "mile": 1609.344, "ft": 0.3048}
server = MCPServer("units", log_level="WARNING")


class Item(BaseModel):
    name: str
    price: float
    amount: int = 1


@server.tool()
def convert(value: float, source: Literal["m", "km", "mile", "ft"], target: Literal["m", "km", "mile", "ft"]) -> str:
    """Converts a length."""
    return f"{value * METRES[source] / METRES[target]:g} {target}"


@server.tool()
def total(items: list[Item]) -> float:
    """Adds up a shopping list."""
    return sum(item.price * item.amount for item in items)


@server.tool()
def secret() -> str:
    """Is not in tool_selected_list, so no model sees it."""
    return "42"


if __name__ == "__main__":
    server.run()
