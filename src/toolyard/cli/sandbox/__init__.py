"""`toolyard sandbox`: serve it over HTTP, run one file in it, or be shown around."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal, cast

import typer

from toolyard.cli.console import complete, err, out

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Run programs safely: behind HTTP, from a file, or on a guided tour.",
)


class Isolation(StrEnum):
    """The words of `SandboxConfig.isolation`, kept here so that `--help` need not load the sandbox."""

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
        help="best: the highest level this machine grants. required: full isolation or an error. confined: without "
        "namespaces even where they work. none: unprotected, for programs you wrote yourself."
    ),
]
PythonOption = Annotated[
    Path | None,
    typer.Option(
        help="Interpreter of Python programs, with its site-packages: give models numpy, sympy or pandas by pointing "
        "to an environment that has them. Default: the one Toolyard runs in.",
        dir_okay=False,
        exists=True,
        show_default=False,
    ),
]
TokenOption = Annotated[
    str | None,
    typer.Option(
        help="Bearer token. Better given as TOOLYARD_SANDBOX_TOKEN: other users can read command lines.",
        show_default=False,
    ),
]


@app.command()
def serve(
    host: Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel="Network")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port to listen on; 0 picks a free one.", min=0, max=65535, rich_help_panel="Network")
    ] = 8080,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Accept requests for this host name as well, e.g. sandbox or *.example.com; repeat it for several. "
            "Loopback names, --host and, beyond loopback, IP addresses and this machine's name are always accepted.",
            metavar="NAME",
            rich_help_panel="Network",
            show_default=False,
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None,
        typer.Option(
            help="Serve HTTPS with this certificate (PEM).",
            dir_okay=False,
            exists=True,
            rich_help_panel="Network",
            show_default=False,
        ),
    ] = None,
    tls_key: Annotated[
        Path | None,
        typer.Option(
            help="Private key of --tls-cert (PEM, no password), if it is in another file.",
            dir_okay=False,
            exists=True,
            rich_help_panel="Network",
            show_default=False,
        ),
    ] = None,
    grace: Annotated[
        float,
        typer.Option(help="Seconds to let running programs finish after Ctrl-C.", min=0, rich_help_panel="Network"),
    ] = 10.0,
    token: Annotated[
        list[str] | None,
        typer.Option(
            help="Require this bearer token: SECRET or 'NAME SECRET'; repeat it for several clients. Prefer "
            "--token-file or TOOLYARD_SANDBOX_TOKEN: other users can read command lines.",
            metavar="TOKEN",
            rich_help_panel="Clients",
            show_default=False,
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="Read tokens from this file, one per line, like --token.",
            dir_okay=False,
            exists=True,
            rich_help_panel="Clients",
            show_default=False,
        ),
    ] = None,
    allow_remote: Annotated[
        bool,
        typer.Option(
            "--allow-remote",
            help="Listen beyond loopback without a token: anybody who can connect can run programs.",
            rich_help_panel="Clients",
        ),
    ] = False,
    max_in_flight_per_client: Annotated[
        int, typer.Option(help="Maximum requests in flight per client.", min=1, rich_help_panel="Clients")
    ] = 2048,
    max_timeout: Annotated[
        float,
        typer.Option(
            help="Maximum seconds a request may ask for, to run or to compile.",
            min=0.001,
            rich_help_panel="Request limits",
        ),
    ] = 3600.0,
    max_memory_mb: Annotated[
        int,
        typer.Option(help="Maximum memory a request may ask for, in MB.", min=1, rich_help_panel="Request limits"),
    ] = 16384,
    max_files: Annotated[
        int,
        typer.Option(
            help="Maximum files per request, and maximum names to fetch.", min=1, rich_help_panel="Request limits"
        ),
    ] = 4096,
    max_files_mb: Annotated[
        int, typer.Option(help="Maximum size of a request's files, in MB.", min=1, rich_help_panel="Request limits")
    ] = 64,
    max_request_mb: Annotated[
        int, typer.Option(help="Maximum size of a request body, in MB.", min=1, rich_help_panel="Request limits")
    ] = 64,
    max_request_seconds: Annotated[
        float,
        typer.Option(
            help="Maximum seconds for a request's headers to arrive, and for its body.",
            min=0.001,
            rich_help_panel="Request limits",
        ),
    ] = 60.0,
    max_buffered_mb: Annotated[
        int,
        typer.Option(
            help="Maximum memory for the bodies of all requests together, in MB.",
            min=1,
            rich_help_panel="Request limits",
        ),
    ] = 1024,
    workers: Annotated[
        int | None,
        typer.Option(
            help="Programs that run at the same time. Default: one for each processor.", min=1, show_default=False
        ),
    ] = None,
    isolation: IsolationOption = Isolation.BEST,
    python: PythonOption = None,
    preload: Annotated[
        list[str] | None,
        typer.Option(
            help="Packages to keep imported, e.g. numpy,pandas, so that programs using them start at once; repeat it "
            "for several sets. Common scientific packages are kept by default.",
            show_default=False,
        ),
    ] = None,
    read_only: Annotated[
        list[Path] | None,
        typer.Option(help="Let programs read this host path; repeat it for several.", exists=True, show_default=False),
    ] = None,
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Let programs in cuda and python_gpu use the machine's NVIDIA GPUs.")
    ] = False,
    run_timeout: Annotated[
        float,
        typer.Option(
            help="Seconds a program may run, unless its request says otherwise.",
            min=0.001,
            rich_help_panel="Request defaults",
        ),
    ] = 10.0,
    compile_timeout: Annotated[
        float,
        typer.Option(help="Seconds a compiler may run, likewise.", min=0.001, rich_help_panel="Request defaults"),
    ] = 10.0,
    memory_limit_mb: Annotated[
        int,
        typer.Option(help="Memory of a program in MB, likewise.", min=1, rich_help_panel="Request defaults"),
    ] = 1024,
    max_waiting: Annotated[
        int, typer.Option(help="Maximum programs waiting for a worker.", min=0, rich_help_panel="Back-pressure")
    ] = 4096,
    max_wait: Annotated[
        float,
        typer.Option(
            help="Maximum seconds to wait for a worker. verl's client gives up after 10.",
            min=0.001,
            rich_help_panel="Back-pressure",
        ),
    ] = 8.0,
    busy_status: Annotated[
        BusyStatus,
        typer.Option(
            help="Status for programs that cannot start in time. verl's client retries only 504 and scores others -1.",
            rich_help_panel="Back-pressure",
        ),
    ] = BusyStatus.GATEWAY_TIMEOUT,
    max_sessions: Annotated[int, typer.Option(help="Maximum open sessions.", min=0, rich_help_panel="Sessions")] = 128,
    max_sessions_per_client: Annotated[
        int, typer.Option(help="Maximum open sessions per client.", min=0, rich_help_panel="Sessions")
    ] = 64,
    session_idle: Annotated[
        float,
        typer.Option(help="Seconds after which an unused session is closed.", min=0.001, rich_help_panel="Sessions"),
    ] = 600.0,
) -> None:
    """Serve the sandbox with the HTTP API of SandboxFusion, until Ctrl-C.

    POST /run_code, POST /run_jupyter, POST /submit, GET /v1/ping, and besides /healthz and /metrics (Prometheus). A
    second Ctrl-C does not wait for running programs. Needs `pip install 'toolyard[server]'`.

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
    asked = {names: tuple(name.strip() for name in names.split(",") if name.strip()) for names in preload or ()}
    sandbox = LocalSandbox(
        SandboxConfig(
            workers=workers,
            isolation=isolation.value,
            python=str(python) if python else None,
            profiles={**embedded.profiles, **asked},
            read_only_paths=[str(path.resolve()) for path in read_only or ()],
            gpu=gpu,
            # Notebooks of /run_jupyter are sessions, too: those that clients keep open must not starve them.
            max_sessions=max_sessions + embedded.max_sessions,
            session_idle_seconds=session_idle,
        )
    )
    serve_with_summary(config, sandbox, out())


@app.command()
def run(
    file: Annotated[
        Path, typer.Argument(help="The program. - reads it from standard input.", allow_dash=True, show_default=False)
    ],
    args: Annotated[list[str] | None, typer.Argument(help="Its arguments.", show_default=False)] = None,
    language: Annotated[
        str | None, typer.Option("--language", "-l", help="Default: by the suffix of FILE.", show_default=False)
    ] = None,
    stdin: Annotated[
        Path | None,
        typer.Option(
            help="File it reads as standard input; - passes on ours. Default: none.",
            allow_dash=True,
            show_default=False,
        ),
    ] = None,
    timeout: Annotated[float, typer.Option("--timeout", "-t", help="Seconds it may run.", min=0.001)] = 10.0,
    compile_timeout: Annotated[float, typer.Option(help="Seconds its compiler may take.", min=0.001)] = 30.0,
    memory_mb: Annotated[
        int | None,
        typer.Option(
            help="Memory of all its processes together, in MB. A --url of another SandboxFusion server is told of it "
            "only if you set it.",
            min=1,
            show_default="1024",
        ),
    ] = None,
    isolation: IsolationOption = Isolation.BEST,
    python: PythonOption = None,
    url: Annotated[
        str | None,
        typer.Option(
            help="Run it there instead: `toolyard sandbox serve` or any SandboxFusion server.",
            metavar="SANDBOX_URL",
            show_default=False,
        ),
    ] = None,
    token: TokenOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything about the execution as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Leave out the verdict on stderr.")] = False,
) -> None:
    """Run one program in the sandbox; its output is printed as it was, and its verdict on stderr.

    Exits with the program's exit code; 124 when it was stopped at --timeout, 137 at --memory-mb, 128 + N when it died
    of signal N, 1 when it could not be run at all. There is no network inside, and of the host's files only the
    system's own.

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
        raise typer.BadParameter("--isolation and --python are the server's business when --url is given")
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
    """Be shown around: two dozen programs of several languages, good, failing, looping, hungry and hostile.

    Each is run in the embedded sandbox, and a table tells what became of it. Exits with 1 if one ended otherwise than
    it should. Languages without a toolchain on this machine are shown as such.
    """
    from toolyard.cli.sandbox.tour import take_tour
    from toolyard.sandbox.local import SandboxConfig

    config = SandboxConfig(isolation=isolation.value, python=str(python) if python else None)
    sys.exit(complete(take_tour(config, out())))
