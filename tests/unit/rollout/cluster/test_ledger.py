"""The ledger's decisions, by hand and under random faults."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from toolyard.rollout.cluster.ledger import Answer, Ledger, Report


def offered(count: int, n: int = 1, **options) -> Ledger:
    ledger = Ledger(**{"spare": 0, **options})
    for index in range(count):
        ledger.offer(index, index // n, f"request {index}")
    return ledger


def says(worker: str, room: int = 0, holds=(), begun=(), finished=(), **more) -> Report:
    return Report(worker, "", room, holds, begun, finished, **more)


def leased(answer: Answer) -> list[int]:
    return [lease.index for lease in answer.leases]


def test_groups_stay_whole_where_there_is_room():
    ledger = offered(8, n=4)
    assert leased(ledger.report(says("a", room=6), 0)) == [0, 1, 2, 3]
    assert leased(ledger.report(says("b", room=6), 0)) == [4, 5, 6, 7]


def test_a_group_larger_than_a_worker_is_divided():
    ledger = offered(4, n=4)
    assert leased(ledger.report(says("a", room=3), 0)) == [0, 1, 2]
    assert leased(ledger.report(says("b", room=3), 0)) == [3]


def test_a_worker_gets_a_few_more_than_it_can_begin():
    ledger = offered(9, spare=2)
    assert leased(ledger.report(says("a", room=3), 0)) == [0, 1, 2, 3, 4]
    assert leased(ledger.report(says("a", room=0, holds=[0, 1, 2, 3, 4], begun=[0, 1, 2]), 0)) == []
    assert leased(ledger.report(says("a", room=0, holds=[3, 4], begun=[3, 4], finished=[(0, "")]), 0)) == [1, 2], (
        "what it no longer has was handed over"
    )


def test_the_first_commit_counts():
    ledger = offered(1)
    ledger.report(says("a", room=1), 0)
    ledger.lose("a")
    assert leased(ledger.report(says("b", room=1), 0)) == [0]
    assert ledger.report(says("b", finished=[(0, "b's")]), 0).accepted == [0]
    assert ledger.report(says("c", finished=[(0, "c's")]), 0).refused == [0]
    assert [(result.worker, result.place) for _, result in ledger.results()] == [("b", "b's")]


def test_the_figures_tell_leases_results_duplicates_and_losses():
    ledger = offered(4)
    ledger.report(says("a", room=2), 0)
    ledger.report(says("b", room=1), 0)
    assert ledger.figures() == {
        "workers": 2, "open": 4, "leased": 3, "committed": 0, "refused": 0, "reclaimed": 0, "lost": 0
    }  # fmt: skip
    ledger.lose("a")
    ledger.report(says("b", room=1, finished=[(2, "b's")]), 0)
    ledger.report(says("c", finished=[(2, "c's")]), 0)
    ledger.report(says("a", finished=[(0, "a's")]), 0)
    assert ledger.figures() == {
        "workers": 2, "open": 3, "leased": 1, "committed": 1, "refused": 2, "reclaimed": 2, "lost": 1
    }  # fmt: skip


def test_a_repeated_commit_is_accepted_and_counts_once():
    ledger = offered(1)
    ledger.report(says("a", room=1), 0)
    for _ in range(2):
        assert ledger.report(says("a", finished=[(0, "")]), 0).accepted == [0]
    assert len(ledger.results()) == 1


def test_results_are_told_until_they_are_in_the_dump_and_then_discarded():
    ledger = offered(2)
    ledger.report(says("a", room=2), 0)
    ledger.report(says("a", finished=[(0, ""), (1, "")]), 0)
    assert [number for number, _ in ledger.results()] == [1, 2]
    assert [number for number, _ in ledger.results(after=1)] == [2]
    ledger.forget([0])
    assert [result.index for _, result in ledger.results()] == [1]
    assert ledger.report(says("a"), 0).in_dump == [0]
    assert ledger.report(says("a"), 0).in_dump == []


def test_a_result_that_cannot_be_read_is_played_again_and_first():
    ledger = offered(3)
    ledger.report(says("a", room=1), 0)
    ledger.report(says("a", finished=[(0, "")]), 0)
    ledger.withdraw(0)
    assert leased(ledger.report(says("b", room=2), 0)) == [0, 1]


def test_a_silent_worker_loses_everything_and_learns_it_when_it_returns():
    ledger = offered(2, term=4.0)
    ledger.report(says("a", room=2), 0)
    assert [ledger.silent(now) for now in (1, 2, 3, 4)] == [[], [], [], []]
    assert ledger.silent(4.1) == ["a"]
    assert ledger.lose("a") == [0, 1]
    answer = ledger.report(says("a", holds=[0, 1], begun=[0], finished=[]), 5.0)
    assert (answer.lost, answer.drop) == (True, [0, 1])
    assert leased(ledger.report(says("a/2", room=2), 5.0)) == [0, 1]
    assert ledger.lose("a") == [0, 1], "its process is dead, whatever it calls itself"


def test_time_in_which_the_ledger_itself_was_stopped_is_nobodys_silence():
    ledger = offered(2, term=4.0)
    ledger.expect(["b"], 0)
    ledger.report(says("a", room=2), 0)
    assert ledger.silent(1) == []
    assert [ledger.silent(now) for now in (9, 10, 11)] == [[], [], []], "stopped from 1 to 9"
    assert sorted(ledger.silent(11.1)) == ["a", "b"]


def test_a_driver_that_is_always_slow_delays_the_loss_of_a_worker_but_does_not_prevent_it():
    ledger = offered(1, term=4.0)
    ledger.report(says("a", room=1), 0)
    assert [now for now in range(3, 30, 3) if ledger.silent(now)][:1] == [15]


def test_who_plays_a_request_that_has_a_result_is_told_to_drop_it():
    ledger = offered(1)
    ledger.report(says("a", room=1), 0)
    ledger.lose("a")
    ledger.report(says("b", room=1), 0)
    ledger.forget([0])
    assert ledger.report(says("b", holds=[0], begun=[0]), 0).drop == [0]


def test_what_waits_at_the_end_moves_to_who_has_room_once_it_was_handed_over():
    ledger = offered(4, spare=4)
    assert leased(ledger.report(says("a", room=1), 0)) == [0, 1, 2, 3]
    assert leased(ledger.report(says("b", room=2), 0)) == [], "not before a has handed it over"
    asked = ledger.report(says("a", holds=[0, 1, 2, 3], begun=[0]), 0).hand_over
    assert asked == [2, 3]
    assert leased(ledger.report(says("b", room=2), 0)) == []
    ledger.report(says("a", holds=[0, 1, 2], begun=[0, 2]), 0)
    assert leased(ledger.report(says("b", room=2), 0)) == [3], "a had begun the other"


def test_a_worker_that_is_drained_hands_over_what_it_has_not_begun():
    ledger = offered(4, spare=4)
    ledger.report(says("a", room=1), 0)
    answer = ledger.report(says("a", room=0, holds=[0, 1, 2, 3], begun=[0], draining=True), 0)
    assert (answer.hand_over, leased(answer)) == ([1, 2, 3], [])
    ledger.report(says("a", room=1, holds=[0], begun=[0], draining=True), 0)
    assert leased(ledger.report(says("b", room=4), 0)) == [1, 2, 3]


def test_a_new_ledger_leases_nothing_until_all_workers_have_said_what_they_have():
    ledger = offered(4)
    ledger.expect(["a", "b"], 0)
    assert leased(ledger.report(says("b", room=4), 0)) == []
    ledger.report(says("a", holds=[1, 2], begun=[1]), 0)
    assert leased(ledger.report(says("b", room=4), 0)) == [0, 3]


def test_a_dead_worker_is_not_waited_for():
    ledger = offered(1)
    ledger.expect(["a", "b"], 0)
    ledger.lose("a")
    assert leased(ledger.report(says("b", room=1), 0)) == [0]


def test_one_that_never_reports_is_not_waited_for_longer_than_a_term():
    ledger = offered(1, term=4.0)
    ledger.expect(["a", "b"], 0)
    assert [leased(ledger.report(says("b", room=1), now)) for now in (1, 2, 3, 4)] == [[], [], [], []]
    assert ledger.silent(4.1) == ["a"]
    ledger.lose("a")
    assert leased(ledger.report(says("b", room=1), 4.1)) == [0]


def test_streamed_journals_go_with_the_request():
    ledger = offered(1)
    ledger.report(says("a", room=1, shares=False), 0)
    ledger.report(says("a", holds=[0], begun=[0], journals=[(0, 0, [b"1", b"2"])], shares=False), 0)
    ledger.report(says("a", holds=[0], begun=[0], journals=[(0, 2, [b"3"])], shares=False), 0)
    ledger.lose("a")
    assert ledger.report(says("b", room=1), 0).leases[0].journal == (b"1", b"2", b"3")


@pytest.mark.parametrize("there_is_another", [True, False])
def test_a_journal_in_the_folder_goes_to_who_can_read_it_if_there_is_one(there_is_another: bool):
    ledger = offered(1)
    ledger.report(says("a", room=1), 0)
    ledger.report(says("a", holds=[0], begun=[0]), 0)
    ledger.lose("a")
    if there_is_another:
        ledger.report(says("b"), 0)
    assert leased(ledger.report(says("c", room=1, shares=False), 0)) == ([] if there_is_another else [0])


# Random faults --------------------------------------------------------------------------------------------------------


@dataclass
class Hand:
    """A worker that keeps to the protocol."""

    name: str
    ledger_id: int = -1
    holds: dict[int, bool] = field(default_factory=dict)
    """Whether it has begun, by index."""
    finished: dict[int, str] = field(default_factory=dict)
    committed: dict[int, str] = field(default_factory=dict)
    stopped: bool = False


class Cluster:
    """A driver, a ledger and workers, of which any may fail between any two steps."""

    def __init__(self, seed: int, count: int) -> None:
        self.random = random.Random(seed)
        self.count, self.now, self.names = count, 0.0, 0
        self.dump: dict[int, str] = {}
        self.known: dict[int, str] = {}
        """Results the driver has heard of: index and place."""
        self.plays: dict[int, int] = {}
        self.places: set[str] = set()
        """Results that can be read."""
        self.workers: list[Hand] = []
        self.new_ledger()
        for _ in range(3):
            self.join()

    def new_ledger(self) -> None:
        self.ledger_id = self.random.random()
        self.ledger = Ledger(term=4.0, spare=self.random.randrange(3))
        self.after = 0
        self.ledger.expect([worker.name.partition("/")[0] for worker in self.workers], self.now)
        for index in range(self.count):
            if index not in self.dump:
                self.ledger.offer(index, index // 4, index)

    def join(self) -> None:
        self.names += 1
        self.workers.append(Hand(f"w{self.names}"))

    def report(self, worker: Hand) -> None:
        if worker.ledger_id != self.ledger_id:
            worker.ledger_id = self.ledger_id
            worker.finished |= worker.committed
            worker.committed = {}
        begun = [index for index, begun in worker.holds.items() if begun]
        said = Report(worker.name, "", 4 - len(begun), list(worker.holds), begun, list(worker.finished.items()))
        answer = self.ledger.report(said, self.now)
        if self.random.random() < 0.1:
            # The answer is lost; leases in it must not be lost with it.
            return
        if answer.lost:
            self.names += 1
            worker.name = f"{worker.name.partition('/')[0]}/{self.names}"
            worker.finished = {}
        for index in answer.drop:
            worker.holds.pop(index, None)
        for index in answer.hand_over:
            if worker.holds.get(index) is False:
                del worker.holds[index]
        for index in answer.accepted:
            worker.committed[index] = worker.finished.pop(index)
        for index in (*answer.refused, *answer.in_dump):
            worker.finished.pop(index, None)
            worker.committed.pop(index, None)
        for lease in answer.leases:
            assert lease.index not in worker.holds
            worker.holds[lease.index] = False

    def play(self, worker: Hand) -> None:
        for index, begun in list(worker.holds.items()):
            if not begun and sum(worker.holds.values()) < 4:
                worker.holds[index] = True
                self.plays[index] = self.plays.get(index, 0) + 1
            elif begun and self.random.random() < 0.5:
                del worker.holds[index]
                place = f"{worker.name} {index} {self.plays[index]}"
                worker.finished[index] = place
                self.places.add(place)

    def drive(self) -> None:
        for name in self.ledger.silent(self.now):
            self.ledger.lose(name)
        for number, result in self.ledger.results(self.after):
            self.after = number
            if result.index not in self.dump:
                self.known[result.index] = result.place
        for index, place in list(self.known.items()):
            del self.known[index]
            if place in self.places:
                assert index not in self.dump, "twice in the dump"
                self.dump[index] = place
                self.ledger.forget([index])
            else:
                self.ledger.withdraw(index)

    def step(self, *, faults: bool) -> None:
        self.now += 0.25
        for worker in self.workers:
            if not worker.stopped:
                self.play(worker)
                self.report(worker)
        self.drive()
        if not faults:
            for worker in self.workers:
                worker.stopped = False
            return
        match self.random.randrange(12):
            case 0 if len(self.workers) > 1:
                dead = self.workers.pop(self.random.randrange(len(self.workers)))
                if self.random.random() < 0.5:  # with its memory
                    self.places -= {*dead.finished.values(), *dead.committed.values()} - {*self.dump.values()}
                self.ledger.lose(dead.name.partition("/")[0])
            case 1:
                self.new_ledger()
            case 2:
                self.join()
            case 3 | 4:
                worker = self.random.choice(self.workers)
                worker.stopped = not worker.stopped
            case _:
                pass


@pytest.mark.parametrize("seed", range(60))
def test_whatever_fails_every_request_is_in_the_dump_once(seed: int):
    cluster = Cluster(seed, count=60)
    for _ in range(cluster.random.randrange(20, 120)):
        cluster.step(faults=True)
    for _ in range(200):
        cluster.step(faults=False)
    assert sorted(cluster.dump) == list(range(60))
    assert not cluster.ledger.results()
    assert cluster.ledger.open_requests == 0


def test_without_faults_nothing_is_played_twice():
    cluster = Cluster(1, count=60)
    cluster.random.random = lambda: 0.3
    for _ in range(60):
        cluster.step(faults=False)
    assert set(cluster.plays.values()) == {1}
    assert len(cluster.dump) == 60
