"""The life cycle of a tool in one trajectory: create, execute, calc_reward, release.

python examples/custom_tool/run.py
"""

import asyncio
from pathlib import Path

from toolyard.tools import initialize_tools_from_config, open_instances

CALLS = [
    ("count_letters", '{"word": "crate"}'),
    ("my_custom_function", '{"param1": "crate"}'),
    ("my_custom_function", '{"guess": "crane"}'),  # a wrong argument name, as models write
    ("my_custom_function", '{"param1": "crane"}'),
]


async def main() -> None:
    tools = {tool.name: tool for tool in initialize_tools_from_config(Path(__file__).with_name("tools.yaml"))}
    task = {"my_custom_function": {"create_kwargs": {"word": "crane"}}}
    async with open_instances(tools, "request-1", task) as instances:
        for name, arguments in CALLS:
            result = await instances.call(name, arguments)
            print(f"{name}({arguments})\n  {result.outcome}, step reward {result.reward}: {result.response.text}")
    # At the end of the block, the rewards were computed and the instances released.
    print("rewards:", {name: instance.reward for name, instance in instances.items()})


asyncio.run(main())
