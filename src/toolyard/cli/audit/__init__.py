"""`toolyard audit`: check that a dump can be trained on, token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from toolyard.cli.console import INTERRUPTED, err, out
from toolyard.cli.options import JsonOption


def audit(
    path: Annotated[
        Path, typer.Argument(metavar="DIR|FILE", help="A dump folder, or one of its files.", show_default=False)
    ],
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL_OR_PATH",
            help="Tokenizer of the model that sampled the dump: also check texts against tokens, and show differences "
            "as text.",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[int, typer.Option(metavar="N", help="Show the first N problems.", min=0)] = 10,
    as_json: JsonOption = False,
) -> None:
    """Check that every trajectory's tokens are exactly what the model sampled and saw.

    Each prompt must begin with the previous prompt and what was sampled after it; the mask, logprobs and ids must
    agree with the turns, the messages with the calls, and the outcome with the score. Trajectories that do not claim
    to be token-exact (verl's, or those of engines that return only text) are counted, and checked for everything
    else. A line that is still being written is skipped.

    Exits with 1 if there is a problem.

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
