"""`toolyard rollout`: the main job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from toolyard.cli.console import INTERRUPTED, complete, err, out

_TASKS, _ENGINE, _RUN = "Tasks and tools", "Model", "The run"


def rollout(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CONFIG.yaml]",
            help="Settings. Default: the embedded ones, a small model on the CPU and the bundled word problems.",
            show_default=False,
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(help="A .jsonl or .parquet file of tasks, or `word-problems`.", rich_help_panel=_TASKS),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="The first so many tasks.", min=1, rich_help_panel=_TASKS)] = None,
    tools: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="YAML file of tools. Default: code_interpreter alone.", rich_help_panel=_TASKS
        ),
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option(
            metavar="SPEC",
            help="The final reward: gsm8k, gsm8k:strict, math, code, code:fraction, code:continuous, default (by data "
            "source), none, or module:function with verl's compute_score signature.",
            rich_help_panel=_TASKS,
        ),
    ] = None,
    reward_options: Annotated[
        list[str] | None,
        typer.Option(
            "--reward-option",
            metavar="KEY=VALUE",
            help="A setting of it, as in --reward-option memory_limit_mb=512; of a function, a keyword argument.",
            rich_help_panel=_TASKS,
        ),
    ] = None,
    skip_bad_rows: Annotated[
        bool | None, typer.Option("--skip-bad-rows", help="Leave out rows that are wrong.", rich_help_panel=_TASKS)
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(help="transformers (embedded), sglang, vllm, openai, scripted, replay.", rich_help_panel=_ENGINE),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="`smollm2-135m`, a folder, a .gguf file or a hub id; with a server: whose tokenizer it uses.",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    url: Annotated[
        list[str] | None, typer.Option(help="Of the server; several times for several.", rich_help_panel=_ENGINE)
    ] = None,
    chat_format: Annotated[
        str | None,
        typer.Option("--format", help="How calls are written: auto, code_block, hermes, …", rich_help_panel=_ENGINE),
    ] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, rich_help_panel=_ENGINE)] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Of one message of the assistant.", min=1, rich_help_panel=_ENGINE)
    ] = None,
    n: Annotated[
        int | None, typer.Option("--n", "-n", help="Samples of each task.", min=1, rich_help_panel=_RUN)
    ] = None,
    out_dir: Annotated[
        str | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Where to dump trajectories, as DIR/STEP.jsonl. Run again with the same DIR, and only those that "
            "are missing are played. Default: a new folder below rollouts/.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    retry_failed: Annotated[
        bool | None, typer.Option("--retry-failed", help="Also play those again that failed.", rich_help_panel=_RUN)
    ] = None,
    accept_changes: Annotated[
        bool | None,
        typer.Option(
            "--accept-changes",
            help="Go on with a DIR that was begun with other settings or tasks. Every new line names the changes.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    step: Annotated[int | None, typer.Option(help="The training step.", min=0, rich_help_panel=_RUN)] = None,
    seed: Annotated[int | None, typer.Option(help="Of everything sampled.", rich_help_panel=_RUN)] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            help="Requests at once. Default: 256; with the embedded engine, twice what it samples at the same time.",
            min=1,
            rich_help_panel=_RUN,
        ),
    ] = None,
    record: Annotated[
        str | None,
        typer.Option(metavar="TAPE", help="Record everything that is not decided here.", rich_help_panel=_RUN),
    ] = None,
    replay: Annotated[
        str | None,
        typer.Option(metavar="TAPE", help="Play a tape: no model, no tools, bit for bit.", rich_help_panel=_RUN),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Any other setting, as in --set limits.response_length=2048. Values are YAML.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the settings as they would be used, and exit.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Play tasks: a model answers, calls tools, gets its rewards; trajectories are dumped, token-exact, as JSON lines.

    With your own --tasks, prompts are played as they are. Ctrl-C ends the run cleanly: what has ended is in the dump,
    and the same command goes on from there. Exits with 1 if nothing could be completed, or if the run cannot account
    for every request.

    Examples:

    ```
    # a small model on this CPU, 8 problems, 2 samples each
    toolyard rollout

    # a server, GSM8K, groups of 8
    toolyard rollout --engine sglang --url http://127.0.0.1:30000 \\
        --model Qwen/Qwen2.5-3B-Instruct --tasks gsm8k.parquet \\
        --tools tools.yaml --n 8 --out runs/a

    # settings of a file, one of them changed
    toolyard rollout rollout.yaml --set sampling.top_p=0.95

    # record, and play it again without model and sandbox
    toolyard rollout --record a.tape --out runs/a
    toolyard rollout --replay a.tape --out runs/b
    ```
    """
    from toolyard.cli.rollout.progress import default_folder, embedded_defaults, print_result, run
    from toolyard.rollout.config import EMBEDDED, OVERRIDES_FOR_OWN_TASKS, load_config

    given: dict[str, Any] = {
        "tasks.path": tasks,
        "tasks.limit": limit,
        "tasks.skip_bad_rows": skip_bad_rows,
        "tools": tools,
        "rewards.final": reward,
        "engine.kind": engine,
        "engine.model": model,
        "engine.urls": url or None,
        "chat.format": chat_format,
        "sampling.temperature": temperature,
        "sampling.max_tokens": max_tokens,
        "n": n,
        "rollout_data_dir": out_dir,
        "retry_failed": retry_failed,
        "accept_changes": accept_changes,
        "step": step,
        "seed": seed,
        "concurrency": concurrency,
        "record": record,
        "replay": replay,
    }
    embedded = config is None and engine is None and model is None
    changed = [*OVERRIDES_FOR_OWN_TASKS] if embedded and tasks is not None else []
    changed += [*settings_of(given), *(f"rewards.options.{option}" for option in reward_options or ())]
    loaded = load_config(EMBEDDED if embedded else config, [*changed, *(settings or ())])
    if print_config:
        import yaml

        typer.echo(yaml.safe_dump(loaded.model_dump(mode="json"), sort_keys=False, allow_unicode=True), nl=False)
        return
    if loaded.rollout_data_dir is None:
        loaded = loaded.model_copy(update={"rollout_data_dir": default_folder()})
    if embedded:
        err().print(f"embedded defaults: {embedded_defaults(loaded)}", style="dim", markup=False)
    result, interrupted, seconds = complete(run(loaded, err()))
    print_result(result, seconds, None if as_json else out())
    if interrupted:
        raise typer.Exit(INTERRUPTED)
    result.accounting.check()
    if not result.summary.completed and not result.done_before:
        raise typer.Exit(1)


def settings_of(given: dict[str, Any]) -> list[str]:
    """Options that were given, as `load_config` takes them."""
    import json

    return [f"{key}={json.dumps(value)}" for key, value in given.items() if value is not None]
