"""`toolyard score`: a dump scored again, offline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from toolyard.cli.console import INTERRUPTED, complete, err, out

_REWARD, _DUMP, _RUN = "The reward", "The dump", "The run"


def score(
    path: Annotated[Path, typer.Argument(metavar="DUMP", help="A dump, or one of its files.", show_default=False)],
    reward: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="gsm8k, gsm8k:strict, math, code, code:fraction, code:continuous, default (by data source), or "
            "module:function with verl's compute_score signature.",
            show_default=False,
            rich_help_panel=_REWARD,
        ),
    ],
    options: Annotated[
        list[str] | None,
        typer.Option(
            "--reward-option",
            metavar="KEY=VALUE",
            help="A setting of the reward, as in --reward-option memory_limit_mb=512; of a function, a keyword "
            "argument. Values are YAML. Several times for several.",
            rich_help_panel=_REWARD,
        ),
    ] = None,
    weights: Annotated[
        list[str] | None,
        typer.Option(
            "--weight",
            metavar="PART=NUMBER",
            help="What final, step, interaction, tool or tool.NAME counts in the score. Default: as the run had it "
            "(rollout.json beside the dump), else as runs have it by default.",
            rich_help_panel=_REWARD,
        ),
    ] = None,
    deadline: Annotated[
        float, typer.Option(metavar="SECONDS", help="For one answer.", min=0.001, rich_help_panel=_REWARD)
    ] = 60.0,
    data_source: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Of all lines, in place of what they say. verl's do not say it.",
            show_default=False,
            rich_help_panel=_DUMP,
        ),
    ] = None,
    step: Annotated[
        list[int] | None,
        typer.Option(help="Only this step; several times for several.", min=0, rich_help_panel=_DUMP),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="The first so many trajectories.", min=1, rich_help_panel=_DUMP)
    ] = None,
    out_dir: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Write the dump with its new scores there. Without it, nothing is written.",
            show_default=False,
            rich_help_panel=_DUMP,
        ),
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Answers at once.", min=1, rich_help_panel=_RUN)] = 32,
    top: Annotated[int, typer.Option(help="Changes to show one by one.", min=0, rich_help_panel=_RUN)] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.", rich_help_panel=_RUN)] = False,
) -> None:
    """Score a dump again with another final reward, and show what changes.

    Answers and ground truths are taken from the dump, ours or verl's. Only the final reward is computed anew: what
    steps, tools and simulators gave stands in the dump, and is combined with it by the weights. Of verl's lines the
    final reward is the score. An answer that cannot be scored has no score: never 0. Trajectories that failed for
    another reason than their reward are left as they are.

    Ctrl-C ends it cleanly, with a report of what is done. Exits with 1 if a line is damaged, or an answer could not be
    scored.

    Examples:

    ```
    # would a stricter reward change anything?
    toolyard score runs/a --reward gsm8k:strict

    # score what a service's outage left without a score, into another folder
    toolyard score runs/a --reward code --out runs/a-rescored \\
        --reward-option sandbox_fusion_url=http://127.0.0.1:8080

    # a function of your own, on the first hundred of one step of verl's dump
    toolyard score verl_dump --step 20 --limit 100 --data-source openai/gsm8k \\
        --reward my_rewards.py:compute_score --reward-option penalty=0.1

    # for scripts
    toolyard score runs/a --reward math --json | jq '.mean_before, .mean_after'
    ```
    """
    from toolyard.cli.score.report import print_report
    from toolyard.cli.score.run import Asked, run

    asked = Asked(
        path=path,
        reward=reward,
        options=options or (),
        weights=weights or (),
        deadline_seconds=deadline,
        data_source=data_source,
        steps=step,
        limit=limit,
        out=out_dir,
        concurrency=concurrency,
        top=top,
    )
    report = complete(run(asked, err()))
    print_report(report, None if as_json else out())
    if report.interrupted:
        raise typer.Exit(INTERRUPTED)
    if not report.good:
        raise typer.Exit(1)
