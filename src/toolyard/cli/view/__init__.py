"""`toolyard view`: what a model did, where its tokens came from, why the reward is what it is, where the time went."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def view(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="DIR|FILE", help="A dump, a folder of dumps, or one file; ours or verl's.", show_default=False
        ),
    ],
    query: Annotated[
        str,
        typer.Option(
            "--query", "-q", metavar="QUERY", help="Show only these; can be changed later.", show_default=False
        ),
    ] = "",
    web: Annotated[bool, typer.Option("--web", help="In the browser: tokens, timelines, curves, differences.")] = False,
    host: Annotated[str, typer.Option(help="Of --web. Any other shows the dump to others.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Of --web; 0 takes a free one.", min=0, max=65535)] = 8420,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Of --web: open a window.")] = True,
    export: Annotated[
        Path | None,
        typer.Option(metavar="FILE.html", help="Write one self-contained page instead.", show_default=False),
    ] = None,
    limit: Annotated[int, typer.Option(help="Of --export: trajectories to put in.", min=1)] = 500,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL_OR_PATH",
            help="Of the model that sampled, to show tokens as text. The embedded model's is found by itself.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Look at the trajectories of a dump, also while it is being written.

    In the terminal, or with --web in the browser. The first time an index is built beside the dump
    (DIR/.toolyard-index); after that, opening takes no time, however large it is. `?` shows the keys.

    Queries: conditions on score, tools, turns, length, prompt, chars, time, step, line, sample, finish, state, source,
    task, id, verdict, file; words are searched for in everything that was said.

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
        raise ConfigError("--web shows a page and --export writes one: give one of them")
    if export is not None:
        export_report(path, export, query, limit, tokenizer)
    elif web:
        serve_page(path, query, host, port, tokenizer, browser=browser)
    else:
        show_in_terminal(path, query, tokenizer)
