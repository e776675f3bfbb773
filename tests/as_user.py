"""Run a command as an ordinary user, with this checkout and its interpreter readable wherever they are.

`python tests/as_user.py COMMAND …` as root. Runs in its own mount namespace, so the machine is unchanged: a
directory that others may not enter (root's home, for example) is covered by an empty one, into which only the
interpreter and the checkout are bound.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).parent.parent / "src" / "toolyard" / "sandbox"))
from guest import kernel  # pyright: ignore

USER = 54321
CHECKOUT = str(Path(__file__).resolve().parent.parent)


def closed_directory_above(path: str) -> str | None:
    for folder in reversed([*Path(path).parents, Path(path)]):
        if folder.exists() and folder.stat().st_mode & 0o005 != 0o005:
            return str(folder)
    return None


def open_up(paths: list[str]) -> None:
    """Cover every closed directory on the way to `paths`, keeping only what leads there."""
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount(None, "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    closed = {path: closed_directory_above(path) for path in paths}
    handles = {path: os.open(path, os.O_PATH) for path, folder in closed.items() if folder}
    for folder in sorted({folder for folder in closed.values() if folder}):
        kernel.mount("open", folder, "tmpfs", 0, "mode=755")
    for path, handle in handles.items():
        os.makedirs(path, exist_ok=True)
        kernel.mount(f"/proc/self/fd/{handle}", path, None, kernel.MS_BIND | kernel.MS_REC)


def main() -> None:
    if os.getuid() != 0:
        sys.exit("as_user.py: only root can become someone else")
    home = tempfile.mkdtemp(prefix="toolyard-user-")
    os.chown(home, USER, USER)
    child = os.fork()
    if child == 0:
        become_ordinary(home)
    try:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 255)
    finally:
        shutil.rmtree(home, ignore_errors=True)


def become_ordinary(home: str) -> NoReturn:
    open_up(sorted({sys.prefix, sys.base_prefix, CHECKOUT}))
    os.setgroups([])
    os.setresgid(USER, USER, USER)
    os.setresuid(USER, USER, USER)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    environment = {**os.environ, "HOME": home, "USER": "ordinary", "PYTHONDONTWRITEBYTECODE": "1"}
    os.chdir(CHECKOUT)
    os.execvpe(sys.argv[1], sys.argv[1:], environment)


if __name__ == "__main__":
    main()
