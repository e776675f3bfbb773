"""`toolyard doctor --pod`: what it says about a manifest. tests/isolation/test_in_a_pod.py tries if that is true."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from toolyard.cli.app import app
from toolyard.cli.doctor.checks import Status
from toolyard.cli.doctor.pods import MAX_BYTES, ContainerReport, examine_manifest
from toolyard.errors import ConfigError
from toolyard.sandbox.isolation import Level

FULL_POD: dict[str, Any] = {
    "hostUsers": False,
    "securityContext": {
        "runAsUser": 10001, "seccompProfile": {"type": "Unconfined"}, "appArmorProfile": {"type": "Unconfined"},
    },
    "containers": [{"name": "main", "securityContext": {"procMount": "Unmasked"}}],
}  # fmt: skip


def pod(security: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    container: dict[str, Any] = {"name": "main"} | ({} if security is None else {"securityContext": security})
    return {"kind": "Pod", "metadata": {"name": "one"}, "spec": {"containers": [container], **spec}}


def judge(document: dict[str, Any]) -> ContainerReport:
    [container] = examine_manifest(yaml.safe_dump(document).encode(), "pod.yaml").containers
    return container


def status(report: ContainerReport, name: str) -> Status:
    return next(check.status for check in report.checks if check.name == name)


def full(**changes: Any) -> dict[str, Any]:
    return {"kind": "Pod", "metadata": {"name": "one"}, "spec": {**FULL_POD, **changes}}


class TestLevels:
    def test_the_settings_of_the_pod_hold_for_its_containers(self) -> None:
        assert judge(full()).isolation is Level.FULL

    def test_a_container_overrides_its_pod(self) -> None:
        security = {"procMount": "Unmasked", "seccompProfile": {"type": "RuntimeDefault"}}
        report = judge(full(containers=[{"name": "main", "securityContext": security}]))
        assert report.isolation is Level.CONFINED
        assert [check.name for check in report.checks if check.remedy] == ["seccomp profile"]

    def test_a_null_does_not_override(self) -> None:
        security = {"procMount": "Unmasked", "seccompProfile": None}
        assert judge(full(containers=[{"name": "main", "securityContext": security}])).isolation is Level.FULL

    def test_a_pod_that_says_nothing_is_confined_whatever_the_node_decides(self) -> None:
        report = judge(pod())
        assert report.isolation is Level.CONFINED
        assert {check.name for check in report.checks if check.status is Status.UNKNOWN} == {
            "seccomp profile", "AppArmor profile",
        }  # fmt: skip

    @pytest.mark.parametrize("left_out", ["seccompProfile", "appArmorProfile"])
    def test_a_profile_left_to_the_node_is_not_guessed(self, left_out: str) -> None:
        security = {key: value for key, value in FULL_POD["securityContext"].items() if key != left_out}
        report = judge(full(securityContext=security))
        assert (report.isolation, report.possible) == (None, (Level.FULL, Level.CONFINED))

    def test_a_profile_in_a_file_of_the_node_is_not_guessed(self) -> None:
        local = {"type": "Localhost", "localhostProfile": "profiles/toolyard.json"}
        report = judge(full(securityContext={**FULL_POD["securityContext"], "seccompProfile": local}))
        assert report.possible == (Level.FULL, Level.CONFINED)

    @pytest.mark.parametrize("security", [{}, {"privileged": True}])
    def test_another_runtime_is_not_judged(self, security: dict[str, Any]) -> None:
        report = judge(pod(security, runtimeClassName="gvisor"))
        assert (report.isolation, report.possible, report.node) == (None, (), ())
        assert "toolyard doctor" in (report.checks[0].remedy or "")

    def test_the_user_of_the_image_is_not_guessed(self) -> None:
        report = judge(pod({"capabilities": {"drop": ["ALL"]}, "seccompProfile": {"type": "RuntimeDefault"}}))
        assert report.possible == (Level.CONFINED, Level.NONE)
        assert status(report, "user") is Status.UNKNOWN

    def test_a_pod_that_must_not_be_root_is_not(self) -> None:
        security = {
            "runAsNonRoot": True,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        assert judge(pod(security)).isolation is Level.CONFINED

    @pytest.mark.parametrize("names", [["SETUID", "SETGID"], ["CAP_SETUID", "CAP_SETGID"], ["ALL"]])
    def test_root_needs_two_capabilities_to_give_programs_a_user_of_their_own(self, names: list[str]) -> None:
        security = {"runAsUser": 0, "capabilities": {"drop": ["ALL"]}, "seccompProfile": {"type": "RuntimeDefault"}}
        assert judge(pod(security)).isolation is Level.NONE
        assert judge(pod({**security, "capabilities": {"drop": ["ALL"], "add": names}})).isolation is Level.CONFINED


class TestRefusals:
    def test_an_unmasked_proc_needs_a_user_namespace(self) -> None:
        report = judge(full(hostUsers=True))
        assert (report.isolation, report.possible) == (None, ())
        assert "API server refuses" in next(check.detail for check in report.checks if check.status is Status.BROKEN)

    @pytest.mark.parametrize("shared", ["hostNetwork", "hostPID", "hostIPC"])
    def test_a_user_namespace_excludes_namespaces_of_the_node(self, shared: str) -> None:
        assert judge(full(**{shared: True})).possible == ()

    def test_root_that_must_not_be_root_does_not_start(self) -> None:
        assert judge(pod({"runAsUser": 0, "runAsNonRoot": True})).possible == ()

    def test_windows_does_not_run_the_sandbox(self) -> None:
        report = judge(pod(os={"name": "windows"}))
        assert (report.possible, status(report, "system")) == ((), Status.BROKEN)


class TestNode:
    def test_full_isolation_names_what_the_manifest_cannot_say(self) -> None:
        said = " ".join(judge(full()).node)
        for words in (
            "Kubernetes 1.33",
            "Landlock",
            "max_user_namespaces",
            "apparmor_restrict_unprivileged_userns",
            "SELinux",
        ):
            assert words in said

    def test_an_ordinary_user_without_namespaces_needs_a_newer_kernel_than_root(self) -> None:
        default = {"seccompProfile": {"type": "RuntimeDefault"}}
        assert "6.12" in " ".join(judge(pod({**default, "runAsUser": 1})).node)
        assert "6.12" not in " ".join(judge(pod({**default, "runAsUser": 0})).node)


class TestReading:
    @pytest.mark.parametrize(
        ("kind", "path"),
        [
            ("Deployment", ["template"]),
            ("CronJob", ["jobTemplate", "spec", "template"]),
            ("RayJob", ["rayClusterSpec", "headGroupSpec", "template"]),
            ("SomethingElse", ["deep", "down"]),
        ],
    )
    def test_a_pod_is_found_in_any_resource(self, kind: str, path: list[str]) -> None:
        inner: Any = {"spec": FULL_POD}
        for key in reversed(path):
            inner = {key: inner}
        report = judge({"kind": kind, "metadata": {"name": "one"}, "spec": inner})
        assert (report.workload, report.isolation) == (f"{kind}/one", Level.FULL)

    def test_every_document_and_every_container_is_judged(self) -> None:
        two = full(containers=[*FULL_POD["containers"], {"name": "side", "securityContext": {"runtimeClassName": 1}}])
        text = yaml.safe_dump_all([two, None, {"kind": "Service"}, pod()])
        report = examine_manifest(text.encode(), "all.yaml")
        assert [(found.container, found.isolation) for found in report.containers] == [
            ("main", Level.FULL), ("side", Level.CONFINED), ("main", Level.CONFINED),
        ]  # fmt: skip
        assert report.can_run

    def test_a_list_of_resources_names_each_place(self) -> None:
        text = yaml.safe_dump({"kind": "List", "items": [full(), pod()]})
        named = [found.workload for found in examine_manifest(text.encode(), "x").containers]
        assert named == ["List/(no name) items.0.spec", "List/(no name) items.1.spec"]

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            (b"", "no pod template"),
            (b"just words", "no pod template"),
            (b"kind: Service\nspec: {ports: []}", "no pod template"),
            (b"spec: {containers: []}", "no pod template"),
            (b"spec: {containers: [one, two]}", "no pod template"),
            (b"a: [", "not a YAML manifest"),
            (b"\x00\xff\xfe", "not a YAML manifest"),
            (b"a: !!python/object/apply:os.system [true]", "not a YAML manifest"),
            (b"at: 2026-99-99", "not a YAML manifest"),
            (b"[" * 1_500, "not a YAML manifest"),
            (b"a: " + b"x" * MAX_BYTES, "more than 1 MiB"),
            (b"spec: {containers: [{securityContext: [privileged]}]}", "expected a mapping"),
            (
                b"spec: {containers: [{securityContext: {privileged: 'yes'}}]}",
                "privileged: 'yes'; expected true or false",
            ),
            (b"spec: {containers: [{securityContext: {runAsUser: true}}]}", "expected a number"),
            (
                b"spec: {containers: [{securityContext: {seccompProfile: {type: None}}}]}",
                "expected one of RuntimeDefault",
            ),
            (b"spec: {containers: [{securityContext: {procMount: Open}}]}", "expected Default or Unmasked"),
            (b"spec: {containers: [{securityContext: {capabilities: {drop: ALL}}}], hostUsers: 1}", "expected"),
        ],
        ids=range(17),
    )
    def test_what_cannot_be_read_is_refused_and_named(self, text: bytes, words: str) -> None:
        with pytest.raises(ConfigError, match=r"bad\.yaml: ") as caught:
            examine_manifest(text, "bad.yaml")
        assert words in str(caught.value)

    def test_aliases_that_multiply_or_contain_themselves_are_walked_once(self) -> None:
        levels = "".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]\n" for n in range(1, 30))
        text = f"l0: &l0 {{spec: {{containers: [{{name: main}}]}}}}\n{levels}itself: &itself [*itself]\n"
        assert len(examine_manifest(text.encode(), "bomb.yaml").containers) == 1


class TestCommand:
    def run(self, *arguments: str, text: str | None = None) -> Any:
        return CliRunner().invoke(app, ["doctor", *arguments], input=text)

    @pytest.mark.parametrize(
        ("document", "code", "words"),
        [
            (full(), 0, "✔ Pod/one, container main: isolation level full."),
            (pod(), 0, "! Pod/one, container main: isolation level confined."),
            (pod({"privileged": True, "runAsUser": 0}), 0, "isolation level full"),
            (pod({"runAsUser": 0, "capabilities": {"drop": ["ALL"]}}), 1, "✘ Pod/one, container main: no isolation"),
            (pod(runtimeClassName="gvisor"), 1, "? Pod/one, container main: cannot be judged"),
            (full(hostUsers=True), 1, "does not start"),
            (full(securityContext={"runAsUser": 1}), 1, "isolation level full or confined"),
        ],
        ids=["full", "confined", "privileged", "none", "gvisor", "refused", "undecided"],
    )
    def test_the_verdict_comes_first_and_the_exit_code_agrees(
        self, document: dict[str, Any], code: int, words: str, tmp_path: Path
    ) -> None:
        (tmp_path / "pod.yaml").write_text(yaml.safe_dump(document))
        done = self.run("--pod", str(tmp_path / "pod.yaml"))
        assert (done.exit_code, words in done.output.splitlines()[0]) == (code, True), done.output

    def test_standard_input_and_json(self) -> None:
        done = self.run("--pod", "-", "--json", text=yaml.safe_dump(pod()))
        report = json.loads(done.stdout)
        assert (done.exit_code, report["can_run"], report["containers"][0]["isolation"]) == (0, True, "confined")

    @pytest.mark.parametrize("more", [["--stop-limiter", "x"], ["--force"], ["--namespace", "x"]])
    def test_it_excludes_what_is_about_this_machine(self, more: list[str]) -> None:
        assert self.run("--pod", "-", *more, text=yaml.safe_dump(pod())).exit_code == 2

    @pytest.mark.parametrize("file", ["/nowhere/pod.yaml", "/"])
    def test_a_file_that_cannot_be_read_is_named(self, file: str) -> None:
        with pytest.raises(ConfigError, match=file):
            CliRunner().invoke(app, ["doctor", "--pod", file], catch_exceptions=False)
