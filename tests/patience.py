"""Time limits of tests, on a machine that has other things to do as well."""

from __future__ import annotations

import os


def patient(seconds: float) -> float:
    """Seconds that something may take, if it may take `seconds` on a machine with nothing else to do.

    Where more is to be computed than there are processors, everything takes longer in proportion.
    """
    with open("/proc/loadavg") as file:
        last_minute, _, _, now, _ = file.read().split()
    to_compute = max(float(last_minute), float(now.partition("/")[0]))
    return seconds * max(1.0, 2 * to_compute / len(os.sched_getaffinity(0)))
