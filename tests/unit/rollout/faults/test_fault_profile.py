"""What a profile says, what it refuses, and that chance depends on nothing but the seed and the place."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from toolyard.errors import ConfigError
from toolyard.records.trajectory import Failure, Sampled, Tokens, Trajectory, Turn
from toolyard.rollout.faults.profile import BUNDLED, FaultProfile, load_profile
from toolyard.rollout.faults.report import FaultReport


def profile(**fields: Any) -> FaultProfile:
    return FaultProfile.model_validate(fields)


def test_the_bundled_profiles_load_and_know_their_names():
    assert BUNDLED == ("chaos", "flaky-engine", "flaky-tools")
    for name in BUNDLED:
        found = load_profile(name)
        assert found.name == name
        assert found.kinds


FIRST = [("request-0", 1, 1), ("request-4", 0, 0)]
"""Of seed 7, on every machine and in every version: reports refer to seeds."""
PLACES = [(f"request-{number}", turn, attempt) for number in range(500) for turn in range(2) for attempt in range(2)]


def struck(one: FaultProfile, kind: str = "engine_reset") -> list[tuple[str, int, int]]:
    return [place for place in PLACES if one.strikes(kind, *place)]


def test_the_same_seed_strikes_the_same_places_in_any_order_and_in_another_process():
    one = profile(seed=7, engine_reset={"rate": 0.2})
    there = pickle.loads(pickle.dumps(one))
    backwards = [place for place in reversed(PLACES) if there.strikes("engine_reset", *place)]
    assert struck(one) == backwards[::-1]
    assert struck(one)[:2] == FIRST


def test_another_seed_and_another_kind_strike_elsewhere_about_as_often():
    fields = {"engine_reset": {"rate": 0.2}, "sandbox_kill": {"rate": 0.2}}
    found = [struck(profile(**fields)), struck(profile(seed=1, **fields)), struck(profile(**fields), "sandbox_kill")]
    assert all(320 <= len(places) <= 480 for places in found)
    assert found[0] != found[1] != found[2]


def test_never_and_always():
    assert struck(profile(engine_reset={"rate": 0})) == []
    assert struck(profile(engine_reset={"rate": 1})) == PLACES
    assert struck(profile()) == []
    assert profile(engine_reset={"rate": 0}).kinds == ()


BAD = {
    "engine_eror: {rate: 0.1}": "engine_eror: unknown key",
    "engine_reset: {rate: 0.1, seconds: 1}": "engine_reset.seconds: unknown key",
    "engine_reset: {}": "engine_reset.rate: Field required",
    "engine_reset: 0.1": "engine_reset: Input should be",
    "engine_reset: {rate: 1.1}": "engine_reset.rate: Input should be less than or equal to 1",
    "engine_reset: {rate: -0.1}": "engine_reset.rate: Input should be greater than or equal to 0",
    "engine_reset: {rate: .nan}": "engine_reset.rate",
    "engine_stall: {rate: 0.1}": "engine_stall.seconds: Field required",
    "engine_stall: {rate: 0.1, seconds: .inf}": "engine_stall.seconds",
    "slow_disk: {rate: 0.1, seconds: 0}": "slow_disk.seconds: Input should be greater than 0",
    "engine_error: {rate: 0.1, status: 404}": "engine_error.status: Input should be 500, 502, 503 or 504",
    "seed: x": "seed: Input should be a valid integer",
    "if_missing: ignore": "if_missing: Input should be 'error' or 'skip'",
    "- engine_reset": "expected a mapping of settings, not list",
    "engine_reset: {rate: 0.1": "not valid YAML",
}


@pytest.mark.parametrize("text", BAD)
def test_a_bad_profile_is_refused_by_file_and_key(tmp_path: Path, text: str):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_profile(str(file))
    assert str(refused.value).startswith(f"{file}: ")
    assert BAD[text] in str(refused.value)


def test_an_unknown_profile_names_the_bundled_ones():
    with pytest.raises(ConfigError, match=r"faults 'flaky': no such file; .* chaos, flaky-engine, flaky-tools"):
        load_profile("flaky")


# The report -----------------------------------------------------------------------------------------------------------


def trajectory(faults: list[dict[str, Any]], finish: str = "stop", **fields: Any) -> Trajectory:
    turn = Turn(Sampled(0, 1, "x", "stop", 0))
    known: dict[str, Any] = {
        "request_id": "r", "batch_data_id": "t", "rollout_offset": 0, "state": "COMPLETED", "input": "", "output": "",
        "ground_truth": None, "score": 1.0, "step": 0, "messages": (), "tokens": Tokens(), "turns": (turn, turn),
        "rewards": {}, "metrics": {"faults": {"injected": faults}},
    }  # fmt: skip
    return Trajectory(finish_reason=finish, **{**known, **fields})


def test_only_the_faults_of_the_stage_and_turn_that_failed_have_ended_the_trajectory():
    report = FaultReport("p", 0)
    faults = [
        {"kind": "engine_error", "turn": 1, "attempt": 0},  # it went on
        {"kind": "sandbox_kill", "turn": 1, "call": 0},
        {"kind": "engine_error", "turn": 2, "attempt": 0},
        {"kind": "engine_error", "turn": 2, "attempt": 1},
    ]
    failed = {"state": "FAILED", "score": None}
    report.add(trajectory(faults, "engine_failure", failure=Failure("ours", "GENERATING", "boom"), **failed))
    report.add(trajectory(faults[:2], "tool_failure", failure=Failure("ours", "TOOL_CALLING", "boom"), **failed))
    report.add(trajectory([{"kind": "malformed_call", "turn": turn} for turn in (0, 1)], "malformed_calls"))
    found = report.as_json()["kinds"]
    assert found["engine_error"] == {"planned": 4, "injected": 4, "survived": 2, "ended": {"engine_failure (ours)": 2}}
    assert found["sandbox_kill"] == {"planned": 2, "injected": 2, "survived": 1, "ended": {"tool_failure (ours)": 1}}
    assert found["malformed_call"] == {"planned": 2, "injected": 2, "survived": 1, "ended": {"malformed_calls": 1}}
    assert (report.hit, report.problems) == (3, [])


def test_a_failure_of_ours_with_a_score_is_a_problem_of_the_run():
    report = FaultReport("p", 0)
    report.add(trajectory([], "engine_failure", state="FAILED", score=0.0, failure=Failure("ours", "GENERATING", "")))
    assert report.problems == ["failures of the infrastructure have a score: r"]


def test_what_could_not_be_injected_is_planned_and_no_more():
    report = FaultReport("p", 0)
    report.add(trajectory([{"kind": "sandbox_kill", "turn": 0, "failed": "process 1: No such process"}]))
    assert report.as_json()["kinds"]["sandbox_kill"] == {"planned": 1, "injected": 0, "survived": 0, "ended": {}}
