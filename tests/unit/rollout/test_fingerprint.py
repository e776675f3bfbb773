"""Whether a resumed run would mix what two models have sampled."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolyard.rollout.config import RolloutConfig
from toolyard.rollout.fingerprint import Fingerprint

MEGABYTE = 1 << 20


def changes_of(before: Fingerprint, after: Fingerprint) -> list[str]:
    return after.differences({**before.settings, "contents": before.contents})


@pytest.mark.parametrize("key", ["adapter", "model"])
@pytest.mark.parametrize("size", [5_000, 40 * MEGABYTE])
def test_other_weights_in_the_same_folder_are_a_difference(tmp_path: Path, key: str, size: int) -> None:
    config = RolloutConfig.model_validate({"engine": {key: str(tmp_path)}, "tasks": {"path": "tasks.jsonl"}})
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(size))
    (tmp_path / "config.json").write_text("{}")
    first = Fingerprint.of(config)
    (tmp_path / "README.md").write_text("who reads this samples nothing else")
    (tmp_path / "checkpoint-10").mkdir()
    assert not changes_of(first, Fingerprint.of(config))
    with weights.open("r+b") as file:  # as training of one layer in thirty does, under the same name and size
        file.seek(size // 2)
        file.write(b"1" * (size // 30))
    assert changes_of(first, Fingerprint.of(config)) == [f"engine.{key}: the contents have changed"]


def test_a_name_is_not_taken_for_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = RolloutConfig.model_validate({"engine": {"model": "smollm2-135m"}, "tasks": {"path": "tasks.jsonl"}})
    first = Fingerprint.of(config)
    Path("smollm2-135m").mkdir()
    assert Fingerprint.of(config) == first
