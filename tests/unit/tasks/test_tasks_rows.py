"""From rows in three formats to tasks. Errors name the field, the value and the way out."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expensive import examples
from toolyard.errors import TaskError
from toolyard.messages import Message
from toolyard.tasks.protocol import Task
from toolyard.tasks.rows import (
    GSM8K_INSTRUCTION,
    Shape,
    Wording,
    ids_of,
    shape_of,
    task_of_row,
)

GSM8K = {"question": "What is 9 * 2?", "answer": "9 * 2 = <<9*2=18>>18\n#### 18"}
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 9 * 2?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "18"},
    "extra_info": {
        "split": "test",
        "index": 12,
        "need_tools_kwargs": True,
        "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "18"}}},
        "interaction_kwargs": {"name": "gsm8k", "query": "What?"},
    },
}


def task(row, **wording) -> Task:
    return task_of_row(row, "t-1", Wording(**wording))


def contents(row, **wording) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in task(row, **wording).messages]


# The shapes -----------------------------------------------------------------------------------------------------------


def test_a_row_of_verls_becomes_a_task_with_all_it_brings():
    made = task(VERL)
    assert made.id == "t-1"
    assert made.messages == (Message("system", "Be brief."), Message("user", "What is 9 * 2?"))
    assert (made.ground_truth, made.data_source) == ("18", "openai/gsm8k")
    assert made.tools_kwargs == {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "18"}}}
    assert made.interaction_kwargs == {"name": "gsm8k", "query": "What?"}
    assert made.extra_info == {"ability": "math", **VERL["extra_info"]}


def test_a_row_of_gsm8k_gets_the_instruction_the_number_and_the_kwargs_of_the_seeds_tools():
    made = task(GSM8K)
    assert made.messages == (Message("user", f"What is 9 * 2? {GSM8K_INSTRUCTION}"),)
    assert (made.ground_truth, made.data_source) == ("18", "openai/gsm8k")
    brought = {"create_kwargs": {"ground_truth": "18"}}
    assert made.tools_kwargs == {"calc_gsm8k_reward": brought, "code_interpreter": brought}
    assert made.extra_info == GSM8K


def test_a_plain_row_becomes_a_task():
    made = task({"prompt": "Capital of France?", "answer": "Paris", "system": "Be brief.", "level": 3})
    assert made.messages == (Message("system", "Be brief."), Message("user", "Capital of France?"))
    assert (made.ground_truth, made.data_source, made.tools_kwargs) == ("Paris", "unknown", {})
    assert (made.extra_info, made.interaction_kwargs) == ({"level": 3}, None)


@pytest.mark.parametrize(
    ("row", "shape"),
    [
        (VERL, Shape.VERL),
        (GSM8K, Shape.GSM8K),
        ({"prompt": "a", "answer": "b"}, Shape.PLAIN),
        ({"prompt": "a", "ground_truth": "b", "reward_model": None, "question": None}, Shape.PLAIN),
        ({"prompt": None, "reward_model": None, **GSM8K}, Shape.GSM8K),
    ],
)
def test_the_shape_is_told_by_the_fields_that_are_not_null(row, shape):
    assert shape_of(row) is shape
    task(row)


def test_a_plain_row_may_say_ground_truth_and_may_have_none_if_it_says_so():
    assert task({"prompt": "a", "ground_truth": 5}).ground_truth == 5
    assert task({"prompt": "a", "answer": None}).ground_truth is None
    assert task({"prompt": "a", "answer": None, "ground_truth": 5}).ground_truth == 5
    assert task({"prompt": "a", "reward_model": {"ground_truth": None}}).ground_truth is None


def test_a_plain_row_brings_whatever_verls_rows_bring():
    made = task(
        {
            "prompt": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
            "answer": {"x": [1, None]},
            "data_source": "mine",
            "tools_kwargs": {"search": {"execute_kwargs": {"k": 3}}},
            "interaction_kwargs": {"name": "user"},
        }
    )
    assert made.messages == (Message("user", "ab"),)
    assert made.ground_truth == {"x": [1, None]}
    assert made.tools_kwargs == {"search": {"execute_kwargs": {"k": 3}}}
    assert (made.data_source, made.interaction_kwargs) == ("mine", {"name": "user"})


def test_earlier_turns_with_calls_are_kept():
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    prompt = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "1", "tool_call_id": "c1", "tool_calls": None},
        {"role": "user", "content": "b"},
    ]
    made = task({"prompt": prompt, "answer": "x"})
    assert [message.role for message in made.messages] == ["user", "assistant", "tool", "user"]
    assert made.messages[1].tool_calls[0].arguments == '{"x": 1}'


# Nulls and numpy ------------------------------------------------------------------------------------------------------


def test_kwargs_of_tools_that_are_null_are_nobodys():
    empty = {"create_kwargs": {"ground_truth": None}, "execute_kwargs": None}
    kwargs = {"code": {"create_kwargs": {"x": 1, "y": None}}, "search": None, "other": empty, "bare": {}}
    made = task({**VERL, "extra_info": {"tools_kwargs": kwargs, "index": 3, "note": None}})
    assert made.tools_kwargs == {"code": {"create_kwargs": {"x": 1}}, "bare": {}}
    assert "note" not in made.extra_info


def test_nulls_in_a_ground_truth_are_kept():
    assert task({"prompt": "a", "answer": {"result": None}}).ground_truth == {"result": None}


def test_numpys_arrays_and_numbers_are_lists_and_numbers():
    row = {
        "prompt": np.array([{"role": "user", "content": "a"}], dtype=object),
        "reward_model": {"ground_truth": np.array([np.float64(1.5), np.int64(2)], dtype=object)},
        "extra_info": {"index": np.int64(4), "split": np.str_("train"), "ok": np.bool_(True), "x": np.arange(2)},
    }
    made = task(row)
    assert made.messages == (Message("user", "a"),)
    assert made.ground_truth == [1.5, 2]
    assert made.extra_info == {"index": 4, "split": "train", "ok": True, "x": [0, 1]}
    assert [type(value) for value in made.extra_info.values()] == [int, str, bool, list]
    assert ids_of(row, "f") == (None, "train-4")


def test_what_json_has_no_word_for_is_text():
    row = {"prompt": "a", "answer": Decimal("1.50"), "when": datetime(2026, 1, 2, tzinfo=UTC), "raw": b"\xff"}
    made = task(row)
    assert made.ground_truth == "1.50"
    assert made.extra_info == {"when": "2026-01-02 00:00:00+00:00", "raw": "/w=="}


# Wording --------------------------------------------------------------------------------------------------------------


def test_a_system_message_takes_the_place_of_the_rows_or_comes_first():
    assert contents(VERL, system="S") == [("system", "S"), ("user", "What is 9 * 2?")]
    assert contents({"prompt": "a", "answer": 1}, system="S") == [("system", "S"), ("user", "a")]
    assert contents({"prompt": "a", "answer": 1, "system": "R"}, system="S") == [("system", "S"), ("user", "a")]


def test_an_empty_system_message_is_none():
    assert contents(VERL, system="") == [("user", "What is 9 * 2?")]


def test_an_instruction_is_added_to_the_last_users_message_once():
    assert contents({"prompt": "a", "answer": 1}, instruction="Go.") == [("user", "a Go.")]
    assert contents({"prompt": "a Go.", "answer": 1}, instruction="Go.") == [("user", "a Go.")]
    assert contents(GSM8K, instruction="Go.") == [("user", "What is 9 * 2? Go.")]
    assert contents(GSM8K, instruction="") == [("user", "What is 9 * 2?")]
    there = {**GSM8K, "question": f"What? {GSM8K_INSTRUCTION}"}
    assert contents(there) == [("user", f"What? {GSM8K_INSTRUCTION}")]


def test_a_data_source_is_for_rows_that_do_not_say():
    assert task(GSM8K, data_source="mine").data_source == "mine"
    assert task(VERL, data_source="mine").data_source == "openai/gsm8k"


# Ids ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "ids"),
    [
        ({"id": "a"}, ("a", None)),
        ({"id": 7}, ("7", None)),
        ({"id": 7.0}, ("7", None)),
        ({"extra_info": {"index": 3, "split": "train"}}, (None, "train-3")),
        ({"extra_info": {"index": "x"}}, (None, "file-x")),
        ({"extra_info": {"index": None, "split": "train"}}, (None, None)),
        ({"extra_info": {"index": [1]}}, (None, None)),
        ({"id": "a", "extra_info": {"index": 3}}, ("a", "file-3")),
        ({}, (None, None)),
    ],
)
def test_ids_come_from_id_or_from_split_and_index(row, ids):
    assert ids_of(row, "file") == ids


@pytest.mark.parametrize("bad", ["", "a\nb", "x" * 201, True, 1.5, [1], {"a": 1}])
def test_an_id_that_cannot_be_one_is_told(bad):
    with pytest.raises(TaskError, match=r"^id: expected"):
        ids_of({"id": bad}, "file")


def test_kwargs_that_a_row_of_gsm8k_brings_itself_win():
    own = {"code_interpreter": {"create_kwargs": {"x": 1}}}
    assert task({**GSM8K, "tools_kwargs": own}).tools_kwargs["code_interpreter"] == own["code_interpreter"]


# What is wrong --------------------------------------------------------------------------------------------------------

USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("row", "told"),
    [
        (5, "expected an object with fields, not 5"),
        ([], "expected an object"),
        ({}, "it has neither 'prompt' nor 'question'; fields: none"),
        ({"text": "a", "label": 1}, "fields: label, text; expected prompt and answer"),
        ({"prompt": "a"}, "it has none of 'answer', 'ground_truth' and verl's 'reward_model'; use null"),
        ({"prompt": "a", "answer": 1, "ground_truth": 2}, "answer 1 and ground_truth 2 differ"),
        ({"prompt": 5, "answer": 1}, "prompt: expected a string or a list of messages, not 5"),
        ({"prompt": {"role": "user"}, "answer": 1}, "prompt: expected a string or a list"),
        ({"prompt": [], "answer": 1}, "prompt: the list of messages is empty"),
        ({"prompt": " \n", "answer": 1}, "prompt: the user message is empty"),
        ({"prompt": ["a"], "answer": 1}, r"prompt\[0\]: expected a message with role and content, not 'a'"),
        ({"prompt": [None], "answer": 1}, r"prompt\[0\]: expected a message"),
        (
            {"prompt": [{"role": "robot", "content": "a"}], "answer": 1},
            r"prompt\[0\].role: 'robot' is not one of system",
        ),
        ({"prompt": [{"content": "a"}], "answer": 1}, r"prompt\[0\].role: None is not one of"),
        ({"prompt": [{"role": ["user"], "content": "a"}], "answer": 1}, r"role: \['user'\] is not one of"),
        ({"prompt": [{"role": "user"}], "answer": 1}, r"prompt\[0\].content is missing"),
        (
            {"prompt": [{"role": "user", "content": 5}], "answer": 1},
            r"prompt\[0\]: the content of a message must be text",
        ),
        ({"prompt": [{"role": "user", "content": [{"image": "x"}]}], "answer": 1}, "unsupported part of a message"),
        ({"prompt": [{**USER, "name": 5}], "answer": 1}, r"prompt\[0\].name: expected a string, not 5"),
        ({"prompt": [{**USER, "tool_calls": 5}], "answer": 1}, r"prompt\[0\].tool_calls: expected a list, not 5"),
        ({"prompt": [{**USER, "tool_calls": [5]}], "answer": 1}, r"tool_calls\[0\] is not a function call: 5"),
        ({"prompt": [USER, {"role": "assistant", "content": "b"}], "answer": 1}, "the last message has the role 'ass"),
        ({"prompt": "a", "reward_model": 5}, "reward_model: expected an object with ground_truth, not 5"),
        ({"prompt": "a", "reward_model": {}}, "reward_model.ground_truth is missing; use null"),
        ({"question": "a"}, "answer is missing; a row with 'question' is taken as GSM8K's"),
        (
            {"question": "a", "answer": "Paris"},
            "answer: 'Paris' does not end in '#### number'.*name the field 'prompt'",
        ),
        ({"question": "a", "answer": True}, "answer: expected a solution that ends in '#### number', not True"),
        ({"question": ["a"], "answer": "#### 1"}, r"question: expected a string, not \['a'\]"),
        ({"prompt": "a", "answer": 1, "system": 5}, "system: expected a string, not 5"),
        ({"prompt": "a", "answer": 1, "data_source": 5}, "data_source: expected a string, not 5"),
        ({"prompt": "a", "answer": 1, "extra_info": "x"}, "extra_info: expected an object, not 'x'"),
        ({"prompt": "a", "answer": 1, "tools_kwargs": [1]}, r"tools_kwargs: expected an object, not \[1\]"),
        (
            {"prompt": "a", "answer": 1, "extra_info": {"tools_kwargs": 1}},
            "extra_info.tools_kwargs: expected an object",
        ),
        (
            {"prompt": "a", "answer": 1, "tools_kwargs": {"f": 1}},
            r"tools_kwargs\['f'\]: expected an object with create",
        ),
        ({"prompt": "a", "answer": 1, "tools_kwargs": {"f": {"x": {}}}}, "unknown key 'x'; expected create_kwargs"),
        (
            {"prompt": "a", "answer": 1, "tools_kwargs": {"f": {"create_kwargs": 1}}},
            "create_kwargs: expected an object",
        ),
        ({"prompt": "a", "answer": 1, "interaction_kwargs": 1}, "interaction_kwargs: expected an object, not 1"),
        (
            {"prompt": "a", "answer": 1, "extra_info": {"need_tools_kwargs": True}},
            "need_tools_kwargs is true, but extra_info.tools_kwargs is missing",
        ),
    ],
)
def test_what_is_wrong_with_a_row_is_told(row, told):
    with pytest.raises(TaskError, match=told):
        task(row)


def test_a_huge_value_is_not_repeated_in_whole():
    with pytest.raises(TaskError) as caught:
        task({"prompt": list(range(100_000)), "answer": 1})
    assert len(str(caught.value)) < 300


def test_a_row_that_is_nested_beyond_reason_is_a_bad_row():
    nested: object = 1
    for _ in range(100_000):
        nested = [nested]
    for row in ({"prompt": "a", "answer": nested}, {"prompt": "a", "answer": 1, "extra_info": {"x": nested}}, nested):
        with pytest.raises(TaskError, match="nested too deeply"):
            task(row)
    with pytest.raises(TaskError, match="nested too deeply"):
        ids_of({"id": nested}, "file")


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool", "x"]) | values},
        optional={"content": values, "tool_calls": values, "name": values, "tool_call_id": values},
    )
    | values,
    max_size=3,
)
kwargs = st.dictionaries(st.text(max_size=3), st.dictionaries(st.sampled_from(["create_kwargs", "x"]), values) | values)
rows = st.fixed_dictionaries(
    {},
    optional={
        "id": values,
        "prompt": messages | values,
        "question": values,
        "answer": values,
        "ground_truth": values,
        "system": values,
        "data_source": values,
        "reward_model": st.fixed_dictionaries({}, optional={"ground_truth": values}) | values,
        "extra_info": st.fixed_dictionaries({}, optional={"index": values, "split": values, "tools_kwargs": kwargs}),
        "tools_kwargs": kwargs | values,
        "interaction_kwargs": values,
    },
)


@settings(max_examples=examples(200), deadline=None)
@given(row=rows | values)
def test_whatever_a_row_is_it_makes_a_task_or_a_task_error(row):
    try:
        ids_of(row, "file")
        made = task(row)
    except TaskError:
        return
    assert made.messages[-1].role == "user"
    assert made.messages[-1].content.strip()
    for brought in made.tools_kwargs.values():
        assert all(isinstance(each, dict) for each in brought.values())
