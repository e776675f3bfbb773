"""List the tools of an MCP server, and call them as a rollout does.

python examples/mcp_tool/run.py
"""

import asyncio
import json
import os
import sys
from pathlib import Path

from toolyard.tools import initialize_tools_from_config, open_instances

CALLS = [
    ("convert", '{"value": 26.2, "source": "mile", "target": "km"}'),
    ("total", '{"items": [{"name": "nut", "price": 0.25, "amount": 12}, {"name": "saw", "price": 14}]}'),
    ("convert", '{"value": 1, "source": "mile", "target": "parsec"}'),
    ("secret", "{}"),
]


async def main() -> None:
    os.environ.setdefault("MCP_TOOL_PYTHON", sys.executable)  # mcp.json starts the server with it
    tools = {tool.name: tool for tool in initialize_tools_from_config(Path(__file__).parent / "tools.yaml")}
    for tool in tools.values():
        function = tool.get_openai_tool_schema().model_dump()["function"]
        print(f"{function['name']}: {function['description']} {json.dumps(function['parameters']['properties'])}")

    async with open_instances(tools, "trajectory-1") as instances:
        for name, arguments in CALLS:
            result = await instances.call(name, arguments)
            print(f"\n{name}({arguments})\n  {result.outcome}: {result.response.text}")

    for tool in tools.values():
        await tool.close()


asyncio.run(main())
