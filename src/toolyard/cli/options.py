"""Options that several commands share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand


class RayCommand(TyperCommand):
    """The value of `--ray` may be left out."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for place, arg in enumerate(args):
            following = args[place + 1] if place + 1 < len(args) else ""
            if arg == "--ray" and not (":" in following or following in ("auto", "local")):
                args = [*args[:place], "--ray=auto", *args[place + 1 :]]
                break
        return super().parse_args(ctx, args)


JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
PrintConfigOption = Annotated[
    bool, typer.Option("--print-config", help="Print the resulting settings as YAML and exit.")
]
PythonOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Interpreter for Python programs; they can import its site-packages, such as numpy or sympy. "
        "Default: the one that runs Toolyard.",
        dir_okay=False,
        exists=True,
        show_default=False,
    ),
]
TokenizerOption = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL_OR_PATH",
        help="Tokenizer of the model that sampled the dump, to show tokens as text. Default: the embedded model's, "
        "if it made the dump.",
        show_default=False,
    ),
]


def as_overrides(given: dict[str, Any]) -> list[str]:
    """The options that were given, as the `KEY=VALUE` lines of `load_config`."""
    return [f"{key}={json.dumps(value)}" for key, value in given.items() if value is not None]
