"""The metrics of a run. Finished requests are counted as they end; the current state is read at each scrape.

All methods that read can be called from any thread. Labels take few values: finish reasons, tools, servers, nodes;
never requests or tasks.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter as Counts
from collections.abc import Iterable, Mapping, Sequence

from toolyard._version import __version__
from toolyard.engines.protocol import ServerLoad
from toolyard.errors import MissingDependencyError
from toolyard.records.trajectory import CallRecord, Trajectory
from toolyard.rollout.finish import RolloutState
from toolyard.rollout.observer import Observer, Running
from toolyard.rollout.run_many import Stuck
from toolyard.rollout.status import SandboxLoad, Status, added_up
from toolyard.rollout.summary import Summary as RunSummary
from toolyard.rollout.watching.page import (
    MAX_NODES,
    MAX_REQUESTS,
    LimiterRow,
    NodeRow,
    RequestRow,
    SandboxRow,
    ServerRow,
    StatusPage,
)
from toolyard.sandbox.protocol import Verdict
from toolyard.tools.calls import ToolOutcome

try:
    from prometheus_client import CollectorRegistry, Counter, Histogram, Summary, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector
except ImportError as error:
    raise MissingDependencyError("prometheus_client", "server", "metrics of a rollout") from error

from toolyard.limits.prometheus_client import LimiterCollector, Readable, read_all

_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
_MAX_VALUES = 50
"""Values of a label that comes from outside: sources of failures, parts of a reward. Others are counted together."""
OTHERS = "(others)"
_LIVE = (RolloutState.PENDING, RolloutState.GENERATING, RolloutState.TOOL_CALLING, RolloutState.INTERACTING)
_OF_A_TOOL = {outcome.value for outcome in ToolOutcome} - {ToolOutcome.UNKNOWN_TOOL.value}
"""Outcomes of calls whose tool exists; with others, its name is whatever the model wrote."""
_VERDICTS = {verdict.value for verdict in Verdict}


class RunMetrics(Observer):
    """The metrics of one run, in their own registry."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._run: Running | None = None
        self._planned = self._before = 0
        self._summary = RunSummary()
        self._failed = 0
        self._registry = registry = CollectorRegistry()
        self._trajectories = Counter(
            "toolyard_rollout_trajectories", "Requests that ended.", ["state", "finish_reason"], registry=registry
        )
        self._failures = Counter(
            "toolyard_rollout_failures",
            "Requests that failed, by whose failure it was, stage, and what failed.",
            ["whose", "stage", "source"],
            registry=registry,
        )
        self._turns = Counter("toolyard_rollout_turns", "Turns of requests that ended.", registry=registry)
        self._tokens = Counter("toolyard_rollout_tokens", "Tokens of requests that ended.", ["kind"], registry=registry)
        self._stage_seconds = Histogram(
            "toolyard_rollout_stage_seconds",
            "Time of one stage of one turn.",
            ["stage"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._request_seconds = Histogram(
            "toolyard_rollout_request_seconds", "Time of a whole request.", buckets=_SECONDS, registry=registry
        )
        self._score = Summary("toolyard_rollout_score", "Scores of trajectories that have one.", registry=registry)
        self._rewards = Summary("toolyard_rollout_reward", "Rewards by part of the score.", ["part"], registry=registry)
        self._stuck = Counter(
            "toolyard_rollout_stuck", "Reports of requests that were in one stage for too long.", registry=registry
        )
        self._calls = Counter(
            "toolyard_tool_calls",
            "Tool calls of requests that ended; for programs, with the sandbox's verdict.",
            ["tool", "outcome", "verdict"],
            registry=registry,
        )
        self._call_seconds = Histogram(
            "toolyard_tool_call_seconds", "Time of a tool call.", ["tool"], buckets=_SECONDS, registry=registry
        )
        self._wait_seconds = Histogram(
            "toolyard_tool_wait_seconds",
            "Time that a call waited for a permit and a free sandbox worker.",
            ["tool"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._sources, self._parts = _Values(), _Values()
        registry.register(_Now(self))

    # ------------------------------------------------------------------------------------------------ from the run
    def opened(self, total: int, done: int) -> None:
        self._planned, self._before = total, done

    def began(self, run: Running) -> None:
        self._run = run

    def stuck(self, stuck: Stuck) -> None:
        self._stuck.inc()

    def told(self, kind: str, text: str) -> None:
        if kind == "stuck":
            self._stuck.inc()

    def ended(self, trajectory: Trajectory, summary: RunSummary) -> None:
        self._summary = summary
        self._trajectories.labels(trajectory.state, trajectory.finish_reason).inc()
        self._turns.inc(len(trajectory.turns))
        self._tokens.labels("sampled").inc(trajectory.metrics.get("sampled_tokens", 0))
        self._tokens.labels("prompt").inc(len(trajectory.tokens.prompt_ids))
        self._tokens.labels("response").inc(len(trajectory.tokens.response_ids))
        self._request_seconds.observe(sum(trajectory.metrics.get("seconds", {}).values()))
        for turn in trajectory.turns:
            for stage, seconds in turn.timings.items():
                if stage != "started":
                    self._stage_seconds.labels(stage).observe(seconds)
            for call in turn.tool_calls:
                self._count_call(call)
        if trajectory.score is not None:
            self._score.observe(trajectory.score)
        for part, reward in trajectory.rewards.items():
            if reward is not None:
                self._rewards.labels(self._parts.bounded(part)).observe(reward)
        failure = trajectory.failure
        if failure is not None:
            self._failed += 1
            self._failures.labels(failure.whose, failure.stage, self._sources.bounded(failure.source)).inc()

    def _count_call(self, call: CallRecord) -> None:
        tool = call.name if call.outcome in _OF_A_TOOL else OTHERS
        verdict = str(call.metrics.get("verdict"))
        self._calls.labels(tool, call.outcome, verdict if verdict in _VERDICTS else "").inc()
        self._call_seconds.labels(tool).observe(call.seconds)
        waited = call.metrics.get("queue_seconds")
        if isinstance(waited, int | float):
            self._wait_seconds.labels(tool).observe(waited)

    # ------------------------------------------------------------------------------------------------- for readers
    def exposition(self) -> bytes:
        """In Prometheus's text format."""
        return generate_latest(self._registry)

    @property
    def statuses(self) -> Mapping[str, Status]:
        return {} if self._run is None else self._run.statuses

    @property
    def ledger(self) -> Mapping[str, int]:
        return {} if self._run is None else self._run.ledger

    @property
    def limiters(self) -> list[Readable]:
        found: Sequence[object] = () if self._run is None else self._run.limiters
        return [one for one in found if isinstance(one, Readable)]

    @property
    def progress(self) -> Mapping[str, int]:
        done = self._before + self._summary.trajectories
        return {"planned": self._planned, "done": done, "is_blocked": self._run is not None and self._run.is_blocked}

    def page(self) -> StatusPage:
        summary, statuses = self._summary, self.statuses
        live = statuses.values()
        nodes = sorted(statuses.items(), key=lambda item: sum(item[1].states.values()), reverse=True)
        slow = [(name, one) for name, status in statuses.items() for one in status.slowest]
        load = _sandbox(live)
        progress = self.progress
        return StatusPage(
            toolyard=__version__,
            pid=os.getpid(),
            seconds=time.monotonic() - self._began,
            planned=progress["planned"],
            done=progress["done"],
            done_before=self._before,
            failed=self._failed,
            mean_score=summary.score.mean if summary.score.count else None,
            finish_reasons=dict(summary.finish_reasons),
            states=dict(_states(live)),
            turns=summary.turns + sum(one.turns for one in live),
            sampled_tokens=summary.sampled_tokens + sum(one.tokens for one in live),
            tool_calls=sum(dict(summary.outcomes).values()) + sum(one.calls for one in live),
            is_blocked=bool(progress["is_blocked"]),
            nodes=[
                NodeRow(
                    name=name,
                    host=one.node,
                    pid=one.pid,
                    states=one.states,
                    turns=one.turns,
                    sampled_tokens=one.tokens,
                    tool_calls=one.calls,
                )
                for name, one in nodes[:MAX_NODES]
            ],
            node_count=len(nodes),
            ledger=dict(self.ledger),
            servers=[ServerRow(**server._asdict()) for server in _servers(live)],
            sandbox=None if load is None else SandboxRow(**load._asdict()),
            limiters=[
                LimiterRow(
                    name=name,
                    limit=now.limit,
                    in_flight=now.in_flight,
                    waiting=now.waiting,
                    wait_p50=now.wait.p50,
                    wait_p99=now.wait.p99,
                )
                for name, now in read_all(self.limiters).items()
                if now is not None
            ],
            slowest=[
                RequestRow(node=name, **one._asdict())
                for name, one in sorted(slow, key=lambda item: -item[1].seconds)[:MAX_REQUESTS]
            ],
        )


class _Values:
    """Bounds the number of values of a label."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def bounded(self, value: str) -> str:
        value = value[:100]
        if value not in self._seen and len(self._seen) >= _MAX_VALUES:
            return OTHERS
        self._seen.add(value)
        return value


class _Kept:
    """Adds up counters of several workers. What a worker that died had counted still counts: a total that shrinks
    would be taken for a restart."""

    def __init__(self) -> None:
        self._last: dict[str, dict[str, int]] = {}

    def add(self, worker: str, counts: Mapping[str, int]) -> None:
        # A worker that was cut off goes on counting under another name, `worker/1a2b`.
        self._last.setdefault(worker.partition("/")[0], {}).update(counts)

    def totals(self) -> dict[str, int]:
        totals: Counts[str] = Counts()
        for counts in self._last.values():
            totals.update(counts)
        return dict(totals)


class _Now(Collector):
    """What is read on each scrape."""

    def __init__(self, metrics: RunMetrics) -> None:
        self._metrics = metrics
        self._lock = threading.Lock()
        self._answered, self._failed, self._executions = _Kept(), _Kept(), _Kept()
        self._limiters: tuple[list[str], LimiterCollector] = [], LimiterCollector()

    def describe(self) -> Iterable[Metric]:
        """Tells the registry nothing, so that registering reads nothing."""
        return ()

    def collect(self) -> Iterable[Metric]:
        with self._lock:  # two scrapes at once would count twice
            statuses = self._metrics.statuses
            yield from self._run(statuses)
            yield from self._engines(statuses)
            yield from self._sandboxes(statuses)
            yield from self._ledger()
            yield from self._limits()

    def _run(self, statuses: Mapping[str, Status]) -> Iterable[Metric]:
        progress = self._metrics.progress
        yield _gauge("toolyard_rollout_planned", "Requests of the run.", progress["planned"])
        yield _gauge("toolyard_rollout_done", "Requests in the dump, those of earlier runs too.", progress["done"])
        yield _gauge("toolyard_rollout_blocked", "Whether the event loop is blocked.", progress["is_blocked"])
        states = _states(statuses.values())
        yield _gauges(
            "toolyard_rollout_running",
            "Running requests by state.",
            "state",
            {state.value: states[state.value] for state in _LIVE},
        )
        live = [(one.turns, one.tokens, one.calls) for one in statuses.values()]
        kinds = ("turns", "sampled_tokens", "tool_calls")
        yield _gauges(
            "toolyard_rollout_live",
            "Turns, sampled tokens and tool calls of running requests.",
            "kind",
            {kind: sum(row[place] for row in live) for place, kind in enumerate(kinds)},
        )
        nodes = GaugeMetricFamily("toolyard_node_requests", "Running requests by node.", labels=["node", "host"])
        counts: Counts[tuple[str, str]] = Counts()
        for name, one in statuses.items():
            counts[name.partition("-")[0], one.node] += sum(one.states.values())
        for labels, count in counts.items():
            nodes.add_metric(labels, count)
        yield nodes
        build = GaugeMetricFamily("toolyard_build_info", "The running version.", labels=["version"])
        build.add_metric([__version__], 1)
        yield build

    def _engines(self, statuses: Mapping[str, Status]) -> Iterable[Metric]:
        for name, one in statuses.items():
            self._answered.add(name, {server.url: server.answered for server in one.servers})
            self._failed.add(name, {server.url: server.failed for server in one.servers})
        servers = _servers(statuses.values())
        in_flight = {server.url: server.in_flight for server in servers}
        up = {server.url: int(server.is_up) for server in servers}
        yield _gauges("toolyard_engine_in_flight", "Requests at a server.", "server", in_flight)
        yield _gauges("toolyard_engine_up", "0 while a server is paused after a failure.", "server", up)
        yield _counters("toolyard_engine_answers", "Answers of a server.", "server", self._answered.totals())
        yield _counters("toolyard_engine_failures", "Failed attempts at a server.", "server", self._failed.totals())

    def _sandboxes(self, statuses: Mapping[str, Status]) -> Iterable[Metric]:
        for name, one in statuses.items():
            if one.sandbox is not None:
                self._executions.add(name, one.sandbox.executions)
        load = _sandbox(statuses.values()) or SandboxLoad(0, 0, 0, 0, {})
        yield _gauge("toolyard_sandbox_workers", "Programs that can run at once.", load.workers)
        yield _gauge("toolyard_sandbox_busy_workers", "Workers running a program.", load.busy)
        yield _gauge("toolyard_sandbox_waiting", "Programs waiting for a worker.", load.waiting)
        yield _gauge("toolyard_sandbox_sessions", "Open sessions.", load.sessions)
        executions = self._executions.totals()
        yield _counters("toolyard_sandbox_executions", "Finished programs, by verdict.", "verdict", executions)

    def _ledger(self) -> Iterable[Metric]:
        figures = self._metrics.ledger
        if not figures:
            return
        yield _gauge("toolyard_ledger_workers", "Workers that report.", figures["workers"])
        yield _gauge("toolyard_ledger_open", "Requests that have no result yet.", figures["open"])
        yield _gauge("toolyard_ledger_leased", "Requests leased to workers.", figures["leased"])
        yield _counter("toolyard_ledger_committed", "Results accepted.", figures["committed"])
        yield _counter("toolyard_ledger_refused", "Results refused: another one counts.", figures["refused"])
        yield _counter("toolyard_ledger_reclaimed", "Requests taken back from lost workers.", figures["reclaimed"])
        yield _counter("toolyard_ledger_lost_workers", "Workers that died or were silent.", figures["lost"])

    def _limits(self) -> Iterable[Metric]:
        limiters = self._metrics.limiters
        names = [limiter.name for limiter in limiters]
        if names != self._limiters[0]:
            # A tenant is a trajectory here, so tenants have no series.
            self._limiters = names, LimiterCollector(*limiters, max_tenants=0)
        yield from self._limiters[1].collect()


def _states(statuses: Iterable[Status]) -> Counts[str]:
    states: Counts[str] = Counts()
    for status in statuses:
        states.update(status.states)
    return states


def _servers(statuses: Iterable[Status]) -> list[ServerLoad]:
    """Added up over workers. A server is up if it is for one of them."""
    found: dict[str, ServerLoad] = {}
    for status in statuses:
        for one in status.servers:
            to = found.get(one.url, ServerLoad(one.url, 0, 0, 0, is_up=False))
            found[one.url] = ServerLoad(
                one.url,
                to.in_flight + one.in_flight,
                to.answered + one.answered,
                to.failed + one.failed,
                to.is_up or one.is_up,
            )
    return list(found.values())


def _sandbox(statuses: Iterable[Status]) -> SandboxLoad | None:
    return added_up([status.sandbox for status in statuses if status.sandbox is not None])


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)


def _gauges(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for value, count in values.items():
        family.add_metric([value], count)
    return family


def _counters(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for value, count in values.items():
        family.add_metric([value], count)
    return family
