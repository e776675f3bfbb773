"""Check any `ChatFormat` against its contract, on any tokenizer, with random conversations.

The checks test results only; they know nothing of templates and renderers.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, takewhile

from toolyard.chat.conformance.conversations import CODE_TOOL, Conversation, ConversationGenerator, SampledTurn, cases
from toolyard.chat.conformance.report import ConformanceReport, FailedError, NotApplicableError, RewritesError, judge
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
) -> ConformanceReport:
    """Check `format` against its contract. The same seed generates the same conversations. `only`: names of checks."""
    kit = _Kit(format, tokenizer, seed, conversations)
    checks = tuple(judge(name, check) for name, check in kit.checks().items() if not only or name in only)
    return ConformanceReport(format.name, tokenizer.name, seed, conversations, checks)


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
        """A rendered conversation, decoded, contains everything that was said."""
        checked = 0
        for conversation in self._conversations():
            text = self.format.decode(self.format.render(conversation.messages, conversation.tools))
            for message in conversation.messages:
                self._holds(text, message)
                checked += 1
        return f"{checked} messages in {self.conversations} prompts"

    def exact_prefix(self) -> str:
        """Each prompt is exactly the last prompt, the sampled tokens, then new tokens, whatever was sampled."""
        turns, refused = 0, ""
        for conversation in self._conversations():
            ids = self.format.render(conversation.messages, conversation.tools)
            for turn in conversation.turns:
                before = [*ids, *turn.sampled]
                try:
                    ids = self.format.extend(ids, turn.sampled, turn.new, conversation.tools)
                except ChatError as error:
                    if turn.plain:
                        raise
                    # Allowed by the contract if it is impossible to continue: it is reported, and the request ends.
                    refused = refused or f"; refused to continue after {self.format.decode(turn.sampled)!r}: {error}"
                    break
                if ids[: len(before)] != before:
                    raise FailedError(self._difference("the prompt does not extend the last", before, ids))
                if len(ids) == len(before):
                    raise FailedError(f"nothing was added after {self.format.decode(before[-12:])!r}")
                turns += 1
        return f"{turns} turns of {self.conversations} conversations{refused}"

    def mask_ownership(self) -> str:
        """New tokens are exactly the new messages and their framing: nothing sampled is repeated."""
        turns = 0
        for conversation in self._conversations(wild=False):
            ids = self.format.render(conversation.messages, conversation.tools)
            for turn in conversation.turns:
                added = self.format.extension(ids, turn.sampled, turn.new, conversation.tools)
                text = self.format.decode(added)
                if turn.word in text:
                    raise FailedError(f"{turn.word!r} was sampled, and is repeated in {text!r}")
                for message in turn.new:
                    self._holds(text, message)
                if added != self.format.extension(ids, turn.sampled, turn.new, conversation.tools):
                    raise FailedError(f"the same turn was extended in two ways: {text!r}")
                ids = [*ids, *turn.sampled, *added]
                turns += 1
        return f"{turns} turns of {self.conversations} conversations"

    def stop_tokens(self) -> str:
        """Every stop token encodes as itself, and the first of them ends a rendered turn."""
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
                raise NotApplicableError(f"the template ends turns with {rewritten!r} once another message follows")
            raise FailedError(f"no stop token ends a rendered turn: it is followed by {text!r}")
        return ", ".join(f"{self.tokenizer.decode([number])} ({number})" for number in stops)

    def closing(self) -> str:
        """A truncated turn is closed, then continues like one that ended by itself."""
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
                continue  # the template writes no end after calls
            ended = self.format.extension(prompt, sampled, [new], [CODE_TOOL])
            cut = self.format.extension(prompt, sampled[:-1], [new], [CODE_TOOL])
            closed = self.format.decode(cut[: len(cut) - len(ended)])
            if cut[len(cut) - len(ended) :] != ended or not closed.endswith(tuple(self._ends)):
                raise FailedError(f"a truncated turn of {kind} continues with {self.format.decode(cut)!r}")
            seen.append(f"{kind} with {closed!r}")
        return ", ".join(seen)

    def text_stays_text(self) -> str:
        """Text that looks like special tokens, in any message, never becomes one."""
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
        """Calls written as the model would write them are parsed back unchanged."""
        syntax: CallSyntax | None = getattr(self.format, "syntax", None)
        if syntax is None:
            raise NotApplicableError("the format does not write calls by itself; see rendered calls")
        for call in _CALLS:
            sampled = [*self.tokenizer.encode(syntax.write([call])), self.format.stop_token_ids[0]]
            self._found(sampled, [call])
        return f"{len(_CALLS)} calls in {syntax.name}"

    def rendered_calls(self) -> str:
        """Calls in the history of a rendered conversation are parsed back unchanged."""
        user = Message("user", "What is six times seven?")
        prompt = self.format.render([user], [CODE_TOOL])
        for call in _CALLS:
            assistant = Message("assistant", "", tool_calls=(ToolCall(_CALL_ID, call.name, call.arguments),))
            answer = Message("tool", "42", tool_call_id=_CALL_ID, name=call.name)
            ids = self.format.render([user, assistant, answer], [CODE_TOOL])
            # A template may start a turn without reasoning differently than its prompt does.
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
        """Reasoning is separated from the text. Whether the history keeps it is the template's choice."""
        thought = "Count the wombats."
        call = ToolCall(_CALL_ID, CODE_TOOL.function.name, _CALLS[0].arguments)
        answer = Message("tool", "42", tool_call_id=_CALL_ID, name=CODE_TOOL.function.name)
        kept: dict[str, bool] = {}
        for when, assistant, new in (
            ("before answers", Message("assistant", "", thought, (call,)), (answer,)),
            ("before a user's message", Message("assistant", _WORD, thought), (_HELLO,)),
            ("in the last turn", Message("assistant", _WORD, thought), ()),
        ):
            try:
                kept[when] = thought in self.format.decode(self.format.render([_HELLO, assistant, *new], [CODE_TOOL]))
            except ChatError:
                continue
            word = _WORD if assistant.content else "print"
            sampled = self._as_written(word, assistant, new) if kept[when] else []
            turn = self.format.parse(sampled, [CODE_TOOL])
            if sampled and ((turn.reasoning or "").strip(), turn.text.strip()) != (thought, assistant.content):
                raise FailedError(
                    f"{self.format.decode(sampled)!r} was parsed as {turn.text!r} with reasoning {turn.reasoning!r}"
                )
        if not any(kept.values()):
            raise NotApplicableError("the template shows no reasoning")
        return "; ".join(f"{'kept' if stays else 'dropped'} {when}" for when, stays in kept.items())

    def images(self) -> str:
        """Each image that a tool returns is one token, as in transformers; text that looks like that token is not an
        image."""
        token = self.format.image_token_id
        if token is None:
            raise NotApplicableError("the template does not support images from tools")
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
            exact = name != "hostile text"  # transformers turns it into tokens
            if source and self._same(ours, render_template(source, plain, shown, variables), exact=exact):
                same.append(name)
                continue
            template_input = getattr(self.format, "template_input", None)
            if template_input is None:
                adapted.append(name)
                continue
            text = render_template(*template_input(messages, tools))
            if not self._same(ours, text, exact=exact):
                theirs = self.tokenizer.encode(text or "")
                raise FailedError(f"{name}: {self._difference('transformers renders it differently', ours, theirs)}")
            adapted.append(name)
        return f"the same: {', '.join(same) or 'none'}" + (
            f"; adapted to what the template accepts: {', '.join(adapted)}" if adapted else ""
        )

    def template_agreement(self) -> str:
        """Extending gives the same tokens as rendering everything again, including calls, if the template does not
        change earlier turns."""
        turns, called = 0, 0
        rewritten: dict[str, str] = {}
        for conversation in self._conversations(wild=False):
            messages = list(conversation.messages)
            ids = self.format.render(messages, conversation.tools)
            for turn in conversation.turns:
                added = self.format.extension(ids, turn.sampled, turn.new, conversation.tools)
                ids = [*ids, *turn.sampled, *added]
                messages += (turn.message, *turn.new)
                try:
                    again = self.format.render(messages, conversation.tools)
                except ChatError as error:
                    # Some templates accept only one call per turn, or no text beside calls; models do both.
                    rewritten.setdefault(f"refused as history: {error}", "")
                    break
                turns += 1
                called += bool(turn.message.tool_calls)
                if again == ids:
                    continue
                if not (self._follows(again, turn, added) or self._follows_alone(turn, added, conversation.tools)):
                    tail = again[-len(added) :]
                    raise FailedError(self._difference("rendered again, the new messages differ", added, tail))
                steps = normalizers(self.format, messages)
                name = name_rewriting(self.format.decode(ids), self.format.decode(again), steps)
                rewritten.setdefault(name, self._difference(", for example", ids, again))
        seen = f"{turns} turns of {self.conversations} conversations, {called} with calls"
        if rewritten:
            raise RewritesError(f"{seen}. {'. '.join(name + example for name, example in rewritten.items())}")
        return seen

    # Parts of checks -------------------------------------------------------------------------------------------------

    def _conversations(self, *, wild: bool = True) -> Sequence[Conversation]:
        generator = self._generator(wild)
        return [generator.generate() for _ in range(self.conversations)]

    def _generator(self, wild: bool) -> ConversationGenerator:
        rng = random.Random(self.seed)  # noqa: S311 - for conversations, not for secrets
        return ConversationGenerator(self.tokenizer, self.format.stop_token_ids, self._sample, rng, wild=wild)

    @cached_property
    def _opening(self) -> list[int]:
        """Return the start of a turn: models that reason must end their reasoning before the format can continue."""
        prompt = self.format.render([_HELLO])
        for opening in _OPENINGS:
            sampled = self.tokenizer.encode(f"{opening}Well")
            try:
                self.format.extension(prompt, [*sampled, self.format.stop_token_ids[0]], [_HELLO])
            except ChatError:
                continue
            return self.tokenizer.encode(opening)
        raise FailedError(
            f"no turn that ends with the stop token can be continued, with {list(_OPENINGS)} before it or without"
        )

    def _sample(self, word: str, assistant: Message, new: Sequence[Message]) -> tuple[list[int], Message]:
        # Not every template shows reasoning; Gemma 4's puts the text beside calls after their answers.
        shorter = replace(assistant, reasoning_content=None)
        shortest = replace(shorter, content="" if assistant.tool_calls else assistant.content)
        for one in dict.fromkeys((assistant, shorter, shortest)):
            if sampled := self._as_written(word, one, new):
                return sampled, one
        text = assistant.content or f"Let me see, {word}."
        sampled = [*self._opening, *self.tokenizer.encode(text, special=False)]
        # With several stop tokens, a model samples the one that the format itself would write.
        closed = self.format.extension(self.format.render([_HELLO]), sampled, new, [CODE_TOOL])
        stop = next((n for n in closed[:4] if n in self.format.stop_token_ids), self.format.stop_token_ids[0])
        return [*sampled, stop], Message("assistant", text)

    def _as_written(self, word: str, assistant: Message, new: Sequence[Message], closed: bool = False) -> list[int]:
        """Return a turn as written in the history; empty if its bounds are unknown or part of it is omitted.
        `closed`: only if a token ends it there. Templates may show reasoning only in the last turn."""
        marked = [replace(message, content=_MARK) for message in new]
        followed = ((), marked) if assistant.reasoning_content and not assistant.tool_calls else (marked,)
        for tools, following in ((tools, following) for tools in ([CODE_TOOL], []) for following in followed):
            try:
                opening = self.format.decode(self.format.render([_HELLO], tools))
                text = self.format.decode(self.format.render([_HELLO, assistant, *following], tools))
            except ChatError:
                continue
            begin, at = _begin_of_turn(opening, text), text.rfind(word)
            ends = [(text.find(end, at), number) for end, number in self._ends.items()]
            end, stop = min((found for found in ends if found[0] > at), default=(-1, 0))
            if following and (end < 0 or _MARK in text[begin:end]) and not closed:  # only the next message ends it
                end, stop = self._end_before(text, following, tools), self.format.stop_token_ids[0]
            if not begin <= at < end or (assistant.reasoning_content or "") not in text:
                continue
            turn = self._begun(opening[_shared(opening, text) :].strip(), text[begin:end])
            if _MARK in turn:
                continue
            for call in assistant.tool_calls:
                for form in spellings(call.arguments):
                    turn = turn.replace(form, call.arguments)
            return [*self.tokenizer.encode(turn), stop]
        return []

    def _end_before(self, text: str, new: Sequence[Message], tools: Tools) -> int:
        """Return where a turn ends in a rendered conversation if only the new messages follow it; otherwise -1."""
        after = self.format.decode(self.format.extension([], self.format.stop_token_ids[:1], new, tools))
        return len(text) - len(after) if text.endswith(after) else -1

    def _begun(self, opened: str, turn: str) -> str:
        """Convert a turn of the history to what is sampled after `opened`, which may open, or open and close, the
        reasoning."""
        for opening, closing in thinking_tags(self.format):
            if opened == opening:
                return turn if closing in turn else f"{closing}\n\n{turn}"
            if opened.startswith(opening) and opened.endswith(closing):
                return turn.removeprefix(closing)
        return turn

    @cached_property
    def _ends(self) -> dict[str, int]:
        """Return the strings that end a turn in the history, and the token a model samples there."""
        ends = {self.tokenizer.decode([number]): number for number in self.format.stop_token_ids}
        rewritten = getattr(self.format, "rewritten_end", "")
        return ends | ({rewritten: self.format.stop_token_ids[0]} if rewritten else {})

    def _follows(self, rendered: list[int], turn: SampledTurn, added: list[int]) -> bool:
        """Whether only `added` follows that turn in a rendered conversation."""

        def rest(ids: list[int]) -> str:
            text = self.format.decode(ids).rpartition(turn.word)[2]
            for end in self._ends:
                text = text.replace(end, "")
            return "".join(text.split())

        return rendered[-len(added) :] == added and rest(rendered[: -len(added)]) == rest(turn.sampled)

    def _follows_alone(self, turn: SampledTurn, added: list[int], tools: Tools) -> bool:
        """Like `_follows`, in the smallest conversation, where there is nothing to rewrite."""
        for shown in (tools, ()):
            try:
                alone = self.format.render([_HELLO, turn.message, *turn.new], shown)
            except ChatError:
                continue
            if self._follows(alone, turn, added):
                return True
        return False

    def _same(self, ours: list[int], text: str | None, *, exact: bool) -> bool:
        """Whether they are the ids of that text, or at least decode to it."""
        if text is None:
            return False
        theirs = self.tokenizer.encode(text)
        return ours == theirs if exact else self.format.decode(ours) == self.format.decode(theirs)

    def _after_a_turn(self) -> list[int]:
        """Return the tokens after a rendered assistant turn."""
        ids = self.format.render([_HELLO, Message("assistant", _WORD), _HELLO])
        ends = [at for at in range(len(ids)) if _WORD in self.format.decode(ids[:at])]
        if not ends:
            raise FailedError(f"the assistant's text is missing from {self.format.decode(ids)!r}")
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
        messages = [Message("system", content), _HELLO] if role == "system" else [Message("user", content)]
        return self.format.render(messages)

    def _holds(self, text: str, message: Message) -> None:
        content = message.content.strip()
        # Some templates quote tool results.
        if content not in text and json.dumps(content, ensure_ascii=False)[1:-1] not in text:
            raise FailedError(f"{content!r} from {message.role!r} is missing from {text!r}")

    def _found(self, sampled: Ids, calls: Sequence[ParsedCall]) -> None:
        turn = self.format.parse(sampled, [CODE_TOOL])
        found = [(call.name, json.loads(call.arguments)) for call in turn.calls]
        if found != [(call.name, json.loads(call.arguments)) for call in calls] or turn.malformed:
            raise FailedError(f"{self.format.decode(sampled)!r} was parsed as {found}, malformed {turn.malformed}")

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
"""Its content is never read: only its position matters."""
_WORD = "Wombat"
_MARK = "Potoroo"
_HELLO = Message("user", "Hello")
_OPENINGS = ("", "</think>\n\n", "<think>\n</think>\n\n")
_CALL_ID = f"functions.{CODE_TOOL.function.name}:0"
"""Kimi's form of an id, which contains the function's name; other models accept any."""
_CALLS = tuple(
    ParsedCall(CODE_TOOL.function.name, json.dumps({"code": code}, ensure_ascii=False))
    for code in ("print(6 * 7)", 'x = "é漢😀\\n"\nfor y in [1, {"a": None}]:\n    print(x, y)', "# 1 < 2 & 3 > 2")
)


def _shared(one: str, other: str) -> int:
    """Return the length of the common prefix, without splitting tags."""
    length = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
    shared = one[:length]
    tag = shared.rpartition("<")[2]
    return len(shared) - (len(tag) + 1 if "<" in shared and ">" not in tag else 0)


def _begin_of_turn(prompt: str, text: str) -> int:
    """Return where a turn starts in the history, even if part of the prompt before it is omitted there."""
    begin = _shared(prompt, text)
    left = (prompt[at:] for at in range(begin, len(prompt)))
    return begin + len(next((rest for rest in left if text.startswith(rest, begin)), ""))


# Names for what a chat template rewrites in the history. (OTHER_TOKENS: the text is equal.)


Normalizer = Callable[[str], str]

OTHER_TOKENS = "the same text in other tokens"
MOVED = "earlier messages are moved or left out"


def thinking_tags(chat: ChatFormat) -> tuple[tuple[str, str], ...]:
    """Return the pairs of tags around a turn's reasoning."""
    return getattr(getattr(chat, "syntax", None), "thinking", (("<think>", "</think>"),))


def normalizers(chat: ChatFormat, messages: Sequence[Message]) -> dict[str, Normalizer]:
    """Return normalizers by the name of what each removes from a decoded conversation with these `messages`."""
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
        "arguments of calls are rewritten": arguments,
        "white space is added or stripped": lambda text: re.sub(r"\s+", "", text),
        "thinking is cut or added": lambda text: thinking.sub("", text),
        "turns end with another token": lambda text: ending.sub("", text),
    }


def name_rewriting(ours: str, theirs: str, steps: Mapping[str, Normalizer]) -> str:
    """Name the fewest `steps` that make two renderings of a conversation equal; `MOVED` if all of them do not."""
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
    """Return how templates may write a call's arguments in JSON."""
    decoded = json.loads(arguments)
    return [json.dumps(decoded, ensure_ascii=ascii_only) for ascii_only in (False, True)]
