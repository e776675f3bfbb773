"""`toolyard engines`: list, change and check the servers of a run, also while it goes on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolyard.cli.console import complete, err, out, print_json
from toolyard.cli.options import JsonOption

if TYPE_CHECKING:
    from toolyard.messages import JSON

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="List, change and check an engine directory: a run's servers, which you can change while it runs.",
)

DirectoryOption = Annotated[
    Path,
    typer.Option(
        "--directory", metavar="FILE", help="The engine directory: a file with one URL per line.", dir_okay=False
    ),
]
UrlsArgument = Annotated[list[str], typer.Argument(metavar="URL...", help="Server URLs.", show_default=False)]
_CHECK_SECONDS = 10.0


@app.command("list")
def list_engines(directory: DirectoryOption) -> None:
    """List the URLs, one per line.

    Example:

    ```
    toolyard engines list --directory engines.yaml
    ```
    """
    from toolyard.engines.http.directory import read_directory

    for url in read_directory(directory):
        typer.echo(url)


@app.command()
def add(urls: UrlsArgument, directory: DirectoryOption) -> None:
    """Add servers. Runs use them within a second or two, once they pass their health check.

    The file is created if it does not exist. Several commands may change it at the same time.

    Example:

    ```
    toolyard engines add http://10.0.0.7:30000 --directory engines.yaml
    ```
    """
    from toolyard.engines.http.directory import add_urls

    _tell("added", add_urls(directory, urls), "already listed")


@app.command()
def remove(urls: UrlsArgument, directory: DirectoryOption) -> None:
    """Remove servers. Runs send them no new requests but let running ones finish, so wait before you stop them.

    Example:

    ```
    toolyard engines remove http://10.0.0.7:30000 --directory engines.yaml
    ```
    """
    from toolyard.engines.http.directory import remove_urls

    _tell("removed", remove_urls(directory, urls), "not listed")


@app.command()
def check(directory: DirectoryOption, as_json: JsonOption = False) -> None:
    """Show each server's health, weight version, and running and waiting requests (– if it does not report them).

    Exits with 1 if one of them is not healthy.

    Example:

    ```
    toolyard engines check --directory engines.yaml
    ```
    """
    from toolyard.engines.http.directory import read_directory

    rows = complete(_ask(read_directory(directory)))
    if as_json:
        print_json(rows)
    else:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table

        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for title in ("url", "healthy", "weight version", "running", "waiting"):
            table.add_column(title, justify="right" if title in ("running", "waiting") else "left", overflow="fold")
        for row in rows:
            health = "[green]yes[/]" if row["healthy"] else "[red]no[/]"
            said = ["–" if row[key] is None else str(row[key]) for key in ("weight_version", "running", "waiting")]
            table.add_row(row["url"], health, *said)
        out().print(table)
    if not all(row["healthy"] for row in rows):
        raise typer.Exit(1)


def _tell(what: str, urls: list[str], otherwise: str) -> None:
    err().print(f"{what} {', '.join(urls)}" if urls else f"nothing {what}: {otherwise}", markup=False)


async def _ask(urls: tuple[str, ...]) -> list[JSON]:
    import asyncio

    from toolyard.engines.http.exchange import Exchanges
    from toolyard.engines.http.survey import Survey

    exchanges = Exchanges(api_key=None, connect_timeout=_CHECK_SECONDS, max_connections=0, max_bytes=64 << 20)
    survey = Survey(exchanges, seconds=_CHECK_SECONDS)

    async def ask(url: str) -> JSON:
        healthy = await survey.is_healthy(url.removesuffix("/v1"))
        version, load = (await survey.version(url), await survey.load(url)) if healthy else (None, None)
        return {
            "url": url,
            "healthy": healthy,
            "weight_version": version,
            "running": None if load is None else load.running,
            "waiting": None if load is None else load.waiting,
        }

    await exchanges.open()
    try:
        async with asyncio.TaskGroup() as asking:
            asked = [asking.create_task(ask(url)) for url in urls]
        return [task.result() for task in asked]
    finally:
        await exchanges.close()
