"""The embedded engine: a causal language model in this process, with transformers, on the CPU or a GPU.

One thread runs the model, step by step; requests join and leave at every step, and what was computed for a request is
kept for its next turn, and for requests that share its prefix.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import toolyard.engines.transformers.openmp  # noqa: F401  # pyright: ignore[reportUnusedImport]  (before torch)
from toolyard.engines.protocol import Generation, Ids, Sampling
from toolyard.engines.stops import StopTexts
from toolyard.engines.transformers.batch import Batch, EngineJob
from toolyard.engines.transformers.model import PackedModel, load
from toolyard.errors import ConfigError, EngineError, EngineRequestError

if TYPE_CHECKING:
    from torch import Tensor

Weights: TypeAlias = "Mapping[str, Tensor] | Callable[[Any], None]"
"""New values by name; or a function that modifies the model in place."""


class TransformersEngine:
    """Samples from a model that is loaded on entry.

    Guarantees beyond the protocol:

    * Log-probabilities are what a trainer computes: log-softmax, in float32, of the logits divided by the request's
      temperature (by 1 if it is 0), whatever else limits the choice.
    * A request with a seed has its own random generator. The same seed after the same tokens gives the same answer,
      whatever else is sampled, as long as the logits are the same: which sequences share a step, and where a prompt is
      split into pieces, changes the last bits of a logit, and so, rarely, which of two almost equally likely tokens is
      chosen. Bit-for-bit repetition needs the same requests in the same steps: `max_batch_size=1`.
    * Keys and values of an answer are kept for the next turn of the same `request_id`, and reused for any prompt with
      the same prefix. They never change an answer, except in the same last bits.

    Models whose attention is not plain causal attention, with or without sliding windows, or cannot be replaced, are
    refused on entry. With longrope, the context ends where its factors would change.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        adapter: str | Path | None = None,
        device: str = "auto",
        dtype: str = "auto",
        torch_compile: bool = False,
        max_batch_size: int = 16,
        max_model_len: int | None = None,
        prefill_tokens: int | None = None,
        cache_tokens: int | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
        weight_version: str = "0",
    ) -> None:
        """Configure the engine; nothing is loaded yet.

        Args:
            model: A folder in Hugging Face's format, or a hub id; see `toolyard.engines.models.resolve_model`.
            adapter: A folder with a LoRA adapter in PEFT's format, which is merged into the weights.
            device: "auto" is the GPU if there is one, otherwise the CPU.
            dtype: "auto" is float32 on the CPU and bfloat16 elsewhere.
            torch_compile: Let torch compile the model's layers when the engine opens. For GPUs; needs a C compiler.
            max_batch_size: Maximum number of requests sampled at the same time; others wait.
            max_model_len: Maximum tokens of prompt and answer together; limited by the model's own maximum.
            prefill_tokens: Maximum prompt tokens computed per step, while others wait for their next token. Default:
                1,024 on the CPU, 4,096 on a GPU.
            cache_tokens: How many tokens of finished turns are kept for later. Default: 32,768; on a GPU more, as long
                as they take no more than 5 % of its memory.
            decode: Decodes tokens, for stop strings. By default, the model's tokenizer is loaded when needed.
        """
        if min(max_batch_size, 1 if prefill_tokens is None else prefill_tokens) < 1 or (cache_tokens or 0) < 0:
            raise ConfigError("max_batch_size and prefill_tokens must be at least 1, and cache_tokens at least 0")
        self._name = model
        self._load: Callable[[], PackedModel] = lambda: load(model, device, dtype, adapter, torch_compile=torch_compile)
        self._limits = (max_batch_size, prefill_tokens, cache_tokens)
        self._max_model_len = max_model_len
        self._decode = decode
        self._loading = threading.Lock()
        self._version = weight_version
        self._worker: _ModelThread | None = None
        self._jobs: dict[str, set[EngineJob]] = {}

    @property
    def weight_version(self) -> str:
        return self._version

    @property
    def context(self) -> int:
        """Maximum tokens of a prompt and its answer together. Available while the engine is open."""
        return self._open().context

    async def __aenter__(self) -> Self:
        """Load the model.

        Raises:
            ConfigError: the model or its adapter cannot be loaded or used.
        """
        if self._worker is not None:
            raise EngineRequestError("the engine is already open")
        most, prefill, cached = self._limits

        def make() -> Batch:
            model = self._load()
            batch = Batch(
                model,
                most=most,
                prefill_tokens=model.prefill_tokens if prefill is None else prefill,
                cache_tokens=model.cache_tokens if cached is None else cached,
            )
            batch.version = self._version
            return batch

        worker = _ModelThread(make, self._max_model_len)
        try:
            await asyncio.wrap_future(worker.ready)
        except BaseException:
            worker.close()
            await asyncio.to_thread(worker.join)  # a thread still loading would disturb the next load
            raise
        self._worker = worker
        return self

    async def __aexit__(self, *_: object) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()
            await asyncio.to_thread(worker.join)

    async def generate(self, prompt_ids: Ids, sampling: Sampling, *, request_id: str) -> Generation:
        worker = self._open()
        ids = [int(token) for token in prompt_ids]
        _check(ids, worker)
        most = min(sampling.max_tokens, worker.context - len(ids))
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Generation] = loop.create_future()
        job = EngineJob(request_id, ids, sampling, most, lambda outcome: _deliver(loop, answer, outcome))
        self._jobs.setdefault(request_id, set()).add(job)
        try:
            if sampling.stop:
                job.stops = StopTexts(sampling.stop, self._decode or await asyncio.to_thread(self._load_decoder))
            worker.add(job)
            return await answer
        except asyncio.CancelledError:
            job.cancelled = True
            worker.wake()
            raise
        finally:
            self._jobs[request_id].discard(job)
            if not self._jobs[request_id]:
                del self._jobs[request_id]

    async def abort(self, request_id: str) -> None:
        for job in self._jobs.get(request_id, ()):
            job.aborted = True
        if self._worker is not None:
            self._worker.wake()

    def sampled_tokens(self, request_id: str) -> int:
        return sum(len(job.ids) - job.prompt for job in list(self._jobs.get(request_id, ())))

    def steps(self) -> int:
        return 0 if self._worker is None else self._worker.steps

    async def update_weights(self, weights: Weights, version: str, *, abort: bool = True) -> None:
        """Change the model between two steps, and discard what the old one computed.

        Args:
            weights: New values by name (others stay unchanged), or a function that is called with the model, in the
                engine's thread, while nothing else uses it.
            version: The version that answers report from now on.
            abort: Requests that have sampled tokens end with `Finish.ABORT` and the old version, and may continue from
                there, so every token has one version or the other. Otherwise they are not interrupted: an answer that
                started with the old weights ends with the new ones, and reports the new version.

        Raises:
            ConfigError: the model has no such name or shape; nothing was changed.
            Exception: whatever the function raises; the version stays, and so do the function's changes.
        """
        await asyncio.wrap_future(self._open().update(weights, version, abort))
        self._version = version

    def _open(self) -> _ModelThread:
        if self._worker is None or not self._worker.is_alive:
            raise _not_open()
        return self._worker

    def _load_decoder(self) -> Callable[[Sequence[int]], str]:
        with self._loading:
            if self._decode is None:
                self._decode = _load_decoder(self._name)
            return self._decode


class _ModelThread:
    """The thread, and its inbox."""

    def __init__(self, make: Callable[[], Batch], max_model_len: int | None) -> None:
        self.ready: Future[None] = Future()
        self.context = 0
        self.vocabulary = 0
        self.steps = 0
        self._make = make
        self._max_model_len = max_model_len
        self._inbox: deque[EngineJob | Callable[[Batch], None]] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self.ready.set_running_or_notify_cancel()  # cancelling the caller must not break the thread
        self._thread = threading.Thread(target=self._run, name="toolyard-engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return not self._closing

    def add(self, job: EngineJob | Callable[[Batch], None]) -> None:
        with self._changed:
            if self._closing:
                raise _not_open()
            self._inbox.append(job)
            self._changed.notify()

    def wake(self) -> None:
        with self._changed:
            self._changed.notify()

    def update(self, weights: Weights, version: str, abort: bool) -> Future[None]:
        done: Future[None] = Future()

        def change(batch: Batch) -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                if not callable(weights):
                    batch.model.check_weights(weights)
                if abort:
                    batch.abort_begun()
                batch.forget()
                if callable(weights):
                    batch.forget_graphs()
                    batch.model.modify(weights)
                else:
                    batch.model.load_weights(weights)
                batch.version = version
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        self.add(change)
        return done

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        try:
            batch = self._make()
            self.context = batch.model.room(self._max_model_len)
            self.vocabulary = batch.model.vocabulary
        except BaseException as error:
            self.ready.set_exception(error)
            return
        self.ready.set_result(None)
        try:
            while self._receive(batch):
                if batch.is_busy:
                    batch.step()
                    self.steps += 1
            batch.abort_all()
        except BaseException as error:  # a bug of ours: nobody may wait forever because of it
            self.close()
            self._receive(batch)
            batch.fail_all(error)
            raise

    def _receive(self, batch: Batch) -> bool:
        """Process new work; wait for it if there is nothing else to do. False: it is time to end."""
        with self._changed:
            while not (self._inbox or self._closing or batch.is_busy):
                self._changed.wait()
            arrived = list(self._inbox)
            self._inbox.clear()
            going_on = not self._closing
        for item in arrived:
            if isinstance(item, EngineJob):
                batch.add(item)
            else:
                item(batch)
        return going_on


def _not_open() -> EngineRequestError:
    return EngineRequestError("the engine is not open: use it with `async with`")


def _check(ids: list[int], worker: _ModelThread) -> None:
    if not ids:
        raise EngineRequestError("the prompt is empty")
    if min(ids) < 0 or max(ids) >= worker.vocabulary:
        raise EngineRequestError(f"the prompt has an id that is not one of the model's {worker.vocabulary} tokens")
    if len(ids) >= worker.context:
        raise EngineRequestError(f"a prompt of {len(ids)} tokens leaves no room in a context of {worker.context}")


def _deliver(
    loop: asyncio.AbstractEventLoop, answer: asyncio.Future[Generation], outcome: Generation | EngineError
) -> None:
    def settle() -> None:
        if answer.done():
            return
        if isinstance(outcome, EngineError):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome)

    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is waiting
        loop.call_soon_threadsafe(settle)


def _load_decoder(model: str | Path) -> Callable[[Sequence[int]], str]:
    import transformers

    tokenizers: Any = transformers.AutoTokenizer
    try:
        tokenizer = tokenizers.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise EngineRequestError(f"stop strings need the tokenizer of {str(model)!r}: {error}") from error
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
