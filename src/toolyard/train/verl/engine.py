"""verl's servers as an `Engine`: token ids in, token ids and log-probabilities out, through verl's own client."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from toolyard.engines.protocol import Finish, Generation, Ids, Sampling
from toolyard.engines.stops import StopTexts
from toolyard.errors import EngineError, EngineRequestError, summarize

_ABORTED = ("aborted", "abort")
_REFUSALS = (ValueError, TypeError, AssertionError)
"""Exceptions with which verl's servers reject a request, for example one that is too long."""
SPECULATED = ("spec_num_draft_tokens", "spec_num_accepted_tokens", "spec_num_verify_steps")
"""Counters of speculative decoding, for verl's metrics."""


@dataclass(slots=True)
class ServerNotes:
    """Values that verl needs for a trajectory and only its servers report."""

    oldest: int | None = None
    """verl's step of the weights for the first sampled tokens."""
    newest: int | None = None
    preempted: int = -1
    """-1: not reported."""
    speculated: dict[str, int] = field(default_factory=dict[str, int])
    experts: Any = None
    """The experts that a mixture-of-experts model used, for every token up to the last answer."""

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
    """Extra sampling parameters that verl's servers need with stop texts; None: they do not support stop texts."""
    match rollout.name:
        case "vllm":  # verl always starts it with a tokenizer
            return {"include_stop_str_in_output": True}
        case "sglang" if not rollout.get("skip_tokenizer_init", True):
            return {"no_stop_trim": True}
        case _:
            return None


class VerlEngine:
    """The engine of one trajectory. `params` are verl's sampling parameters, passed on unchanged with a token limit and
    the stop tokens and texts; other fields of `Sampling` are ignored."""

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
        """
        Args:
            session: The id by which verl routes to the server that has the conversation in its cache.
            with_texts: Extra parameters with stop texts, so that servers keep their tokens; None: servers do not
                support stop texts. Tokens after a stop text are cut off here in any case.
            answered: Called with the notes after every answer.
        """
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
        """Does nothing: verl's client cannot abort a request on a server. The caller only stops waiting."""

    async def generate(self, prompt_ids: Ids, sampling: Sampling, *, request_id: str) -> Generation:
        try:
            answer = await self._servers.generate(
                request_id=self._session, prompt_ids=list(prompt_ids), sampling_params=self._asked(sampling)
            )
        except _REFUSALS as error:
            raise EngineRequestError(f"verl's server rejected the request: {summarize(error)}") from error
        except Exception as error:
            raise EngineError(f"verl's server failed: {summarize(error)}") from error
        self.notes.take(answer)
        self._answered(self.notes)
        return self._generation(answer, sampling)

    def _asked(self, sampling: Sampling) -> dict[str, Any]:
        """A new dict for every request: servers modify theirs."""
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
                raise EngineRequestError("verl's server was asked for log-probabilities but returned none")
            logprobs = [float(value) for value in answer.log_probs or ()]
            if len(logprobs) != len(ids):
                raise EngineError(f"verl's server returned {len(ids)} tokens but {len(logprobs)} log-probabilities")
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
        return Generation(
            ids[:end],
            None if logprobs is None else logprobs[:end],
            finish,
            self._version(answer),
            _told(answer).get("num_cached_tokens"),
            stop_text,
        )

    def _version(self, answer: Any) -> str | None:
        """Such as 7, or 7-8 if the weights changed in the middle of the answer: verl does not say at which token."""
        newest = self.notes.newest
        oldest = _told(answer).get("min_global_steps", newest)
        return None if newest is None else str(newest) if oldest in (None, newest) else f"{oldest}-{newest}"

    def _end(self, ids: Sequence[int], sampling: Sampling) -> tuple[int | None, str | None]:
        """Where the turn ends, and the stop text that ends it, if any. Tokens sampled after it are dropped; the rest is
        still exact."""
        stops, texts = set(sampling.stop_token_ids), StopTexts(sampling.stop, self._decode)
        for index, token in enumerate(ids[: sampling.max_tokens]):
            text = texts.add(token) if sampling.stop else None
            if text is not None or token in stops:
                return index + 1, text
        return None, None
