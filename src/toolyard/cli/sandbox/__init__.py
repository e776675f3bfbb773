"""`toolyard sandbox`: serve it over HTTP, run one file in it, or take a tour."""

from __future__ import annotations

import sys
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, cast

import typer

from toolyard.cli.console import complete, err, out
from toolyard.cli.options import JsonOption, PythonOption

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Run programs safely: serve them over HTTP, run one file, or take a guided tour.",
)


class Isolation(StrEnum):
    """The values of `SandboxConfig.isolation`, repeated here so that `--help` need not load the sandbox."""

    BEST = "best"
    REQUIRED = "required"
    CONFINED = "confined"
    NONE = "none"


class BusyStatus(StrEnum):
    GATEWAY_TIMEOUT = "504"
    TOO_MANY_REQUESTS = "429"
    UNAVAILABLE = "503"


IsolationOption = Annotated[
    Isolation,
    typer.Option(
        help="best: the highest level this machine supports. required: full isolation, or an error. confined: without "
        "namespaces, even if they work. none: no protection, only for programs you wrote yourself."
    ),
]

_network = partial(typer.Option, rich_help_panel="Network")
_pem_file = partial(_network, metavar="FILE", dir_okay=False, exists=True)
_clients = partial(typer.Option, rich_help_panel="Clients")
_request_defaults = partial(typer.Option, rich_help_panel="Request defaults")
_request_limits = partial(typer.Option, rich_help_panel="Request limits")
_back_pressure = partial(typer.Option, rich_help_panel="Back-pressure")
_sessions = partial(typer.Option, rich_help_panel="Sessions")
_SHORTEST = 0.001
"""Minimum of options in seconds that must not be 0."""


@app.command()
def serve(
    host: Annotated[str, _network(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, _network(help="Port to listen on; 0 picks a free one.", min=0, max=65535)] = 8080,
    allow_host: Annotated[
        list[str] | None,
        _network(
            metavar="NAME",
            help="Also accept requests for this host name, e.g. sandbox or *.example.com; repeat it for several. "
            "Loopback names, --host and, beyond loopback, IP addresses and this machine's name are always accepted.",
        ),
    ] = None,
    tls_cert: Annotated[Path | None, _pem_file(help="Serve HTTPS with this certificate (PEM).")] = None,
    tls_key: Annotated[
        Path | None, _pem_file(help="Private key of --tls-cert (PEM, no password), if it is in another file.")
    ] = None,
    grace: Annotated[float, _network(help="Seconds to let running programs finish after Ctrl-C.", min=0)] = 10.0,
    token: Annotated[
        list[str] | None,
        _clients(
            metavar="TOKEN",
            help="Require this bearer token: SECRET or 'NAME SECRET'; repeat it for several clients. Prefer "
            "--token-file or TOOLYARD_SANDBOX_TOKEN: other users can read command lines.",
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        _clients(
            metavar="FILE", help="Read tokens from this file, one per line, like --token.", dir_okay=False, exists=True
        ),
    ] = None,
    allow_remote: Annotated[
        bool,
        _clients(
            "--allow-remote", help="Listen beyond loopback without a token: anyone who can connect can run programs."
        ),
    ] = False,
    max_in_flight_per_client: Annotated[int, _clients(help="Maximum requests in flight per client.", min=1)] = 2048,
    max_timeout: Annotated[
        float, _request_limits(help="Maximum run or compile time a request may ask for, in seconds.", min=_SHORTEST)
    ] = 3600.0,
    max_memory_mb: Annotated[int, _request_limits(help="Maximum memory a request may ask for, in MB.", min=1)] = 16384,
    max_files: Annotated[
        int, _request_limits(help="Maximum files a request may send, and maximum files it may fetch.", min=1)
    ] = 4096,
    max_files_mb: Annotated[int, _request_limits(help="Maximum total size of a request's files, in MB.", min=1)] = 64,
    max_request_mb: Annotated[int, _request_limits(help="Maximum size of a request body, in MB.", min=1)] = 64,
    max_request_seconds: Annotated[
        float,
        _request_limits(help="Maximum seconds for a request's headers to arrive, and for its body.", min=_SHORTEST),
    ] = 60.0,
    max_buffered_mb: Annotated[
        int, _request_limits(help="Maximum memory for the bodies of all requests together, in MB.", min=1)
    ] = 1024,
    workers: Annotated[
        int | None, typer.Option(help="Programs to run at the same time. Default: one per processor.", min=1)
    ] = None,
    isolation: IsolationOption = Isolation.BEST,
    python: PythonOption = None,
    preload: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAMES",
            help="Packages to import in advance, e.g. numpy,pandas, so that programs using them start "
            "immediately; repeat it for several sets. Common scientific packages are preloaded by default.",
        ),
    ] = None,
    read_only: Annotated[
        list[Path] | None,
        typer.Option(metavar="PATH", help="Let programs read this host path; repeat it for several.", exists=True),
    ] = None,
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Let cuda and python_gpu programs use the machine's NVIDIA GPUs.")
    ] = False,
    run_timeout: Annotated[float, _request_defaults(help="Seconds a program may run.", min=_SHORTEST)] = 10.0,
    compile_timeout: Annotated[float, _request_defaults(help="Seconds a compiler may run.", min=_SHORTEST)] = 10.0,
    memory_limit_mb: Annotated[int, _request_defaults(help="Memory of a program, in MB.", min=1)] = 1024,
    max_waiting: Annotated[int, _back_pressure(help="Maximum programs waiting for a worker.", min=0)] = 4096,
    max_wait: Annotated[
        float,
        _back_pressure(help="Maximum seconds to wait for a worker. verl's client gives up after 10.", min=_SHORTEST),
    ] = 8.0,
    busy_status: Annotated[
        BusyStatus,
        _back_pressure(
            help="HTTP status for programs that cannot start in time. verl's client retries only 504 and scores "
            "others -1."
        ),
    ] = BusyStatus.GATEWAY_TIMEOUT,
    max_sessions: Annotated[int, _sessions(help="Maximum open sessions.", min=0)] = 128,
    max_sessions_per_client: Annotated[int, _sessions(help="Maximum open sessions per client.", min=0)] = 64,
    session_idle: Annotated[
        float, _sessions(help="Seconds after which an unused session is closed.", min=_SHORTEST)
    ] = 600.0,
) -> None:
    """Serve the sandbox over SandboxFusion's HTTP API, until Ctrl-C.

    Serves POST /run_code, /run_cases, /run_jupyter and /submit, /v1/sessions and GET /v1/ping, plus /healthz and
    /metrics (Prometheus). A
    second Ctrl-C stops without waiting for running programs. Needs `pip install 'toolyard[server]'`.

    Examples:

    ```
    toolyard sandbox serve
    toolyard sandbox serve --workers 32 --python /opt/science/bin/python
    TOOLYARD_SANDBOX_TOKEN=secret toolyard sandbox serve --host 0.0.0.0 --isolation required
    toolyard sandbox serve --host 0.0.0.0 --token-file tokens.txt --tls-cert cert.pem --tls-key key.pem
    curl localhost:8080/run_code -H 'Content-Type: application/json' -d '{"code": "print(6 * 7)", "language": "python"}'
    ```
    """
    from toolyard import settings
    from toolyard.cli.sandbox.serve import serve_with_summary
    from toolyard.sandbox.local import LocalSandbox, SandboxConfig
    from toolyard.sandbox.protocol import MIB, Limits
    from toolyard.sandbox.service.server import ServiceConfig, read_tokens

    lines = [*(token or ()), *(token_file.read_text(errors="replace").splitlines() if token_file else ())]
    if not (token or token_file):
        lines = [settings.sandbox_token() or "", *settings.sandbox_tokens()]
    defaults = ServiceConfig()
    config = ServiceConfig(
        host=host,
        port=port,
        allow_hosts=tuple(allow_host or ()),
        tokens=read_tokens(lines) if any(lines) or token_file else (),
        allow_remote=allow_remote,
        tls_cert=tls_cert,
        tls_key=tls_key,
        max_in_flight_per_client=max_in_flight_per_client,
        max_waiting=max_waiting,
        max_wait_seconds=max_wait,
        busy_status=cast("Literal[504, 429, 503]", int(busy_status)),
        max_request_bytes=max_request_mb * MIB,
        max_request_seconds=max_request_seconds,
        max_buffered_bytes=max_buffered_mb * MIB,
        max_files=max_files,
        max_file_bytes=max_files_mb * MIB,
        max_limits=defaults.max_limits.model_copy(
            update={"run_seconds": max_timeout, "compile_seconds": max_timeout, "memory_bytes": max_memory_mb * MIB}
        ),
        limits=Limits(run_seconds=run_timeout, compile_seconds=compile_timeout, memory_bytes=memory_limit_mb * MIB),
        max_sessions=max_sessions,
        max_sessions_per_client=max_sessions_per_client,
        session_idle_seconds=session_idle,
        grace_seconds=grace,
    )
    embedded = SandboxConfig()
    preloaded = {names: tuple(name.strip() for name in names.split(",") if name.strip()) for names in preload or ()}
    sandbox = LocalSandbox(
        SandboxConfig(
            workers=workers,
            isolation=isolation.value,
            python=str(python) if python else None,
            profiles={**embedded.profiles, **preloaded},
            read_only_paths=[str(path.resolve()) for path in read_only or ()],
            gpu=gpu,
            # /run_jupyter opens sessions, too: those that clients keep open must not starve it.
            max_sessions=max_sessions + embedded.max_sessions,
            session_idle_seconds=session_idle,
        )
    )
    serve_with_summary(config, sandbox, out())


@app.command()
def run(
    file: Annotated[
        Path, typer.Argument(help="The program; - reads it from standard input.", allow_dash=True, show_default=False)
    ],
    args: Annotated[list[str] | None, typer.Argument(help="Arguments of the program.", show_default=False)] = None,
    language: Annotated[
        str | None,
        typer.Option(
            "--language", "-l", help="Language of the program. Default: by the suffix of FILE.", show_default=False
        ),
    ] = None,
    stdin: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Standard input of the program; - passes this command's. Default: empty.",
            allow_dash=True,
            show_default=False,
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", "-t", help="Seconds the program may run.", min=_SHORTEST)
    ] = 10.0,
    compile_timeout: Annotated[float, typer.Option(help="Seconds its compiler may run.", min=_SHORTEST)] = 30.0,
    memory_mb: Annotated[
        int | None,
        typer.Option(
            help="Memory of all its processes together, in MB. Sent to --url only if you set it.",
            min=1,
            show_default="1024",
        ),
    ] = None,
    isolation: IsolationOption = Isolation.BEST,
    python: PythonOption = None,
    url: Annotated[
        str | None,
        typer.Option(
            help="Run it on this server: `toolyard sandbox serve` or any SandboxFusion server.",
            metavar="SANDBOX_URL",
            show_default=False,
        ),
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(
            help="Bearer token for --url. Prefer TOOLYARD_SANDBOX_TOKEN: other users can read command lines.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not print the verdict on stderr.")] = False,
) -> None:
    """Run one program in the sandbox. Its output is printed unchanged, its verdict on stderr.

    Exits with the program's exit code; 124 if it was stopped at --timeout, 137 at --memory-mb, 128 + N if it was
    killed by signal N, 1 if it could not be run at all. Programs have no network, and see only the system files of
    the host.

    Examples:

    ```
    toolyard sandbox run hello.py
    toolyard sandbox run solve.cpp --stdin case1.txt --timeout 2
    echo 'puts gets.to_i * 2' | toolyard sandbox run - -l ruby --stdin number.txt
    toolyard sandbox run hello.py --url http://127.0.0.1:8080 --json
    ```
    """
    from toolyard.cli.sandbox.run import Where, print_execution, read_program, run_program
    from toolyard.sandbox.protocol import MIB, Limits

    if url and (python or isolation is not Isolation.BEST):
        raise typer.BadParameter("--isolation and --python cannot be used with --url: the server decides them")
    if str(file) == "-" and str(stdin) == "-":
        raise typer.BadParameter("the program and its input cannot both come from standard input")
    limits = Limits(run_seconds=timeout, compile_seconds=compile_timeout)
    if memory_mb is not None:
        limits = limits.model_copy(update={"memory_bytes": memory_mb * MIB})
    program = read_program(file, language, stdin, args or [])
    where = Where(url=url, token=token, isolation=isolation.value, python=str(python) if python else None)
    execution = complete(run_program(program, limits, where))
    raise typer.Exit(print_execution(execution, limits, as_json=as_json, verdict_on=None if quiet else err()))


@app.command()
def tour(isolation: IsolationOption = Isolation.BEST, python: PythonOption = None) -> None:
    """Run two dozen programs in several languages: correct, failing, endless, greedy and hostile ones.

    A table shows how each of them ended. Exits with 1 if one did not end as expected. Programs in languages without
    a toolchain on this machine are listed, but not run.
    """
    from toolyard.cli.sandbox.tour import take_tour
    from toolyard.sandbox.local import SandboxConfig

    config = SandboxConfig(isolation=isolation.value, python=str(python) if python else None)
    sys.exit(complete(take_tour(config, out())))
