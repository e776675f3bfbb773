"""What `doctor --pod` predicts of a pod is what a process under the same restrictions reaches, on this kernel."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from toolyard.cli.doctor.pods import examine_manifest
from toolyard.sandbox.isolation import Level

pytestmark = [
    pytest.mark.skipif(os.getuid() != 0, reason="needs root, to play a container runtime"),
    pytest.mark.kernel("user namespace", "private root", "landlock", "seccomp"),
]

CHECKOUT = Path(__file__).parents[2]
MANIFESTS = CHECKOUT / "deploy" / "kubernetes"
LEVEL = "import asyncio; from toolyard.sandbox.isolation import probe; print(asyncio.run(probe()).level)"

UNCONFINED = {"seccompProfile": {"type": "Unconfined"}, "appArmorProfile": {"type": "Unconfined"}}
DEFAULT = {"seccompProfile": {"type": "RuntimeDefault"}, "appArmorProfile": {"type": "RuntimeDefault"}}
USER = {"runAsUser": 10001, "runAsNonRoot": True}
DROPPED = {"capabilities": {"drop": ["ALL"]}, "allowPrivilegeEscalation": False}
UNMASKED = {"procMount": "Unmasked"}
OWN_USERS = {"hostUsers": False}

PODS: dict[str, tuple[dict[str, Any], dict[str, Any], Level]] = {
    "all-open": (OWN_USERS, {**UNCONFINED, **USER, **DROPPED, **UNMASKED}, Level.FULL),
    "privileged": ({}, {"privileged": True, "runAsUser": 0}, Level.FULL),
    "privileged-user": ({}, {"privileged": True, **USER}, Level.FULL),
    "masked-proc": (OWN_USERS, {**UNCONFINED, **USER, **DROPPED}, Level.CONFINED),
    "masked-proc-of-the-node": ({}, {**UNCONFINED, **USER, **DROPPED}, Level.CONFINED),
    "default-seccomp": (OWN_USERS, {**UNCONFINED, **USER, **UNMASKED, "seccompProfile": DEFAULT["seccompProfile"]},
                        Level.CONFINED),
    "default-apparmor": (OWN_USERS, {**UNCONFINED, **USER, **UNMASKED, "appArmorProfile": DEFAULT["appArmorProfile"]},
                         Level.CONFINED),
    "restricted": ({}, {**DEFAULT, **USER, **DROPPED}, Level.CONFINED),
    "root": ({}, {**DEFAULT, "runAsUser": 0}, Level.CONFINED),
    "root-without-capabilities": ({}, {**UNCONFINED, "runAsUser": 0, **DROPPED}, Level.NONE),
    "root-of-a-namespace": (OWN_USERS, {**UNCONFINED, "runAsUser": 0, **UNMASKED}, Level.CONFINED),
    "privileged-root-of-a-namespace": (OWN_USERS, {"privileged": True, "runAsUser": 0}, Level.CONFINED),
}  # fmt: skip

ONCE_IN_A_WHILE = {
    "privileged-user", "masked-proc-of-the-node", "default-apparmor", "root", "privileged-root-of-a-namespace",
}  # fmt: skip
"""Pods whose rules the others try, too."""


def slow_if(condition: bool) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow] if condition else []


def manifest(folder: Path, pod: dict[str, Any], security: dict[str, Any]) -> Path:
    container = {"name": "sandbox", "image": "toolyard", "securityContext": security}
    path = folder / "pod.yaml"
    path.write_text(
        yaml.safe_dump({"kind": "Pod", "metadata": {"name": "one"}, "spec": {**pod, "containers": [container]}})
    )
    return path


def in_pod(path: Path, volume: Path, *command: str) -> list[str]:
    volume.chmod(0o755)
    return [sys.executable, str(CHECKOUT / "tests/in_pod.py"), str(path), str(volume), *command]


def reached(path: Path) -> str:
    command = in_pod(path, path.parent, sys.executable, "-c", LEVEL)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("name", [pytest.param(name, marks=slow_if(name in ONCE_IN_A_WHILE)) for name in PODS])
def test_a_pod_reaches_the_level_that_is_predicted(name: str, tmp_path: Path) -> None:
    pod, security, level = PODS[name]
    path = manifest(tmp_path, pod, security)
    [container] = examine_manifest(path.read_bytes(), "pod.yaml").containers
    assert (container.isolation, reached(path)) == (level, level)


@pytest.mark.slow
@pytest.mark.parametrize(
    "security",
    [
        pytest.param({}, id="nothing-set"),
        pytest.param({**UNCONFINED, **UNMASKED, **USER, "seccompProfile": None}, id="seccomp-left-to-the-node"),
        pytest.param(
            {**UNCONFINED, **UNMASKED, **USER, "seccompProfile": DEFAULT["seccompProfile"],
             "capabilities": {"add": ["SYS_ADMIN"]}},
            id="default-seccomp-with-sys-admin",
        ),
    ],
)  # fmt: skip
def test_what_the_node_decides_is_among_the_possible_levels(security: dict[str, Any], tmp_path: Path) -> None:
    given = {key: value for key, value in security.items() if value is not None}
    path = manifest(tmp_path, OWN_USERS if UNMASKED.items() <= given.items() else {}, given)
    [container] = examine_manifest(path.read_bytes(), "pod.yaml").containers
    assert reached(path) in container.possible


# Our own --------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["sandbox.yaml", pytest.param("sandbox-restricted.yaml", marks=pytest.mark.slow)])
def service(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The service as the manifest starts it, with its restrictions and arguments except port, token and workers."""
    path = MANIFESTS / request.param
    pod = next(yaml.safe_load_all(path.read_text()))["spec"]["template"]["spec"]
    tokens = tmp_path / "tokens"
    tokens.write_text("tester secret\n")
    changed = {"--port": "0", "--token-file": str(tokens), "--workers": "1"}
    arguments = [
        f"{name}={changed.get(name, value)}" if equals else name
        for name, equals, value in (word.partition("=") for word in pod["containers"][0]["args"])
    ]
    command = in_pod(path, tmp_path, str(Path(sys.executable).parent / "toolyard"), *arguments)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stdout
            first = process.stdout.readline()
            assert "http://" in first, first
            yield first.split()[-1], pod
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            assert process.wait(60) == 0


def ask(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    headers = {"Authorization": "Bearer secret", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode() if body else None, headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def test_our_manifest_serves_at_its_level_and_its_probes_answer(service: tuple[str, dict[str, Any]]) -> None:
    url, pod = service
    container = pod["containers"][0]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        ask(url + container[probe]["httpGet"]["path"])
    answer = ask(f"{url}/run_code", {"language": "python", "code": "import os; print(6 * 7, os.getuid())"})
    assert answer["status"] == "Success", answer
    assert answer["run_result"]["stdout"].startswith("42 ")
    health = ask(f"{url}/healthz")
    expected = "full" if "--isolation=required" in container["args"] else "confined"
    assert health["isolation"] == expected, health
