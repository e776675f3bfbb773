"""What both viewers show of a trajectory: conversation, tokens, times, differences."""

from __future__ import annotations

import gzip
import json
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patience import processor_time
from toolyard.messages import Message, ToolCall
from toolyard.records.lines import trajectory_of
from toolyard.records.trajectory import CallRecord, Sampled, Tokens, Trajectory, Turn
from toolyard.viewer.comparison import RunPair, align, compare, pair_runs
from toolyard.viewer.conversation import conversation
from toolyard.viewer.protocol import Origin, Role, Stage
from toolyard.viewer.timeline import request_timeline, stage_seconds, step_timeline
from toolyard.viewer.token_runs import origin_at, texts_of, token_runs

DEMO = Path(__file__).parents[2] / "data" / "embedded.jsonl.gz"
SEEDS = {
    "input": "\n\n  system\nYou are a math expert.\n\n  user\nJohn made $100,000.\n\n  assistant\n",
    "output": 'assistant\n<think>\nLet me see.\n<tool_call>\n{"name": "code_interpreter", "arguments": {"code": '
    '"print(220000.0)", "executes": "True"}}\n</tool_call>\n\n  tool\n220000.0\n\n\n  assistant\n'
    "<think>\nSo it is.\n</think>\n\n#### 220000.0",
    "score": 0,
    "step": 1,
}


@pytest.fixture(scope="module")
def demo() -> list[Trajectory]:
    return [trajectory_of(line) for line in gzip.decompress(DEMO.read_bytes()).splitlines()]


def turn(start: int, end: int, text: str, *calls: CallRecord, **timings: float) -> Turn:
    return Turn(Sampled(start, end, text, "stop", 0), calls, timings)


def call(response: str = "4\n", seconds: float = 1.0, **metrics: Any) -> CallRecord:
    arguments = json.dumps({"code": "print(2 + 2)"})
    return CallRecord("c0", "code_interpreter", arguments, "ok", response, metrics=metrics, seconds=seconds)


def trajectory(**changes: Any) -> Trajectory:
    """Two turns, the first with a call: prompt 1 2 3, sampled 4 5, put 6 7, sampled 8."""
    made = Trajectory(
        request_id="r0",
        batch_data_id="task",
        rollout_offset=0,
        state="COMPLETED",
        finish_reason="stop",
        input="What is 2 + 2?",
        output="…",
        ground_truth="4",
        score=1.0,
        step=0,
        messages=(
            Message("user", "What is 2 + 2?"),
            Message("assistant", "", "hm", (ToolCall("c0", "code_interpreter", '{"code": "print(2 + 2)"}'),)),
            Message("tool", "4\n", tool_call_id="c0", name="code_interpreter"),
            Message("assistant", "It is 4."),
        ),
        tokens=Tokens([1, 2, 3], [4, 5, 6, 7, 8], [1, 1, 0, 0, 1], [-0.1, -0.2, 0.0, 0.0, -0.3]),
        turns=(
            turn(0, 2, "<call>", call(queue_seconds=0.25, verdict="ok"), started=1.0, generating=2.0, tool_calling=1.0),
            turn(4, 5, "It is 4.", started=4.0, generating=0.5),
        ),
        rewards={"final": 1.0},
        metrics={"seconds": {"pending": 1.0, "reward": 0.5}},
    )
    return replace(made, **changes)


# Conversation ---------------------------------------------------------------------------------------------------------


class TestConversation:
    def test_a_call_stands_beside_its_result_and_the_tool_message_is_not_repeated(self) -> None:
        bubbles = conversation(trajectory())
        assert [bubble.role for bubble in bubbles] == [Role.USER, Role.ASSISTANT, Role.ASSISTANT]
        (made,) = bubbles[1].calls
        assert (made.code, made.language, made.response, made.verdict) == ("print(2 + 2)", "python", "4\n", "ok")
        assert made.wait_seconds == 0.25
        assert bubbles[1].raw == "<call>"

    def test_reasoning_is_a_piece_of_its_own(self) -> None:
        (piece,) = conversation(trajectory())[1].pieces
        assert (piece.kind, piece.text) == ("reasoning", "hm")

    def test_assistants_of_the_prompt_are_not_taken_for_turns(self, demo: list[Trajectory]) -> None:
        bubbles = conversation(demo[0])
        assert [bubble.turn for bubble in bubbles if bubble.turn is not None] == [0, 1]
        assert sum(bubble.role is Role.ASSISTANT for bubble in bubbles) > 2

    def test_a_turn_that_never_became_a_message_is_shown(self) -> None:
        whole = trajectory()
        bubbles = conversation(replace(whole, messages=whole.messages[:1]))
        assert [bubble.turn for bubble in bubbles] == [None, 0, 1]

    def test_the_seeds_own_lines_read_as_a_conversation(self) -> None:
        bubbles = conversation(trajectory_of(json.dumps(SEEDS)))
        assert [bubble.role for bubble in bubbles] == [Role.SYSTEM, Role.USER, Role.ASSISTANT, Role.ASSISTANT]
        (made,) = bubbles[2].calls
        assert (made.name, made.code, made.response) == ("code_interpreter", "print(220000.0)", "220000.0")
        assert [piece.kind for piece in bubbles[3].pieces] == ["reasoning", "text"]

    def test_a_text_without_marks_is_one_bubble_a_side(self) -> None:
        bubbles = conversation(trajectory_of(json.dumps({"input": "2+2?", "output": "4", "score": 1, "step": 0})))
        assert [(bubble.role, bubble.pieces[0].text) for bubble in bubbles] == [
            (Role.OTHER, "2+2?"),
            (Role.ASSISTANT, "4"),
        ]

    def test_fenced_programs_are_told_from_text_also_when_cut_off(self) -> None:
        text = "First:\n```python\nx = 1\n```\nthen\n~~~js\nlet y"
        (bubble,) = conversation(trajectory(messages=(Message("user", text),), turns=()))
        assert [(piece.kind, piece.language) for piece in bubble.pieces] == [
            ("text", None),
            ("code", "python"),
            ("text", None),
            ("code", "js"),
        ]

    def test_arguments_that_are_no_json_are_shown_as_they_are(self) -> None:
        record = replace(call(), arguments='{"code": ')
        made = conversation(trajectory(turns=(turn(0, 2, "x", record),), messages=(Message("assistant", "x"),)))
        assert made[0].calls[0].arguments == '{"code": '

    def test_times_beyond_any_number_are_passed_over(self) -> None:
        odd = turn(0, 2, "x", call(queue_seconds=10**400), generating=10**400, tool_calling=float("nan"))  # type: ignore
        (bubble,) = conversation(trajectory(turns=(odd,), messages=(Message("assistant", "x"),)))
        assert bubble.timings == {}
        assert bubble.calls[0].wait_seconds == 0.0

    @given(st.text(alphabet='<>|_imstarenduo\n`~ {}:"toolcathk/', max_size=400))
    def test_no_text_breaks_it(self, text: str) -> None:
        conversation(trajectory_of(json.dumps({"input": text, "output": text, "score": None, "step": 0})))

    def test_a_megabyte_of_spaces_takes_no_time(self) -> None:
        text = f"user\n{' ' * 1_000_000}x{chr(10) * 1_000_000}assistant\nyes<|im_end|>\n\n"
        bubbles = conversation(trajectory_of(json.dumps({"input": text, "output": "no", "score": 0, "step": 0})))
        assert bubbles[1].pieces[0].text == "yes"

    def test_a_million_marks_take_no_time(self) -> None:
        text = "user\n" * 200_000 + "```" * 200_000 + "<think>" * 100_000 + "<tool_call>" * 50_000
        assert conversation(trajectory_of(json.dumps({"input": text, "output": text, "score": 0, "step": 0})))


# Tokens ---------------------------------------------------------------------------------------------------------------


class TestTokens:
    def test_runs_say_where_tokens_came_from(self) -> None:
        runs = token_runs(trajectory())
        assert [(run.origin, run.turn, run.ids) for run in runs] == [
            (Origin.PROMPT, None, [1, 2, 3]),
            (Origin.SAMPLED, 0, [4, 5]),
            (Origin.TOOL, 0, [6, 7]),
            (Origin.SAMPLED, 1, [8]),
        ]
        assert [run.logprobs for run in runs] == [None, [-0.1, -0.2], None, [-0.3]]
        assert [run.start for run in runs] == [0, 3, 5, 7]

    def test_all_tokens_of_the_demo_are_there_once(self, demo: list[Trajectory]) -> None:
        for one in demo:
            runs = token_runs(one)
            assert [token for run in runs for token in run.ids] == [*one.tokens.prompt_ids, *one.tokens.response_ids]
            assert all(origin_at(one, run.start) == (run.origin, run.turn) for run in runs)

    def test_half_a_character_shows_with_its_other_half(self) -> None:
        halves = [0xC3, 0xA4, 0x62]
        assert texts_of(halves, lambda ids: bytes(ids).decode(errors="replace")) == ["", "ä", "b"]

    def test_a_space_that_a_tokenizer_leaves_out_at_the_beginning_is_shown(self) -> None:
        words = ["▁It", "▁is", "▁4", "."]

        def decode(ids: Sequence[int]) -> str:
            return "".join(words[number] for number in ids).replace("▁", " ").removeprefix(" ")

        assert texts_of([0, 1, 2, 3], decode) == ["It", " is", " 4", "."]
        sampled = token_runs(trajectory(tokens=Tokens([0], [1, 2, 3], [1, 1, 1]), turns=()), decode)[1]
        assert sampled.texts == [" is", " 4", "."]

    def test_what_is_no_token_is_shown_as_unknown(self) -> None:
        odd: Any = Tokens([1], [4, "x", None, 10**30], [1, 1, 1, 1], [-0.5, "x", None, float("nan")])  # type: ignore

        def decode(ids: Sequence[int]) -> str:
            assert all(0 <= number < 100 for number in ids)
            return "".join(chr(96 + number) for number in ids)

        prompt, sampled = token_runs(trajectory(tokens=odd, turns=()), decode)
        assert (prompt.texts, sampled.texts) == (["a"], ["d", "\ufffd", "\ufffd", "\ufffd"])
        assert sampled.ids == [4, -1, -1, -1]
        assert sampled.logprobs is not None
        assert [logprob for logprob in sampled.logprobs if not math.isnan(logprob)] == [-0.5]

    def test_a_line_without_tokens_has_no_runs(self) -> None:
        assert token_runs(trajectory(tokens=Tokens())) == ()


# Times ----------------------------------------------------------------------------------------------------------------


class TestTimeline:
    def test_stages_follow_each_other_without_gap_or_overlap(self) -> None:
        found = request_timeline(trajectory())
        assert [(segment.stage, segment.start, segment.end) for segment in found.segments] == [
            (Stage.QUEUE, 0.0, 1.0),
            (Stage.ENGINE, 1.0, 3.0),
            (Stage.LIMITER, 3.0, 3.25),
            (Stage.TOOL, 3.25, 4.0),
            (Stage.ENGINE, 4.0, 4.5),
            (Stage.REWARD, 4.5, 5.0),
        ]
        assert found.seconds == 5.0
        assert not found.estimated

    def test_of_the_demo_every_request_adds_up(self, demo: list[Trajectory]) -> None:
        for one in demo:
            found = request_timeline(one)
            assert sum(stage_seconds(found).values()) == pytest.approx(found.seconds, abs=1e-6)
            for before, after in zip(found.segments, found.segments[1:], strict=False):
                assert before.end == pytest.approx(after.start)

    def test_the_critical_path_is_named(self) -> None:
        slow = trajectory(request_id="slow", turns=(turn(0, 2, "x", started=1.0, generating=20.0),))
        found = step_timeline(0, [request_timeline(one) for one in (trajectory(), slow, trajectory())])
        assert found is not None
        assert found.critical.request_id == "slow"
        assert "slow" in found.verdict
        assert "engine" in found.verdict
        assert found.by_stage["engine"] == pytest.approx(20.0 + 2 * 2.5)

    def test_a_waterfall_has_the_requests_that_ended_last_as_they_began(self) -> None:
        times = {"short": (100.0, 1.0), "tail": (300.0, 5.0), "long": (100.0, 150.0)}
        lines = [
            trajectory(request_id=name, started_at=began, metrics={}, turns=(turn(0, 2, "x", generating=seconds),))
            for name, (began, seconds) in times.items()
        ]
        many = [replace(lines[0], request_id=str(number)) for number in range(300)]
        found = step_timeline(0, map(request_timeline, (*lines, *many)))
        assert found is not None
        assert (found.critical.request_id, found.started_at, found.seconds) == ("tail", 100.0, 205.0)
        assert len(found.waterfall) == 200
        assert [one.request_id for one in found.waterfall][-1] == "tail"
        assert "long" in {one.request_id for one in found.waterfall}
        old = step_timeline(0, map(request_timeline, (*lines, trajectory())))
        assert old is not None
        assert old.waterfall == (), "one of them does not say when it began"

    def test_lines_without_times_have_no_timeline(self) -> None:
        assert step_timeline(0, [request_timeline(trajectory_of(json.dumps(SEEDS)))]) is None

    def test_times_that_are_no_times_are_passed_over(self) -> None:
        odd = turn(0, 2, "x", call(seconds=float("nan")), started=float("nan"), generating=-1.0, tool_calling=1.0)
        found = request_timeline(trajectory(turns=(odd,), metrics={"seconds": {"pending": "x", "reward": True}}))
        assert found.seconds == 1.0

    def test_times_beyond_any_number_or_below_zero_draw_nothing(self) -> None:
        odd = turn(0, 2, "x", call(seconds=-3.0, queue_seconds=10**400), started=10**400, tool_calling=1.0)
        found = request_timeline(trajectory(turns=(odd,), metrics={"seconds": {"pending": 10**400}}))
        assert [(one.stage, one.start, one.end) for one in found.segments] == [(Stage.TOOL, 0.0, 1.0)]


# Differences ----------------------------------------------------------------------------------------------------------


class TestCompare:
    def test_a_trajectory_equals_itself(self, demo: list[Trajectory]) -> None:
        for one in demo:
            found = compare(one, one)
            assert found.same
            assert all(turn.same for turn in found.turns)

    def test_another_sampled_token_is_found_with_its_turn(self) -> None:
        other = trajectory(tokens=Tokens([1, 2, 3], [4, 5, 6, 7, 9], [1, 1, 0, 0, 1]))
        found = compare(trajectory(), other).divergence
        assert found is not None
        assert (found.token, found.turn, found.origin) == (7, 1, "sampled")
        assert "a different token was sampled" in found.explanation

    def test_another_tool_result_is_told_from_another_sample(self) -> None:
        other = trajectory(tokens=Tokens([1, 2, 3], [4, 5, 6, 70, 8], [1, 1, 0, 0, 1]))
        found = compare(trajectory(), other).divergence
        assert found is not None
        assert (found.token, found.origin) == (6, "tool")
        assert "tool result" in found.explanation

    def test_another_prompt_and_an_early_end_are_told(self) -> None:
        asked = compare(trajectory(), trajectory(tokens=Tokens([1, 9, 3], [4], [1]))).divergence
        ended = compare(trajectory(), trajectory(tokens=Tokens([1, 2, 3], [4, 5], [1, 1]))).divergence
        assert asked is not None
        assert ended is not None
        assert "prompts differ" in asked.explanation
        assert "right one ends here (stop)" in ended.explanation

    def test_lines_without_tokens_are_compared_by_their_text(self) -> None:
        one = trajectory_of(json.dumps(SEEDS))
        found = compare(one, trajectory_of(json.dumps({**SEEDS, "output": "assistant\nno"})))
        assert found.divergence is not None
        assert found.divergence.token is None
        assert not found.turns[0].same

    @given(st.lists(st.sampled_from("abc"), max_size=20), st.lists(st.sampled_from("abc"), max_size=20))
    def test_aligned_lines_give_both_sides_back(self, left: list[str], right: list[str]) -> None:
        lines = align(left, right)
        assert [line.left for line in lines if line.left is not None] == left
        assert [line.right for line in lines if line.right is not None] == right
        assert all((line.kind == "same") == (line.left == line.right) for line in lines)

    def test_very_long_texts_are_aligned_as_well(self) -> None:
        left = [str(number) for number in range(50_000)]
        lines = align(left, left[1:])
        assert [line.kind for line in lines] == ["left"] + ["same"] * 49_999

    @pytest.mark.parametrize("count", [490, 5000])
    def test_no_two_texts_take_long(self, count: int) -> None:
        """Equal lines between different ones make difflib quadratic, several times over."""
        left = [line for number in range(count) for line in ("", f"left {number}")]
        right = [line for number in range(count) for line in ("", f"right {number}")]
        began = time.process_time()
        lines = align(left, right)
        assert time.process_time() - began < processor_time(5.0)
        assert [line.left for line in lines if line.left is not None] == left
        assert [line.right for line in lines if line.right is not None] == right

    def test_a_carriage_return_is_a_difference_that_can_be_seen(self) -> None:
        one, other = (trajectory(turns=(turn(0, 2, text),)) for text in ("a\nb", "a\r\nb"))
        (found,) = compare(one, other).turns
        assert [line.kind for line in found.lines] == ["changed", "same"]

    def test_rewards_that_are_no_numbers_are_told_as_they_are(self) -> None:
        odd: dict[str, Any] = {"a": "x", "b": [1], "c": 10**400, "d": {}, "e": True}
        facts = compare(trajectory(), trajectory(rewards=odd)).facts
        assert ("reward a", "–", '"x"') in facts
        assert ("reward b", "–", "[1]") in facts

    def test_what_is_no_token_is_told_as_it_is(self) -> None:
        odd: Any = Tokens([1, 2, 3], ["x", None], [1, 1])  # type: ignore

        def decode(ids: Sequence[int]) -> str:
            return "".join(chr(96 + number) for number in ids)

        found = compare(trajectory(), trajectory(tokens=odd), decode).divergence
        assert found is not None
        assert (found.left, found.right) == ("defgh", "x None")

    def test_facts_say_how_long_each_took(self) -> None:
        facts = {name: values for name, *values in compare(trajectory(), trajectory(turns=())).facts}
        assert facts["seconds"] == ["5", "1.5"]


class TestPairedRuns:
    """By token: the runs of two trajectories, and where they agree."""

    def test_runs_of_one_origin_and_turn_are_paired_and_their_equal_tokens_found(self) -> None:
        other = trajectory(
            tokens=Tokens([1, 2, 3], [4, 9, 9, 5, 6, 7, 8], [1, 1, 1, 1, 0, 0, 1]),
            turns=(turn(0, 4, "x"), turn(6, 7, "y")),
        )
        assert pair_runs(token_runs(trajectory()), token_runs(other)) == (
            RunPair(0, 0, ((0, 0, 3),)),
            RunPair(1, 1, ((0, 0, 1), (1, 3, 1))),
            RunPair(2, 2, ((0, 0, 2),)),
            RunPair(3, 3, ((0, 0, 1),)),
        )

    def test_a_turn_that_only_one_of_them_has_stands_alone(self) -> None:
        shorter = trajectory(tokens=Tokens([1, 2, 3], [4, 5], [1, 1]), turns=(turn(0, 2, "x"),))
        pairs = pair_runs(token_runs(trajectory()), token_runs(shorter))
        assert [(pair.left, pair.right) for pair in pairs] == [(0, 0), (1, 1), (2, None), (3, None)]
        assert [(pair.left, pair.right) for pair in pair_runs(token_runs(shorter), token_runs(trajectory()))] == [
            (0, 0),
            (1, 1),
            (None, 2),
            (None, 3),
        ]

    def test_all_pairs_of_the_demo_agree_where_they_say_so(self, demo: list[Trajectory]) -> None:
        for one, other in pairwise(demo):
            left, right = token_runs(one), token_runs(other)
            pairs = pair_runs(left, right)
            assert [pair.left for pair in pairs if pair.left is not None] == list(range(len(left)))
            assert [pair.right for pair in pairs if pair.right is not None] == list(range(len(right)))
            for pair in pairs:
                for at, to, count in pair.equal:
                    assert pair.left is not None
                    assert pair.right is not None
                    assert left[pair.left].ids[at : at + count] == right[pair.right].ids[to : to + count]
