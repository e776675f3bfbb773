"""`toolyard tools`: list the tools a model can call, and call them yourself."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from toolyard.cli.console import complete, err, out
from toolyard.cli.options import JsonOption

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="List the tools a model can call, and call them as it would.",
)

FileOption = Annotated[
    Path | None,
    typer.Option(
        "--tools",
        metavar="FILE",
        help="YAML file of tools. Your own classes and functions are looked up next to it, in the current folder, and "
        "on Python's path. Default: the built-in tools, code_interpreter and calc_gsm8k_reward.",
        show_default=False,
    ),
]


@app.command("list")
def list_tools(
    file: FileOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the tools: name, type, class, parameters (optional ones end in ?) and description.

    This also checks the file: errors name the file, the entry and the field. MCP servers are started, asked for their
    tools, and stopped.

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
        str | None,
        typer.Argument(metavar="[NAME]", help="Name of one tool. Default: all, as a list.", show_default=False),
    ] = None,
    file: FileOption = None,
) -> None:
    """Print what the model is shown about the tools: OpenAI function schemas, as JSON.

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
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="Tool name, as shown by `toolyard tools list`.", show_default=False),
    ],
    arguments: Annotated[
        str,
        typer.Argument(
            metavar="ARGS_JSON", help="Arguments as the model writes them: a JSON object; - reads standard input."
        ),
    ] = "{}",
    file: FileOption = None,
    create_kwargs: Annotated[
        str,
        typer.Option(metavar="JSON", help="The task's create_kwargs for this tool: a JSON object."),
    ] = "{}",
    repeat: Annotated[
        int, typer.Option(metavar="N", help="Call it N times in one trajectory, one after the other.", min=1)
    ] = 1,
    as_json: JsonOption = False,
) -> None:
    """Call a tool as a rollout does: create, execute, calc_reward, release.

    Prints what the model would read on stdout, and the outcome, step reward, metrics and the trajectory's reward on
    stderr. Exits with 1 if a call failed; wrong arguments are a failure, too.

    Examples:

    ```
    toolyard tools call code_interpreter '{"code": "print(6 * 7)"}'
    toolyard tools call calc_gsm8k_reward '{"answer": "18"}' --create-kwargs '{"ground_truth": "18"}' --repeat 2
    toolyard tools call count_letters '{"word": "hello"}' --tools examples/custom_tool/tools.yaml
    echo '{"code": "1 / 0"}' | toolyard tools call code_interpreter - --json
    ```
    """
    from toolyard.cli.tools.call import call_tool, load, print_calls, read_object

    try:
        kwargs = read_object(create_kwargs)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--create-kwargs") from None
    text = sys.stdin.buffer.read().decode("utf-8", "surrogateescape") if arguments == "-" else arguments
    called = complete(call_tool(load(file), name, text, kwargs, repeat))
    raise typer.Exit(print_calls(called, None if as_json else err()))
