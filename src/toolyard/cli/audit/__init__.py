"""`toolyard audit`: whether a dump can be trained on, to the token."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from toolyard.cli.console import INTERRUPTED, err, out


def audit(
    path: Annotated[Path, typer.Argument(metavar="DIR|FILE", help="A dump, or one of its files.", show_default=False)],
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL_OR_PATH",
            help="Of the model that sampled: checks the texts against the tokens, and shows differences as text.",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[int, typer.Option(help="Problems to show one by one.", min=0)] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check that every trajectory's tokens are exactly what the model sampled and saw.

    Each prompt must be the last one and what was sampled after it, extended; mask, logprobs and ids must agree with the
    turns, the messages with the calls, the outcome with the score. Trajectories that do not claim to be token-exact
    (those of verl, or of engines that only speak of text) are counted, and checked for the rest. A line that is being
    written is passed over.

    Exits with 1 if there is any problem.

    Examples:

    ```
    toolyard audit runs/first
    toolyard audit runs/first/12.jsonl --tokenizer Qwen/Qwen2.5-0.5B-Instruct
    toolyard audit runs/first --json | jq .problems
    ```
    """
    from toolyard.cli.audit.findings import audit_dump, print_findings

    try:
        findings = audit_dump(path, tokenizer, limit, err())
    except KeyboardInterrupt:
        err().print("interrupted", style="yellow")
        raise typer.Exit(INTERRUPTED) from None
    raise typer.Exit(print_findings(findings, None if as_json else out()))
