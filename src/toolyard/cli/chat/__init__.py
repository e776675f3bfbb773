"""`toolyard chat`: print the prompts of a chat format, and check that it is token-exact."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from toolyard.cli.console import out
from toolyard.cli.options import JsonOption

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Print the prompts a model gets, and check that its chat format is token-exact.",
)

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL_OR_PATH",
        help="A folder with a tokenizer.json, a .gguf file, or a Hugging Face id.",
        show_default=False,
    ),
]
FormatOption = Annotated[
    str,
    typer.Option(
        "--format",
        metavar="FORMAT",
        help="auto; a syntax for tool calls, used with the model's chat template (hermes, code_block, …); or "
        "renderers or renderers:FAMILY.",
    ),
]
TemplateOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Jinja chat template to use instead of the model's own.", show_default=False),
]
RoleOption = Annotated[
    str,
    typer.Option(
        metavar="auto|tool|user", help="Role of messages with tool results; auto: tool, if the template supports it."
    ),
]


@app.command()
def check(
    model: ModelArgument,
    format: FormatOption = "auto",  # noqa: A002
    chat_template: TemplateOption = None,
    tool_role: RoleOption = "auto",
    conversations: Annotated[
        int, typer.Option(help="Number of random conversations, of up to four turns each.", min=1)
    ] = 100,
    seed: Annotated[int, typer.Option(help="The same seed makes the same conversations.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Check on random conversations that a chat format puts every token where it belongs.

    Checks round trips, exact prefixes, which tokens the model sampled, stop tokens, text that looks like special
    tokens, tool calls, thinking, and agreement with transformers' rendering and with the history that the chat
    template writes. What a template rewrites in the history is reported, but is not a failure. Exits with 1 if a check
    failed.

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
        typer.Option(metavar="FILE", help="JSON file: a list of messages in OpenAI's format.", show_default=False),
    ],
    tools: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON file: the output of `toolyard tools schema`.", show_default=False),
    ] = None,
    format: FormatOption = "auto",  # noqa: A002
    chat_template: TemplateOption = None,
    tool_role: RoleOption = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, including the token ids.")] = False,
) -> None:
    """Print the prompt that a model gets for a conversation, including special tokens.

    Examples:

    ```
    toolyard tools schema > tools.json
    toolyard chat render ./my-model --messages messages.json --tools tools.json
    ```
    """
    from toolyard.cli.chat.check import open_chat, print_rendered, read_messages, read_tools

    conversation, schemas = read_messages(messages), read_tools(tools)
    _, chosen = open_chat(model, format, chat_template, tool_role)
    print_rendered(chosen, conversation, schemas, as_json=as_json)
