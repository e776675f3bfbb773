"""Finds out by trying which isolation this machine supports, and names the level."""

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
"""The Landlock version that confines signals."""
NAMESPACES = (
    "user namespace", "mount namespace", "pid namespace", "network namespace", "ipc namespace", "uts namespace",
    "private root",
)  # fmt: skip
"""The features without which programs run in none."""


class Level(StrEnum):
    """How well programs are isolated. Each level includes everything of the one below it."""

    FULL = "full"
    """Separate user, mount, pid, network, ipc and uts namespaces, a private read-only root, Landlock, seccomp."""
    NAMESPACES = "namespaces"
    """Namespaces and a private root, but Landlock or seccomp is missing (an old kernel)."""
    CONFINED = "confined"
    """No namespaces, as in a container with the default profile: Landlock, seccomp, rlimits; as root a separate user
    id."""
    NONE = "none"
    """Time, memory and process limits only. Must be requested explicitly."""


class Python(BaseModel):
    """The interpreter that programs run in."""

    model_config = ConfigDict(frozen=True)

    executable: str
    version: str
    prefixes: tuple[str, ...]
    modules: frozenset[str] = frozenset()
    """The modules it has, out of those that some languages need."""


class Grants(BaseModel):
    """What the kernel supports here. Features map to "" if they work, otherwise to the reason why not."""

    model_config = ConfigDict(frozen=True)

    features: Mapping[str, str]
    cgroup: tuple[int, tuple[str, ...]] | None
    """Version, and the directories in which groups can be created."""
    limits_processes: bool = True
    """Whether the number of processes of a program that keeps this user's id can be limited: by a cgroup, or by the
    kernel's per-user limit, which does not apply to root."""
    landlock_abi: int
    root: bool
    python: Python

    def has(self, *features: str) -> bool:
        return all(self.features.get(feature) == "" for feature in features)

    @property
    def namespaces(self) -> bool:
        return self.has(*NAMESPACES)

    @property
    def level(self) -> Level:
        if self.namespaces:
            return Level.FULL if self.has("landlock", "seccomp") else Level.NAMESPACES
        return Level.CONFINED if self.confinable else Level.NONE

    @property
    def confinable(self) -> bool:
        """Whether programs can be isolated without namespaces.

        They need a user id of their own, or a Landlock version that blocks signals to other processes of the same user.
        In the latter case their number of processes must still be limited, which for root needs a cgroup.
        """
        own_user = self.root and self.has("own user id")
        shared_user = self.landlock_abi >= SCOPED_SIGNALS and self.limits_processes
        return self.has("landlock", "seccomp") and (own_user or shared_user)

    @property
    def memory_limit(self) -> str:
        """What enforces the memory limit of a whole process tree."""
        if self.cgroup:
            return f"cgroup v{self.cgroup[0]}"
        return "sampling" if self.namespaces else "per process"

    @property
    def missing(self) -> dict[str, str]:
        return {name: reason for name, reason in self.features.items() if reason}


async def probe(python: str | None = None) -> Grants:
    """Try every feature, in a separate process with the interpreter that programs will use.

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
    """Choose the level to run at: the best one available, unless the caller insists on another.

    Raises:
        IsolationError: `required` but less than full, `confined` but not available, or no isolation at all and `none`
            was not requested.
    """
    if wanted == "none":
        return Level.NONE
    reasons = "; ".join(
        f"{name}: {reason}" for name, reason in grants.missing.items() if name != "own user id" or grants.root
    )
    if wanted == "required" and grants.level is not Level.FULL:
        raise IsolationError(
            f"isolation='required', but this machine supports only {grants.level.value!r} ({reasons}); "
            "see `toolyard doctor`"
        )
    if wanted == "best" and grants.level is Level.NONE:
        raise IsolationError(
            f"this machine supports no isolation ({reasons}); see `toolyard doctor`. "
            "isolation='none' runs programs unprotected"
        )
    if wanted == "confined" and not grants.confinable:
        raise IsolationError(
            f"isolation='confined' needs seccomp, and a separate user id or Landlock {SCOPED_SIGNALS} (for root also "
            "a cgroup); "
            f"this machine has Landlock {grants.landlock_abi} ({reasons}); see `toolyard doctor`"
        )
    if wanted == "confined":
        return Level.CONFINED
    return grants.level
