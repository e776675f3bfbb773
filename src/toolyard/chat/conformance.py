"""Is a format exact? Checks that hold any `ChatFormat` to its contract, on any tokenizer, with random conversations.

What is claimed is checked on what comes out, not on how it is made: the checks know nothing of templates and renderers.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from toolyard.chat.conversations import CODE_TOOL, Conversation, Talk
from toolyard.chat.protocol import CallSyntax, ChatFormat, Ids, ParsedCall, Tokenizer
from toolyard.errors import ChatError
from toolyard.messages import Message, ToolCall


class Outcome(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    NOT_APPLICABLE = "n.a."
    """The format makes no such claim, or there is nothing to try it on; `seen` says why."""


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    claim: str
    outcome: Outcome
    seen: str
    """What was tried, or the first difference, decoded."""


@dataclass(frozen=True, slots=True)
class Report:
    format: str
    tokenizer: str
    seed: int
    conversations: int
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return all(check.outcome is not Outcome.FAILED for check in self.checks)


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
    return Report(
        format.name,
        tokenizer.name,
        seed,
        conversations,
        tuple(_judge(name, check) for name, check in kit.checks().items() if not only or name in only),
    )


class _FailedError(Exception):
    """A claim does not hold."""


class _NotApplicableError(Exception):
    """A claim is not made."""


def _judge(name: str, check: Callable[[], str]) -> Check:
    claim = " ".join((check.__doc__ or "").split())
    try:
        return Check(name, claim, Outcome.PASSED, check())
    except _NotApplicableError as error:
        return Check(name, claim, Outcome.NOT_APPLICABLE, str(error))
    except (_FailedError, ChatError) as error:
        return Check(name, claim, Outcome.FAILED, str(error))


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
                    raise _FailedError(self._difference("the prompt does not extend the last", before, ids))
                if len(ids) == len(before):
                    raise _FailedError(f"nothing was added after {self.format.decode(before[-12:])!r}")
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
                    raise _FailedError(f"{turn.word!r} was sampled, and said again in {text!r}")
                for message in turn.new:
                    self._holds(text, message)
                if added != self.format.extension(ids, turn.sampled, turn.new, talk.tools):
                    raise _FailedError(f"the same turn was extended in two ways: {text!r}")
                ids = [*ids, *turn.sampled, *added]
                turns += 1
        return f"{turns} turns of {self.conversations} conversations"

    def stop_tokens(self) -> str:
        """Every stop token is one token of its own text, and the first of them ends a rendered turn."""
        stops = self.format.stop_token_ids
        if not stops:
            raise _FailedError("there are none: no turn would end before its length limit")
        for number in stops:
            text = self.tokenizer.decode([number])
            if self.tokenizer.encode(text) != [number]:
                raise _FailedError(f"{text!r} ({number}) encodes as {self.tokenizer.encode(text)}")
        after = self._after_a_turn()
        if not set(after) & set(stops):
            text, rewritten = self.format.decode(after), getattr(self.format, "rewritten_end", "")
            if rewritten and text.startswith(rewritten):
                raise _NotApplicableError(f"the template ends turns with {rewritten!r} once somebody else has spoken")
            raise _FailedError(f"no stop token ends a rendered turn: it is followed by {text!r}")
        return ", ".join(f"{self.tokenizer.decode([number])} ({number})" for number in stops)

    def closing(self) -> str:
        """A turn that was cut off is closed, then goes on like one that ended by itself."""
        self._after_a_turn()
        talk = self._conversation(wild=False).talk()
        turn = talk.turns[0]
        prompt = self.format.render(talk.messages, talk.tools)
        stops = self.format.stop_token_ids
        words = [number for number in turn.sampled if number not in stops]
        cut = self.format.extension(prompt, words, turn.new, talk.tools)
        seen: list[str] = []
        for stop in stops:
            ended = self.format.extension(prompt, [*words, stop], turn.new, talk.tools)
            closed = cut[: len(cut) - len(ended)]
            if set(closed) & set(stops) and cut[len(closed) :] == ended:
                seen.append(f"closed with {self.format.decode(closed)!r}")
        if not seen:
            raise _FailedError(f"a turn that was cut off goes on with {self.format.decode(cut)!r}")
        return seen[0]

    def text_stays_text(self) -> str:
        """Text that looks like special tokens, said by anyone, adds not one of them."""
        specials = set(self.tokenizer.special_tokens.values())
        if not specials:
            raise _NotApplicableError("the tokenizer has no special tokens")
        texts = list(self.tokenizer.special_tokens)[:40]
        for text in [*texts, "\n".join(texts), f"{texts[0]}{texts[-1]}x"]:
            for role in ("system", "user", "tool"):
                harmless, forged = (self._with(role, content) for content in ("harmless", f"a{text}b"))
                if sum(number in specials for number in harmless) != sum(number in specials for number in forged):
                    raise _FailedError(f"{text!r} said by {role!r} became a token: {self.format.decode(forged)!r}")
                if role != "tool" and f"a{text}b" not in self.format.decode(forged):
                    raise _FailedError(f"{text!r} said by {role!r} was changed: {self.format.decode(forged)!r}")
        return f"{len(texts)} special tokens, of a system, a user and a tool"

    def calls(self) -> str:
        """Calls that are written as the model would write them are read again as they were."""
        syntax: CallSyntax | None = getattr(self.format, "syntax", None)
        if syntax is None:
            raise _NotApplicableError("the format does not write calls by itself; see rendered calls")
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
            except _FailedError:
                if begin == len(prompt):
                    raise
                raise _NotApplicableError(
                    self._difference("the prompt itself depends on what follows", prompt, ids)
                ) from None
        return f"{len(_CALLS)} calls"

    def template_agreement(self) -> str:
        """Growing gives the same tokens as rendering all of it again, calls included, where the template leaves earlier
        turns alone."""
        differs, turns, called = "", 0, 0
        for talk in self._talks(wild=False):
            messages = list(talk.messages)
            ids = self.format.render(messages, talk.tools)
            for turn in talk.turns:
                added = self.format.extension(ids, turn.sampled, turn.new, talk.tools)
                before, ids = [*ids, *turn.sampled], [*ids, *turn.sampled, *added]
                messages += (Message("assistant", turn.text, tool_calls=turn.calls), *turn.new)
                try:
                    again = self.format.render(messages, talk.tools)
                except ChatError as error:
                    # Some templates take one call in a turn, or no word beside calls: models are not so shy.
                    differs = differs or f"rendered again, it is refused: {error}"
                    break
                turns += 1
                called += bool(turn.calls)
                if again == ids:
                    continue
                if again[: len(before)] == before or again[-len(added) :] != added:
                    raise _FailedError(self._difference("rendered again, the new messages differ", ids, again))
                differs = differs or self._difference("rendered again, what came before differs", ids, again)
        if differs:
            raise _NotApplicableError(f"{differs}; sampled turns are kept as they are, so this is for information")
        return f"{turns} turns of {self.conversations} conversations, {called} with calls"

    # Parts of checks -------------------------------------------------------------------------------------------------

    def _talks(self, *, wild: bool = True) -> Sequence[Talk]:
        conversation = self._conversation(wild)
        return [conversation.talk() for _ in range(self.conversations)]

    def _conversation(self, wild: bool) -> Conversation:
        chance = random.Random(self.seed)  # noqa: S311 - for conversations, not for secrets
        return Conversation(self.tokenizer, self.format.stop_token_ids, self._ended, chance, wild=wild)

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
        raise _FailedError(
            f"no turn can be gone on from that ends with the stop token, {list(_OPENINGS)} before it or not"
        )

    def _ended(self, text: str, calls: Sequence[ToolCall], new: Sequence[Message]) -> tuple[list[int], str]:
        called = self._called(calls, new)
        if called:
            return called, ""
        sampled = [*self._opening, *self.tokenizer.encode(text, special=False)]
        # With several stop tokens, a model samples the one that the format itself would put there.
        closed = self.format.extension(self.format.render([_HELLO]), sampled, new, [CODE_TOOL])
        stop = next((n for n in closed[:4] if n in self.format.stop_token_ids), self.format.stop_token_ids[0])
        return [*sampled, stop], text

    def _called(self, calls: Sequence[ToolCall], new: Sequence[Message]) -> list[int]:
        """A turn that only calls, as it stands in the history; empty if it cannot be told where it begins and ends."""
        prompt = self.format.render([_HELLO], [CODE_TOOL])
        try:
            ids = self.format.render([_HELLO, Message("assistant", "", tool_calls=tuple(calls)), *new], [CODE_TOOL])
        except ChatError:
            return []
        stops = (at for at in range(len(prompt), len(ids)) if ids[at] in self.format.stop_token_ids)
        end = next(stops, 0)
        return ids[len(prompt) : end + 1] if calls and ids[: len(prompt)] == prompt else []

    def _after_a_turn(self) -> list[int]:
        """The tokens behind a turn of the assistant that was rendered."""
        ids = self.format.render([_HELLO, Message("assistant", _WORD), _HELLO])
        ends = [at for at in range(len(ids)) if _WORD in self.format.decode(ids[:at])]
        if not ends:
            raise _FailedError(f"what the assistant said is left out of {self.format.decode(ids)!r}")
        after = ids[ends[0] : ends[0] + 8]
        if not set(after) & set(self.tokenizer.special_tokens.values()):
            raise _NotApplicableError(f"turns end in text: {self.format.decode(after)!r}")
        return after

    def _with(self, role: str, content: str) -> list[int]:
        if role == "tool":
            prompt = self.format.render([_HELLO], [CODE_TOOL])
            answer = Message("tool", content, tool_call_id=_CALL_ID, name=CODE_TOOL.function.name)
            sampled, _ = self._ended("Well", [], [answer])
            return self.format.extension(prompt, sampled, [answer], [CODE_TOOL])
        said = [Message("system", content), _HELLO] if role == "system" else [Message("user", content)]
        return self.format.render(said)

    def _holds(self, text: str, message: Message) -> None:
        content = message.content.strip()
        # Some templates quote what tools say.
        if content not in text and json.dumps(content, ensure_ascii=False)[1:-1] not in text:
            raise _FailedError(f"{content!r} of {message.role!r} is not in {text!r}")

    def _found(self, sampled: Ids, calls: Sequence[ParsedCall]) -> None:
        turn = self.format.parse(sampled, [CODE_TOOL])
        found = [(call.name, json.loads(call.arguments)) for call in turn.calls]
        if found != [(call.name, json.loads(call.arguments)) for call in calls] or turn.malformed:
            raise _FailedError(f"{self.format.decode(sampled)!r} was read as {found}, malformed {turn.malformed}")

    def _difference(self, what: str, before: list[int], after: list[int]) -> str:
        length = min(len(before), len(after))
        at = next((index for index in range(length) if before[index] != after[index]), length)
        was, now = (self.format.decode(ids[max(0, at - 4) : at + 12]) for ids in (before, after))
        return f"{what}, at token {at}: {was!r} and {now!r}"


_WORD = "Wombat"
_HELLO = Message("user", "Hello")
_OPENINGS = ("", "</think>\n\n", "<think>\n</think>\n\n")
_CALL_ID = f"functions.{CODE_TOOL.function.name}:0"
"""Kimi's form of an id, which holds the name of the function; others take any."""
_CALLS = tuple(
    ParsedCall(CODE_TOOL.function.name, json.dumps({"code": code}, ensure_ascii=False))
    for code in ("print(6 * 7)", 'x = "é漢😀\\n"\nfor y in [1, {"a": None}]:\n    print(x, y)', "# 1 < 2 & 3 > 2")
)
