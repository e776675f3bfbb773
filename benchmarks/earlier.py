"""Compare this tree with an earlier commit, measuring in turns: the load of the machine changes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
THIS_TREE = "this tree"


def measure_in_turns(
    script: str, arguments: list[str], commit: str, rounds: int, tell: Callable[[str], None] = lambda text: None
) -> dict[str, list[Any]]:
    """The JSON output of `script` with the toolyard of `commit`, which may be a folder, and with this tree's."""
    seen: dict[str, list[Any]] = {commit: [], THIS_TREE: []}
    with _checked_out(commit) as before:
        for number in range(rounds):
            for name, tree in ((commit, before), (THIS_TREE, HERE)):
                tell(f"round {number + 1} of {rounds}: {name}")
                path = os.pathsep.join(filter(None, (str(tree / "src"), os.environ.get("PYTHONPATH"))))
                done = subprocess.run(
                    [sys.executable, script, *arguments],
                    env={**os.environ, "PYTHONPATH": path},
                    stdout=subprocess.PIPE,
                    text=True,
                    check=True,
                )
                seen[name].append(json.loads(done.stdout))
    return seen


@contextlib.contextmanager
def _checked_out(commit: str) -> Iterator[Path]:
    if Path(commit, "src").is_dir():
        yield Path(commit).resolve()
        return
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "before")
        subprocess.run(["git", "worktree", "add", "--detach", "--quiet", tree, commit], cwd=HERE, check=True)
        try:
            build = tree / "src/toolyard/sandbox/guest/native/build.py"
            if build.exists():
                subprocess.run([sys.executable, build], check=True, stdout=subprocess.DEVNULL)
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=HERE, check=True)
