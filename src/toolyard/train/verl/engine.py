"""verl's servers as an `Engine`: token ids in, token ids and log-probabilities out, by verl's own client."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from toolyard.engines.protocol import Finish, Generation, Ids, Sampling
from toolyard.engines.stops import StopTexts
from toolyard.errors import EngineError, EngineRequestError, summarize

_ABORTED = ("aborted", "abort")
_REFUSALS = (ValueError, TypeError, AssertionError)
"""What verl's servers raise of a request that they will not take: too long, say."""
SPECULATED = ("spec_num_draft_tokens", "spec_num_accepted_tokens", "spec_num_verify_steps")
"""What servers that speculate count, for verl's metrics."""


@dataclass(slots=True)
class ServerNotes:
    """What verl wants to know of a trajectory, and only its servers can tell."""

    oldest: int | None = None
    """verl's step of the weights that sampled first."""
    newest: int | None = None
    preempted: int = -1
    """-1: they do not say."""
    speculated: dict[str, int] = field(default_factory=dict[str, int])
    experts: Any = None
    """Which experts a mixture took, for every token up to the last answer."""

    def take(self, answer: Any) -> None:
        told = _told(answer)
        oldest, newest = told.get("min_global_steps"), told.get("max_global_steps")
        self.oldest = oldest if self.oldest is None else self.oldest
        self.newest = self.newest if newest is None else newest
        if answer.num_preempted is not None:
            self.preempted = max(self.preempted, 0) + answer.num_preempted
        for key in SPECULATED:
            if told.get(key) is not None:
                self.speculated[key] = self.speculated.get(key, 0) + int(told[key])
        if answer.routed_experts is not None:
            self.experts = answer.routed_experts


def _told(answer: Any) -> Mapping[str, Any]:
    return answer.extra_fields or {}


def texts_of(rollout: Any) -> Mapping[str, Any] | None:
    """By verl's `rollout` settings, what its servers are told beside stop texts; None: they would refuse them."""
    match rollout.name:
        case "vllm":  # which verl always starts with a tokenizer
            return {"include_stop_str_in_output": True}
        case "sglang" if not rollout.get("skip_tokenizer_init", True):
            return {"no_stop_trim": True}
        case _:
            return None


class VerlEngine:
    """One trajectory's. `params` are verl's sampling parameters, and are passed on as they are, with a limit of tokens
    and what ends a turn; of `Sampling`, nothing else counts."""

    def __init__(
        self,
        servers: Any,
        params: Mapping[str, Any],
        *,
        session: str,
        decode: Callable[[Sequence[int]], str],
        with_texts: Mapping[str, Any] | None = None,
        answered: Callable[[ServerNotes], None] = lambda _: None,
    ) -> None:
        """`session`: by which verl finds the server again that has the conversation in its cache. `with_texts`: what a
        server is told beside stop texts, so that it keeps their tokens; None: it knows no stop texts. What goes beyond
        one is cut off here anyway. `answered` is called with the notes after every answer."""
        self._servers = servers
        self._params = params
        self._session = session
        self._decode = decode
        self._with_texts = with_texts
        self._answered = answered
        self.with_logprobs = bool(params.get("logprobs"))
        self.notes = ServerNotes()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        pass

    async def abort(self, request_id: str) -> None:
        """verl's client cannot end what a server samples: nothing happens. Whoever waits for it stops waiting."""

    async def generate(self, prompt_ids: Ids, sampling: Sampling, *, request_id: str) -> Generation:
        try:
            answer = await self._servers.generate(
                request_id=self._session, prompt_ids=list(prompt_ids), sampling_params=self._asked(sampling)
            )
        except _REFUSALS as error:
            raise EngineRequestError(f"verl's server refused the request: {summarize(error)}") from error
        except Exception as error:
            raise EngineError(f"verl's server failed: {summarize(error)}") from error
        self.notes.take(answer)
        self._answered(self.notes)
        return self._generation(answer, sampling)

    def _asked(self, sampling: Sampling) -> dict[str, Any]:
        """New for every request: servers take theirs apart."""
        params: dict[str, Any] = {**self._params, "max_tokens": sampling.max_tokens}
        stops = dict.fromkeys([*(params.get("stop_token_ids") or ()), *sampling.stop_token_ids])
        if stops:
            params["stop_token_ids"] = [*stops]
        if sampling.stop and self._with_texts is not None:
            params |= {"stop": [*dict.fromkeys([*(params.get("stop") or ()), *sampling.stop])], **self._with_texts}
        return params

    def _generation(self, answer: Any, sampling: Sampling) -> Generation:
        ids = [int(token) for token in answer.token_ids]
        logprobs: list[float] | None = None
        if self.with_logprobs:
            if answer.log_probs is None and ids:
                raise EngineRequestError("verl's server was asked for log-probabilities, and returned none")
            logprobs = [float(value) for value in answer.log_probs or ()]
            if len(logprobs) != len(ids):
                raise EngineError(f"verl's server returned {len(ids)} tokens and {len(logprobs)} log-probabilities")
        end, stop_text = self._end(ids, sampling)
        if end is not None:
            finish = Finish.STOP
        elif answer.stop_reason in _ABORTED:
            finish = Finish.ABORT
        elif answer.stop_reason == "length" or len(ids) >= sampling.max_tokens:  # vLLM's is "completed" either way
            finish = Finish.LENGTH
        else:
            finish = Finish.STOP
        end = min(sampling.max_tokens, len(ids) if end is None else end)
        version, told = self.notes.newest, _told(answer)
        return Generation(
            ids[:end],
            None if logprobs is None else logprobs[:end],
            finish,
            None if version is None else str(version),
            told.get("num_cached_tokens"),
            stop_text,
        )

    def _end(self, ids: Sequence[int], sampling: Sampling) -> tuple[int | None, str | None]:
        """Where the turn ends, and the stop text that ends it, if one does. What was sampled after it is dropped: the
        rest is still what was sampled."""
        stops, texts = set(sampling.stop_token_ids), StopTexts(sampling.stop, self._decode)
        for index, token in enumerate(ids[: sampling.max_tokens]):
            text = texts.add(token) if sampling.stop else None
            if text is not None or token in stops:
                return index + 1, text
        return None, None
