"""The format of a tokenizer's own chat template.

The whole template is rendered once, for the first prompt. From then on a conversation only grows: what has to stand
between a sampled turn and the next is read off the template, by rendering a conversation of two messages with marked
contents, and kept for every combination of roles. Growing costs one join and one `encode` of the new contents, however
long the conversation is.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from toolyard.chat.guard import Guard
from toolyard.chat.near_misses import with_near_misses
from toolyard.chat.protocol import TOOL_WRAPPER, CallSyntax, ChatFormat, Ids, ParsedTurn, Tokenizer, Tools
from toolyard.chat.syntax import syntax_of
from toolyard.chat.template.jinja2 import ChatTemplate
from toolyard.chat.template.messages import Adapter
from toolyard.chat.template.probe import PROBE_ID, called, probe, shared, syntax_of_calls
from toolyard.errors import ChatError, ConfigError
from toolyard.messages import JSON, Message

_USER: JSON = {"role": "user", "content": "Quokka"}
_SAID = "Wombat7Bilby"
_ARGUMENT = "Numbat5Dunnart"
_SLOT = re.compile(r"Nb(Co|Na|Id)(\d{3,})Pr")
"""Marks stand for contents, names and ids. They have nine letters and digits, the only ids that all templates take."""
_FIELDS = {"Co": "content", "Na": "name", "Id": "tool_call_id"}
_AWKWARD = (
    "",
    " ",
    " a",
    "a ",
    "\n\na\n",
    'a"b\\c',
    "é漢😀\t",
    "[1, 2]",
    '{"a": 1}',
    "12",
    "null",
    "<think>a</think>b",
)
_MOST_SHAPES = 256
"""Combinations of roles that are kept; parallel calls make many, a loop that never ends would make more."""

Shape = tuple[tuple[str, bool, bool, int], ...]
"""Of each new message: its role, whether it has a name and an id, and how many images."""


@dataclass(frozen=True, slots=True)
class _Tail:
    """What follows a sampled turn: `literals[0]`, the content of `slots[0]`, `literals[1]`, …

    What never changes, up to the last special token before the contents and from the first one behind them, is encoded
    once: no token reaches across a special one.
    """

    literals: tuple[str, ...]
    slots: tuple[tuple[int, str], ...]
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    def join(self, messages: Sequence[JSON]) -> str:
        parts = [self.literals[0]]
        for (index, field), literal in zip(self.slots, self.literals[1:], strict=True):
            parts += (messages[index][field], literal)
        return "".join(parts)


class TemplateFormat(ChatFormat):
    """Speaks through a chat template; calls are read and written by a `CallSyntax`.

    What the template cannot say is said with what it can: tools that it does not mention are introduced in the system
    message, calls that it does not write stand in the content, results that it does not take come from the user, in
    `tool_wrapper`, and a system message that it refuses is put before the first message of the user. Text that looks
    like special tokens stays text, in every field of every message.
    """

    reads_prompt = False

    def __init__(
        self,
        tokenizer: Tokenizer,
        syntax: CallSyntax,
        *,
        template: str | None = None,
        without_tools: str | None = None,
        native: bool = True,
        tool_role: Literal["auto", "tool", "user"] = "auto",
        tool_wrapper: str = TOOL_WRAPPER,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """`template`: instead of the tokenizer's. `without_tools`: for conversations without tools, where the model has
        another template for them. `native`: whether the template writes calls as `syntax` does; if not,
        it is not asked to speak of tools and calls. `tool_role`: who says what a tool answered; "auto" is the tool,
        where the template has such a role. `tool_wrapper`: what stands around an answer that the user says, with {}.

        Raises:
            ConfigError: there is no template, or it is of no use.
        """
        source = template if template is not None else tokenizer.chat_template
        if source is None:
            raise ConfigError(f"the tokenizer of {tokenizer.name} has no chat template; give one with chat_template")
        if tool_wrapper.count("{}") != 1:
            raise ConfigError(f"tool_wrapper needs {{}} once, where the answer of the tool goes: {tool_wrapper!r}")
        self._plain = None
        if without_tools is not None and without_tools != source:
            kept: Any = {"native": native, "tool_role": tool_role, "tool_wrapper": tool_wrapper}
            kept["template_kwargs"] = template_kwargs
            self._plain = TemplateFormat(tokenizer, syntax, template=without_tools, **kept)
        self.syntax = syntax
        self.name = f"template:{syntax.name}"
        self.stop = tuple(syntax.stop)
        self._tokenizer = tokenizer
        self._guard = Guard(tokenizer)
        self._template = _open(tokenizer, source, template_kwargs)
        self.traits = probe(self._template, name=tokenizer.name)
        if tool_role == "tool" and not self.traits.tool_role:
            raise ConfigError(f"the chat template of {tokenizer.name} does not take messages of tools: tool_role: user")
        as_user = tool_role == "user" or not self.traits.tool_role
        self._adapter = Adapter(self.traits, syntax, native, as_user, tool_wrapper)
        self._tails: dict[Shape, tuple[_Tail | None, int]] = {}
        self._special_ids = frozenset(tokenizer.special_tokens.values())
        specials = sorted(filter(None, tokenizer.special_tokens), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, specials)) or "(?!)")
        self._calls_natively = native and self.traits.calls and self.traits.tool_role and not as_user
        reads = syntax_of_calls(self._template, self.traits)
        self._reader = syntax_of(reads) if reads else None
        self._inside = self._inside_a_turn()
        self._ended = self._after(_SAID, [self._spoken([])], prompt=False)
        following = self._after(_SAID, [self._spoken([]), _USER], prompt=True)
        self._close, self._stop = self._end_between(self._ended, following)
        self.rewritten_end = "" if self._close.endswith(self._stop) else self._close
        """What the template writes in the history instead of the token that ends a turn; "" if it is that token."""
        self.stop_token_ids = self._find_stops()
        self.special_ids = self._special_ids
        self.vocab_size = tokenizer.vocab_size
        self._stops = frozenset(self.stop_token_ids)
        self._prove_stops()
        opening = self._template.render([_USER], prompt=True)
        # A turn may begin within the reasoning that the prompt opens.
        tags = [tag for tag, _ in getattr(syntax, "thinking", [("<think>", "</think>")])]
        self._opened = next((tag for tag in tags if opening.rstrip().endswith(tag)), "")
        spoken = self._template.render([_USER, self._spoken([])], prompt=False).partition(_SAID)[0]
        lead = spoken.removeprefix(opening)
        self._lead = lead if lead.isspace() else ""
        self.image_token_id = self._find_image_token()

    # The contract ----------------------------------------------------------------------------------------------------

    def render(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        if not messages:
            raise ChatError("a conversation without messages cannot be rendered")
        if self._plain is not None and not tools:
            return self._plain.render(messages)
        self._refuse_images(messages)
        # Hidden first: tokens that the syntax itself writes, around calls in the history, are meant to be tokens.
        hidden = [self._guard.hide_message(message) for message in messages]
        said, shown = self._adapted(hidden, self._guard.hide_tools(tools))
        return self._guard.encode(self._template.render(said, tools=shown, prompt=True))

    def told(self, messages: Sequence[Message], tools: Tools = ()) -> tuple[str, list[JSON], list[JSON] | None, JSON]:
        """What `render` gives to a template: its source, messages, tools, and other variables. For comparing it with
        what others make of that."""
        if self._plain is not None and not tools:
            return self._plain.told(messages)
        said, shown = self._adapted(messages, tools)
        return self._template.source, said, shown or self._template.no_tools, self._template.variables

    def _adapted(self, messages: Sequence[Message], tools: Tools) -> tuple[list[JSON], list[JSON] | None]:
        shown = [tool.model_dump(mode="json") for tool in tools] if tools and self._adapter.shows_tools else None
        return self._adapter.conversation(messages, tools), shown

    def extension(
        self, prompt_ids: Ids, sampled_ids: Ids, new_messages: Sequence[Message], tools: Tools = ()
    ) -> list[int]:
        if self._plain is not None and not tools:
            return self._plain.extension(prompt_ids, sampled_ids, new_messages)
        last = sampled_ids[-1] if len(sampled_ids) else None
        ids, closing = self._tail(new_messages)
        if last not in self._stops:
            return ids
        if closing:
            return ids[closing:]
        # Nothing ends a turn but the next one, whose first token is what the model stopped at.
        return ids[1:] if ids[:1] == [last] else ids

    def parse(self, sampled_ids: Ids, tools: Tools = ()) -> ParsedTurn:
        end = len(sampled_ids)
        while end and sampled_ids[end - 1] in self._stops:
            end -= 1
        # A space that the template puts before what is said is no part of it.
        text = self._tokenizer.decode(sampled_ids[:end]).removeprefix(self._lead)
        turn = self.syntax.parse(self._opened + text, tools)
        return with_near_misses(turn, tools, lambda call: self.syntax.write([call]))

    def unoffered(self, tools: Tools) -> dict[str, str]:
        # Those that the template does not show are introduced by the syntax.
        return self.syntax.unoffered(tools)

    def decode(self, ids: Ids) -> str:
        return self._tokenizer.decode(ids)

    def count(self, text: str) -> int:
        return len(self._guard.encode(self._guard.hide(text)))

    # What follows a turn ---------------------------------------------------------------------------------------------

    def _tail(self, messages: Sequence[Message]) -> tuple[list[int], int]:
        """The ids behind a turn, and how many of them close it."""
        for message in messages:
            if message.role == "assistant":
                raise ChatError(
                    "a conversation is extended by what tools and users say; the assistant's turn is sampled"
                )
        self._refuse_images(messages)
        said = self._adapter.following([self._guard.hide_message(message) for message in messages])
        shape = tuple((one["role"], "name" in one, "tool_call_id" in one, one.get("images", 0)) for one in said)
        if shape not in self._tails:
            if len(self._tails) >= _MOST_SHAPES:
                self._tails.clear()
            self._tails[shape] = self._derive(shape)
        tail, closing = self._tails[shape]
        if tail is None:
            return self._guard.encode(self._rendered_tail(said)[0]), closing
        return [*tail.before, *self._guard.encode(tail.join(said)), *tail.after], closing

    def _derive(self, shape: Shape) -> tuple[_Tail | None, int]:
        """None if the contents do not come out as they went in (trimmed, quoted, …): then it is rendered every time.
        And how many tokens close the turn."""
        text, close = self._rendered_tail(_marked(shape))
        closing = len(self._guard.encode(close))
        slots = tuple((int(match[2]), _FIELDS[match[1]]) for match in _SLOT.finditer(text))
        for index, (role, has_name, _, _) in enumerate(shape):
            if (index, "name") in slots and not has_name:
                raise ChatError(
                    f"the chat template of {self._tokenizer.name} names the tool that answered, and this answer does "
                    "not say which it was"
                )
            if (index, "content") not in slots:
                raise ChatError(
                    f"the chat template of {self._tokenizer.name} leaves out what {role!r} says in this place"
                )
        tail = _Tail(tuple(_SLOT.split(text)[::3]), slots)
        for awkward in _AWKWARD:
            said = [{**one, "content": awkward} for one in _marked(shape)]
            if tail.join(said) != self._rendered_tail(said)[0]:
                return None, closing
        return self._with_fixed_ends(tail, shape), closing

    def _with_fixed_ends(self, tail: _Tail, shape: Shape) -> _Tail:
        """With its ends encoded, unless this tokenizer does not split at its special tokens."""
        *_, opening = [None, *self._special.finditer(tail.literals[0])]
        closing = self._special.search(tail.literals[-1])
        if opening is None or closing is None:
            return tail
        first, last = tail.literals[0][opening.start() :], tail.literals[-1][: closing.end()]
        before = self._guard.encode(tail.literals[0][: opening.end()])[:-1]
        after = self._guard.encode(tail.literals[-1][closing.start() :])[1:]
        shorter = _Tail((first, *tail.literals[1:-1], last), tail.slots, tuple(before), tuple(after))
        for awkward in (*_AWKWARD, self._guard.hide(f"a{closing[0]}b")):
            said = [{**one, "content": awkward} for one in _marked(shape)]
            live = self._guard.encode(shorter.join(said))
            if [*before, *live, *after] != self._guard.encode(tail.join(said)):
                return tail
        return shorter

    def _rendered_tail(self, said: Sequence[JSON]) -> tuple[str, str]:
        """From the end of what the assistant said to where it begins to speak again; and what of it closes its turn."""
        answers = [one for one in said if one["role"] == "tool"]
        if answers and (self._calls_natively or self.traits.tool_needs_calls):
            try:
                return self._tail_of_calls(said, answers)
            except ChatError:
                if self.traits.tool_needs_calls:
                    raise
        tail = self._after(_SAID, [self._spoken([]), *said], prompt=True)
        return tail, self._close if tail.startswith(self._close) else ""

    def _tail_of_calls(self, said: Sequence[JSON], answers: Sequence[JSON]) -> tuple[str, str]:
        """The same behind a turn that calls. The calls are sampled, so they are taken off again, as they are read."""
        spoken = self._spoken(answers)
        tail = self._template.render([_USER, spoken, *said], prompt=True).rpartition(_ARGUMENT)
        ended = self._template.render([_USER, spoken], prompt=False).rpartition(_ARGUMENT)
        begin = self._template.render([_USER], prompt=False)
        turn = (tail[0] + _ARGUMENT)[len(shared(begin, tail[0])) :]
        end = self._end_of_calls(turn + tail[2], len(turn)) - len(turn)
        if end < 0:
            raise ChatError(
                f"the chat template of {self._tokenizer.name} writes calls differently before their results"
            )
        behind, turn_end = tail[2][end:], self._reader.turn_end if self._reader else ""
        if turn_end and tail[2][:end].endswith(turn_end):
            return turn_end + behind, turn_end
        if not ended[2].startswith(tail[2][:end]):
            return behind, ""
        close, stop = self._end_between(ended[2][end:], behind)
        # What begins turns does not end one, though it stand behind calls.
        begins = stop != self._stop and stop in self._template.render([_USER], prompt=True)
        return behind, "" if begins else close

    def _end_of_calls(self, text: str, inside: int) -> int:
        """Where the call ends that holds what is at `inside`, and the section around it; -1 if none is read there."""
        end = -1
        for region in self._reader.regions(text, 0, ()) if self._reader else ():
            closes = text[region.start : region.end] in getattr(self._reader, "section", ())
            if region.start < inside < region.end or (end >= 0 and closes and not text[end : region.start].strip()):
                end = region.end
        return end

    def _spoken(self, answers: Sequence[JSON]) -> JSON:
        if not answers:
            return {"role": "assistant", "content": _SAID}
        # Templates take the name of the tool that answered from the call, so the calls are of the answers' names.
        names = [one.get("name") or f"NbNa{index:03}Pr" for index, one in enumerate(answers)]
        ids = [one.get("tool_call_id") or PROBE_ID[:-1] + str(index) for index, one in enumerate(answers)]
        as_text = self.traits.text_arguments
        return called(*ids, names=names, arguments={"depth": _ARGUMENT}, as_text=as_text)

    def _after(self, word: str, said: Sequence[JSON], *, prompt: bool) -> str:
        text = self._template.render([_USER, *said], prompt=prompt)
        _, found, after = text.partition(word)
        if not found or word in after:
            raise ChatError(f"the chat template of {self._tokenizer.name} does not write what the assistant says once")
        return after

    # How a turn ends -------------------------------------------------------------------------------------------------

    def _end_between(self, ended: str, following: str) -> tuple[str, str]:
        """What the template puts behind a turn when somebody else speaks next, up to the special token that ends it;
        and the token that ends it where nobody does: there are templates that write another in the history."""
        for found in self._special.finditer(following):
            if not ended.startswith(following[: found.end()]):
                break
            if found[0] not in self._inside:
                return following[: found.end()], found[0]
        stop, close = self._special.search(ended), self._special.search(following)
        if stop and close and stop[0] != close[0] and ended[: stop.start()] == following[: close.start()]:
            return following[: close.end()], stop[0]
        return "", ""

    def _inside_a_turn(self) -> frozenset[str]:
        """The special tokens within a turn that thinks and calls."""
        if not self._calls_natively:
            return frozenset()
        said = self._spoken([{}])
        if self.traits.reasoning:
            said[self.traits.reasoning] = _SAID
        try:
            before = self._template.render([_USER], prompt=True)
            text = self._template.render([_USER, said], prompt=False)
        except ChatError:
            return frozenset()
        within = text[len(shared(before, text)) :].rpartition(_ARGUMENT)[0]
        return frozenset(self._special.findall(within))

    def _find_stops(self) -> tuple[int, ...]:
        stops = self._guard.encode(self._stop)[-1:]
        if not stops:
            stops = self._guard.encode(self._rendered_tail([_USER])[0])[:1]
        if not self._adapter.tool_as_user:
            text, close = self._rendered_tail(_marked((("tool", True, True, 0),)))
            stops += self._guard.encode(close)[-1:] if close else self._guard.encode(text)[:1]
        stops = [number for number in stops if number in self._special_ids]
        if self._tokenizer.eos_token_id is not None:
            stops.append(self._tokenizer.eos_token_id)
        stops += getattr(self._tokenizer, "stop_token_ids", ())
        if not stops:
            raise ConfigError(
                f"no token ends a turn: the chat template of {self._tokenizer.name} writes none after what the "
                "assistant says, and its tokenizer names no eos_token"
            )
        return tuple(dict.fromkeys(stops))

    def _find_image_token(self) -> int | None:
        """The token that the template writes once for each image that a tool returns."""
        role = "user" if self._adapter.tool_as_user else "tool"
        counts: list[Counter[int]] = []
        try:
            for images in range(3):
                text, _ = self._rendered_tail(_marked(((role, True, True, images),)))
                if "NbCo000Pr" not in text:
                    return None
                counts.append(Counter(self._guard.encode(text)))
        except (ChatError, KeyError):
            return None
        found = {
            text: number
            for text, number in self._tokenizer.special_tokens.items()
            if [count[number] for count in counts] == [0, 1, 2]
        }
        # Qwen's stands between two others that mark its begin and end.
        named = [number for text, number in found.items() if "image" in text.lower() or "img" in text.lower()]
        return named[0] if len(named) == 1 else next(iter(found.values())) if len(found) == 1 else None

    def _refuse_images(self, messages: Sequence[Message]) -> None:
        if self.image_token_id is None and any(message.images for message in messages):
            raise ChatError(f"the chat template of {self._tokenizer.name} has no place for images")

    def _prove_stops(self) -> None:
        """Raises ConfigError if a stop token stands within a turn that thinks and calls: the turn would end there."""
        for token in self._inside:
            if self._tokenizer.special_tokens[token] in self._stops:
                raise ConfigError(
                    f"{token!r} ends turns in the chat template of {self._tokenizer.name}, and also stands within "
                    "turns, before their calls: no token is known to end a turn with calls"
                )


def native_syntax(
    tokenizer: Tokenizer, source: str, template_kwargs: Mapping[str, Any] | None = None
) -> tuple[str | None, bool]:
    """The name of the syntax in which a template calls, if there is one; and whether it knows of tools at all.

    Raises:
        ConfigError: the template is of no use.
    """
    template = _open(tokenizer, source, template_kwargs)
    traits = probe(template, name=tokenizer.name)
    return syntax_of_calls(template, traits), traits.tools or traits.calls


def _open(tokenizer: Tokenizer, source: str, template_kwargs: Mapping[str, Any] | None) -> ChatTemplate:
    variables = {**getattr(tokenizer, "template_variables", {}), **(template_kwargs or {})}
    return ChatTemplate(source, variables, name=tokenizer.name)


def _marked(shape: Shape) -> list[JSON]:
    said: list[JSON] = []
    for index, (role, has_name, has_id, images) in enumerate(shape):
        one: JSON = {"role": role, "content": f"NbCo{index:03}Pr"}
        if has_name:
            one["name"] = f"NbNa{index:03}Pr"
        if has_id:
            one["tool_call_id"] = f"NbId{index:03}Pr"
        if images:
            one["images"] = images
        said.append(one)
    return said
