"""`toolyard export`: selected trajectories as a data set for supervised fine-tuning."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class ExportFormat(StrEnum):
    """The columns of a row."""

    MESSAGES = "messages"
    PROMPT_COMPLETION = "prompt-completion"


def export(
    path: Annotated[
        Path,
        typer.Argument(metavar="DUMP", help="A dump, a folder of dumps, or one of their files.", show_default=False),
    ],
    target: Annotated[
        Path, typer.Argument(metavar="OUT.jsonl", help="File to write, one conversation per line.", show_default=False)
    ],
    query: Annotated[
        str,
        typer.Option(
            "--select",
            "-q",
            "--query",
            metavar="QUERY",
            help="Use only trajectories that match this `toolyard view` query, for example score=1.",
            show_default=False,
        ),
    ] = "",
    form: Annotated[
        ExportFormat,
        typer.Option(
            "--format",
            help="Columns: messages, for training with assistant_only_loss; or prompt and completion, which also "
            "leaves examples in the prompt untrained.",
        ),
    ] = ExportFormat.MESSAGES,
    per_task: Annotated[
        int | None,
        typer.Option(
            metavar="K", help="Keep at most K conversations per task, the best first.", min=1, show_default=False
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(metavar="N", help="Write at most N conversations.", min=1, show_default=False)
    ] = None,
    keep_duplicates: Annotated[bool, typer.Option("--keep-duplicates", help="Keep duplicate conversations.")] = False,
    seed: Annotated[int, typer.Option(help="Seed for ties within a task.", min=0)] = 0,
    tools: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="YAML file of the tools used. Default: those of the run (rollout.json in the dump).",
            show_default=False,
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL_OR_PATH",
            help="Write messages for this model's chat template, in the run's chat format, and check that they render "
            "to the sampled tokens. Default: calls as objects and a tools column, for any template that supports "
            "tools.",
            show_default=False,
        ),
    ] = None,
    exact: Annotated[
        bool,
        typer.Option("--exact", help="With --tokenizer: only conversations that render to the sampled tokens."),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Export selected trajectories for supervised fine-tuning: one conversation per line, in TRL's format.

    Only complete conversations are written: those that failed, have no score, were cut off by a limit, have a call that
    could not be read, or contain images are left out and counted. OUT.jsonl appears when it is complete.

    Examples:

    ```
    # the best solution of each task
    toolyard export runs/a sft.jsonl --select 'score=1' --per-task 1

    # for the model that played, checked token by token
    toolyard export runs/a sft.jsonl --select 'score=1' --tokenizer Qwen/Qwen2.5-3B-Instruct
    ```

    In TRL:

    ```
    dataset = load_dataset("json", data_files="sft.jsonl", split="train")
    SFTTrainer(model, SFTConfig(assistant_only_loss=True), train_dataset=dataset).train()
    ```
    """
    from toolyard.cli.export.run import export_sft
    from toolyard.export.sft import SftRules

    rules = SftRules(form.value, per_task, limit, keep_duplicates, exact, seed)
    export_sft(path, target, query, rules, tools=tools, tokenizer=tokenizer, force=force)
