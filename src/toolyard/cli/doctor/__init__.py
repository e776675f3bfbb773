"""`toolyard doctor`: the command, and how its report is printed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from toolyard.cli.console import complete, err, out
from toolyard.cli.options import JsonOption, PythonOption

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from toolyard.cli.doctor.checks import Check, DoctorReport

_TITLES = {
    "kernel": "Kernel features",
    "sandbox": "Embedded sandbox",
    "languages": "Languages",
    "extras": "Optional packages",
    "hardware": "Hardware",
    "cluster": "Cluster",
}
_MARKS = {"ok": "[green]✔[/]", "missing": "[yellow]–[/]", "broken": "[bold red]✘[/]"}


def doctor(
    python: PythonOption = None,
    as_json: JsonOption = False,
    stop_limiter: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Stop this limiter of the Ray cluster, and do nothing else."),
    ] = None,
    namespace: Annotated[
        str | None, typer.Option(help="Ray namespace of that limiter, if its name is not unique.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Stop the limiter even if processes are using it.")] = False,
) -> None:
    """Check what works on this machine, by trying it, and print how to fix what does not.

    Tries kernel features, every language's self-test in the real sandbox, optional packages, torch and the GPU. Shows
    the resulting isolation level and the limiters of the Ray cluster, if one is running (set `RAY_ADDRESS` to choose
    one). Exits with 0 if the sandbox can run here, with 1 if not. With --stop-limiter, exits with 1 if the limiter was
    not stopped.

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
        raise typer.BadParameter("needs --stop-limiter", param_hint="--force" if force else "--namespace")

    with err().status("starting") as status:
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
    used = f"; it was used by {', '.join(stopped.processes)}" if stopped.processes else ""
    message = f"Stopped limiter {stopped.name!r} in namespace {stopped.namespace!r}{used}."
    typer.echo(json.dumps(asdict(stopped), indent=2) if as_json else message)


def show(report: DoctorReport, console: Console) -> None:
    """Print the verdict, the checks, and the remedies."""
    from rich.markup import escape

    style, sentence = verdict(report)
    console.print(f"[{style}]{escape(sentence)}[/]")
    about = f"Toolyard {report.toolyard}, Python {report.python}, {report.system}, {report.processors} processors"
    console.print(f"[dim]{escape(about)}[/]\n")
    console.print(_table(report))
    remedies = advice(report)
    if remedies:
        console.print("\n[bold]How to get what is missing[/]")
        for names, remedy in remedies.items():
            console.print(f"  [yellow]{escape(names)}[/]: {escape(remedy)}")


def verdict(report: DoctorReport) -> tuple[str, str]:
    """A style and a sentence: whether programs can run here, and how well they are isolated."""
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


def advice(report: DoctorReport) -> dict[str, str]:
    """Remedies by the names they help. Features with the same remedy share an entry."""
    grouped: dict[str, list[str]] = {}
    for check in report.checks:
        if check.remedy:
            grouped.setdefault(check.remedy, []).append(check.name)
    return {", ".join(dict.fromkeys(names)): remedy for remedy, names in grouped.items()}


def _table(report: DoctorReport) -> Table:
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
    """If all namespaces work, show them in one line."""
    spaces = [check for check in checks if check.group == "kernel" and check.name.endswith(" namespace")]
    if not spaces or any(check.status != "ok" for check in spaces):
        return checks
    kinds = ", ".join(check.name.removesuffix(" namespace") for check in spaces)
    one = spaces[0].model_copy(update={"name": "namespaces", "detail": kinds})
    return [one, *(check for check in checks if check not in spaces)]
