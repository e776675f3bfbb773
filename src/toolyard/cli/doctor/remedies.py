"""How to get missing kernel features and toolchains.

`toolyard.sandbox.isolation.probe` finds out whether a feature works, by trying it. The settings read here only tell
which of the usual causes applies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from toolyard import settings
from toolyard.sandbox import languages

_SETTINGS = (
    "kernel.unprivileged_userns_clone",
    "kernel.apparmor_restrict_unprivileged_userns",
    "user.max_user_namespaces",
)
_CONTAINER_SIGNS = {
    "/var/run/secrets/kubernetes.io": "kubernetes",
    "/run/.containerenv": "podman",
    "/.dockerenv": "docker",
}
_NAMESPACE_ADVICE = {
    "docker": "in a Docker container, start it with: docker run --security-opt seccomp=unconfined --security-opt "
    "apparmor=unconfined --security-opt systempaths=unconfined (or a seccomp profile that allows unshare, mount and "
    "pivot_root)",
    "podman": "in a Podman container, start it with: podman run --security-opt seccomp=unconfined "
    "--security-opt unmask=ALL",
    "kubernetes": "in the pod: hostUsers: false, and securityContext: {runAsUser: 10001, seccompProfile: {type: "
    "Unconfined}, appArmorProfile: {type: Unconfined}, procMount: Unmasked}; try it with: toolyard doctor --pod FILE",
}


@dataclass(frozen=True, slots=True)
class Host:
    """Facts about the machine that explain why a feature is refused."""

    root: bool = False
    container: str | None = None
    """`docker`, `podman` or `kubernetes`; None if there is no sign of one. Virtual machines made from container images
    carry the sign, too, so advice must say whom it is for."""
    settings: Mapping[str, str] = field(default_factory=dict[str, str])
    """Kernel settings by sysctl name. Those that the kernel does not have are left out."""
    security_modules: str | None = None
    """The active ones, comma-separated; None if securityfs is not readable."""

    @staticmethod
    def read(*, root: bool) -> Host:
        found = {name: _text(f"/proc/sys/{name.replace('.', '/')}") for name in _SETTINGS}
        return Host(
            root=root,
            container=next((kind for sign, kind in _CONTAINER_SIGNS.items() if Path(sign).exists()), None),
            settings={name: value for name, value in found.items() if value is not None},
            security_modules=_text("/sys/kernel/security/lsm"),
        )


def _text(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def kernel_remedy(feature: str, reason: str, host: Host) -> str | None:
    """How to get `feature`, which was refused for `reason`. None: nothing to do; its absence is no loss."""
    if feature.endswith(" namespace") or feature == "private root":
        return _namespace_remedy(reason, host)
    if feature == "landlock":
        return _landlock_remedy(host)
    if feature == "seccomp":
        return "use a kernel with CONFIG_SECCOMP_FILTER" + (" and a less strict container" if host.container else "")
    if feature == "cgroup":
        return _cgroup_remedy(host)
    if feature == "own user id" and "other users cannot access" in reason:
        return (
            "install Python where every user can reach it (with uv: UV_PYTHON_INSTALL_DIR=/opt/python), or make the "
            "directory accessible: chmod o+x"
        )
    if feature == "own user id" and host.root:
        return "grant CAP_SETUID and CAP_SETGID, or run as an ordinary user"
    return None


def _namespace_remedy(reason: str, host: Host) -> str:
    advice: list[str] = []
    if host.settings.get("user.max_user_namespaces") == "0":
        advice.append(_sysctl("user.max_user_namespaces", "15000"))
    if not host.root and host.settings.get("kernel.unprivileged_userns_clone") == "0":
        advice.append(_sysctl("kernel.unprivileged_userns_clone", "1"))
    if not host.root and host.settings.get("kernel.apparmor_restrict_unprivileged_userns") == "1":
        advice.append(_sysctl("kernel.apparmor_restrict_unprivileged_userns", "0"))
    if host.container:
        advice.append(_NAMESPACE_ADVICE[host.container])
    if not advice and ("Invalid argument" in reason or "not implemented" in reason):
        advice.append("use a kernel with CONFIG_USER_NS, CONFIG_PID_NS, CONFIG_NET_NS, CONFIG_IPC_NS and CONFIG_UTS_NS")
    if not advice:
        advice.append(
            "no kernel setting forbids it, so something around this process does: a seccomp filter, a security module, "
            "or RestrictNamespaces= of its systemd unit"
        )
    return "; ".join(advice)


def _sysctl(name: str, value: str) -> str:
    return f"sudo sysctl -w {name}={value} (to keep it, add it to /etc/sysctl.d/60-toolyard.conf)"


def _landlock_remedy(host: Host) -> str:
    if host.security_modules is not None and "landlock" not in host.security_modules.split(","):
        return f"boot with lsm=landlock,{host.security_modules} (Linux 5.13 or later, CONFIG_SECURITY_LANDLOCK)"
    if host.container:
        return "use a container runtime whose seccomp profile allows landlock_create_ruleset (Docker 23 or later does)"
    return "use Linux 5.13 or later with CONFIG_SECURITY_LANDLOCK, and landlock in its lsm= boot parameter"


def _cgroup_remedy(host: Host) -> str:
    own = (
        "mount the memory controller writable, and start it as: systemd-run --scope -p Delegate=yes toolyard …"
        if host.root
        else "start it as: systemd-run --user --scope -p Delegate=yes toolyard … (or as root)"
    )
    if not host.container:
        return own
    return f"{own}; in a container: --cgroupns=private -v /sys/fs/cgroup:/sys/fs/cgroup:rw"


def toolchain_remedy(row: languages.Language) -> str:
    """How to install the preferred toolchain of a language, if it is not on `PATH`."""
    return languages.remedy(row, settings.search_path())
