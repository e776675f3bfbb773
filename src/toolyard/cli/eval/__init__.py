"""`toolyard eval`: mean reward and pass@k of a dump, and two dumps compared."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from toolyard.cli.options import JsonOption


def evaluate(
    dumps: Annotated[
        list[str],
        typer.Argument(
            metavar="DUMP [OTHER]",
            help="A dump to evaluate, or two to compare: a file, a folder, a folder of runs, or a quoted pattern such "
            "as 'runs/seed-*', whose dumps are pooled. Toolyard's, verl's or TRL's.",
            show_default=False,
        ),
    ],
    pool: Annotated[
        bool, typer.Option("--pool", help="Pool all DUMPs, such as several seeds, instead of comparing two.")
    ] = False,
    query: Annotated[
        str,
        typer.Option(
            "--query",
            "-q",
            metavar="QUERY",
            help="Use only trajectories that match this `toolyard view` query.",
            show_default=False,
        ),
    ] = "",
    reward: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Part of the reward to use, such as final. Default: the score.", show_default=False
        ),
    ] = None,
    threshold: Annotated[float, typer.Option(help="Minimum reward to count a sample as solved.")] = 0.999,
    ks: Annotated[
        list[int] | None,
        typer.Option(
            "--k",
            metavar="K",
            help="Compute pass@K; repeat it for several. Default: 1, 2, 4, …, up to the samples per task.",
            show_default=False,
            min=1,
        ),
    ] = None,
    by: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TAG",
            help="Group by source, step, run or task, or by a task field such as ability (see --tasks); repeat it for "
            "several. Default: by source, if there are several.",
            show_default=False,
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Task file of the rollout, for tags that are not in the dump.",
            show_default=False,
        ),
    ] = None,
    resamples: Annotated[
        int | None,
        typer.Option(metavar="N", help="Bootstrap resamples. Default: 1,000 to 2,000.", min=100, show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed for resampling; the same seed gives the same numbers.", min=0)] = 0,
    picture: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png", help="Save a chart (.png, .svg or .pdf).", show_default=False, dir_okay=False),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Evaluate a dump: mean reward and pass@k, with 95 % intervals; or compare two dumps task by task.

    Every task has the same weight. Intervals are bootstrapped over tasks, not samples. pass@k is the unbiased estimate
    1 - C(n-c, k) / C(n, k). Samples without a reward are counted and left out, never taken as 0.

    With two dumps, tasks are paired by id. The difference is OTHER - DUMP, with a paired bootstrap interval and the
    p-value of a paired permutation test.

    Exits with 1 if no sample has a reward, or if no task has one in both dumps.

    Examples:

    ```
    # play, then evaluate
    toolyard rollout --tasks test.parquet --n 8 --out runs/eval
    toolyard eval runs/eval

    # did training help? Paired by task
    toolyard eval runs/before runs/after --picture change.png

    # three seeds as one run; a pattern in quotes is pooled
    toolyard eval runs/seed-* --pool
    toolyard eval 'runs/old-*' 'runs/new-*'

    # by a field of the tasks
    toolyard eval runs/eval --by level --tasks test.parquet

    # one step of a training run, for a script
    toolyard eval outputs/run -q step:100 --json | jq '.all["pass@8"]'
    ```
    """
    from toolyard.cli.eval.report import print_result
    from toolyard.cli.eval.run import EvalArguments, run

    arguments = EvalArguments(
        dumps=dumps,
        pool=pool,
        query=query,
        reward=reward,
        threshold=threshold,
        ks=ks,
        by=by,
        tasks=tasks,
        resamples=resamples,
        seed=seed,
        picture=picture,
    )
    raise typer.Exit(print_result(run(arguments), as_json=as_json, picture=picture))
