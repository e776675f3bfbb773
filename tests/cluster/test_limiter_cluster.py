"""One limit for three nodes, and what happens to it when something dies. A referee outside the limiter counts."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator

import limiter_runner
import pytest
import ray
import referee as referee_module
from ray.cluster_utils import Cluster
from referee import Referee

from toolyard.errors import LimitConflictError, LimiterError

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Ray's own processes and files
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    folder = tempfile.mkdtemp(prefix="ty-")
    environment = pytest.MonkeyPatch()
    environment.setenv("RAY_TMPDIR", folder)  # or it would meet other clusters of this machine
    for module in (limiter_runner, referee_module):
        ray.cloudpickle.register_pickle_by_value(module)
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 4,
            "resources": {"first": 100},
            "include_dashboard": False,
            "node_ip_address": "127.0.0.2",
        },
    )
    # Not 127.0.0.1, which Ray takes for a mistake and replaces.
    for node, address in (("second", "127.0.0.3"), ("third", "127.0.0.4")):
        cluster.add_node(num_cpus=4, resources={node: 100}, node_ip_address=address)
    ray.init(
        address=cluster.address, _node_ip_address="127.0.0.2", logging_level="warning", log_to_driver=False,
        namespace="tests",
    )  # fmt: skip
    yield cluster
    ray.shutdown()
    cluster.shutdown()
    environment.undo()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def referee() -> Iterator[Referee]:
    referee = Referee()
    yield referee
    referee.close()


@pytest.fixture
def name() -> str:
    return f"limiter-{uuid.uuid4().hex[:6]}"


class Runners:
    """Processes on the nodes, used again by the next test unless they died: starting one takes Ray a second or two."""

    def __init__(self) -> None:
        self._idle: dict[str, list] = {}

    def take(self, node: str):
        idle = self._idle.setdefault(node, [])
        if idle:
            return idle.pop()
        actor = ray.remote(limiter_runner.Runner)
        return actor.options(num_cpus=0, max_concurrency=1000, resources={node: 1}).remote()

    def give_back(self, node: str, runner) -> None:
        try:
            ray.get(runner.close.remote(), timeout=10)
        except ray.exceptions.RayError:
            ray.kill(runner)
        else:
            self._idle[node].append(runner)


@pytest.fixture(scope="module")
def runners(cluster: Cluster) -> Runners:
    return Runners()


@pytest.fixture
def start(runners: Runners, referee: Referee, name: str):
    """Opens the test's limiter in a process on a node."""
    used = []

    def start(limit: int | None, node: str = "first", clock_jumps: bool = False, **options):
        runner = runners.take(node)
        used.append((node, runner))
        if clock_jumps:
            ray.get(runner.jump_clocks.remote())
        ray.get(runner.open.remote(referee.path, name, limit, options))
        return runner

    def start_all(limit: int, *nodes: str, **options) -> list:
        """On each of these nodes, all at once."""
        started = [(node, runners.take(node)) for node in nodes]
        used.extend(started)
        ray.get([runner.open.remote(referee.path, name, limit, options) for _, runner in started])
        return [runner for _, runner in started]

    start.all = start_all
    yield start
    for node, runner in used:
        runners.give_back(node, runner)
    from toolyard.limits.cluster.ray import NAMESPACE, PREFIX

    with contextlib.suppress(ValueError):
        ray.kill(ray.get_actor(PREFIX + name, NAMESPACE), no_restart=True)


FLOOD = 60.0
"""Seconds of a flood that is ended once enough was seen."""
SOON = 30.0
"""Seconds for what happens at once, or after a lease of a few seconds, on a machine that is slow and busy."""


def end(flooding: list, *runners) -> list[dict]:
    ray.get([runner.enough.remote() for runner in runners])
    return ray.get(flooding)


def flood_until(started: int, referee: Referee, *runners, **options) -> list[dict]:
    """All of them at once, until a number of executions have started: a slow machine takes longer, with the same
    shares."""
    flooding = [runner.flood.remote(FLOOD, **options) for runner in runners]
    wait_for(lambda: referee.started >= started, within=FLOOD)
    return end(flooding, *runners)


def wait_for(found: Callable[[], object], within: float) -> None:
    until = time.monotonic() + within
    while not found():
        assert time.monotonic() < until, f"not within {within} s"
        time.sleep(0.05)


def lender_pid(name: str) -> int:
    from ray.util.state import get_actor

    from toolyard.limits.cluster.ray import NAMESPACE, PREFIX

    handle = ray.get_actor(PREFIX + name, NAMESPACE)
    actor_id = handle._actor_id.hex()
    info = ray._private.state.actors(actor_id)
    return info["Pid"] if "Pid" in info else get_actor(actor_id).pid


# verl's own test plan -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_basic_multi_process_init(start) -> None:
    """Processes that race to make it get one limiter."""
    runners = start.all(7, *("first", "second", "third") * 2)
    found = ray.get([runner.statistics.remote() for runner in runners])
    assert len({statistics["epoch"] for statistics in found}) == 1
    assert found[0]["limit"] == 7


@pytest.mark.exhaustive
def test_a_second_limit_for_the_same_name_is_an_error_that_shows_both(start) -> None:
    ray.get(start(7).statistics.remote())
    with pytest.raises(LimitConflictError, match=r"exists with limit 7, but limit 8 was requested"):
        start(8)


class TestSingleNodeRateLimiterCase:
    @pytest.mark.slow
    def test_one_process_is_limited(self, start, referee: Referee) -> None:
        flood_until(200, referee, start(5), callers=64)
        assert referee.most == 5

    @pytest.mark.slow
    def test_rotten_execution(self, start, referee: Referee) -> None:
        """Functions that raise give their permits back."""
        runners = start.all(4, "first", "first")
        results = flood_until(200, referee, *runners, fail=True)
        assert all(result["started"] > 20 for result in results)
        assert referee.most == 4
        flooding = runners[0].flood.remote(FLOOD)
        referee.wait_for_most(4, within=SOON)
        end([flooding], runners[0])
        assert referee.most == 4


class TestMultiNodeRateLimiterCase:
    @pytest.mark.slow
    def test_three_nodes_are_limited_together_and_use_all_of_it(self, start, referee: Referee) -> None:
        runners = start.all(10, "first", "second", "third")
        results = flood_until(250, referee, *runners, callers=16, hold=0.1)
        assert referee.most == 10
        seconds = referee.starts[-1] - referee.starts[0]
        assert referee.started > 0.5 * 10 * seconds / 0.1  # of what ten could do, where others use the machine as well
        total = sum(result["done"] for result in results)
        for result in results:
            assert result["done"] > 0.2 * total


# Death ----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_permits_of_a_killed_holder_come_back(start, referee: Referee) -> None:
    holder, survivor = start.all(12, "first", "first")
    ray.get(holder.keep.remote(6))
    flooding = survivor.flood.remote(FLOOD, callers=32)
    referee.wait_for_most(12, within=SOON)
    os.kill(ray.get(holder.pid.remote()), signal.SIGKILL)
    wait_for(lambda: referee.running < 12, within=SOON)
    referee.wait_for_most(12, within=SOON)
    time.sleep(1.0)  # for more than there should be, if they come
    end([flooding], survivor)
    assert referee.most == 12
    statistics = ray.get(survivor.statistics.remote())
    assert statistics["reclaimed"] == 6
    assert len(statistics["leases"]) == 1


@pytest.mark.slow
def test_permits_of_a_lost_node_come_back(start, referee: Referee, cluster: Cluster) -> None:
    node = cluster.add_node(num_cpus=2, resources={"doomed": 100}, node_ip_address="127.0.0.5")
    doomed, survivor = start(12, "doomed"), start(12)
    ray.get(doomed.keep.remote(6))
    flooding = survivor.flood.remote(FLOOD, callers=32)
    referee.wait_for_most(12, within=SOON)
    cluster.remove_node(node, allow_graceful=False)
    referee.wait_for_most(12, within=SOON)
    time.sleep(1.0)  # for more than there should be, if they come
    end([flooding], survivor)
    assert referee.most == 12
    # Until Ray has noticed, it may choose the lost node for whatever it starts next.
    wait_for(lambda: sum(seen["Alive"] for seen in ray.nodes()) == 3, within=60)


@pytest.mark.exhaustive
def test_the_limiter_can_be_killed_under_load(start, referee: Referee, name: str) -> None:
    lease = 30.0  # much longer than a restart: holders of permits continue meanwhile
    runners = start.all(10, "first", "second", lease_seconds=lease)

    def epoch() -> str | None:
        """The statistics of a lender that every process has found."""
        with contextlib.suppress(ray.exceptions.RayError, LimiterError):
            statistics = ray.get(runners[0].statistics.remote())
            return statistics["epoch"] if len(statistics["leases"]) == 2 else None
        return None

    flooding = [runner.flood.remote(FLOOD, callers=32) for runner in runners]
    referee.wait_for_most(10, within=SOON)
    for _ in range(2):
        before = epoch()
        assert before
        os.kill(lender_pid(name), signal.SIGKILL)
        wait_for(lambda before=before: epoch() not in (None, before), within=SOON)
        started = referee.started
        wait_for(lambda started=started: referee.started > started + 100, within=lease / 2)
    results = end(flooding, *runners)
    assert referee.most == 10
    assert all(result["done"] > 50 for result in results)
    assert referee.longest_gap() < lease
    # What other processes run is as old as their last report.
    wait_for(lambda: ray.get(runners[0].statistics.remote())["in_flight"] == 0, within=SOON)


LONG = 60.0
"""Seconds of a lease so long that what a test waits for cannot have come with its end."""


def kill_limiter(name: str) -> float:
    """And wait until Ray has started the next one's process. Returns when it was killed."""
    before = lender_pid(name)
    killed = time.monotonic()
    os.kill(before, signal.SIGKILL)
    wait_for(lambda: lender_pid(name) not in (0, before), within=SOON)
    return killed


@pytest.mark.slow
def test_a_limiter_killed_under_load_grants_again_as_soon_as_everybody_is_back(
    start, referee: Referee, name: str, cluster: Cluster
) -> None:
    """It is away for longer than a lease, so no process starts anything. Another lease would pass without a roster."""
    lease = 25.0
    runners = start.all(10, "first", "second", "third", lease_seconds=lease)
    flooding = [runner.flood.remote(2 * FLOOD, callers=32) for runner in runners]
    referee.wait_for_most(10, within=SOON)
    restarts = cluster.head_node.all_processes["gcs_server"][0].process.pid
    lender = lender_pid(name)
    os.kill(restarts, signal.SIGSTOP)
    try:
        os.kill(lender, signal.SIGKILL)
        wait_for(lambda: time.monotonic() - referee.starts[-1] > 1.0, within=SOON)
    finally:
        os.kill(restarts, signal.SIGCONT)
    started = referee.started
    wait_for(lambda: lender_pid(name) not in (0, lender), within=SOON)  # until then it is Ray that takes its time
    restarted = time.monotonic()
    wait_for(lambda: referee.started > started, within=lease)
    print(f"executions started again after {referee.starts[started] - restarted:.2f} s")
    referee.wait_for_most(10, within=SOON)  # no permit was lost
    time.sleep(1.0)  # for more than there should be, if they come
    end(flooding, *runners)
    assert referee.most == 10


@pytest.mark.slow
def test_a_killed_limiter_lends_what_is_free_long_before_the_lease_ends(start, referee: Referee, name: str) -> None:
    holder, other = start.all(10, "first", "second", lease_seconds=LONG)
    ray.get(holder.keep.remote(6))
    killed = kill_limiter(name)
    flooding = other.flood.remote(FLOOD, callers=32)
    referee.wait_for_most(10, within=LONG / 2)
    print(f"all permits in use {time.monotonic() - killed:.2f} s after the kill")
    time.sleep(1.0)  # for more than there should be, if they come
    end([flooding], other)
    assert referee.most == 10
    ray.get(holder.let_go.remote())


@pytest.mark.slow
def test_a_holder_that_dies_with_the_limiter_is_not_waited_for(start, referee: Referee, name: str) -> None:
    holder, other = start.all(10, "first", "second", lease_seconds=LONG)
    ray.get(holder.keep.remote(6))
    os.kill(ray.get(holder.pid.remote()), signal.SIGKILL)
    kill_limiter(name)
    flooding = other.flood.remote(FLOOD, callers=32)
    referee.wait_for_most(10, within=LONG / 2)
    time.sleep(1.0)  # for more than there should be, if they come
    end([flooding], other)
    assert referee.most == 10


@pytest.mark.exhaustive
def test_a_limiter_killed_again_while_it_restarts_forgets_nobody(start, referee: Referee, name: str) -> None:
    holder, other = start.all(10, "first", "second", lease_seconds=LONG)
    ray.get(holder.keep.remote(6))
    flooding = other.flood.remote(FLOOD, callers=32)
    referee.wait_for_most(10, within=SOON)
    for _ in range(3):
        kill_limiter(name)
    referee.reset()
    referee.wait_for_most(10, within=LONG / 2)
    time.sleep(1.0)  # for more than there should be, if they come
    end([flooding], other)
    assert referee.most == 10
    ray.get(holder.let_go.remote())


@pytest.mark.slow
def test_a_limiter_that_is_killed_remembers_its_size_and_what_is_held(start, referee: Referee, name: str) -> None:
    holder, other = start.all(4, "first", "first")
    ray.get(holder.resize.remote(9))
    ray.get(holder.keep.remote(6))
    os.kill(lender_pid(name), signal.SIGKILL)
    flooding = other.flood.remote(FLOOD, callers=32)
    referee.wait_for_most(9, within=SOON)
    time.sleep(1.0)  # for more than there should be, if they come
    end([flooding], other)
    assert referee.most == 9
    assert ray.get(other.statistics.remote())["limit"] == 9
    ray.get(holder.let_go.remote())


@pytest.mark.exhaustive
def test_a_stopped_process_keeps_what_it_runs_and_is_named(start, referee: Referee) -> None:
    holder, survivor = start(6, lease_seconds=1.0), start(6, lease_seconds=1.0)
    ray.get(holder.keep.remote(3, "the hung one"))
    pid = ray.get(holder.pid.remote())

    def lease_of_holder() -> dict:
        leases = ray.get(survivor.statistics.remote())["leases"]
        return next(lease for lease in leases if lease["process"].endswith(f":{pid}"))

    wait_for(lambda: lease_of_holder()["permits"] == 3, within=SOON)  # what it was lent to spare, it gives back
    wait_for(lambda: ray.get(survivor.statistics.remote())["holders"], within=SOON)  # and it says what it runs
    os.kill(pid, signal.SIGSTOP)
    try:
        flooding = survivor.flood.remote(FLOOD)
        wait_for(lambda: lease_of_holder()["state"] == "stalled", within=SOON)
        time.sleep(1.0)  # its permits would be lent to others by now, if they ever were
        end([flooding], survivor)
        statistics = ray.get(survivor.statistics.remote())
    finally:
        os.kill(pid, signal.SIGCONT)
    assert referee.most == 6  # three of them are the stopped one's
    (stalled,) = [lease for lease in statistics["leases"] if lease["state"] == "stalled"]
    assert stalled["in_flight"] == 3
    assert stalled["process"].endswith(f":{pid}")
    assert statistics["holders"][0]["label"] == "the hung one"
    assert statistics["holders"][0]["seconds"] > 2
    ray.get(holder.let_go.remote())
    referee.reset()
    flood_until(10, referee, holder)


@pytest.mark.slow
def test_a_stopped_process_loses_its_permits_where_holding_is_bounded(start, referee: Referee) -> None:
    options = {"lease_seconds": 1.0, "max_hold_seconds": 1.5}
    holder, survivor = start(4, **options), start(4, **options)
    ray.get(holder.keep.remote(4))
    pid = ray.get(holder.pid.remote())
    os.kill(pid, signal.SIGSTOP)
    try:
        flooding = survivor.flood.remote(FLOOD)
        wait_for(lambda: referee.started > 50, within=SOON)
        end([flooding], survivor)
    finally:
        os.kill(pid, signal.SIGCONT)


# Storms ---------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_storms_of_cancellations_lose_nothing(start, referee: Referee) -> None:
    runners = start.all(6, *["first"] * 3)
    ray.get([runner.flood.remote(2.0, callers=100, cancel=True) for runner in runners])
    assert referee.most <= 6
    flooding = runners[0].flood.remote(FLOOD)
    referee.wait_for_most(6, within=SOON)
    end([flooding], runners[0])
    assert referee.most == 6
    # What other processes run is as old as their last report.
    wait_for(lambda: ray.get(runners[0].statistics.remote())["in_flight"] == 0, within=SOON)


@pytest.mark.slow
def test_thousands_of_waiters_in_several_processes(start, referee: Referee) -> None:
    runners = start.all(50, *["first"] * 3)
    assert ray.get([runner.wait_all.remote(2000, 0.005) for runner in runners]) == [2000] * 3
    wait_for(lambda: referee.started >= 6000, within=SOON)  # it may not have accepted the last connections yet
    assert referee.most <= 50
    assert referee.started == 6000


@pytest.mark.slow
def test_a_limit_of_one_for_four_processes(start, referee: Referee) -> None:
    runners = start.all(1, *["first"] * 4)
    results = flood_until(200, referee, *runners, callers=4, hold=0.01)
    assert referee.most == 1
    counts = [result["done"] for result in results]
    assert min(counts) > 0.5 * max(counts)


@pytest.mark.slow
def test_eight_processes_share_three_permits_evenly(start, referee: Referee) -> None:
    runners = start.all(3, *("first", "first", "second", "third") * 2)
    results = flood_until(500, referee, *runners, callers=4, hold=0.02)
    assert referee.most == 3
    counts = [result["done"] for result in results]
    assert sum(counts) ** 2 / (8 * sum(count * count for count in counts)) > 0.95  # Jain's index
    seconds = referee.starts[-1] - referee.starts[0]
    assert max(result["longest"] for result in results) < 0.6 * seconds


@pytest.mark.slow
def test_a_tenant_gets_its_share_whatever_the_number_of_its_processes(start, referee: Referee) -> None:
    runners = start.all(8, "second", *["first"] * 4)
    tenants = ["one", *["many"] * 4]
    # Long executions: the processor of a slow machine must not be what limits the one process.
    flooding = [
        runner.flood.remote(FLOOD, callers=16, hold=0.1, tenant=tenant)
        for runner, tenant in zip(runners, tenants, strict=True)
    ]
    wait_for(lambda: referee.started >= 240, within=FLOOD)
    of_one, *others = [result["done"] for result in end(flooding, *runners)]
    of_many = sum(others)
    assert referee.most == 8
    assert 0.6 < of_one / of_many < 1.6


@pytest.mark.slow
def test_a_small_tenant_is_not_starved_by_a_flood_from_other_processes(start, referee: Referee) -> None:
    small, *flooders = start.all(10, "second", "first", "first")
    flooding = [runner.flood.remote(FLOOD, callers=100, hold=0.1, tenant="flood") for runner in flooders]
    referee.wait_for_most(10, within=SOON)
    time.sleep(0.5)
    result = ray.get(small.flood.remote(FLOOD, callers=1, hold=0.01, tenant="small", times=20))
    flooded = end(flooding, *flooders)
    assert referee.most == 10
    assert result["longest"] < 0.5 * min(flood["longest"] for flood in flooded)  # as it would wait behind them


@pytest.mark.slow
def test_jumps_of_the_wall_clock_change_nothing(start, referee: Referee) -> None:
    runners = [start(5, clock_jumps=True, lease_seconds=1.0), start(5, lease_seconds=1.0)]
    flooding = [runner.flood.remote(FLOOD) for runner in runners]
    time.sleep(2.5)  # some terms of their leases
    wait_for(lambda: referee.started > 200, within=SOON)
    results = end(flooding, *runners)
    assert referee.most == 5
    assert all(result["done"] > 50 for result in results)

    def states() -> list[str]:
        return [lease["state"] for lease in ray.get(runners[1].statistics.remote())["leases"]]

    wait_for(lambda: states() == ["connected"] * 2, within=SOON)


@pytest.mark.slow
def test_resizing_under_load_down_and_up(start, referee: Referee) -> None:
    runners = start.all(12, "first", "first")
    flooding = [runner.flood.remote(FLOOD, callers=32) for runner in runners]
    referee.wait_for_most(12, within=SOON)
    ray.get(runners[0].resize.remote(3))
    wait_for(lambda: referee.running <= 3, within=SOON)
    referee.reset()
    time.sleep(1.0)
    assert referee.most == 3
    ray.get(runners[1].resize.remote(20))
    referee.wait_for_most(20, within=SOON)
    time.sleep(0.5)
    end(flooding, *runners)
    assert referee.most == 20
