"""`toolyard top`: a running rollout, live in the terminal."""

from __future__ import annotations

from typing import Annotated

import typer

from toolyard.cli.options import JsonOption


def top(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[URL|DIR]",
            help="Endpoint of a rollout that was started with --metrics-port, or the folder of its dump. Default: the "
            "newest such rollout in rollouts/.",
            show_default=False,
        ),
    ] = None,
    interval: Annotated[
        float, typer.Option(help="Seconds between updates.", metavar="SECONDS", min=0.1, max=60.0)
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print the current state and exit.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Watch a running rollout: progress, states, rates, nodes, servers, the limiter, and the slowest requests.

    Ctrl-C quits; the rollout continues. Exits when the rollout ends. If the output is not a terminal, or with
    --once or --json, it prints the current state and exits; rates are then means since the start.

    Examples:

    ```
    toolyard rollout rollout.yaml --metrics-port 9464 --out runs/a

    # in another terminal
    toolyard top runs/a
    toolyard top http://127.0.0.1:9464 --once
    toolyard top runs/a --json | jq .slowest
    ```
    """
    from toolyard.cli.top.watching import endpoint_of, print_once, watch

    url = endpoint_of(run)
    if once or as_json or not watch(url, interval):
        print_once(url, as_json=as_json)
