"""Is a format exact? Checks that hold any `ChatFormat` to its contract, on any tokenizer, with random conversations.

What is claimed is checked on what comes out, not on how it is made: the checks know nothing of templates and renderers.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, takewhile

from toolyard.chat.conformance.conversations import CODE_TOOL, Conversation, Talk, TurnTaken, cases
from toolyard.chat.conformance.report import FailedError, NotApplicableError, Report, RewritesError, judge
from toolyard.chat.protocol import CallSyntax, ChatFormat, Ids, ParsedCall, Tokenizer, Tools
from toolyard.errors import ChatError
from toolyard.images import Image
from toolyard.messages import JSON, Message, ToolCall


def check_format(
    format: ChatFormat,  # noqa: A002
    tokenizer: Tokenizer,
    *,
    seed: int = 0,
    conversations: int = 100,
    only: Collection[str] = (),
) -> Report:
    """Hold `format` to its contract. The same seed plays the same conversations. `only`: the names of checks."""
    kit = _Kit(format, tokenizer, seed, conversations)
    checks = tuple(judge(name, check) for name, check in kit.checks().items() if not only or name in only)
    return Report(format.name, tokenizer.name, seed, conversations, checks)


@dataclass
class _Kit:
    format: ChatFormat
    tokenizer: Tokenizer
    seed: int
    conversations: int

    def checks(self) -> dict[str, Callable[[], str]]:
        return {
            "round trip": self.round_trip,
            "exact prefix": self.exact_prefix,
            "mask ownership": self.mask_ownership,
            "stop tokens": self.stop_tokens,
            "closing": self.closing,
            "text stays text": self.text_stays_text,
            "calls": self.calls,
            "rendered calls": self.rendered_calls,
            "thinking": self.thinking,
            "images": self.images,
            "transformers": self.transformers,
            "template agreement": self.template_agreement,
        }

    def round_trip(self) -> str:
        """A rendered conversation, decoded, holds everything that was said."""
        said = 0
        for talk in self._talks():
            text = self.format.decode(self.format.render(talk.messages, talk.tools))
            for message in talk.messages:
                self._holds(text, message)
                said += 1
        return f"{said} messages in {self.conversations} prompts"

    def exact_prefix(self) -> str:
        """Each prompt is the last one, then what was sampled, then new tokens: to the token, whatever was sampled."""
        turns, refused = 0, ""
        for talk in self._talks():
            ids = self.format.render(talk.messages, talk.tools)
            for turn in talk.turns:
                before = [*ids, *turn.sampled]
                try:
                    ids = self.format.extend(ids, turn.sampled, turn.new, talk.tools)
                except ChatError as error:
                    if turn.plain:
                        raise
                    # Allowed by the contract, for what cannot be gone on from: it is told, and the request ends.
                    refused = refused or f"; refused to go on after {self.format.decode(turn.sampled)!r}: {error}"
                    break
                if ids[: len(before)] != before:
                    raise FailedError(self._difference("the prompt does not extend the last", before, ids))
                if len(ids) == len(before):
                    raise FailedError(f"nothing was added after {self.format.decode(before[-12:])!r}")
                turns += 1
        return f"{turns} turns of {self.conversations} conversations{refused}"

    def mask_ownership(self) -> str:
        """New tokens are new messages and their frame: all that was newly said, and nothing that was sampled."""
        turns = 0
        for talk in self._talks(wild=False):
            ids = self.format.render(talk.messages, talk.tools)
            for turn in talk.turns:
                added = self.format.extension(ids, turn.sampled, turn.new, talk.tools)
                text = self.format.decode(added)
                if turn.word in text:
                    raise FailedError(f"{turn.word!r} was sampled, and said again in {text!r}")
                for message in turn.new:
                    self._holds(text, message)
                if added != self.format.extension(ids, turn.sampled, turn.new, talk.tools):
                    raise FailedError(f"the same turn was extended in two ways: {text!r}")
                ids = [*ids, *turn.sampled, *added]
                turns += 1
        return f"{turns} turns of {self.conversations} conversations"

    def stop_tokens(self) -> str:
        """Every stop token is one token of its own text, and the first of them ends a rendered turn."""
        stops = self.format.stop_token_ids
        if not stops:
            raise FailedError("there are none: no turn would end before its length limit")
        for number in stops:
            text = self.tokenizer.decode([number])
            if self.tokenizer.encode(text) != [number]:
                raise FailedError(f"{text!r} ({number}) encodes as {self.tokenizer.encode(text)}")
        after = self._after_a_turn()
        if not set(after) & set(stops):
            text, rewritten = self.format.decode(after), getattr(self.format, "rewritten_end", "")
            if rewritten and text.startswith(rewritten):
                raise NotApplicableError(f"the template ends turns with {rewritten!r} once somebody else has spoken")
            raise FailedError(f"no stop token ends a rendered turn: it is followed by {text!r}")
        return ", ".join(f"{self.tokenizer.decode([number])} ({number})" for number in stops)

    def closing(self) -> str:
        """A turn that was cut off is closed, then goes on like one that ended by itself."""
        self._after_a_turn()
        call = ToolCall(_CALL_ID, CODE_TOOL.function.name, _CALLS[0].arguments)
        answer = Message("tool", "42", tool_call_id=_CALL_ID, name=call.name)
        prompt = self.format.render([_HELLO], [CODE_TOOL])
        seen: list[str] = []
        for kind, sampled, new in (
            ("text", self._sample(_WORD, Message("assistant", _WORD), [_HELLO])[0], _HELLO),
            ("calls", self._as_written("print", Message("assistant", "", tool_calls=(call,)), [answer], True), answer),
        ):
            if not sampled:
                continue  # the template writes no end behind calls
            ended = self.format.extension(prompt, sampled, [new], [CODE_TOOL])
            cut = self.format.extension(prompt, sampled[:-1], [new], [CODE_TOOL])
            closed = self.format.decode(cut[: len(cut) - len(ended)])
            if cut[len(cut) - len(ended) :] != ended or not closed.endswith(tuple(self._ends)):
                raise FailedError(f"a turn of {kind} that was cut off goes on with {self.format.decode(cut)!r}")
            seen.append(f"{kind} with {closed!r}")
        return ", ".join(seen)

    def text_stays_text(self) -> str:
        """Text that looks like special tokens, said by anyone, adds not one of them."""
        specials = set(self.tokenizer.special_tokens.values())
        if not specials:
            raise NotApplicableError("the tokenizer has no special tokens")
        texts = list(self.tokenizer.special_tokens)[:40]
        for text in [*texts, "\n".join(texts), f"{texts[0]}{texts[-1]}x"]:
            for role in ("system", "user", "tool"):
                harmless, forged = (self._with(role, content) for content in ("harmless", f"a{text}b"))
                if sum(number in specials for number in harmless) != sum(number in specials for number in forged):
                    raise FailedError(f"{text!r} said by {role!r} became a token: {self.format.decode(forged)!r}")
                if role != "tool" and f"a{text}b" not in self.format.decode(forged):
                    raise FailedError(f"{text!r} said by {role!r} was changed: {self.format.decode(forged)!r}")
        return f"{len(texts)} special tokens, of a system, a user and a tool"

    def calls(self) -> str:
        """Calls that are written as the model would write them are read again as they were."""
        syntax: CallSyntax | None = getattr(self.format, "syntax", None)
        if syntax is None:
            raise NotApplicableError("the format does not write calls by itself; see rendered calls")
        for call in _CALLS:
            sampled = [*self.tokenizer.encode(syntax.write([call])), self.format.stop_token_ids[0]]
            self._found(sampled, [call])
        return f"{len(_CALLS)} calls in {syntax.name}"

    def rendered_calls(self) -> str:
        """Calls in the history of a rendered conversation are read again as they were."""
        user = Message("user", "What is six times seven?")
        prompt = self.format.render([user], [CODE_TOOL])
        for call in _CALLS:
            said = Message("assistant", "", tool_calls=(ToolCall(_CALL_ID, call.name, call.arguments),))
            answer = Message("tool", "42", tool_call_id=_CALL_ID, name=call.name)
            ids = self.format.render([user, said, answer], [CODE_TOOL])
            # A template may begin a turn without thinking otherwise than it asks for one.
            begin = next((at for at, (a, b) in enumerate(zip(prompt, ids, strict=False)) if a != b), len(prompt))
            stops = [at for at in range(begin, len(ids)) if ids[at] in self.format.stop_token_ids]
            try:
                self._found(ids[begin : stops[0] + 1 if stops else len(ids)], [call])
            except FailedError:
                if begin == len(prompt):
                    raise
                raise NotApplicableError(
                    self._difference("the prompt itself depends on what follows", prompt, ids)
                ) from None
        return f"{len(_CALLS)} calls"

    def thinking(self) -> str:
        """Reasoning is read apart from what is said. Whether the history keeps it is the template's choice."""
        thought = "Count the wombats."
        call = ToolCall(_CALL_ID, CODE_TOOL.function.name, _CALLS[0].arguments)
        answer = Message("tool", "42", tool_call_id=_CALL_ID, name=CODE_TOOL.function.name)
        kept: dict[str, bool] = {}
        for when, said, new in (
            ("before answers", Message("assistant", "", thought, (call,)), (answer,)),
            ("once the user has spoken", Message("assistant", _WORD, thought), (_HELLO,)),
            ("in the last turn", Message("assistant", _WORD, thought), ()),
        ):
            try:
                kept[when] = thought in self.format.decode(self.format.render([_HELLO, said, *new], [CODE_TOOL]))
            except ChatError:
                continue
            word = _WORD if said.content else "print"
            sampled = self._as_written(word, said, new) if kept[when] else []
            turn = self.format.parse(sampled, [CODE_TOOL])
            if sampled and ((turn.reasoning or "").strip(), turn.text.strip()) != (thought, said.content):
                raise FailedError(
                    f"{self.format.decode(sampled)!r} was read as {turn.text!r} with reasoning {turn.reasoning!r}"
                )
        if not any(kept.values()):
            raise NotApplicableError("the template shows no reasoning")
        return "; ".join(f"{'kept' if stays else 'dropped'} {when}" for when, stays in kept.items())

    def images(self) -> str:
        """Each image that a tool returns has one token, and transformers writes the same; text that looks like that
        token has none."""
        token = self.format.image_token_id
        if token is None:
            raise NotApplicableError("the template has no place for images that tools return")
        forged = self.tokenizer.decode([token])
        call = Message("assistant", "", tool_calls=(ToolCall(_CALL_ID, CODE_TOOL.function.name, _CALLS[0].arguments),))
        prompt = self.format.render([_HELLO], [CODE_TOOL])
        for count in (1, 2, 5):
            answer = Message(
                "tool", "42", tool_call_id=_CALL_ID, name=CODE_TOOL.function.name, images=(_IMAGE,) * count
            )
            hostile = replace(answer, content=f"a{forged}b")
            for new in (answer, hostile):
                sampled, _ = self._sample("print", call, [new])
                added = self.format.extension(prompt, sampled, [new], [CODE_TOOL])
                if added.count(token) != count:
                    raise FailedError(f"{count} images with {new.content!r} became {self.format.decode(added)!r}")
            ours = self.format.render([_HELLO, call, answer], [CODE_TOOL])
            plain = [message.as_openai(decoded=True) for message in (_HELLO, call, answer)]
            variables: JSON = dict(getattr(self.tokenizer, "template_variables", {}))
            shown = [CODE_TOOL.model_dump(mode="json")]
            text = _transformers_rendering()(self.tokenizer.chat_template or "", plain, shown, variables)
            if not self._same(ours, text, exact=True):
                theirs = self.tokenizer.encode(text or "")
                raise FailedError(self._difference("transformers renders images differently", ours, theirs))
        return f"{forged} ({token})"

    def transformers(self) -> str:
        """A conversation of each kind is rendered as transformers' `apply_chat_template` renders it."""
        render_template = _transformers_rendering()
        variables: JSON = dict(getattr(self.tokenizer, "template_variables", {}))
        source = self.tokenizer.chat_template
        same: list[str] = []
        adapted: list[str] = []
        hostile = "".join(list(self.tokenizer.special_tokens)[:20])
        for name, messages in cases(hostile).items():
            tools: Tools = [CODE_TOOL] if "text" not in name or "call" in name else []
            try:
                ours = self.format.render(messages, tools)
            except ChatError as error:
                adapted.append(f"{name} (refused: {error})")
                continue
            shown = [tool.model_dump(mode="json") for tool in tools] or None
            plain = [message.as_openai(decoded=True) for message in messages]
            exact = name != "hostile text"  # which becomes tokens there
            if source and self._same(ours, render_template(source, plain, shown, variables), exact=exact):
                same.append(name)
                continue
            told = getattr(self.format, "told", None)
            if told is None:
                adapted.append(name)
                continue
            text = render_template(*told(messages, tools))
            if not self._same(ours, text, exact=exact):
                theirs = self.tokenizer.encode(text or "")
                raise FailedError(f"{name}: {self._difference('transformers renders it differently', ours, theirs)}")
            adapted.append(name)
        return f"the same: {', '.join(same) or 'none'}" + (
            f"; said in a way that the template can take: {', '.join(adapted)}" if adapted else ""
        )

    def template_agreement(self) -> str:
        """Growing gives the same tokens as rendering all of it again, calls included, where the template leaves earlier
        turns alone."""
        turns, called = 0, 0
        rewritten: dict[str, str] = {}
        for talk in self._talks(wild=False):
            messages = list(talk.messages)
            ids = self.format.render(messages, talk.tools)
            for turn in talk.turns:
                added = self.format.extension(ids, turn.sampled, turn.new, talk.tools)
                ids = [*ids, *turn.sampled, *added]
                messages += (turn.said, *turn.new)
                try:
                    again = self.format.render(messages, talk.tools)
                except ChatError as error:
                    # Some templates take one call in a turn, or no word beside calls: models are not so shy.
                    rewritten.setdefault(f"refused as history: {error}", "")
                    break
                turns += 1
                called += bool(turn.said.tool_calls)
                if again == ids:
                    continue
                if not (self._follows(again, turn, added) or self._follows_alone(turn, added, talk.tools)):
                    tail = again[-len(added) :]
                    raise FailedError(self._difference("rendered again, the new messages differ", added, tail))
                steps = normalisers(self.format, messages)
                name = name_rewriting(self.format.decode(ids), self.format.decode(again), steps)
                rewritten.setdefault(name, self._difference(", for example", ids, again))
        seen = f"{turns} turns of {self.conversations} conversations, {called} with calls"
        if rewritten:
            raise RewritesError(f"{seen}. {'. '.join(name + example for name, example in rewritten.items())}")
        return seen

    # Parts of checks -------------------------------------------------------------------------------------------------

    def _talks(self, *, wild: bool = True) -> Sequence[Talk]:
        conversation = self._conversation(wild)
        return [conversation.talk() for _ in range(self.conversations)]

    def _conversation(self, wild: bool) -> Conversation:
        chance = random.Random(self.seed)  # noqa: S311 - for conversations, not for secrets
        return Conversation(self.tokenizer, self.format.stop_token_ids, self._sample, chance, wild=wild)

    @cached_property
    def _opening(self) -> list[int]:
        """What a turn begins with: models that think have to end that before the format lets anybody else speak."""
        prompt = self.format.render([_HELLO])
        for opening in _OPENINGS:
            sampled = self.tokenizer.encode(f"{opening}Well")
            try:
                self.format.extension(prompt, [*sampled, self.format.stop_token_ids[0]], [_HELLO])
            except ChatError:
                continue
            return self.tokenizer.encode(opening)
        raise FailedError(
            f"no turn can be gone on from that ends with the stop token, {list(_OPENINGS)} before it or not"
        )

    def _sample(self, word: str, said: Message, new: Sequence[Message]) -> tuple[list[int], Message]:
        # Not every template shows reasoning; Gemma 4's puts what is said beside calls behind their answers.
        shorter = replace(said, reasoning_content=None)
        shortest = replace(shorter, content="" if said.tool_calls else said.content)
        for one in dict.fromkeys((said, shorter, shortest)):
            if sampled := self._as_written(word, one, new):
                return sampled, one
        text = said.content or f"Let me see, {word}."
        sampled = [*self._opening, *self.tokenizer.encode(text, special=False)]
        # With several stop tokens, a model samples the one that the format itself would put there.
        closed = self.format.extension(self.format.render([_HELLO]), sampled, new, [CODE_TOOL])
        stop = next((n for n in closed[:4] if n in self.format.stop_token_ids), self.format.stop_token_ids[0])
        return [*sampled, stop], Message("assistant", text)

    def _as_written(self, word: str, said: Message, new: Sequence[Message], closed: bool = False) -> list[int]:
        """A turn as it stands in the history; empty if it cannot be told where it begins and ends, or something of it
        is left out. `closed`: only if a token ends it there. Templates may show reasoning only in the last turn."""
        marked = [replace(message, content=_MARK) for message in new]
        followed = ((), marked) if said.reasoning_content and not said.tool_calls else (marked,)
        for tools, following in ((tools, following) for tools in ([CODE_TOOL], []) for following in followed):
            try:
                opening = self.format.decode(self.format.render([_HELLO], tools))
                text = self.format.decode(self.format.render([_HELLO, said, *following], tools))
            except ChatError:
                continue
            begin, at = _begin_of_turn(opening, text), text.rfind(word)
            ends = [(text.find(end, at), number) for end, number in self._ends.items()]
            end, stop = min((found for found in ends if found[0] > at), default=(-1, 0))
            if following and (end < 0 or _MARK in text[begin:end]) and not closed:  # nothing ends it but what follows
                end, stop = self._end_before(text, following, tools), self.format.stop_token_ids[0]
            if not begin <= at < end or (said.reasoning_content or "") not in text:
                continue
            turn = self._begun(opening[_shared(opening, text) :].strip(), text[begin:end])
            if _MARK in turn:
                continue
            for call in said.tool_calls:
                for form in spellings(call.arguments):
                    turn = turn.replace(form, call.arguments)
            return [*self.tokenizer.encode(turn), stop]
        return []

    def _end_before(self, text: str, new: Sequence[Message], tools: Tools) -> int:
        """Where a turn ends in a rendered conversation if nothing but the new messages stands behind it; or -1."""
        after = self.format.decode(self.format.extension([], self.format.stop_token_ids[:1], new, tools))
        return len(text) - len(after) if text.endswith(after) else -1

    def _begun(self, opened: str, turn: str) -> str:
        """A turn in the history as it is sampled behind `opened`: thinking that only the prompt opens, or opens and
        closes."""
        for opening, closing in thinking_tags(self.format):
            if opened == opening:
                return turn if closing in turn else f"{closing}\n\n{turn}"
            if opened.startswith(opening) and opened.endswith(closing):
                return turn.removeprefix(closing)
        return turn

    @cached_property
    def _ends(self) -> dict[str, int]:
        """The texts that end a turn in the history, and what a model samples there."""
        ends = {self.tokenizer.decode([number]): number for number in self.format.stop_token_ids}
        rewritten = getattr(self.format, "rewritten_end", "")
        return ends | ({rewritten: self.format.stop_token_ids[0]} if rewritten else {})

    def _follows(self, rendered: list[int], turn: TurnTaken, added: list[int]) -> bool:
        """Whether nothing but `added` stands behind that turn in a rendered conversation."""

        def rest(ids: list[int]) -> str:
            text = self.format.decode(ids).rpartition(turn.word)[2]
            for end in self._ends:
                text = text.replace(end, "")
            return "".join(text.split())

        return rendered[-len(added) :] == added and rest(rendered[: -len(added)]) == rest(turn.sampled)

    def _follows_alone(self, turn: TurnTaken, added: list[int], tools: Tools) -> bool:
        """The same in the smallest conversation, in which there is nothing to rewrite."""
        for shown in (tools, ()):
            try:
                alone = self.format.render([_HELLO, turn.said, *turn.new], shown)
            except ChatError:
                continue
            if self._follows(alone, turn, added):
                return True
        return False

    def _same(self, ours: list[int], text: str | None, *, exact: bool) -> bool:
        """Whether they are the ids of that text, or at least its words."""
        if text is None:
            return False
        theirs = self.tokenizer.encode(text)
        return ours == theirs if exact else self.format.decode(ours) == self.format.decode(theirs)

    def _after_a_turn(self) -> list[int]:
        """The tokens behind a turn of the assistant that was rendered."""
        ids = self.format.render([_HELLO, Message("assistant", _WORD), _HELLO])
        ends = [at for at in range(len(ids)) if _WORD in self.format.decode(ids[:at])]
        if not ends:
            raise FailedError(f"what the assistant said is left out of {self.format.decode(ids)!r}")
        after = ids[ends[0] : ends[0] + 8]
        if not set(after) & set(self.tokenizer.special_tokens.values()):
            raise NotApplicableError(f"turns end in text: {self.format.decode(after)!r}")
        return after

    def _with(self, role: str, content: str) -> list[int]:
        if role == "tool":
            prompt = self.format.render([_HELLO], [CODE_TOOL])
            answer = Message("tool", content, tool_call_id=_CALL_ID, name=CODE_TOOL.function.name)
            sampled, _ = self._sample("Well", Message("assistant", "Well"), [answer])
            return self.format.extension(prompt, sampled, [answer], [CODE_TOOL])
        said = [Message("system", content), _HELLO] if role == "system" else [Message("user", content)]
        return self.format.render(said)

    def _holds(self, text: str, message: Message) -> None:
        content = message.content.strip()
        # Some templates quote what tools say.
        if content not in text and json.dumps(content, ensure_ascii=False)[1:-1] not in text:
            raise FailedError(f"{content!r} of {message.role!r} is not in {text!r}")

    def _found(self, sampled: Ids, calls: Sequence[ParsedCall]) -> None:
        turn = self.format.parse(sampled, [CODE_TOOL])
        found = [(call.name, json.loads(call.arguments)) for call in turn.calls]
        if found != [(call.name, json.loads(call.arguments)) for call in calls] or turn.malformed:
            raise FailedError(f"{self.format.decode(sampled)!r} was read as {found}, malformed {turn.malformed}")

    def _difference(self, what: str, before: list[int], after: list[int]) -> str:
        length = min(len(before), len(after))
        at = next((index for index in range(length) if before[index] != after[index]), length)
        was, now = (self.format.decode(ids[max(0, at - 4) : at + 12]) for ids in (before, after))
        return f"{what}, at token {at}: {was!r} and {now!r}"


def _transformers_rendering() -> Callable[[str, list[JSON], list[JSON] | None, JSON], str | None]:
    try:
        from toolyard.chat.tokenizers.transformers import render_template
    except ModuleNotFoundError as error:
        raise NotApplicableError(f"{error.name} is not installed") from None
    return render_template


_IMAGE = Image("image/png", b"", 1, 1)
"""Nobody looks into it here: only its place counts."""
_WORD = "Wombat"
_MARK = "Potoroo"
_HELLO = Message("user", "Hello")
_OPENINGS = ("", "</think>\n\n", "<think>\n</think>\n\n")
_CALL_ID = f"functions.{CODE_TOOL.function.name}:0"
"""Kimi's form of an id, which holds the name of the function; others take any."""
_CALLS = tuple(
    ParsedCall(CODE_TOOL.function.name, json.dumps({"code": code}, ensure_ascii=False))
    for code in ("print(6 * 7)", 'x = "é漢😀\\n"\nfor y in [1, {"a": None}]:\n    print(x, y)', "# 1 < 2 & 3 > 2")
)


def _shared(one: str, other: str) -> int:
    """The length of what both begin with, tags in one piece."""
    length = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
    shared = one[:length]
    tag = shared.rpartition("<")[2]
    return len(shared) - (len(tag) + 1 if "<" in shared and ">" not in tag else 0)


def _begin_of_turn(prompt: str, text: str) -> int:
    """Where a turn begins in the history, though something of the prompt before it may be left out there."""
    begin = _shared(prompt, text)
    left = (prompt[at:] for at in range(begin, len(prompt)))
    return begin + len(next((rest for rest in left if text.startswith(rest, begin)), ""))


# Names for what a chat template rewrites in the history.


Normaliser = Callable[[str], str]

OTHER_TOKENS = "the same text in other tokens"
MOVED = "earlier messages are moved or left out"


def thinking_tags(chat: ChatFormat) -> tuple[tuple[str, str], ...]:
    """Pairs of tags around the reasoning of a turn."""
    return getattr(getattr(chat, "syntax", None), "thinking", (("<think>", "</think>"),))


def normalisers(chat: ChatFormat, messages: Sequence[Message]) -> dict[str, Normaliser]:
    """By the name of what each takes away from a decoded conversation. `messages`: what was said in it."""
    pairs = (*thinking_tags(chat), ("<|channel|>analysis", "<|start|>assistant"))
    blocks = "|".join(f"{re.escape(opening)}.*?{re.escape(closing)}" for opening, closing in pairs)
    tags = "|".join(re.escape(tag) for pair in thinking_tags(chat) for tag in pair)
    thinking = re.compile(rf"\s*(?:{blocks}|{tags})\s*", re.DOTALL)
    ends = {chat.decode([number]) for number in chat.stop_token_ids} | {getattr(chat, "rewritten_end", "")}
    ending = re.compile("|".join(map(re.escape, filter(None, ends))))
    raw = {call.arguments for message in messages for call in message.tool_calls}

    def arguments(text: str) -> str:
        for given in raw:
            for form in spellings(given):
                text = text.replace(form, given)
        return text

    return {
        "arguments of calls are written anew": arguments,
        "white space is added or stripped": lambda text: re.sub(r"\s+", "", text),
        "thinking is cut or added": lambda text: thinking.sub("", text),
        "turns end with another token": lambda text: ending.sub("", text),
    }


def name_rewriting(ours: str, theirs: str, steps: Mapping[str, Normaliser]) -> str:
    """The fewest of `steps` that make two renderings of a conversation equal; `MOVED` if all of them do not."""
    if ours == theirs:
        return OTHER_TOKENS
    for count in range(1, len(steps) + 1):
        for chosen in combinations(steps.items(), count):
            one, other = ours, theirs
            for _, step in chosen:
                one, other = step(one), step(other)
            if one == other:
                return "; ".join(name for name, _ in chosen)
    return MOVED


def spellings(arguments: str) -> list[str]:
    """How templates write the arguments of a call in JSON."""
    decoded = json.loads(arguments)
    return [json.dumps(decoded, ensure_ascii=ascii_only) for ascii_only in (False, True)]
