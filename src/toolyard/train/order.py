"""In which order tasks are trained on: known from the start, so that a run that is resumed goes on with the next."""

from __future__ import annotations

import random


def task_order(tasks: int, wanted: int, *, seed: int, shuffle: bool) -> list[int]:
    """`wanted` tasks by number: all of them once, then all once more, and so on, each time in another order of chance.
    More of them begin with the same."""
    order: list[int] = []
    turn = 0
    while len(order) < wanted:
        every = list(range(tasks))
        if shuffle:
            random.Random(f"{seed}/{turn}").shuffle(every)  # noqa: S311  (chance that can be repeated is the point)
        order += every
        turn += 1
    return order[:wanted]
