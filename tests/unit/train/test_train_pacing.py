"""What a stream starts and hands out: nothing too old, nothing thrown away for its age, flat groups within a budget."""

from __future__ import annotations

import random

import pytest

from toolyard.train.order import Position
from toolyard.train.pacing import PacedGroup, Pacing


def places(groups: list[PacedGroup]) -> list[int]:
    return [group.place for group in groups]


def ended(pacing: Pacing, *groups: PacedGroup, flat: bool = False) -> None:
    for group in groups:
        pacing.end(group, flat=flat)


class TestSynchronous:
    def test_a_step_starts_its_groups_and_takes_all_of_them(self):
        pacing = Pacing(2)
        assert pacing.admit() == [], "nothing starts before its step"
        pacing.begin_step()
        one, two = pacing.admit()
        assert pacing.admit() == []
        ended(pacing, two)
        assert pacing.hand_out() is None
        ended(pacing, one)
        handed = pacing.hand_out()
        assert handed is not None
        assert (places(handed.trained), handed.aside) == ([0, 1], [])
        assert pacing.admit() == [], "nor for the next step"
        pacing.begin_step()
        assert places(pacing.admit()) == [2, 3]

    def test_flat_groups_are_replaced_within_the_budget_and_then_fill_up(self):
        pacing = Pacing(2, spare=2)
        pacing.begin_step()
        one, two = pacing.admit()
        ended(pacing, two, flat=True)
        (three,) = pacing.admit()
        ended(pacing, one, flat=True)
        (four,) = pacing.admit()
        ended(pacing, four)
        ended(pacing, three, flat=True)
        assert pacing.admit() == [], "the budget of four groups is spent"
        handed = pacing.hand_out()
        assert handed is not None
        assert (places(handed.trained), places(handed.aside)) == ([2, 3], [0, 1])
        assert pacing.position == Position(4)

    @pytest.mark.parametrize("seed", range(20))
    def test_what_is_trained_does_not_depend_on_who_ends_first(self, seed: int):
        chance = random.Random(seed)
        pacing = Pacing(4, spare=4)
        pacing.begin_step()
        running = pacing.admit()
        while running:
            group = running.pop(chance.randrange(len(running)))
            ended(pacing, group, flat=group.place in (1, 2, 5))
            running += pacing.admit()
        handed = pacing.hand_out()
        assert handed is not None
        assert (places(handed.trained), places(handed.aside)) == ([0, 3, 4, 6], [1, 2, 5])


def test_a_resumed_stream_starts_with_what_was_waiting():
    pacing = Pacing(3, start=Position(7, (4, 6)))
    pacing.begin_step()
    assert places(pacing.admit()) == [4, 6, 7]
    assert pacing.position == Position(8, (4, 6, 7))


def test_nothing_is_started_for_steps_that_never_come():
    pacing = Pacing(2, max_staleness=3, steps=2)
    pacing.begin_step()
    assert len(pacing.admit()) == 4


class TestAhead:
    def test_a_slow_group_is_overtaken_until_it_is_due(self):
        pacing = Pacing(1, max_staleness=1)
        pacing.begin_step()
        slow, quick = pacing.admit()
        ended(pacing, quick)
        handed = pacing.hand_out()
        assert handed is not None
        assert places(handed.trained) == [1]
        assert pacing.admit() == [], "it would be due together with the slow one"
        pacing.begin_step()
        (third,) = pacing.admit()
        ended(pacing, third)
        assert pacing.hand_out() is None, "the slow one is due"
        assert pacing.position == Position(3, (0, 2))
        ended(pacing, slow)
        handed = pacing.hand_out()
        assert handed is not None
        assert places(handed.trained) == [0]

    @pytest.mark.parametrize("seed", range(60))
    def test_every_group_is_trained_when_it_is_due_whatever_ends_when(self, seed: int):
        """Random speeds, flat groups, and moments at which the trainer asks."""
        chance = random.Random(seed)
        per_step, staleness, spare, steps = (chance.randint(a, b) for a, b in ((1, 4), (0, 3), (0, 5), (1, 12)))
        pacing = Pacing(per_step, max_staleness=staleness, spare=spare, steps=steps)
        began: dict[int, int] = {}
        running: list[PacedGroup] = []
        trained: list[int] = []

        def go_on(weights: int) -> None:
            new = pacing.admit()
            began.update((group.place, weights) for group in new)
            running.extend(new)

        for step in range(steps):
            pacing.begin_step()
            go_on(step)
            while (handed := pacing.hand_out()) is None:
                assert running, "it waits for nothing"
                group = running.pop(chance.randrange(len(running)) if chance.random() < 0.5 else -1)
                ended(pacing, group, flat=chance.random() < 0.3)
                go_on(step)
            go_on(step)
            assert len(handed.trained) == per_step
            assert len(handed.aside) <= spare
            assert all(step - began[group.place] <= staleness for group in handed.trained)
            trained += places(handed.trained) + places(handed.aside)
            for _ in range(chance.randint(0, 3)):  # while the trainer updates
                if running:
                    ended(pacing, running.pop(chance.randrange(len(running))), flat=chance.random() < 0.3)
                    go_on(step)
            assert {*pacing.position.waiting} == began.keys() - {*trained}, "what a resumed run plays again"
        assert len(trained) == len(set(trained))
        waiting = {*pacing.position.waiting}
        assert not waiting & {*trained}
        if not spare:
            assert not waiting, "nothing was started in vain"
            assert sorted(trained) == list(range(per_step * steps))
