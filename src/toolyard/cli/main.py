"""The entry point. It imports next to nothing, so that Ctrl-C is handled almost from the start."""

from __future__ import annotations

import os
import sys

from toolyard.cli import INTERRUPTED


def main() -> None:
    """Run the command line. Ctrl-C exits with 130, without a traceback."""
    try:
        import signal

        handled = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not ignored, as under nohup
        if handled:
            # Exit at once: an exception during imports may be wrapped or swallowed by a callback.
            signal.signal(signal.SIGINT, _exit)
        from toolyard.cli.app import run

        if handled:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _exit(signum: int, frame: object) -> None:
    os._exit(INTERRUPTED)
