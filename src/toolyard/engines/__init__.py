"""Engines that sample tokens: servers over HTTP, a model in this process, a script, a recording."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolyard._lazy import exports

if TYPE_CHECKING:
    from toolyard.engines.http.openai import OpenaiEngine
    from toolyard.engines.http.sglang import SglangEngine
    from toolyard.engines.http.vllm import VllmEngine
    from toolyard.engines.models import resolve_model
    from toolyard.engines.protocol import ChatEngine, ChatGeneration, Engine, Finish, Generation, Sampling
    from toolyard.engines.scripted import ScriptedEngine
    from toolyard.engines.transformers.engine import TransformersEngine

__all__ = [
    "ChatEngine",
    "ChatGeneration",
    "Engine",
    "Finish",
    "Generation",
    "OpenaiEngine",
    "Sampling",
    "ScriptedEngine",
    "SglangEngine",
    "TransformersEngine",
    "VllmEngine",
    "resolve_model",
]

__getattr__, __dir__ = exports(
    __name__,
    {
        "toolyard.engines.http.openai": "OpenaiEngine",
        "toolyard.engines.http.sglang": "SglangEngine",
        "toolyard.engines.http.vllm": "VllmEngine",
        "toolyard.engines.models": "resolve_model",
        "toolyard.engines.protocol": "ChatEngine ChatGeneration Engine Finish Generation Sampling",
        "toolyard.engines.scripted": "ScriptedEngine",
        "toolyard.engines.transformers.engine": "TransformersEngine",
    },
)
