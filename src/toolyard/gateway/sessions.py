"""Sessions: each is one agent run, with the tree of its conversations, its limits and its end."""

from __future__ import annotations

import asyncio
import hmac
import itertools
import json
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from hashlib import blake2b
from typing import Any

from pydantic import ValidationError

from toolyard.chat.protocol import ChatFormat, ParsedTurn, Tokenizer
from toolyard.engines.protocol import Engine, Finish, Sampling
from toolyard.errors import EngineError, EngineRequestError, summarize
from toolyard.gateway.api.exchange import ApiError, Question, Reply, Said, invalid
from toolyard.gateway.branches import Branch, branches_of
from toolyard.gateway.config import GatewayConfig, SessionLimits
from toolyard.gateway.conversation import Conversations, Place, SampledTurn, call_ids
from toolyard.messages import JSON, Message, developer_as_system
from toolyard.turns import EngineAnswer, Retries, TurnSampler

_SAMPLED_AS_ASKED = frozenset({"temperature", "top_p", "top_k", "min_p", "seed"})
"""Ignored with `fixed_sampling`."""
_REMEMBERED = 10_000
"""Sessions that have ended; a request for one of them gets an error that says so."""


class SessionEnd(StrEnum):
    """How a session ended. The values are those of `toolyard.rollout.finish.FinishReason`."""

    STOP = "stop"
    """The agent, or who started it, said so."""
    MAX_TURNS = "max_assistant_turns"
    MAX_TOKENS = "length"
    MAX_SECONDS = "request_deadline"
    IDLE = "idle"
    """No request came for `idle_seconds`."""
    ABORTED = "aborted"
    """The gateway was stopped."""


@dataclass(frozen=True, slots=True)
class SessionTask:
    """What a session is played for; the fields of a trajectory that the gateway cannot know."""

    task: str = ""
    """The task's id; empty: the session's. Sessions with the same task are a group."""
    sample: int = 0
    """The index of this session among those of its task."""
    ground_truth: Any = None
    data_source: str = "unknown"
    step: int = 0


@dataclass(slots=True)
class Counts:
    """What a session did, apart from its turns."""

    requests: int = 0
    refused: int = 0
    """Answered with an error of the request's own."""
    failed: int = 0
    """Answered with an error of the engine or the gateway."""
    repeated: int = 0
    """Answered with the turn of an earlier, equal request whose answer did not arrive."""
    disconnected: int = 0
    """The client went away first."""
    undelivered: int = 0
    """Turns that no client has got. They belong to no branch."""

    def as_json(self) -> JSON:
        return {name: value for name in self.__slots__ if (value := getattr(self, name))}


@dataclass(slots=True, eq=False)
class Session:
    id: str
    conversations: Conversations
    limits: SessionLimits
    task: SessionTask = SessionTask()
    key: str | None = None
    """The API key that its requests must have. None: any that the gateway accepts."""
    seed: int | None = None
    """Each turn's seed is derived from it, unless the request sets one."""
    opened: float = field(default_factory=time.monotonic)
    started_at: float = field(default_factory=time.time)
    last_used: float = field(default_factory=time.monotonic)
    in_progress: int = 0
    sampling: int = 0
    """Turns that are being sampled."""
    sampled_tokens: int = 0
    limit: SessionEnd | None = None
    """The limit that it has reached."""
    limited: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a client was told of it."""
    engine_failure: str = ""
    """The last error of the engine or the gateway that a client got."""
    counts: Counts = field(default_factory=Counts)
    on_turn: Callable[[SampledTurn], None] = lambda _: None
    asked: dict[bytes, list[SampledTurn]] = field(default_factory=dict[bytes, list[SampledTurn]])
    """The last answer to each request, for clients that repeat one."""
    replies: dict[str, SampledTurn] = field(default_factory=dict[str, SampledTurn])
    """Turns by the id of their reply, for clients that continue by id."""
    asking: set[str] = field(default_factory=set[str])
    """The engine's names for the requests that it is answering."""
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    def now(self) -> float:
        return round(time.monotonic() - self.opened, 6)

    def engine_id(self, parent: SampledTurn | None, number: int) -> str:
        """What the engine calls the next request: as it called the turn before, whose keys and values it may still
        have, unless that one was continued already. It is in `asking` from now on."""
        known = None if parent is None or parent.children else parent.engine_id
        name = _name(self.id, str(number)) if known is None or known in self.asking else known
        self.asking.add(name)
        return name

    def opens(self, key: str) -> bool:
        """Whether a client with this API key may use the session."""
        return self.key is None or hmac.compare_digest(self.key.encode(), key.encode())

    def branches(self, chat: ChatFormat) -> list[Branch]:
        """All branches that a client has seen; the last is the main one."""
        self.counts.undelivered = sum(not turn.delivered for turn in self.conversations.turns)
        return branches_of(self.conversations.leaves(), chat)

    def check_limits(self, more: int) -> None:
        """Check that it may sample `more` turns.

        Raises:
            ApiError: the session has reached a limit.
        """
        limits, turns = self.limits, len(self.conversations.turns) + self.sampling
        reached: tuple[SessionEnd, str] | None = None
        if limits.max_turns is not None and turns + more > limits.max_turns:
            reached = SessionEnd.MAX_TURNS, f"may sample {limits.max_turns} messages, and has {turns}"
        elif limits.max_tokens is not None and self.sampled_tokens >= limits.max_tokens:
            reached = SessionEnd.MAX_TOKENS, f"has sampled {self.sampled_tokens} tokens of {limits.max_tokens}"
        elif limits.max_seconds is not None and time.monotonic() - self.opened >= limits.max_seconds:
            reached = SessionEnd.MAX_SECONDS, f"is older than {limits.max_seconds:g} s, the longest it may last"
        if reached is None:
            return
        self.limit = reached[0]
        self.limited.set()
        raise ApiError(403, f"session {self.id} {reached[1]}: end here", code=f"session_{self.limit.name.lower()}")


@dataclass(frozen=True, slots=True)
class Answered:
    """A reply that is to be sent, and what it consists of."""

    reply: Reply
    turns: tuple[SampledTurn, ...]

    def delivered(self) -> None:
        for turn in self.turns:
            turn.delivered = True


class Sessions:
    """All sessions of a gateway, and the engine behind them."""

    def __init__(self, config: GatewayConfig, engine: Engine, chat: ChatFormat, tokenizer: Tokenizer | None) -> None:
        self.config = config
        self.chat = chat
        self._tokenizer = tokenizer
        self._sampler = TurnSampler(engine, chat, Retries(config.engine_retries, config.engine_retry_pause_seconds))
        self._open: dict[str, Session] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()

    # Their lives ------------------------------------------------------------------------------------------------------

    def create(
        self,
        session_id: str,
        task: SessionTask | None = None,
        *,
        key: str | None = None,
        limits: SessionLimits | None = None,
        seed: int | None = None,
        on_turn: Callable[[SampledTurn], None] = lambda _: None,
    ) -> Session:
        """
        Raises:
            ApiError: there is one of this name, or there are too many.
        """
        if session_id in self._open or session_id in self._ended:
            raise ApiError(409, f"session {session_id} exists already", code="session_exists")
        if len(self._open) >= self.config.max_sessions:
            raise ApiError(429, f"{len(self._open)} sessions are open, the most this gateway allows")
        session = Session(
            session_id,
            Conversations(self.chat),
            limits or self.config.limits,
            task or SessionTask(),
            key,
            seed,
            on_turn=on_turn,
        )
        self._open[session_id] = session
        return session

    def get(self, session_id: str, *, opens: bool) -> Session:
        """`opens`: open it if it is unknown, and the gateway allows it.

        Raises:
            ApiError: it has ended, or there is no such session.
        """
        session = self._open.get(session_id)
        if session is not None:
            return session
        if session_id in self._ended:
            raise ApiError(403, f"session {session_id} has ended: {self._ended[session_id]}", code="session_ended")
        if opens and self.config.open_sessions:
            return self.create(session_id)
        raise ApiError(404, f"there is no session {session_id}", code="session_not_found")

    def remove(self, session: Session, why: str) -> None:
        """End a session: requests for it are refused from now on, with `why`."""
        self._open.pop(session.id, None)
        self._ended[session.id] = why
        while len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

    def restore(self, session: Session) -> None:
        """Undo `remove`."""
        self._ended.pop(session.id, None)
        self._open[session.id] = session

    def forget(self, session_id: str) -> None:
        """Its name may be used again."""
        self._ended.pop(session_id, None)

    @property
    def open(self) -> list[Session]:
        return list(self._open.values())

    @property
    def idle(self) -> list[Session]:
        """Sessions that have had no request for too long."""
        now = time.monotonic()
        return [
            session
            for session in self.open
            if not session.in_progress and now - session.last_used >= session.limits.idle_seconds
        ]

    # One answer -------------------------------------------------------------------------------------------------------

    async def ask(self, session: Session, question: Question, *, again: bool = False) -> Answered:
        """Sample the answer. `again`: the client says that it repeats a request.

        If cancelled, nothing of it is kept.

        Raises:
            ApiError: it cannot be answered; the message says why.
        """
        session.counts.requests += 1
        session.last_used = time.monotonic()
        if session.in_progress >= session.limits.max_requests:
            raise ApiError(429, f"session {session.id} has {session.in_progress} requests in progress, the maximum")
        session.in_progress += 1
        try:
            return await self._answered(session, question, again)
        except ApiError as error:
            if error.status >= 500:
                session.counts.failed += 1
                session.engine_failure = str(error)
            else:
                session.counts.refused += 1
            raise
        finally:
            session.in_progress -= 1
            session.last_used = time.monotonic()

    async def _answered(self, session: Session, question: Question, again: bool) -> Answered:
        messages = self._messages(session, question)
        place = self._place(session, question, messages)
        asked = _identity(place, question)
        known = session.asked.get(asked)
        if known is not None and _is_repeated(known, again):
            session.counts.repeated += 1
            turns = tuple(known)
        else:
            session.check_limits(question.n)
            sampling = self._sampling(session, question, place)
            session.sampling += question.n
            try:
                async with asyncio.TaskGroup() as group:
                    sample = partial(self._sampled, session, sampling, place)
                    tasks = [group.create_task(sample(index)) for index in range(question.n)]
            finally:
                session.sampling -= question.n
            if self._open.get(session.id) is not session:
                raise ApiError(403, f"session {session.id} has ended", code="session_ended")
            results = [task.result() for task in tasks]
            for result in results:
                if isinstance(result, ApiError):
                    raise result
            turns = tuple(
                self._enter(session, question, place, sampling, *result)
                for result in results
                if not isinstance(result, ApiError)
            )
            session.asked[asked] = list(turns)
        said = tuple(self._said(turn, question, place) for turn in turns)
        reply = Reply(_name(session.id, f"reply {turns[0].number}"), int(session.started_at + turns[-1].started), said)
        session.replies[reply.id] = turns[0]
        return Answered(reply, turns)

    def _messages(self, session: Session, question: Question) -> tuple[Message, ...]:
        before: tuple[Message, ...] = ()
        if question.previous is not None:
            found = session.replies.get(question.previous)
            if found is None:
                raise invalid("previous_response_id", f"this session has no response {question.previous!r}")
            # Instructions are not carried over: the new request has its own, or none.
            before = tuple(one for one in found.messages if one.role != "system")
        system = tuple(one for one in question.messages[:1] if one.role == "system")
        return tuple(developer_as_system([*system, *before, *question.messages[len(system) :]]))

    def _place(self, session: Session, question: Question, messages: tuple[Message, ...]) -> Place:
        if question.prompt is None:
            return session.conversations.place(messages, question.tools)
        if self._tokenizer is None:
            raise ApiError(400, "this gateway has no tokenizer for prompts of text; send messages", param="prompt")
        if isinstance(question.prompt, str):
            ids, text = self._tokenizer.encode(question.prompt), question.prompt
        else:
            ids, size = question.prompt, self._tokenizer.vocab_size
            if not all(0 <= one < size for one in ids):
                raise invalid("prompt", f"expected token ids from 0 to {size - 1}")
            text = self._tokenizer.decode(ids)
        return session.conversations.place_tokens(ids, text)

    def _sampling(self, session: Session, question: Question, place: Place) -> Sampling:
        """
        Raises:
            ApiError: the prompt leaves no room for an answer, or the request's settings are invalid.
        """
        base, limits = self.config.sampling, session.limits
        given = {
            name: value
            for name, value in question.sampling.items()
            if not (self.config.fixed_sampling and name in _SAMPLED_AS_ASKED)
        }
        given["max_tokens"] = min(given.get("max_tokens", base.max_tokens), base.max_tokens)
        if limits.max_tokens is not None:
            given["max_tokens"] = min(given["max_tokens"], limits.max_tokens - session.sampled_tokens)
        if limits.max_model_len is not None:
            left = limits.max_model_len - len(place.prompt_ids)
            if left < 1:
                raise too_long(len(place.prompt_ids), limits.max_model_len)
            given["max_tokens"] = min(given["max_tokens"], left)
        given["stop"] = (*base.stop, *given.get("stop", ()))
        try:
            sampling = Sampling.model_validate({**base.model_dump(), **given})
        except ValidationError as error:
            first = error.errors()[0]
            raise invalid(".".join(map(str, first["loc"])), first["msg"]) from None
        return self._sampler.with_stops(sampling) if question.prompt is None else sampling

    async def _sampled(
        self, session: Session, sampling: Sampling, place: Place, index: int
    ) -> tuple[str, EngineAnswer, float, float] | ApiError:
        """The engine's name for it, the answer, when it was begun, and how long it took. An error is a value here:
        other samples go on."""
        number, began = next(session.numbers), session.now()
        if sampling.seed is not None:
            sampling = sampling.model_copy(update={"seed": sampling.seed + index})
        elif session.seed is not None:
            derived = int.from_bytes(_hash(f"{session.seed}\0{number}")[:4], "big") >> 1
            sampling = sampling.model_copy(update={"seed": derived})
        name = session.engine_id(place.parent, number)
        try:
            async with asyncio.timeout(self.config.generate_seconds):
                answer = await self._sampler.sample(place.prompt_ids, sampling, request_id=name)
        except TimeoutError:
            seconds = self.config.generate_seconds
            return ApiError(504, f"the engine did not answer within {seconds:g} s", code="engine_timeout")
        except EngineRequestError as error:
            return ApiError(400, f"the engine refuses the request: {error}", code="engine_refused")
        except EngineError as error:
            return ApiError(503, f"the engine failed: {summarize(error)}", code="engine_failed")
        finally:
            session.asking.discard(name)
        if answer.generation.finish is Finish.ABORT:
            return ApiError(503, "the engine aborted the answer", code="engine_failed")
        return name, answer, began, round(session.now() - began, 6)

    def _enter(
        self,
        session: Session,
        question: Question,
        place: Place,
        sampling: Sampling,
        engine_id: str,
        answer: EngineAnswer,
        began: float,
        seconds: float,
    ) -> SampledTurn:
        tools = question.tools if question.reads_calls else ()
        ids, number = answer.generation.token_ids, len(session.conversations.turns)
        stopped_by = self._sampler.stopped_by(answer.generation, sampling)
        if question.prompt is not None or not question.reads_calls:
            parsed = ParsedTurn(self._text(ids))
        else:
            parsed = self.chat.parse(ids, tools)
        content = "\n".join(filter(None, (parsed.text, *(bad.text for bad in parsed.malformed))))
        stop = _stop_in(stopped_by, question)
        if stop is not None:
            content = content.partition(stop)[0]
        turn = SampledTurn(
            number=number,
            engine_id=engine_id,
            parent=place.parent,
            opening=place.opening,
            given=place.given,
            given_ids=place.given_ids,
            answer=answer,
            parsed=parsed,
            message=Message("assistant", content, parsed.reasoning, call_ids(number, parsed)),
            stopped_by=stopped_by,
            started=began,
            seconds=seconds,
        )
        session.conversations.add(place, turn)
        session.sampled_tokens += len(ids)
        session.on_turn(turn)
        return turn

    def _text(self, ids: list[int]) -> str:
        """The text of ids, without the special tokens at its end."""
        end = len(ids)
        while end and ids[end - 1] in self.chat.special_ids:
            end -= 1
        return self.chat.decode(ids[:end])

    def _said(self, turn: SampledTurn, question: Question, place: Place) -> Said:
        generation = turn.answer.generation
        wanted = bool(question.options.get("logprobs"))
        return Said(
            message=turn.message,
            finish=generation.finish,
            stop_text=_stop_in(turn.stopped_by, question),
            prompt_tokens=len(place.prompt_ids),
            completion_tokens=len(generation.token_ids),
            cached_tokens=generation.cached_tokens or 0,
            token_ids=generation.token_ids,
            token_texts=[self.chat.decode([one]) for one in generation.token_ids] if wanted else (),
            logprobs=generation.logprobs,
        )


def too_long(tokens: int, most: int) -> ApiError:
    told = f"the messages have {tokens} tokens, and the model's context is {most}: shorten them"
    return ApiError(400, told, code="context_length_exceeded", param="messages")


def _is_repeated(known: list[SampledTurn], again: bool) -> bool:
    """Whether an equal request is answered with the same turns: if nobody has got them yet, or if the client repeats it
    and has not gone on from them. Otherwise it wants another sample."""
    if not all(turn.delivered for turn in known):
        return True
    return again and not any(turn.children for turn in known)


def _identity(place: Place, question: Question) -> bytes:
    asked = json.dumps([dict(question.sampling), question.n, question.reads_calls], sort_keys=True, default=str)
    return _hash(asked, place.history)


def _stop_in(stopped_by: int | str | None, question: Question) -> str | None:
    return stopped_by if isinstance(stopped_by, str) and stopped_by in question.sampling.get("stop", ()) else None


def _name(session_id: str, what: str) -> str:
    """An id of fixed length: SGLang aborts all requests whose ids begin with the given one."""
    return _hash(f"{session_id}\0{what}")[:12].hex()


def _hash(text: str, before: bytes = b"") -> bytes:
    return blake2b(before + text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
