"""The pool's slots: first come, first served, and none is ever lost."""

import asyncio

import pytest

from toolyard.errors import SandboxBusyError, SandboxClosedError
from toolyard.sandbox.host.pool import Slots


async def test_slots_are_given_in_the_order_of_asking():
    slots = Slots(1)
    await slots.take(None)
    order: list[int] = []

    async def ask(number: int) -> None:
        await slots.take(None)
        order.append(number)
        slots.give()

    async with asyncio.TaskGroup() as group:
        for number in range(20):
            group.create_task(ask(number))
        await asyncio.sleep(0)
        slots.give()
    assert order == list(range(20))
    assert slots.free == 1


async def test_a_newcomer_does_not_overtake_those_who_wait():
    slots = Slots(1)
    await slots.take(None)
    waiting = asyncio.ensure_future(slots.take(None))
    await asyncio.sleep(0)
    slots.give()  # assigned to the waiter, although it has not run yet
    with pytest.raises(SandboxBusyError):
        await slots.take(0.01)
    await waiting
    slots.give()
    assert slots.free == 1


async def test_what_cannot_start_in_time_is_told_so_and_leaves_the_queue():
    slots = Slots(1)
    await slots.take(None)
    with pytest.raises(SandboxBusyError, match=r"no sandbox worker became free within 0.01 s \(1 workers"):
        await slots.take(0.01)
    assert slots.waiting == 0
    slots.give()
    assert slots.free == 1


async def test_a_slot_handed_to_a_cancelled_waiter_is_passed_on():
    slots = Slots(1)
    await slots.take(None)
    first = asyncio.ensure_future(slots.take(None))
    second = asyncio.ensure_future(slots.take(None))
    await asyncio.sleep(0)
    slots.give()  # goes to `first` …
    first.cancel()  # … which is cancelled before it can run
    await asyncio.wait([first])
    await asyncio.wait_for(second, 1)
    slots.give()
    assert slots.free == 1


async def test_cancelling_a_waiter_at_any_moment_loses_no_slot():
    slots = Slots(2)

    async def use() -> None:
        await slots.take(None)
        try:
            await asyncio.sleep(0.0005)
        finally:
            slots.give()

    for seed in range(100):
        tasks = [asyncio.ensure_future(use()) for _ in range(8)]
        for step in range(seed % 7):
            await asyncio.sleep(0.0002 * (step % 3))
        for task in tasks[seed % 3 :: 2]:
            task.cancel()
        await asyncio.wait(tasks)
        assert slots.free == 2
        assert slots.waiting == 0


async def test_closing_ends_the_wait_of_all():
    slots = Slots(1)
    await slots.take(None)
    waiting = asyncio.ensure_future(slots.take(None))
    await asyncio.sleep(0)
    slots.close()
    with pytest.raises(SandboxClosedError):
        await waiting
    with pytest.raises(SandboxClosedError):
        await slots.take(None)
