"""What the lender and its borrowers promise each other, message by message; the chaos is in `test_lending_chaos`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from limiter_simulation import Clock, at_desk

from toolyard.limits.cluster.borrowing import SAFETY, BorrowingDesk
from toolyard.limits.cluster.lending import DRIFT, Lender
from toolyard.limits.desk import DeskPermit

TERM = 4.0
BURIED = TERM * DRIFT + 0.001
"""Silent for so long, a process whose connection is lost is given up."""


class Woken:
    """Stands where a waiting thread's event would be."""

    def set(self) -> None:
        pass


class Member:
    """A process: a desk, and its place at the lender."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster = cluster
        self.name = name
        self.desk = BorrowingDesk("test", cluster.lender.limit, max_hold=None, poke=lambda: None)
        self.permits: list[DeskPermit] = []
        self.connect()

    def connect(self, hello: dict[str, Any] | None = None) -> None:
        lender = self.cluster.lender
        hello = hello or self.desk.hello(self.cluster.now)
        self.borrower = lender.register(self.cluster.now, self.name, self.name, hello)
        self.desk.welcomed({
            "granted": self.borrower.granted, "epoch": lender.epoch, "term": lender.term, "limit": lender.limit,
            "version": lender.version, "adaptive": lender.adaptive,
        })  # fmt: skip

    def disconnect(self) -> None:
        self.cluster.lender.lost(self.borrower)

    def ask(self, count: int = 1, tenant: str = "", weight: float = 1.0) -> None:
        for _ in range(count):
            permit = self.desk.permit(tenant, weight, None, "")
            permit._event = Woken()
            self.permits.append(permit)
            if not self.desk.take(permit):
                self.desk.enqueue(permit)

    def end(self, count: int = 1) -> None:
        """The ones that began first."""
        for permit in list(self.desk._holders)[:count]:
            self.desk.give_back(permit)

    def report(self, *, full: bool = False) -> None:
        self.cluster.lender.sync(self.cluster.now, self.borrower, self.desk.report(self.cluster.now, full=full))

    @property
    def running(self) -> int:
        return self.desk.in_use


@dataclass
class Cluster:
    clock: Clock
    lender: Lender
    members: list[Member] = field(default_factory=list)
    joined: int = 0

    @property
    def now(self) -> float:
        return self.clock.local

    def join(self) -> Member:
        self.members.append(Member(self, f"process {self.joined}"))
        self.joined += 1
        return self.members[-1]

    def wait(self, seconds: float) -> None:
        self.clock.local += seconds

    def settle(self) -> None:
        """Exchange messages until neither side has a new one."""
        for _ in range(5):
            for member in self.members:
                if member.borrower.connected:
                    member.report()
            self.tick()

    def tick(self) -> None:
        self.lender.schedule(self.now)
        for borrower, answer in self.lender.answers(self.now):
            for member in self.members:
                if member.borrower is borrower:
                    member.desk.answered(answer)

    def restart(self, *, with_roster: bool = False) -> None:
        members = list(self.lender.borrowers)
        self.lender = new_lender(self.lender.configured, epoch="2", now=self.now, recovering=True)
        if with_roster:
            self.lender.expect(self.now, members)

    def believed(self) -> list[int]:
        return [member.borrower.held for member in self.members]


def new_lender(limit: int = 10, **options: Any) -> Lender:
    return Lender("test", limit, **{"epoch": "1", "now": 100.0, "term": TERM, **options})


@pytest.fixture
def clock() -> Iterator[Clock]:
    with at_desk(100.0) as clock:
        yield clock


@pytest.fixture
def cluster(clock: Clock) -> Cluster:
    return Cluster(clock, new_lender())


class TestClaims:
    def test_who_comes_too_late_is_counted_with_what_it_runs_and_keeps_nothing_spare(self, cluster: Cluster):
        late, other = cluster.join(), cluster.join()
        late.ask(6)
        cluster.settle()
        late.disconnect()
        cluster.wait(BURIED)
        other.ask(10)
        cluster.settle()
        assert other.running == 10
        late.end(2)
        late.connect()
        assert late.borrower.held == 4
        assert cluster.lender.outstanding == 14
        late.ask(3)
        cluster.settle()
        assert (late.running, other.running) == (4, 10)
        other.end(6)
        cluster.settle()
        assert (late.running, other.running) == (6, 4)

    def test_a_new_registration_replaces_the_one_before(self, cluster: Cluster):
        member = cluster.join()
        member.ask(7)
        cluster.settle()
        before, lent = member.borrower, member.desk.stock
        member.connect()
        assert cluster.lender.outstanding == lent
        cluster.lender.lost(before)
        cluster.lender.dead(before)
        cluster.wait(BURIED)
        cluster.settle()
        assert member.running == 7
        assert cluster.lender.outstanding == lent
        assert cluster.lender.reclaimed == 0

    def test_a_permit_that_was_granted_into_a_broken_connection_is_not_lost(self, cluster: Cluster):
        member = cluster.join()
        member.ask(10)
        member.report()
        cluster.lender.schedule(cluster.now)
        assert cluster.lender.outstanding == 10
        member.connect()
        assert cluster.lender.outstanding == 0
        cluster.settle()
        assert member.running == 10

    def test_nothing_starts_from_a_little_before_the_term_ends_that_the_lender_counts(self, cluster: Cluster):
        member = cluster.join()
        member.ask(5)
        cluster.settle()
        member.end(5)
        member.report()  # never answered
        cluster.wait(TERM * SAFETY)
        member.ask(5)
        assert member.running == 0
        assert SAFETY < 1 < DRIFT

    def test_who_reconnects_after_the_limit_was_lowered_is_not_believed_to_have_less_than_it_has(
        self, cluster: Cluster
    ):
        """Its lease is valid, so it keeps starting while its hello is under way."""
        member, other = cluster.join(), cluster.join()
        member.ask(8)
        cluster.settle()
        member.end(8)
        member.disconnect()
        cluster.lender.resize(2)
        hello = member.desk.hello(cluster.now)
        member.ask(8)
        assert member.running == 8
        member.connect(hello)
        assert member.borrower.held >= 8
        other.ask(2)
        cluster.settle()
        assert other.running == 0

    def test_executions_that_start_while_a_late_hello_is_under_way_are_counted(self, cluster: Cluster):
        late, other = cluster.join(), cluster.join()
        late.ask(5)
        cluster.settle()
        late.end(5)
        late.disconnect()
        cluster.wait(TERM * SAFETY - 0.1)
        hello = late.desk.hello(cluster.now)
        late.ask(5)
        assert late.running == 5
        cluster.wait(TERM)
        other.ask(10)
        cluster.settle()
        assert other.running == 10
        late.connect(hello)
        cluster.settle()
        assert late.running == 5
        assert late.borrower.held == 5
        assert cluster.lender.outstanding == 15

    def test_two_hellos_that_come_too_late_claim_no_more_than_one(self, cluster: Cluster):
        """The lender hung for longer than a term; meanwhile the process has tried twice, with its lease still open."""
        late, other = cluster.join(), cluster.join()
        late.ask(8)
        cluster.settle()
        late.end(8)
        late.disconnect()
        cluster.wait(TERM * SAFETY - 0.1)
        hellos = [late.desk.hello(cluster.now) for _ in range(2)]
        cluster.wait(TERM)
        other.ask(10)
        cluster.settle()
        assert other.running == 10
        cluster.lender.lost(cluster.lender.register(cluster.now, late.name, late.name, hellos[0]))
        late.connect(hellos[1])
        assert cluster.lender.outstanding == 10
        late.ask(8)
        cluster.settle()
        assert late.running + other.running == 10

    def test_who_leaves_while_its_hello_is_under_way_returns_nothing_twice(self, cluster: Cluster):
        late, other = cluster.join(), cluster.join()
        late.ask(6)
        cluster.settle()
        late.end(5)
        late.disconnect()
        cluster.wait(TERM * SAFETY - 0.1)
        hello = late.desk.hello(cluster.now)
        cluster.wait(TERM)
        other.ask(10)
        cluster.settle()
        assert late.desk.give_up() == 1
        late.connect(hello)
        late.report()
        assert late.borrower.held == late.running == 1


class TestRestart:
    def test_without_a_roster_nothing_is_granted_for_a_term(self, cluster: Cluster):
        old, new = cluster.join(), cluster.join()
        old.ask(4)
        cluster.settle()
        cluster.restart()
        old.connect()
        new.connect()
        new.ask(6)
        for _ in range(10):
            assert (old.running, new.running) == (4, 0)
            cluster.settle()
            cluster.wait(BURIED / 10)
        cluster.settle()
        assert (old.running, new.running) == (4, 6)

    def test_with_one_granting_begins_when_the_last_member_is_back(self, cluster: Cluster):
        members = [cluster.join() for _ in range(3)]
        members[0].ask(4)
        cluster.settle()
        cluster.restart(with_roster=True)
        members[1].ask(6)
        for member in members:
            cluster.settle()
            assert members[1].running == 0, f"{member.name} may have them"
            member.connect()
        cluster.settle()
        assert [member.running for member in members] == [4, 6, 0]

    def test_a_member_that_does_not_come_back_costs_the_rest_of_the_term(self, cluster: Cluster):
        gone, other = cluster.join(), cluster.join()
        gone.ask(4)
        cluster.settle()
        cluster.restart(with_roster=True)
        other.connect()
        other.ask(10)
        cluster.wait(BURIED - 0.002)
        cluster.settle()
        assert other.running == 0
        cluster.wait(0.002)
        cluster.settle()
        assert other.running == 10

    def test_a_member_that_died_with_the_lender_costs_nothing(self, cluster: Cluster):
        dead, other = cluster.join(), cluster.join()
        dead.ask(4)
        cluster.settle()
        cluster.restart(with_roster=True)
        cluster.members.remove(dead)
        other.connect()
        other.ask(10)
        cluster.settle()
        assert other.running == 0
        cluster.lender.account_for(cluster.now, dead.name)
        cluster.settle()
        assert other.running == 10

    def test_a_process_on_no_roster_ends_no_waiting(self, cluster: Cluster):
        old = cluster.join()
        old.ask(10)
        cluster.settle()
        cluster.restart(with_roster=True)
        new = cluster.join()
        new.ask(10)
        cluster.settle()
        assert (old.running, new.running) == (10, 0)
        old.connect()
        old.end(4)
        cluster.settle()
        assert old.running + new.running == 10

    def test_what_a_member_was_granted_with_the_last_breath_of_the_lender_is_counted(self, cluster: Cluster):
        last, other = cluster.join(), cluster.join()
        last.ask(10)
        last.report()
        cluster.lender.schedule(cluster.now)
        grant = dict(cluster.lender.answers(cluster.now))[last.borrower]
        cluster.restart(with_roster=True)
        other.connect()
        other.ask(10)
        last.desk.answered(grant)  # read before the connection's end is
        last.connect()
        cluster.settle()
        assert (last.running, other.running) == (10, 0)

    def test_an_empty_roster_ends_the_waiting_at_once_and_a_late_one_changes_nothing(self, cluster: Cluster):
        cluster.restart(with_roster=True)
        assert not cluster.lender.recovering(cluster.now)
        cluster.lender.expect(cluster.now, ["somebody"])
        assert not cluster.lender.recovering(cluster.now)

    def test_processes_go_on_with_what_they_have_meanwhile(self, cluster: Cluster):
        member = cluster.join()
        member.ask(4)
        cluster.settle()
        cluster.restart()
        member.connect()
        for _ in range(20):
            member.end(4)
            member.ask(4)
            assert member.running == 4
            cluster.settle()
            cluster.wait(TERM / 5)

    def test_a_lapsed_lease_leaves_nothing_spare_to_claim(self, cluster: Cluster):
        """Its permits were lent to others, before the restart that made the lender forget it."""
        lapsed, other = cluster.join(), cluster.join()
        lapsed.ask(8)
        cluster.settle()
        lapsed.end(8)
        lapsed.disconnect()
        cluster.wait(BURIED)
        other.ask(10)
        cluster.settle()
        assert other.running == 10
        cluster.restart()
        lapsed.connect()
        other.connect()
        lapsed.ask(8)
        cluster.settle()
        assert (lapsed.running, other.running) == (0, 10)
        assert cluster.lender.outstanding == 10

    def test_what_runs_is_counted_past_the_limit_and_nothing_is_granted_until_it_is_done(self, cluster: Cluster):
        late, other = cluster.join(), cluster.join()
        late.ask(6)
        cluster.settle()
        cluster.restart()
        other.connect()
        cluster.wait(BURIED)
        other.ask(10)
        cluster.settle()
        late.connect()
        cluster.settle()
        assert cluster.lender.outstanding == late.running + other.running == 16
        other.end(5)
        late.end(1)
        cluster.settle()
        assert late.running + other.running <= 10

    def test_a_changed_limit_survives_by_the_processes_that_heard_of_it(self, cluster: Cluster):
        member, stranger = cluster.join(), cluster.join()
        cluster.lender.resize(7)
        cluster.lender.resize(3)
        member.report()
        cluster.tick()
        stranger.desk.version = 1
        stranger.desk.limit = 7
        cluster.restart()
        assert cluster.lender.limit == 10
        for found in (stranger, member, stranger):
            found.connect()
        assert (cluster.lender.limit, cluster.lender.version) == (3, 2)
        assert member.desk.limit == stranger.desk.limit == 3
        cluster.lender.resize(5)
        cluster.settle()
        assert (member.desk.limit, member.desk.version) == (5, 3)


class TestResize:
    def test_upwards_it_counts_at_once(self, cluster: Cluster):
        member = cluster.join()
        member.ask(20)
        cluster.settle()
        assert member.running == 10
        cluster.lender.resize(15)
        cluster.settle()
        assert member.running == 15

    def test_downwards_nothing_is_granted_until_few_enough_are_left(self, cluster: Cluster):
        first, second = cluster.join(), cluster.join()
        first.ask(10)
        cluster.settle()
        second.ask(10)
        cluster.lender.resize(4)
        for left in range(10, 4, -1):
            cluster.settle()
            assert (first.running, second.running) == (left, 0)
            first.end()
        first.end()
        cluster.settle()
        assert first.running + second.running == 4
        assert second.running > 0

    def test_downwards_what_lies_idle_is_called_back_though_nobody_waits(self, cluster: Cluster):
        idle, busy = cluster.join(), cluster.join()
        idle.ask(8)
        busy.ask(2)
        cluster.settle()
        idle.end(8)
        cluster.lender.resize(4)
        cluster.settle()
        assert cluster.lender.outstanding <= 4
        assert busy.borrower.held == busy.running == 2
        idle.ask(8)
        assert idle.running + busy.running <= 4


class TestDeath:
    def test_permits_of_the_lost_come_back_after_a_term_and_not_before(self, cluster: Cluster):
        gone, other = cluster.join(), cluster.join()
        gone.ask(10)
        cluster.settle()
        gone.disconnect()
        other.ask(10)
        cluster.wait(BURIED - 0.002)
        other.report()
        again = cluster.lender.schedule(cluster.now)
        assert cluster.lender.outstanding == gone.borrower.held == 10
        assert again == pytest.approx(cluster.now + 0.001)
        assert again > cluster.now
        cluster.wait(0.002)
        cluster.settle()
        assert other.running == 10
        assert cluster.lender.reclaimed == 10

    def test_permits_of_the_dead_come_back_at_once(self, cluster: Cluster):
        gone, other = cluster.join(), cluster.join()
        gone.ask(10)
        cluster.settle()
        other.ask(10)
        gone.disconnect()
        cluster.lender.dead(gone.borrower)
        cluster.settle()
        assert other.running == 10

    def test_a_stalled_process_keeps_what_it_has_and_is_named(self, cluster: Cluster):
        stalled, other = cluster.join(), cluster.join()
        stalled.ask(6)
        cluster.settle()
        cluster.members.remove(stalled)
        other.ask(10)
        for _ in range(100):
            cluster.wait(TERM)
            other.report()
            cluster.tick()
        assert stalled.running == 6
        assert stalled.borrower.held == stalled.desk.stock == 10 - other.running
        states = {lease.process: lease.state for lease in cluster.lender.statistics(cluster.now).leases}
        assert states == {"process 0": "stalled", "process 1": "connected"}

    def test_a_longest_hold_also_bounds_a_stall(self, clock: Clock):
        cluster = Cluster(clock, new_lender(max_hold=30.0))
        stalled, other = cluster.join(), cluster.join()
        stalled.ask(10)
        cluster.settle()
        other.ask(10)
        cluster.members.remove(stalled)
        cluster.wait(30.0 + BURIED - 0.01)
        other.report()
        cluster.tick()
        assert other.running == 0
        assert cluster.lender.schedule(cluster.now) <= cluster.now + 0.02, "or nobody looks in time"
        cluster.wait(0.02)
        cluster.tick()
        assert other.running == 10

    def test_no_permit_is_kept_free_for_a_process_that_is_lost(self, cluster: Cluster):
        """It cannot be reached, so what it waits for is of no use to it. (It may well hold on to what it has.)"""
        lost, other = cluster.join(), cluster.join()
        other.ask(10)
        cluster.settle()
        lost.ask(20)
        other.ask(20)
        cluster.settle()
        lost.disconnect()
        other.end(10)
        cluster.settle()
        assert other.running == 10 - lost.borrower.held
        assert lost.borrower.held == lost.running == 0


class TestFairHands:
    def test_idle_permits_go_to_who_waits(self, cluster: Cluster):
        idle, waiting = cluster.join(), cluster.join()
        idle.ask(10)
        cluster.settle()
        idle.end(10)
        waiting.ask(10)
        cluster.settle()
        assert waiting.running == 10

    def test_a_process_that_uses_all_it_has_is_lent_some_to_spare(self, cluster: Cluster):
        member = cluster.join()
        member.ask(2)
        cluster.settle()
        assert 2 < member.desk.stock <= 10
        before = member.desk._seq
        member.ask(1)
        assert member.running == 3
        assert member.desk._seq == before

    def test_nothing_is_lent_to_spare_while_somebody_waits(self, cluster: Cluster):
        first, second = cluster.join(), cluster.join()
        first.ask(9)
        second.ask(9)
        cluster.settle()
        assert first.running + second.running == 10
        assert abs(first.running - second.running) <= 1
        assert cluster.believed() == [first.running, second.running]

    def test_what_was_not_used_since_the_last_sweep_is_given_back(self, cluster: Cluster):
        member = cluster.join()
        member.ask(4)
        cluster.settle()
        member.end(3)
        member.desk.give_back_idle()
        assert member.desk.stock >= 4, "four were in use since"
        member.desk.give_back_idle()
        assert member.desk.stock == 1
        member.report()
        assert cluster.lender.outstanding == 1

    def test_a_tenants_weight_is_what_it_asked_with_however_long_it_waits(self, cluster: Cluster):
        """The lender sends a process its tenants' shares; these must not come back as their weights."""
        both, crowd = cluster.join(), cluster.join()
        both.ask(50, "a")
        both.ask(50, "b", 3.0)
        crowd.ask(50, "a")
        for _ in range(5):
            cluster.settle()
            assert {tenant: weight for tenant, (_, _, weight) in both.borrower.tenants.items()} == {"a": 1.0, "b": 3.0}
            assert both.borrower.share["b"] == pytest.approx(7.5)


class TestAnswers:
    def test_say_nothing_twice(self, cluster: Cluster):
        members = [cluster.join() for _ in range(3)]
        for member in members:
            member.ask(8)
        cluster.settle()
        for member in members:
            member.report()
        cluster.lender.schedule(cluster.now)
        assert len(cluster.lender.answers(cluster.now)) == 3
        for _ in range(5):
            cluster.lender.schedule(cluster.now)
            assert cluster.lender.answers(cluster.now) == []

    def test_every_message_is_answered_as_it_renews_the_lease(self, cluster: Cluster):
        member = cluster.join()
        for _ in range(3):
            cluster.wait(1.0)
            member.report()
            cluster.tick()
            assert member.desk.open_until == pytest.approx(cluster.now + TERM * SAFETY)

    def test_an_answer_renews_from_when_the_message_was_sent_not_from_when_it_came(self, cluster: Cluster):
        member = cluster.join()
        sent = cluster.now
        report = member.desk.report(sent, full=False)
        cluster.wait(3.0)
        cluster.lender.sync(cluster.now, member.borrower, report)
        cluster.tick()
        assert member.desk.open_until == pytest.approx(sent + TERM * SAFETY)

    def test_the_lost_are_told_nothing(self, cluster: Cluster):
        member = cluster.join()
        member.ask(3)
        member.report()
        member.disconnect()
        cluster.lender.schedule(cluster.now)
        assert cluster.lender.answers(cluster.now) == []
        assert member.borrower.held == 0

    def test_starts_per_second_are_split_and_never_more_than_all(self, clock: Clock):
        cluster = Cluster(clock, new_lender(starts_per_second=30.0))
        members = [cluster.join() for _ in range(7)]
        for number, member in enumerate(members):
            member.ask(number * number)
        for _ in range(5):
            cluster.settle()
            for member in members:
                member.end(2)
            buckets = [member.desk.bucket for member in members]
            assert sum(bucket.rate for bucket in buckets) == pytest.approx(30.0)
            assert sum(bucket.burst for bucket in buckets) <= 30.0 + len(members)
            assert all(bucket.rate > 0 for bucket in buckets)


class TestAdaptive:
    @pytest.fixture
    def cluster(self, clock: Clock) -> Cluster:
        return Cluster(clock, new_lender(40, adaptive=True))

    def busy(self, cluster: Cluster, *counts: int) -> list[Member]:
        members = [cluster.join() for _ in counts]
        for member, count in zip(members, counts, strict=True):
            member.ask(count)
        cluster.settle()
        assert [member.running for member in members] == list(counts)
        return members

    def refuse(self, member: Member, count: int = 1, retry_after: float | None = None) -> None:
        """As an execution does: it says so, and then gives its permit back."""
        for _ in range(count):
            member.desk.refuse(retry_after, unavailable=False)
            member.end()

    def test_a_refusal_lowers_the_limit_to_what_was_in_flight_less_one_and_only_once(self, cluster: Cluster):
        first, second = self.busy(cluster, 20, 20)
        self.refuse(first)
        for _ in range(3):
            first.report()
            second.report()
            assert cluster.lender.capacity == 39
        assert cluster.lender.statistics(cluster.now).refused == 1

    def test_many_refusals_in_one_message_count_one_by_one(self, cluster: Cluster):
        first, _ = self.busy(cluster, 20, 20)
        self.refuse(first, 10)
        first.report()
        assert cluster.lender.capacity == 30
        assert cluster.lender.statistics(cluster.now).refused == 10

    def test_the_refusal_of_the_only_execution_counts_with_the_pause_it_asks_for(self, cluster: Cluster):
        (member,) = self.busy(cluster, 1)
        self.refuse(member, retry_after=3.0)
        member.report()
        cluster.tick()
        assert cluster.lender.statistics(cluster.now).paused_seconds == pytest.approx(3.0)
        member.ask(1)
        assert member.running == 0
        cluster.wait(2.9)
        cluster.settle()
        assert member.running == 0
        cluster.wait(0.2)
        cluster.settle()
        assert member.running == 1

    def test_a_refusal_without_a_time_does_not_take_back_the_pause_of_another(self, cluster: Cluster):
        (member,) = self.busy(cluster, 5)
        self.refuse(member, retry_after=3.0)
        self.refuse(member)
        member.report()
        assert cluster.lender.statistics(cluster.now).paused_seconds == pytest.approx(3.0)

    @pytest.mark.parametrize("restart", [False, True])
    def test_old_refusals_do_not_count_again_when_the_process_reconnects(self, cluster: Cluster, restart: bool):
        (member,) = self.busy(cluster, 20)
        self.refuse(member, 5)
        member.report()
        cluster.wait(60.0)
        cluster.settle()
        assert cluster.lender.capacity == 40
        if restart:
            cluster.lender = new_lender(40, adaptive=True, recovering=True, now=cluster.now)
        member.connect()
        member.report()
        assert cluster.lender.capacity == 40

    def test_permits_above_a_lowered_limit_are_called_back(self, cluster: Cluster):
        idle, busy = self.busy(cluster, 20, 20)
        idle.end(20)
        idle.ask(1)
        self.refuse(busy)
        cluster.settle()
        assert cluster.lender.outstanding <= cluster.lender.capacity


class TestStatistics:
    def work(self, member: Member, count: int, tenant: str) -> None:
        for _ in range(count):
            member.ask(1, tenant)
            member.cluster.settle()
            member.end()
        member.report(full=True)

    def granted(self, cluster: Cluster) -> dict[str, int]:
        found = cluster.lender.statistics(cluster.now)
        assert found.wait.count == sum(entry.granted for entry in found.tenants.values())
        return {tenant: entry.granted for tenant, entry in found.tenants.items()}

    def test_counts_of_the_dead_are_kept(self, cluster: Cluster):
        first, second = cluster.join(), cluster.join()
        self.work(first, 3, "a")
        self.work(second, 2, "b")
        cluster.lender.dead(first.borrower)
        assert self.granted(cluster) == {"a": 3, "b": 2}
        for number in range(200):
            member = cluster.join()
            self.work(member, 1, "a" if number % 2 else "c")
            cluster.lender.dead(cluster.members.pop().borrower)
        assert self.granted(cluster) == {"a": 103, "b": 2, "c": 100}

    def test_nobody_is_counted_twice_for_having_reconnected(self, cluster: Cluster):
        member = cluster.join()
        self.work(member, 3, "a")
        for _ in range(3):
            member.connect()
            assert self.granted(cluster) == {"a": 3}
            self.work(member, 0, "a")
            assert self.granted(cluster) == {"a": 3}

    def test_nor_for_having_been_given_up_in_between(self, cluster: Cluster):
        member = cluster.join()
        self.work(member, 3, "a")
        member.disconnect()
        cluster.wait(BURIED)
        cluster.tick()
        assert self.granted(cluster) == {"a": 3}
        member.connect()
        assert self.granted(cluster) == {"a": 3}
        self.work(member, 2, "a")
        assert self.granted(cluster) == {"a": 5}

    def test_holders_age_while_their_process_is_silent(self, cluster: Cluster):
        member = cluster.join()
        member.ask(1)
        cluster.settle()
        cluster.wait(1.0)
        member.report(full=True)
        cluster.wait(2.0)
        (holder,) = cluster.lender.statistics(cluster.now).holders
        assert holder.seconds == pytest.approx(3.0)

    def test_more_tenants_than_are_named_are_reported_with_all_their_demand_and_weight(self, cluster: Cluster):
        member = cluster.join()
        for number in range(500):
            member.ask(1, f"tenant {number}", 2.0)
        cluster.settle()
        tenants = member.borrower.tenants
        assert len(tenants) == 64
        assert sum(in_use + waiting for in_use, waiting, _ in tenants.values()) == 500
        assert sum(weight for _, _, weight in tenants.values()) == 1000.0
