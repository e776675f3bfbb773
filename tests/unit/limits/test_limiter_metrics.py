"""A limiter's Prometheus metrics, and that one limiter's trouble does not affect the others."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from patience import patient
from toolyard.errors import ConfigError, LimiterError
from toolyard.limits.local import LocalLimiter
from toolyard.limits.prometheus_client import MAX_TENANTS, LimiterCollector
from toolyard.limits.protocol import Holder, Lease, LimiterStatistics, TenantStatistics, WaitTimes

NOTHING = LimiterStatistics(
    name="fake", limit=8, effective_limit=8, in_flight=0, waiting=0, wait=WaitTimes(0, 0, 0, 0, 0), tenants={},
    holders=(),
)  # fmt: skip


@dataclass
class Fake:
    """A limiter whose statistics, or failure, the test chooses."""

    now: LimiterStatistics = NOTHING
    name: str = "fake"
    error: Exception | None = None
    stuck: threading.Event | None = None
    asked: list[float] = field(default_factory=list)

    def read_statistics(self) -> LimiterStatistics:
        self.asked.append(time.monotonic())
        if self.stuck is not None:
            self.stuck.wait(20)
        if self.error is not None:
            raise self.error
        return self.now

    def give(self, granted: Mapping[str, int], in_flight: Mapping[str, int] | None = None) -> None:
        busy = in_flight or {}
        tenants = {name: TenantStatistics(1.0, busy.get(name, 0), 0, count) for name, count in granted.items()}
        self.now = replace(self.now, tenants=tenants)


def registry_of(*limiters, timeout: float = 3.0) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(LimiterCollector(*limiters, timeout=timeout))
    return registry


def scrape(registry: CollectorRegistry) -> dict[tuple[str, ...], float]:
    """Values by name, short, and labels other than the limiter's, in the words that go over the wire."""
    found: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            name = sample.name.removeprefix("toolyard_limiter_")
            key = (name, *(value for label, value in sorted(sample.labels.items()) if label != "limiter"))
            assert key not in found
            found[key] = sample.value
    return found


async def test_a_local_limiter_is_told_as_it_is() -> None:
    limiter = LocalLimiter(1)
    registry = registry_of(limiter)
    async with limiter.permit("a"):
        with pytest.raises(TimeoutError):
            async with limiter.permit("b", timeout=0.01):
                pass
        found = scrape(registry)
    assert found["up",] == 1
    assert (found["limit",], found["effective_limit",], found["in_flight",], found["waiting",]) == (1, 1, 1, 0)
    assert (found["granted_total",], found["refused_total",], found["expired_total",]) == (1, 0, 0)
    assert (found["tenant_in_flight", "a"], found["tenant_granted_total", "a"]) == (1, 1)
    assert {key[1] for key in found if key[0] == "wait_seconds"} == {"0.5", "0.9", "0.99", "1"}
    ((_, process, tenant),) = [key for key in found if key[0] == "longest_held_seconds"]
    assert tenant == "a"
    assert process
    assert not any(key[0] in ("leases", "process_permits") for key in found)
    assert scrape(registry)["in_flight",] == 0


def test_refusals_and_pauses_are_told() -> None:
    limiter = LocalLimiter(8, adaptive=True)
    with limiter.permit() as permit:
        permit.refused(retry_after=30)
    found = scrape(registry_of(limiter))
    assert found["refused_total",] == 1
    assert found["effective_limit",] < 8
    assert 0 < found["paused_seconds",] <= 30


def test_a_clusters_leases_are_told_by_state_and_process() -> None:
    leases = (
        Lease("n1:10", 3, 2, 0, 0.1, "connected"),
        Lease("n1:10", 1, 1, 0, 9.0, "lost"),
        Lease("n2:20", 2, 2, 0, 0.1, "connected"),
    )
    holders = (Holder("slow", "x", 60.0, "n2:20"), Holder("fast", "y", 1.0, "n1:10"))
    found = scrape(registry_of(Fake(replace(NOTHING, epoch="e", leases=leases, holders=holders, reclaimed=4))))
    assert {key[1]: value for key, value in found.items() if key[0] == "leases"} == {
        "connected": 2, "stalled": 0, "lost": 1,
    }  # fmt: skip
    assert found["process_permits", "n1:10"] == 4
    assert found["process_permits", "n2:20"] == 2
    assert {key: value for key, value in found.items() if key[0] == "longest_held_seconds"} == {
        ("longest_held_seconds", "n2:20", "slow"): 60.0
    }
    assert found["reclaimed_total",] == 4


class TestTrouble:
    @pytest.mark.parametrize("error", [LimiterError("gone"), TimeoutError(), ValueError("of another version")])
    def test_a_limiter_that_fails_is_down_and_nothing_else_suffers(self, error: Exception) -> None:
        registry = registry_of(Fake(error=error))
        Gauge("other", "Somebody else's.", registry=registry).set(7)
        assert scrape(registry) == {("up",): 0, ("other",): 7}

    def test_one_that_is_stuck_holds_up_no_scrape(self) -> None:
        stuck = threading.Event()
        registry = registry_of(
            Fake(name="stuck", stuck=stuck), Fake(name="too", stuck=stuck), Fake(name="well"), timeout=0.3
        )
        begin = time.monotonic()
        up = {
            name: registry.get_sample_value("toolyard_limiter_up", {"limiter": name})
            for name in ("stuck", "too", "well")
        }
        assert time.monotonic() - begin < patient(3)
        assert up == {"stuck": 0, "too": 0, "well": 1}
        stuck.set()
        assert registry.get_sample_value("toolyard_limiter_up", {"limiter": "stuck"}) == 1


class TestRegistries:
    def test_several_limiters_share_one_collector_and_each_metric_is_told_once(self) -> None:
        text = generate_latest(registry_of(Fake(name="a"), Fake(name="b"))).decode()
        assert text.count("# TYPE toolyard_limiter_limit gauge") == 1
        assert 'toolyard_limiter_limit{limiter="a"} 8.0' in text
        assert 'toolyard_limiter_limit{limiter="b"} 8.0' in text

    def test_two_of_one_name_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="local"):
            LimiterCollector(LocalLimiter(1), LocalLimiter(2))

    def test_registering_asks_no_limiter_and_a_second_collector_is_refused(self) -> None:
        registry = CollectorRegistry(auto_describe=True)
        limiter = Fake()
        registry.register(LimiterCollector(limiter))
        with pytest.raises(ValueError, match="Duplicated"):
            registry.register(LimiterCollector(Fake(name="b")))
        assert not limiter.asked

    def test_without_prometheus_client_the_pip_command_is_named(self) -> None:
        code = (
            "import sys\nsys.modules['prometheus_client'] = None\nfrom toolyard.errors import MissingDependencyError\n"
            "try: import toolyard.limits.prometheus_client\n"
            "except MissingDependencyError as error: assert \"pip install 'toolyard[server]'\" in str(error), error\n"
            "else: raise SystemExit('no error')"
        )
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


class TestManyTenants:
    def test_the_busiest_have_lines_and_the_rest_are_added_up(self) -> None:
        limiter = Fake()
        limiter.give({f"t{i}": 10 for i in range(250)}, in_flight={"t240": 3, "t249": 1})
        found = scrape(registry_of(limiter))
        lines = {key[1] for key in found if key[0] == "tenant_granted_total"}
        assert len(lines) == MAX_TENANTS + 1
        assert {"t240", "t249", "(others)"} <= lines
        assert found["tenant_granted_total", "(others)"] == 1500
        assert found["tenant_in_flight", "(others)"] == 0
        assert found["granted_total",] == 2500

    def test_the_sum_of_the_others_never_shrinks_when_one_of_them_gets_its_line(self) -> None:
        limiter = Fake()
        registry = registry_of(limiter)
        granted = {f"t{i:03}": 1000 - i for i in range(150)}
        limiter.give(granted)
        before = scrape(registry)["tenant_granted_total", "(others)"]
        granted["t149"] += 5
        granted["t148"] += 2
        limiter.give(granted, in_flight={"t149": 1})
        found = scrape(registry)
        assert found["tenant_granted_total", "t149"] == granted["t149"]
        # t149 has moved into the lines and t099 out of them; only t148's two are new among the others.
        assert found["tenant_granted_total", "(others)"] == before + 2

    def test_counters_that_the_limiter_itself_has_folded_are_not_counted_again(self) -> None:
        limiter = Fake()
        registry = registry_of(limiter)
        limiter.give({f"t{i}": 1 for i in range(120)})
        before = scrape(registry)["tenant_granted_total", "(others)"]
        limiter.give({"(others)": 120, "new": 3})
        found = scrape(registry)
        assert (before, found["tenant_granted_total", "(others)"]) == (20, 20)
        assert found["tenant_granted_total", "new"] == 3

    def test_a_restarted_limiter_counts_from_the_start(self) -> None:
        limiter = Fake()
        registry = registry_of(limiter)
        limiter.give({f"t{i}": 5 for i in range(120)})
        scrape(registry)
        limiter.give({"t0": 1})
        found = scrape(registry)
        assert found["tenant_granted_total", "(others)"] == 100
        assert found["granted_total",] == 1
