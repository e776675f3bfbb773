"""The time a program lost waiting for a processor, from the kernel's counters."""

from __future__ import annotations

import os
from pathlib import Path

from toolyard.sandbox.guest.starvation import NOTHING, Snapshot, Starvation, Thread, alone, lost, see


def seen(*threads: tuple[float, float], gone: float = 0.0) -> Snapshot:
    """`gone`: seconds that threads have computed which are no more."""
    found = {str(number): Thread(*thread) for number, thread in enumerate(threads)}
    return Snapshot(found, gone + sum(thread.ran for thread in found.values()))


def test_a_program_that_waits_for_a_processor_loses_that_time() -> None:
    assert lost(NOTHING, seen((0.25, 0.75)), 0.0) == 0.75


def test_one_that_computes_or_sleeps_loses_nothing() -> None:
    assert lost(NOTHING, seen((1.0, 0.0)), 0.0) == 0.0
    assert lost(NOTHING, seen((0.0, 0.0)), 0.0) == 0.0


def test_what_was_before_does_not_count() -> None:
    assert lost(seen((5.0, 3.0), gone=2.0), seen((5.5, 3.25), gone=2.0), 0.0) == 0.25


def test_threads_that_wait_for_each_other_gain_nothing() -> None:
    """Four on one processor: each computes a quarter of the time, and waits for the rest."""
    assert lost(NOTHING, seen(*[(0.25, 0.75)] * 4), 0.0) == 0.0
    assert lost(NOTHING, seen((0.01, 0.99), gone=0.99), 0.0) == 0.0, "also for threads that are gone"


def test_threads_that_wait_for_others_as_well_get_that_back() -> None:
    """Two on a processor of which a stranger takes half."""
    assert lost(NOTHING, seen((0.25, 0.75), (0.25, 0.75)), 0.0) == 0.5


def test_what_the_hypervisor_takes_counts_for_who_computes() -> None:
    assert lost(NOTHING, seen((0.5, 0.0)), steal=1.0) == 0.5
    assert lost(NOTHING, seen((0.0, 0.0)), steal=1.0) == 0.0, "and not for who sleeps"


def test_one_that_waits_now_has_waited_since_it_was_seen_so_first() -> None:
    """The kernel adds it only when the thread runs again."""

    def at(time: float, ran: float, *, ready: bool = True) -> float:
        return starvation.seconds(Snapshot({"1": Thread(ran, 0.0, ready)}, ran), time)

    starvation = Starvation()
    starvation.begin()
    assert [at(10.0, 1.0), at(10.25, 1.0), at(10.5, 1.0)] == [0.0, 0.25, 0.5]
    assert [at(10.75, 1.1), at(11.0, 1.1)] == [0.0, 0.25], "it has run in between"
    assert [at(11.25, 1.1, ready=False), at(11.5, 1.1, ready=False)] == [0.0, 0.0], "it sleeps"


def test_this_process_is_seen() -> None:
    pid = os.getpid()
    before = alone(pid, Path(f"/proc/{pid}/schedstat").read_bytes())
    now = see([str(pid)])
    assert 0 < before.threads[str(pid)].ran <= now.threads[str(pid)].ran
    assert now.ran > 0


def test_one_that_is_gone_has_lost_nothing() -> None:
    assert see(["4194305"]) == NOTHING
    starvation = Starvation()
    starvation.begin_alone(4194305)
    assert starvation.seconds(NOTHING, 1.0) == 0.0
