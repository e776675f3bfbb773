"""`toolyard`: the commands, their help, and how errors are reported. Commands import heavy modules when they run."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from toolyard._version import __version__
from toolyard.cli import (
    audit,
    bench,
    chat,
    doctor,
    engines,
    eval,  # noqa: A004 - the command's name
    export,
    gateway,
    models,
    rollout,
    sandbox,
    score,
    tasks,
    tools,
    top,
    train,
    view,
)
from toolyard.cli.console import complain, leave
from toolyard.cli.options import RayCommand
from toolyard.errors import ToolyardError

app = typer.Typer(
    name="toolyard",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    # Rich tracebacks print local variables, which may hold secrets such as tokens.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("rollout", cls=RayCommand)(rollout.rollout)
app.command("train")(train.train)
app.command("audit")(audit.audit)
app.command("score", cls=RayCommand)(score.score)
app.command("eval")(eval.evaluate)
app.command("export")(export.export)
app.command("gateway")(gateway.gateway)
app.command("view")(view.view)
app.command("top")(top.top)
app.add_typer(tasks.app, name="tasks")
app.add_typer(tools.app, name="tools")
app.add_typer(chat.app, name="chat")
app.add_typer(models.app, name="models")
app.add_typer(engines.app, name="engines")
app.add_typer(sandbox.app, name="sandbox")
app.command("doctor")(doctor.doctor)
app.command("bench")(bench.bench)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"toolyard {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Multi-turn tool rollouts for RL, with the sandbox built in.

    First steps:

    ```
    toolyard rollout               let a small model solve word problems, with a sandbox for its code
    toolyard train                 train that model on its own rollouts (GRPO)
    toolyard eval DUMP [OTHER]     mean reward and pass@k with intervals; or compare two dumps
    toolyard doctor                show what works on this machine, and how to fix the rest
    toolyard sandbox tour          run good and bad programs in the sandbox
    toolyard sandbox run hello.py  run one program
    toolyard sandbox serve         serve SandboxFusion's API on http://127.0.0.1:8080
    toolyard gateway               record what any agent samples, through OpenAI's and Anthropic's APIs
    toolyard tools list            list the tools a model can call (call one: toolyard tools call --help)
    ```
    """


def run() -> None:
    """Run the command line. A `ToolyardError` prints one line and exits with 1; wrong usage exits with 2."""
    try:
        command()()
    except ToolyardError as error:
        complain(error)
        leave(1)
    except SystemExit as error:
        leave(error.code)


def command() -> Any:
    """The command line as a callable click command."""
    built = typer.main.get_command(app)
    _hide_flag_types(built, typer.Context(built, **built.context_settings))
    return built


def _hide_flag_types(command: Any, context: typer.Context) -> None:
    """Typer 0.29 shows `--json <bool>` in its help, as if flags took a value."""
    for parameter in command.get_params(context):
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    for inner in getattr(command, "commands", {}).values():
        _hide_flag_types(inner, typer.Context(inner, parent=context))
