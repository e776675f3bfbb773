"""`toolyard train`: GRPO with Toolyard's rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from toolyard.cli.console import err, out
from toolyard.cli.options import JsonOption, PrintConfigOption


def train(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Settings to change, e.g. steps=200 or rollout.sampling.temperature=0.8. Values are YAML.",
            show_default=False,
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            "-c",
            metavar="FILE",
            help="YAML file of settings. Default: a small model and the bundled word problems.",
            show_default=False,
        ),
    ] = None,
    out_dir: Annotated[
        str | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Folder for checkpoints, metrics, dumps and the model. Default: output_dir of the settings, or a new "
            "folder in training/.",
            show_default=False,
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the last checkpoint in that folder, if there is one.")
    ] = False,
    smoke: Annotated[
        bool,
        typer.Option(
            "--smoke", help="Train one step on one task with two short samples, to see that everything works."
        ),
    ] = False,
    print_config: PrintConfigOption = False,
    as_json: JsonOption = False,
) -> None:
    """Train a model with GRPO (TRL) on its own rollouts, with tools in the loop.

    Every step samples trajectories as `toolyard rollout` does, with the current weights, and learns from their
    rewards. The folder gets metrics.jsonl (one line per step), metrics.png, a dump of every step for `toolyard view`,
    checkpoints, and finally the model.

    Ctrl-C finishes the step, saves a checkpoint and exits with 130; a second Ctrl-C stops immediately. --resume
    continues from the last checkpoint, even after the process was killed.

    Examples:

    ```
    # a small model on this machine, for a few minutes
    toolyard train --out runs/first

    # one tiny step: does everything work here?
    toolyard train --smoke

    # a settings file, with some settings changed
    toolyard train -c train.yaml steps=500 rollout.n=16 lora.rank=32

    # a rollout's settings file instead of the built-in defaults
    toolyard train rollout_from=rollout.yaml rollout.n=8 --out runs/a

    # continue after a kill or an interrupt, or train longer
    toolyard train -c train.yaml --out runs/a --resume steps=1000

    # several GPUs
    accelerate launch --config_file fsdp.yaml \\
        $(command -v toolyard) train -c train.yaml --out runs/a

    # list all settings
    toolyard train --print-config
    ```
    """
    from toolyard.train.config import EMBEDDED, load_train_config

    given = list(overrides or ())
    if out_dir is not None:
        import json

        given.append(f"output_dir={json.dumps(out_dir)}")
    # The embedded settings override those of the rollout: they must not override the user's.
    is_custom = config is not None or any(override.startswith("rollout_from=") for override in given)
    loaded = load_train_config(config if is_custom else EMBEDDED, given, smoke=smoke)
    if print_config:
        import yaml

        typer.echo(yaml.safe_dump(loaded.model_dump(mode="json"), sort_keys=False, allow_unicode=True), nl=False)
        return
    from toolyard.cli.train.progress import print_result, run

    result, seconds = run(loaded, err(), resume=resume)
    if result is None:
        return
    print_result(result, loaded, seconds, None if as_json else out())
    if result.interrupted_by is not None:
        raise typer.Exit(128 + result.interrupted_by)
