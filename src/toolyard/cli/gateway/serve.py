"""Runs the gateway until it is stopped, and says what it recorded."""

from __future__ import annotations

import asyncio
import gc
import signal
import time
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.table import Table

from toolyard.cli.outcomes import duration
from toolyard.gateway.config import GatewayConfig
from toolyard.gateway.server import listen, open_gateway
from toolyard.hosts import raise_open_files_limit
from toolyard.records.dump import DumpWriter
from toolyard.records.trajectory import Trajectory
from toolyard.rollout.assembly import open_token_engine
from toolyard.rollout.config import RolloutConfig

if TYPE_CHECKING:
    from rich.console import Console


def serve(config: RolloutConfig, serving: GatewayConfig, folder: str | None, console: Console) -> None:
    """Serve until SIGINT or SIGTERM.

    Raises:
        ConfigError, EngineError: the engine or the address cannot be opened.
        RecordError: the dump cannot be written.
    """
    raise_open_files_limit()
    # Sessions are many objects that live long: looking through all of them often takes a third of the time.
    gc.set_threshold(50_000, 20, 50)
    ended: Counter[tuple[str, str]] = Counter()
    began = time.monotonic()
    asyncio.run(_serve(config, serving, folder, console, ended))
    table = Table(title=f"Served for {duration(time.monotonic() - began)}", title_justify="left")
    for name in ("State", "Finish reason"):
        table.add_column(name)
    table.add_column("Branches", justify="right")
    for (state, reason), count in ended.most_common():
        table.add_row(state, reason, str(count))
    table.add_row("[bold]total[/]", "", f"[bold]{ended.total()}[/]")
    console.print(table)
    if folder is not None and ended:
        console.print(f"next:\n  toolyard view {folder}\n  toolyard audit {folder}", markup=False)


async def _serve(
    config: RolloutConfig,
    serving: GatewayConfig,
    folder: str | None,
    console: Console,
    ended: Counter[tuple[str, str]],
) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    async with AsyncExitStack() as stack:
        listener = listen(serving)  # first: an address in use is found before a model is loaded
        stack.callback(listener.close)
        dump = None if folder is None else await stack.enter_async_context(DumpWriter(folder))

        async def finish(trajectories: list[Trajectory]) -> None:
            if dump is not None and trajectories:
                *others, main = trajectories
                await dump.write(replace(main, branches=tuple(others)))
            ended.update((one.state, one.finish_reason) for one in trajectories)

        opened = await open_token_engine(config, stack, lambda text: console.print(text, style="dim", markup=False))
        running = await stack.enter_async_context(
            open_gateway(
                serving,
                opened.engine,
                opened.chat,
                opened.tokenizer,
                model=opened.name,
                finish=finish,
                listener=listener,
            )
        )
        console.print(f"[bold green]Toolyard gateway[/] at [bold cyan]{running.url}[/]")
        access = "API key required" if serving.tokens else "any API key"
        where = "no dump (--out DIR)" if folder is None else f"dump {folder}"
        console.print(f"model {opened.name}, {access}, {where}", markup=False)
        console.print(f"agents: OPENAI_BASE_URL={running.session_url('NAME')}", markup=False)
        console.print("Ctrl-C to stop: open sessions are ended and dumped, without a score")
        await stopping.wait()
