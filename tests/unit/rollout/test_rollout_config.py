"""The settings of a run: errors name the file or the override that caused them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from toolyard.errors import ConfigError
from toolyard.rollout.config import EMBEDDED, load_config

KNOWN = "known here: max_assistant_turns, "


def refusal(path: Path | None, overrides: Any) -> str:
    with pytest.raises(ConfigError) as told:
        load_config(path, overrides)
    return str(told.value)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "rollout.yaml"


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("limits.respnse_length=3", f"unknown key; {KNOWN}"),
        ("limits={respnse_length: 3}", f"limits.respnse_length: unknown key; {KNOWN}"),
        ("n=0", "Input should be greater than 0"),
        ("limits=3", "Input should be a valid dictionary or instance of RolloutLimits"),
        ("tasks.limit.first=3", "tasks.limit: Input should be a valid integer"),
        ("engine.urls=[5]", "engine.urls.0: Input should be a valid string"),
        ("interaction.config.a=1", "interaction.class_name: Field required"),
    ],
)
def test_a_mistake_in_an_override_names_the_override_and_not_the_file(override: str, told: str) -> None:
    said = refusal(EMBEDDED, ["n=2", override, "seed=3"])
    assert said.startswith(f"override {override!r}: {told}")
    assert "embedded.yaml" not in said


def test_of_overrides_with_the_same_key_the_last_is_named() -> None:
    assert refusal(None, ["n=-1", "n=0"]).startswith("override 'n=0': ")


def test_a_mistake_in_the_file_names_the_file_whatever_the_overrides_say(file: Path) -> None:
    file.write_text("limits: {respnse_length: 3}")
    said = refusal(file, ["limits.response_length=5", "n=2"])
    assert said.startswith(f"{file}: limits.respnse_length: unknown key; given: '3'; {KNOWN}")


def test_a_mistake_in_a_mapping_of_overrides_is_said_to_be_there(file: Path) -> None:
    file.write_text("n: 2")
    assert refusal(file, {"limits": {"respnse_length": 3}}).startswith("overrides: limits.respnse_length: unknown key;")
    file.write_text("limits: {respnse_length: 3}")
    assert refusal(file, {"limits": {"response_length": 3}}).startswith(f"{file}: limits.respnse_length: unknown key;")


def test_a_long_override_is_cut() -> None:
    assert len(refusal(None, [f"n={'x' * 10_000}"])) < 500


@pytest.mark.parametrize("override", ["n", "=3", "a..b=3", "n={"])
def test_what_is_no_override_is_named(override: str) -> None:
    assert refusal(None, [override]).startswith(f"override {override!r}: ")


@pytest.mark.parametrize("secret", ["abc #def", "@sekret", "a: b", "{", "12", "'"])
def test_a_variable_is_taken_as_it_is_whatever_yaml_would_make_of_it(file, monkeypatch, secret):
    monkeypatch.setenv("MY_KEY", secret)
    file.write_text("engine:\n  api_key: ${MY_KEY}\n  max_batch_size: ${MY_ABSENT:-8}\n")
    engine = load_config(file).engine
    assert engine.api_key is not None
    assert (engine.api_key.get_secret_value(), engine.max_batch_size) == (secret, 8)


def test_a_variable_that_is_not_set_is_named_with_its_place(file):
    file.write_text("engine:\n  urls: ['http://a', '${MY_ABSENT}']  # not ${THIS_ONE}\n")
    assert refusal(file, ()) == f"{file}: engine.urls[1]: the environment variable 'MY_ABSENT' is not set"


@pytest.mark.parametrize("wrong", ["agent: x\ncluster: {}", "concurrency: no"])
def test_no_key_is_shown_in_a_complaint(file, wrong):
    file.write_text(f"engine: {{kind: openai, api_key: sk-SECRET}}\n{wrong}\n")
    assert "SECRET" not in refusal(file, ())
    file.write_text("engine: {api_key: [sk-SECRET]}\n")
    assert refusal(file, ()) == f"{file}: engine.api_key: Input should be a valid string"
