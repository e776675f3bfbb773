"""The faults of a run as its driver sees them: those of its own, and the report about all of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from toolyard.messages import JSON
from toolyard.records.tape import Tape
from toolyard.records.trajectory import Trajectory
from toolyard.rollout.assembly import find_users_modules
from toolyard.rollout.config import RolloutConfig
from toolyard.rollout.faults.inject import check_profile
from toolyard.rollout.faults.profile import FaultProfile, load_profile
from toolyard.rollout.faults.report import FaultReport

_LOOK_SECONDS = 0.1


class HasWorkers(Protocol):
    """A `ClusterRun`."""

    def kill_worker(self, choose: Callable[[int], int]) -> str | None: ...


class RunFaults:
    def __init__(self, profile: FaultProfile, file: Path | None) -> None:
        """`file`: gets a line for each fault."""
        self.profile = profile
        self.report = FaultReport(profile.name, profile.seed, file)
        self.is_stopping: Callable[[], bool] = lambda: False
        """Whether the run ends: then nothing is delayed any more."""

    async def before_line(self, trajectory: Trajectory) -> None:
        """The trajectory is about to be entered into the dump."""
        self.report.add(trajectory)
        slow = self.profile.slow_disk
        if slow is None or self.report.file is None or not self.profile.strikes("slow_disk", trajectory.request_id):
            return
        self.report.add_own("slow_disk", trajectory.request_id, seconds=slow.seconds)
        end = time.monotonic() + slow.seconds
        while (left := end - time.monotonic()) > 0 and not self.is_stopping():  # noqa: ASYNC110 - waits for two things
            await asyncio.sleep(min(left, _LOOK_SECONDS))

    def after_line(self, run: HasWorkers, number: int) -> None:
        """The dump of a run on a cluster has `number` lines."""
        if self.profile.strikes("worker_kill", number):
            name = run.kill_worker(lambda count: self.profile.choice(count, "worker_kill", number))
            told = {"failed": "no worker had started"} if name is None else {"worker": name}
            self.report.add_own("worker_kill", None, lines=number, **told)


def open_faults(config: RolloutConfig, tape: Tape | None, note: Callable[[str], None]) -> RunFaults | None:
    """None: there are none. A replay injects nothing: its tape has the faults of the recorded run.

    Raises:
        ConfigError: there is no such profile, or the run cannot have its faults.
    """
    if tape is not None:
        if config.faults is not None:
            note("faults: a replay injects none; it repeats those on the tape")
        mark: JSON | None = tape.meta.get("faults")
        profile = None if mark is None else FaultProfile(name=mark["profile"], seed=mark["seed"])
    elif config.faults is None:
        profile = None
    else:
        find_users_modules(config)
        profile = check_profile(load_profile(config.faults), config, note)
    folder = config.rollout_data_dir
    return profile and RunFaults(profile, None if folder is None else Path(folder) / f"faults-{config.step}.jsonl")
