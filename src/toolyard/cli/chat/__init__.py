"""`toolyard chat`: see how a model is spoken to, and whether that is exact."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from toolyard.cli.console import out

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="See how a model is spoken to, in tokens, and hold that to its contract.",
)

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL_OR_PATH",
        help="A folder with a tokenizer.json, a .gguf file, or an id on the Hugging Face hub.",
        show_default=False,
    ),
]
FormatOption = Annotated[
    str,
    typer.Option(
        "--format",
        metavar="FORMAT",
        help="auto; a syntax of calls, which is used with the model's chat template (hermes, code_block, …); "
        "renderers or renderers:FAMILY.",
    ),
]
TemplateOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="A Jinja file instead of the model's own chat template.", show_default=False),
]
RoleOption = Annotated[
    str, typer.Option(metavar="auto|tool|user", help="Who says what a tool answered; auto: the tool, if it can.")
]


@app.command()
def check(
    model: ModelArgument,
    format: FormatOption = "auto",  # noqa: A002
    chat_template: TemplateOption = None,
    tool_role: RoleOption = "auto",
    conversations: Annotated[int, typer.Option(help="Random ones, of up to four turns.", min=1)] = 100,
    seed: Annotated[int, typer.Option(help="The same seed plays the same conversations.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Play random conversations, and check that every token is where it belongs.

    Round trip, exact prefix, whose tokens are whose, stop tokens, text that looks like special tokens, calls,
    thinking, and agreement with transformers' rendering and with the history that the chat template writes. What a
    template rewrites in the history is named, and no failure. Exits with 1 if a check failed.

    Examples:

    ```
    toolyard chat check ./my-model
    toolyard chat check ./my-model --format code_block --tool-role user
    toolyard chat check Qwen/Qwen3-8B --format renderers --json
    ```
    """
    from toolyard.chat.conformance import check_format
    from toolyard.cli.chat.check import open_chat, print_report

    tokenizer, chosen = open_chat(model, format, chat_template, tool_role)
    report = check_format(chosen, tokenizer, seed=seed, conversations=conversations)
    print_report(report, None if as_json else out())
    raise typer.Exit(0 if report.passed else 1)


@app.command()
def render(
    model: ModelArgument,
    messages: Annotated[
        Path,
        typer.Option(metavar="FILE", help="JSON: a list of messages, as OpenAI has them.", show_default=False),
    ],
    tools: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSON: what `toolyard tools schema` prints.", show_default=False)
    ] = None,
    format: FormatOption = "auto",  # noqa: A002
    chat_template: TemplateOption = None,
    tool_role: RoleOption = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the token ids too, as JSON.")] = False,
) -> None:
    """Print the prompt that a model gets for a conversation, special tokens included.

    Examples:

    ```
    toolyard tools schema > tools.json
    toolyard chat render ./my-model --messages messages.json --tools tools.json
    ```
    """
    from toolyard.cli.chat.check import open_chat, print_rendered, read_messages, read_tools

    said, shown = read_messages(messages), read_tools(tools)
    _, chosen = open_chat(model, format, chat_template, tool_role)
    print_rendered(chosen, said, shown, as_json=as_json)
