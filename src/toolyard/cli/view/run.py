"""What `toolyard view` does: open a dump, then export, serve or show it."""

from __future__ import annotations

import asyncio
import html
import os
import sys
import webbrowser
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import NamedTuple
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

from toolyard import settings
from toolyard.chat.protocol import Tokenizer
from toolyard.cli.console import INTERRUPTED, complete, err
from toolyard.errors import ConfigError, MissingDependencyError, ToolyardError
from toolyard.hosts import is_loopback
from toolyard.viewer.library import Library
from toolyard.viewer.notes import Notes
from toolyard.viewer.query import DAMAGED, Query, parse_query
from toolyard.viewer.token_runs import Decode
from toolyard.viewer.web.answers import Answers, decodes

_TRIED = 5
"""Number of trajectories to check when looking for the tokenizer that made the dump."""
_STDOUT = Path("-")
_READ_ONLY = "the viewer was started with --read-only"


def export_report(path: Path, target: Path, query: str, limit: int, tokenizer: str | None) -> None:
    from toolyard.viewer.web.export import write_report

    asked = parse_query(query)
    with open_library(path) as library:
        answers = Answers(library, title=str(path), decode=decoder_for(library, tokenizer))
        with progress_bar(MofNCompleteColumn()) as progress:
            bar = progress.add_task("writing")
            count = write_report(
                answers,
                target,
                asked,
                limit=limit,
                progress=lambda done, total: progress.update(bar, completed=done, total=total),
            )
        left_out = library.count(asked) - count
        damaged = sum(bool(row.damaged) for row in library.rows(asked, limit=count))
    text = f"{target}: {_counted(count - damaged, 'trajectory', 'trajectories')}, {target.stat().st_size / 1e6:.1f} MB"
    text += _left_out(left_out)
    err().print(text + _damage(damaged), markup=False)


def copy_selection(path: Path, target: Path, query: str, limit: int | None, *, force: bool) -> None:
    from toolyard.viewer.selection import copy_lines, write_selection

    if target.suffix == ".html":
        raise ConfigError(f"--to copies lines of the dump; for a page, use --export {target}")
    asked = parse_query(query)
    with open_library(path) as library, progress_bar(MofNCompleteColumn()) as progress:
        bar = progress.add_task("copying")

        def tell(done: int, total: int) -> None:
            progress.update(bar, completed=done, total=total)

        try:
            if target == _STDOUT:
                copied = copy_lines(library, sys.stdout.buffer, asked, limit=limit, progress=tell)
                sys.stdout.buffer.flush()
            else:
                copied = write_selection(library, target, asked, limit=limit, overwrite=force, progress=tell)
        except KeyboardInterrupt:
            err().print("interrupted; nothing was written" if target != _STDOUT else "interrupted", style="yellow")
            raise typer.Exit(INTERRUPTED) from None
        matching = library.count(asked)
    left_out = matching - copied.lines - copied.damaged
    name = "standard output" if target == _STDOUT else target
    text = f"{name}: {_counted(copied.lines, 'trajectory', 'trajectories')}, {copied.size / 1e6:.1f} MB"
    text += _left_out(left_out)
    text += f"; {_counted(copied.damaged, 'damaged line', 'damaged lines')} left out" if copied.damaged else ""
    err().print(text, markup=False)


class WebOptions(NamedTuple):
    host: str
    port: int
    browser: bool
    token: bool | None
    """None: only beyond loopback, or if one is set."""
    notes: bool | None
    """Whether notes may be written. None: only on loopback."""

    @property
    def secret(self) -> str | None:
        from toolyard.viewer.web.access import new_token

        chosen = settings.view_token()
        wanted = self.token if self.token is not None else bool(chosen) or not is_loopback(self.host)
        return (chosen or new_token()) if wanted else None

    @property
    def read_only(self) -> str:
        """Why notes may not be written; empty if they may."""
        if self.notes is None and not is_loopback(self.host):
            return "start the viewer with --notes to write them on this address"
        return _READ_ONLY if self.notes is False else ""


def serve_page(path: Path, query: str, options: WebOptions, tokenizer: str | None) -> None:
    asked = parse_query(query)
    with open_library(path) as library:
        notes = Notes(library.folder, read_only=options.read_only)
        answers = Answers(library, title=str(path), decode=decoder_for(library, tokenizer), notes=notes)
        complete(_serve(answers, asked, options))


async def _serve(answers: Answers, query: Query, options: WebOptions) -> None:
    from toolyard.viewer.web.server import Server

    secret = options.secret
    if secret is None and not is_loopback(options.host):
        does = "read this dump" if answers.notes.read_only else "read this dump and write notes"
        text = f"no token: anyone who can connect to {options.host} can {does}; without --no-token its URL has one"
        err().print(text, style="yellow", markup=False)
    async with Server(answers, host=options.host, port=options.port, token=secret) as server:
        address = server.url + (f"#/?q={quote(str(query))}" if str(query) else "")
        damaged = answers.library.count(DAMAGED)
        found = _counted(answers.library.count() - damaged, "trajectory", "trajectories")
        err().print(f"{found} at {address} (Ctrl-C to stop){_damage(damaged)}", markup=False)
        with _private_link(address) if secret else nullcontext(address) as link:
            if options.browser:
                await asyncio.to_thread(webbrowser.open, link)
            await asyncio.Event().wait()


@contextmanager
def _private_link(address: str) -> Generator[str]:
    """The URL of a page that leads to `address`: other users can read the command line of a browser."""
    with NamedTemporaryFile("w", prefix="toolyard-", suffix=".html", encoding="utf-8") as file:  # mode 0600
        file.write(f'<meta http-equiv="refresh" content="0;url={html.escape(address)}">')
        file.flush()
        yield Path(file.name).as_uri()


def show_in_terminal(path: Path, query: str, tokenizer: str | None, *, read_only: bool) -> None:
    _must_exist(path)
    # The viewer reads keys from stdin and draws on stderr; a redirected stdout means that a script wants text.
    if not all(map(os.isatty, range(3))):
        raise ConfigError(
            "the viewer needs a terminal: run it in one, or use --web, --to FILE.jsonl or --export FILE.html"
        )
    try:
        from toolyard.viewer.tui.app import Viewer
    except ModuleNotFoundError as error:
        if error.name and error.name.partition(".")[0] == "textual":
            raise MissingDependencyError("textual", "viewer", "the terminal viewer (--web needs no extra)") from None
        raise
    asked = parse_query(query)
    with open_library(path) as library:
        notes = Notes(library.folder, read_only=_READ_ONLY if read_only else "")
        decode = decoder_for(library, tokenizer)
        Viewer(library, query=asked, title=str(path), decode=decode, notes=notes).run()


def open_library(path: Path) -> Library:
    """Open the library, with a progress bar while its index is built.

    Raises:
        ConfigError: `path` does not exist, or has no trajectory.
    """
    _must_exist(path)
    try:
        with progress_bar(DownloadColumn()) as progress:
            bar = progress.add_task("building the index", visible=False)
            library = Library.open(
                path, progress=lambda done, total: progress.update(bar, completed=done, total=total, visible=True)
            )
    except KeyboardInterrupt:
        err().print("interrupted; the part of the index built so far is kept", style="yellow")
        raise typer.Exit(INTERRUPTED) from None
    first = next(iter(library.rows(limit=1)), None)  # None: the dump may have just begun
    if first is not None and first.damaged and library.count(DAMAGED) == (lines := library.count()):
        library.close()
        none = "its only line is not a trajectory" if lines == 1 else f"none of its {lines} lines is a trajectory"
        place = "" if path.is_file() else f"{first.file} "
        raise ConfigError(f"{path}: {none}; {place}line {first.line}: {first.damaged}")
    return library


def _must_exist(path: Path) -> None:
    if not path.exists():
        raise ConfigError(f"{str(path)!r} does not exist; `toolyard rollout --out DIR` writes a dump")


def progress_bar(done: ProgressColumn) -> Progress:
    """A transient progress bar, shown only in a terminal."""
    console = err()
    columns = (TextColumn("{task.description}"), BarColumn(), done, TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def decoder_for(library: Library, tokenizer: str | None) -> Decode | None:
    """The decoder of `tokenizer`, or of a cached embedded model that made the dump; None if there is none."""
    from toolyard.chat.tokenizers.opening import load_tokenizer
    from toolyard.engines.models import EMBEDDED, embedded_folder

    if tokenizer is not None:
        from toolyard.engines.models import resolve_model

        return load_tokenizer(resolve_model(tokenizer)).decode
    samples = [library.trajectory(row.number) for row in library.rows(limit=_TRIED)]
    with_tokens = [one for one in samples if one is not None and one.tokens.prompt_ids]
    for model in EMBEDDED.values() if with_tokens else ():
        try:
            found: Tokenizer = load_tokenizer(embedded_folder(model).path)
        except ToolyardError:
            continue
        if decodes(found.decode, with_tokens[0]):
            return found.decode
    return None


def _counted(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def _damage(lines: int) -> str:
    found = "line is damaged (damaged:yes finds it)", "lines are damaged (damaged:yes finds them)"
    return f"; {_counted(lines, *found)}" if lines else ""


def _left_out(count: int) -> str:
    return f"; {count} more {'was' if count == 1 else 'were'} left out (--limit)" if count else ""
