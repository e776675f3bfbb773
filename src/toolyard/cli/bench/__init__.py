"""`toolyard bench`: how fast this machine runs model-written programs."""

from __future__ import annotations

from typing import Annotated

import typer

from toolyard.cli.console import complete, err, out
from toolyard.cli.options import JsonOption


def bench(
    seconds: Annotated[float, typer.Option(help="Seconds to measure each row.", min=0.2)] = 3.0,
    as_json: JsonOption = False,
) -> None:
    """Compare the speed of the embedded sandbox with plain subprocesses on this machine.

    The program prints one line. Rates depend on the load of the machine: compare the ratios. `make bench` in the
    repository measures more: other programs, HTTP, limits, tools, rollouts, and the embedded model.

    Examples:

    ```
    toolyard bench
    toolyard bench --seconds 10 --json
    ```
    """
    from toolyard.cli.bench.measurement import measure, print_rows

    print_rows(complete(measure(seconds, err())), None if as_json else out())
