"""`toolyard view`: what a model did, where its tokens came from, why it got its reward, where the time went."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from toolyard.cli.options import TokenizerOption


def view(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="DIR|FILE",
            help="A dump, a folder of dumps, or one file; Toolyard's or verl's.",
            show_default=False,
        ),
    ],
    query: Annotated[
        str,
        typer.Option("--query", "-q", metavar="QUERY", help="Show only matching trajectories.", show_default=False),
    ] = "",
    web: Annotated[
        bool, typer.Option("--web", help="Open in the browser, which also shows tokens and charts.")
    ] = False,
    host: Annotated[
        str,
        typer.Option(help="Address for --web. Any other address makes the dump visible on the network."),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port for --web; 0 picks a free one.", min=0, max=65535)] = 8420,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="With --web: open a browser window.")] = True,
    export: Annotated[
        Path | None,
        typer.Option(metavar="FILE.html", help="Write one self-contained HTML page and exit.", show_default=False),
    ] = None,
    limit: Annotated[int, typer.Option(help="With --export: maximum number of trajectories.", min=1)] = 500,
    tokenizer: TokenizerOption = None,
) -> None:
    """Browse the trajectories of a dump, even while it is being written.

    Opens in the terminal, or with --web in the browser. The first time, an index is built in DIR/.toolyard-index; after
    that, dumps of any size open at once. Press `?` to list the keys.

    A query has conditions on score, tools, turns, length, prompt, chars, time, step, line, sample, finish, state,
    source, task, id, verdict and file. Other words are searched for in all messages.

    Examples:

    ```
    toolyard view runs/first
    toolyard view runs/first -q 'score<0.5 tools>2 finish:length'
    toolyard view runs/first --web
    toolyard view runs --web -q 'verdict:timed_out sort:-time'
    toolyard view runs/first --export report.html -q 'step:10..12'
    ```
    """
    from toolyard.cli.view.run import export_report, serve_page, show_in_terminal
    from toolyard.errors import ConfigError

    if export is not None and web:
        raise ConfigError("--web and --export cannot be used together")
    if export is not None:
        export_report(path, export, query, limit, tokenizer)
    elif web:
        serve_page(path, query, host, port, tokenizer, browser=browser)
    else:
        show_in_terminal(path, query, tokenizer)
