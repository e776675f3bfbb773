"""Lists the live limiters in a Ray cluster, or stops one. `toolyard doctor` runs this as a separate process:

    python -m toolyard.limits.cluster.survey [--stop NAME [--namespace NS] [--force]]

It prints a `Survey` as one line of JSON. Exit status: 0; 1: it failed or was refused; 3: there is no cluster. Ray is
imported on demand, so that a survey can be parsed without it.
"""  # fmt: skip

from __future__ import annotations

import argparse
import contextlib
import logging
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from pydantic import BaseModel, ConfigDict

from toolyard.errors import ConfigError, LimiterError, ToolyardError

NO_CLUSTER = 3
"""Exit status."""
_CONNECT_SECONDS = 3.0
_ANSWER_SECONDS = 5.0
_STOP_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class FoundLimiter:
    """A limiter's lender. Fields that could not be determined are None."""

    name: str
    namespace: str
    state: str | None = None
    """Its actor's state in Ray's terms: `ALIVE`, `RESTARTING`, …"""
    pid: int | None = None
    node: str | None = None
    """IP address."""
    limit: int | None = None
    in_flight: int | None = None
    waiting: int | None = None
    leases: int | None = None
    """How many processes are attached."""
    processes: tuple[str, ...] = ()
    """Host and pid of each of them."""
    problem: str | None = None
    """Why it did not answer."""


class Survey(BaseModel):
    """The output of this program."""

    model_config = ConfigDict(frozen=True)

    cluster: str | None = None
    """Its address."""
    limiters: tuple[FoundLimiter, ...] = ()
    stopped: FoundLimiter | None = None
    error: str | None = None


def survey() -> list[FoundLimiter]:
    """List the live limiters of the connected cluster, by namespace and name. Takes seconds at most.

    Raises:
        ConfigError: this process is not connected.
    """
    from toolyard.limits.cluster.ray import PREFIX, ray

    if not ray.is_initialized():  # or asking for names would start a cluster
        raise ConfigError("this process is not connected to Ray; call ray.init() first")
    asked: dict[Any, tuple[Any, FoundLimiter]] = {}
    for entry in ray.util.list_named_actors(all_namespaces=True):
        if entry["name"].startswith(PREFIX):
            try:
                lender = ray.get_actor(entry["name"], entry["namespace"])
            except ValueError:
                continue  # it has ended since
            limiter = FoundLimiter(entry["name"].removeprefix(PREFIX), entry["namespace"])
            asked[lender.statistics.remote()] = lender, limiter
    done = set(ray.wait(list(asked), num_returns=len(asked), timeout=_ANSWER_SECONDS)[0]) if asked else set[Any]()
    found: list[FoundLimiter] = []
    for answer, (lender, limiter) in asked.items():
        placed = replace(limiter, **_actor(lender))
        found.append(_heard(answer, placed) if answer in done else _silent(placed))
    return sorted((one for one in found if one.state != "DEAD"), key=lambda one: (one.namespace, one.name))


def _actor(lender: Any) -> dict[str, Any]:
    """Its state and node, from Ray's actor table. This is not a public API; the public one needs the dashboard."""
    try:
        table = import_module("ray._private.state")
        row = table.actors(actor_id=lender._actor_id.hex())  # noqa: SLF001
        return {"state": row["State"], "pid": row["Pid"] or None, "node": row["Address"]["IPAddress"] or None}
    except Exception:  # another version of Ray: leave them unknown
        return {}


def _heard(answer: Any, known: FoundLimiter) -> FoundLimiter:
    from toolyard.limits.cluster.ray import ray, read_statistics

    try:
        now = read_statistics(ray.get(answer))
    except (ray.exceptions.RayError, ValueError) as error:
        return replace(known, problem=_one_line(error))
    return replace(
        known,
        limit=now.limit,
        in_flight=now.in_flight,
        waiting=now.waiting,
        leases=len(now.leases),
        processes=tuple(lease.process for lease in now.leases),
    )


def _silent(known: FoundLimiter) -> FoundLimiter:
    return replace(known, problem=f"no answer within {_ANSWER_SECONDS:g} s")


def stop(name: str, namespace: str | None = None, *, force: bool = False) -> FoundLimiter:
    """Stop a limiter for good, and return its last known state. `namespace` may be omitted if the name is unique.

    `force` also stops one that is in use: running executions continue without a limit; waiters get no permits.

    Raises:
        LimiterError: there is no limiter with this name, it is in use, or it does not stop.
    """
    from toolyard.limits.cluster.ray import PREFIX, ray

    alive = survey()
    found = [one for one in alive if one.name == name and namespace in (None, one.namespace)]
    if len(found) != 1:
        raise LimiterError(_which(name, namespace, found or alive, several=bool(found)))
    (limiter,) = found
    if not force:
        _check_unused(limiter)
    actor = {"name": PREFIX + name, "namespace": limiter.namespace}
    try:
        ray.kill(ray.get_actor(**actor), no_restart=True)
    except ValueError:
        return limiter  # it has just ended itself
    until = time.monotonic() + _STOP_SECONDS
    while actor in ray.util.list_named_actors(all_namespaces=True):
        if time.monotonic() > until:
            raise LimiterError(f"limiter {name!r} was asked to stop but did not within {_STOP_SECONDS:g} s")
        time.sleep(0.05)
    return limiter


def _which(name: str, namespace: str | None, choice: Sequence[FoundLimiter], *, several: bool) -> str:
    if several:
        namespaces = ", ".join(repr(one.namespace) for one in choice)
        return f"there is a limiter {name!r} in each of the namespaces {namespaces}: specify one"
    where = "" if namespace is None else f" in namespace {namespace!r}"
    others = ", ".join(f"{one.name!r} in namespace {one.namespace!r}" for one in choice)
    return f"there is no limiter {name!r}{where}; alive: {others or 'none'}"


def _check_unused(limiter: FoundLimiter) -> None:
    if limiter.leases is None:
        raise LimiterError(
            f"limiter {limiter.name!r} does not say whether it is in use ({limiter.problem}); use force to stop it"
        )
    if limiter.leases:
        raise LimiterError(
            f"limiter {limiter.name!r} is in use, {limiter.in_flight} in flight and {limiter.waiting} waiting, by "
            f"{', '.join(limiter.processes[:5])}{', …' * (limiter.leases > 5)}: stop those processes first, or use "
            "force, and they get no more permits"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m toolyard.limits.cluster.survey", allow_abbrev=False)
    parser.add_argument("--stop", metavar="NAME")
    parser.add_argument("--namespace")
    parser.add_argument("--force", action="store_true")
    wanted = parser.parse_args(arguments)
    status = 0
    try:
        cluster = _connect()
        if wanted.stop is None:
            result = Survey(cluster=cluster, limiters=tuple(survey()))
        else:
            result = Survey(cluster=cluster, stopped=stop(wanted.stop, wanted.namespace, force=wanted.force))
    except ConnectionError as error:
        status, result = NO_CLUSTER, Survey(error=_one_line(error))
    except (ToolyardError, RuntimeError, ValueError) as error:  # Ray's: a cluster of another version, a bad address
        status, result = 1, Survey(error=_one_line(error))
    sys.stdout.write(result.model_dump_json() + "\n")
    return status


def _connect() -> str:
    """Connect to the cluster of `RAY_ADDRESS` or this machine, as `ray.init("auto")` would.

    But `ray.init` starts a cluster if `RAY_ADDRESS` is `local`, and retries for minutes if no one is listening.

    Raises:
        ConnectionError: there is no cluster.
    """
    from toolyard.limits.cluster.ray import NAMESPACE, ray

    address: str | None = None
    with contextlib.suppress(ConnectionError):
        address = import_module("ray._private.services").canonicalize_bootstrap_address("auto")
    if address is None:
        raise ConnectionError("this machine is not part of a cluster, and RAY_ADDRESS does not name one")
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
    except OSError as error:
        raise ConnectionError(f"{address}: {error}") from error
    try:
        ray.init(address="auto", namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as error:
        raise LimiterError(f"{error}: {_reason(error.__cause__)}") from error
    return ray.get_runtime_context().gcs_address


def _reason(cause: BaseException | None) -> str:
    """Ray puts it at the end of a traceback, followed by advice."""
    lines = [line for line in str(cause).splitlines() if line.strip()]
    return next((line for line in lines if line.startswith("ray.exceptions.")), lines[-1] if lines else "no reason")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


if __name__ == "__main__":
    sys.exit(main())
