"""Which isolation this machine grants, by trying it, and what that level is called."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from enum import StrEnum

from pydantic import BaseModel, ConfigDict, ValidationError

from toolyard.errors import IsolationError, SandboxError

GUEST_MAIN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "guest_main.py")
_PROBE_SECONDS = 30
SCOPED_SIGNALS = 6
"""The version of Landlock that keeps signals inside."""


class Level(StrEnum):
    """How well programs are shut in. Each level keeps everything of the one below it."""

    FULL = "full"
    """Own user, mount, pid, network, ipc and uts namespaces, a private read-only root, Landlock, seccomp."""
    NAMESPACES = "namespaces"
    """Namespaces and private root, but Landlock or seccomp is missing (an old kernel)."""
    CONFINED = "confined"
    """No namespaces, as in a container with the default profile: Landlock, seccomp, rlimits, an own user id as root."""
    NONE = "none"
    """Time, memory and process limits only. Used only when asked for by name."""


class Python(BaseModel):
    """The interpreter programs get."""

    model_config = ConfigDict(frozen=True)

    executable: str
    version: str
    prefixes: tuple[str, ...]
    modules: frozenset[str] = frozenset()
    """What it has of the modules that some languages need."""


class Grants(BaseModel):
    """What the kernel lets us do here. Features map to "" where they work and to the reason where they do not."""

    model_config = ConfigDict(frozen=True)

    features: Mapping[str, str]
    cgroup: tuple[int, tuple[str, ...]] | None
    """Version, and the directories below which groups can be made."""
    limits_processes: bool = True
    """Whether a program that keeps this user's id can be held to a number of processes: by a cgroup, or by the kernel's
    limit for each user, which does not bind root."""
    landlock_abi: int
    root: bool
    python: Python

    def has(self, *features: str) -> bool:
        return all(self.features.get(feature) == "" for feature in features)

    @property
    def namespaces(self) -> bool:
        return self.has(
            "user namespace", "mount namespace", "pid namespace", "network namespace", "ipc namespace",
            "uts namespace", "private root",
        )  # fmt: skip

    @property
    def level(self) -> Level:
        if self.namespaces:
            return Level.FULL if self.has("landlock", "seccomp") else Level.NAMESPACES
        return Level.CONFINED if self.confinable else Level.NONE

    @property
    def confinable(self) -> bool:
        """Whether programs can be shut in without namespaces.

        They need a user id of their own, or a Landlock that keeps their signals from other processes of the same user.
        In the latter case the number of their processes must still be limited, which for root takes a cgroup.
        """
        own_user = self.root and self.has("own user id")
        shared_user = self.landlock_abi >= SCOPED_SIGNALS and self.limits_processes
        return self.has("landlock", "seccomp") and (own_user or shared_user)

    @property
    def memory_limit(self) -> str:
        """Who enforces the limit on a whole process tree's memory."""
        if self.cgroup:
            return f"cgroup v{self.cgroup[0]}"
        return "sampling" if self.namespaces else "per process"

    @property
    def missing(self) -> dict[str, str]:
        return {name: reason for name, reason in self.features.items() if reason}


async def probe(python: str | None = None) -> Grants:
    """Try everything, in a process of its own under the interpreter that programs will get.

    Raises:
        SandboxError: the interpreter could not be started.
    """
    executable = python or sys.executable
    try:
        process = await asyncio.create_subprocess_exec(
            executable, GUEST_MAIN, "probe",
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            env={"LANG": "C.UTF-8"},
        )  # fmt: skip
    except OSError as error:
        raise SandboxError(f"cannot start the programs' interpreter {executable!r}: {error.strerror}") from error
    try:
        async with asyncio.timeout(_PROBE_SECONDS):
            output, complaint = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise SandboxError(f"probing the machine took more than {_PROBE_SECONDS} s") from None
    if process.returncode:
        raise SandboxError(f"{executable!r} cannot probe the machine: {complaint.decode(errors='replace').strip()}")
    try:
        return Grants.model_validate_json(output)
    except ValidationError as error:
        raise SandboxError(f"{executable!r} does not behave like a Python interpreter") from error


def choose_level(grants: Grants, wanted: str) -> Level:
    """The level to run at: the best there is, unless the caller insists.

    Raises:
        IsolationError: `required` and less than full, `confined` and not even that, or nothing at all and not asked for
            by name.
    """
    if wanted == "none":
        return Level.NONE
    reasons = "; ".join(
        f"{name}: {reason}" for name, reason in grants.missing.items() if name != "own user id" or grants.root
    )
    if wanted == "required" and grants.level is not Level.FULL:
        raise IsolationError(
            f"isolation='required', but this machine grants only {grants.level.value!r} ({reasons}); "
            "see `toolyard doctor`"
        )
    if wanted == "best" and grants.level is Level.NONE:
        raise IsolationError(
            f"this machine grants no isolation ({reasons}); see `toolyard doctor`. "
            "isolation='none' runs programs unprotected"
        )
    if wanted == "confined" and not grants.confinable:
        raise IsolationError(
            f"isolation='confined' needs seccomp, and a user id of its own or Landlock {SCOPED_SIGNALS}, for root with "
            "a cgroup; "
            f"this machine has Landlock {grants.landlock_abi} ({reasons}); see `toolyard doctor`"
        )
    if wanted == "confined":
        return Level.CONFINED
    return grants.level
