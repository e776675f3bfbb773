"""The tool that runs the model's code in a sandbox."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolyard._lazy import exports

if TYPE_CHECKING:
    from toolyard.tools.code_interpreter.tool import CodeInterpreterConfig, SandboxFusionTool

__all__ = ["CodeInterpreterConfig", "SandboxFusionTool"]

__getattr__, __dir__ = exports(
    __name__,
    {
        "toolyard.tools.code_interpreter.tool": "CodeInterpreterConfig SandboxFusionTool",
    },
)
