"""`toolyard`: the commands, their help, and how their errors are told. Everything heavy is imported inside them."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from toolyard._version import __version__
from toolyard.cli import audit, bench, chat, doctor, models, rollout, sandbox, score, tasks, tools, train, view
from toolyard.cli.console import complain, leave
from toolyard.errors import ToolyardError

app = typer.Typer(
    name="toolyard",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    # A traceback is for our own bugs, and rich ones print local variables: tokens, say.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("rollout")(rollout.rollout)
app.command("train")(train.train)
app.command("audit")(audit.audit)
app.command("score")(score.score)
app.command("view")(view.view)
app.add_typer(tasks.app, name="tasks")
app.add_typer(tools.app, name="tools")
app.add_typer(chat.app, name="chat")
app.add_typer(models.app, name="models")
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
    toolyard rollout               the main job: a small model plays word problems, with a sandbox for its code
    toolyard train                 the same model learns from its own rollouts (GRPO)
    toolyard doctor                what this machine offers, and what to do
    toolyard sandbox tour          programs good and bad, and what became of them
    toolyard sandbox run hello.py  one program
    toolyard sandbox serve         SandboxFusion's API on http://127.0.0.1:8080
    toolyard tools list            what a model can call; then: toolyard tools call --help
    ```
    """


def run() -> None:
    """Do what the command line says. Our own errors are one line and exit status 1; wrong usage is 2."""
    try:
        command()()
    except ToolyardError as error:
        complain(error)
        leave(1)
    except SystemExit as error:
        leave(error.code)


def command() -> Any:
    """The command line, ready to be called."""
    made = typer.main.get_command(app)
    _hide_types_of_flags(made, typer.Context(made, **made.context_settings))
    return made


def _hide_types_of_flags(command: Any, context: typer.Context) -> None:
    """Typer 0.29 shows `--json <bool>` in its help, as if flags took a value."""
    for parameter in command.get_params(context):
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    for inner in getattr(command, "commands", {}).values():
        _hide_types_of_flags(inner, typer.Context(inner, parent=context))
