"""`toolyard rollout`: sample trajectories, with tools in the loop."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from toolyard.cli.console import INTERRUPTED, complete, err, out
from toolyard.cli.options import JsonOption, PrintConfigOption, as_overrides

_task_option = partial(typer.Option, rich_help_panel="Tasks and tools")
_model_option = partial(typer.Option, rich_help_panel="Model")
_run_option = partial(typer.Option, rich_help_panel="Run")
_watch_option = partial(typer.Option, rich_help_panel="Watching")


def rollout(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CONFIG.yaml]",
            help="YAML file of settings. Default: a small model on the CPU and the bundled word problems.",
            show_default=False,
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        _task_option(
            help="A .jsonl or .parquet file of tasks, a folder of them (FOLDER:SPLIT), hf://OWNER/NAME/CONFIG:SPLIT, "
            "or `word-problems`."
        ),
    ] = None,
    limit: Annotated[int | None, _task_option(help="Use only the first N tasks.", metavar="N", min=1)] = None,
    tools: Annotated[
        str | None, _task_option(metavar="FILE", help="YAML file of tools. Default: only code_interpreter.")
    ] = None,
    reward: Annotated[
        str | None,
        _task_option(
            metavar="SPEC",
            help="Final reward: gsm8k, gsm8k:strict, math, code, code:fraction, code:continuous, judge (a language "
            "model), default (by data source), none, or module:function with verl's compute_score signature.",
        ),
    ] = None,
    reward_options: Annotated[
        list[str] | None,
        _task_option(
            "--reward-option",
            metavar="KEY=VALUE",
            help="Setting of the reward, e.g. memory_limit_mb=512, or keyword argument of its function; repeat it for "
            "several.",
        ),
    ] = None,
    agent: Annotated[
        str | None,
        _task_option(
            metavar="COMMAND",
            help="Run your own agent: a command such as 'python agent.py {task}', or package.module:function. "
            "The model's URL is in OPENAI_BASE_URL and ANTHROPIC_BASE_URL.",
        ),
    ] = None,
    skip_bad_rows: Annotated[
        bool | None, _task_option("--skip-bad-rows", help="Skip invalid rows instead of stopping.")
    ] = None,
    engine: Annotated[
        str | None, _model_option(help="transformers (embedded), sglang, vllm, openai, scripted, or replay.")
    ] = None,
    model: Annotated[
        str | None,
        _model_option(
            help="`smollm2-135m`, a folder, a .gguf file, or a Hugging Face id. With a server: the model whose "
            "tokenizer it uses."
        ),
    ] = None,
    url: Annotated[list[str] | None, _model_option(help="Server URL; repeat it for several servers.")] = None,
    chat_format: Annotated[
        str | None, _model_option("--format", help="How tool calls are written: auto, code_block, hermes, …")
    ] = None,
    temperature: Annotated[float | None, _model_option(help="Sampling temperature.", min=0.0)] = None,
    max_tokens: Annotated[int | None, _model_option(help="Maximum tokens per assistant message.", min=1)] = None,
    n: Annotated[int | None, _run_option("--n", "-n", help="Samples per task.", min=1)] = None,
    out_dir: Annotated[
        str | None,
        _run_option(
            "--out",
            metavar="DIR",
            help="Write trajectories to DIR/STEP.jsonl. If DIR has some already, only the missing ones are sampled. "
            "Default: a new folder in rollouts/.",
        ),
    ] = None,
    retry_failed: Annotated[
        bool | None, _run_option("--retry-failed", help="Sample failed trajectories in DIR again.")
    ] = None,
    accept_changes: Annotated[
        bool | None,
        _run_option(
            "--accept-changes",
            help="Continue a DIR started with different settings or tasks. Each new line records the changes.",
        ),
    ] = None,
    step: Annotated[int | None, _run_option(help="Training step to write into the dump.", min=0)] = None,
    seed: Annotated[int | None, _run_option(help="Seed for sampling.")] = None,
    concurrency: Annotated[
        int | None,
        _run_option(
            help="Maximum requests at the same time. Default: 256; with the embedded engine, twice its batch size.",
            min=1,
        ),
    ] = None,
    ray: Annotated[
        str | None,
        _run_option(
            metavar="[ADDRESS]",
            help="Run on a Ray cluster: the one this machine belongs to, host:port, or `local` for a new one on this "
            "machine only.",
        ),
    ] = None,
    faults: Annotated[
        str | None,
        _run_option(
            metavar="PROFILE",
            help="Inject faults on purpose: flaky-engine, flaky-tools, chaos, or a YAML file of your own.",
        ),
    ] = None,
    record: Annotated[
        str | None, _run_option(metavar="TAPE", help="Record all model outputs and tool results to this file.")
    ] = None,
    replay: Annotated[
        str | None,
        _run_option(metavar="TAPE", help="Replay a recorded run bit for bit, without a model or tools."),
    ] = None,
    metrics_port: Annotated[
        int | None,
        _watch_option(
            metavar="PORT",
            help="Serve metrics for Prometheus and `toolyard top` on this port of 127.0.0.1; 0: any free one.",
            min=0,
            max=65535,
        ),
    ] = None,
    log_format: Annotated[
        str | None,
        _watch_option(
            metavar="FORMAT", help="Log the run as `text` or `json`; json without --log-file replaces the progress."
        ),
    ] = None,
    log_file: Annotated[
        str | None, _watch_option(metavar="FILE", help="Append logs to this file instead of writing them to stderr.")
    ] = None,
    otel: Annotated[
        str | None,
        _run_option(
            metavar="URL",
            help="Send traces to this OpenTelemetry collector (OTLP over HTTP), e.g. http://127.0.0.1:4318, or `env` "
            "for the one in OTEL_EXPORTER_OTLP_ENDPOINT.",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        _run_option(
            "--set",
            metavar="KEY=VALUE",
            help="Any other setting, e.g. limits.response_length=2048; repeat it for several. Values are YAML.",
        ),
    ] = None,
    print_config: PrintConfigOption = False,
    as_json: JsonOption = False,
) -> None:
    """Sample trajectories: a model works on tasks, calls tools and is rewarded. Writes token-exact JSON lines.

    Prompts of your own --tasks are used unchanged. Ctrl-C stops cleanly: finished trajectories are in the dump, and
    the same command continues from there. Exits with 1 if no trajectory was completed, or if the run cannot account
    for every request.

    Examples:

    ```
    # a small model on this CPU: 8 problems, 2 samples each
    toolyard rollout

    # a server, GSM8K, groups of 8
    toolyard rollout --engine sglang --url http://127.0.0.1:30000 \\
        --model Qwen/Qwen2.5-3B-Instruct --tasks gsm8k.parquet \\
        --tools tools.yaml --n 8 --out runs/a

    # a settings file, with one setting changed
    toolyard rollout rollout.yaml --set sampling.top_p=0.95

    # an agent of your own, on the OpenAI SDK or any other
    toolyard rollout rollout.yaml --agent 'python agent.py {task}'

    # the same on all nodes of a Ray cluster
    toolyard rollout rollout.yaml --ray --out /shared/runs/a

    # with metrics; `toolyard top runs/a` shows them live
    toolyard rollout rollout.yaml --metrics-port 9464 --out runs/a

    # see which trajectories survive when the engine, tools and sandbox fail at random
    toolyard rollout --faults chaos

    # record a run, then replay it without the model and the sandbox
    toolyard rollout --record a.tape --out runs/a
    toolyard rollout --replay a.tape --out runs/b
    ```
    """
    from toolyard.cli.rollout.progress import default_folder, embedded_defaults, run
    from toolyard.cli.rollout.report import print_result
    from toolyard.rollout.config import EMBEDDED, OVERRIDES_FOR_OWN_TASKS, load_config

    given: dict[str, Any] = {
        "tasks.path": tasks,
        "tasks.limit": limit,
        "tasks.skip_bad_rows": skip_bad_rows,
        "tools": tools,
        "rewards.final": reward,
        "agent.run": agent,
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
        "cluster.address": ray,
        "metrics.port": metrics_port,
        "logs.format": log_format,
        "logs.file": log_file,
        "faults": faults,
        "record": record,
        "replay": replay,
        "otel": otel,
    }
    embedded = config is None and engine is None and model is None
    changed = [*OVERRIDES_FOR_OWN_TASKS] if embedded and tasks is not None else []
    changed += [*as_overrides(given), *(f"rewards.options.{option}" for option in reward_options or ())]
    loaded = load_config(EMBEDDED if embedded else config, [*changed, *(settings or ())])
    if print_config:
        import yaml

        typer.echo(yaml.safe_dump(loaded.model_dump(mode="json"), sort_keys=False, allow_unicode=True), nl=False)
        return
    is_new_folder = loaded.rollout_data_dir is None
    if is_new_folder:
        loaded = loaded.model_copy(update={"rollout_data_dir": default_folder()})
    console = err()
    logs = loaded.logs
    console.quiet = logs is not None and logs.format == "json" and logs.file is None  # every line of stderr is JSON
    if embedded:
        told = f"embedded defaults: {embedded_defaults(loaded)}"
        console.print(told, style="dim", markup=False, soft_wrap=not console.is_terminal)
    result, interrupted, seconds = complete(run(loaded, console))
    print_result(result, loaded, seconds, None if as_json else out(), is_new_folder=is_new_folder)
    if interrupted:
        raise typer.Exit(INTERRUPTED)
    result.accounting.check()
    if not result.summary.completed and not result.done_before:
        raise typer.Exit(1)
