"""Lines that other trainers wrote: verl's, with the chat templates of many models, and TRL's completions."""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from foreign_dumps import ANSWER, CODES, FILE, NAMES, RESULTS, line_of, lines_of
from hypothesis import given
from hypothesis import strategies as st

from chat_models import open_template
from material import template_files
from toolyard.errors import RecordError, ToolyardError
from toolyard.records.lines import trajectory_of
from toolyard.viewer.conversation import conversation
from toolyard.viewer.foreign import counts_in, facts_in
from toolyard.viewer.index.rows import entry_of
from toolyard.viewer.library import Library
from toolyard.viewer.protocol import Bubble, Role
from toolyard.viewer.query import parse_query

LINES: dict[str, dict[str, Any]] = {
    line["template"]: line for line in map(json.loads, FILE.read_text(encoding="utf-8").splitlines())
}
UNMARKED = {
    "mistral-small3.2, without special tokens": ["python", "python", "python"],
    "gemma-4, without special tokens": [],
}
"""Without its special tokens, nothing tells where a result ends: the calls that are found nevertheless."""
QWEN = "system\nYou add.\nuser\nWhat is 2+2?\nassistant\n"
CALL = '<tool_call>\n{"name": "python", "arguments": {"code": "print(4)"}}\n</tool_call>'


def bubbles_of(prompt: str, response: str) -> tuple[Bubble, ...]:
    return conversation(trajectory_of(json.dumps({"input": prompt, "output": response, "score": 1, "step": 0})))


# Templates ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in LINES if name not in UNMARKED])
def test_calls_stand_beside_their_results(name: str) -> None:
    line = LINES[name]
    bubbles = [bubble for bubble in bubbles_of(line["input"], line["output"]) if bubble.turn is not None]
    assert [bubble.role for bubble in bubbles] == [Role.ASSISTANT] * 3
    for bubble, codes, results in zip(bubbles, CODES, RESULTS, strict=False):
        assert [call.name for call in bubble.calls] == ["python"] * len(codes)
        assert [(call.code, call.response, call.outcome) for call in bubble.calls] == [
            (code, result, "unknown") for code, result in zip(codes, results, strict=True)
        ]
    assert bubbles[2].pieces[-1].text == ANSWER
    facts = entry_of(json.dumps(line).encode(), 0).facts
    assert (facts.turns, facts.tools) == (3, 3)


@pytest.mark.parametrize("name", UNMARKED)
def test_what_a_template_does_not_mark_is_unknown_not_zero(name: str) -> None:
    line = LINES[name]
    found = [call for bubble in bubbles_of(line["input"], line["output"]) for call in bubble.calls]
    assert [call.name for call in found] == UNMARKED[name]
    assert {call.outcome for call in found} <= {"unknown"}
    facts = entry_of(json.dumps(line).encode(), 0).facts
    assert (facts.turns, facts.tools) == (None, len(found) or None)


@pytest.mark.slow
@pytest.mark.material
@pytest.mark.parametrize(
    "name", [*NAMES[:3], *(pytest.param(name, marks=pytest.mark.exhaustive) for name in NAMES[3:])]
)
def test_the_lines_are_what_real_templates_and_tokenizers_make(name: str) -> None:
    kept = [line for line in LINES.values() if line["template"].startswith(f"{name},")]
    assert list(map(undated, lines_of(name))) == list(map(undated, kept))


def undated(line: dict[str, Any]) -> dict[str, Any]:
    """Some templates write the day on which they are rendered."""
    return {**line, "input": re.sub(r"\d{4}-\d\d-\d\d|\d\d [A-Z][a-z]{2} \d{4}", "TODAY", line["input"])}


@pytest.mark.exhaustive
@pytest.mark.material
def test_most_real_templates_are_known_and_the_others_say_nothing_wrong() -> None:
    known = 0
    for name in (file.stem for file in template_files()):
        try:
            tokenizer, chat = open_template(name)
            prompt, response = map(tokenizer.decode, line_of(chat, tokenizer))
        except ToolyardError:
            continue  # it has no room for tools, or for this one
        turns, calls = facts_in(prompt, response)
        assert (turns, len(calls or ())) in ((3, 3), (None, 3), (None, 0)), name
        known += [call.answer for call in calls or ()] == [text for results in RESULTS for text in results]
    assert known >= 54


def test_a_line_of_the_time_of_sandbox_fusion_opens() -> None:
    prompt = "\n\n  system\nYou are a math expert.\n\n  user\nHow much?\n\n  assistant\n"
    response = (
        f"assistant\n<think>\nLet me see.\n\n  {CALL}\n\n\n  tool\n4\n\n\n  assistant\n<think>\nSo.\n</think>\n\n#### 4"
    )
    assert counts_in(prompt, response) == (2, 1)
    *_, calling, last = bubbles_of(prompt, response)
    assert [(call.code, call.response) for call in calling.calls] == [("print(4)", "4")]
    assert [piece.kind for piece in last.pieces] == ["reasoning", "text"]


@pytest.mark.parametrize(
    ("prompt", "response"),
    [
        ("<|user|>\nq<|assistant|>", f"{CALL}<|observation|>\n<tool_response>\n4\n</tool_response><|assistant|>\n4."),
        ("\nq\n", f"{CALL}\n<tool_response>\n4\n</tool_response>\n4."),
        ("<|user|>\nq<|end|>\n<|assistant|>\n", f"{CALL}<|end|>\n<|tool|>\n4<|end|>\n<|assistant|>\n4.<|end|>"),
        ("user\nq\nmodel\n", f"{CALL}\nuser\n<tool_response>\n4\n</tool_response>\nmodel\n4."),
        (
            "<｜User｜>q<｜Assistant｜><think>\n",
            f"hm</think>{CALL}<｜User｜><tool_result>4</tool_result><｜Assistant｜>4.",
        ),
        ("[INST] q [/INST]", '[TOOL_CALLS]python[ARGS]{"code": "print(4)"}</s>[TOOL_RESULTS]4[/TOOL_RESULTS]4.</s>'),
        (
            "user\n\nq?assistant\n\n",
            '<|python_tag|>{"name": "python", "parameters": {"code": "print(4)"}}ipython\n\n"4"assistant\n\n4.',
        ),
    ],
    ids=["GLM", "GLM without tokens", "Phi", "Gemma without tokens", "DeepSeek V4", "Mistral", "Llama's python tag"],
)
def test_other_templates(prompt: str, response: str) -> None:
    calling, last = (bubble for bubble in bubbles_of(prompt, response) if bubble.turn is not None)
    assert [(call.name, call.code, call.response) for call in calling.calls] == [("python", "print(4)", "4")]
    assert last.pieces[-1].text == "4."
    assert counts_in(prompt, response) == (2, 1)


# What is not a call or a result ---------------------------------------------------------------------------------------


def test_words_of_templates_in_prose_stay_prose() -> None:
    asked = "Wrap it in <tool_response>x</tool_response> please.\nuser\nname\nsystem\n<tool_call> is a tag."
    bubbles = bubbles_of(f"system\nYou add.\nuser\n{asked}\nassistant\n", "Done.")
    assert [bubble.role for bubble in bubbles] == [Role.SYSTEM, Role.USER, Role.ASSISTANT]
    assert bubbles[1].pieces[0].text == asked
    marked = f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
    assert [bubble.role for bubble in bubbles_of(marked, "the\nassistant\nsays")] == [Role.USER, Role.ASSISTANT]


def test_a_question_in_tags_is_not_a_result() -> None:
    asked, _ = bubbles_of("user\n<tool_response>\n4\n</tool_response>\nassistant\n", "What is that?")
    assert asked.role is Role.USER


def test_a_message_of_the_user_after_an_answer_is_not_a_result() -> None:
    response = "It is 5.\nuser\nLook at <tool_response>4</tool_response> again.\nassistant\nIt is 4."
    bubbles = bubbles_of(QWEN, response)
    assert [bubble.role for bubble in bubbles[2:]] == [Role.ASSISTANT, Role.USER, Role.ASSISTANT]
    assert counts_in(QWEN, response) == (2, 0)


def test_lines_of_a_result_are_not_taken_for_speakers() -> None:
    response = f"{CALL}\nuser\n<tool_response>\nrole\nassistant\nuser\nsystem\n</tool_response>\nassistant\nDone."
    *_, calling, last = bubbles_of(QWEN, response)
    assert calling.calls[0].response == "role\nassistant\nuser\nsystem"
    assert last.pieces[0].text == "Done."
    assert counts_in(QWEN, response) == (2, 1)


def test_a_result_that_the_model_invents_within_its_turn_is_not_one() -> None:
    *_, said = bubbles_of(QWEN, f"{CALL}\n<tool_response>\n4\n</tool_response>\nSo it is 4.")
    assert [call.outcome for call in said.calls] == ["not answered"]


def test_results_are_matched_in_order_and_those_left_over_are_shown() -> None:
    results = "".join(f"\n<tool_response>\n{text}\n</tool_response>" for text in "abc")
    *_, calling, left = bubbles_of(QWEN, f"{CALL}\n{CALL}\nuser{results}")
    assert [call.response for call in calling.calls] == ["a", "b"]
    assert (left.role, left.pieces[0].text) == (Role.TOOL, "c")


def test_a_malformed_call_takes_no_result_from_a_good_one() -> None:
    response = (
        f'<tool_call>\n{{"name": \n</tool_call>\n{CALL}\nuser\n<tool_response>\n4\n</tool_response>\nassistant\n4.'
    )
    *_, calling, _ = bubbles_of(QWEN, response)
    assert [(call.code, call.outcome, call.response) for call in calling.calls] == [
        ("print(4)", "unknown", "4"),
        (None, "malformed", ""),
    ]
    assert calling.calls[1].error
    assert counts_in(QWEN, response) == (2, 2)


def test_a_call_within_reasoning_counts_if_it_was_answered() -> None:
    response = f"<think>\n{CALL}\n</think>\nuser\n<tool_response>\n4\n</tool_response>\nassistant\n4."
    *_, calling, _ = bubbles_of(QWEN, response)
    assert [call.response for call in calling.calls] == ["4"]
    assert counts_in(QWEN, response) == (2, 1)
    assert counts_in(QWEN, f"<think>\n{CALL}\n</think>\n4.") == (1, 0)


def test_a_line_without_any_mark_is_unknown() -> None:
    assert counts_in("2+2?", "4") == (None, None)
    assert counts_in(QWEN, "4") == (1, 0)
    assert counts_in(QWEN, "") == (1, 0)


# Any text -------------------------------------------------------------------------------------------------------------

MARKS = (
    "<tool_call> </tool_call> <think> </think> \nuser\n \nassistant\n \ntool\n system\n <tool_response> { } "
    "</tool_response> <|im_start|>assistant\n <|im_start|>user\n <|im_start|>tool\n <|im_end|> <function=f> think> x"
)
PARTS = st.lists(
    st.sampled_from([*MARKS.split(" "), CALL, '{"name": "f"', ', "arguments": {}}', '"</tool_call>"', "\n"]),
    max_size=14,
)


@given(st.sampled_from([QWEN, "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n", "q"]), PARTS)
def test_counting_finds_what_a_closer_look_finds(prompt: str, parts: list[str]) -> None:
    response = "".join(parts)
    turns, calls = facts_in(prompt, response)
    assert counts_in(prompt, response) == (turns, None if calls is None else len(calls))
    sampled = [bubble for bubble in bubbles_of(prompt, response) if bubble.turn is not None]
    assert calls is None or sum(len(bubble.calls) for bubble in sampled) == len(calls)


@pytest.mark.parametrize(
    ("prompt", "part"),
    [
        (QWEN, "<tool_call>"),
        (QWEN, "\nuser\n<tool_response>"),
        (QWEN, '<tool_call>{"name": '),
        (QWEN, f"{CALL}\nuser\n"),
        ("<|im_start|>", "<|im_start|>a"),
        ("<|start|>", "<|start|>functions."),
        ("<|im_middle|>", "<|im_system|>"),
        ("xassistant\n\n", "ipython\n\n"),
        ("q", '}{"content": [{"name": "a", "arguments": {'),
        ("systemassistant", "analysisassistant to=functions."),
        ("q", "</s><|im_end|> "),
    ],
)
def test_time_grows_with_the_length_only(prompt: str, part: str) -> None:
    def seconds(count: int) -> float:
        began = time.process_time()
        facts_in(prompt, part * count)
        return time.process_time() - began

    gc.disable()  # it would go through all that other tests have imported
    try:
        short, long = (min(seconds(count) for _ in range(2)) for count in (500, 4_000))
    finally:
        gc.enable()
    assert long < 30 * short + 0.05  # quadratic would be 64


# TRL ------------------------------------------------------------------------------------------------------------------

PROMPT = [{"role": "system", "content": "You add."}, {"role": "user", "content": "What is 2+2?"}]


def called(name: str, **arguments: Any) -> list[dict[str, Any]]:
    function = {"name": name, "arguments": arguments}
    return [
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "name": name, "content": "4"},
        {"role": "assistant", "content": "It is 4."},
    ]


def completions(folder: Path, step: int, **columns: list[Any]) -> Path:
    """A file as TRL writes it."""
    folder.mkdir(exist_ok=True)
    path = folder / f"completions_{step:05d}.parquet"
    count = len(columns["completion"])
    pq.write_table(pa.table({"step": [step] * count, **columns, "advantage": [0.5] * count}), path)
    return path


def test_completions_of_trl_open_with_their_calls_rewards_and_advantages(tmp_path: Path) -> None:
    completions(
        tmp_path / "completions",
        10,
        prompt=[PROMPT, PROMPT],
        completion=[called("python", code="print(2+2)"), called("add", a=2, b=2)],
        accuracy=[1.0, 0.0],
        format=[0.5, float("nan")],
        note=["first", "second"],
    )
    with Library.open(tmp_path) as library:
        first, second = library.rows()
        assert [(row.step, row.score, row.turns, row.tools) for row in (first, second)] == [
            (10, 1.5, 2, 1),
            (10, 0, 2, 1),
        ]
        assert library.related(first.number).group == [second]
        found, other = library.trajectory(first.number), library.trajectory(second.number)
        assert found
        assert other
        assert (found.rewards, found.extra) == ({"accuracy": 1.0, "format": 0.5}, {"note": "first", "advantage": 0.5})
        assert other.rewards == {"accuracy": 0.0}
        bubbles = conversation(other)
        assert [bubble.role for bubble in bubbles] == [Role.SYSTEM, Role.USER, Role.ASSISTANT, Role.ASSISTANT]
        (made,) = bubbles[2].calls
        assert (made.name, json.loads(made.arguments), made.response) == ("add", {"a": 2, "b": 2}, "4")
        assert library.rows(parse_query("reward.accuracy>0.5")) == [first]
        assert json.loads(library.raw(second.number))["note"] == "second"


def test_completions_that_are_text_open_and_do_not_say_how_many_turns_they_had(tmp_path: Path) -> None:
    path = completions(tmp_path, 3, prompt=["2+2?"], completion=["4"], reward=[0.25])
    with Library.open(path) as library:
        (row,) = library.rows()
        assert (row.score, row.turns, row.tools, row.preview) == (0.25, None, None, "2+2?")


def test_rows_of_trl_also_open_as_json_lines(tmp_path: Path) -> None:
    row = {"step": 1, "prompt": PROMPT, "completion": called("python", code="1"), "accuracy": 1.0, "advantage": 0.0}
    (tmp_path / "1.jsonl").write_text(json.dumps(row) + "\n")
    with Library.open(tmp_path) as library:
        assert [(row.score, row.tools) for row in library.rows()] == [(1.0, 1)]
    with pytest.raises(RecordError, match="completion is neither text nor a list of messages"):
        trajectory_of(json.dumps({**row, "completion": 3}))


def test_a_table_that_is_replaced_or_added_is_read_again(tmp_path: Path) -> None:
    path = completions(tmp_path, 1, prompt=["a"], completion=["one"], accuracy=[0.0])
    with Library.open(tmp_path) as library:
        path.unlink()
        completions(tmp_path, 1, prompt=["a", "b"], completion=["two", "three"], accuracy=[1.0, 0.0])
        completions(tmp_path, 2, prompt=["c"], completion=["four"], accuracy=[1.0])
        assert library.refresh()
        texts = [library.trajectory(row.number) for row in library.rows()]
        assert [found.output for found in texts if found] == ["two", "three", "four"]
        assert library.refresh() == 0


def test_a_table_that_is_still_being_written_is_damaged_until_it_is_whole(tmp_path: Path) -> None:
    path = completions(tmp_path, 1, prompt=["a"], completion=["one"], accuracy=[0.0])
    whole = path.read_bytes()
    path.write_bytes(whole[:-8])
    with Library.open(tmp_path) as library:
        assert [row.damaged.partition(":")[0] for row in library.rows()] == ["cannot be read"]
        path.write_bytes(whole)
        library.refresh()
        assert [row.damaged for row in library.rows()] == [""]


def test_without_pyarrow_the_error_says_what_to_install(tmp_path: Path) -> None:
    completions(tmp_path, 1, prompt=["a"], completion=["one"], accuracy=[0.0])
    code = f"""
        import sys
        sys.modules["pyarrow"] = None
        from toolyard.errors import MissingDependencyError
        from toolyard.viewer.library import Library
        try:
            Library.open({str(tmp_path)!r})
        except MissingDependencyError as error:
            print(error)
    """
    run = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, check=True)
    assert "pip install 'toolyard[parquet]'" in done.stdout
