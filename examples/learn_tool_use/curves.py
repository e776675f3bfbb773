"""Draws the curves of several seeds: python curves.py OUT.png RUN…"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

PANELS = (
    ("evaluations.jsonl", "reward", "correct on unseen templates"),
    ("metrics.jsonl", "reward", "reward of trained groups"),
    ("metrics.jsonl", "calls_ok", "successful calls"),
    ("metrics.jsonl", "entropy", "entropy"),
)


def main(out: str, *runs: str) -> None:
    figure: Any = Figure(figsize=(15, 3.2), layout="constrained")
    axes = figure.subplots(1, len(PANELS))
    for axis, (file, name, title) in zip(axes, PANELS, strict=True):
        axis.set(title=title, xlabel="step")
        for run in map(Path, runs):
            rows = [json.loads(line) for line in (run / file).read_text().splitlines()]
            axis.plot([row["step"] for row in rows], [row[name] for row in rows], label=run.name)
        axis.set_ylim(bottom=0)
    axes[0].legend()
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main(*sys.argv[1:])
