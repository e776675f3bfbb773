"""What a dump says about a score: the weights of its parts, and what their scorers said."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from playing import Echo, played, playing, said, task
from toolyard.records.lines import to_line, trajectory_of
from toolyard.records.tape import Tape, TapeWriter
from toolyard.rewards.combination import Weights
from toolyard.rollout.external import RecordedCalls, ReplayedCalls
from toolyard.rollout.play.play import Play


class Explained(Echo):
    async def explain_reward(self, instance_id: str) -> dict[str, Any]:
        return {"reason": "half of it", "expected": 1}


DETAILS = {
    "final": {"weight": 1.0, "reason": "the answer 41 is not 42", "extracted": "41", "expected": "42"},
    "step": {"weight": 1.0},
    "tool/echo": {"weight": 0.5, "reason": "half of it", "expected": "1"},
}


async def test_a_trajectory_says_how_its_score_is_made_and_why() -> None:
    trajectory = await played([said("hello"), "#### 41"], [Explained()], weights=Weights(tool={"echo": 0.5}))
    assert (trajectory.score, trajectory.rewards) == (0.5, {"final": 0.0, "step": 0.25, "tool/echo": 0.5})
    assert trajectory.reward_details == DETAILS
    again = trajectory_of(to_line(trajectory))
    assert again == trajectory
    assert json.loads(to_line(again))["reward_details"] == DETAILS


async def test_a_reward_that_failed_says_why_and_one_without_an_explanation_has_its_weight() -> None:
    trajectory = await played([said("hello"), "#### 41"], [Echo()], task(answer="Paris"))
    assert trajectory.finish_reason == "reward_failure"
    assert trajectory.reward_details["tool/echo"] == {"weight": 0.0}
    final = trajectory.reward_details["final"]
    assert final["reason"].startswith("reward 'gsm8k': ground_truth 'Paris': expected a number")


async def test_a_request_that_failed_before_its_rewards_has_no_details() -> None:
    failed = await played([], [Echo()])
    assert (failed.state, failed.rewards) == ("FAILED", {})
    assert b"reward_details" not in to_line(failed)


async def test_a_replay_has_the_same_details_and_a_tape_from_before_has_none(tmp_path: Path) -> None:
    path = tmp_path / "run.tape"
    async with playing([said("hello"), "#### 41"], [Explained()], weights=Weights(tool={"echo": 0.5})) as play:
        with TapeWriter(path) as tape:
            live = await Play(play.request, play.setting, RecordedCalls(tape, play.request.request_id)).run()

        async def replayed(file: Path) -> bytes:
            request = play.request.anew()
            return to_line(await Play(request, play.setting, ReplayedCalls(Tape.read(file), request.request_id)).run())

        assert live.reward_details == DETAILS
        assert await replayed(path) == to_line(live)

        # What earlier versions did not record.
        old = tmp_path / "old.tape"
        entries = [json.loads(line) for line in path.read_text().splitlines()]
        for entry in entries:
            if entry.get("kind") in ("released", "final"):
                for name in ("explanations", "explanation"):
                    entry["got"]["answer"].pop(name, None)
        old.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        assert await replayed(old) == to_line(replace(live, reward_details={}))
