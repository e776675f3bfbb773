"""`toolyard doctor`: the command, and how its report is shown."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolyard.cli.console import complete, err, out

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from toolyard.cli.doctor.checks import Check, Report

_TITLES = {
    "kernel": "What the kernel grants",
    "sandbox": "The embedded sandbox",
    "languages": "Languages",
    "extras": "Optional packages",
    "hardware": "Hardware",
    "cluster": "Cluster",
}
_MARKS = {"ok": "[green]✔[/]", "missing": "[yellow]–[/]", "broken": "[bold red]✘[/]"}


def doctor(
    python: Annotated[
        Path | None,
        typer.Option(
            help="Interpreter of Python programs. Default: the one Toolyard runs in.",
            dir_okay=False,
            exists=True,
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    stop_limiter: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Only stop this limiter of the Ray cluster.", show_default=False),
    ] = None,
    namespace: Annotated[
        str | None, typer.Option(help="Ray's, of that limiter, if the name is not enough.", show_default=False)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Stop it even while processes use it.")] = False,
) -> None:
    """Find out what this machine offers, by trying it, and what to do about what is missing.

    Kernel features, every language's self test in the real sandbox, optional packages, torch and GPU; then the
    isolation level that results; then the limiters alive in the Ray cluster, if one runs (`RAY_ADDRESS` tells which).
    Exits with 0 if the sandbox can run here, with 1 if not. A limiter that is to be stopped: with 1 if it was not.

    Examples:

    ```
    toolyard doctor
    toolyard doctor --json | jq .isolation
    toolyard doctor --stop-limiter sandbox
    ```
    """
    from toolyard.cli.doctor.checks import examine

    if stop_limiter is not None:
        _stop(stop_limiter, namespace, force=force, as_json=as_json)
        return
    if force or namespace is not None:
        raise typer.BadParameter("only with --stop-limiter", param_hint="--force" if force else "--namespace")

    with err().status("looking around") as status:
        work = examine(str(python) if python else None, tell=lambda what: status.update(f"trying {what}"))
        report = complete(work)
    if as_json:
        typer.echo(report.model_dump_json(indent=2))
    else:
        show(report, out())
    raise typer.Exit(0 if report.can_run else 1)


def _stop(name: str, namespace: str | None, *, force: bool, as_json: bool) -> None:
    import json
    from dataclasses import asdict

    from toolyard.cli.doctor.checks import stop_limiter

    with err().status(f"stopping limiter {name}"):
        stopped = complete(stop_limiter(name, namespace, force=force))
    used = f"; no permits any more for {', '.join(stopped.processes)}" if stopped.processes else ""
    said = f"Stopped limiter {stopped.name!r} in namespace {stopped.namespace!r}{used}."
    typer.echo(json.dumps(asdict(stopped), indent=2) if as_json else said)


def show(report: Report, console: Console) -> None:
    """The verdict first, then what was tried, then what to do."""
    from rich.markup import escape

    style, sentence = verdict(report)
    console.print(f"[{style}]{escape(sentence)}[/]")
    about = f"Toolyard {report.toolyard}, Python {report.python}, {report.system}, {report.processors} processors"
    console.print(f"[dim]{escape(about)}[/]\n")
    console.print(_table(report))
    given = advice(report)
    if given:
        console.print("\n[bold]What to do about what is missing[/], if you want it")
        for names, remedy in given.items():
            console.print(f"  [yellow]{escape(names)}[/]: {escape(remedy)}")


def verdict(report: Report) -> tuple[str, str]:
    """A style and a sentence: can programs run here, and how well are they shut in?"""
    from toolyard.cli.doctor.checks import Group, Status
    from toolyard.sandbox.isolation import Level

    tried = report.of(Group.LANGUAGES)
    working = sum(1 for check in tried if check.status is Status.OK)
    if not report.can_run:
        broken = next((check.detail for check in report.checks if check.status is Status.BROKEN), "Python does not run")
        return "bold red", f"✘ The sandbox cannot run here: {broken}"
    memory = f"memory is limited by {report.memory_limit}; {working} of {len(tried)} languages work"
    if report.isolation is Level.FULL:
        return "bold green", f"✔ The sandbox runs programs at full isolation; {memory}."
    return "bold yellow", f"! The sandbox runs programs, but only at isolation level {report.isolation!s}; {memory}."


def advice(report: Report) -> dict[str, str]:
    """Advice by what it helps: features refused for one reason need only be told once."""
    grouped: dict[str, list[str]] = {}
    for check in report.checks:
        if check.remedy:
            grouped.setdefault(check.remedy, []).append(check.name)
    return {", ".join(dict.fromkeys(names)): remedy for remedy, names in grouped.items()}


def _table(report: Report) -> Table:
    from rich.markup import escape
    from rich.table import Table

    from toolyard.cli.doctor.checks import Group

    table = Table(show_header=False, box=None, padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for group in Group:
        checks = report.of(group)
        if checks:
            table.add_row("", f"[bold]{_TITLES[group]}[/]", "")
            for check in _merged(checks):
                table.add_row(_MARKS[check.status], f"  {escape(check.name)}", escape(check.detail))
    return table


def _merged(checks: list[Check]) -> list[Check]:
    """Namespaces that all work make one line."""
    spaces = [check for check in checks if check.group == "kernel" and check.name.endswith(" namespace")]
    if not spaces or any(check.status != "ok" for check in spaces):
        return checks
    kinds = ", ".join(check.name.removesuffix(" namespace") for check in spaces)
    one = spaces[0].model_copy(update={"name": "namespaces", "detail": kinds})
    return [one, *(check for check in checks if check not in spaces)]
