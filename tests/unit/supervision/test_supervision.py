"""Foreign code in its own tasks: contained, on time, abandoned if necessary, and named when it blocks the loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time

import pytest

from toolyard.errors import SandboxError, ToolError, blame
from toolyard.supervision import (
    Call,
    LoopWatch,
    Scope,
    end_stray_tasks,
    loop_clock,
    run_in_thread,
    uninterrupted,
)


async def swallow():
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)


async def fail(error):
    raise error


async def in_a_task_group():
    async with asyncio.TaskGroup() as group:
        group.create_task(fail(ValueError("a child")))
        await asyncio.sleep(60)


class Alarm:
    """Calls a function when it expires."""

    when = 0.0

    def __init__(self, function, *args):
        self.function, self.args = function, args

    def expire(self):
        self.function(*self.args)


# Calls ----------------------------------------------------------------------------------------------------------------


async def test_a_call_returns_its_value():
    call = Call(asyncio.sleep(0, "done"), "test")
    await call.ended()
    assert (call.value, call.error, call.expired, call.abandoned) == ("done", None, False, False)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x"),
        SystemExit(3),
        GeneratorExit(),
        asyncio.CancelledError(),
        BaseExceptionGroup("x", [SystemExit()]),
    ],
)
async def test_whatever_a_call_raises_is_a_value(error):
    call = Call(fail(error), "test")
    await call.ended()
    assert call.error is error
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_task_group_of_a_call_cancels_the_call_and_not_who_waits():
    task = asyncio.current_task()
    assert task is not None
    call = Call(in_a_task_group(), "test")
    await call.ended()
    assert isinstance(call.error, ExceptionGroup)
    assert task.cancelling() == 0


async def test_a_call_that_cancels_its_own_task_does_not_cancel_who_waits():
    async def work():
        running = asyncio.current_task()
        assert running is not None
        running.cancel()
        return running

    task = asyncio.current_task()
    assert task is not None
    call = Call(work(), "test")
    await call.ended()
    assert call.value is not task
    assert task.cancelling() == 0
    await asyncio.sleep(0)


async def test_a_call_that_is_late_is_cancelled():
    call = Call(asyncio.sleep(60), "test", seconds=0.02)
    await call.ended()
    assert (call.expired, call.abandoned) == (True, False)


async def test_a_call_in_a_busy_loop_has_begun_before_its_time_is_up():
    begun = []

    async def work():
        begun.append(True)
        await asyncio.sleep(60)

    calls = []

    def make():
        calls.append(Call(work(), "test", seconds=0.01))
        time.sleep(0.05)  # the loop is busy with something else

    # Both are due when the loop is free again: deadlines are served after `make`, and before the call's first step.
    asyncio.get_running_loop().call_later(0.001, make)
    loop_clock().watch(Alarm(lambda: None), 0.005)
    time.sleep(0.03)  # noqa: ASYNC251 - likewise
    while not calls:  # noqa: ASYNC110 - likewise
        await asyncio.sleep(0)
    await calls[0].ended()
    assert (begun, calls[0].expired) == ([True], True)


async def test_a_call_that_ignores_cancellation_is_abandoned_with_the_line_where_it_hangs():
    call = Call(swallow(), "test", seconds=0.02, grace=0.02)
    async with asyncio.timeout(5):
        await call.ended()
    assert (call.expired, call.abandoned, call.over) == (True, True, True)
    assert "in swallow: await asyncio.sleep(3600)" in call.place
    assert call.task not in asyncio.all_tasks(), "asyncio.run would wait for it"


async def test_who_waits_can_be_cancelled_and_the_call_with_it():
    stopped = asyncio.Event()

    async def work():
        try:
            await asyncio.sleep(60)
        finally:
            stopped.set()

    waiting = asyncio.create_task(Call(work(), "test").ended())
    await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert stopped.is_set()


async def test_who_waits_for_a_call_that_ignores_cancellation_is_let_go_after_the_grace_period():
    call = Call(swallow(), "test", grace=0.02)
    waiting = asyncio.create_task(call.ended())
    await asyncio.sleep(0.01)
    waiting.cancel()
    async with asyncio.timeout(5):
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert call.abandoned


async def test_a_call_that_is_cancelled_before_it_begins_leaves_nothing():
    call = Call(asyncio.sleep(60), "test")
    call.cancel()
    await call.ended()
    assert isinstance(call.error, asyncio.CancelledError)
    del call  # which holds the coroutine
    await asyncio.sleep(0)
    gc.collect()  # a coroutine that was never awaited would warn now, and warnings are errors


async def test_uninterrupted_calls_come_to_their_end_and_the_cancellation_is_raised_afterwards():
    done = []

    async def work():
        await asyncio.sleep(0.05)
        done.append(True)

    async def wait():
        await uninterrupted(Call(work(), "one"), Call(work(), "two"))

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0.01)
    for _ in range(3):
        waiting.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert done == [True, True]


async def test_stray_tasks_are_ended_or_disowned():
    patient, stubborn = asyncio.create_task(asyncio.sleep(60)), asyncio.create_task(swallow())
    await asyncio.sleep(0)
    hanging = await end_stray_tasks(grace=0.05)
    assert patient.cancelled()
    assert len(hanging) == 1
    assert "in swallow: await asyncio.sleep(3600)" in hanging[0]
    assert stubborn not in asyncio.all_tasks()


async def test_a_thread_that_raises_stop_iteration_wakes_who_waits():
    with pytest.raises(RuntimeError, match="StopIteration"):
        await run_in_thread(lambda: next(iter(())))


# Time -----------------------------------------------------------------------------------------------------------------


async def test_a_scope_ends_its_block_in_time_and_tells():
    task = asyncio.current_task()
    assert task is not None
    with Scope(task, loop_clock(), 0.02) as scope:
        await asyncio.sleep(60)
    assert scope.expired
    assert task.cancelling() == 0
    with Scope(task, loop_clock(), 60) as scope:
        pass
    assert not scope.expired


async def test_a_cancellation_from_elsewhere_passes_a_scope():
    async def work():
        task = asyncio.current_task()
        assert task is not None
        with Scope(task, loop_clock(), 60):
            await asyncio.sleep(60)

    working = asyncio.create_task(work())
    await asyncio.sleep(0.01)
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working


async def test_a_cancellation_from_elsewhere_passes_a_scope_that_expires_at_the_same_time():
    scopes = []

    async def work():
        task = asyncio.current_task()
        assert task is not None
        with Scope(task, loop_clock(), 60) as scope:
            scopes.append(scope)
            await asyncio.sleep(60)

    working = asyncio.create_task(work())
    await asyncio.sleep(0.01)
    scopes[0].expire()
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    assert scopes[0].expired


async def test_deadlines_are_served_in_their_order_and_cancelled_ones_not_at_all():
    served, clock, last = [], loop_clock(), asyncio.Event()
    for seconds in (0.06, 0.02, 0.04):
        clock.watch(Alarm(served.append, seconds), seconds)
    forgotten = Alarm(served.append, "forgotten")
    clock.watch(forgotten, 0.03)
    clock.forget(forgotten)
    clock.watch(Alarm(last.set), 0.08)
    await last.wait()
    assert served == [0.02, 0.04, 0.06]


async def test_a_deadline_is_served_in_time_though_a_later_one_was_there_before():
    clock, served, later = loop_clock(), asyncio.Event(), Alarm(lambda: None)
    clock.watch(later, 60)
    clock.watch(Alarm(served.set), 0.02)
    try:
        async with asyncio.timeout(5):
            await served.wait()
    finally:
        clock.forget(later)


async def test_deadlines_that_are_due_at_once_are_served_in_their_order():
    served, clock, last = [], loop_clock(), asyncio.Event()
    for seconds in (0.03, 0.01, 0.02):
        clock.watch(Alarm(served.append, seconds), seconds)
    clock.watch(Alarm(last.set), 0.04)
    time.sleep(0.1)  # noqa: ASYNC251 - all of them are due by then
    await last.wait()
    assert served == [0.01, 0.02, 0.03]


async def test_what_is_given_more_time_while_deadlines_are_served_has_that_time():
    served, clock, last = [], loop_clock(), asyncio.Event()
    second = Alarm(served.append, "second")
    clock.watch(Alarm(clock.watch, second, 0.05), 0.02)
    clock.watch(second, 0.02)
    clock.watch(Alarm(lambda: served.append("between")), 0.04)
    clock.watch(Alarm(last.set), 0.1)
    time.sleep(0.03)  # noqa: ASYNC251 - so that the first two are served together
    await last.wait()
    assert served == ["between", "second"]


async def test_the_time_in_which_the_loop_stands_still_counts_towards_no_deadline():
    told = []
    watch = LoopWatch(told.append)
    watch.start()
    try:
        call = Call(asyncio.sleep(0.3, "in time"), "test", seconds=1)
        await asyncio.sleep(0.15)
        time.sleep(1.6)  # noqa: ASYNC251 - that is what is tested
        await call.ended()
    finally:
        watch.stop()
    assert (call.value, call.expired) == ("in time", False)
    assert told, "a thread beside the loop noticed"
    assert "time.sleep(1.6)" in told[0].line


async def test_the_call_that_blocks_is_named_while_it_blocks():
    told = []
    seen = threading.Event()

    def tell(stall):
        told.append(str(stall))
        seen.set()

    async def block():
        seen.wait(20)

    watch = LoopWatch(tell)
    watch.start()
    try:
        await Call(block(), "tool 'x': execute", "r1").ended()
    finally:
        watch.stop()
    assert told[0].startswith("tool 'x': execute of request r1 has blocked the event loop for 1 s, at ")


# Blame ----------------------------------------------------------------------------------------------------------------


def test_the_blame_is_that_of_the_innermost_error_of_ours():
    lost = SandboxError("gone")
    lost.source = "http://127.0.0.1:1"
    lost.__cause__ = ConnectionResetError("reset by peer")
    outer = ToolError("create failed")
    outer.source, outer.whose = "tool 'x'", "task"
    outer.__cause__ = lost
    assert blame(ExceptionGroup("", [outer])) == ("ours", "http://127.0.0.1:1", "ConnectionResetError: reset by peer")
    assert blame(ValueError("x")) == ("ours", "", "ValueError: x")
    lost.__cause__ = outer  # a knot
    assert blame(outer).whose in ("ours", "task")
