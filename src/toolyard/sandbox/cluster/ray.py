"""`RaySandbox`: the `Sandbox` protocol over the sandboxes of all nodes of a Ray cluster.

Ray places one service per node, in an actor, and names it, so that all processes of the cluster find the same one.
Programs do not go through Ray calls but over HTTP, as with `RemoteSandbox` (see `node`).

The actors are *detached*: they outlive the process that happened to need them first. They are not leaked: each ends
itself when it has had no users for ten seconds, and a user that is killed is no user.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncGenerator, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from importlib import import_module
from types import TracebackType
from typing import Any, Self

from toolyard.errors import ConfigError, MissingDependencyError, SandboxError, ToolyardError
from toolyard.hosts import raise_open_files_limit
from toolyard.sandbox.cluster.node import WAIT_SECONDS, Address, attach, serve_node
from toolyard.sandbox.remote.http import Connections, Retries
from toolyard.sandbox.remote.sandbox import HttpSandbox
from toolyard.sandbox.remote.servers import Servers
from toolyard.sandbox.service.server import new_event_loop

try:
    ray: Any = import_module("ray")  # poorly annotated
except ImportError as error:
    raise MissingDependencyError("ray", "ray", "a sandbox on a cluster") from error

_log = logging.getLogger("toolyard.sandbox.cluster")

NAMESPACE = "toolyard"
PREFIX = "sandbox:"
_LOOK_SECONDS = 2.0
"""Interval of looking for nodes that have joined or left."""
_ALL_SECONDS = 15.0
"""Wait this long at the start for the services of all nodes, so that the first programs are spread."""
_START_SECONDS = 180.0
"""Wait this long for the first service: on a busy machine, Ray was seen to take a minute to start an actor."""
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 5.0
_FAILURES = 4
"""After so many in a row, a node is not waited for any longer."""
_SHOW_ERROR_SECONDS = 10.0
"""A service that cannot start stays this long to say why."""


class SandboxActor:
    """Serves the sandbox of its node from a thread of its own."""

    def __init__(self, host: str, workers: int) -> None:
        self._address: Future[Address] = Future()
        itself = ray.get_runtime_context().current_actor
        threading.Thread(target=self._serve, args=(host, workers, itself), daemon=True).start()

    def address(self) -> Address:
        """
        Raises:
            ToolyardError: the service could not start.
        """
        return self._address.result()

    def _serve(self, host: str, workers: int, itself: Any) -> None:
        raise_open_files_limit()
        try:
            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                runner.run(serve_node(host, workers, self._address.set_result))
        except BaseException as error:
            if not self._address.done():
                self._address.set_exception(error)
                time.sleep(_SHOW_ERROR_SECONDS)
        # Not `exit_actor`, which only works within an actor call, nor `os._exit`, which Ray treats as a crash.
        ray.kill(itself, no_restart=True)


@dataclass(eq=False)
class _Node:
    """A node, as this process sees it."""

    id: str
    host: str
    workers: int
    tried: asyncio.Event = field(default_factory=asyncio.Event)
    """It is attached, or that has failed."""
    error: Exception | None = None

    def __str__(self) -> str:
        return f"node {self.id[:8]} ({self.host})"


class RaySandbox(HttpSandbox):
    """The sandboxes of all nodes of the Ray cluster that this process is connected to, as one.

    Each node has as many slots as it has CPUs in Ray, shared by all processes of the cluster; nodes without CPUs are
    left out. A program goes to the node with the most room, a batch stays together, a session stays on its node. If a
    node is lost, its programs and the rest of its batches run elsewhere, and its sessions raise `SessionLostError`.
    Nodes that join get work.

    `connections` limits the requests in flight of this process; more wait here. `retries.seconds` is how long a program
    waits if no node is left.

    Raises on entry:
        ConfigError: this process is not connected to Ray.
        SandboxError: no node could open its sandbox.
    """

    def __init__(self, *, connections: int = 1024, retries: Retries | None = None) -> None:
        self._tokens: dict[str, str] = {}
        self._nodes: dict[str, tuple[_Node, asyncio.Task[None]]] = {}
        self._looking: asyncio.Task[None] | None = None

        def connect(base: str, retries: Retries) -> Connections:
            return Connections(
                base, self._tokens[base], limit=connections, connect_seconds=5.0, retries=retries, pinged=True
            )

        super().__init__(Servers((), connect, retries=retries or Retries(), limit=connections), WAIT_SECONDS)

    async def __aenter__(self) -> Self:
        _check_connection()
        await super().__aenter__()
        try:
            await self._look()
            self._looking = asyncio.create_task(self._keep_looking())
            await self._wait_for_services()
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks = [task for _, task in self._nodes.values()]
        tasks += [self._looking] if self._looking is not None else []
        self._nodes, self._looking = {}, None
        await super().__aexit__(kind, error, trace)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # ------------------------------------------------------------------------------------------------------------ nodes
    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            try:
                await self._look()
            except Exception as error:  # whatever Ray raises: those that are attached remain
                _log.warning("cannot list the nodes of the cluster: %s", error)

    async def _look(self) -> None:
        found = {node.id: node for node in await asyncio.to_thread(_live_nodes)}
        for key in self._nodes.keys() - found.keys():
            _, task = self._nodes.pop(key)
            task.cancel()
        for key in found.keys() - self._nodes.keys():
            self._nodes[key] = found[key], asyncio.create_task(self._attend(found[key]))

    async def _attend(self, node: _Node) -> None:
        """Use the node's service as long as both live; if only the service dies, start another."""
        failures = 0
        while True:
            try:
                await self._use(node)
                failures = 0
                _log.warning("%s: the sandbox service ended; starting another", node)
            except Exception as error:  # whatever Ray raises: if this ended, nothing would run on the node again
                failures += 1
                node.error = error
                _log.info("%s: no sandbox service: %s", node, error)
                # The first may be a service that is just ending.
                if isinstance(error, ToolyardError) or failures == _FAILURES:
                    node.tried.set()
            await asyncio.sleep(min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**failures))

    async def _use(self, node: _Node) -> None:
        async with asyncio.timeout(_START_SECONDS), _cause():
            actor = await asyncio.to_thread(_actor_on, node)
            address: Address = await actor.address.remote()
        async with attach(address) as (hello, loads):
            self._tokens[hello.url] = hello.token
            await self._servers.add(hello.url, capacity=hello.workers, max_cases=hello.max_cases)
            try:
                node.tried.set()
                while line := await loads.readline():
                    self._servers.report(hello.url, int(line))
            except OSError:
                return
            finally:
                await self._servers.remove(hello.url)
                del self._tokens[hello.url]

    async def _wait_for_services(self) -> None:
        nodes = [node for node, _ in self._nodes.values()]
        if not nodes:
            raise SandboxError("the cluster has no node with a CPU, so no sandbox")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ALL_SECONDS):
                await _all_tried(nodes)
        if not len(self._servers):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_START_SECONDS):
                    await _all_tried(nodes)
        if not len(self._servers):
            failed = next((node for node in nodes if node.error is not None), nodes[0])
            if isinstance(failed.error, ToolyardError):
                raise failed.error
            raise SandboxError(f"no node of the cluster has opened its sandbox; {failed}: {failed.error}")


async def _all_tried(nodes: Iterable[_Node]) -> None:
    for node in nodes:
        await node.tried.wait()


@contextlib.asynccontextmanager
async def _cause() -> AsyncGenerator[None]:
    """Raise what the actor raised, if it is ours."""
    try:
        yield
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ToolyardError):
            raise error.cause from None
        raise


def _check_connection() -> None:
    if not ray.is_initialized():  # or the first call would start a cluster
        raise ConfigError(
            "a sandbox on a cluster: this process is not connected to Ray; call ray.init() first, or use --ray"
        )


def _live_nodes() -> list[_Node]:
    _check_connection()
    return [
        _Node(node["NodeID"], node["NodeManagerAddress"], int(node["Resources"]["CPU"]))
        for node in ray.nodes()
        if node["Alive"] and node["Resources"].get("CPU", 0.0) >= 1
    ]


def _actor_on(node: _Node) -> Any:
    _check_connection()
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node.id, soft=False)
    return (
        ray.remote(SandboxActor)
        .options(
            name=PREFIX + node.id,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=0,
            scheduling_strategy=strategy,
        )
        .remote(node.host, node.workers)
    )
