"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
