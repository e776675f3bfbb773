"""Opening a dump for `toolyard view`."""

from __future__ import annotations

import asyncio
import ipaddress
import webbrowser
from pathlib import Path
from urllib.parse import quote

import typer
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from toolyard.chat.protocol import Tokenizer
from toolyard.cli.console import INTERRUPTED, complete, err
from toolyard.errors import ConfigError, MissingDependencyError, ToolyardError
from toolyard.viewer.answers import Answers, decodes
from toolyard.viewer.library import Library
from toolyard.viewer.query import Query, parse_query
from toolyard.viewer.token_runs import Decode

_TRIED = 5
"""Lines that are looked at to find out whether the embedded model made the dump."""


def export_report(path: Path, target: Path, query: str, limit: int, tokenizer: str | None) -> None:
    from toolyard.viewer.export import write_report

    asked = parse_query(query)
    with _opened(path) as library:
        answers = Answers(library, title=str(path), decode=decoder_for(library, tokenizer))
        with _progress(MofNCompleteColumn()) as progress:
            bar = progress.add_task("writing")
            count = write_report(
                answers,
                target,
                asked,
                limit=limit,
                progress=lambda done, total: progress.update(bar, completed=done, total=total),
            )
        left_out = library.count(asked) - count
    more = f"; {left_out} more {'was' if left_out == 1 else 'were'} left out (--limit)" if left_out else ""
    err().print(f"{target}: {_trajectories(count)}, {target.stat().st_size / 1e6:.1f} MB{more}", markup=False)


def serve_page(path: Path, query: str, host: str, port: int, tokenizer: str | None, *, browser: bool) -> None:
    asked = parse_query(query)
    with _opened(path) as library:
        answers = Answers(library, title=str(path), decode=decoder_for(library, tokenizer))
        complete(_serve(answers, asked, host, port, browser=browser))


async def _serve(answers: Answers, query: Query, host: str, port: int, *, browser: bool) -> None:
    from toolyard.viewer.web import Server

    if not _is_local(host):
        err().print(f"everybody who can reach {host} can now read this dump", style="yellow", markup=False)
    async with Server(answers, host=host, port=port) as server:
        address = server.url + (f"#/?q={quote(str(query))}" if str(query) else "")
        err().print(f"{_trajectories(answers.library.count())} at {address} (Ctrl-C ends it)", markup=False)
        if browser:
            await asyncio.to_thread(webbrowser.open, address)
        await asyncio.Event().wait()


def show_in_terminal(path: Path, query: str, tokenizer: str | None) -> None:
    try:
        from toolyard.viewer.textual import Viewer
    except ModuleNotFoundError as error:
        if error.name and error.name.partition(".")[0] == "textual":
            raise MissingDependencyError(
                "textual", "viewer", "the viewer in the terminal (--web needs nothing)"
            ) from None
        raise
    asked = parse_query(query)
    with _opened(path) as library:
        Viewer(library, query=asked, title=str(path), decode=decoder_for(library, tokenizer)).run()


def _opened(path: Path) -> Library:
    """The library, with progress where its index takes time."""
    if not path.exists():
        raise ConfigError(f"there is no {str(path)!r}; `toolyard rollout` writes a dump into its rollout_data_dir")
    try:
        with _progress(DownloadColumn()) as progress:
            bar = progress.add_task("building the index", visible=False)
            return Library.open(
                path, progress=lambda done, total: progress.update(bar, completed=done, total=total, visible=True)
            )
    except KeyboardInterrupt:
        err().print("interrupted; what was done of the index is kept", style="yellow")
        raise typer.Exit(INTERRUPTED) from None


def _progress(done: ProgressColumn) -> Progress:
    """A bar while there is somebody to see it, and nothing of it afterwards."""
    console = err()
    columns = (TextColumn("{task.description}"), BarColumn(), done, TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def decoder_for(library: Library, tokenizer: str | None) -> Decode | None:
    """Of the model that was named; otherwise of the embedded one, if it is here and the dump is its."""
    from toolyard.chat.tokenizer import load_tokenizer
    from toolyard.engines.models import EMBEDDED, embedded_folder

    if tokenizer is not None:
        from toolyard.engines.models import resolve_model

        return load_tokenizer(resolve_model(tokenizer)).decode
    samples = [library.trajectory(row.number) for row in library.rows(limit=_TRIED)]
    made = [one for one in samples if one is not None and one.tokens.prompt_ids]
    for model in EMBEDDED.values() if made else ():
        try:
            found: Tokenizer = load_tokenizer(embedded_folder(model).path)
        except ToolyardError:
            continue
        if decodes(found.decode, made[0]):
            return found.decode
    return None


def _trajectories(count: int) -> str:
    return f"{count} {'trajectory' if count == 1 else 'trajectories'}"


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
