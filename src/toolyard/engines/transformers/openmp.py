"""How torch's threads wait for each other on the CPU. Takes effect if this is imported before torch is.

Threads of OpenMP that wait spin, unless told otherwise, and a step of a model waits hundreds of times. Where others
want the same cores (the sandbox, say), the one that is waited for does not run while the others spin: measured on two
busy cores, sampling with two threads that spin took ten times as long as with one thread, or with two that sleep.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
