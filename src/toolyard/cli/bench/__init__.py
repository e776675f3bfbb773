"""`toolyard bench`: how fast this machine runs model-written programs."""

from __future__ import annotations

from typing import Annotated

import typer

from toolyard.cli.console import complete, err, out


def bench(
    seconds: Annotated[float, typer.Option(help="For each row.", min=0.2)] = 3.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
) -> None:
    """Measure the embedded sandbox beside plain subprocesses, on this machine, in one run.

    The program prints one line. Rates depend on what else runs: look at the ratios. The benchmarks of the repository
    (`make bench`) measure more: other programs, HTTP, limits, tools, rollouts, the embedded model.

    Examples:

    ```
    toolyard bench
    toolyard bench --seconds 10 --json
    ```
    """
    from toolyard.cli.bench.measurement import measure, print_rows

    print_rows(complete(measure(seconds, err())), None if as_json else out())
