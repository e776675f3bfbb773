"""How torch's threads wait for each other on the CPU. Only effective if imported before torch.

By default, waiting OpenMP threads spin, and a step of a model waits hundreds of times. If others (such as the sandbox)
need the same cores, the awaited thread does not run while the others spin: measured on two busy cores, sampling with
two spinning threads took ten times as long as with one thread, or with two that sleep.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
