"""What holds for the tree of conversations, whatever an agent makes of the messages that it got."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from playing import CHAT, END, SCHEMA, TOKENIZER, call
from toolyard.engines.protocol import Finish, Generation
from toolyard.gateway.config import SessionLimits
from toolyard.gateway.conversation import Conversations, Place, SampledTurn, call_ids
from toolyard.gateway.records import trajectories_of
from toolyard.gateway.sessions import Session, SessionEnd
from toolyard.messages import Message, OpenAIFunctionToolSchema, ToolCall
from toolyard.records.audit import audit
from toolyard.turns import EngineAnswer

TOOLS = (OpenAIFunctionToolSchema.model_validate(SCHEMA),)
T = TypeVar("T")
END_ID = TOKENIZER.added_tokens[END]
TEXTS = st.text(st.sampled_from('ab é😀\n \t<>"{}\\'), max_size=12) | st.sampled_from(
    ["<|im_end|>", "<|im_start|>user\nSay 1.", "<tool_call>", "</tool_call>", "<think>", "\ud800", ""]
)
ARGUMENTS = st.dictionaries(st.sampled_from(["text", "é", "n"]), st.integers() | st.booleans() | TEXTS, max_size=3)


@dataclass(frozen=True)
class Held:
    """A conversation as an agent holds it: it ends with the answer of a turn."""

    messages: tuple[Message, ...]
    turn: SampledTurn


class Simulation:
    """A session, an engine that says what is drawn, and an agent that keeps all its conversations."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        self.conversations = Conversations(CHAT)
        self.session = Session("s", self.conversations, SessionLimits())
        self.held: list[Held] = []
        self.asked: list[tuple[tuple[Message, ...], Place]] = []

    def draw(self, strategy: st.SearchStrategy[T]) -> T:
        return self.data.draw(strategy)

    def chosen(self, some: Sequence[T]) -> T:
        """By its index: the others would fill the report of a failure."""
        return some[self.draw(st.integers(0, len(some) - 1))]

    # The engine ---------------------------------------------------------------------------------------------------

    def sample(self, messages: tuple[Message, ...], place: Place) -> None:
        """Sample a turn. Its text has its number: no two are equal, so there is one right place to continue."""
        number = len(self.conversations.turns)
        calls = "".join(call("echo", arguments) for arguments in self.draw(st.lists(ARGUMENTS, max_size=3)))
        broken = self.draw(st.sampled_from(["", "", "<tool_call>\n{not json\n</tool_call>"]))
        thought = self.draw(st.sampled_from(["", "", "<think>\nhm\n</think>\n"]))
        text = f"{thought}Turn {number}. {self.draw(TEXTS)}{calls}{broken}"
        ids = [one for one in TOKENIZER.encode(text) if one != END_ID]
        finish = self.draw(st.sampled_from([Finish.STOP, Finish.STOP, Finish.LENGTH]))
        if finish is Finish.STOP:
            ids.append(END_ID)
        parsed = CHAT.parse(ids, TOOLS)
        content = "\n".join(filter(None, (parsed.text, *(bad.text for bad in parsed.malformed))))
        turn = SampledTurn(
            number=number,
            engine_id=f"e{number}",
            parent=place.parent,
            opening=place.opening,
            given=place.given,
            given_ids=place.given_ids,
            answer=EngineAnswer(Generation(ids, [-0.5] * len(ids), finish), tokens=len(ids)),
            parsed=parsed,
            message=Message("assistant", content, parsed.reasoning, call_ids(number, parsed)),
            stopped_by=END_ID if finish is Finish.STOP else "",
            started=float(number),
            seconds=0.5,
            delivered=True,
        )
        self.conversations.add(place, turn)
        self.held.append(Held((*messages, turn.message), turn))

    # The agent ----------------------------------------------------------------------------------------------------

    def ask(self, messages: Sequence[Message], expected: SampledTurn | None) -> None:
        """Ask, and check where the question was placed. `expected`: the turn that it continues."""
        sent = tuple(messages)
        place = self.conversations.place(sent, TOOLS)
        self.check(place, expected)
        self.asked.append((sent, place))
        self.sample(sent, place)

    def check(self, place: Place, expected: SampledTurn | None) -> None:
        assert place.parent is expected
        if expected is None:
            assert bool(place.opening.why) == bool(self.conversations.turns)
            assert place.prompt_ids == place.opening.prompt_ids
            assert (place.given, place.given_ids) == ((), [])
            return
        assert place.opening is expected.opening
        assert place.prompt_ids == [*expected.ids, *place.given_ids]
        assert expected.ids[-len(expected.answer.generation.token_ids) :] == expected.answer.generation.token_ids

    def begin(self) -> None:
        system = [Message("system", self.draw(TEXTS))] if self.draw(st.booleans()) else []
        self.ask([*system, Message("user", f"Opening {len(self.asked)}: {self.draw(TEXTS)}")], None)

    def go_on(self) -> None:
        held = self.chosen(self.held)
        self.ask([*map(self.mangled, held.messages), *self.following(held.turn)], held.turn)

    def repeat(self) -> None:
        """The same request again: it has the same place, and may get another answer."""
        messages, place = self.chosen(self.asked)
        # What was not sampled here is rendered as it was sent: an opening is the same only to the letter.
        sent = messages if place.parent is None else tuple(map(self.mangled, messages))
        again = self.conversations.place(sent, TOOLS)
        assert again.parent is place.parent
        assert (again.prompt_ids, again.history) == (place.prompt_ids, place.history)
        self.sample(sent, again)

    def edit(self) -> None:
        """One message of the assistant is changed: nothing after it is known."""
        held = self.chosen(self.held)
        spoken = [at for at, message in enumerate(held.messages) if message.role == "assistant"]
        at = self.draw(st.sampled_from(spoken))
        changed = list(held.messages)
        changed[at] = replace(changed[at], content=f"Edited {len(self.asked)}. {changed[at].content}")
        self.ask([*changed, *self.following(held.turn), Message("user", "And?")], None)

    def compact(self) -> None:
        """The history is replaced by a summary, or loses its beginning."""
        held = self.chosen(self.held)
        summary = Message("user", f"Summary {len(self.asked)}: {self.draw(TEXTS)}")
        users = [at for at, message in enumerate(held.messages) if message.role == "user"]
        kept = held.messages[self.draw(st.sampled_from(users)) :] if self.draw(st.booleans()) else ()
        after = [*self.following(held.turn), Message("user", "And?")] if kept else []
        self.ask([summary, *kept, *after], None)

    def following(self, turn: SampledTurn) -> list[Message]:
        """The results of its calls, in any order, and perhaps a question."""
        order = self.draw(st.permutations(turn.message.tool_calls))
        results = [Message("tool", self.draw(TEXTS), tool_call_id=made.id) for made in order]
        asks = not results or self.draw(st.booleans())
        return [*results, *([Message("user", self.draw(TEXTS))] if asks else [])]

    def mangled(self, message: Message) -> Message:
        """The message as frameworks send it back: the same, but not to the letter."""
        if message.role != "assistant" or not self.draw(st.booleans()):
            return message
        content = self.draw(st.sampled_from([message.content, message.content.strip(), f"\n {message.content}\t"]))
        calls = tuple(ToolCall(made.id, made.name, self.dumped(made.arguments)) for made in message.tool_calls)
        return Message("assistant", content, self.draw(st.sampled_from([None, message.reasoning_content])), calls)

    def dumped(self, arguments: str) -> str:
        found = json.loads(arguments)
        ordered = dict(self.draw(st.permutations(list(found.items()))))
        indent, ascii_only = self.draw(st.sampled_from([None, 2])), self.draw(st.booleans())
        separators = self.draw(st.sampled_from([(",", ":"), (", ", ": ")]))
        return json.dumps(ordered, indent=indent, ensure_ascii=ascii_only, separators=separators)


@given(st.data())
def test_every_branch_of_any_agent_is_exact(data: st.DataObject):
    simulation = Simulation(data)
    simulation.begin()
    acts = ["go_on", "go_on", "repeat", "edit", "compact", "begin"]
    for act in data.draw(st.lists(st.sampled_from(acts), max_size=8)):
        getattr(simulation, act)()
    turns = simulation.conversations.turns
    trajectories = trajectories_of(simulation.session, SessionEnd.STOP, CHAT)
    assert len(trajectories) == sum(not turn.children for turn in turns)
    for one in trajectories:
        assert one.failure is None
        assert audit(one, TOKENIZER.decode, TOKENIZER.vocab_size) == []
    # Every sampled token is trained once, if shared turns are: nothing is lost, nothing is twice.
    fresh = [turn for one in trajectories for turn in one.turns[one.metrics["branch"]["shared_turns"] :]]
    assert len(fresh) == len(turns)
    assert sorted(turn.sampled.text for turn in fresh) == sorted(
        CHAT.decode(turn.answer.generation.token_ids) for turn in turns
    )


@given(st.data())
def test_turns_that_nobody_has_got_are_in_no_branch_of_their_own(data: st.DataObject):
    simulation = Simulation(data)
    simulation.begin()
    for act in data.draw(st.lists(st.sampled_from(["go_on", "go_on", "begin"]), max_size=6)):
        getattr(simulation, act)()
    for turn in simulation.conversations.turns:
        turn.delivered = data.draw(st.booleans())
    leaves = simulation.conversations.leaves()
    assert all(leaf.delivered for leaf in leaves)
    on_a_branch = {turn.number for leaf in leaves for turn in leaf.path}
    assert {turn.number for turn in simulation.conversations.turns if turn.delivered} <= on_a_branch
    for one in trajectories_of(simulation.session, SessionEnd.STOP, CHAT):
        assert audit(one, TOKENIZER.decode) == []


@pytest.mark.parametrize("changed", ["role", "tools", "system", "name of the tool", "id of the call"])
def test_what_does_not_continue_says_why(changed: str):
    simulation = Conversations(CHAT)
    opening = (Message("system", "Be brief."), Message("user", "hi"))
    place = simulation.place(opening, TOOLS)
    made = ToolCall("t00000c00", "echo", "{}")
    ids = TOKENIZER.encode("Let me see. " + call("echo", {}) + END)
    answer = EngineAnswer(Generation(ids, None, Finish.STOP))
    parsed = CHAT.parse(ids, TOOLS)
    message = Message("assistant", "Let me see.", tool_calls=(made,))
    turn = SampledTurn(0, "e", None, place.opening, (), [], answer, parsed, message, END_ID, 0.0, 0.0, True)
    simulation.add(place, turn)
    result = Message("tool", "3", tool_call_id=made.id)
    assert simulation.place((*opening, message, result), TOOLS).parent is turn
    tools, system, said = TOOLS, opening[0], message
    match changed:
        case "role":
            system = replace(system, role="user")
        case "tools":
            tools = ()
        case "system":
            system = replace(system, content="Be brief!")
        case "name of the tool":
            said = replace(message, tool_calls=(replace(made, name="other"),))
        case _:
            said = replace(message, tool_calls=(replace(made, id="other"),))
            result = replace(result, tool_call_id="other")
    found = simulation.place((system, opening[1], said, result), tools)
    assert found.parent is None
    assert found.opening.why == "message 2 (assistant) was not sampled here as it is now"


def test_an_opening_that_ends_with_the_result_of_a_call_passes_the_audit():
    """An agent that drops the beginning of its history in the middle of its work."""
    conversations = Conversations(CHAT)
    made = ToolCall("call-1", "echo", "{}")
    messages = (Message("user", "Summary."), Message("assistant", "", tool_calls=(made,)))
    place = conversations.place((*messages, Message("tool", "3", tool_call_id=made.id)), TOOLS)
    ids = TOKENIZER.encode(f"It is 3.{END}")
    answer = EngineAnswer(Generation(ids, None, Finish.STOP))
    said = Message("assistant", "It is 3.")
    turn = SampledTurn(0, "e", None, place.opening, (), [], answer, CHAT.parse(ids), said, END_ID, 0.0, 0.0, True)
    conversations.add(place, turn)
    (one,) = trajectories_of(Session("s", conversations, SessionLimits()), SessionEnd.STOP, CHAT)
    assert one.failure is None
