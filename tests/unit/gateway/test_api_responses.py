"""OpenAI's responses, checked with OpenAI's own SDK: what it sends is read, and it understands what we write."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from sdk_answers import Answers

from expensive import examples
from toolyard.engines.protocol import Finish
from toolyard.gateway.api.exchange import ApiError, Question, Reply, Said
from toolyard.gateway.api.responses import Responses
from toolyard.messages import Message, ToolCall

openai = pytest.importorskip("openai", reason="needs the openai SDK")
sdk_types = pytest.importorskip("openai.types.responses", reason="needs the openai SDK")

API = Responses()
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "name": "weather", "description": "Look it up.", "parameters": CITY, "strict": True}


def assistant(content: str = "", *calls: ToolCall, thought: str | None = None) -> Message:
    return Message("assistant", content, reasoning_content=thought, tool_calls=calls)


PARIS = ToolCall("call_1", "weather", '{"city": "Paris"}')
ROME = ToolCall("call_2", "weather", '{"city": "Rome"}')
TURNS = {
    "text": assistant("It is sunny. " * 20),
    "no text": assistant(),
    "a call": assistant("", PARIS),
    "text and calls": assistant("Let me see.", PARIS, ROME),
    "reasoning and text": assistant("Sunny.", thought="They ask about the weather. " * 10),
    "reasoning and a call": assistant("", PARIS, thought="I look it up."),
    "arguments that are no JSON": assistant("", ToolCall("call_3", "weather", '{"city": Par')),
}
turns = pytest.mark.parametrize("message", TURNS.values(), ids=TURNS.keys())


def read(body: dict[str, Any]) -> Question:
    return API.read({"model": "tiny", "input": "Hi", **body})


def reply(message: Message, finish: Finish = Finish.STOP) -> Reply:
    return Reply("abc", 1_700_000_000, (Said(message, finish, None, 30, 12, 20),))


class Sdk(Answers):
    """OpenAI's client."""

    def __init__(self) -> None:
        super().__init__("/v1" + API.path)
        client = openai.OpenAI(base_url="http://gateway/v1", api_key="none", http_client=self.http, max_retries=0)
        self.responses = client.responses


@pytest.fixture(scope="module")
def sdk() -> Sdk:
    return Sdk()


def events_of(message: Message, finish: Finish = Finish.STOP) -> list[dict[str, Any]]:
    return list(parsed(b"".join(API.events(read({}), reply(message, finish)))))


def parsed(stream: bytes) -> Iterator[dict[str, Any]]:
    for one in stream.decode().removesuffix("\n\n").split("\n\n"):
        name, data = one.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        yield event


# Reading --------------------------------------------------------------------------------------------------------------


def test_input_may_be_a_string() -> None:
    assert read({"input": "Hello"}).messages == (Message("user", "Hello"),)


def test_instructions_become_a_leading_system_message() -> None:
    assert read({"instructions": "Be brief."}).messages == (Message("system", "Be brief."), Message("user", "Hi"))


@pytest.mark.parametrize("instructions", [None, ""])
def test_no_instructions_give_no_system_message(instructions: str | None) -> None:
    assert read({"instructions": instructions}).messages == (Message("user", "Hi"),)


@pytest.mark.parametrize("role", ["user", "assistant", "system", "developer"])
@pytest.mark.parametrize("kind", [{}, {"type": "message"}, {"type": None}])
def test_a_message_keeps_its_role_with_or_without_a_type(role: str, kind: dict[str, Any]) -> None:
    assert read({"input": [{**kind, "role": role, "content": "Hi"}]}).messages == (Message(role, "Hi"),)


def test_parts_of_text_are_joined() -> None:
    parts: list[Any] = [
        {"type": "input_text", "text": "One, "},
        {"type": "output_text", "text": "two", "annotations": []},
    ]
    assert read({"input": [{"role": "user", "content": parts}]}).messages == (Message("user", "One, two"),)


@pytest.mark.parametrize(
    "output", ["18 °C", [{"type": "input_text", "text": "18 "}, {"type": "input_text", "text": "°C"}]]
)
def test_a_call_output_becomes_a_tool_message(output: Any) -> None:
    items = [
        {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": PARIS.arguments},
        {"type": "function_call_output", "call_id": "call_1", "output": output},
    ]
    assert read({"input": items}).messages == (assistant("", PARIS), Message("tool", "18 °C", tool_call_id="call_1"))


def call(of: ToolCall) -> dict[str, Any]:
    return {"type": "function_call", "call_id": of.id, "name": of.name, "arguments": of.arguments}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": ""}
RESULT = Message("tool", "", tool_call_id="call_1")


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ([said("See."), call(PARIS), call(ROME)], [assistant("See.", PARIS, ROME)]),
        ([call(PARIS), said("See.")], [assistant("See.", PARIS)]),
        ([thought("Hm."), call(PARIS)], [assistant("", PARIS, thought="Hm.")]),
        ([thought("H"), thought("m."), said("See.")], [assistant("See.", thought="Hm.")]),
        ([call(PARIS), OUTPUT, call(ROME)], [assistant("", PARIS), RESULT, assistant("", ROME)]),
        ([said("One."), said("Two.")], [assistant("One."), assistant("Two.")]),
        ([said("One."), thought("Hm."), said("Two.")], [assistant("One."), assistant("Two.", thought="Hm.")]),
        ([call(PARIS), thought("Hm."), call(ROME)], [assistant("", PARIS), assistant("", ROME, thought="Hm.")]),
    ],
)
def test_items_of_one_turn_become_one_message(items: list[Any], messages: list[Message]) -> None:
    assert read({"input": items}).messages == tuple(messages)


def test_reasoning_without_text_is_left_out() -> None:
    item: dict[str, Any] = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAA"}
    assert read({"input": [item, said("Hi")]}).messages == (assistant("Hi"),)


def test_tools_are_flat_functions() -> None:
    (tool,) = read({"tools": [TOOL]}).tools
    assert tool.model_dump() == {
        "type": "function",
        "function": {"name": "weather", "description": "Look it up.", "parameters": CITY},
    }


def test_sampling_fields_are_renamed() -> None:
    question = read({"max_output_tokens": 7, "temperature": 0.5, "top_p": 0.9, "stream": True})
    assert question.sampling == {"max_tokens": 7, "temperature": 0.5, "top_p": 0.9}
    assert question.stream


@pytest.mark.parametrize(("choice", "reads"), [(None, True), ("auto", True), ("none", False)])
def test_a_choice_of_no_tools_reads_no_calls(choice: str | None, reads: bool) -> None:
    assert read({"tool_choice": choice}).reads_calls is reads


@pytest.mark.parametrize(("given", "previous"), [({}, None), ({"previous_response_id": None}, None),
                                                 ({"previous_response_id": "resp_abc"}, "abc")])  # fmt: skip
def test_the_previous_reply_is_named_without_its_prefix(given: dict[str, Any], previous: str | None) -> None:
    assert read(given).previous == previous


def test_fields_that_change_nothing_here_are_ignored() -> None:
    ignored = {
        "background": False, "conversation": None, "include": ["reasoning.encrypted_content"], "metadata": {"a": "b"},
        "parallel_tool_calls": False, "prompt": None, "prompt_cache_key": "k", "reasoning": {"effort": "low"},
        "safety_identifier": "s", "service_tier": "auto", "store": False, "text": {"format": {"type": "text"}},
        "truncation": "auto", "user": "u",
    }  # fmt: skip
    assert read(ignored).messages == read({}).messages


def in_input(item: Any) -> dict[str, Any]:
    return {"input": [item]}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": None}, "input"),
        ({"input": {"role": "user"}}, "input"),
        (in_input("Hi"), "input[0]"),
        (in_input({"content": "Hi"}), "input[0].role"),
        (in_input({"role": "robot", "content": "Hi"}), "input[0].role"),
        (in_input({"role": [], "content": "Hi"}), "input[0].role"),
        (in_input({"role": "user"}), "input[0].content"),
        (in_input({"role": "user", "content": ["Hi"]}), "input[0].content[0]"),
        (in_input({"role": "user", "content": [{"type": "input_image"}]}), "input[0].content[0].type"),
        (in_input({"role": "assistant", "content": [{"type": "refusal"}]}), "input[0].content[0].type"),
        (in_input({"role": "user", "content": [{"type": "input_text"}]}), "input[0].content[0].text"),
        (in_input({"type": "item_reference", "id": "msg_1"}), "input[0].type"),
        (in_input({"type": "computer_call"}), "input[0].type"),
        (in_input({"type": 7}), "input[0].type"),
        (in_input({**call(PARIS), "call_id": None}), "input[0].call_id"),
        (in_input({**call(PARIS), "name": 1}), "input[0].name"),
        (in_input({**call(PARIS), "arguments": {}}), "input[0].arguments"),
        (in_input({"type": "function_call_output", "output": "x"}), "input[0].call_id"),
        (in_input({"type": "function_call_output", "call_id": "x"}), "input[0].output"),
        (in_input({"type": "reasoning", "content": [{"type": "summary_text"}]}), "input[0].content[0].type"),
        ({"instructions": ["Be brief."]}, "instructions"),
        ({"model": 5}, "model"),
        ({"tools": {"a": 1}}, "tools"),
        ({"tools": ["weather"]}, "tools[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "weather"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{**TOOL, "parameters": {"type": 5}}]}, "tools[0].parameters.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "weather"}}, "tool_choice"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": "9"}, "max_output_tokens"),
        ({"temperature": 2.5}, "temperature"),
        ({"top_p": -1}, "top_p"),
        ({"stream": "yes"}, "stream"),
        ({"previous_response_id": 5}, "previous_response_id"),
        ({"text": "text"}, "text"),
        ({"text": {"format": "text"}}, "text.format"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"frequency_penalty": 1}, "frequency_penalty"),
    ],
)
def test_a_bad_request_is_refused_with_the_name_of_the_field(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read(body)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert str(caught.value).startswith(f"{param}: ")


WORDS = st.sampled_from([
    "model", "input", "instructions", "tools", "tool_choice", "text", "format", "type", "role", "content", "name",
    "message", "function_call", "function_call_output", "reasoning", "input_text", "output_text", "function", "call_id",
    "arguments", "output", "parameters", "user", "assistant", "auto", "previous_response_id", "temperature", "stream",
])  # fmt: skip
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS | st.text(max_size=5), inner, max_size=5),
    max_leaves=10,
)


@given(st.dictionaries(WORDS, ANY_JSON), st.none() | st.lists(st.dictionaries(WORDS, ANY_JSON, max_size=5), max_size=3))
def test_any_object_is_read_or_refused(body: dict[str, Any], items: list[Any] | None) -> None:
    with contextlib.suppress(ApiError):
        API.read(body if items is None else {**body, "input": items})


# Writing --------------------------------------------------------------------------------------------------------------


@turns
@pytest.mark.parametrize("finish", [Finish.STOP, Finish.LENGTH])
def test_an_answer_is_a_response_of_the_sdk(message: Message, finish: Finish) -> None:
    question = read({"instructions": "Be brief.", "tools": [TOOL], "temperature": 0.5, "metadata": {"a": "b"}})
    response = sdk_types.Response.model_validate(API.answer(question, reply(message, finish)))
    assert (response.id, response.model, response.created_at) == ("resp_abc", "tiny", 1_700_000_000)
    assert response.output_text == (message.content if message.content or not message.tool_calls else "")
    calls = [item for item in response.output if item.type == "function_call"]
    assert [ToolCall(item.call_id, item.name, item.arguments) for item in calls] == list(message.tool_calls)
    assert (response.instructions, response.temperature, response.top_p) == ("Be brief.", 0.5, None)
    assert (response.tools[0].name, response.tools[0].parameters) == ("weather", CITY)
    assert (response.tool_choice, response.parallel_tool_calls, response.metadata) == ("auto", True, {"a": "b"})


def test_output_is_reasoning_then_text_then_calls() -> None:
    answer = API.answer(read({}), reply(assistant("See.", PARIS, ROME, thought="Hm.")))
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert len({item["id"] for item in answer["output"]}) == 4


def test_a_turn_without_text_has_a_message_only_if_it_has_no_calls() -> None:
    assert [item["type"] for item in API.answer(read({}), reply(assistant()))["output"]] == ["message"]
    assert [item["type"] for item in API.answer(read({}), reply(assistant("", PARIS)))["output"]] == ["function_call"]


def test_a_turn_that_reached_the_limit_is_incomplete() -> None:
    response = sdk_types.Response.model_validate(API.answer(read({}), reply(assistant("It is"), Finish.LENGTH)))
    assert response.status == response.output[0].status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"


def test_usage_counts_cached_tokens_as_part_of_the_input() -> None:
    usage = sdk_types.Response.model_validate(API.answer(read({}), reply(assistant("Hi")))).usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (30, 12, 42)
    assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (20, 0)


@turns
@pytest.mark.parametrize("finish", [Finish.STOP, Finish.LENGTH])
def test_every_event_is_an_event_of_the_sdk(message: Message, finish: Finish) -> None:
    events = events_of(message, finish)
    adapter = TypeAdapter(sdk_types.ResponseStreamEvent)
    assert [type(adapter.validate_python(event)).__name__ for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] == ("response.completed" if finish is Finish.STOP else "response.incomplete")
    assert events[-1]["response"] == API.answer(read({}), reply(message, finish))


def test_a_stream_announces_every_item_and_part() -> None:
    kinds = [event["type"] for event in events_of(assistant("See.", PARIS, thought="Hm."))]
    part = ["content_part.added", "{}.delta", "{}.done", "content_part.done"]
    assert kinds == [
        f"response.{kind}"
        for kind in (
            "created", "in_progress",
            "output_item.added", *(one.format("reasoning_text") for one in part), "output_item.done",
            "output_item.added", *(one.format("output_text") for one in part), "output_item.done",
            "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
            "completed",
        )
    ]  # fmt: skip


def without_parsed(response: Any) -> dict[str, Any]:
    """Without the fields that `responses.stream` adds for structured output."""
    written = response.to_dict(mode="json")
    for item in written["output"]:
        item.pop("parsed_arguments", None)
        for part in item.get("content", ()):
            part.pop("parsed", None)
    return written


@turns
def test_what_the_sdk_accumulates_from_a_stream_is_the_answer(sdk: Sdk, message: Message) -> None:
    loose = {**TOOL, "strict": False}  # the SDK itself fails if the arguments for a strict tool are no JSON
    sdk.given(API.ping.join(API.events(read({"tools": [loose]}), reply(message))))
    snapshots: dict[str, str] = {}
    with sdk.responses.stream(model="tiny", input="Hi", tools=[loose]) as stream:
        for event in stream:
            if event.type in ("response.output_text.delta", "response.function_call_arguments.delta"):
                snapshots[event.item_id] = event.snapshot
        final = stream.get_final_response()
    answer = API.answer(read(sdk.body), reply(message))
    assert without_parsed(final) == answer
    written = [item for item in answer["output"] if item["type"] != "reasoning"]
    texts = {item["id"]: item.get("arguments") or item["content"][0]["text"] for item in written}
    assert snapshots == {item: text for item, text in texts.items() if text}


def test_a_plain_stream_of_the_sdk_ends_with_an_incomplete_response(sdk: Sdk) -> None:
    sdk.given(b"".join(API.events(read({}), reply(assistant("It is"), Finish.LENGTH))))
    *_, last = sdk.responses.create(model="tiny", input="Hi", stream=True)
    assert (last.type, last.response.output_text) == ("response.incomplete", "It is")


def test_the_sdk_raises_an_error_that_it_is_answered_with(sdk: Sdk) -> None:
    error = ApiError(400, "41 tokens do not fit", code="context_length_exceeded", param="input")
    with pytest.raises(openai.BadRequestError, match="41 tokens do not fit") as caught:
        sdk.given(API.error(error), 400).responses.create(model="tiny", input="Hi")
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")


@pytest.mark.parametrize("begun", [0, 4])
def test_the_sdk_raises_an_error_in_a_stream(sdk: Sdk, begun: int) -> None:
    events = list(API.events(read({}), reply(assistant("Hello"))))[:begun]
    failure = API.error_event(ApiError(503, "no engine is left", code="overloaded"))
    for event in parsed(failure):
        assert TypeAdapter(sdk_types.ResponseErrorEvent).validate_python(event).message == "no engine is left"
    sdk.given(b"".join([*events, failure]))
    with pytest.raises(openai.APIError, match="no engine is left") as caught:
        list(sdk.responses.create(model="tiny", input="Hi", stream=True))
    assert (caught.value.code, caught.value.type) == ("overloaded", "overloaded_error")
    with pytest.raises(openai.APIError, match="no engine is left"), sdk.responses.stream(model="m", input="") as stream:
        stream.until_done()


# Round trip -----------------------------------------------------------------------------------------------------------

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=80),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.text(max_size=5), VALUES, max_size=3).map(json.dumps) | st.text(max_size=80)


def turn(content: str, called: list[tuple[str, str]], thought: str | None) -> Message:
    return assistant(content, *(ToolCall(f"call_{index}", *one) for index, one in enumerate(called)), thought=thought)


SAID = st.builds(
    turn,
    st.text(max_size=150),
    st.lists(st.tuples(st.from_regex(r"[A-Za-z_.-]{1,9}", fullmatch=True), ARGUMENTS), max_size=3),
    st.none() | st.text(max_size=150),
)


@settings(max_examples=examples(50))
@given(st.lists(SAID, min_size=1, max_size=3), st.booleans())
def test_a_turn_that_the_sdk_sends_back_is_read_as_it_was_said(
    sdk: Sdk, conversation: list[Message], streamed: bool
) -> None:
    items: list[Any] = [{"role": "user", "content": "Hi"}]
    for number, message in enumerate(conversation):
        answered = Reply(f"r{number}", 0, (Said(message, Finish.STOP),))
        if streamed:
            sdk.given(b"".join(API.events(read({}), answered)))
            *_, last = sdk.responses.create(model="tiny", input=items, stream=True)
            items += last.response.output
        else:
            sdk.given(API.answer(read({}), answered))
            items += sdk.responses.create(model="tiny", input=items).output
        items += [{"type": "function_call_output", "call_id": one.id, "output": "ok"} for one in message.tool_calls]
        items.append({"role": "user", "content": "Go on"})
    sdk.given(API.answer(read({}), reply(assistant("Done")))).responses.create(model="tiny", input=items)
    back = [message for message in API.read(sdk.body).messages if message.role == "assistant"]
    assert [(one.content, one.tool_calls) for one in back] == [(one.content, one.tool_calls) for one in conversation]
    assert [one.reasoning_content for one in back] == [one.reasoning_content or None for one in conversation]
