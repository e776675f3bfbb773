"""Which parts of a line can be searched, and the file that stores them."""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expensive import examples
from patience import processor_time
from toolyard.errors import RecordError
from toolyard.messages import Message, ToolCall
from toolyard.records.lines import to_line
from toolyard.records.trajectory import CallRecord, Failure, Sampled, Turn
from toolyard.viewer.index.rows import entry_of
from toolyard.viewer.index.search import BLOCK, GAP, TextFile, folded, record
from trajectory_samples import good_trajectory


def filled(path: Path, texts: dict[int, list[str]]) -> tuple[TextFile, dict[int, tuple[int, int]]]:
    """A file, and the position of each line's record."""
    file, at, places = TextFile(path), 0, {}
    for number, parts in texts.items():
        text = record(number, folded(*parts))
        file.write(at, text)
        places[number] = (at, at := at + len(text))
    return file, places


def naive(texts: dict[int, list[str]], needle: str) -> list[int]:
    return [number for number, parts in texts.items() if any(needle.casefold() in part.casefold() for part in parts)]


words = st.text(alphabet=st.sampled_from("aAbßS1İ\0\ud800é "), max_size=6)


@given(st.lists(st.lists(words, max_size=3), max_size=8), words.filter(bool))
@settings(deadline=None, max_examples=examples(150))
def test_a_needle_is_found_where_a_loop_in_python_finds_it(tmp_path_factory, said, needle) -> None:
    texts = dict(enumerate(said, 1))
    file, places = filled(tmp_path_factory.mktemp("search") / "text", texts)
    try:
        assert list(file.lines_with(needle, file.size())) == naive(texts, needle)
        found = [number for number, place in places.items() if file.contains(*place, needle)]
        assert found == naive(texts, needle)
    finally:
        file.close()


def test_lines_longer_than_a_block_and_matches_across_its_end_are_found(tmp_path: Path) -> None:
    chance = random.Random(1)
    texts = {
        number: ["x" * chance.randrange(BLOCK // 2) + "Needle" + "y" * chance.randrange(BLOCK)]
        for number in range(1, 12)
    }
    texts |= {20: ["z" * 3 * BLOCK + "Needle"], 21: ["nothing"], 22: ["z" * (BLOCK - 3) + "needle" + "z" * 5]}
    file, _ = filled(tmp_path / "text", texts)
    assert list(file.lines_with("nEEDLE", file.size())) == naive(texts, "needle") == [*range(1, 12), 20, 22]
    assert list(file.lines_with("zzzneedle", file.size())) == [20, 22]
    file.close()


def test_what_is_added_later_is_found_too_and_what_is_not_committed_is_not(tmp_path: Path) -> None:
    file, places = filled(tmp_path / "text", {1: ["pen"], 2: ["cup"], 3: ["Pen"], 4: ["pens"]})
    assert list(file.lines_with("pen", places[3][0])) == [1]
    assert list(file.lines_with("pen", places[3][1])) == [1, 3]
    assert list(file.lines_with("pen", places[4][1])) == [1, 3, 4]
    for at in range(40):  # more than are remembered
        assert list(file.lines_with(f"{at}", places[4][1])) == []
    assert list(file.lines_with("pen", places[4][1])) == [1, 3, 4]
    assert list(file.lines_with("", places[4][1])) == []
    file.close()


def test_the_number_of_a_line_is_not_part_of_its_text(tmp_path: Path) -> None:
    file, places = filled(tmp_path / "text", {220000: ["a"], 220001: ["220000"]})
    assert list(file.lines_with("220000", file.size())) == [220001]
    assert not file.contains(*places[220000], "22")
    assert file.contains(*places[220001], "22")
    file.close()


def test_a_text_that_was_cut_off_by_somebody_is_an_error_not_a_crash(tmp_path: Path) -> None:
    file, places = filled(tmp_path / "text", {1: ["a" * 100]})
    (tmp_path / "text").write_bytes(b"")
    with pytest.raises(RecordError, match="was truncated"):
        file.lines_with("b", places[1][1])
    file.close()


# What can be searched -------------------------------------------------------------------------------------------------


def said_in(line: bytes, needle: str) -> bool:
    return folded(needle) in entry_of(line, 0).text


def test_everything_that_people_read_can_be_searched_and_nothing_else() -> None:
    call = CallRecord(
        "call_0_0", "calculator", '{"code": "print(\\"hello\\")\\nx = 1"}', "failed", "the Response", error="the Error"
    )
    sampled = Sampled(0, 5, "As it was sampled", "stop", 4242424242)
    messages = (
        Message("user", "A question of three\nlines"),
        Message("assistant", "An answer", "my Reasoning", (ToolCall("a", "lookup", '{"word": "näh\\u00e9"}'),)),
        Message("assistant", "", None, (ToolCall("b", "other", "no json \\"),)),
    )
    trajectory = replace(
        good_trajectory(1, turns=1),
        input="What was Asked",
        output="What was Answered",
        ground_truth="the ground truth",
        messages=messages,
        turns=(Turn(sampled, (call,)),),
        failure=Failure("ours", "reward", "Traceback of it"),
    )
    line = to_line(trajectory)
    assert entry_of(line, 0).facts.damaged == ""
    for needle in (
        *("was asked", "WAS ANSWERED", "three\nlines", "my reasoning", "lookup", "nähé", "no json \\", "As it was"),
        *("calculator", 'print("hello")\nx', 'print(\\"hello\\")\\nx', "the response", "the error", "traceback of"),
    ):
        assert said_in(line, needle), needle
    for needle in ("the ground truth", "4242424242", "response_mask", "asked\nwhat", "answereda question"):
        assert not said_in(line, needle), needle


def test_what_the_decoded_conversation_has_is_kept_once() -> None:
    trajectory = good_trajectory(1)
    plain = replace(trajectory, input=trajectory.input + "\n" + "\n".join(one.content for one in trajectory.messages))
    assert len(entry_of(to_line(plain), 0).text) < len(plain.input + plain.output) + 200


def test_content_in_parts_is_searched_as_it_is_read() -> None:
    said = json.loads(to_line(good_trajectory(1)))
    said["messages"][1]["content"] = [{"type": "text", "text": "two "}, {"type": "text", "text": "Parts"}]
    line = json.dumps(said).encode()
    assert entry_of(line, 0).facts.damaged == ""
    assert entry_of(line, 0).facts.preview == "two Parts"
    assert said_in(line, "two parts")


def test_a_line_of_verl_is_searched_in_input_and_output() -> None:
    line = json.dumps({"input": "user\nHow many?", "output": "Seven", "score": 1.0, "step": 3, "acc": "Other"}).encode()
    assert said_in(line, "how MANY")
    assert said_in(line, "seven")
    assert not said_in(line, "other")


def test_a_damaged_line_is_searched_as_it_stands() -> None:
    line = b'{"input": "Half of\xff a line'
    assert entry_of(line, 7).facts.step == 7
    assert entry_of(line, 7).facts.damaged
    assert said_in(line, "half OF")


def test_a_line_of_very_many_messages_does_not_take_for_ever() -> None:
    messages = tuple(Message("user", f"message {at} is not in the input") for at in range(20_000))
    line = to_line(replace(good_trajectory(1, turns=1), input="x" * 1_000_000, messages=messages))
    began = time.process_time()
    told = entry_of(line, 0)
    assert time.process_time() - began < processor_time(30)
    assert told.text.count(GAP) > 19_000
