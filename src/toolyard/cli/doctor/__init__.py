"""`toolyard doctor`: the command, and how its report is printed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from toolyard.cli.console import complete, err, out
from toolyard.cli.options import JsonOption, PythonOption

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from toolyard.cli.doctor.checks import Check, DoctorReport
    from toolyard.cli.doctor.pods import ContainerReport, PodReport

_TITLES = {
    "kernel": "Kernel features",
    "sandbox": "Embedded sandbox",
    "languages": "Languages",
    "extras": "Optional packages",
    "hardware": "Hardware",
    "cluster": "Cluster",
}
_MARKS = {"ok": "[green]✔[/]", "missing": "[yellow]–[/]", "broken": "[bold red]✘[/]", "unknown": "[yellow]?[/]"}


def doctor(
    python: PythonOption = None,
    as_json: JsonOption = False,
    pod: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Check the pods of this Kubernetes manifest, not this machine; - reads standard input.",
            allow_dash=True,
        ),
    ] = None,
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
    one). Exits with 0 if the sandbox can run here, with 1 if not. With --pod, says from the manifest alone which level
    its containers reach, and exits with 1 if one has none, or if the manifest does not decide it. With --stop-limiter,
    exits with 1 if the limiter was not stopped.

    Examples:

    ```
    toolyard doctor
    toolyard doctor --json | jq .isolation
    toolyard doctor --pod deploy/kubernetes/sandbox.yaml
    kubectl get deployment sandbox -o yaml | toolyard doctor --pod -
    toolyard doctor --stop-limiter sandbox
    ```
    """
    from toolyard.cli.doctor.checks import examine

    if pod is not None and (python or stop_limiter is not None):
        raise typer.BadParameter("cannot be combined with --python or --stop-limiter", param_hint="--pod")
    if stop_limiter is not None:
        _stop(stop_limiter, namespace, force=force, as_json=as_json)
        return
    if force or namespace is not None:
        raise typer.BadParameter("needs --stop-limiter", param_hint="--force" if force else "--namespace")

    if pod is not None:
        _judge_pods(pod, as_json=as_json)
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


def _judge_pods(file: Path, *, as_json: bool) -> NoReturn:
    from toolyard.cli.doctor.pods import MAX_BYTES, examine_manifest
    from toolyard.errors import ConfigError

    try:
        with sys.stdin.buffer if str(file) == "-" else file.open("rb") as manifest:
            text = manifest.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    report = examine_manifest(text, str(file))
    if as_json:
        typer.echo(report.model_dump_json(indent=2))
    else:
        show_pods(report, out())
    raise typer.Exit(0 if report.can_run else 1)


def show_pods(report: PodReport, console: Console) -> None:
    """Print for each container the level, the settings that decide it, and what the node must have."""
    from rich.markup import escape

    for index, found in enumerate(report.containers):
        style, sentence = pod_verdict(found)
        console.print(("\n" if index else "") + f"[{style}]{escape(sentence)}[/]")
        console.print(_rows(list(found.checks)))
        _show_advice(found.checks, console)
        if found.node:
            console.print("\n[bold]What the node must have[/]")
            for need in found.node:
                console.print(f"  {escape(need)}")


def pod_verdict(found: ContainerReport) -> tuple[str, str]:
    """A style and a sentence: how well programs would be isolated in this container."""
    from toolyard.cli.doctor.checks import Status
    from toolyard.sandbox.isolation import Level

    where = f"{found.workload}, container {found.container}"
    broken = next((check.detail for check in found.checks if check.status is Status.BROKEN), None)
    if broken:
        return "bold red", f"✘ {where}: does not start: {broken}"
    if not found.possible:
        return "bold yellow", f"? {where}: cannot be judged from the manifest."
    if found.isolation is None:
        levels = " or ".join(found.possible)
        return "bold yellow", f"? {where}: isolation level {levels}; the manifest does not decide which."
    if found.isolation is Level.NONE:
        return "bold red", f"✘ {where}: no isolation, so the sandbox refuses to start."
    mark, style = ("✔", "bold green") if found.isolation is Level.FULL else ("!", "bold yellow")
    return style, f"{mark} {where}: isolation level {found.isolation!s}."


def show(report: DoctorReport, console: Console) -> None:
    """Print the verdict, the checks, and the remedies."""
    from rich.markup import escape

    style, sentence = verdict(report)
    console.print(f"[{style}]{escape(sentence)}[/]")
    about = f"Toolyard {report.toolyard}, Python {report.python}, {report.system}, {report.processors} processors"
    console.print(f"[dim]{escape(about)}[/]\n")
    console.print(_table(report))
    _show_advice(report.checks, console)


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


def _show_advice(checks: Sequence[Check], console: Console) -> None:
    from rich.markup import escape

    remedies = advice(checks)
    if remedies:
        console.print("\n[bold]How to get what is missing[/]")
        for names, remedy in remedies.items():
            console.print(f"  [yellow]{escape(names)}[/]: {escape(remedy)}")


def advice(checks: Sequence[Check]) -> dict[str, str]:
    """Remedies by the names they help. Features with the same remedy share an entry."""
    grouped: dict[str, list[str]] = {}
    for check in checks:
        if check.remedy:
            grouped.setdefault(check.remedy, []).append(check.name)
    return {", ".join(dict.fromkeys(names)): remedy for remedy, names in grouped.items()}


def _table(report: DoctorReport) -> Table:
    from toolyard.cli.doctor.checks import Group

    table = _rows([])
    for group in Group:
        checks = report.of(group)
        if checks:
            table.add_row("", f"[bold]{_TITLES[group]}[/]", "")
            _add_rows(table, _merged(checks))
    return table


def _rows(checks: list[Check]) -> Table:
    from rich.table import Table

    table = Table(show_header=False, box=None, padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    _add_rows(table, checks)
    return table


def _add_rows(table: Table, checks: list[Check]) -> None:
    from rich.markup import escape

    for check in checks:
        table.add_row(_MARKS[check.status], f"  {escape(check.name)}", escape(check.detail))


def _merged(checks: list[Check]) -> list[Check]:
    """If all namespaces work, show them in one line."""
    spaces = [check for check in checks if check.group == "kernel" and check.name.endswith(" namespace")]
    if not spaces or any(check.status != "ok" for check in spaces):
        return checks
    kinds = ", ".join(check.name.removesuffix(" namespace") for check in spaces)
    one = spaces[0].model_copy(update={"name": "namespaces", "detail": kinds})
    return [one, *(check for check in checks if check not in spaces)]
