"""Processes that check answers, kept warm, and killed when they take too long.

Each belongs to a thread, which starts it, gives it one check at a time, and kills it at the deadline. The kernel kills
it with its parent. A fork of the parent forgets all of them and starts its own.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import replace
from weakref import WeakSet

from toolyard.errors import OURS, RewardError
from toolyard.rewards.math.process import CheckReply, CheckRequest, Child, LostError

_TRIES = 2


class CheckJob:
    """One pending check."""

    def __init__(self, request: CheckRequest, seconds: float) -> None:
        self.request = request
        self.seconds = seconds
        self.outcome: Future[CheckReply] = Future()
        self.given_up = False
        self.child: Child | None = None
        """The worker that runs it."""


class Pool:
    """At most `children` processes, each started when a check finds none idle."""

    def __init__(self, children: int, memory_bytes: int, checks_per_child: int) -> None:
        self.children = children
        self.memory_bytes = memory_bytes
        self.checks_per_child = checks_per_child
        self._begin()
        _pools.add(self)

    def _begin(self) -> None:
        self.changed = threading.Condition()
        self.waiting: deque[CheckJob] = deque()
        self._workers: list[_CheckWorker] = []

    def submit(self, request: CheckRequest, seconds: float) -> CheckJob:
        job = CheckJob(request, seconds)
        with self.changed:
            self.waiting.append(job)
            if len(self.waiting) > sum(worker.idle for worker in self._workers):
                self._grow()
            self.changed.notify()
        return job

    def _grow(self) -> None:
        if len(self._workers) == self.children:
            return
        worker = _CheckWorker(self)
        try:
            worker.thread.start()
        except RuntimeError as error:  # no more threads can be started, or the interpreter is ending
            if not self._workers:
                self.waiting.clear()
                raise RewardError(f"an answer cannot be checked: {error}", whose=OURS) from error
        else:
            self._workers.append(worker)

    def give_up(self, job: CheckJob) -> None:
        """Abandon a check. If it is running, its process is killed."""
        with self.changed:
            job.given_up = True
            if not job.outcome.cancel() and job.child is not None:
                job.child.kill()

    def pids(self) -> list[int]:
        """Return the ids of the live children."""
        with self.changed:
            found = [worker.child for worker in self._workers]
        return [child.pid for child in found if child is not None and child.alive]

    def close(self) -> None:
        """End all processes. Running and waiting checks fail; a later one starts new processes."""
        with self.changed:
            workers, self._workers = self._workers, []
            waiting, self.waiting = self.waiting, deque()
            for worker in workers:
                worker.stopped = True
                if worker.child is not None:
                    worker.child.kill()
            self.changed.notify_all()
        for job in waiting:
            if job.outcome.set_running_or_notify_cancel():
                job.outcome.set_exception(_closed())
        for worker in workers:
            worker.thread.join()

    def forget(self) -> None:
        """In a fork: the threads do not exist, and the processes are the parent's."""
        for worker in self._workers:
            if worker.child is not None:
                worker.child.disown()
        self._begin()


class _CheckWorker:
    """A thread and its process."""

    def __init__(self, pool: Pool) -> None:
        self.child: Child | None = None
        self.idle = False
        self.stopped = False
        self._pool = pool
        # A daemon: the interpreter must not wait for it at exit; `atexit` closes the pool before.
        self.thread = threading.Thread(target=self._work, name="toolyard-math", daemon=True)

    def _work(self) -> None:
        try:
            while (job := self._next()) is not None:
                if not job.outcome.set_running_or_notify_cancel():
                    continue
                try:
                    reply = self._perform(job)
                except BaseException as error:
                    job.outcome.set_exception(error)
                else:
                    job.outcome.set_result(reply)
                del job  # an idle worker must not keep the answer alive
        finally:
            self._drop()

    def _next(self) -> CheckJob | None:
        pool = self._pool
        with pool.changed:
            self.idle = True
            while not self.stopped and not pool.waiting:
                pool.changed.wait()
            self.idle = False
            return None if self.stopped else pool.waiting.popleft()

    def _perform(self, job: CheckJob) -> CheckReply:
        complaint, crashes = "", 0
        for _ in range(_TRIES):
            try:
                return self._judge(job)
            except LostError as error:
                complaint, crashes = str(error), crashes + error.crashed
        if crashes == _TRIES:
            with contextlib.suppress(LostError):
                return replace(self._check_truth_alone(job), right=False, extracted=None)
        raise RewardError(f"an answer could not be checked, in {_TRIES} tries: {complaint}", whose=OURS)

    def _judge(self, job: CheckJob) -> CheckReply:
        reply = self._ask(job, job.request)
        if reply.timed_out and not reply.truth_problem:
            problem = self._check_truth_alone(job).truth_problem
            return replace(reply, truth_problem=problem)
        return reply

    def _check_truth_alone(self, job: CheckJob) -> CheckReply:
        """Find out who is to blame: a ground truth that also fails with the simplest answer is itself at fault."""
        reply = self._ask(job, CheckRequest(job.request.truth, "1", boxed=True))
        if reply.timed_out:
            return replace(reply, truth_problem=f"could not be compared with anything within {job.seconds:g} s")
        return reply

    def _ask(self, job: CheckJob, request: CheckRequest) -> CheckReply:
        try:
            reply = self._check_in_child(job, request)
        except BaseException:
            self._drop()
            raise
        if reply.timed_out or reply.spent or self._worn_out():
            self._drop()
        return reply

    def _check_in_child(self, job: CheckJob, request: CheckRequest) -> CheckReply:
        self._ensure_wanted(job)
        child = self._live_child()
        with self._pool.changed:
            self._ensure_wanted(job)
            job.child = child
        try:
            return child.check(request, job.seconds)
        except LostError:
            self._ensure_wanted(job)
            raise
        finally:
            with self._pool.changed:  # from here on it is not killed for this job
                job.child = None

    def _ensure_wanted(self, job: CheckJob) -> None:
        if self.stopped:
            raise _closed()
        if job.given_up:
            raise RewardError("this check was abandoned", whose=OURS)

    def _live_child(self) -> Child:
        if self.child is not None and not self.child.alive:  # it died while idle
            self._drop()
        if self.child is None:
            self.child = Child(self._pool.memory_bytes)
            self.child.begin()
        return self.child

    def _worn_out(self) -> bool:
        return self.child is not None and self.child.checks >= self._pool.checks_per_child

    def _drop(self) -> None:
        child, self.child = self.child, None
        if child is not None:
            child.end()


def _closed() -> RewardError:
    return RewardError("an answer could not be checked: the checker was closed", whose=OURS)


_pools: WeakSet[Pool] = WeakSet()


def _forget_all() -> None:
    for pool in list(_pools):
        pool.forget()


def _close_all() -> None:
    for pool in list(_pools):
        pool.close()


os.register_at_fork(after_in_child=_forget_all)
atexit.register(_close_all)
