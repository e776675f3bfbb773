"""`toolyard doctor --pod`: which isolation level the containers of a Kubernetes manifest reach. Prints nothing.

Nothing is tried here, since the pod runs elsewhere. Each setting of the pod is translated into what the kernel grants
its processes, and `Grants` names the level, as it does for a machine that was probed. A setting that the manifest
leaves to the node or the image has several possible values: all of them are followed, and if they lead to different
levels, the report says so instead of choosing one. `tests/isolation/test_in_a_pod.py` compares these rules with what
processes under the same restrictions really reach.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import yaml
from pydantic import BaseModel, ConfigDict

from toolyard.cli.doctor.checks import Check, Group, Status
from toolyard.errors import ConfigError
from toolyard.sandbox.isolation import NAMESPACES, SCOPED_SIGNALS, Grants, Level, Python

MAX_BYTES = 1 << 20
"""Of a manifest; YAML is slow to read."""

_DEFAULT_CAPABILITIES = frozenset({"SETUID", "SETGID"})
"""Those that matter here, out of what container runtimes give to root by default."""
_FROM_POD = ("runAsUser", "runAsNonRoot", "seccompProfile", "appArmorProfile")
"""Settings of the pod's securityContext that hold for its containers, unless theirs say otherwise."""

Mapping = dict[str, Any]


class ContainerReport(BaseModel):
    """What one container reaches on a node that fulfils `node`."""

    model_config = ConfigDict(frozen=True)

    workload: str
    """Kind, name and, if it has several, the path of its pod template."""
    container: str
    isolation: Level | None
    """None: the manifest does not decide it."""
    possible: tuple[Level, ...]
    """More than one if the node or the image decides; none if the container cannot be judged or will not start."""
    checks: tuple[Check, ...]
    node: tuple[str, ...]
    """What the node must have for the best of the possible levels."""


class PodReport(BaseModel):
    """All containers of a manifest. `can_run`: each of them certainly runs programs isolated, on a suitable node."""

    model_config = ConfigDict(frozen=True)

    can_run: bool
    containers: tuple[ContainerReport, ...]


def examine_manifest(text: bytes, name: str) -> PodReport:
    """Judge every container of every pod template in a manifest of one or more documents.

    Raises:
        ConfigError: `text` is too large, is no YAML, has no pod template, or a setting has the wrong type.
    """
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{name}: more than {MAX_BYTES >> 20} MiB; pass only the documents that have pods")
    try:
        documents: list[Any] = list(yaml.safe_load_all(text))
    except (yaml.YAMLError, UnicodeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{name}: not a YAML manifest: {' '.join(str(error).split())}") from error
    containers = [
        _judge(f"{name}: {workload}", workload, pod, container)
        for workload, pod in _pods(documents)
        for container in cast("list[Mapping]", pod["containers"])
    ]
    if not containers:
        raise ConfigError(f"{name}: no pod template; expected a Pod, Deployment, Job, RayJob or the like")
    return PodReport(
        can_run=all(found.isolation not in {None, Level.NONE} for found in containers), containers=tuple(containers)
    )


# Reading --------------------------------------------------------------------------------------------------------------


def _pods(documents: list[Any]) -> Iterator[tuple[str, Mapping]]:
    """Every mapping with a list of containers, whatever resource it is in. One that is repeated by alias comes once."""
    for document in documents:
        found = list(_pod_specs(document, (), set()))
        for path, pod in found:
            owner = cast("Mapping", document) if isinstance(document, dict) else {}
            metadata = owner.get("metadata")
            named = cast("Mapping", metadata).get("name") if isinstance(metadata, dict) else None
            workload = f"{owner.get('kind', 'document')}/{named or '(no name)'}"
            yield workload if len(found) == 1 else f"{workload} {'.'.join(path)}", pod


def _pod_specs(value: Any, path: tuple[str, ...], seen: set[int]) -> Iterator[tuple[tuple[str, ...], Mapping]]:
    if not isinstance(value, dict | list) or id(cast("Any", value)) in seen:
        return
    seen.add(id(cast("Any", value)))
    if isinstance(value, list):
        inner = [(str(index), item) for index, item in enumerate(cast("list[Any]", value))]
    else:
        mapping = cast("Mapping", value)
        containers: Any = mapping.get("containers")
        if (
            isinstance(containers, list)
            and containers
            and all(isinstance(item, dict) for item in cast("Any", containers))
        ):
            yield path, mapping
            return
        inner = [(str(key), item) for key, item in mapping.items()]
    for key, item in inner:
        yield from _pod_specs(item, (*path, key), seen)


@dataclass
class _Settings:
    """One mapping of a manifest; a value of the wrong type is an error that names its place."""

    where: str
    values: Mapping

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            expected = {"dict": "a mapping", "list": "a list", "bool": "true or false", "str": "a string"}
            raise ConfigError(f"{self.where}.{key}: {value!r}; expected {expected.get(kind.__name__, 'a number')}")
        return value

    def inner(self, key: str) -> _Settings:
        return _Settings(f"{self.where}.{key}", self.get(key, dict, {}))

    def profile(self, key: str) -> str | None:
        """The `type` of a seccomp or AppArmor profile; None if it is left to the node."""
        kind = self.inner(key).get("type", str)
        known = ("RuntimeDefault", "Unconfined", "Localhost")
        if kind not in (None, *known):
            raise ConfigError(f"{self.where}.{key}.type: {kind!r}; expected one of {', '.join(known)}")
        return kind

    def capabilities(self) -> frozenset[str]:
        """Those of a root process that matter here."""
        listed = self.inner("capabilities")
        added, dropped = (
            {str(name).removeprefix("CAP_") for name in listed.get(key, list, [])} for key in ("add", "drop")
        )
        kept = frozenset[str]() if "ALL" in dropped else _DEFAULT_CAPABILITIES - dropped
        return kept | ({"SETUID", "SETGID", "SYS_ADMIN"} if "ALL" in added else added)


# Judging --------------------------------------------------------------------------------------------------------------


@dataclass
class _Judgement:
    """What a container's processes may do. A tuple has each value that the manifest leaves possible."""

    checks: list[Check] = field(default_factory=list[Check])
    seccomp: tuple[bool, ...] = (True,)
    """Whether the seccomp profile lets processes create namespaces and pivot their root."""
    mounts: tuple[bool, ...] = (True,)
    """Whether AppArmor lets them mount."""
    root: tuple[bool, ...] = (False,)
    whole_proc: bool = True
    """Whether all of /proc is visible. If not, the kernel refuses to mount another one."""
    own_ids: bool = False
    """Whether root may give programs user ids that nobody else has."""
    own_users: bool = False
    """Whether the pod has a user namespace: `hostUsers: false`."""

    def add(self, name: str, status: Status, detail: str, remedy: str | None = None) -> None:
        self.checks.append(Check(group=Group.KERNEL, name=name, status=status, detail=detail, remedy=remedy))

    def grants(self) -> list[Grants]:
        """What a kernel with Landlock 6 grants, in each possible case."""
        return [self._case(*case) for case in itertools.product(self.seccomp, self.mounts, self.root)]

    def _case(self, seccomp: bool, mounts: bool, root: bool) -> Grants:
        namespaces = seccomp and mounts and self.whole_proc and (self.own_ids or not root)
        return Grants(
            features={
                **dict.fromkeys(NAMESPACES, "" if namespaces else "refused"),
                "landlock": "", "seccomp": "", "own user id": "" if root and self.own_ids else "refused",
            },
            cgroup=None,
            limits_processes=not root or self.own_users,
            landlock_abi=SCOPED_SIGNALS,
            root=root,
            python=Python(executable="", version="", prefixes=()),
        )  # fmt: skip


def _judge(where: str, workload: str, pod: Mapping, container: Mapping) -> ContainerReport:
    spec = _Settings(where, pod)
    name = str(container.get("name", "(no name)"))
    inherited = spec.inner("securityContext").values
    own = _Settings(f"{where}, container {name}", container).inner("securityContext")
    own.values = {
        **{key: inherited[key] for key in _FROM_POD if key in inherited},
        **{key: value for key, value in own.values.items() if value is not None},
    }
    found = _Judgement()
    levels: list[Level] = []
    if _judge_runtime(found, spec):
        privileged = own.get("privileged", bool, False)
        found.own_users = spec.get("hostUsers", bool, True) is False
        _judge_seccomp(found, own, privileged=privileged)
        _judge_apparmor(found, own, privileged=privileged)
        _judge_proc(found, own, privileged=privileged)
        _judge_user(found, own, privileged=privileged)
        _judge_host_namespaces(found, spec)
        if all(check.status is not Status.BROKEN for check in found.checks):
            levels = sorted({grants.level for grants in found.grants()}, key=list(Level).index)
    return ContainerReport(
        workload=workload,
        container=name,
        isolation=levels[0] if len(levels) == 1 else None,
        possible=tuple(levels),
        checks=tuple(found.checks),
        node=tuple(_node_needs(found, levels[0])) if levels else (),
    )


def _judge_runtime(found: _Judgement, spec: _Settings) -> bool:
    runtime = spec.get("runtimeClassName", str)
    system = spec.inner("os").get("name", str, "linux")
    if runtime:
        detail = f"{runtime}: another container runtime, perhaps another kernel; the manifest does not say which"
        found.add("runtime class", Status.UNKNOWN, detail, "run `toolyard doctor` in such a pod")
    if system != "linux":
        found.add("system", Status.BROKEN, f"{system}; the sandbox needs Linux")
    return not runtime and system == "linux"


def _judge_seccomp(found: _Judgement, own: _Settings, *, privileged: bool) -> None:
    kind = "Unconfined" if privileged else own.profile("seccompProfile")
    remedy = "securityContext: {seccompProfile: {type: Unconfined}}"
    if kind == "Unconfined":
        said = "not confined, since the container is privileged" if privileged else kind
        return found.add("seccomp profile", Status.OK, f"{said}: processes may create namespaces")
    if kind == "RuntimeDefault" and "SYS_ADMIN" not in own.capabilities():
        found.seccomp = (False,)
        return found.add("seccomp profile", Status.MISSING, f"{kind}: refuses unshare, mount and pivot_root", remedy)
    found.seccomp = (True, False)
    said = {
        None: "not set: the node decides (RuntimeDefault if its kubelet has seccompDefault, otherwise Unconfined)",
        "RuntimeDefault": "RuntimeDefault with SYS_ADMIN: allows unshare and mount; pivot_root depends on the runtime",
        "Localhost": "Localhost: a file on the node decides",
    }
    return found.add("seccomp profile", Status.UNKNOWN, said[kind], remedy)


def _judge_apparmor(found: _Judgement, own: _Settings, *, privileged: bool) -> None:
    kind = own.profile("appArmorProfile")
    remedy = "securityContext: {appArmorProfile: {type: Unconfined}}"
    if kind == "Unconfined" or (privileged and kind is None):
        return found.add("AppArmor profile", Status.OK, kind or "none, since the container is privileged")
    if kind == "RuntimeDefault" and not privileged:
        found.mounts = (False,)
        return found.add("AppArmor profile", Status.MISSING, f"{kind}: refuses mounts, so no private root", remedy)
    found.mounts = (True, False)
    said = f"{kind}: a profile on the node decides" if kind else "not set: a node with AppArmor refuses mounts"
    return found.add("AppArmor profile", Status.UNKNOWN, said, remedy)


def _judge_proc(found: _Judgement, own: _Settings, *, privileged: bool) -> None:
    kind = own.get("procMount", str, "Default")
    if kind not in ("Default", "Unmasked"):
        raise ConfigError(f"{own.where}.procMount: {kind!r}; expected Default or Unmasked")
    found.whole_proc = privileged or kind == "Unmasked"
    if kind == "Unmasked" and not found.own_users:
        said = "Unmasked without a user namespace: the API server refuses the pod"
        return found.add("/proc", Status.BROKEN, said, "hostUsers: false on the pod")
    if found.whole_proc:
        why = ", since the container is privileged" if privileged else ""
        return found.add("/proc", Status.OK, f"not masked{why}")
    remedy = "hostUsers: false on the pod; on the container securityContext: {procMount: Unmasked}"
    return found.add("/proc", Status.MISSING, "masked: a private root cannot mount its own /proc", remedy)


def _judge_user(found: _Judgement, own: _Settings, *, privileged: bool) -> None:
    user = own.get("runAsUser", int)
    forbidden = own.get("runAsNonRoot", bool, False)
    if user == 0 and forbidden:
        return found.add("user", Status.BROKEN, "root with runAsNonRoot: the kubelet refuses it", "runAsUser: 10001")
    found.root = ((False,) if forbidden else (True, False)) if user is None else (user == 0,)
    granted = privileged or {"SETUID", "SETGID"} <= own.capabilities()
    found.own_ids = granted and not found.own_users
    if found.root == (False,):
        said = "not root" if user is None else f"{user}, not root"
        return found.add("user", Status.OK, said)
    who = "root" if found.root == (True,) else "not set: the image decides; if it is root"
    remedy = "securityContext: {runAsNonRoot: true, runAsUser: 10001}, and an image whose files that user can read"
    status = Status.MISSING if found.root == (True,) else Status.UNKNOWN
    if found.own_users:
        said = f"{who}: programs cannot have a user id of their own, since the pod's user namespace has too few ids"
        return found.add("user", status, said, remedy)
    if not granted:
        return found.add("user", status, f"{who}: without SETUID and SETGID programs cannot have another user", remedy)
    return found.add("user", Status.OK, f"{who}: programs have a user id of their own")


def _judge_host_namespaces(found: _Judgement, spec: _Settings) -> None:
    if not found.own_users:
        return
    found.add("user namespace of the pod", Status.OK, "hostUsers: false")
    shared = [key for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key, bool, False)]
    if shared:
        said = f"{', '.join(shared)} with hostUsers: false: the API server refuses the pod"
        found.add("namespaces of the node", Status.BROKEN, said, f"remove {', '.join(shared)}")


def _node_needs(found: _Judgement, level: Level) -> Iterator[str]:
    if found.own_users:
        yield "Kubernetes 1.33 or later, Linux 6.3 or later, and containerd 2.0 or CRI-O 1.25 (for hostUsers: false)"
    if level is Level.FULL:
        yield "Linux 5.13 or later with Landlock in its lsm= boot parameter; otherwise the level is namespaces"
        yield "sysctl user.max_user_namespaces greater than 0"
        if False in found.root:
            yield "sysctl kernel.apparmor_restrict_unprivileged_userns=0, where it exists (Ubuntu 24.04 has 1)"
        if found.whole_proc and found.own_users:
            yield "the feature gate ProcMountType, where Kubernetes still has it (for procMount: Unmasked)"
        yield "no SELinux policy that refuses the container mounts or namespaces"
    elif level is Level.CONFINED:
        if True in found.root and found.own_ids:
            yield "Linux 5.13 or later with Landlock, and an image whose interpreter every user can reach"
        if False in found.root or not found.own_ids:
            yield "Linux 6.12 or later with Landlock (ABI 6); otherwise the sandbox refuses to start"
        if False in found.seccomp:
            yield "a container runtime whose default seccomp profile allows Landlock, as current ones do"
