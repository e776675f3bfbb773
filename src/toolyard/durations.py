"""Times for people."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """`2.1 ms`, `83.2 s`, `5 min 20 s`, `1 h 30 min`."""
    if seconds < 1:
        return f"{seconds * 1000:.{1 if seconds < 0.01 else 0}f} ms"
    if seconds < 100:
        return f"{seconds:.3g} s"
    if round(seconds) < 3600:
        return _two_units(round(seconds), "min", "s")
    return _two_units(round(seconds / 60), "h", "min")


def elapsed(seconds: float) -> str:
    """For a clock that is running: `0 s`, `83 s`, `5 min 20 s`."""
    return f"{int(seconds)} s" if seconds < 100 else duration(int(seconds))


def _two_units(count: int, large: str, small: str) -> str:
    whole, rest = divmod(count, 60)
    return f"{whole} {large} {rest} {small}" if rest else f"{whole} {large}"
