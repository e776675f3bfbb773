"""Which processes may have permits is written down before they get any, and read by the lender that comes next."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from types import NoneType
from typing import Any

import pytest
from test_lending_server import GONE, Raw, hello, report

from toolyard.limits.cluster import channel
from toolyard.limits.cluster.lending import Lender
from toolyard.limits.cluster.roster import Roster
from toolyard.limits.cluster.server import LenderServer

AGES = 600.0
"""A term so long that nothing in a test can have waited for it."""
WHO = channel.identity()


class Store:
    """What outlives a lender. Writes wait for `hold`; the next `failures` of them fail; `broken`: nothing works."""

    def __init__(self) -> None:
        self.record: dict[str, Any] | None = None
        self.broken = False
        self.failures = 0
        self.writes = 0
        self.reached = threading.Event()
        self.hold = threading.Event()
        self.hold.set()

    def read(self) -> dict[str, Any] | None:
        if self.broken:
            raise OSError("the store is broken")
        return self.record

    def write(self, record: Any) -> None:
        self.writes += 1
        self.reached.set()
        assert self.hold.wait(20)
        if self.broken or self.failures:
            self.failures -= bool(self.failures)
            raise OSError("the store is broken")
        self.record = record

    @property
    def members(self) -> set[str]:
        return set(self.record["members"]) if self.record else set()

    def roster(self, *, inherits: bool = False) -> Roster:
        return Roster(self.read, self.write, inherits=inherits)

    async def next_roster(self) -> Roster:
        """That of the lender which comes next."""
        roster = self.roster(inherits=True)
        await roster.load(within=1.0)
        return roster


@pytest.fixture
def store() -> Store:
    return Store()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110 - waits for threads, sockets and timers
            await asyncio.sleep(0.001)


class TestRoster:
    async def test_the_next_lender_reads_who_was_added_and_not_struck_out(self, store: Store):
        roster = store.roster()
        for member in ("one", "two", "three"):
            await roster.add(member, WHO)
        await roster.keep_only(["one", "three"])
        found = await store.next_roster()
        assert found.complete
        assert found.members == {"one": WHO, "three": WHO}

    async def test_many_that_join_at_once_are_written_together(self, store: Store):
        roster = store.roster()
        async with asyncio.TaskGroup() as group:
            for number in range(500):
                group.create_task(roster.add(f"process {number}", WHO))
        assert len(store.members) == 500
        assert store.writes < 10

    async def test_nobody_is_taken_for_written_whose_write_failed(self, store: Store):
        """Three were to be written together. When that has failed, each of the others writes itself."""
        roster = store.roster()
        store.hold.clear()
        first = asyncio.create_task(roster.add("first", WHO))
        await until(store.reached.is_set)
        others = [asyncio.create_task(roster.add(name, WHO)) for name in ("second", "third", "fourth")]
        await asyncio.sleep(0)
        store.failures = 2
        store.hold.set()
        outcomes = await asyncio.gather(first, *others, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [ConnectionError, ConnectionError, NoneType, NoneType]
        assert store.members == set(roster.members) == {"third", "fourth"}

    async def test_a_member_that_returns_while_it_is_struck_out_is_written_down_again(self, store: Store):
        roster = store.roster()
        await roster.add("member", WHO)
        store.hold.clear()
        store.reached.clear()
        striking = asyncio.create_task(roster.keep_only([]))
        await until(store.reached.is_set)
        returning = asyncio.create_task(roster.add("member", WHO))
        await asyncio.sleep(0)
        store.hold.set()
        await striking
        await returning
        assert store.members == {"member"}

    async def test_a_roster_that_cannot_be_read_is_not_taken_for_an_empty_one(self, store: Store):
        """Nor by the lender after that, though members have been written down since: some may still be missing."""
        await store.roster().add("old", WHO)
        store.broken = True
        second = await store.next_roster()
        assert not second.complete
        store.broken = False
        await second.add("new", WHO)
        assert not (await store.next_roster()).complete
        await second.keep_only(["new"])  # a process that is still missing has stopped starting
        third = await store.next_roster()
        assert third.complete
        assert set(third.members) == {"new"}

    async def test_a_store_that_wakes_up_late_is_asked_again(self, store: Store):
        """It may have gone down together with the lender, and without the roster nothing is granted for a lease."""
        await store.roster().add("old", WHO)
        store.broken = True
        asyncio.get_running_loop().call_later(0.2, setattr, store, "broken", False)
        roster = store.roster(inherits=True)
        await roster.load(within=20.0)
        assert roster.complete
        assert set(roster.members) == {"old"}

    async def test_where_nothing_was_ever_written_nothing_is_known(self, store: Store):
        """The lender before this one may have kept no roster."""
        assert not (await store.next_roster()).complete


class Lenders:
    """One after the other, with the same store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.server: LenderServer | None = None

    async def start(self) -> None:
        """Anew, as after a crash."""
        restarted = self.server is not None
        await self.stop()
        roster = await self._store.next_roster() if restarted else self._store.roster()
        now = asyncio.get_running_loop().time()
        lender = Lender("test", 10, epoch="1", now=now, term=AGES, recovering=restarted)
        self.server = LenderServer(lender, "right", roster)
        self.port = await self.server.start("127.0.0.1")

    async def stop(self) -> None:
        if self.server is not None:
            async with asyncio.timeout(20):
                await self.server.stop()

    @property
    def known(self) -> set[str]:
        assert self.server is not None
        return set(self.server.lender.borrowers)


@pytest.fixture
async def lenders(store: Store) -> AsyncIterator[Lenders]:
    lenders = Lenders(store)
    await lenders.start()
    yield lenders
    await lenders.stop()


async def borrow(raw: Raw, permits: int) -> None:
    raw.say(report(1, waiting=permits))
    while (await raw.hear())["granted"] < permits:
        pass


class TestServer:
    async def test_a_process_is_written_down_before_it_is_let_in(self, lenders: Lenders, store: Store):
        store.hold.clear()
        async with Raw(lenders.port) as process:
            process.say(hello("process"))
            await until(store.reached.is_set)
            assert not lenders.known
            store.hold.set()
            assert (await process.hear())["granted"] == 0
            assert store.members == lenders.known == {"process"}

    async def test_one_that_cannot_be_written_down_is_sent_away_and_may_try_again(self, lenders: Lenders, store: Store):
        store.broken = True
        async with Raw(lenders.port) as process:
            process.say(hello("process"))
            assert await process.closed()
        assert not lenders.known
        store.broken = False
        async with Raw(lenders.port) as process:
            process.say(hello("process"))
            await process.hear()
            await borrow(process, 10)

    async def test_one_that_is_known_needs_no_store_to_return(self, lenders: Lenders, store: Store):
        async with Raw(lenders.port) as process:
            process.say(hello("process", identity=WHO))
            await process.hear()
        store.broken = True
        async with Raw(lenders.port) as process:
            process.say(hello("process", identity=WHO))
            await process.hear()
            await borrow(process, 10)

    @pytest.mark.parametrize("how", ["it leaves", "it dies"])
    async def test_one_that_is_gone_is_struck_out(self, lenders: Lenders, store: Store, how: str):
        async with Raw(lenders.port) as process, Raw(lenders.port) as other:
            other.say(hello("other", identity=WHO))
            await other.hear()
            process.say(hello("process", identity=GONE if how == "it dies" else WHO))
            await process.hear()
            if how == "it leaves":
                process.say({"bye": True})
            process.writer.write_eof()
            await until(lambda: store.members == {"other"})

    async def test_a_restarted_lender_lends_when_the_last_member_is_back(self, lenders: Lenders):
        for name in ("one", "two"):
            async with Raw(lenders.port) as member:
                member.say(hello(name, identity=WHO))
                await member.hear()
        await lenders.start()
        async with Raw(lenders.port) as one, Raw(lenders.port) as two:
            one.say(hello("one", identity=WHO))
            assert (await one.hear())["granted"] == 0
            one.say(report(1, waiting=10))
            assert (await one.hear())["granted"] == 0  # the other one may have them
            two.say(hello("two", identity=WHO, in_use=4))
            await two.hear()
            two.say(report(1, in_use=4, tenants={"": (4, 0, 1.0)}))
            while (await one.hear())["granted"] < 6:
                pass

    async def test_members_that_died_meanwhile_on_this_machine_are_not_waited_for(self, lenders: Lenders):
        async with Raw(lenders.port) as dead, Raw(lenders.port) as alive:
            for name, member, identity in (("dead", dead, GONE), ("alive", alive, WHO)):
                member.say(hello(name, identity=identity))
                await member.hear()
            await lenders.start()  # it learns nothing of their ends
        async with Raw(lenders.port) as alive:
            alive.say(hello("alive", identity=WHO))
            await alive.hear()
            await borrow(alive, 10)

    async def test_a_lender_that_dies_before_all_are_back_forgets_nobody(self, lenders: Lenders, store: Store):
        for name in ("early", "late"):
            async with Raw(lenders.port) as member:
                member.say(hello(name, identity=WHO))
                await member.hear()
        for _ in range(2):
            await lenders.start()
            async with Raw(lenders.port) as early:
                early.say(hello("early", identity=WHO))
                await early.hear()
                early.say(report(1, waiting=10))
                assert (await early.hear())["granted"] == 0
            assert store.members == {"early", "late"}

    async def test_an_unreadable_roster_is_waited_for_as_if_there_were_none(self, lenders: Lenders, store: Store):
        store.broken = True
        await lenders.start()
        store.broken = False
        async with Raw(lenders.port) as process:
            process.say(hello("process", identity=WHO))
            await process.hear()
            process.say(report(1, waiting=10))
            assert (await process.hear())["granted"] == 0
        assert lenders.server is not None
        assert lenders.server.lender.recovering(asyncio.get_running_loop().time() + AGES)
