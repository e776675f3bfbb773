"""Draws the curves of several seeds: python curves.py OUT.png RUN/metrics.jsonl …"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

PANELS = {"reward": "reward of trained groups", "calls_ok": "successful calls", "entropy": "entropy"}


def main(out: str, *files: str) -> None:
    figure: Any = Figure(figsize=(12, 3.2), layout="constrained")
    axes = figure.subplots(1, len(PANELS))
    for number, file in enumerate(files, 1):
        rows = [json.loads(line) for line in Path(file).read_text().splitlines()]
        for axis, (name, title) in zip(axes, PANELS.items(), strict=True):
            axis.plot([row["step"] for row in rows], [row[name] for row in rows], label=f"seed {number}")
            axis.set(title=title, xlabel="step")
    for axis in axes:
        axis.set_ylim(bottom=0)
    axes[0].legend()
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main(*sys.argv[1:])
