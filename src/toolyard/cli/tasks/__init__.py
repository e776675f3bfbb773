"""`toolyard tasks`: show and check the tasks of a rollout, and prepare data sets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from toolyard.cli.console import err, out
from toolyard.cli.options import JsonOption

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Show, check and prepare the tasks of a rollout.",
)
prepare_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Convert a data set to verl's format, including the kwargs of its tools.",
)
app.add_typer(prepare_app, name="prepare")

SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="SRC",
        help="File of tasks (.jsonl, .json, their .gz, .parquet or .arrow), a folder of them (FOLDER or FOLDER:SPLIT), "
        "a data set on the Hugging Face hub (hf://OWNER/NAME[@REVISION][/CONFIG][:SPLIT]), or the name of a bundled "
        "set: word-problems.",
        show_default=False,
    ),
]
FieldOption = Annotated[
    list[str] | None,
    typer.Option(
        "--field",
        metavar="NAME=FIELD",
        help="Read NAME from the field FIELD, e.g. prompt=problem; repeat it for several. A rollout does the same with "
        "--set tasks.fields.prompt=problem.",
        show_default=False,
    ),
]


@app.command()
def show(
    source: SourceArgument,
    limit: Annotated[int, typer.Option(metavar="N", help="Show the first N tasks.", min=1)] = 5,
    field: FieldOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show tasks as a rollout reads them: id, data source, ground truth and messages.

    Examples:

    ```
    toolyard tasks show word-problems
    toolyard tasks show test.parquet --limit 1 --json
    toolyard tasks show hf://openai/gsm8k/main:test
    toolyard tasks show hf://HuggingFaceH4/MATH-500:test --field prompt=problem
    ```
    """
    from toolyard.cli.tasks.reports import print_tasks, read_fields
    from toolyard.tasks.files import open_tasks

    print_tasks(open_tasks(source, limit=limit, fields=read_fields(field or ())), None if as_json else out())


@app.command()
def check(
    source: SourceArgument,
    field: FieldOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read all rows, and report each bad one with its line, field and value.

    Ends with counts by format (verl, gsm8k, plain) and data source. Exits with 1 if a row is bad.

    Examples:

    ```
    toolyard tasks check train.parquet
    toolyard tasks check train.jsonl --json | jq '.bad[].line'
    toolyard tasks check data/gsm8k:train
    ```
    """
    from toolyard.cli.tasks.reports import check_tasks, read_fields

    raise typer.Exit(check_tasks(source, read_fields(field or ()), None if as_json else out()))


@app.command()
def generate(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to write (.jsonl).", show_default=False)],
    count: Annotated[int, typer.Option(help="Number of problems.", min=1)] = 100,
    seed: Annotated[int, typer.Option(help="The same seed makes the same problems on every machine.", min=0)] = 0,
    split: Annotated[
        str,
        typer.Option(
            metavar="train|unseen", help="Templates to use: those for training, or those held out for testing."
        ),
    ] = "train",
    script: Annotated[
        Path | None,
        typer.Option(
            metavar="SCRIPT",
            help="Also write a correct solution to each problem, by task id: a call of the code interpreter, then the "
            "answer. The scripted engine plays it.",
            show_default=False,
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
) -> None:
    """Generate arithmetic word problems from templates, with answers and Python programs that compute them.

    Needs no network. No question repeats; a larger --count only adds problems.

    Examples:

    ```
    toolyard tasks generate train.jsonl --count 2000 --seed 1 --script teacher.json
    toolyard tasks generate test.jsonl --count 200 --seed 2 --split unseen
    toolyard rollout --tasks train.jsonl --format hermes --engine scripted --set engine.script=teacher.json
    ```
    """
    from toolyard.tasks.word_problems.files import write_problems

    write_problems(file, count, seed=seed, split=split, script=script, force=force)
    err().print(f"wrote {count:,} problems to {file}", style="green", markup=False)
    if script is not None:
        err().print(f"wrote their solutions to {script}", style="green", markup=False)


@prepare_app.command()
def gsm8k(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC", help="GSM8K's own file, with a question and an answer per row.", show_default=False
        ),
    ],
    destination: Annotated[
        Path, typer.Argument(metavar="DST", help="File to write (.jsonl or .parquet).", show_default=False)
    ],
    system: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|TEXT",
            help="System message, or a file with it; '' for none. Default: asks for steps, tool use and a #### line.",
            show_default=False,
        ),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(help="Split name for extra_info. Default: the name of SRC, without suffix.", show_default=False),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(metavar="N", help="Write only the first N rows.", min=1, show_default=False)
    ] = None,
    skip_bad_rows: Annotated[bool, typer.Option("--skip-bad-rows", help="Skip and list invalid rows.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace DST if it exists.")] = False,
) -> None:
    """Convert GSM8K to verl's format: prompt, reward_model.ground_truth, extra_info.tools_kwargs.

    DST is written completely or not at all. Toolyard can also read SRC directly; use this for verl, or if prompts must
    be the same everywhere.

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
