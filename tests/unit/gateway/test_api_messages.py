"""Anthropic's messages, checked with Anthropic's own SDK: what it sends is read, and it understands what we write."""

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
from toolyard.gateway.api.messages import Messages
from toolyard.messages import Message, ToolCall

anthropic: Any


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Takes seconds, which only the process that runs these tests should spend."""
    global anthropic
    anthropic = pytest.importorskip("anthropic", reason="needs the anthropic SDK")


API = Messages()
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "weather", "description": "Look it up.", "input_schema": CITY}
HI = {"role": "user", "content": "Hi"}
CACHED = {"cache_control": {"type": "ephemeral"}}


def assistant(content: str = "", *calls: ToolCall, thought: str | None = None) -> Message:
    return Message("assistant", content, reasoning_content=thought, tool_calls=calls)


PARIS = ToolCall("toolu_1", "weather", '{"city": "Paris"}')
ROME = ToolCall("toolu_2", "weather", '{"city": "Rome"}')
TURNS = {
    "text": assistant("It is sunny. " * 20),
    "no text": assistant(),
    "a call": assistant("", PARIS),
    "a call without arguments": assistant("", ToolCall("toolu_3", "now", "{}")),
    "text and calls": assistant("Let me see.", PARIS, ROME),
    "reasoning and text": assistant("Sunny.", thought="They ask about the weather. " * 10),
    "reasoning and a call": assistant("", PARIS, thought="I look it up."),
}
turns = pytest.mark.parametrize("message", TURNS.values(), ids=TURNS.keys())


def read(**body: Any) -> Question:
    return API.read({"model": "tiny", "max_tokens": 100, "messages": [HI], **body})


def reply(message: Message, finish: Finish = Finish.STOP, stop_text: str | None = None) -> Reply:
    return Reply("abc", 1_700_000_000, (Said(message, finish, stop_text, 30, 12, 20),))


class Sdk(Answers):
    """Anthropic's client."""

    def __init__(self) -> None:
        super().__init__("/v1" + API.path)
        client = anthropic.Anthropic(base_url="http://gateway", api_key="none", http_client=self.http, max_retries=0)
        self.messages = client.messages

    def asks(self, messages: list[Any] | None = None, **fields: Any) -> Any:
        return self.messages.create(model="tiny", max_tokens=100, messages=messages or [HI], **fields)


@pytest.fixture(scope="module")
def sdk() -> Sdk:
    return Sdk()


def parsed(stream: bytes) -> Iterator[dict[str, Any]]:
    for one in stream.decode().removesuffix("\n\n").split("\n\n"):
        name, data = one.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        yield event


# Reading --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", ["Be\nbrief.", [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]])
def test_the_system_prompt_becomes_a_leading_message(system: Any) -> None:
    assert read(system=system).messages == (Message("system", "Be\nbrief."), Message("user", "Hi"))


@pytest.mark.parametrize("system", [None, "", []])
def test_no_system_prompt_gives_no_message(system: Any) -> None:
    assert read(system=system).messages == (Message("user", "Hi"),)


def test_a_system_message_may_stand_among_the_others() -> None:
    messages = read(messages=[HI, {"role": "system", "content": "Be brief."}]).messages
    assert messages == (Message("user", "Hi"), Message("system", "Be brief."))


def result(of: str, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": of, **fields}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"content": "18 °C"}, "18 °C"),
        ({"content": [{"type": "text", "text": "18"}, {"type": "text", "text": "°C"}]}, "18\n°C"),
        ({"content": "no such city", "is_error": True}, "no such city"),
        ({}, ""),
    ],
)
def test_a_tool_result_becomes_a_tool_message(given: dict[str, Any], text: str) -> None:
    messages = read(messages=[{"role": "user", "content": [result("toolu_1", **given)]}]).messages
    assert messages == (Message("tool", text, tool_call_id="toolu_1"),)


def test_text_among_tool_results_becomes_one_user_message_after_them() -> None:
    text = [{"type": "text", "text": "Wait."}, {"type": "text", "text": "Go on."}]
    content = [text[0], result("toolu_1", content="18"), text[1], result("toolu_2", content="20")]
    assert read(messages=[{"role": "user", "content": content}]).messages == (
        Message("tool", "18", tool_call_id="toolu_1"),
        Message("tool", "20", tool_call_id="toolu_2"),
        Message("user", "Wait.\nGo on."),
    )


def test_blocks_of_an_assistant_become_one_message() -> None:
    content = [
        {"type": "thinking", "thinking": "Hm.", "signature": "x"},
        {"type": "redacted_thinking", "data": "gAAAA"},
        {"type": "text", "text": "Zürich "},
        {"type": "text", "text": "then."},
        {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Zürich"}},
    ]
    call = ToolCall("toolu_1", "weather", '{"city": "Zürich"}')
    messages = read(messages=[{"role": "assistant", "content": content}, HI]).messages
    assert messages[0] == assistant("Zürich then.", call, thought="Hm.")


def test_cache_control_is_ignored_everywhere() -> None:
    text = {"type": "text", "text": "Hi", **CACHED}
    content = [result("toolu_1", content=[text], **CACHED), text]
    question = read(
        messages=[{"role": "user", "content": content}], system=[text], tools=[{**TOOL, **CACHED}], **CACHED
    )
    assert [message.content for message in question.messages] == ["Hi", "Hi", "Hi"]
    assert question.tools == read(tools=[TOOL]).tools


@pytest.mark.parametrize("kind", [{}, {"type": None}, {"type": "custom"}])
def test_a_tool_has_a_schema_of_its_input(kind: dict[str, Any]) -> None:
    (tool,) = read(tools=[{**TOOL, **kind}]).tools
    assert tool.model_dump() == {
        "type": "function",
        "function": {"name": "weather", "description": "Look it up.", "parameters": CITY},
    }


def test_sampling_fields_are_renamed() -> None:
    question = read(temperature=0.5, top_p=0.9, top_k=20, stop_sequences=["END"], stream=True)
    assert question.sampling == {"max_tokens": 100, "temperature": 0.5, "top_p": 0.9, "top_k": 20, "stop": ("END",)}
    assert question.stream


@pytest.mark.parametrize(("choice", "reads"), [(None, True), ({"type": "auto"}, True), ({"type": "none"}, False)])
def test_a_choice_of_no_tools_reads_no_calls(choice: Any, reads: bool) -> None:
    assert read(tool_choice=choice).reads_calls is reads


def test_fields_that_change_nothing_here_are_ignored() -> None:
    ignored: dict[str, Any] = {
        "metadata": {"user_id": "u"}, "thinking": {"type": "enabled", "budget_tokens": 2000}, "service_tier": "auto",
        "output_config": {"effort": "low"}, "mcp_servers": [], "container": None, "context_management": {"edits": []},
    }  # fmt: skip
    assert read(**ignored) == read()


def test_a_message_of_the_assistant_is_not_continued() -> None:
    with pytest.raises(ApiError, match="cannot continue an assistant's message") as caught:
        read(messages=[HI, {"role": "assistant", "content": "The answer is"}])
    assert (caught.value.status, caught.value.param) == (400, "messages[1]")


def user(block: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [block]}]}


def said(block: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "content": [block]}, HI]}


USED: dict[str, Any] = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {}}
BLOCK = "messages[0].content[0]"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": ["Hi"]}, "messages[0]"),
        ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "Hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        (user("Hi"), BLOCK),
        (user({"text": "Hi"}), f"{BLOCK}.type"),
        (user({"type": "text"}), f"{BLOCK}.text"),
        (user({"type": "image", "source": {}}), f"{BLOCK}.type"),
        (user({"type": "document", "source": {}}), f"{BLOCK}.type"),
        (user(USED), f"{BLOCK}.type"),
        (user({"type": "tool_result", "content": "18"}), f"{BLOCK}.tool_use_id"),
        (user(result("toolu_1", content=5)), f"{BLOCK}.content"),
        (user(result("toolu_1", content=[{"type": "image"}])), f"{BLOCK}.content[0].type"),
        (said({"type": "tool_result"}), f"{BLOCK}.type"),
        (said({"type": "server_tool_use"}), f"{BLOCK}.type"),
        (said({"type": "thinking"}), f"{BLOCK}.thinking"),
        (said({**USED, "input": "{}"}), f"{BLOCK}.input"),
        (said({**USED, "id": None}), f"{BLOCK}.id"),
        (said({**USED, "name": 5}), f"{BLOCK}.name"),
        ({"system": 5}, "system"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"model": 5}, "model"),
        ({"tools": {"a": 1}}, "tools"),
        ({"tools": ["weather"]}, "tools[0]"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "weather"}]}, "tools[0].input_schema"),
        ({"tools": [{"input_schema": CITY}]}, "tools[0].name"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "weather"}}, "tool_choice"),
        ({"temperature": 1.5}, "temperature"),
        ({"top_p": "1"}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stream": 1}, "stream"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ({"output_config": "low"}, "output_config"),
        ({"output_format": {"type": "json_schema"}}, "output_format"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
    ],
)
def test_a_bad_request_is_refused_with_the_name_of_the_field(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read(**body)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert str(caught.value).startswith(f"{param}: ")


def test_input_that_is_nested_too_deeply_is_refused() -> None:
    nested: Any = {}
    for _ in range(100_000):
        nested = {"a": nested}
    with pytest.raises(ApiError, match="nested too deeply"):
        read(**said({**USED, "input": nested}))


WORDS = st.sampled_from([
    "model", "messages", "system", "tools", "tool_choice", "max_tokens", "type", "role", "content", "name", "text",
    "tool_use", "tool_result", "thinking", "tool_use_id", "input", "input_schema", "user", "assistant", "auto",
    "id", "custom", "stop_sequences", "output_config", "temperature", "stream", "properties",
])  # fmt: skip
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS | st.text(max_size=5), inner, max_size=5),
    max_leaves=10,
)
FIELDS = {"text": ANY_JSON, "content": ANY_JSON, "input": ANY_JSON}
NAMES = {"type": WORDS, "id": WORDS, "name": WORDS, "tool_use_id": WORDS}
BLOCKS = st.lists(st.fixed_dictionaries({**FIELDS, **NAMES}), max_size=2)
MESSAGES = st.lists(st.fixed_dictionaries({"role": WORDS, "content": ANY_JSON | BLOCKS}), max_size=3)


@given(st.dictionaries(WORDS, ANY_JSON), st.none() | MESSAGES)
def test_any_object_is_read_or_refused(body: dict[str, Any], messages: list[Any] | None) -> None:
    with contextlib.suppress(ApiError):
        API.read(body if messages is None else {**body, "max_tokens": 1, "messages": messages})


# Writing --------------------------------------------------------------------------------------------------------------


@turns
def test_an_answer_is_a_message_of_the_sdk(message: Message) -> None:
    written = anthropic.types.Message.model_validate(API.answer(read(), reply(message)))
    assert (written.id, written.model, written.role) == ("msg_abc", "tiny", "assistant")
    assert "".join(block.text for block in written.content if block.type == "text") == message.content
    used = [block for block in written.content if block.type == "tool_use"]
    assert [(block.id, block.name, block.input) for block in used] == [
        (call.id, call.name, json.loads(call.arguments)) for call in message.tool_calls
    ]


def test_content_is_thinking_then_text_then_calls_and_nothing_that_is_empty() -> None:
    content = API.answer(read(), reply(assistant("See.", PARIS, ROME, thought="Hm.")))["content"]
    assert [block["type"] for block in content] == ["thinking", "text", "tool_use", "tool_use"]
    assert API.answer(read(), reply(assistant()))["content"] == []


@pytest.mark.parametrize(
    ("message", "finish", "stop_text", "reason"),
    [
        (assistant("Hi"), Finish.STOP, None, "end_turn"),
        (assistant("Hi"), Finish.LENGTH, None, "max_tokens"),
        (assistant("Hi"), Finish.STOP, "END", "stop_sequence"),
        (assistant("Hi", PARIS), Finish.STOP, None, "tool_use"),
        (assistant("Hi", PARIS), Finish.STOP, "END", "tool_use"),
        (assistant("Hi", PARIS), Finish.LENGTH, None, "max_tokens"),
    ],
)
def test_the_stop_reason_says_why_the_turn_ended(
    message: Message, finish: Finish, stop_text: str | None, reason: str
) -> None:
    answer = API.answer(read(), reply(message, finish, stop_text))
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, "END" if reason == "stop_sequence" else None)


def test_input_tokens_do_not_count_cached_ones() -> None:
    usage = anthropic.types.Message.model_validate(API.answer(read(), reply(assistant("Hi")))).usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (10, 20, 12)


@pytest.mark.parametrize(
    "arguments", ['{"city": Par', "", "[1]", "null", '{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud800"}']
)
def test_arguments_that_this_api_cannot_express_are_an_empty_object(sdk: Sdk, arguments: str) -> None:
    answered = reply(assistant("", ToolCall("toolu_1", "weather", arguments)))
    assert API.answer(read(), answered)["content"][0]["input"] == {}
    sdk.given(b"".join(API.events(read(), answered)))
    with sdk.messages.stream(model="tiny", max_tokens=100, messages=[HI]) as stream:
        assert stream.get_final_message().content[0].input == {}


@turns
def test_every_event_is_an_event_of_the_sdk(message: Message) -> None:
    events = list(parsed(b"".join(API.events(read(), reply(message)))))
    adapter = TypeAdapter(anthropic.types.RawMessageStreamEvent)
    assert [adapter.validate_python(event).type for event in events] == [event["type"] for event in events]


def test_a_stream_announces_every_block() -> None:
    events = list(parsed(b"".join(API.events(read(), reply(assistant("See.", PARIS, thought="Hm."))))))
    kinds = [(event["type"], event["delta"]["type"] if event["type"] == "content_block_delta" else event.get("index"))
             for event in events]  # fmt: skip
    delta = "content_block_delta"
    assert kinds == [
        ("message_start", None),
        ("content_block_start", 0), (delta, "thinking_delta"), (delta, "signature_delta"), ("content_block_stop", 0),
        ("content_block_start", 1), (delta, "text_delta"), ("content_block_stop", 1),
        ("content_block_start", 2), (delta, "input_json_delta"), ("content_block_stop", 2),
        ("message_delta", None), ("message_stop", None),
    ]  # fmt: skip


@turns
@pytest.mark.parametrize(("finish", "stop_text"), [(Finish.STOP, None), (Finish.STOP, "END"), (Finish.LENGTH, None)])
def test_what_the_sdk_accumulates_from_a_stream_is_the_answer(
    sdk: Sdk, message: Message, finish: Finish, stop_text: str | None
) -> None:
    answered = reply(message, finish, stop_text)
    sdk.given(API.ping.join(API.events(read(), answered)))
    with sdk.messages.stream(model="tiny", max_tokens=100, messages=[HI], tools=[TOOL]) as stream:
        final = stream.get_final_message()
    added = {"stop_details"}  # by the SDK: a field that only refusals have
    assert final.model_dump(mode="json", exclude_unset=True, exclude=added) == API.answer(read(), answered)
    assert API.read(sdk.body).stream


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (ApiError(400, "top_k: expected an integer"), "BadRequestError", "top_k: expected an integer"),
        (ApiError(404, "no such session"), "NotFoundError", "no such session"),
        (ApiError(400, "9 > 8", code="context_length_exceeded"), "BadRequestError", "prompt is too long: 9 > 8"),
    ],
)
def test_the_sdk_raises_an_error_that_it_is_answered_with(sdk: Sdk, error: ApiError, raised: str, message: str) -> None:
    with pytest.raises(getattr(anthropic, raised)) as caught:
        sdk.given(API.error(error), error.status).asks()
    assert caught.value.body == {"type": "error", "error": {"type": error.type, "message": message}}


@pytest.mark.parametrize("begun", [0, 3])
def test_the_sdk_raises_an_error_in_a_stream(sdk: Sdk, begun: int) -> None:
    events = list(API.events(read(), reply(assistant("Hello"))))[:begun]
    sdk.given(b"".join([*events, API.error_event(ApiError(503, "no engine is left"))]))
    with pytest.raises(anthropic.APIStatusError, match="no engine is left"):
        list(sdk.asks(stream=True))
    with (
        pytest.raises(anthropic.APIStatusError, match="no engine is left"),
        sdk.messages.stream(model="tiny", max_tokens=100, messages=[HI]) as stream,
    ):
        stream.until_done()


# Round trip -----------------------------------------------------------------------------------------------------------

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=80),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.text(max_size=5), VALUES, max_size=3)
ARGUMENTS = OBJECTS.map(json.dumps) | OBJECTS.map(lambda value: json.dumps(value, ensure_ascii=False))


def turn(content: str, called: list[tuple[str, str]], thought: str | None) -> Message:
    return assistant(content, *(ToolCall(f"toolu_{index}", *one) for index, one in enumerate(called)), thought=thought)


SAID = st.builds(
    turn,
    st.text(max_size=150),
    st.lists(st.tuples(st.from_regex(r"[A-Za-z_.-]{1,9}", fullmatch=True), ARGUMENTS), max_size=3),
    st.none() | st.text(max_size=150),
)


def decoded(message: Message) -> tuple[Any, ...]:
    calls = [(call.id, call.name, json.loads(call.arguments)) for call in message.tool_calls]
    return message.content, calls, message.reasoning_content or None


@settings(max_examples=examples(50))
@given(st.lists(SAID, min_size=1, max_size=3), st.booleans())
def test_a_turn_that_the_sdk_sends_back_is_read_as_it_was_said(
    sdk: Sdk, conversation: list[Message], streamed: bool
) -> None:
    sent: list[Any] = [HI]
    for message in conversation:
        if streamed:
            sdk.given(b"".join(API.events(read(), reply(message))))
            with sdk.messages.stream(model="tiny", max_tokens=100, messages=sent) as stream:
                got = stream.get_final_message()
        else:
            got = sdk.given(API.answer(read(), reply(message))).asks(sent)
        results = [result(call.id, content="ok") for call in message.tool_calls]
        sent += [got.to_param(), {"role": "user", "content": results or "Go on"}]
    sdk.given(API.answer(read(), reply(assistant("Done")))).asks(sent)
    back = [message for message in API.read(sdk.body).messages if message.role == "assistant"]
    assert list(map(decoded, back)) == list(map(decoded, conversation))
