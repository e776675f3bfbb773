"""What `toolyard train` shows while it runs."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from toolyard.cli.train.progress import ProgressDisplay


@pytest.mark.parametrize(("width", "height"), [(80, 24), (140, 45)])
def test_it_says_what_it_is_doing_and_for_how_long_in_one_line(width, height):
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=width, height=height)
    with ProgressDisplay(console) as display:
        display.began(10, 1000)
        display.playing(11, 256, evaluation=False)
        display.close()
        console.file = io.StringIO()
        console.print(display.bar)
        (line,) = console.file.getvalue().rstrip("\n").split("\n")
        display.played()
        console.file = io.StringIO()
        console.print(display.bar)
    assert re.fullmatch(r"training [━╸╺ ]+10/1000 0 s rollouts 0/256  0 s", line.rstrip())
    assert console.file.getvalue().rstrip().endswith("0 s update  0 s")
