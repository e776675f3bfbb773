"""The connection of this process to a Ray cluster."""

from __future__ import annotations

import socket
from importlib import import_module
from typing import Any

from toolyard.errors import ConfigError, MissingDependencyError

try:
    ray: Any = import_module("ray")  # poorly annotated
except ImportError as error:
    raise MissingDependencyError("ray", "ray", "a cluster") from error

from toolyard.limits.cluster.actor import NAMESPACE

_CONNECT_SECONDS = 3.0


def connect(address: str, name: str) -> bool:
    """Connect, unless this process is connected. Returns whether it did, so that the caller disconnects. Blocks.

    `name`: of the setting, for messages.

    Raises:
        ConfigError: there is no such cluster.
    """
    if ray.is_initialized():
        return False
    try:
        host, _, port = address.rpartition(":")
        if port.isdecimal():  # Ray itself would try for minutes
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
        local: dict[str, Any] = {"include_dashboard": False} if address == "local" else {"address": address}
        ray.init(namespace=NAMESPACE, log_to_driver=False, logging_level="error", **local)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{name} {address!r}: {error}. Start a cluster with `ray start --head`, or use --ray local for this "
            "machine alone"
        ) from None
    return True


def disconnect() -> None:
    ray.shutdown()
