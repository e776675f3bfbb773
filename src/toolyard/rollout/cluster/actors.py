"""The ledger and the workers as Ray actors."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from toolyard.errors import MissingDependencyError
from toolyard.rollout.cluster.ledger import Answer, Ledger, Report, Result
from toolyard.rollout.cluster.worker import Setup, Weights, Worker

try:
    ray: Any = import_module("ray")  # poorly annotated
except ImportError as error:
    raise MissingDependencyError("ray", "ray", "a rollout on a cluster") from error


@dataclass(frozen=True, slots=True)
class Orders:
    """What the driver tells the ledger."""

    ledger: str
    """The id of the ledger they are meant for."""
    offers: Sequence[tuple[int, int, bytes]] = ()
    """Requests: index, group, payload."""
    in_dump: Sequence[int] = ()
    unreadable: Sequence[int] = ()
    """Requests whose committed result cannot be read."""
    dead: Sequence[str] = ()
    """Workers."""
    after: int = 0
    """The number of the last result that the driver has heard of."""


@dataclass(frozen=True, slots=True)
class State:
    """What the ledger tells the driver."""

    ledger: str
    known: bool
    """False: the orders were meant for another ledger and were not followed."""
    results: Sequence[tuple[int, Result]] = ()
    statuses: Sequence[tuple[str, Any]] = ()
    silent: Sequence[str] = ()
    """Workers that were given up, and the requests they had will be played by others."""
    figures: Mapping[str, int] = field(default_factory=dict[str, int])
    """See `Ledger.figures`."""


class LedgerActor:
    def __init__(self, term: float, spare: int) -> None:
        self._id = uuid.uuid4().hex
        self._ledger = Ledger(term=term, spare=spare)
        self._is_open = False

    def open(self, workers: Iterable[str]) -> str:
        """Begin. `workers`: those that may have requests of a ledger before this one."""
        self._ledger.expect(workers, time.monotonic())
        self._is_open = True
        return self._id

    def report(self, said: Report) -> tuple[str, Answer | None] | None:
        """From a worker."""
        if not self._is_open:
            return None
        return self._id, self._ledger.report(said, time.monotonic()) if said.ledger == self._id else None

    def order(self, orders: Orders) -> State:
        """From the driver."""
        if not self._is_open or orders.ledger != self._id:
            return State(self._id, known=False)
        ledger = self._ledger
        for worker in orders.dead:
            ledger.lose(worker)
        silent = ledger.silent(time.monotonic())
        for worker in silent:
            ledger.lose(worker)
        for index, group, payload in orders.offers:
            ledger.offer(index, group, payload)
        ledger.forget(orders.in_dump)
        for index in orders.unreadable:
            ledger.withdraw(index)
        return State(
            self._id,
            known=True,
            results=ledger.results(orders.after),
            statuses=[(member.name, member.status) for member in ledger.members.values()],
            silent=silent,
            figures=ledger.figures(),
        )


class WorkerActor:
    """A threaded actor: `run` occupies one thread until the end."""

    def __init__(self, name: str, setup: Setup, ledger: Any, weights: Weights | None) -> None:
        self._term = setup.term
        self._ledger = ledger
        self._worker = Worker(name, setup, self._ask, weights)

    def hello(self) -> tuple[bool, int]:
        """Whether it shares the driver's folder, and its process."""
        return self._worker.shares, os.getpid()

    def run(self) -> None:
        self._worker.run()

    def update_weights(self, weights: Weights) -> None:
        self._worker.update_weights(weights)

    def stop(self) -> None:
        self._worker.stop()

    def drain(self) -> None:
        self._worker.drain()

    def set_engine_urls(self, urls: tuple[str, ...], number: int) -> None:
        self._worker.set_engine_urls(urls, number)

    def die(self) -> None:
        """For fault injection."""
        os.kill(os.getpid(), signal.SIGKILL)

    def fetch(self, indices: Sequence[int]) -> list[bytes | None]:
        return self._worker.fetch(indices)

    def _ask(self, report: Report) -> tuple[str, Answer | None] | None:
        with contextlib.suppress(ray.exceptions.RayError):  # it is being restarted, or unreachable
            return ray.get(self._ledger.report.remote(report), timeout=self._term)
        time.sleep(0.1)
        return None
