"""`toolyard tasks`: look at what a rollout would begin with, check it, and prepare data sets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from toolyard.cli.console import err, out

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="See, check and prepare the tasks that rollouts begin with.",
)
prepare_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Write a data set in verl's shape, with the kwargs of the tools.",
)
app.add_typer(prepare_app, name="prepare")

SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="SRC",
        help="File of tasks (.jsonl, .json, .parquet; .gz of the first two), or the name of a bundled set: "
        "word-problems.",
        show_default=False,
    ),
]


@app.command()
def show(
    source: SourceArgument,
    limit: Annotated[int, typer.Option(help="Tasks to show, from the first on.", min=1)] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of their fields, as a JSON array.")] = False,
) -> None:
    """Show tasks as a rollout would get them: id, source, ground truth and the conversation.

    Examples:

    ```
    toolyard tasks show word-problems
    toolyard tasks show test.parquet --limit 1 --json
    ```
    """
    from toolyard.cli.tasks.reports import print_tasks
    from toolyard.tasks.files import open_tasks

    print_tasks(open_tasks(source, limit=limit), None if as_json else out())


@app.command()
def check(
    source: SourceArgument,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Read all rows, and tell every bad one by its line, field and value.

    Then counts by shape (verl, gsm8k, plain) and data source. Exits with 1 if there is a bad row.

    Examples:

    ```
    toolyard tasks check train.parquet
    toolyard tasks check train.jsonl --json | jq '.bad[].line'
    ```
    """
    from toolyard.cli.tasks.reports import check_tasks

    raise typer.Exit(check_tasks(source, None if as_json else out()))


@app.command()
def generate(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What to write: .jsonl.", show_default=False)],
    count: Annotated[int, typer.Option(help="Problems to make.", min=1)] = 100,
    seed: Annotated[int, typer.Option(help="The same seed makes the same problems, everywhere.", min=0)] = 0,
    split: Annotated[
        str,
        typer.Option(
            metavar="train|unseen", help="Which templates: those to train on, or those kept out of it, to test with."
        ),
    ] = "train",
    script: Annotated[
        Path | None,
        typer.Option(
            metavar="SCRIPT",
            help="Also write what a teacher says to each, by task id: a call of the code interpreter, then the answer. "
            "The scripted engine plays it.",
            show_default=False,
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
) -> None:
    """Make arithmetic word problems from templates, with their answers, and Python programs that compute them.

    Needs no network. No question comes twice; the first problems of many are those of few.

    Examples:

    ```
    toolyard tasks generate train.jsonl --count 2000 --seed 1 --script teacher.json
    toolyard tasks generate test.jsonl --count 200 --seed 2 --split unseen
    toolyard rollout --tasks train.jsonl --format hermes --engine scripted --set engine.script=teacher.json
    ```
    """
    from toolyard.tasks.word_problems.files import write_problems

    write_problems(file, count, seed=seed, split=split, script=script, force=force)
    err().print(f"{count:,} problems written: {file}", style="green", markup=False)
    if script is not None:
        err().print(f"what a teacher says to them: {script}", style="green", markup=False)


@prepare_app.command()
def gsm8k(
    source: Annotated[
        str,
        typer.Argument(metavar="SRC", help="GSM8K's own file, with question and answer a row.", show_default=False),
    ],
    destination: Annotated[
        Path, typer.Argument(metavar="DST", help="What to write: .jsonl or .parquet.", show_default=False)
    ],
    system: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|TEXT",
            help="The system message, or a file that holds it; empty: none. Default: asks for steps, tools and ####.",
            show_default=False,
        ),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(help="Goes into extra_info. Default: the name of SRC, without its suffix.", show_default=False),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Rows to write. Default: all.", min=1, show_default=False)] = None,
    skip_bad_rows: Annotated[bool, typer.Option("--skip-bad-rows", help="Leave them out and list them.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace DST if it is there.")] = False,
) -> None:
    """Write GSM8K's rows in verl's shape: prompt, reward_model.ground_truth, extra_info.tools_kwargs.

    DST appears whole or not at all. Toolyard plays SRC itself just as well; this is for verl, and for prompts that
    have to be the same everywhere.

    Examples:

    ```
    toolyard tasks prepare gsm8k test.jsonl test.parquet
    toolyard tasks prepare gsm8k train.jsonl data/train.jsonl --system system.txt --skip-bad-rows
    ```
    """
    from toolyard.cli.tasks.reports import print_prepared, read_system
    from toolyard.tasks.prepare import GSM8K_SYSTEM, prepare_gsm8k

    done = prepare_gsm8k(
        source,
        destination,
        system=GSM8K_SYSTEM if system is None else read_system(system),
        split=split,
        limit=limit,
        skip_bad_rows=skip_bad_rows,
        force=force,
    )
    print_prepared(done, destination, err())
