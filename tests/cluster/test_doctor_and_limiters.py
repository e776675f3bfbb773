"""Limiters of a real cluster: doctor lists and stops them, Prometheus reads them, and none is ever leaked."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from patience import patient
from toolyard.cli.doctor import checks as doctor_checks
from toolyard.errors import ConfigError, LimiterError

ray = pytest.importorskip("ray", reason="needs toolyard[ray]")

from toolyard.limits.cluster import survey as ray_survey  # noqa: E402
from toolyard.limits.cluster.actor import NAMESPACE, Records  # noqa: E402
from toolyard.limits.cluster.ray import PREFIX, RayLimiter  # noqa: E402
from toolyard.limits.cluster.survey import FoundLimiter, Survey, stop, survey  # noqa: E402
from toolyard.limits.prometheus_client import LimiterCollector  # noqa: E402

TOOLYARD = str(Path(sys.executable).parent / "toolyard")
SECONDS = 90


@pytest.fixture
def make(ray_connection: str) -> Iterator[Callable[..., RayLimiter]]:
    """Limiters of names of their own, which are gone after the test."""
    made: list[tuple[RayLimiter, str]] = []

    def make_limiter(limit: int = 4, **options) -> RayLimiter:
        options = {"name": f"test-{uuid.uuid4().hex[:6]}", "namespace": "toolyard", **options}
        limiter = RayLimiter(limit=limit, **options)
        made.append((limiter, options["namespace"]))
        return limiter

    yield make_limiter
    for limiter, namespace in made:
        close(limiter)
        with contextlib.suppress(ValueError):
            ray.kill(ray.get_actor(PREFIX + limiter.name, namespace))


def close(limiter: RayLimiter) -> None:
    asyncio.run(limiter.close())


def toolyard(address: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    # Without compilers, so that doctor is quick.
    environment = {**os.environ, "RAY_ADDRESS": address, "PATH": "/nowhere", **env}
    return subprocess.run([TOOLYARD, *args], capture_output=True, text=True, timeout=SECONDS, env=environment)


def found(name: str) -> list[FoundLimiter]:
    return [one for one in survey() if one.name == name]


def is_alive(name: str) -> bool:
    return any(entry["name"] == PREFIX + name for entry in ray.util.list_named_actors(all_namespaces=True))


def wait_until(condition: Callable[[], bool], within: float) -> None:
    until = time.monotonic() + within
    while not condition():
        assert time.monotonic() < until, f"not within {within} s"
        time.sleep(0.05)


def exists(pid: int | None) -> bool:
    assert pid
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class TestSurvey:
    def test_a_limiter_is_found_with_its_use_and_its_place(self, make) -> None:
        limiter = make(4)
        with limiter.permit("job"):
            limiter.read_statistics()  # so that the lender has heard of it
            (one,) = found(limiter.name)
        assert (one.namespace, one.limit, one.in_flight, one.waiting, one.leases) == ("toolyard", 4, 1, 0, 1)
        assert one.processes[0].endswith(f":{os.getpid()}")
        assert (one.state, one.problem) == ("ALIVE", None)
        assert exists(one.pid)
        assert one.node

    @pytest.mark.slow
    def test_other_actors_are_not_taken_for_limiters(self, make) -> None:
        limiter = make()

        @ray.remote(num_cpus=0)
        class Bystander:
            pass

        bystander = Bystander.options(name="bystander", lifetime="detached").remote()
        assert [one.name for one in survey()] == [limiter.name]
        ray.kill(bystander)

    @pytest.mark.exhaustive
    def test_one_that_is_stuck_is_named_and_does_not_hold_up_the_others(
        self, make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ray_survey, "_ANSWER_SECONDS", 1.5)
        stuck, well = make(), make()
        (before,) = found(stuck.name)
        assert before.pid
        os.kill(before.pid, signal.SIGSTOP)
        try:
            begin = time.monotonic()
            now = {one.name: one for one in survey()}
            assert time.monotonic() - begin < patient(5)
            assert "no answer" in (now[stuck.name].problem or "")
            assert now[well.name].limit == 4
            with pytest.raises(LimiterError, match="does not say whether it is in use"):
                stop(stuck.name)
            stop(stuck.name, force=True)
            assert not is_alive(stuck.name)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(before.pid, signal.SIGCONT)

    @pytest.mark.parametrize("address", ["local", "127.0.0.1:9"])
    def test_where_no_cluster_runs_none_is_started(self, address: str) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "toolyard.limits.cluster.survey"],
            capture_output=True, text=True, timeout=SECONDS, env={**os.environ, "RAY_ADDRESS": address},
        )  # fmt: skip
        assert done.returncode == 3
        assert Survey.model_validate_json(done.stdout).error

    @pytest.mark.slow
    def test_without_a_connection_it_does_not_make_one(self) -> None:
        code = (
            "import ray\nfrom toolyard.errors import ConfigError\nfrom toolyard.limits.cluster.survey import survey\n"
            "try: survey()\nexcept ConfigError: assert not ray.is_initialized()\nelse: raise SystemExit('no error')"
        )
        subprocess.run([sys.executable, "-c", code], check=True, timeout=SECONDS)


class TestDoctor:
    @pytest.mark.slow
    def test_it_lists_the_limiters_of_the_cluster(
        self, ray_connection: str, make, without_torch: dict[str, str]
    ) -> None:
        limiter = make(4)
        with limiter.permit(), ThreadPoolExecutor() as both:
            limiter.read_statistics()
            asked = both.submit(toolyard, ray_connection, "doctor", "--json", **without_torch)
            shown = toolyard(ray_connection, "doctor", **without_torch)
            told = json.loads(asked.result().stdout)
        (line,) = [line for line in shown.stdout.splitlines() if limiter.name in line]
        assert "limit 4, in flight 1, waiting 0, processes 1; namespace toolyard, pid " in line
        assert "    Cluster" in shown.stdout
        (one,) = told["limiters"]
        assert (one["name"], one["limit"], one["in_flight"]) == (limiter.name, 4, 1)
        (check,) = [check for check in told["checks"] if check["group"] == "cluster"]
        assert (check["name"], check["status"]) == (limiter.name, "ok")

    @pytest.mark.slow
    def test_a_limiter_in_use_is_only_stopped_by_force(self, ray_connection: str, make) -> None:
        limiter = make(4)
        with limiter.permit():
            limiter.read_statistics()
            refused = toolyard(ray_connection, "doctor", "--stop-limiter", limiter.name)
            assert refused.returncode == 1
            assert refused.stderr.startswith(f"toolyard: limiter {limiter.name!r} is in use, 1 in flight")
            assert f":{os.getpid()}" in refused.stderr
            assert len(refused.stderr.splitlines()) == 1
            assert is_alive(limiter.name)
            forced = toolyard(ray_connection, "doctor", "--stop-limiter", limiter.name, "--force")
        assert forced.returncode == 0, forced.stderr
        assert forced.stdout.startswith(f"Stopped limiter {limiter.name!r} in namespace 'toolyard'; it was used by")
        assert not is_alive(limiter.name)

    @pytest.mark.exhaustive
    def test_an_attached_process_protects_it_even_while_it_runs_nothing(self, ray_connection: str, make) -> None:
        limiter = make()
        assert toolyard(ray_connection, "doctor", "--stop-limiter", limiter.name).returncode == 1
        assert is_alive(limiter.name)

    @pytest.mark.exhaustive
    def test_an_idle_one_is_stopped(self, ray_connection: str, make) -> None:
        limiter = make(4)
        (before,) = found(limiter.name)
        close(limiter)
        wait_until(lambda: found(limiter.name)[0].leases == 0, 10)
        done = toolyard(ray_connection, "doctor", "--stop-limiter", limiter.name, "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["leases"] == 0
        assert not is_alive(limiter.name)
        wait_until(lambda: not exists(before.pid), 10)

    @pytest.mark.exhaustive
    def test_an_unknown_name_is_answered_with_those_there_are(self, ray_connection: str, make) -> None:
        limiter = make()
        done = toolyard(ray_connection, "doctor", "--stop-limiter", "nobody")
        assert done.returncode == 1
        assert "there is no limiter 'nobody'" in done.stderr
        assert limiter.name in done.stderr

    @pytest.mark.exhaustive
    def test_one_name_in_two_namespaces_asks_for_the_namespace(self, make) -> None:
        here = make()
        make(name=here.name, namespace="elsewhere")
        with pytest.raises(LimiterError, match="'elsewhere', 'toolyard'"):
            stop(here.name, force=True)
        stop(here.name, "elsewhere", force=True)
        assert [one.namespace for one in found(here.name)] == ["toolyard"]

    async def test_a_cluster_that_never_answers_does_not_hang_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(doctor_checks, "_SURVEY_SECONDS", 3.5)  # time enough to import Ray and to be waiting
        with socket.create_server(("127.0.0.2", 0)) as silent:
            monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.2:{silent.getsockname()[1]}")
            with pytest.raises(LimiterError, match=r"no answer within 3\.5 s"):
                await doctor_checks.stop_limiter("sandbox", None, force=True)

    @pytest.mark.slow
    def test_without_a_cluster_nothing_can_be_stopped(self) -> None:
        done = toolyard("127.0.0.1:9", "doctor", "--stop-limiter", "sandbox")
        assert done.returncode == 1
        assert "no cluster is running" in done.stderr


class TestNeverLeaked:
    @pytest.mark.slow
    def test_it_ends_itself_once_nobody_is_attached_and_does_not_come_back(self, make) -> None:
        limiter = make(idle_seconds=0.5)
        (before,) = found(limiter.name)
        time.sleep(1.2)
        assert is_alive(limiter.name)  # we are attached, if idle
        records = Records(NAMESPACE, limiter.name)
        assert records.read("address")
        assert len(records.read("roster")["members"]) == 1
        close(limiter)
        wait_until(lambda: not is_alive(limiter.name), 10)
        wait_until(lambda: not exists(before.pid), 10)
        time.sleep(2)  # for Ray to start a fresh one, if it did
        assert not is_alive(limiter.name)
        assert not found(limiter.name)
        assert records.read("address") is records.read("roster") is None
        with pytest.raises(ConfigError, match="no limiter"):
            RayLimiter(limiter.name)

    @pytest.mark.slow
    def test_one_that_was_killed_while_idle_comes_back_and_then_ends_itself(self, make) -> None:
        limiter = make(idle_seconds=1.0)
        (before,) = found(limiter.name)
        close(limiter)
        os.kill(before.pid, signal.SIGKILL)
        wait_until(lambda: not is_alive(limiter.name), 20)


class TestStopping:
    @pytest.mark.slow
    def test_whoever_waits_is_told_and_the_same_name_can_be_used_anew(self, make) -> None:
        limiter = make(1)
        with limiter.permit():
            waiting = threading.Thread(target=lambda: told.append(outcome(limiter)))
            told: list[str] = []
            waiting.start()
            time.sleep(0.3)
            stop(limiter.name, force=True)
            waiting.join(20)
        assert told == ["LimiterClosedError"]
        again = RayLimiter(limiter.name, 3)
        with again.permit():
            assert again.limit == 3


def outcome(limiter) -> str:
    try:
        with limiter.permit():
            return "granted"
    except Exception as error:
        return type(error).__name__


class TestPrometheus:
    def test_a_clusters_limiter_is_scraped_with_its_leases(self, make) -> None:
        limiter = make(4)
        registry = CollectorRegistry()
        registry.register(LimiterCollector(limiter))
        own = {"limiter": limiter.name}
        with limiter.permit("job"):
            assert registry.get_sample_value("toolyard_limiter_in_flight", own) == 1
            assert registry.get_sample_value("toolyard_limiter_leases", {**own, "state": "connected"}) == 1
            process = {**own, "process": limiter.read_statistics().leases[0].process}
            assert (registry.get_sample_value("toolyard_limiter_process_permits", process) or 0) >= 1
            held = {**process, "tenant": "job"}
            assert (registry.get_sample_value("toolyard_limiter_longest_held_seconds", held) or 0) > 0

    @pytest.mark.slow
    def test_one_that_was_stopped_is_down_and_delays_the_scrape_little(self, make) -> None:
        limiter = make(4)
        registry = CollectorRegistry()
        registry.register(LimiterCollector(limiter))
        stop(limiter.name, force=True)
        wait_until(lambda: registry.get_sample_value("toolyard_limiter_up", {"limiter": limiter.name}) == 0, 10)
        begin = time.monotonic()
        assert [family.name for family in registry.collect()] == ["toolyard_limiter_up"]
        assert time.monotonic() - begin < patient(4)
