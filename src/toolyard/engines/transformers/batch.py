"""The requests of the embedded engine, and what one step does for them. Runs in one thread, without an event loop."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from toolyard.engines.protocol import Finish, Generation, Sampling
from toolyard.engines.stops import StopTexts
from toolyard.engines.transformers.attention import Piece, Step
from toolyard.engines.transformers.cache import Prefixes, Rows, Span, common_prefix
from toolyard.engines.transformers.model import PackedModel
from toolyard.engines.transformers.sampling import Chooser, choose
from toolyard.engines.transformers.static import RowPiece, StaticModel, best_length
from toolyard.errors import EngineError

_WORTH_WAITING = 16
"""If another request is computing at least this many tokens of the same prompt, it pays to wait for them."""
_WORTH_A_PASS = 2
"""In rows, all sequences advance by a token per step anyway. A pass over prompts takes as long as one or two steps: it
pays if more tokens than this are left for each sequence, on average."""
_MOST_SCORES = 2**25
"""Limits the tokens of a pass over a long prompt: they are multiplied by all tokens before them."""


@dataclass(eq=False, slots=True)
class EngineJob:
    """A request in the engine."""

    request_id: str
    ids: list[int]
    """The prompt, followed by what was sampled."""
    sampling: Sampling
    most: int
    """Maximum number of tokens to sample."""
    deliver: Callable[[Generation | EngineError], None]
    """Called once, by the thread that runs the batch."""
    stops: StopTexts | None = None
    prompt: int = 0
    logprobs: list[float] = field(default_factory=list[float])
    span: Span | None = None
    """Keys and values while the prompt is being computed."""
    done: int = 0
    """How many of `ids` are computed."""
    cached: int | None = None
    chooser: Chooser | None = None
    aborted: bool = False
    cancelled: bool = False
    """Nobody waits for it: end it, and keep nothing."""
    added: float = field(default_factory=time.monotonic)
    queued: float = 0.0
    """Seconds until it was first admitted."""

    def __post_init__(self) -> None:
        self.prompt = len(self.ids)

    @property
    def is_wanted(self) -> bool:
        return not (self.aborted or self.cancelled)

    def end(self, finish: Finish, version: str | None, stop_text: str | None = None) -> None:
        sampled = self.ids[self.prompt :]
        self.deliver(Generation(sampled, self.logprobs, finish, version, self.cached, stop_text, self.queued))


class Batch:
    """Waiting, prefilling, decoding: requests come and go at every step.

    A step computes the next token of all decoding requests and, within `prefill_tokens`, more of the prompts of those
    prefilling. The i-th decoding request has row i.

    If the model is static, prompts are computed in rows as well, and nobody is prefilling: requests are decoding from
    the start, and sample once all of their tokens are computed.
    """

    def __init__(self, model: PackedModel, *, most: int, prefill_tokens: int, cache_tokens: int) -> None:
        self.model = model
        self.version = "0"
        self._most = most
        self._prefill_tokens = prefill_tokens
        self._cache_tokens = cache_tokens
        self._rows = Rows(model.shape)
        self._static = StaticModel(model, self._rows) if model.is_static else None
        self._prefixes = Prefixes(cache_tokens)
        self._waiting: deque[EngineJob] = deque()
        self._prefilling: list[EngineJob] = []
        self._decoding: list[EngineJob] = []

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting or self._prefilling or self._decoding)

    @property
    def cached_tokens(self) -> int:
        """Number of tokens kept for later."""
        return self._prefixes.tokens

    def add(self, job: EngineJob) -> None:
        self._waiting.append(job)

    def step(self) -> None:
        """Run one forward pass. If we fail (for example, out of memory), the requests in it fail, and the next step
        starts with nothing computed."""
        try:
            self._remove_unwanted()
            self._admit()
            pieces = list(self._next_pieces())
            if self._static is not None and self._decoding:
                self._run_in_rows(self._static)
            elif pieces or self._decoding:
                self._run(pieces)
            if not self.is_busy and self._rows.capacity > self._cache_tokens:
                self._clear_rows()  # while idle, only what is cached takes memory
        except Exception as error:
            self._fail_step(error)

    def fail_all(self, error: BaseException) -> None:
        """End all requests: nothing more will be sampled."""
        everyone = self._everyone()
        self._waiting.clear()
        self._prefilling.clear()
        self._decoding.clear()
        for job in everyone:
            job.deliver(_failure(error))

    def abort_all(self) -> None:
        """End all running and waiting requests with what they have, and keep nothing."""
        for job in self._everyone():
            job.cancelled = True
        self._remove_unwanted()

    def abort_begun(self) -> None:
        """Like `abort_all`, for the requests that have sampled a token. The others lose nothing by waiting."""
        for job in self._everyone():
            job.cancelled = job.cancelled or len(job.ids) > job.prompt
        self._remove_unwanted()

    def forget(self) -> None:
        """After new weights: discard everything computed. Running requests restart from their tokens."""
        for job in (*self._prefilling, *self._decoding):
            job.span, job.done = None, 0
        self._waiting.extendleft(reversed([*self._decoding, *self._prefilling]))
        self._decoding.clear()
        self._prefilling.clear()
        if self._static is not None and self._rows.capacity <= self._cache_tokens:
            self._rows.empty()  # graphs stay valid
        else:
            self._clear_rows()
        self._prefixes.clear()

    def forget_graphs(self) -> None:
        """After a change to the model that is more than new weights."""
        if self._static is not None:
            self._static.forget()

    def _clear_rows(self) -> None:
        self._rows.clear()
        self.forget_graphs()  # they would keep the memory of what they compute

    # --------------------------------------------------------------------------------------------------- before a step
    def _everyone(self) -> list[EngineJob]:
        return [*self._waiting, *self._prefilling, *self._decoding]

    def _remove_unwanted(self) -> None:
        for job in [job for job in self._everyone() if not job.is_wanted]:
            self._remove(job)
            job.end(Finish.ABORT, self.version)

    def _remove(self, job: EngineJob) -> None:
        """Remove it wherever it is. What was computed for it is kept, unless it was cancelled."""
        if job in self._waiting:
            self._waiting.remove(job)
            return
        if job in self._prefilling:
            self._prefilling.remove(job)
            if job.span is not None and not job.cancelled:
                self._keep(job, job.span)
        else:
            row = self._decoding.index(job)
            if not job.cancelled:
                self._keep(job, self._rows.span(row, job.done))
            if job.done < len(job.ids) - 1:  # nobody has seen its logits: they may be no numbers
                self._rows.wipe(row)
            self._decoding[row] = self._decoding[-1]
            self._decoding.pop()
            self._rows.leave(row)
        job.span = None
        if job.cancelled:
            self._prefixes.drop(job.request_id)

    def _keep(self, job: EngineJob, span: Span) -> None:
        self._prefixes.keep(job.request_id, job.ids[: job.done], span)

    def _admit(self) -> None:
        """Admit as many as fit, in order; but a request that would compute what another is computing waits for that
        one, and others may overtake it."""
        passed: list[EngineJob] = []
        while self._waiting and len(self._prefilling) + len(self._decoding) < self._most > len(passed):
            job = self._waiting.popleft()
            shared, source = self._longest_known(job)
            if self._is_ahead(job, shared + _WORTH_WAITING):
                passed.append(job)
                continue
            try:
                self._begin(job, shared, source)
            except Exception as error:
                job.deliver(_failure(error))
        self._waiting.extendleft(reversed(passed))

    def _is_ahead(self, job: EngineJob, tokens: int) -> bool:
        """Return whether another request is computing as many tokens of the same prompt."""
        if tokens > len(job.ids):
            return False
        last, start = job.ids[tokens - 1], job.ids[:tokens]
        others = self._prefilling if self._static is None else self._decoding
        return any(
            len(other.ids) >= tokens and other.ids[tokens - 1] == last and other.ids[:tokens] == start
            for other in others
        )

    def _longest_known(self, job: EngineJob) -> tuple[int, Tensor | None]:
        """Return how many tokens of the job, at most all but one, are computed somewhere; and where."""
        ids = job.ids
        shared, source = self._prefixes.longest(job.request_id, ids)
        for row, other in enumerate(self._decoding):
            if shared >= len(ids) - 1:
                break
            if other.done > shared and other.ids[shared] == ids[shared]:
                there = min(common_prefix(other.ids, ids), other.done)
                if there > shared:
                    shared, source = there, self._rows.row(row)
        return min(shared, len(job.ids) - 1), source

    def _begin(self, job: EngineJob, shared: int, source: Tensor | None) -> None:
        if job.chooser is None:  # otherwise it was interrupted by new weights and continues
            job.cached, job.queued = shared, round(time.monotonic() - job.added, 6)
            job.chooser = Chooser(job.sampling, job.ids, self.model.vocabulary, self.model.device)
        job.done = shared
        if self._static is not None:
            self._rows.reserve(len(self._decoding) + 1, len(job.ids))
            self._rows.join(source, shared)
            self._decoding.append(job)
        else:
            job.span = Span(self.model.shape, len(job.ids))
            if source is not None:
                job.span.copy_from(source, shared)
            self._prefilling.append(job)

    def _next_pieces(self) -> Iterator[tuple[EngineJob, Piece]]:
        left = self._prefill_tokens
        for job in self._prefilling:
            take = min(left, len(job.ids) - job.done)
            if not take:
                break
            assert job.span is not None
            end = job.done + take
            yield job, Piece(job.ids[job.done : end], job.done, job.span, is_last=end == len(job.ids))
            left -= take

    # ----------------------------------------------------------------------------------------------- a step, and after
    def _run(self, pieces: Sequence[tuple[EngineJob, Piece]]) -> None:
        newest = [job.ids[-1] for job in self._decoding]
        step = Step(self._rows, newest, [piece for _, piece in pieces], self.model.device)
        logits = self.model.logits(step)
        decoded = list(self._decoding)
        for row, job in enumerate(decoded):
            job.done += 1
            self._rows.lengths[row] += 1
        for job, piece in pieces:
            job.done += len(piece.ids)
        ready = [job for job, piece in pieces if piece.is_last]
        self._sample(logits, [*decoded, *ready])
        for job in ready:
            if job in self._prefilling:
                assert job.span is not None
                self._rows.join(job.span.contents, job.done)
                self._prefilling.remove(job)
                self._decoding.append(job)
                job.span = None

    def _run_in_rows(self, static: StaticModel) -> None:
        pieces = self._row_pieces()
        if pieces:
            static.fill(pieces)
            for piece in pieces:
                self._advance(piece.row, len(piece.ids))
        logits = static.logits([job.ids[job.done] for job in self._decoding])
        for row in range(len(self._decoding)):
            self._advance(row, 1)
        ready = [row for row, job in enumerate(self._decoding) if job.done == len(job.ids)]
        if len(ready) < len(self._decoding):
            logits = logits[torch.tensor(ready, dtype=torch.long, device=self.model.device)]
        self._sample(logits, [self._decoding[row] for row in ready])

    def _row_pieces(self) -> list[RowPiece]:
        """Return what to compute of the prompts before everyone's next token."""
        left = [len(job.ids) - 1 - job.done for job in self._decoding]
        if sum(left) <= _WORTH_A_PASS * len(left):
            return []
        room = min(self._prefill_tokens, max(_MOST_SCORES // max(len(job.ids) for job in self._decoding), 1))
        length = best_length(left, room)
        rows = sorted((row for row, count in enumerate(left) if count), key=lambda row: -left[row])
        return [
            RowPiece(row, job.ids[job.done : job.done + min(left[row], length)], job.done)
            for row, job in ((row, self._decoding[row]) for row in rows[: max(room // length, 1)])
        ]

    def _advance(self, row: int, tokens: int) -> None:
        self._decoding[row].done += tokens
        self._rows.lengths[row] += tokens

    def _sample(self, logits: Tensor, jobs: Sequence[EngineJob]) -> None:
        if not jobs:
            return
        choosers = [job.chooser for job in jobs if job.chooser is not None]
        for job, token, logprob in zip(jobs, *choose(logits, choosers), strict=True):
            if not math.isfinite(logprob):
                job.cancelled = True  # what was computed for it is useless
                if job in self._decoding:
                    self._rows.wipe(self._decoding.index(job))
                self._remove(job)
                job.deliver(EngineError(f"the model's logits are not finite after {job.done} tokens: bad weights?"))
                continue
            job.ids.append(token)
            job.logprobs.append(logprob)
            stop_text = job.stops.add(token) if job.stops else None
            if token in job.sampling.stop_token_ids or stop_text is not None:
                finish = Finish.STOP
            elif len(job.logprobs) >= job.most:
                finish = Finish.LENGTH
            else:
                continue
            self._remove(job)
            job.end(finish, self.version, stop_text)

    def _fail_step(self, error: Exception) -> None:
        """Handle a failed step. What it wrote is invalid; cached memory may be what was missing."""
        failed = [*self._prefilling, *self._decoding]
        self._prefilling.clear()
        self._decoding.clear()
        self._clear_rows()
        self._prefixes.clear()
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()
        for job in failed:
            job.span = None
            job.deliver(_failure(error))


def _failure(error: BaseException) -> EngineError:
    failure = EngineError(f"the embedded engine failed in a step: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
