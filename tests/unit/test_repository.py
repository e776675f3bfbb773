"""Files that describe the repository agree with each other: workflows, Makefile, pyproject.toml, CITATION, hooks."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from toolyard import __version__

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SUPPORTED = {
    found[1]
    for classifier in PROJECT["project"]["classifiers"]
    if (found := re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", classifier))
}
MAKE_TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def load(path: Path) -> dict[str, Any]:
    # BaseLoader: `on` is a word, and 3.10 is not 3.1.
    return yaml.load(path.read_text(), yaml.BaseLoader)


def steps(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def make_targets_in(text: str) -> set[str]:
    return set(re.findall(r"(?:^|`)make(?: [A-Z]+=\S+)* ([a-z][a-z-]*)", text, re.MULTILINE))


@pytest.mark.parametrize(("workflow", "job"), [("ci.yml", "test"), ("release.yml", "smoke")])
def test_workflows_try_exactly_the_supported_pythons(workflow: str, job: str) -> None:
    matrix = load(ROOT / ".github" / "workflows" / workflow)["jobs"][job]["strategy"]["matrix"]
    assert set(matrix["python"]) == SUPPORTED
    assert {one["python"] for one in matrix.get("include", [])} <= SUPPORTED


def test_the_wheel_is_tried_with_exactly_the_supported_pythons() -> None:
    [minors] = re.findall(r"cp3\{([\d,]+)\}", PROJECT["tool"]["cibuildwheel"]["build"])
    assert {f"3.{minor}" for minor in minors.split(",")} == SUPPORTED


def test_the_oldest_supported_python_is_the_one_required_and_type_checked() -> None:
    oldest = min(SUPPORTED, key=lambda version: int(version.partition(".")[2]))
    assert PROJECT["project"]["requires-python"] == f">={oldest}"
    assert PROJECT["tool"]["pyright"]["pythonVersion"] == oldest


@pytest.mark.parametrize("name", ["ci.yml", "release.yml"])
def test_both_processors_are_tried(name: str) -> None:
    assert {"ubuntu-24.04", "ubuntu-24.04-arm"} <= set(
        re.findall(r"ubuntu-[\w.-]+", (ROOT / ".github/workflows" / name).read_text())
    )


def test_the_workflow_makes_what_the_makefile_has() -> None:
    wanted = {
        target
        for step in steps(load(ROOT / ".github/workflows/ci.yml"))
        for target in make_targets_in(step.get("run", ""))
    }
    assert {"check", "docs", "test"} <= wanted
    assert wanted <= MAKE_TARGETS


def test_the_contributing_guide_names_targets_that_exist() -> None:
    wanted = make_targets_in((ROOT / "CONTRIBUTING.md").read_text())
    assert {"check", "test", "test-all"} <= wanted
    assert wanted <= MAKE_TARGETS


@pytest.mark.parametrize("path", ["CONTRIBUTING.md", "SECURITY.md"])
def test_guides_name_places_that_exist(path: str) -> None:
    text = (ROOT / path).read_text()
    places = {
        *re.findall(r"\]\(([^)#:]+)\)", text),
        *re.findall(r"`((?:src|tests|docs|\.ci|\.github)/?[\w/.-]*)`", text),
    }
    assert len(places) > 1
    assert [place for place in places if "NNNN" not in place and not (ROOT / place).exists()] == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_to_commits_and_tokens_can_only_read(path: Path) -> None:
    workflow = load(path)
    assert workflow["permissions"] == {"contents": "read"}
    used = [step["uses"] for step in steps(workflow) if "uses" in step]
    assert used
    assert [action for action in used if not re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}", action)] == []


def test_only_publishing_gets_another_permission() -> None:
    jobs = load(ROOT / ".github/workflows/release.yml")["jobs"]
    assert {name: job["permissions"] for name, job in jobs.items() if "permissions" in job} == {
        "publish": {"id-token": "write"}
    }


def test_the_citation_names_this_version() -> None:
    citation = load(ROOT / "CITATION.cff")
    assert (citation["version"], citation["license"]) == (__version__, PROJECT["project"]["license"])


def test_security_md_supports_this_version() -> None:
    assert f"| {__version__.rpartition('.')[0]}.x | yes |" in (ROOT / "SECURITY.md").read_text()


def test_pre_commit_runs_what_make_check_runs() -> None:
    makefile = (ROOT / "Makefile").read_text()
    [recipe] = re.findall(r"^check:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    checks = set(re.findall(r"\$\(BIN\)/(ruff \w+|pyright)", recipe))
    hooks = [hook["entry"] for repo in load(ROOT / ".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]
    assert checks == {found[1] for entry in hooks if (found := re.match(r"\.venv/bin/(ruff \w+|pyright)", entry))}
