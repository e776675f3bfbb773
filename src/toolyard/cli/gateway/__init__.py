"""`toolyard gateway`: OpenAI's and Anthropic's APIs in front of an engine, recording exact tokens."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from toolyard.cli.console import err

_model_option = partial(typer.Option, rich_help_panel="Model")
_session_option = partial(typer.Option, rich_help_panel="Sessions")
_server_option = partial(typer.Option, rich_help_panel="Server")


def gateway(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CONFIG.yaml]",
            help="Settings file of a rollout; engine, chat and sampling are used. Default: a small model on the CPU.",
            show_default=False,
        ),
    ] = None,
    engine: Annotated[str | None, _model_option(help="transformers (embedded), sglang, vllm or scripted.")] = None,
    model: Annotated[
        str | None,
        _model_option(
            help="`smollm2-135m`, a folder, a .gguf file, or a Hugging Face id. With a server: the model whose "
            "tokenizer it uses."
        ),
    ] = None,
    url: Annotated[list[str] | None, _model_option(help="Engine URL; repeat it for several servers.")] = None,
    chat_format: Annotated[
        str | None, _model_option("--format", help="How tool calls are written: auto, code_block, hermes, …")
    ] = None,
    temperature: Annotated[
        float | None, _model_option(help="Sampling temperature, if a request sets none.", min=0.0)
    ] = None,
    max_tokens: Annotated[int | None, _model_option(help="Maximum tokens per answer.", min=1)] = None,
    fixed_sampling: Annotated[
        bool,
        _model_option(
            "--fixed-sampling", help="Ignore the temperature, top_p, top_k, min_p and seed that requests ask for."
        ),
    ] = False,
    settings: Annotated[
        list[str] | None,
        _model_option("--set", metavar="KEY=VALUE", help="Any other setting of a rollout, e.g. sampling.top_p=0.95."),
    ] = None,
    out_dir: Annotated[
        str | None,
        _session_option("--out", metavar="DIR", help="Write each branch of ended sessions to DIR/STEP.jsonl."),
    ] = None,
    max_turns: Annotated[int | None, _session_option(help="Maximum sampled messages per session.", min=1)] = None,
    max_seconds: Annotated[float | None, _session_option(help="Maximum seconds per session.", min=0.001)] = None,
    max_model_len: Annotated[
        int | None, _session_option(help="Maximum tokens of prompt and answer together.", min=1)
    ] = None,
    idle_seconds: Annotated[
        float, _session_option(help="Seconds without a request that end a session.", min=0.001)
    ] = 600.0,
    host: Annotated[str, _server_option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, _server_option(help="Port; 0: any free one.", min=0, max=65535)] = 8090,
    token: Annotated[
        list[str] | None,
        _server_option(
            help="API key that clients need; repeat it for several. Also from TOOLYARD_GATEWAY_TOKEN, which `ps` does "
            "not show. Required beyond loopback."
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None, _server_option(help="Accept requests for this host name, too; *.example.com for a domain.")
    ] = None,
) -> None:
    """Serve OpenAI's and Anthropic's APIs, and record the exact tokens of every conversation.

    Agents need only a base URL. Each agent run is a session, named in the URL (http://127.0.0.1:8090/s/NAME/v1), in the
    header X-Toolyard-Session, or by the API key. A request that continues a conversation extends its tokens; anything
    else begins a branch. End a session with a score to write its branches to the dump:
    POST /sessions/NAME/end {"score": 1.0}.

    To run an agent on many tasks, use `toolyard rollout --agent`, which has a gateway of its own.

    Examples:

    ```
    # a small model on this CPU
    toolyard gateway --out runs/a

    # a vLLM server
    toolyard gateway --engine vllm --url http://127.0.0.1:8000 \\
        --model Qwen/Qwen2.5-3B-Instruct --out runs/a

    # an unmodified agent
    OPENAI_BASE_URL=http://127.0.0.1:8090/s/try-1/v1 OPENAI_API_KEY=x python agent.py
    curl -X POST http://127.0.0.1:8090/sessions/try-1/end \\
        -H 'content-type: application/json' -d '{"score": 1.0}'
    ```
    """
    from toolyard import settings as environment
    from toolyard.cli.gateway.serve import serve
    from toolyard.cli.options import as_overrides
    from toolyard.gateway.config import GatewayConfig, SessionLimits
    from toolyard.rollout.config import EMBEDDED, load_config

    given: dict[str, Any] = {
        "engine.kind": engine,
        "engine.model": model,
        "engine.urls": url or None,
        "chat.format": chat_format,
        "sampling.temperature": temperature,
        "sampling.max_tokens": max_tokens,
    }
    embedded = config is None and engine is None and model is None
    loaded = load_config(EMBEDDED if embedded else config, [*as_overrides(given), *(settings or ())])
    serving = GatewayConfig(
        host=host,
        port=port,
        allow_hosts=tuple(allow_host or ()),
        tokens=tuple(token or environment.gateway_tokens()),
        sampling=loaded.sampling,
        fixed_sampling=fixed_sampling,
        limits=SessionLimits(
            max_turns=max_turns, max_seconds=max_seconds, max_model_len=max_model_len, idle_seconds=idle_seconds
        ),
    )
    serve(loaded, serving, out_dir, err())
