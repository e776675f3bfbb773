"""Doctor's model and its words: what is advised on which machine, and how a report reads."""

from __future__ import annotations

import io
import re
import tomllib
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from toolyard.cli.app import app
from toolyard.cli.doctor import advice, show, verdict
from toolyard.cli.doctor.checks import (
    EXTRAS,
    Check,
    DoctorReport,
    Group,
    Status,
    check_batches,
    check_extra,
    cluster_checks,
    kernel_checks,
)
from toolyard.cli.doctor.remedies import Host, kernel_remedy, toolchain_remedy
from toolyard.limits.cluster.survey import NO_CLUSTER, FoundLimiter, Survey
from toolyard.sandbox.isolation import Grants, Level, Python
from toolyard.sandbox.languages import find_language

FEATURES = (
    "user namespace", "mount namespace", "pid namespace", "network namespace", "ipc namespace", "uts namespace",
    "private root", "landlock", "seccomp", "own user id", "cgroup",
)  # fmt: skip
EPERM = "unshare: Operation not permitted"


def granting(*, root: bool = True, **refused: str) -> Grants:
    reasons = {name.replace("_", " "): reason for name, reason in refused.items()}
    return Grants(
        features={feature: reasons.get(feature, "") for feature in FEATURES},
        cgroup=None if "cgroup" in refused else (2, ("/sys/fs/cgroup",)),
        landlock_abi=6,
        root=root,
        python=Python(executable="/usr/bin/python3", version="3.12.1", prefixes=("/usr",)),
    )


class TestRemedies:
    @pytest.mark.parametrize("feature", ["user namespace", "network namespace", "private root"])
    @pytest.mark.parametrize(
        ("setting", "value", "advice"),
        [
            ("kernel.unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
            (
                "kernel.apparmor_restrict_unprivileged_userns",
                "1",
                "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
            ),
            ("user.max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=15000"),
        ],
    )
    def test_the_setting_that_forbids_namespaces_is_named(
        self, feature: str, setting: str, value: str, advice: str
    ) -> None:
        assert advice in (kernel_remedy(feature, EPERM, Host(settings={setting: value})) or "")

    @pytest.mark.parametrize(
        "settings",
        [
            {"kernel.unprivileged_userns_clone": "1", "user.max_user_namespaces": "1000"},
            {"kernel.apparmor_restrict_unprivileged_userns": "0"},
            {},
        ],
    )
    def test_a_setting_that_allows_them_is_not_blamed(self, settings: dict[str, str]) -> None:
        advice = kernel_remedy("user namespace", EPERM, Host(settings=settings))
        assert advice is not None
        assert "sysctl" not in advice

    def test_settings_for_ordinary_users_are_not_blamed_for_root(self) -> None:
        host = Host(root=True, settings={"kernel.unprivileged_userns_clone": "0"})
        assert "sysctl" not in (kernel_remedy("user namespace", EPERM, host) or "")

    @pytest.mark.parametrize(
        ("container", "words"),
        [
            ("docker", "--security-opt seccomp=unconfined"),
            ("docker", "systempaths=unconfined"),
            ("podman", "unmask=ALL"),
            ("kubernetes", "procMount: Unmasked"),
        ],
    )
    def test_in_a_container_the_advice_is_for_its_runtime(self, container: str, words: str) -> None:
        assert words in (kernel_remedy("private root", EPERM, Host(container=container)) or "")

    def test_a_kernel_without_namespaces_is_told_from_one_that_forbids_them(self) -> None:
        assert "CONFIG_USER_NS" in (kernel_remedy("user namespace", "unshare: Invalid argument", Host()) or "")

    def test_landlock_that_is_built_in_but_not_active_needs_a_boot_parameter(self) -> None:
        host = Host(security_modules="capability,apparmor")
        assert "lsm=landlock,capability,apparmor" in (kernel_remedy("landlock", "ENOSYS", host) or "")
        assert "5.13" in (kernel_remedy("landlock", "ENOSYS", Host()) or "")
        assert "seccomp profile" in (kernel_remedy("landlock", "EPERM", Host(container="docker")) or "")

    @pytest.mark.parametrize(
        ("host", "words"),
        [
            (Host(), "systemd-run --user --scope -p Delegate=yes"),
            (Host(root=True), "memory controller writable"),
            (Host(container="docker"), "--cgroupns=private"),
        ],
    )
    def test_a_cgroup_is_had_by_delegation(self, host: Host, words: str) -> None:
        assert words in (kernel_remedy("cgroup", "no", host) or "")

    def test_this_machine_can_be_read(self) -> None:
        assert Host.read(root=False).settings.keys() <= {
            "kernel.unprivileged_userns_clone",
            "kernel.apparmor_restrict_unprivileged_userns",
            "user.max_user_namespaces",
        }


class TestKernelChecks:
    def test_what_works_needs_no_remedy(self) -> None:
        checks = kernel_checks(granting(), Host(root=True))
        assert {check.name for check in checks} == set(FEATURES)
        assert all(check.status is Status.OK and check.remedy is None for check in checks)

    def test_what_is_refused_has_its_reason_and_a_remedy(self) -> None:
        grants = granting(root=False, user_namespace=EPERM)
        check = next(
            check for check in kernel_checks(grants, Host(container="docker")) if check.status is not Status.OK
        )
        assert (check.name, check.detail) == ("user namespace", EPERM)
        assert "docker run" in (check.remedy or "")

    @pytest.mark.parametrize(
        ("namespaces", "words"), [("", "exceed its limit for up to 20 ms"), (EPERM, "limited per process only")]
    )
    def test_what_is_lost_without_a_feature_is_said(self, namespaces: str, words: str) -> None:
        grants = granting(private_root=namespaces, cgroup="not writable")
        details = {check.name: check.detail for check in kernel_checks(grants, Host())}
        assert details["cgroup"].startswith("not writable; lost: memory")
        assert words in details["cgroup"]

    def test_an_interpreter_that_only_root_can_reach_matters_without_namespaces_only(self) -> None:
        reason = "the interpreter is in /root, which other users cannot access"
        with_namespaces = kernel_checks(granting(own_user_id=reason), Host(root=True))
        assert "own user id" not in {check.name for check in with_namespaces}
        without = kernel_checks(granting(own_user_id=reason, private_root=EPERM), Host(root=True))
        check = next(check for check in without if check.name == "own user id")
        assert "none of its capabilities" in check.detail
        assert "chmod o+x" in (check.remedy or "")

    def test_an_ordinary_user_does_not_miss_user_ids_of_programs_own(self) -> None:
        checks = kernel_checks(granting(root=False, own_user_id="only for root"), Host())
        assert "own user id" not in {check.name for check in checks}


class TestExtras:
    def test_the_table_is_the_one_of_pyproject(self) -> None:
        def module(package: str) -> str:
            return package.replace("-", "." if package.startswith("opentelemetry") else "_")

        project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
        declared = {
            extra: {module(re.split(r"[\[<>=]", requirement)[0]) for requirement in requirements} - {"toolyard"}
            for extra, requirements in project["optional-dependencies"].items()
            if extra not in ("dev", "docs")
        }
        assert {extra: set(modules) for extra, modules in EXTRAS.items()} == declared

    async def test_a_missing_package_is_named_with_the_pip_command(self) -> None:
        check = await check_extra("ray", ("no_such_package",))
        assert check.status is Status.MISSING
        assert "no_such_package" in check.detail
        assert check.remedy == "pip install 'toolyard[ray]'"

    async def test_a_package_that_is_there_but_does_not_import_is_broken(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "half_installed.py").write_text("raise ImportError('libcudart.so.12 is missing')\n")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        check = await check_extra("hf", ("half_installed",))
        assert check.status is Status.BROKEN
        assert "libcudart.so.12 is missing" in check.detail

    async def test_one_that_imports_is_shown_with_its_version(self) -> None:
        check = await check_extra("dev", ("pytest",))
        assert check.status is Status.OK
        assert check.detail == f"pytest {pytest.__version__}"


def test_a_missing_c_library_is_told_with_the_way_to_build_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (check_batches().status, check_batches().remedy) == (Status.OK, None)
    monkeypatch.setattr("toolyard.sandbox.guest.native.LIBRARY", "/nonexistent/guest.so")
    assert check_batches().status is Status.MISSING
    assert "not built" in check_batches().detail
    assert "python -m toolyard.sandbox.guest.native.build" in (check_batches().remedy or "")
    monkeypatch.setenv("TOOLYARD_NATIVE", "0")
    assert (check_batches().status, check_batches().remedy) == (Status.MISSING, None)


@pytest.mark.parametrize(
    ("language", "words"),
    [("go", "apt-get install golang-go"), ("julia", "https://julialang.org"), ("csharp", "mono-mcs mono-runtime")],
)
def test_a_missing_toolchain_is_had_from_its_package(
    language: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert words in toolchain_remedy(find_language(language))


class TestCluster:
    def test_each_limiter_is_one_line(self) -> None:
        one = FoundLimiter(
            "sandbox", "toolyard", "ALIVE", 4711, "10.0.0.1", limit=8, in_flight=3, waiting=5, leases=2
        )  # fmt: skip
        checks = cluster_checks(0, Survey(cluster="10.0.0.1:6379", limiters=(one, one)))
        assert [(check.name, check.status) for check in checks] == [("sandbox", Status.OK)] * 2
        assert checks[0].detail == (
            "limit 8, in flight 3, waiting 5, processes 2; namespace toolyard, pid 4711 on 10.0.0.1"
        )

    def test_one_that_does_not_answer_is_broken_and_can_be_stopped(self) -> None:
        one = FoundLimiter("my sandbox", "toolyard", "RESTARTING", problem="no answer within 5 s")
        (check,) = cluster_checks(0, Survey(cluster="10.0.0.1:6379", limiters=(one,)))
        assert check.status is Status.BROKEN
        assert check.detail == "no answer within 5 s (RESTARTING); namespace toolyard"
        assert check.remedy == "toolyard doctor --stop-limiter 'my sandbox' --namespace toolyard --force"

    def test_one_that_is_only_starting_is_not_called_broken(self) -> None:
        one = FoundLimiter("sandbox", "toolyard", "PENDING_CREATION", problem="no answer within 5 s")
        (check,) = cluster_checks(0, Survey(cluster="10.0.0.1:6379", limiters=(one,)))
        assert (check.status, check.remedy) == (Status.MISSING, None)
        assert "is being created" in check.detail

    @pytest.mark.parametrize(
        ("status", "survey", "expected", "words"),
        [
            (0, Survey(cluster="10.0.0.1:6379"), Status.OK, "cluster at 10.0.0.1:6379, no limiters"),
            (NO_CLUSTER, Survey(error="none"), Status.MISSING, "no cluster is running: none"),
            (1, Survey(error="InvalidAuthToken"), Status.BROKEN, "cannot list its limiters: InvalidAuthToken"),
        ],
    )
    def test_no_limiter_no_cluster_and_one_that_lets_nobody_in_are_told_apart(
        self, status: int, survey: Survey, expected: Status, words: str
    ) -> None:
        (check,) = cluster_checks(status, survey)
        assert (check.status, check.detail) == (expected, words)

    def test_a_limiter_is_not_mistaken_for_a_kernel_feature(self) -> None:
        one = FoundLimiter("pid namespace", "toolyard", limit=1, in_flight=0, waiting=0, leases=0)
        assert "pid namespace" in printed(report(*cluster_checks(0, Survey(limiters=(one,)))))

    def test_limiters_are_part_of_the_json_form(self) -> None:
        one = FoundLimiter("sandbox", "toolyard", processes=("host:1",))
        found = report().model_copy(update={"limiters": (one,)})
        assert DoctorReport.model_validate_json(found.model_dump_json()) == found

    @pytest.mark.parametrize("option", [["--force"], ["--namespace", "x"]])
    def test_options_of_stopping_alone_are_wrong_usage(self, option: list[str]) -> None:
        done = CliRunner().invoke(app, ["doctor", *option])
        assert done.exit_code == 2
        assert "--stop-limiter" in done.output


def report(*checks: Check, can_run: bool = True, isolation: Level | None = Level.FULL) -> DoctorReport:
    return DoctorReport(
        toolyard="1.0",
        system="Linux",
        processors=2,
        python="3.12.1",
        can_run=can_run,
        isolation=isolation,
        memory_limit="cgroup v2",
        checks=checks,
    )


def printed(found: DoctorReport) -> str:
    console = Console(file=io.StringIO(), width=120)
    show(found, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


class TestReport:
    def test_the_verdict_comes_first_and_says_how_well_programs_are_shut_in(self) -> None:
        python = Check(group=Group.LANGUAGES, name="python", status=Status.OK, detail="Python 3.12.1")
        go = Check(group=Group.LANGUAGES, name="go", status=Status.MISSING, detail="no toolchain")
        first = printed(report(python, go)).splitlines()[0]
        assert first == (
            "✔ The sandbox runs programs at full isolation; memory is limited by cgroup v2; 1 of 2 languages work."
        )

    def test_a_lower_level_is_named_and_not_green(self) -> None:
        style, sentence = verdict(report(isolation=Level.CONFINED))
        assert "yellow" in style
        assert "only at isolation level confined" in sentence

    def test_a_machine_that_cannot_run_programs_is_told_why(self) -> None:
        broken = Check(group=Group.SANDBOX, name="start", status=Status.BROKEN, detail="no isolation: EPERM [x]")
        style, sentence = verdict(report(broken, can_run=False, isolation=Level.NONE))
        assert "red" in style
        assert "EPERM" in sentence
        assert "EPERM [x]" in printed(report(broken, can_run=False))

    def test_one_remedy_for_many_features_is_told_once(self) -> None:
        refused = granting(user_namespace=EPERM, pid_namespace=EPERM)
        given = advice(kernel_checks(refused, Host(container="docker")))
        assert list(given) == ["user namespace, pid namespace"]

    def test_namespaces_that_work_are_one_line_and_those_that_do_not_are_each_shown(self) -> None:
        assert "user, mount, pid, network, ipc, uts" in printed(report(*kernel_checks(granting(), Host())))
        refused = printed(report(*kernel_checks(granting(pid_namespace=EPERM), Host())))
        assert "pid namespace" in refused
        assert EPERM in refused

    def test_the_json_form_reads_back(self) -> None:
        found = report(*kernel_checks(granting(), Host()))
        assert DoctorReport.model_validate_json(found.model_dump_json()) == found
