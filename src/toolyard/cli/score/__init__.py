"""`toolyard score`: score a dump again, offline."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from toolyard.cli.console import INTERRUPTED, complete, err, out
from toolyard.cli.options import JsonOption

_reward_option = partial(typer.Option, rich_help_panel="Reward")
_dump_option = partial(typer.Option, rich_help_panel="Dump")


def score(
    path: Annotated[
        Path, typer.Argument(metavar="DUMP", help="A dump folder, or one of its files.", show_default=False)
    ],
    reward: Annotated[
        str,
        _reward_option(
            metavar="NAME",
            help="gsm8k, gsm8k:strict, math, code, code:fraction, code:continuous, judge (a language model), default "
            "(by data source), or module:function with verl's compute_score signature.",
            show_default=False,
        ),
    ],
    options: Annotated[
        list[str] | None,
        _reward_option(
            "--reward-option",
            metavar="KEY=VALUE",
            help="Setting of the reward, e.g. memory_limit_mb=512, or keyword argument of its function; repeat it for "
            "several. Values are YAML.",
        ),
    ] = None,
    weights: Annotated[
        list[str] | None,
        _reward_option(
            "--weight",
            metavar="PART=NUMBER",
            help="Weight of final, step, interaction, tool or tool.NAME in the score; repeat it for several. Default: "
            "the weights of the run (rollout.json in the dump), or else the default ones.",
        ),
    ] = None,
    deadline: Annotated[
        float, _reward_option(metavar="SECONDS", help="Maximum time to score one answer.", min=0.001)
    ] = 60.0,
    data_source: Annotated[
        str | None,
        _dump_option(metavar="NAME", help="Data source of all lines, overriding theirs. verl's dumps have none."),
    ] = None,
    step: Annotated[list[int] | None, _dump_option(help="Score only this step; repeat it for several.", min=0)] = None,
    limit: Annotated[int | None, _dump_option(metavar="N", help="Score only the first N trajectories.", min=1)] = None,
    out_dir: Annotated[
        Path | None,
        _dump_option("--out", metavar="DIR", help="Write the dump with its new scores to DIR. Default: write nothing."),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="[ADDRESS]",
            help="Run the answers' programs on all nodes of a Ray cluster: the one this machine belongs to, host:port, "
            "or `local` for a new one on this machine only.",
        ),
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Answers to score at the same time.", min=1)] = 32,
    top: Annotated[int, typer.Option(metavar="N", help="List the N largest changes.", min=0)] = 10,
    as_json: JsonOption = False,
) -> None:
    """Score a dump again with another final reward, and show what changes.

    Answers and ground truths come from the dump, Toolyard's or verl's. Only the final reward is recomputed; it is
    then combined, using the weights, with the step, tool and interaction rewards in the dump. In verl's dumps the
    final reward is the score. An answer that cannot be scored gets no score, never 0. Trajectories that failed for
    another reason are left unchanged.

    Ctrl-C stops cleanly and reports what is done. Exits with 1 if a line is damaged or an answer could not be scored.

    Examples:

    ```
    # would a stricter reward change anything?
    toolyard score runs/a --reward gsm8k:strict

    # add the scores that are missing after an outage of the sandbox service
    toolyard score runs/a --reward code --out runs/a-rescored \\
        --reward-option sandbox_fusion_url=http://127.0.0.1:8080

    # run the programs on all nodes of a Ray cluster
    toolyard score runs/a --reward code --ray --concurrency 256 \\
        --reward-option num_workers=128 --reward-option rate_limit=128

    # ask a language model behind any chat server, by a rubric
    toolyard score runs/a --reward judge --reward-option url=http://127.0.0.1:8000 \\
        --reward-option model=Qwen/Qwen3-32B --reward-option rubric_file=rubric.md

    # your own function, on the first hundred trajectories of one step of a verl dump
    toolyard score verl_dump --step 20 --limit 100 --data-source openai/gsm8k \\
        --reward my_rewards.py:compute_score --reward-option penalty=0.1

    # for scripts
    toolyard score runs/a --reward math --json | jq '.mean_before, .mean_after'
    ```
    """
    from toolyard.cli.score.report import print_report
    from toolyard.cli.score.run import ScoreArguments, run

    arguments = ScoreArguments(
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
        ray=ray,
        top=top,
    )
    report = complete(run(arguments, err()))
    print_report(report, None if as_json else out())
    if report.interrupted:
        raise typer.Exit(INTERRUPTED)
    if not report.good:
        raise typer.Exit(1)
