"""What is in deploy/: manifests that Kubernetes accepts, commands and settings that exist, an image that can be built.

No cluster and no Docker is needed: manifests are checked against the schemas of several Kubernetes versions, the
Dockerfile against the repository. How the pods' restrictions work out is tried in tests/isolation/test_in_a_pod.py.
"""

from __future__ import annotations

import copy
import fnmatch
import json
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubernetes_validate.utils import ValidationError
from test_docs import usage_error

from toolyard.cli.doctor.pods import examine_manifest
from toolyard.rollout.config import load_config
from toolyard.sandbox.isolation import Level
from toolyard.tools.registry import initialize_tools_from_config

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
MANIFESTS = sorted(path.name for path in FOLDER.glob("*.yaml"))
VERSIONS = ("1.33", "1.35", "1.37")
"""From the first that has user namespaces for pods by default."""


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def find(name: str, kind: str) -> dict[str, Any]:
    [found] = [document for document in documents(name) if document["kind"] == kind]
    return found


def pod_of(name: str) -> dict[str, Any]:
    return find(name, "Deployment")["spec"]["template"]["spec"]


def ray_groups(job: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = job["spec"]["rayClusterSpec"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def validate(document: dict[str, Any], version: str) -> None:
    """As strictly as the API server: unknown fields are errors. KubeRay's own fields are not in its schemas."""
    if document["kind"] != "RayJob":
        kubernetes_validate.validate(document, version, strict=True)
        return
    check_ray_job(document)
    for group in ray_groups(document):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, **group["template"]}
        kubernetes_validate.validate(pod, version, strict=True)


RAY_JOB = {
    "entrypoint": str, "backoffLimit": int, "shutdownAfterJobFinishes": bool, "ttlSecondsAfterFinished": int,
    "submissionMode": str, "activeDeadlineSeconds": int, "runtimeEnvYAML": str, "rayClusterSpec": dict,
}  # fmt: skip
RAY_CLUSTER = {"rayVersion": str, "enableInTreeAutoscaling": bool, "headGroupSpec": dict, "workerGroupSpecs": list}
HEAD = {"serviceType": str, "rayStartParams": dict, "template": dict}
WORKERS = {
    "groupName": str, "replicas": int, "minReplicas": int, "maxReplicas": int, "numOfHosts": int,
    "rayStartParams": dict, "template": dict,
}  # fmt: skip
"""Fields of ray.io/v1 and their types, as KubeRay's API reference has them; those that we might use."""


def check_ray_job(job: dict[str, Any]) -> None:
    assert job["apiVersion"] == "ray.io/v1"
    cluster = job["spec"]["rayClusterSpec"]
    parts = [(job["spec"], RAY_JOB), (cluster, RAY_CLUSTER), (cluster["headGroupSpec"], HEAD)]
    for values, fields in [*parts, *((group, WORKERS) for group in cluster["workerGroupSpecs"])]:
        assert {key: fields.get(key) for key in values} == {key: type(value) for key, value in values.items()}
    for group in ray_groups(job):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())


# Valid, and seen to be checked ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_is_valid_for_each_version(name: str, version: str) -> None:
    for document in documents(name):
        validate(document, version)


def test_older_kubernetes_takes_the_restricted_manifest() -> None:
    for name in ("service.yaml", "sandbox-restricted.yaml"):
        for document in documents(name):
            validate(document, "1.28")


def misspelled_field(pod: dict[str, Any]) -> None:
    pod["hostUser"] = pod.pop("hostUsers", False)


def wrong_type(pod: dict[str, Any]) -> None:
    pod["containers"][0]["securityContext"]["readOnlyRootFilesystem"] = "true"


def missing_field(pod: dict[str, Any]) -> None:
    del pod["containers"][0]["name"]


def misplaced_field(pod: dict[str, Any]) -> None:
    pod["securityContext"]["procMount"] = "Unmasked"  # exists for containers only


@pytest.mark.parametrize("name", ["sandbox.yaml", "sandbox-restricted.yaml", "rayjob.yaml"])
@pytest.mark.parametrize("spoil", [misspelled_field, wrong_type, missing_field, misplaced_field])
def test_a_spoiled_pod_is_refused(spoil: Callable[[dict[str, Any]], None], name: str) -> None:
    document = copy.deepcopy(documents(name)[0])
    templates = ray_groups(document) if document["kind"] == "RayJob" else [document["spec"]]
    spoil(templates[-1]["template"]["spec"])
    with pytest.raises(ValidationError):
        validate(document, VERSIONS[-1])


@pytest.mark.parametrize(
    "spoil",
    [
        lambda job: job["spec"].update(shutdownAfterJobFinish=True),
        lambda job: job["spec"].update(backoffLimit="3"),
        lambda job: job["spec"]["rayClusterSpec"].update(rayVersion=2.6),
        lambda job: job["spec"]["rayClusterSpec"]["headGroupSpec"]["rayStartParams"].update({"num-cpus": 0}),
        lambda job: job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0].update(replica=1),
    ],
)
def test_a_spoiled_ray_job_is_refused(spoil: Callable[[dict[str, Any]], None]) -> None:
    job = find("rayjob.yaml", "RayJob")
    spoil(job)
    with pytest.raises(AssertionError):
        validate(job, VERSIONS[-1])


# What they say --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "levels"),
    [
        ("sandbox.yaml", [Level.FULL]),
        ("sandbox-restricted.yaml", [Level.CONFINED]),
        ("rayjob.yaml", [Level.CONFINED, Level.FULL]),
    ],
)
def test_doctor_names_the_level_of_each_of_our_pods(name: str, levels: list[Level]) -> None:
    report = examine_manifest((FOLDER / name).read_bytes(), name)
    assert [found.isolation for found in report.containers] == levels


def containers() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    for name in ("sandbox.yaml", "sandbox-restricted.yaml"):
        yield name, pod_of(name), pod_of(name)["containers"][0]
    for group in ray_groups(find("rayjob.yaml", "RayJob")):
        pod = group["template"]["spec"]
        yield "rayjob.yaml", pod, pod["containers"][0]


def test_no_container_is_privileged_or_root_or_keeps_a_capability() -> None:
    for name, pod, container in containers():
        security = {**pod["securityContext"], **container["securityContext"]}
        assert security["runAsNonRoot"], name
        assert 0 < security["runAsUser"] < 65536, f"{name}: outside a pod's user namespace"
        assert security["capabilities"] == {"drop": ["ALL"]}, name
        assert security["allowPrivilegeEscalation"] is False, name
        assert security["readOnlyRootFilesystem"] is True, name
        assert "privileged" not in security, name
        assert pod["automountServiceAccountToken"] is False, name
        assert {"cpu", "memory"} <= container["resources"]["limits"].keys(), name


def test_the_restricted_deployment_differs_only_in_what_isolation_needs() -> None:
    full, restricted = find("sandbox.yaml", "Deployment"), find("sandbox-restricted.yaml", "Deployment")
    pod = full["spec"]["template"]["spec"]
    del (
        pod["hostUsers"],
        pod["securityContext"]["appArmorProfile"],
        pod["containers"][0]["securityContext"]["procMount"],
    )
    pod["securityContext"]["seccompProfile"] = {"type": "RuntimeDefault"}
    arguments = pod["containers"][0]["args"]
    arguments[arguments.index("--isolation=required")] = "--isolation=confined"
    assert restricted == full


@pytest.mark.parametrize("name", ["sandbox.yaml", "sandbox-restricted.yaml"])
def test_the_command_of_the_service_exists_and_fits_the_pod(name: str) -> None:
    container = pod_of(name)["containers"][0]
    assert usage_error(list(container["args"])) is None
    given = dict(word.split("=", 1) for word in container["args"] if "=" in word)
    limits = container["resources"]["limits"]
    assert limits["memory"] == "8Gi"
    assert int(given["--workers"]) * int(given["--max-memory-mb"]) < 0.8 * 8 * 1024
    assert given["--workers"] == limits["cpu"]
    assert int(given["--port"]) == container["ports"][0]["containerPort"]
    [mount] = [mount for mount in container["volumeMounts"] if given["--token-file"].startswith(mount["mountPath"])]
    assert mount["name"] == "tokens"
    grace = pod_of(name)["terminationGracePeriodSeconds"]
    assert int(container["lifecycle"]["preStop"]["exec"]["command"][1]) + float(given["--grace"]) < grace


def test_services_policies_and_budgets_select_the_pods() -> None:
    labels = find("sandbox.yaml", "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert find("service.yaml", "Service")["spec"]["selector"] == labels
    assert find("service.yaml", "PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == labels
    policy = find("service.yaml", "NetworkPolicy")["spec"]
    assert policy["podSelector"]["matchLabels"] == labels
    assert "Egress" in policy["policyTypes"]
    assert "egress" not in policy, "the pods may connect to nothing"


def test_the_ray_job_runs_a_command_and_settings_that_exist(tmp_path: Path) -> None:
    job, settings = find("rayjob.yaml", "RayJob"), find("rayjob.yaml", "ConfigMap")["data"]
    program, *arguments = shlex.split(job["spec"]["entrypoint"])
    assert (program, arguments[1]) == ("toolyard", "/etc/toolyard/rollout.yaml")
    assert usage_error(arguments) is None
    for name, text in settings.items():
        (tmp_path / name).write_text(text.replace("/etc/toolyard", str(tmp_path)))
    config = load_config(tmp_path / "rollout.yaml")
    tools = initialize_tools_from_config(tmp_path / "tools.yaml")
    assert (config.engine.kind, [tool.name for tool in tools]) == ("vllm", ["code_interpreter"])


def test_the_ray_job_names_the_ray_of_the_image() -> None:
    [pinned] = re.findall(r"^ray==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert find("rayjob.yaml", "RayJob")["spec"]["rayClusterSpec"]["rayVersion"] == pinned


# The image ------------------------------------------------------------------------------------------------------------

Instruction = tuple[str, str]


def dockerfile() -> dict[str, list[Instruction]]:
    """Instructions by stage; what is before the first is left out."""
    text = (ROOT / "deploy/docker/Dockerfile").read_text()
    lines = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ").splitlines()
    stages: dict[str, list[Instruction]] = {}
    for line in filter(None, map(str.strip, lines)):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            stages[rest.split()[-1]] = []
        if stages:
            stages[list(stages)[-1]].append((word, rest))
    return stages


def ancestry(stage: str) -> list[Instruction]:
    """All instructions that an image is made of, without what it copies from other stages."""
    found = dockerfile()[stage]
    above = found[0][1].split()[0]
    return [*(ancestry(above) if above in dockerfile() else []), *found]


@pytest.mark.parametrize("stage", ["sandbox", "rollout"])
def test_an_image_has_an_unprivileged_user_and_no_compiler(stage: str) -> None:
    instructions = ancestry(stage)
    users = [rest for word, rest in instructions if word == "USER"]
    assert users == ["10001:10001"]
    after = instructions[instructions.index(("USER", users[0])) :]
    assert not [rest for word, rest in after if word in {"RUN", "COPY", "ADD"}], "nothing is owned by the user"
    assert not [rest for word, rest in instructions if word == "RUN" and re.search(r"\b(gcc|g\+\+|make)\b", rest)]


def test_the_image_serves_what_it_says_and_its_users_are_those_of_the_pods() -> None:
    instructions = dict(ancestry("sandbox"))
    assert list(dockerfile())[-1] == "sandbox", "the stage that is built by default"
    assert json.loads(instructions["ENTRYPOINT"]) == ["toolyard"]
    assert usage_error(json.loads(instructions["CMD"])) is None
    assert "127.0.0.1:8080/healthz" in instructions["HEALTHCHECK"]
    assert {pod["securityContext"]["runAsUser"] for _, pod, _ in containers()} == {10001}


def test_the_context_has_what_the_wheel_needs_and_nothing_else() -> None:
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert rules[0] == "*"
    kept = {rule[1:] for rule in rules if rule.startswith("!")}
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = {build["project"]["readme"], *build["project"]["license-files"], "hatch_build.py", "pyproject.toml", "src"}
    assert kept == needed | {"constraints.txt"}
    assert all((ROOT / name).exists() for name in kept)
    assert fnmatch.fnmatch("src/toolyard/sandbox/guest/native/guest.so", rules[-1].replace("**/", "*/"))


def test_the_images_install_extras_that_exist() -> None:
    installed = [rest for stage in dockerfile().values() for word, rest in stage if word == "RUN" and "PIP" in rest]
    extras = {
        name for rest in installed for group in re.findall(r"whl\)\[([\w,]+)\]", rest) for name in group.split(",")
    }
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"server", "ray"} <= extras <= known.keys()
