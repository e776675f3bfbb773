"""What `toolyard eval` does: read the dumps with progress, then evaluate or compare them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from toolyard.cli.console import INTERRUPTED, err
from toolyard.cli.view.run import open_library
from toolyard.errors import ConfigError
from toolyard.evaluation.comparison import Comparison, compare
from toolyard.evaluation.results import Evaluation, Rules, evaluate
from toolyard.evaluation.runs import Run, read_run
from toolyard.evaluation.tags import TaskTags, tags_by

if TYPE_CHECKING:
    from toolyard.evaluation.tags import TagsOf


@dataclass(frozen=True, slots=True)
class EvalArguments:
    """The arguments of the command."""

    dumps: Sequence[str]
    pool: bool = False
    query: str = ""
    reward: str | None = None
    threshold: float = 0.999
    ks: Sequence[int] | None = None
    by: Sequence[str] | None = None
    tasks: str | None = None
    resamples: int | None = None
    seed: int = 0
    picture: Path | None = None


def run(arguments: EvalArguments) -> Evaluation | Comparison:
    """
    Raises:
        ToolyardError: a dump, the query or an option is wrong, or the picture cannot be drawn.
    """
    if len(arguments.dumps) > 2 and not arguments.pool:
        raise ConfigError(
            f"{len(arguments.dumps)} dumps: --pool takes them as one run; to compare two runs of several dumps each, "
            "put patterns in quotes: 'runs/old-*' 'runs/new-*'"
        )
    if not math.isfinite(arguments.threshold):
        raise ConfigError(f"--threshold {arguments.threshold}: expected a finite number")
    try:
        tags = _tags(arguments)
        if arguments.picture is not None:  # before the work, since it may not be installed
            from toolyard.evaluation.picture_matplotlib import draw
        else:
            draw = None
        sides = [list(arguments.dumps)] if arguments.pool else [[dump] for dump in arguments.dumps]
        runs = [_read(dumps, arguments) for dumps in sides]
        rules = Rules(
            arguments.threshold, tuple(arguments.ks) if arguments.ks else None, arguments.resamples, arguments.seed
        )
        result = evaluate(runs[0], rules, by=tags) if len(runs) == 1 else compare(runs[0], runs[1], rules, by=tags)
        if draw is not None and arguments.picture is not None:
            draw(result, arguments.picture)
    except KeyboardInterrupt:
        err().print("interrupted", style="yellow")
        raise typer.Exit(INTERRUPTED) from None
    return result


def _read(dumps: Sequence[str], arguments: EvalArguments) -> Run:
    return read_run(dumps, query=arguments.query, reward=arguments.reward, opened=open_library)


def _tags(arguments: EvalArguments) -> dict[str, TagsOf] | None:
    if not arguments.by:
        return None
    of_tasks = None if arguments.tasks is None else TaskTags(arguments.tasks)
    return {name: tags_by(name, of_tasks) for name in arguments.by}
