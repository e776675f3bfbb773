"""The ledger: which worker of a cluster plays which request, and whose result counts. Pure: no clock, no Ray.

**Window.** The driver offers requests in the order of the tasks and forgets them once their results are in the dump, so
the ledger only ever knows a window of them, however long the run is.

**Leases.** A worker reports several times a second; the answer tells it which requests to play. A worker that is dead,
or was silent for a *term*, loses its requests, and others play them. By then it has stopped starting tool calls: it may
do so only until a little less than a term after it *sent* the last report that was answered. One that was stopped
between this decision and the call makes the call when it goes on; where that would do harm, the journal has an entry
before the call, and nobody else makes it. If nobody was heard for a while, not even the driver, then the ledger itself
was away, and that time is hardly anybody's silence.

**Commits.** A request may be played more than once, but one result counts: the first that is committed. A worker whose
result is refused discards it. A committed result that the driver cannot read, because its worker died with it, is
withdrawn, and the request is played again.

**Tail.** If nothing is free, requests that a worker has not begun are moved to workers with room, in two steps: the
worker is asked to hand them over, and others get them once it has. So moving never plays a request twice.

**Restart.** A restarted ledger knows nothing. The driver offers its window again and names the workers that live;
nothing is leased until each of them has reported what it has, or is lost.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, eq=False)
class Entry:
    """A request in the window."""

    index: int
    """Its place in the run: task by task, sample by sample."""
    group: int
    """Requests of one task, which are preferably played by one worker."""
    payload: Any = None
    """What a worker needs to play it; opaque."""
    holder: str | None = None
    begun: bool = False
    """Its holder has begun to play it."""
    journal: list[bytes] = field(default_factory=list[bytes])
    """What its holders heard so far, if they do not write that to a shared folder."""
    in_folder: bool = False
    """A holder wrote its journal to the shared folder."""
    returned: bool = False
    """It was leased before, and its worker was lost or handed it over."""
    result: Result | None = None
    number: int = 0
    """The number of its result, in the order of commits."""


@dataclass(frozen=True, slots=True)
class Result:
    """A committed result: who has it and where. The place is opaque to the ledger."""

    index: int
    worker: str
    place: Any


@dataclass(slots=True, eq=False)
class Member:
    """A worker, as the ledger sees it."""

    name: str
    heard: float
    room: int = 0
    """How many requests it can take on."""
    draining: bool = False
    shares: bool = True
    """Whether it sees the shared folder."""
    holds: set[int] = field(default_factory=set[int])
    waiting: set[int] = field(default_factory=set[int])
    """Those of `holds` that it has not begun."""
    asked_back: set[int] = field(default_factory=set[int])
    """Requests it is to hand over unless it has begun them."""
    in_dump: list[int] = field(default_factory=list[int])
    """Results of its own that it can discard; told with the next answer."""
    status: Any = None
    """What it says about itself, for the driver; opaque."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a worker says. It repeats everything it has, so that a lost report does not matter."""

    worker: str
    ledger: str
    """The id of the ledger it is written for."""
    room: int
    holds: Sequence[int]
    begun: Sequence[int]
    """Those of `holds` that it has begun."""
    finished: Sequence[tuple[int, Any]] = ()
    """Results that this ledger has neither accepted nor refused: index and place."""
    journals: Sequence[tuple[int, int, Sequence[bytes]]] = ()
    """The journals of requests it holds: index, number of an entry, and all entries from there on."""
    shares: bool = True
    """Whether it sees the shared folder, where its journals and results are."""
    draining: bool = False
    status: Any = None


@dataclass(frozen=True, slots=True)
class Lease:
    index: int
    payload: Any
    journal: Sequence[bytes]
    """What its last holder heard, unless that is in the shared folder."""


@dataclass(frozen=True, slots=True)
class Answer:
    leases: Sequence[Lease] = ()
    drop: Sequence[int] = ()
    """Requests that are no longer its own: abort them."""
    hand_over: Sequence[int] = ()
    """Requests to hand over, unless they have begun."""
    accepted: Sequence[int] = ()
    """Finished, and the first. Keep the result until it is in the dump: a restarted ledger has to be told again."""
    refused: Sequence[int] = ()
    """Finished, but another result counts."""
    in_dump: Sequence[int] = ()
    """Accepted, and no longer needed."""
    lost: bool = False
    """It was silent for too long and has lost everything. It may go on under another name."""


class Ledger:
    """`term`: seconds of silence after which a worker loses its requests. `spare`: requests leased to a worker beyond
    those it can begin at once, so that it never waits for a lease."""

    def __init__(self, *, term: float = 4.0, spare: int = 4) -> None:
        self.term = term
        self.spare = spare
        self.members: dict[str, Member] = {}
        self.lost: set[str] = set()
        """Workers that are dead or were too silent, which lose everything. One that was only silent goes on under
        another name, `worker/1a2b`."""
        self._hungry: set[str] = set()
        """Workers with room for more than they have."""
        self._expected: dict[str, float] = {}
        """Workers that may still have requests of a ledger before this one, and since when they are expected."""
        self._listened: float | None = None
        """When anybody was last heard."""
        self._entries: dict[int, Entry] = {}
        self._free: dict[int, list[int]] = {}
        """Free requests by group, in the order in which they will be leased."""
        self._results: dict[int, Result] = {}
        """Committed and not yet in the dump, numbered in the order of their commits."""
        self._commits = self._refusals = self._reclaimed = 0

    # ------------------------------------------------------------------------------------------------- for the driver
    def expect(self, workers: Iterable[str], now: float) -> None:
        """Lease nothing until each of these workers has reported or is lost."""
        self._listen(now)
        self._expected |= {name: now for name in workers if name not in self.members and name not in self.lost}

    def offer(self, index: int, group: int, payload: Any) -> None:
        """Add a request to the window. Offering it twice is harmless."""
        if index not in self._entries:
            self._entries[index] = entry = Entry(index, group, payload)
            self._put_back(entry)

    def forget(self, indices: Iterable[int]) -> None:
        """These requests are in the dump."""
        for index in indices:
            entry = self._entries.pop(index, None)
            if entry is not None:
                self._take(entry)
                self._release(entry)
                self._results.pop(entry.number, None)
                winner = None if entry.result is None else self.members.get(entry.result.worker)
                if winner is not None:
                    winner.in_dump.append(index)

    def results(self, after: int = 0) -> list[tuple[int, Result]]:
        """The numbered results that are not in the dump yet, from number `after` + 1 on."""
        return [(number, result) for number, result in self._results.items() if number > after]

    def withdraw(self, index: int) -> None:
        """The committed result cannot be read: play the request again."""
        entry = self._entries.get(index)
        if entry is not None and entry.result is not None:
            self._results.pop(entry.number, None)
            entry.result, entry.returned = None, True
            if entry.holder is None:
                self._put_back(entry)

    def lose(self, worker: str) -> list[int]:
        """The worker is dead. Returns the requests it had, which others will play."""
        self.lost.add(worker)
        self._expected.pop(worker, None)
        gone = [name for name in self.members if name == worker or name.startswith(f"{worker}/")]
        lost = sorted(index for name in gone for index in self.members.pop(name).holds)
        self._hungry.difference_update(gone)
        self._reclaimed += len(lost)
        for index in reversed(lost):  # the first last: it goes first then
            entry = self._entries[index]
            entry.holder, entry.begun, entry.returned = None, False, True
            if entry.result is None:
                self._put_back(entry)
        return lost

    def silent(self, now: float) -> list[str]:
        """The workers that have been silent for a term."""
        self._listen(now)
        heard = self._expected | {member.name: member.heard for member in self.members.values()}
        return [name for name, last in heard.items() if now - last > self.term]

    @property
    def open_requests(self) -> int:
        """Requests in the window without a result."""
        return sum(entry.result is None for entry in self._entries.values())

    def figures(self) -> dict[str, int]:
        """For those who watch the run. The totals (committed, refused, reclaimed, lost) begin with this ledger."""
        return {
            "workers": len(self.members),
            "open": self.open_requests,
            "leased": sum(len(member.holds) for member in self.members.values()),
            "committed": self._commits,
            "refused": self._refusals,
            "reclaimed": self._reclaimed,
            "lost": len(self.lost),
        }

    # ----------------------------------------------------------------------------------------------------- for workers
    def report(self, said: Report, now: float) -> Answer:
        """Take note of what a worker says, and tell it what to do."""
        self._listen(now)
        if said.worker in self.lost:
            self._refusals += len(said.finished)
            return Answer(drop=said.holds, refused=[index for index, _ in said.finished], lost=True)
        member = self.members.get(said.worker)
        if member is None:
            member = self.members[said.worker] = Member(said.worker, now)
        self._expected.pop(said.worker.partition("/")[0], None)
        member.heard, member.room, member.status = now, said.room, said.status
        member.draining, member.shares = said.draining, said.shares
        drop = self._adopt(member, said)
        for index, start, entries in said.journals:
            if index in member.holds:
                self._entries[index].journal[start:] = entries
        accepted, refused = self._commit(member, said.finished)
        leases = self._lease(member) if not self._expected and not member.draining else []
        if member.draining:
            self._ask_back(member, len(member.holds))
        hungry = member.room > len(member.waiting) and not member.draining
        (self._hungry.add if hungry else self._hungry.discard)(member.name)
        in_dump, member.in_dump = member.in_dump, []
        return Answer(leases, drop, sorted(member.asked_back), accepted, refused, in_dump)

    def _listen(self, now: float) -> None:
        """The driver speaks several times a second: after a long gap, it was the ledger that was stopped or cut off.
        However long, a gap counts as a quarter of a term, so that a driver that is slow only delays what is noticed."""
        gap, self._listened = now - (now if self._listened is None else self._listened), now
        away = gap - self.term / 4
        if away > 0:
            for member in self.members.values():
                member.heard += away
            self._expected = {name: since + away for name, since in self._expected.items()}

    def _adopt(self, member: Member, said: Report) -> list[int]:
        """Make what it holds agree with what the ledger knows. Returns what is not its own."""
        begun, drop = set(said.begun), list[int]()
        ended = {index for index, _ in said.finished}
        for index in said.holds:
            entry = self._entries.get(index)
            if entry is None or entry.result is not None or entry.holder not in (None, member.name):
                drop.append(index)
                continue
            if entry.holder is None:  # leased by a ledger before this one
                self._take(entry)
                entry.holder = member.name
                member.holds.add(index)
            entry.begun = index in begun
            (member.waiting.discard if entry.begun else member.waiting.add)(index)
            entry.in_folder |= entry.begun and member.shares
        # A report that was sent before the answer with a lease arrived does not list it; leases are only given in
        # answers, and a worker has one report under way at a time, so what it does not list was handed over.
        for index in sorted(member.holds - set(said.holds) - ended, reverse=True):  # the first last: it goes first then
            entry = self._entries[index]
            self._release(entry)
            entry.returned = True
            if entry.result is None:
                self._put_back(entry)
        member.asked_back &= member.waiting
        return drop

    def _commit(self, member: Member, finished: Sequence[tuple[int, Any]]) -> tuple[list[int], list[int]]:
        accepted, refused = list[int](), list[int]()
        for index, place in finished:
            entry = self._entries.get(index)
            if entry is None or (entry.result is not None and entry.result.worker != member.name):
                refused.append(index)
                self._refusals += 1
                continue
            accepted.append(index)
            if entry.result is None:  # not a repetition
                entry.result = Result(index, member.name, place)
                entry.number = self._commits = self._commits + 1
                self._results[self._commits] = entry.result
                self._take(entry)
                if entry.holder == member.name:
                    self._release(entry)
        # Whoever else plays it learns so from `_adopt` at its next report.
        return accepted, refused

    def _lease(self, member: Member) -> list[Lease]:
        others_wait = bool(self._hungry - {member.name})
        room = member.room + (0 if others_wait else self.spare) - len(member.waiting)
        leases = list[Lease]()
        for indices in list(self._free.values()):
            free = [index for index in indices if self._can_continue(member, self._entries[index])]
            if room <= 0 or (leases and len(free) > room):
                break  # the rest of a group goes to whoever takes all of it
            for index in free[:room]:
                entry = self._entries[index]
                self._take(entry)
                entry.holder, entry.begun = member.name, False
                member.holds.add(index)
                member.waiting.add(index)
                leases.append(Lease(index, entry.payload, tuple(entry.journal)))
                room -= 1
        if not leases and not self._free and member.room and not member.waiting:
            self._ask_others(member)
        return leases

    def _can_continue(self, member: Member, entry: Entry) -> bool:
        """A request with a journal in the folder goes to a worker that can read it, as long as there is one."""
        return member.shares or not entry.in_folder or not any(other.shares for other in self.members.values())

    def _ask_others(self, member: Member) -> None:
        """Nothing is free: ask the worker with the most requests that wait to hand over half of them."""
        others = [other for other in self.members.values() if other is not member]
        if others and not any(other.asked_back for other in others):
            most = max(others, key=lambda other: len(other.waiting))
            self._ask_back(most, min(member.room, (len(most.waiting) + 1) // 2))

    def _ask_back(self, member: Member, count: int) -> None:
        member.asked_back.update(sorted(member.waiting, reverse=True)[:count])

    # -------------------------------------------------------------------------------------------------------- its parts
    def _put_back(self, entry: Entry) -> None:
        """Make it free. One that was leased before goes first: its group waits for it."""
        group = self._free.setdefault(entry.group, [])
        insort(group, entry.index)
        if entry.returned:
            self._free = {entry.group: self._free.pop(entry.group), **self._free}

    def _take(self, entry: Entry) -> None:
        free = self._free.get(entry.group, [])
        if entry.index in free:
            free.remove(entry.index)
            if not free:
                del self._free[entry.group]

    def _release(self, entry: Entry) -> None:
        if entry.holder is not None:
            member = self.members.get(entry.holder)
            if member is not None:
                for known in (member.holds, member.waiting, member.asked_back):
                    known.discard(entry.index)
            entry.holder, entry.begun = None, False
