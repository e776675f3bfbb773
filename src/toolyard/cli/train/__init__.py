"""`toolyard train`: GRPO with our rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from toolyard.cli.console import err, out


def train(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Settings to change, as in steps=200 or rollout.sampling.temperature=0.8. Values are YAML.",
            show_default=False,
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            "-c",
            metavar="FILE",
            help="Settings. Default: the embedded ones, a small model and the bundled word problems.",
            show_default=False,
        ),
    ] = None,
    out_dir: Annotated[
        str | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Where checkpoints, metrics, dumps and the model go. Default: as the settings say, or a new folder "
            "below training/.",
            show_default=False,
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint in that folder, if there is one.")
    ] = False,
    smoke: Annotated[
        bool,
        typer.Option("--smoke", help="One step of one task with two short samples: does everything work together?"),
    ] = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the settings as they would be used, and exit.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Train a model by GRPO (TRL) on its own rollouts, with tools in the loop.

    Every step plays tasks as `toolyard rollout` does, with the weights of that step, and learns from the rewards. The
    folder has metrics.jsonl (a line a step) and metrics.png, a dump of every step for `toolyard view`, checkpoints,
    and in the end the model.

    Ctrl-C finishes the step, saves a checkpoint and exits with 130; again, it stops at once. --resume goes on from the
    last checkpoint, also after a kill.

    Examples:

    ```
    # a small model, this machine, some minutes
    toolyard train --out runs/first

    # does it all work here? one tiny step
    toolyard train --smoke

    # settings of a file, some of them changed
    toolyard train -c train.yaml steps=500 rollout.n=16 lora.rank=32

    # on a file of `toolyard rollout`, with none of the embedded settings
    toolyard train rollout_from=rollout.yaml rollout.n=8 --out runs/a

    # killed, interrupted, or to be trained for longer
    toolyard train -c train.yaml --out runs/a --resume steps=1000

    # several GPUs
    accelerate launch --config_file fsdp.yaml \\
        $(command -v toolyard) train -c train.yaml --out runs/a

    # what there is to set
    toolyard train --print-config
    ```
    """
    from toolyard.train.config import EMBEDDED, load_train_config

    given = list(overrides or ())
    if out_dir is not None:
        import json

        given.append(f"output_dir={json.dumps(out_dir)}")
    # Those are changes to the embedded rollouts, and would change any others as well.
    is_own = config is not None or any(override.startswith("rollout_from=") for override in given)
    loaded = load_train_config(config if is_own else EMBEDDED, given, smoke=smoke)
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
