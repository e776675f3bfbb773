"""The chat format of a tokenizer's own chat template.

The whole template is rendered once, for the first prompt. After that a conversation only grows: what goes between a
sampled turn and the next is found by rendering a conversation of two messages with marked contents, and cached for
every combination of roles. Extending then costs one join and one `encode` of the new contents, however long the
conversation is.
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
_MARKED_CONTENT = "Wombat7Bilby"
_ARGUMENT = "Numbat5Dunnart"
_SLOT = re.compile(r"Nb(Co|Na|Id)(\d{3,})Pr")
"""Marks for contents, names and ids. They have nine letters and digits, the only form of ids all templates accept."""
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
"""Maximum cached combinations of roles; parallel calls make many, an endless loop would make more."""

Shape = tuple[tuple[str, bool, bool, int], ...]
"""For each new message: its role, whether it has a name and an id, and its number of images."""


@dataclass(frozen=True, slots=True)
class _Tail:
    """What follows a sampled turn: `literals[0]`, the content of `slots[0]`, `literals[1]`, …

    The fixed ends, up to the last special token before the contents and from the first one after them, are encoded
    once: no token spans a special token.
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
    """Renders with a chat template; a `CallSyntax` parses and writes calls.

    What the template does not support is expressed differently: tools it does not mention are introduced in the system
    message, calls it does not write go into the content, results it does not accept come from the user, in
    `tool_wrapper`, and a system message it refuses goes before the first user message. Text that looks like special
    tokens stays text, in every field of every message.
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
        """`template`: replaces the tokenizer's. `without_tools`: the model's other template, for conversations without
        tools. `native`: whether the template writes calls as `syntax` does; if not, it is not given tools and calls.
        `tool_role`: the role of tool results; "auto" is tool if the template has that role. `tool_wrapper`: wraps a
        result given in the user's role, with {} for the result.

        Raises:
            ConfigError: there is no template, or it is unusable.
        """
        source = template if template is not None else tokenizer.chat_template
        if source is None:
            raise ConfigError(f"the tokenizer of {tokenizer.name} has no chat template; give one with chat_template")
        if tool_wrapper.count("{}") != 1:
            raise ConfigError(f"tool_wrapper needs {{}} exactly once, for the tool's answer: {tool_wrapper!r}")
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
            raise ConfigError(
                f"the chat template of {tokenizer.name} does not support tool messages; set tool_role: user"
            )
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
        self._ended = self._after(_MARKED_CONTENT, [self._assistant_message([])], prompt=False)
        following = self._after(_MARKED_CONTENT, [self._assistant_message([]), _USER], prompt=True)
        self._close, self._stop = self._end_between(self._ended, following)
        self.rewritten_end = "" if self._close.endswith(self._stop) else self._close
        """What the template writes in the history in place of the token that ends a turn; "" if it is that token."""
        self.stop_token_ids = self._find_stops()
        self.special_ids = self._special_ids
        self.vocab_size = tokenizer.vocab_size
        self._stops = frozenset(self.stop_token_ids)
        self._prove_stops()
        opening = self._template.render([_USER], prompt=True)
        # A turn may start within the reasoning that the prompt opens.
        tags = [tag for tag, _ in getattr(syntax, "thinking", [("<think>", "</think>")])]
        self._opened = next((tag for tag in tags if opening.rstrip().endswith(tag)), "")
        spoken = self._template.render([_USER, self._assistant_message([])], prompt=False).partition(_MARKED_CONTENT)[0]
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
        # Hide first: tokens that the syntax itself writes around calls in the history are meant to be tokens.
        hidden = [self._guard.hide_message(message) for message in messages]
        converted, shown = self._adapted(hidden, self._guard.hide_tools(tools))
        return self._guard.encode(self._template.render(converted, tools=shown, prompt=True))

    def template_input(
        self, messages: Sequence[Message], tools: Tools = ()
    ) -> tuple[str, list[JSON], list[JSON] | None, JSON]:
        """Return what `render` passes to a template: source, messages, tools and other variables. For comparison with
        other renderers."""
        if self._plain is not None and not tools:
            return self._plain.template_input(messages)
        converted, shown = self._adapted(messages, tools)
        return self._template.source, converted, shown or self._template.no_tools, self._template.variables

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
        # Only the next turn ends this one; its first token is the one the model stopped at.
        return ids[1:] if ids[:1] == [last] else ids

    def parse(self, sampled_ids: Ids, tools: Tools = ()) -> ParsedTurn:
        end = len(sampled_ids)
        while end and sampled_ids[end - 1] in self._stops:
            end -= 1
        # A space that the template puts before the text is not part of it.
        text = self._tokenizer.decode(sampled_ids[:end]).removeprefix(self._lead)
        turn = self.syntax.parse(self._opened + text, tools)
        return with_near_misses(turn, tools, lambda call: self.syntax.write([call]))

    def unoffered(self, tools: Tools) -> dict[str, str]:
        # The syntax introduces those that the template does not show.
        return self.syntax.unoffered(tools)

    def decode(self, ids: Ids) -> str:
        return self._tokenizer.decode(ids)

    def count(self, text: str) -> int:
        return len(self._guard.encode(self._guard.hide(text)))

    # What follows a turn ---------------------------------------------------------------------------------------------

    def _tail(self, messages: Sequence[Message]) -> tuple[list[int], int]:
        """Return the ids after a turn, and how many of them close it."""
        for message in messages:
            if message.role == "assistant":
                raise ChatError("a conversation is extended with tool and user messages; assistant turns are sampled")
        self._refuse_images(messages)
        converted = self._adapter.following([self._guard.hide_message(message) for message in messages])
        shape = tuple((one["role"], "name" in one, "tool_call_id" in one, one.get("images", 0)) for one in converted)
        if shape not in self._tails:
            if len(self._tails) >= _MOST_SHAPES:
                self._tails.clear()
            self._tails[shape] = self._derive(shape)
        tail, closing = self._tails[shape]
        if tail is None:
            return self._guard.encode(self._rendered_tail(converted)[0]), closing
        return [*tail.before, *self._guard.encode(tail.join(converted)), *tail.after], closing

    def _derive(self, shape: Shape) -> tuple[_Tail | None, int]:
        """Return None if the contents are changed by the template (trimmed, quoted, …): then it is rendered every time.
        Also return how many tokens close the turn."""
        text, close = self._rendered_tail(_marked(shape))
        closing = len(self._guard.encode(close))
        slots = tuple((int(match[2]), _FIELDS[match[1]]) for match in _SLOT.finditer(text))
        for index, (role, has_name, _, _) in enumerate(shape):
            if (index, "name") in slots and not has_name:
                raise ChatError(
                    f"the chat template of {self._tokenizer.name} needs the name of the tool that answered, and this "
                    "message has none"
                )
            if (index, "content") not in slots:
                raise ChatError(f"the chat template of {self._tokenizer.name} omits messages of role {role!r} here")
        tail = _Tail(tuple(_SLOT.split(text)[::3]), slots)
        for awkward in _AWKWARD:
            converted = [{**one, "content": awkward} for one in _marked(shape)]
            if tail.join(converted) != self._rendered_tail(converted)[0]:
                return None, closing
        return self._with_fixed_ends(tail, shape), closing

    def _with_fixed_ends(self, tail: _Tail, shape: Shape) -> _Tail:
        """Encode its fixed ends, unless this tokenizer does not split at its special tokens."""
        *_, opening = [None, *self._special.finditer(tail.literals[0])]
        closing = self._special.search(tail.literals[-1])
        if opening is None or closing is None:
            return tail
        first, last = tail.literals[0][opening.start() :], tail.literals[-1][: closing.end()]
        before = self._guard.encode(tail.literals[0][: opening.end()])[:-1]
        after = self._guard.encode(tail.literals[-1][closing.start() :])[1:]
        shorter = _Tail((first, *tail.literals[1:-1], last), tail.slots, tuple(before), tuple(after))
        for awkward in (*_AWKWARD, self._guard.hide(f"a{closing[0]}b")):
            converted = [{**one, "content": awkward} for one in _marked(shape)]
            live = self._guard.encode(shorter.join(converted))
            if [*before, *live, *after] != self._guard.encode(tail.join(converted)):
                return tail
        return shorter

    def _rendered_tail(self, converted: Sequence[JSON]) -> tuple[str, str]:
        """Return the text between an assistant turn and the next, and the part of it that closes the turn."""
        answers = [one for one in converted if one["role"] == "tool"]
        if answers and (self._calls_natively or self.traits.tool_needs_calls):
            try:
                return self._tail_of_calls(converted, answers)
            except ChatError:
                if self.traits.tool_needs_calls:
                    raise
        tail = self._after(_MARKED_CONTENT, [self._assistant_message([]), *converted], prompt=True)
        return tail, self._close if tail.startswith(self._close) else ""

    def _tail_of_calls(self, converted: Sequence[JSON], answers: Sequence[JSON]) -> tuple[str, str]:
        """Like `_rendered_tail`, after a turn with calls. The calls are sampled, so they are parsed and removed."""
        spoken = self._assistant_message(answers)
        tail = self._template.render([_USER, spoken, *converted], prompt=True).rpartition(_ARGUMENT)
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
        # What starts turns does not end one, even after calls.
        begins = stop != self._stop and stop in self._template.render([_USER], prompt=True)
        return behind, "" if begins else close

    def _end_of_calls(self, text: str, inside: int) -> int:
        """Return where the call around `inside` ends, with its section; -1 if no call is found there."""
        end = -1
        for region in self._reader.regions(text, 0, ()) if self._reader else ():
            closes = text[region.start : region.end] in getattr(self._reader, "section", ())
            if region.start < inside < region.end or (end >= 0 and closes and not text[end : region.start].strip()):
                end = region.end
        return end

    def _assistant_message(self, answers: Sequence[JSON]) -> JSON:
        if not answers:
            return {"role": "assistant", "content": _MARKED_CONTENT}
        # Templates take the name of the tool that answered from the call, so the calls use the answers' names.
        names = [one.get("name") or f"NbNa{index:03}Pr" for index, one in enumerate(answers)]
        ids = [one.get("tool_call_id") or PROBE_ID[:-1] + str(index) for index, one in enumerate(answers)]
        as_text = self.traits.text_arguments
        return called(*ids, names=names, arguments={"depth": _ARGUMENT}, as_text=as_text)

    def _after(self, word: str, converted: Sequence[JSON], *, prompt: bool) -> str:
        text = self._template.render([_USER, *converted], prompt=prompt)
        _, found, after = text.partition(word)
        if not found or word in after:
            raise ChatError(
                f"the chat template of {self._tokenizer.name} does not write the assistant's text exactly once"
            )
        return after

    # How a turn ends -------------------------------------------------------------------------------------------------

    def _end_between(self, ended: str, following: str) -> tuple[str, str]:
        """Return what the template puts after a turn before the next message, up to the special token that ends it, and
        the token that ends it if nothing follows: some templates write another in the history."""
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
        """Return the special tokens within a turn with reasoning and calls."""
        if not self._calls_natively:
            return frozenset()
        converted = self._assistant_message([{}])
        if self.traits.reasoning:
            converted[self.traits.reasoning] = _MARKED_CONTENT
        try:
            before = self._template.render([_USER], prompt=True)
            text = self._template.render([_USER, converted], prompt=False)
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
                f"no token ends a turn: the chat template of {self._tokenizer.name} writes none after the assistant's "
                "text, and its tokenizer has no eos_token"
            )
        return tuple(dict.fromkeys(stops))

    def _find_image_token(self) -> int | None:
        """Return the token that the template writes once for each image that a tool returns."""
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
        # Qwen's is between two others that mark its start and end.
        named = [number for text, number in found.items() if "image" in text.lower() or "img" in text.lower()]
        return named[0] if len(named) == 1 else next(iter(found.values())) if len(found) == 1 else None

    def _refuse_images(self, messages: Sequence[Message]) -> None:
        if self.image_token_id is None and any(message.images for message in messages):
            raise ChatError(f"the chat template of {self._tokenizer.name} does not support images")

    def _prove_stops(self) -> None:
        """Raise ConfigError if a stop token occurs within a turn with reasoning and calls: the turn would end there."""
        for token in self._inside:
            if self._tokenizer.special_tokens[token] in self._stops:
                raise ConfigError(
                    f"{token!r} ends turns in the chat template of {self._tokenizer.name}, but also occurs within "
                    "turns, before their calls: no token is known to end a turn with calls"
                )


def native_syntax(
    tokenizer: Tokenizer, source: str, template_kwargs: Mapping[str, Any] | None = None
) -> tuple[str | None, bool]:
    """Return the syntax in which a template writes calls, if known; and whether it supports tools at all.

    Raises:
        ConfigError: the template is unusable.
    """
    template = _open(tokenizer, source, template_kwargs)
    traits = probe(template, name=tokenizer.name)
    return syntax_of_calls(template, traits), traits.tools or traits.calls


def _open(tokenizer: Tokenizer, source: str, template_kwargs: Mapping[str, Any] | None) -> ChatTemplate:
    variables = {**getattr(tokenizer, "template_variables", {}), **(template_kwargs or {})}
    return ChatTemplate(source, variables, name=tokenizer.name)


def _marked(shape: Shape) -> list[JSON]:
    converted: list[JSON] = []
    for index, (role, has_name, has_id, images) in enumerate(shape):
        one: JSON = {"role": role, "content": f"NbCo{index:03}Pr"}
        if has_name:
            one["name"] = f"NbNa{index:03}Pr"
        if has_id:
            one["tool_call_id"] = f"NbId{index:03}Pr"
        if images:
            one["images"] = images
        converted.append(one)
    return converted
