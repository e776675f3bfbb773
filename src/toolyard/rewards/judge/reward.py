"""The final reward that asks a language model, behind any server with OpenAI's chat API, to grade by a rubric."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar
from weakref import WeakKeyDictionary

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt

from toolyard import settings
from toolyard.engines.http.openai import OpenaiEngine
from toolyard.engines.protocol import ChatGeneration, Finish, Sampling
from toolyard.errors import OURS, ConfigError, EngineError, RewardError
from toolyard.messages import Message
from toolyard.rewards.explanation import explain
from toolyard.rewards.judge.cache import VerdictCache, key_of
from toolyard.rewards.judge.question import (
    RUBRIC,
    UnreadableReplyError,
    Verdict,
    asked_again,
    question,
    shortened,
    verdict_in,
)
from toolyard.rewards.protocol import PROMPT, FinalReward, FinalScore, read_options

_log = logging.getLogger(__name__)

_REPLIES = 2
"""How often an unreadable reply is tolerated: the second time, the reward is absent."""
_REPLY_CHARS = 2000
"""How much of an unreadable reply is shown to the judge."""
_SHOWN_CHARS = 200
_REPLY_BYTES = 4 << 20


class JudgeSettings(BaseModel):
    """Options of `judge`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: Annotated[tuple[str, ...], BeforeValidator(lambda given: (given,) if isinstance(given, str) else given)]
    """Server with OpenAI's chat API, such as http://127.0.0.1:8000, or several of the same model."""
    model: str = Field(min_length=1)
    """The judge's name on the server. It is part of the cache's keys."""
    rubric: str | None = None
    """What the score means. None: whether the answer is correct."""
    rubric_file: str | None = None
    """A file with the rubric."""
    api_key_env: str | None = None
    """Name of the environment variable with the API key. None: TOOLYARD_JUDGE_API_KEY, if it is set."""
    temperature: float = Field(default=0.0, ge=0)
    max_tokens: PositiveInt = 1024
    """Maximum tokens of a reply, including the judge's reasoning."""
    concurrency: PositiveInt = 16
    """Questions at the same time."""
    request_seconds: PositiveFloat = 60.0
    """Time limit for one reply, with all its attempts."""
    retries: NonNegativeInt = 4
    """Attempts after the first, with growing pauses, if the server is busy (429), fails (5xx) or cannot be reached."""
    max_chars: PositiveInt = 100_000
    """Longer prompts, references and answers lose their middle."""
    cache: bool | str = True
    """Folder for verdicts. true: in Toolyard's cache. false: none."""


class JudgeReward(FinalReward):
    """One judge for all answers, and connections per event loop. A failure leaves the reward absent."""

    reads_the_prompt: ClassVar[bool] = True

    def __init__(self, name: str, options: Mapping[str, Any] | None = None) -> None:
        """Check the options.

        Raises:
            ConfigError: an option is unknown or wrong, or the API key is not set.
        """
        self.name = name
        self.settings = read_options(JudgeSettings, options or {})
        self._rubric = _rubric(self.settings)
        self._api_key = _api_key(self.settings)
        self._new_engine()  # checks the URL
        self._cache = _cache(self.settings)
        self._places: WeakKeyDictionary[asyncio.AbstractEventLoop, _Place] = WeakKeyDictionary()
        self.asked = 0
        """Questions sent to the server."""
        self.cached = 0
        """Verdicts found in the cache."""

    async def score(
        self,
        data_source: str,
        solution_str: str,
        ground_truth: Any,
        extra_info: Mapping[str, Any],
        *,
        deadline_seconds: float,
    ) -> FinalScore:
        most = self.settings.max_chars
        reference = None if ground_truth is None else shortened(_text(ground_truth), most)
        task = shortened(_text(extra_info.get(PROMPT, "")), most)
        messages = question(self._rubric, task, reference, shortened(solution_str, most))
        place = await self._here()
        async with place.slots:
            late = asyncio.timeout(deadline_seconds)
            try:
                async with late:
                    verdict = await self._verdict(place.engine, messages)
            except TimeoutError:
                if not late.expired():
                    raise
                message = f"reward {self.name!r}: no verdict within {deadline_seconds:g} s"
                raise RewardError(message, whose=OURS) from None
            except EngineError as error:
                raise RewardError(f"reward {self.name!r}: {error}", whose=OURS) from error
        return FinalScore(verdict.score, {"judge": self.settings.model}, explain(verdict.reason, expected=reference))

    async def close(self) -> None:
        place = self._places.pop(asyncio.get_running_loop(), None)
        if place is not None:
            await place.engine.__aexit__(None, None, None)

    async def _verdict(self, engine: OpenaiEngine, messages: list[Message]) -> Verdict:
        key = key_of(
            {
                "model": self.settings.model,
                "temperature": self.settings.temperature,
                "max_tokens": self.settings.max_tokens,
                "messages": [message.as_openai() for message in messages],
            }
        )
        if self._cache is not None and (found := await asyncio.to_thread(self._cache.read, key)) is not None:
            self.cached += 1
            return found
        verdict = await self._asked(engine, messages, key)
        if self._cache is not None:
            try:
                await asyncio.to_thread(self._cache.write, key, verdict)
            except OSError as error:  # a full disk must not cost the verdict
                _log.warning("reward %r: the verdict cannot be cached in %s: %s", self.name, self._cache.folder, error)
        return verdict

    async def _asked(self, engine: OpenaiEngine, messages: list[Message], key: str) -> Verdict:
        sampling = Sampling(temperature=self.settings.temperature, max_tokens=self.settings.max_tokens)
        why = ""
        for attempt in range(_REPLIES):
            self.asked += 1
            reply = await engine.chat(messages, (), sampling, request_id=f"judge-{key[:24]}-{attempt}")
            try:
                return _read(reply, self.settings.max_tokens)
            except UnreadableReplyError as error:
                why = str(error)
                messages = asked_again(messages, reply.message.content[:_REPLY_CHARS], why)
        said = reply.message.content[:_SHOWN_CHARS]  # pyright: ignore[reportPossiblyUnboundVariable]
        raise RewardError(f"reward {self.name!r}: the judge's reply is not a verdict: {why}: {said!r}", whose=OURS)

    async def _here(self) -> _Place:
        loop = asyncio.get_running_loop()
        place = self._places.get(loop)
        if place is None:
            place = self._places[loop] = _Place(self._new_engine(), self.settings.concurrency)
        async with place.opening:
            if not place.is_open:
                await place.engine.__aenter__()
                place.is_open = True
        return place

    def _new_engine(self) -> OpenaiEngine:
        return OpenaiEngine(
            self.settings.url,
            model=self.settings.model,
            returns_tokens=False,
            api_key=self._api_key,
            request_timeout=self.settings.request_seconds,
            retries=self.settings.retries,
            max_response_bytes=_REPLY_BYTES,
        )


class _Place:
    """The connections of one event loop."""

    def __init__(self, engine: OpenaiEngine, concurrency: int) -> None:
        self.engine = engine
        self.is_open = False
        self.opening = asyncio.Lock()
        self.slots = asyncio.Semaphore(concurrency)


def _read(reply: ChatGeneration, max_tokens: int) -> Verdict:
    """
    Raises:
        UnreadableReplyError: it is not a verdict.
    """
    if reply.finish is Finish.LENGTH:  # what it has may be a draft, or a quotation from the answer
        raise UnreadableReplyError(f"it was cut off after {max_tokens} tokens")
    return verdict_in(reply.message.content)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _rubric(given: JudgeSettings) -> str:
    if given.rubric_file is None:
        return RUBRIC if given.rubric is None else given.rubric
    if given.rubric is not None:
        raise ConfigError("options 'rubric' and 'rubric_file' cannot be combined")
    try:
        return Path(given.rubric_file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"option 'rubric_file': cannot read {given.rubric_file}: {error}") from None


def _api_key(given: JudgeSettings) -> str | None:
    if given.api_key_env is None:
        return settings.judge_api_key()
    key = settings.variable(given.api_key_env)
    if key is None:
        raise ConfigError(f"option 'api_key_env': the environment variable {given.api_key_env} is not set")
    return key


def _cache(given: JudgeSettings) -> VerdictCache | None:
    if given.cache is False:
        return None
    return VerdictCache(settings.cache_dir() / "judge" if given.cache is True else Path(given.cache))
