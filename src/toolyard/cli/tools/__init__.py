"""`toolyard tools`: see what a model could call, and call it yourself."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from toolyard.cli.console import complete, err, out

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="See the tools that a model gets, and call them as it would.",
)

FileOption = Annotated[
    Path | None,
    typer.Option(
        "--tools",
        metavar="FILE",
        help="YAML file of tools. Classes and functions of your own are found beside it, in the current folder, and "
        "wherever Python looks. Default: Toolyard's own two, code_interpreter and calc_gsm8k_reward.",
        show_default=False,
    ),
]


@app.command("list")
def list_tools(
    file: FileOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False,
) -> None:
    """List the tools: name, type, class, parameters (those with ? may be left out), description.

    Loading a file is also its check: what is wrong with it is told by file, entry and field. MCP servers are started
    for it, asked for their tools, and stopped again.

    Examples:

    ```
    toolyard tools list
    toolyard tools list --tools examples/custom_tool/tools.yaml
    toolyard tools list --tools tools.yaml --json | jq -r '.[].name'
    ```
    """
    from toolyard.cli.tools.call import close, load, print_list

    tools = load(file)
    complete(close(tools))
    print_list(tools, None if as_json else out())


@app.command()
def schema(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Of one tool. Default: all, as a list.", show_default=False)
    ] = None,
    file: FileOption = None,
) -> None:
    """Print the JSON by which a model gets to know the tools: OpenAI's function schemas.

    Examples:

    ```
    toolyard tools schema
    toolyard tools schema code_interpreter
    toolyard tools schema my_custom_function --tools examples/custom_tool/tools.yaml
    ```
    """
    from toolyard.cli.tools.call import close, find, load, print_schemas

    tools = load(file)
    complete(close(tools))
    print_schemas([find(tools, name)] if name else tools, one=name is not None)


@app.command()
def call(
    name: Annotated[str, typer.Argument(metavar="NAME", help="As `toolyard tools list` shows it.", show_default=False)],
    arguments: Annotated[
        str,
        typer.Argument(
            metavar="ARGS_JSON", help="What the model would write: a JSON object. - reads it from standard input."
        ),
    ] = "{}",
    file: FileOption = None,
    create_kwargs: Annotated[
        str,
        typer.Option(metavar="JSON", help="What the trajectory brings along: the tool's create_kwargs, a JSON object."),
    ] = "{}",
    repeat: Annotated[int, typer.Option(help="Calls in one trajectory, one after the other.", min=1)] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything about the calls as JSON.")] = False,
) -> None:
    """Call a tool as a rollout does: create, execute, calc_reward, release.

    What the model would read is printed on stdout; how the call ended, its step reward and metrics, and the reward of
    the whole trajectory on stderr. Exits with 1 unless all of it went well: wrong arguments are told to the model, and
    to you.

    Examples:

    ```
    toolyard tools call code_interpreter '{"code": "print(6 * 7)"}'
    toolyard tools call calc_gsm8k_reward '{"answer": "18"}' --create-kwargs '{"ground_truth": "18"}' --repeat 2
    toolyard tools call count_letters '{"word": "hello"}' --tools examples/custom_tool/tools.yaml
    echo '{"code": "1 / 0"}' | toolyard tools call code_interpreter - --json
    ```
    """
    from toolyard.cli.tools.call import call_tool, load, print_played, read_object

    try:
        brought = read_object(create_kwargs)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--create-kwargs") from None
    text = sys.stdin.buffer.read().decode("utf-8", "surrogateescape") if arguments == "-" else arguments
    played = complete(call_tool(load(file), name, text, brought, repeat))
    raise typer.Exit(print_played(played, None if as_json else err()))
