"""Our tools, recording their calls. Named in a tool YAML file by this module's name."""

from __future__ import annotations

from typing import Any

from toolyard.tools.base import ToolResponse
from toolyard.tools.code_interpreter.tool import SandboxFusionTool
from toolyard.tools.gsm8k import Gsm8kTool


class _Recording:
    def __init__(self, config: dict[str, Any], tool_schema: Any = None) -> None:
        self.built_with = (config, tool_schema)
        self.calls: list[tuple[str, str, dict[str, Any]]] = []
        """Method, instance and keyword arguments."""
        super().__init__(config, tool_schema)

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        created, response = await super().create(instance_id, **kwargs)
        self.calls.append(("create", created, kwargs))
        return created, response

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        self.calls.append(("execute", instance_id, kwargs))
        return await super().execute(instance_id, parameters, **kwargs)

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        self.calls.append(("calc_reward", instance_id, kwargs))
        return await super().calc_reward(instance_id, **kwargs)

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self.calls.append(("release", instance_id, kwargs))
        await super().release(instance_id, **kwargs)


class RecordingGsm8kTool(_Recording, Gsm8kTool):
    pass


class RecordingSandboxFusionTool(_Recording, SandboxFusionTool):
    pass
