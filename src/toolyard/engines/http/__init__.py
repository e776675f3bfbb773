"""Engines that are servers: SGLang, vLLM, and any with OpenAI's API."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolyard._lazy import exports

if TYPE_CHECKING:
    from toolyard.engines.http.openai import OpenaiEngine
    from toolyard.engines.http.sglang import SglangEngine
    from toolyard.engines.http.vllm import VllmEngine

__all__ = ["OpenaiEngine", "SglangEngine", "VllmEngine"]

__getattr__, __dir__ = exports(
    __name__,
    {
        "toolyard.engines.http.openai": "OpenaiEngine",
        "toolyard.engines.http.sglang": "SglangEngine",
        "toolyard.engines.http.vllm": "VllmEngine",
    },
)
