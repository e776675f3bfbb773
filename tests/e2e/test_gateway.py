"""Real clients, unmodified, at the gateway: what they say to each other, and what is recorded of it."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import openai
import pytest

from gateway import ADD, anthropic_at, assert_exact, gateway, openai_at, openai_client
from playing import call
from toolyard.gateway.server import RunningGateway
from toolyard.records.trajectory import Trajectory

ADDS = call("add", {"a": 20, "b": 22})


def say(prompt: str) -> str:
    """A model that calls `add` once, if it is offered, and then says the result."""
    _, answered, result = prompt.rpartition("<|im_start|>tool\n")
    if answered:
        return f"The sum is {result.partition('<|im_end|>')[0]}."
    return f"Let me add. {ADDS}" if '"add"' in prompt else "Hello!"


async def end(running: RunningGateway, session: str = "s", **said: Any) -> Any:
    async with httpx2.AsyncClient(base_url=running.url) as client:
        answer = await client.post(f"/sessions/{session}/end", json=said)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def tool_loop(client: openai.AsyncOpenAI, messages: list[Any], stream: bool) -> list[Any]:
    """An agent as everybody writes it."""
    for _ in range(3):
        if stream:
            async with client.chat.completions.stream(model="gpt-9", messages=messages, tools=[ADD]) as events:
                message = (await events.get_final_completion()).choices[0].message
        else:
            answer = await client.chat.completions.create(model="gpt-9", messages=messages, tools=[ADD])
            message = answer.choices[0].message
        messages = [*messages, message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"})]
        if not message.tool_calls:
            return messages
        for made in message.tool_calls:
            arguments = json.loads(made.function.arguments)
            result = str(arguments["a"] + arguments["b"])
            messages.append({"role": "tool", "tool_call_id": made.id, "content": result})
    raise AssertionError(messages)


def assert_one_branch_with_a_call(ended: list[Trajectory]) -> None:
    assert_exact(ended)
    (branch,) = ended
    assert [message.role for message in branch.messages] == ["user", "assistant", "tool", "assistant"]
    assert branch.messages[-1].content == "The sum is 42."
    assert [[record.outcome for record in turn.tool_calls] for turn in branch.turns] == [["ok"], []]
    assert branch.output.count("<|im_start|>assistant") == 1  # the prompt ends with the other


@pytest.mark.parametrize("stream", [False, True])
async def test_the_openai_sdk_calls_tools_and_leaves_one_exact_branch(stream: bool) -> None:
    async with gateway(say) as (running, ended):
        await tool_loop(openai_at(running), [{"role": "user", "content": "20 + 22?"}], stream)
        await end(running, score=1.0)
    assert_one_branch_with_a_call(ended)
    assert ended[0].score == 1.0
    assert ended[0].rewards == {"final": 1.0}


@pytest.mark.parametrize("stream", [False, True])
async def test_the_anthropic_sdk_calls_tools_and_leaves_one_exact_branch(stream: bool) -> None:
    function = ADD["function"]
    tools: Any = [{"name": "add", "description": function["description"], "input_schema": function["parameters"]}]
    messages: list[Any] = [{"role": "user", "content": "20 + 22?"}]
    async with gateway(say) as (running, ended):
        client = anthropic_at(running)
        for _ in range(3):
            if stream:
                async with client.messages.stream(
                    model="claude", max_tokens=500, messages=messages, tools=tools
                ) as events:
                    message = await events.get_final_message()
            else:
                message = await client.messages.create(model="claude", max_tokens=500, messages=messages, tools=tools)
            messages.append({"role": "assistant", "content": message.content})
            if message.stop_reason != "tool_use":
                break
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": str(block.input["a"] + block.input["b"])}
                for block in message.content
                if block.type == "tool_use"
            ]
            messages.append({"role": "user", "content": results})
        assert (await client.messages.count_tokens(model="claude", messages=messages[:1])).input_tokens > 10
        await end(running)
    assert_one_branch_with_a_call(ended)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_agent_framework_runs_unmodified(stream: bool) -> None:
    """The OpenAI Agents SDK, which uses the Responses API."""
    import agents

    agents.set_tracing_disabled(disabled=True)

    @agents.function_tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    async with gateway(say) as (running, ended):
        model = agents.OpenAIResponsesModel(model="gpt-9", openai_client=openai_at(running))
        agent = agents.Agent(name="adder", instructions="Add.", tools=[add], model=model)
        if stream:
            run = agents.Runner.run_streamed(agent, "20 + 22?")
            async for _ in run.stream_events():
                pass
        else:
            run = await agents.Runner.run(agent, "20 + 22?")
        assert run.final_output == "The sum is 42."
        await end(running)
    assert_exact(ended)
    (branch,) = ended
    assert [message.role for message in branch.messages] == ["system", "user", "assistant", "tool", "assistant"]


async def test_a_conversation_is_continued_by_the_id_of_a_response() -> None:
    async with gateway(say) as (running, ended):
        client = openai_at(running)
        first = await client.responses.create(model="m", input="Hi", instructions="Be kind.")
        await client.responses.create(model="m", input="And?", instructions="Be kind.", previous_response_id=first.id)
        with pytest.raises(openai.BadRequestError, match="no response"):
            await client.responses.create(model="m", input="And?", previous_response_id="resp_unknown")
        await end(running)
    assert_exact(ended)
    (branch,) = ended
    assert [message.role for message in branch.messages] == ["system", "user", "assistant", "user", "assistant"]


async def test_an_agent_that_compacts_its_history_leaves_two_branches() -> None:
    async with gateway(say) as (running, ended):
        client = openai_at(running)
        said = await tool_loop(client, [{"role": "user", "content": "20 + 22?"}], stream=False)
        summary = f"So far: {said[-1]['content']} Go on."
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": summary}])
        await end(running, score=0.5)
    assert_exact(ended)
    before, after = ended
    assert [len(branch.turns) for branch in ended] == [2, 1]
    assert [branch.request_id for branch in ended] == ["s-branch-0", "s"]  # the main branch is where it ended
    assert [branch.score for branch in ended] == [0.5, 0.5]
    assert "why" not in before.metrics["branch"]
    assert after.metrics["branch"]["why"] == "it contains no answer of this session"


async def test_a_sub_agent_is_a_branch_of_the_same_session() -> None:
    async with gateway(say) as (running, ended):
        client, helper = openai_at(running), anthropic_at(running)
        question: Any = {"role": "user", "content": "Ask the helper."}
        first = await client.chat.completions.create(model="m", messages=[question])
        told = await helper.messages.create(
            model="m", max_tokens=50, system="You help.", messages=[{"role": "user", "content": "Help!"}]
        )
        answered: Any = {"role": "assistant", "content": first.choices[0].message.content}
        helped: Any = {"role": "user", "content": f"The helper says {told.content[0].text}"}
        await client.chat.completions.create(model="m", messages=[question, answered, helped])
        await end(running)
    assert_exact(ended)
    helper_branch, main = ended
    assert [message.role for message in helper_branch.messages] == ["system", "user", "assistant"]
    assert [message.role for message in main.messages] == ["user", "assistant", "user", "assistant"]


async def test_an_edited_history_forks_where_it_was_edited() -> None:
    async with gateway(say) as (running, ended):
        client = openai_at(running)
        first: list[Any] = [{"role": "user", "content": "One"}]
        answer = (await client.chat.completions.create(model="m", messages=first)).choices[0].message.content
        known: list[Any] = [*first, {"role": "assistant", "content": answer}]
        for following in ("Two", "Two, edited"):
            await client.chat.completions.create(model="m", messages=[*known, {"role": "user", "content": following}])
        edited: list[Any] = [*first, {"role": "assistant", "content": "I never said this."}]
        await client.chat.completions.create(model="m", messages=[*edited, {"role": "user", "content": "Three"}])
        await end(running)
    assert_exact(ended)
    assert [len(branch.turns) for branch in ended] == [2, 2, 1]
    assert [branch.metrics["branch"]["shared_turns"] for branch in ended] == [0, 1, 0]
    first_turn = ended[0].turns[0].sampled
    assert ended[1].metrics["branch"]["shared_tokens"] == first_turn.end
    assert "message 1 (assistant) was not sampled here" in ended[2].metrics["branch"]["why"]
    assert ended[2].tokens.response_mask == [1] * len(ended[2].tokens.response_ids)  # what was edited is prompt


async def test_what_clients_change_of_a_message_without_a_meaning_is_the_same_message() -> None:
    async with gateway(lambda prompt: f" {ADDS} " if "<|im_start|>tool" not in prompt else "Done.") as (running, ended):
        client = openai_at(running)
        question: Any = {"role": "user", "content": "Add."}
        answer = await client.chat.completions.create(model="m", messages=[question], tools=[ADD])
        made = answer.choices[0].message.tool_calls[0]
        arguments = json.dumps(json.loads(made.function.arguments), indent=2)
        echoed: Any = {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": made.id, "type": "function", "function": {"name": "add", "arguments": arguments}}],
        }
        result: Any = {"role": "tool", "tool_call_id": made.id, "content": "42"}
        await client.chat.completions.create(model="m", messages=[question, echoed, result], tools=[ADD])
        await end(running)
    assert_exact(ended)
    assert [len(branch.turns) for branch in ended] == [2]


async def test_a_session_is_named_by_its_url_a_header_or_the_api_key() -> None:
    async with gateway(say) as (running, ended):
        ask = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
        base = f"{running.url}/v1"
        await openai_at(running, "by-url").chat.completions.create(**ask)
        named = openai_client(base, default_headers={"X-Toolyard-Session": "by-header"})
        await named.chat.completions.create(**ask)
        await openai_client(base, "by-key").chat.completions.create(**ask)
        assert sorted(session.id for session in running.sessions.open) == ["by-header", "by-key", "by-url"]
    assert sorted(one.request_id for one in ended) == ["by-header", "by-key", "by-url"]
    assert {(one.state, one.finish_reason) for one in ended} == {("FAILED", "aborted")}  # nobody ended them


async def test_with_tokens_a_key_names_both() -> None:
    async with gateway(say, tokens=("secret",)) as (running, _):
        ask = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
        base = f"{running.url}/v1"
        for key in ("secret", "secret/mine"):
            await openai_client(base, key).chat.completions.create(**ask)
        assert sorted(session.id for session in running.sessions.open) == ["default", "mine"]
        for url, key in ((base, "wrong"), (base, "wrong/mine"), (running.session_url("mine"), "wrong")):
            with pytest.raises(openai.AuthenticationError):
                await openai_client(url, key).chat.completions.create(**ask)
        async with httpx2.AsyncClient(base_url=running.url) as client:
            assert (await client.post("/sessions/mine/end", json={})).status_code == 401
            assert (await client.get("/healthz")).json() == {"status": "ok", "sessions": 2}


async def test_a_session_can_be_created_with_its_task_and_ended_with_rewards() -> None:
    async with gateway(say) as (running, ended), httpx2.AsyncClient(base_url=running.url) as client:
        asked = {"session": "a", "task": "t1", "sample": 3, "ground_truth": "42", "step": 7, "data_source": "mine"}
        created = await client.post("/sessions", json=asked)
        assert created.status_code == 201
        assert created.json()["path"] == "/s/a/v1"
        assert (await client.post("/sessions", json=asked)).status_code == 409
        await openai_at(running, "a").chat.completions.create(model="m", messages=[{"role": "user", "content": "Hi"}])
        status = (await client.get("/sessions/a")).json()
        assert (status["turns"], status["branches"], status["task"]) == (1, 1, "t1")
        await end(running, "a", score=0.25, rewards={"quality": 0.25}, metadata={"note": "fine"})
        assert (await client.get("/sessions/a")).status_code == 403
    (branch,) = ended
    assert (branch.batch_data_id, branch.rollout_offset, branch.step, branch.data_source) == ("t1", 3, 7, "mine")
    assert (branch.ground_truth, branch.score, branch.rewards) == ("42", 0.25, {"quality": 0.25})
    assert branch.metrics["session"]["note"] == "fine"


async def test_plain_completions_continue_by_their_tokens() -> None:
    async with gateway(lambda prompt: "bc" if prompt.endswith("a") else "de") as (running, ended):
        client = openai_at(running)
        first = await client.completions.create(model="m", prompt="a", max_tokens=10, logprobs=0)
        assert first.choices[0].text == "bc"
        assert first.choices[0].logprobs.token_logprobs == [-0.5, -0.5, -0.5]  # and its end
        again = await client.completions.create(model="m", prompt="abc<|im_end|>d", max_tokens=1)
        assert again.choices[0].finish_reason == "length"
        await end(running)
    assert_exact(ended)
    assert [len(branch.turns) for branch in ended] == [2]


async def test_stop_texts_and_logprobs_are_what_clients_expect() -> None:
    async with gateway(lambda prompt: "one two three") as (running, ended):
        client = openai_at(running)
        question: Any = {"role": "user", "content": "Count."}
        answer = await client.chat.completions.create(model="m", messages=[question], stop=["two"], logprobs=True)
        choice = answer.choices[0]
        assert (choice.message.content, choice.finish_reason) == ("one ", "stop")
        assert "".join(token.token for token in choice.logprobs.content) == "one two"
        following: Any = [question, {"role": "assistant", "content": "one"}, {"role": "user", "content": "On."}]
        await client.chat.completions.create(model="m", messages=following)
        await end(running)
    assert_exact(ended)
    (branch,) = ended
    assert branch.turns[0].sampled.text == "one two"  # sampled, so it stays in the tokens


@pytest.mark.parametrize(
    "asked",
    [
        {"response_format": {"type": "json_object"}},
        {"tool_choice": "required", "tools": [ADD]},
        {"frequency_penalty": 0.5},
        {"messages": [{"role": "assistant", "content": "I"}]},
        {"messages": [{"role": "tool", "content": "x", "tool_call_id": "unknown"}]},
        {"messages": []},
        {"top_p": 0},
    ],
)
async def test_what_cannot_be_done_is_refused_and_nothing_is_recorded(asked: dict[str, Any]) -> None:
    async with gateway(say) as (running, _):
        client = openai_at(running)
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(
                **{"model": "m", "messages": [{"role": "user", "content": "Hi"}], **asked}
            )
        assert running.sessions.open[0].conversations.turns == []
