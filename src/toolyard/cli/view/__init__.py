"""`toolyard view`: what a model did, where its tokens came from, why it got its reward, where the time went."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from toolyard.cli.options import TokenizerOption

_web = partial(typer.Option, rich_help_panel="In the browser (--web)")
_writing = partial(typer.Option, rich_help_panel="Writing files")


def view(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="DIR|FILE",
            help="A dump, a folder of dumps, or one file; Toolyard's, verl's or TRL's.",
            show_default=False,
        ),
    ],
    query: Annotated[
        str,
        typer.Option(
            "--query", "-q", "--select", metavar="QUERY", help="Use only matching trajectories.", show_default=False
        ),
    ] = "",
    web: Annotated[
        bool, typer.Option("--web", help="Open in the browser, which also shows tokens and charts.")
    ] = False,
    host: Annotated[
        str,
        _web(
            help="Address to listen on. Any other one makes the page visible on the network; its URL then has a token."
        ),
    ] = "127.0.0.1",
    port: Annotated[int, _web(help="Port to listen on; 0 picks a free one.", min=0, max=65535)] = 8420,
    browser: Annotated[bool, _web("--browser/--no-browser", help="Open a browser window.")] = True,
    token: Annotated[
        bool | None,
        _web(
            "--token/--no-token",
            help="Require a token in the URL: TOOLYARD_VIEW_TOKEN, or a random one. Default: beyond loopback. On a "
            "machine with other users, use it on loopback too.",
            show_default=False,
        ),
    ] = None,
    notes: Annotated[
        bool | None,
        typer.Option(
            "--notes/--read-only",
            help="Allow notes and saved views to be written to toolyard-notes.json beside the dump. Default: allowed, "
            "except with --web beyond loopback.",
            show_default=False,
        ),
    ] = None,
    to: Annotated[
        Path | None,
        _writing(
            metavar="FILE.jsonl",
            help="Copy the matching lines, byte for byte and in the query's order, to a new dump file and exit; - for "
            "standard output.",
            show_default=False,
            allow_dash=True,
        ),
    ] = None,
    export: Annotated[
        Path | None,
        _writing(metavar="FILE.html", help="Write one self-contained HTML page and exit.", show_default=False),
    ] = None,
    limit: Annotated[
        int | None,
        _writing(
            help="Maximum number of trajectories. Default: 500 for --export, all for --to.", min=1, show_default=False
        ),
    ] = None,
    force: Annotated[bool, _writing("--force", help="Let --to overwrite an existing file.")] = False,
    tokenizer: TokenizerOption = None,
) -> None:
    """Browse the trajectories of a dump, even while it is being written.

    Opens in the terminal, or with --web in the browser. The first time, an index is built in DIR/.toolyard-index; after
    that, dumps of any size open immediately. Press `?` to list the keys, `m` to write a note on a trajectory, `v` to
    save the current filter.

    --to copies the selected lines to another dump file; --export writes them as a page that needs no server.

    A query has conditions on fields such as score, tools, turns, length, time, step, finish, state, task, tool,
    verdict, run and reward.NAME. Other words are searched for in all messages. `?` lists all fields.

    Examples:

    ```
    toolyard view runs/first
    toolyard view runs/first -q 'score<0.5 tools>2 finish:length'
    toolyard view runs/first --web
    toolyard view runs --web -q 'verdict:timed_out sort:-time'
    toolyard view runs/first --web --host 0.0.0.0 --notes
    toolyard view runs/first --export report.html -q 'step:10..12'
    toolyard view runs/first --select 'score=1 tools>0 sort:length' --to solved.jsonl
    ```
    """
    from toolyard.cli.view.run import WebOptions, copy_selection, export_report, serve_page, show_in_terminal
    from toolyard.errors import ConfigError

    if sum((web, to is not None, export is not None)) > 1:
        raise ConfigError("--web, --to and --export cannot be used together")
    if to is not None:
        copy_selection(path, to, query, limit, force=force)
    elif export is not None:
        export_report(path, export, query, limit or 500, tokenizer)
    elif web:
        serve_page(path, query, WebOptions(host, port, browser, token, notes), tokenizer)
    else:
        show_in_terminal(path, query, tokenizer, read_only=notes is False)
