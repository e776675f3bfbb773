"""verl's own parts, as a user's trainer would put them together, on a CPU: `make test-verl`.

Real: verl's configuration, its tool registry, its AgentLoopWorker, its ToolAgentLoop, its tokenisation and its parsers,
and our tools. Stand-ins: the engine, which is scripted, and a byte tokenizer.
"""

from __future__ import annotations

import asyncio
import os
import threading
import warnings
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml

# Nothing here is ours to fix, and warnings are errors in our tests.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from hydra import compose, initialize_config_dir
    from verl.experimental.agent_loop import AgentLoopWorker

    import verl

from scripted import Configure, MakeWorker, Script, ScriptedEngine, save_model

from toolyard.sandbox.local import LocalSandbox
from toolyard.sandbox.service.server import ServiceConfig, open_service

TRAINER = os.path.join(os.path.dirname(verl.__file__), "trainer", "config")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model's folder, as far as a rollout reads it."""
    folder = str(tmp_path_factory.mktemp("model"))
    save_model(folder)
    return folder


@pytest.fixture
def configure(model: str, tmp_path: Path) -> Configure:
    """verl's trainer configuration, with `tools` in a tool YAML file and `overrides` as on its command line."""

    def configure(tools: list[dict[str, Any]], *overrides: str) -> Any:
        file = tmp_path / "tools.yaml"
        file.write_text(yaml.safe_dump({"tools": tools}))
        rollout = "actor_rollout_ref.rollout"
        with initialize_config_dir(TRAINER, version_base=None):
            return compose(
                "ppo_trainer",
                [
                    f"actor_rollout_ref.model.path={model}",
                    "data.max_prompt_length=4096",
                    "data.max_response_length=4096",
                    f"{rollout}.name=vllm",
                    f"{rollout}.calculate_log_probs=true",
                    f"{rollout}.agent.default_agent_loop=tool_agent",
                    f"{rollout}.multi_turn.enable=true",
                    f"{rollout}.multi_turn.tool_config_path={file}",
                    *overrides,
                ],
            )

    return configure


@pytest_asyncio.fixture
async def make_worker(model: str, configure: Configure) -> AsyncIterator[MakeWorker]:
    """verl's worker, with an engine that keeps to `script`. verl never closes tools, so the tests do."""
    made: list[AgentLoopWorker] = []

    def make_worker(script: Script, tools: list[dict[str, Any]], *overrides: str, together: int = 1) -> AgentLoopWorker:
        worker = AgentLoopWorker(configure(tools, *overrides), ScriptedEngine(model, script, together=together))
        made.append(worker)
        return worker

    yield make_worker
    for worker in made:
        for tool in worker.tools:
            await tool.close()


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """The URL of a service with its own thread: verl's client blocks the calling thread."""
    found: Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        stop = asyncio.Event()
        async with LocalSandbox(workers=2) as sandbox, open_service(ServiceConfig(port=0), sandbox) as running:
            found.set_result((f"{running.url}/run_code", asyncio.get_running_loop(), stop))
            await stop.wait()

    thread = threading.Thread(target=asyncio.run, args=[serve()])
    thread.start()
    address, loop, stop = found.result(60)
    yield address
    loop.call_soon_threadsafe(stop.set)
    thread.join()
