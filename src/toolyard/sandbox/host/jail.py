"""The configuration of a zygote: how its workers are jailed, at which level, and what they can see."""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Mapping, Sequence
from typing import Any

from toolyard.sandbox.guest import native, root
from toolyard.sandbox.isolation import SCOPED_SIGNALS, Grants, Level


def environment_for(python: str) -> dict[str, str]:
    """The program's whole `os.environ`. Numerical libraries get one thread: parallelism is across programs.

    The hash seed is fixed, so that the same program always prints its sets in the same order.
    """
    return {
        "PATH": f"{os.path.dirname(python)}:/usr/local/bin:/usr/bin:/bin",
        "HOME": root.WORK,
        "TMPDIR": "/tmp",
        "LANG": "C.UTF-8",
        "USER": "user",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "MPLBACKEND": "Agg",
        "MPLCONFIGDIR": "/tmp",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


def gpu_devices() -> list[str]:
    """The device files of the NVIDIA driver."""
    paths = sorted(glob.glob("/dev/nvidia*") + glob.glob("/dev/nvidia-caps/*"))
    return [path for path in paths if stat.S_ISCHR(os.stat(path).st_mode)]


def zygote_config(
    grants: Grants,
    level: Level,
    *,
    modules: Sequence[str],
    sessions: bool,
    read_only: set[str],
    binds: Mapping[str, str],
    disk_bytes: int,
    host_directory: str | None,
    devices: Sequence[str] = (),
    reachable_port: int = 0,
) -> dict[str, Any]:
    """Plain values only: they are sent to another interpreter. `binds` maps host directories to paths in the jail;
    `devices` are visible there in addition to the usual ones. `reachable_port`: see `SandboxConfig.reachable`."""
    jailed = level in (Level.FULL, Level.NAMESPACES)
    confined = level is Level.CONFINED
    own_user = grants.root and level is not Level.NONE and (jailed or grants.has("own user id"))
    return {
        "modules": list(modules),
        "with_sessions": sessions,
        "native": native.built_library(),
        "namespaces": jailed,
        "landlock_abi": grants.landlock_abi,
        "landlock": level is not Level.NONE and grants.has("landlock"),
        "seccomp": level is not Level.NONE and grants.has("seccomp"),
        "user": int(own_user),
        # Whether kill(-1) reaches only a worker's programs: by its pid namespace, its user id, or Landlock's scope.
        "alone": jailed or own_user or (confined and grants.landlock_abi >= SCOPED_SIGNALS),
        "owns_directories": not (jailed and own_user),
        "directory_mode": 0o1777 if jailed else 0o700,
        "cgroup": grants.cgroup,
        "data_factor": 0.0 if grants.cgroup else 2.0 if jailed else 1.0,
        "work": root.WORK,
        "writable": list(root.WRITABLE),
        "environment": environment_for(grants.python.executable),
        "read_only": sorted({*grants.python.prefixes, *read_only}),
        "binds": sorted(binds.items()),
        "devices": list(devices),
        "reachable_port": reachable_port,
        "disk_bytes": disk_bytes,
        "host_directory": host_directory or "",
    }
