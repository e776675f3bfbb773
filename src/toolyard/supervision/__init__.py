"""Runs other people's code: in separate tasks, with deadlines, and watched by a thread.

    call = Call(tool.execute(…), "tool 'search': execute", request_id)
    await call.ended()

Code that runs here cannot end, cancel or block its caller.
"""

from toolyard.supervision.calls import Call, end_stray_tasks, run_in_thread, uninterrupted
from toolyard.supervision.clock import LoopClock, Scope, loop_clock
from toolyard.supervision.stalls import LoopWatch, Stall

__all__ = [
    "Call",
    "LoopClock",
    "LoopWatch",
    "Scope",
    "Stall",
    "end_stray_tasks",
    "loop_clock",
    "run_in_thread",
    "uninterrupted",
]
