"""What `toolyard chat` does: open a model's chat format, read conversations, print reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer

from toolyard.chat.conformance import ConformanceReport, Outcome
from toolyard.chat.formats import open_format
from toolyard.chat.protocol import ChatFormat, Tokenizer
from toolyard.chat.tokenizers.opening import load_tokenizer
from toolyard.cli.console import print_json
from toolyard.errors import ConfigError
from toolyard.messages import Message, OpenAIFunctionToolSchema

if TYPE_CHECKING:
    from rich.console import Console

_STYLES = {
    Outcome.PASSED: "green",
    Outcome.FAILED: "bold red",
    Outcome.REWRITES: "cyan",
    Outcome.NOT_APPLICABLE: "yellow",
}
_MAX_SEEN_CHARS = 500


def open_chat(model: str, format: str, chat_template: Path | None, tool_role: str) -> tuple[Tokenizer, ChatFormat]:  # noqa: A002
    if tool_role not in ("auto", "tool", "user"):
        raise typer.BadParameter(f"{tool_role!r} is not one of auto, tool, user", param_hint="--tool-role")
    tokenizer = load_tokenizer(model)
    return tokenizer, open_format(tokenizer, format=format, chat_template=chat_template, tool_role=tool_role)


def print_report(report: ConformanceReport, console: Console | None) -> None:
    """Print a table to `console`, or JSON to stdout if it is None."""
    if console is None:
        checks = [
            {"name": check.name, "claim": check.claim, "outcome": check.outcome.value, "seen": check.seen}
            for check in report.checks
        ]
        head = {"format": report.format, "tokenizer": report.tokenizer, "seed": report.seed}
        fields = {**head, "conversations": report.conversations, "passed": report.passed, "checks": checks}
        print_json(fields)
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"{report.format} on {report.tokenizer}", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for heading in ("check", "outcome", "details"):
        table.add_column(heading, overflow="fold")
    for check in report.checks:
        seen = check.seen
        if len(seen) > _MAX_SEEN_CHARS:
            seen = f"{seen[:_MAX_SEEN_CHARS]}… (--json shows all)"
        if check.outcome is not Outcome.PASSED:
            seen = f"{check.claim} {seen}" if check.outcome is Outcome.FAILED else seen
        table.add_row(check.name, Text(check.outcome.value, _STYLES[check.outcome]), Text(seen))
    console.print(table)


def read_messages(file: Path) -> list[Message]:
    found = _read(file)
    if not isinstance(found, list) or not found:
        raise ConfigError(f"{file}: expected a list of messages")
    messages: list[Message] = []
    for index, one in enumerate(cast("list[Any]", found)):
        try:
            messages.append(Message.from_openai(one))
        except (AttributeError, TypeError, ValueError) as error:
            raise ConfigError(f"{file}: message {index}: {error}") from None
    return messages


def read_tools(file: Path | None) -> list[OpenAIFunctionToolSchema]:
    if file is None:
        return []
    found = _read(file)
    listed = cast("list[Any]", found if isinstance(found, list) else [found])
    try:
        return [OpenAIFunctionToolSchema.model_validate(one) for one in listed]
    except ValueError as error:
        raise ConfigError(f"{file}: not the output of `toolyard tools schema`: {error}") from None


def print_rendered(
    chosen: ChatFormat, messages: list[Message], tools: list[OpenAIFunctionToolSchema], *, as_json: bool
) -> None:
    ids = chosen.render(messages, tools)
    if as_json:
        fields = {
            "format": chosen.name,
            "text": chosen.decode(ids),
            "ids": ids,
            "stop_token_ids": chosen.stop_token_ids,
        }
        typer.echo(json.dumps(fields, ensure_ascii=False))
    else:
        typer.echo(chosen.decode(ids))


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot read it as JSON: {error}") from None
