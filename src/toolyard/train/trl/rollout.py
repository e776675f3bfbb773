"""Toolyard's rollouts as the `rollout_func` of TRL's `GRPOTrainer` (TRL ≥ 1.16).

    with ToolyardRollout(load_config("rollout.yaml")) as rollout:
        GRPOTrainer(
            model, reward_funcs=[rollout.reward], rollout_func=rollout, train_dataset=rollout.dataset(), args=…
        ).train()

Do not combine it with TRL's own `tools=`: TRL would then ignore the mask of tool tokens.

For each prompt the trainer gets the ids that were sampled and seen, a mask of the sampled ones (`env_mask`), their
log-probabilities (0.0 elsewhere), and `score` and `trajectory`, which are passed to every reward function with
parameters of these names. A trajectory that cannot be trained on (its request failed, it has no reward, nothing was
sampled) is replaced by one masked token without a score: TRL leaves it out of its group's baseline, and it does not
affect any weight.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Self

from toolyard.errors import ConfigError, MissingDependencyError, TrainError
from toolyard.messages import JSON, Message
from toolyard.records.jsonl import encode
from toolyard.records.trajectory import Trajectory
from toolyard.rollout.assembly import tasks_of
from toolyard.rollout.config import RolloutConfig
from toolyard.rollout.summary import Summary
from toolyard.tasks.protocol import Task
from toolyard.train.config import check_asynchronous
from toolyard.train.order import Position, TaskOrder
from toolyard.train.samples import Refusal, Refused, TrainingSample, sample_of
from toolyard.train.trl.playing import Player
from toolyard.train.trl.stream import StreamSettings, StreamShare


@dataclass(frozen=True, slots=True)
class StepReport:
    """One call of the rollout function, in one process."""

    step: int
    evaluation: bool
    summary: Summary
    refused: tuple[Refused, ...]
    """The trajectories that are not trained on."""
    seconds: Mapping[str, float]
    """`sync`: transferring the weights. `rollout`: playing all requests. The summary has the requests' own times."""
    groups: Mapping[str, int] = field(default_factory=dict[str, int])
    """With dynamic sampling, the number of groups that were `sampled`, were `flat`, and were `replaced`. Everything
    else in the report is about the trajectories that are handed to the trainer."""
    staleness: Mapping[int, int] = field(default_factory=dict[int, int])
    """With asynchronous training, the number of sampled tokens by the number of updates since their weights."""


class StepObserver:
    """Watches rollouts. Subclass it and override what you need. Methods are called in the trainer's thread, except
    `note` and `ended`."""

    def note(self, text: str) -> None:
        """A message for the user: where metrics are served."""

    def begins(self, step: int, requests: int, evaluation: bool) -> None:
        """The rollouts of a step start."""

    def ended(self, trajectory: Trajectory) -> None:
        """A request has ended. Called in the rollouts' thread."""

    def stepped(self, report: StepReport) -> None:
        """All requests of the step have ended."""


@dataclass(slots=True)
class _Offsets:
    """Numbers the samples of each task, over all calls of a step and all processes."""

    step: int = -1
    seen: Counter[str] = field(default_factory=Counter[str])

    def of(self, tasks: Sequence[str], step: int) -> list[int]:
        if step != self.step:
            self.step, self.seen = step, Counter()
        offsets: list[int] = []
        for task in tasks:
            offsets.append(self.seen[task])
            self.seen[task] += 1
        return offsets


class ToolyardRollout:
    """Plays the trainer's prompts with tools, sampling from the trainer's current weights.

    * `config.engine.kind` is `transformers`: a copy of the model in this process, which gets the trainer's weights
      (LoRA merged, shards gathered) before each step. `vllm`: the server of TRL's server mode, which TRL keeps up to
      date. `sglang`: servers that read the weights from a folder shared with this process.
    * With `config.cluster`, the workers of a Ray cluster play; with `transformers`, each has a copy of the model.
    * Tools are opened once, at the first step; each trajectory has its own instances.
    * With a `rollout_data_dir`, each step's trajectories are dumped there, evaluations in `eval`. The main process
      writes for all processes. A step that is played again after a resume replaces its lines.
    * With `stream`, it plays tasks in an order of its own and ignores the trainer's prompts, except for their number.
      The only reward function is then `reward`: others would get the columns of the wrong rows.
    """

    def __init__(
        self, config: RolloutConfig, *, observer: StepObserver | None = None, stream: StreamSettings | None = None
    ) -> None:
        """
        Raises:
            ConfigError: the tasks cannot be read, two different tasks have the same prompt, or the engine does not
                support training.
        """
        if config.engine.kind not in ("transformers", "vllm", "sglang"):
            kind = config.engine.kind
            raise ConfigError(f"engine.kind {kind!r}: training needs transformers, vllm or sglang")
        if stream is not None:
            if config.cluster is not None:
                raise ConfigError("stream: not supported with `cluster`; remove one of them")
            check_asynchronous(config, stream.asynchronous)
        self.config = config
        self.observer = observer or StepObserver()
        self.reward = RolloutReward()
        self._tasks = _by_prompt(config)
        self._player = Player(config, self.observer.note)
        self._offsets = {False: _Offsets(), True: _Offsets()}
        self._stream = stream
        self.position: Position | None = None
        """Of the stream after the last step, in this process: what a run that continues from there starts with."""

    # ------------------------------------------------------------------------------------------------- for the trainer
    def dataset(self) -> Any:
        """The tasks as a `datasets.Dataset` for TRL: `prompt`, the `task`'s id, `data_source`, and `ground_truth` if it
        is a string in all of them.

        Raises:
            MissingDependencyError: `datasets`, which comes with TRL, is not installed.
        """
        try:
            datasets: Any = import_module("datasets")
        except ImportError as error:
            raise MissingDependencyError("datasets", "trl", "training with TRL") from error
        tasks = self._tasks.values()
        texts = all(isinstance(task.ground_truth, str) for task in tasks)
        rows: list[JSON] = [
            {
                "prompt": [message.as_openai() for message in task.messages],
                "task": task.id,
                "data_source": task.data_source,
                **({"ground_truth": task.ground_truth} if texts else {}),
            }
            for task in tasks
        ]
        return datasets.Dataset.from_list(rows)

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        """Called by TRL for each batch of prompts; a prompt is repeated for each sample.

        Raises:
            ConfigError: a prompt belongs to none of the tasks, or the trainer's settings contradict the rollout's.
            ToolyardError: the tools or the engine cannot be opened.
            TrainError: no trajectory of any process can be trained on. In evaluations, they only have no score.
        """
        evaluation, step = not trainer.model.training, int(trainer.state.global_step)
        _check_trainer(self.config, trainer)
        if self._stream is not None and not evaluation:
            return self._streamed(self._stream, len(prompts), trainer, step)
        tasks = [self._task_of(prompt) for prompt in prompts]
        shares: list[list[str]] = _gathered([task.id for task in tasks], trainer)
        numbered = list(zip(tasks, self._my_offsets(shares, trainer, step, evaluation), strict=True))
        self.observer.begins(step, len(tasks), evaluation)
        began = time.perf_counter()
        self._player.prepare(trainer, step)
        ready = time.perf_counter()
        trajectories = self._player.play(numbered, step, self.observer.ended)
        seconds = {"sync": ready - began, "rollout": time.perf_counter() - ready}
        judged = self._of_these_weights([sample_of(trajectory) for trajectory in trajectories], step)
        self._report(trajectories, judged, step, evaluation, seconds)
        return self._handed_over(trajectories, judged, trainer, step, evaluation)

    def prepare_stream(self, trainer: Any) -> None:
        """Give the engine the trainer's current weights now, as the next step would, if a stream is running. All
        processes must call it together."""
        self._player.prepare_stream(trainer, int(trainer.state.global_step))

    def close(self) -> None:
        """Close engine and tools. Closing twice is allowed."""
        self._player.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ----------------------------------------------------------------------------------------------------------- parts
    def _streamed(self, stream: StreamSettings, samples: int, trainer: Any, step: int) -> dict[str, Any]:
        """The next step of the stream, with as many samples as the trainer has prompts."""
        _check_streaming(self, trainer, samples)
        if stream.max_staleness:
            _check_asynchronous(trainer)
        groups, tasks = samples // self.config.n, list(self._tasks.values())
        order = TaskOrder(len(tasks), seed=stream.seed, shuffle=stream.shuffle)
        process = trainer.accelerator
        share = StreamShare(order, tasks, groups, int(process.process_index), int(process.num_processes))
        self.observer.begins(step, samples, False)
        began = time.perf_counter()
        self._player.prepare(trainer, step)
        ready = time.perf_counter()
        played = self._player.take(
            step,
            share,
            lambda: stream.pacing(groups, step, _steps_of(trainer)),
            self.observer.ended,
            finishes=stream.finishes,
        )
        seconds = {"sync": ready - began, "rollout": time.perf_counter() - ready}
        self.position = played.position
        trajectories = [one for group in played.trained for one in group.trajectories]
        judged = [one for group in played.trained for one in group.judged]
        judged = self._of_these_weights(judged, step, stream.max_staleness)
        counts = {} if stream.dynamic_sampling is None else played.counts
        ages = Counter[int]() if stream.asynchronous is None else staleness(judged, step)
        self._report(trajectories, judged, step, False, seconds, counts, ages)
        aside = [one for group in played.aside for one in group.trajectories]
        return self._handed_over(trajectories, judged, trainer, step, False, aside)

    def _handed_over(
        self,
        trajectories: list[Trajectory],
        judged: list[TrainingSample | Refused],
        trainer: Any,
        step: int,
        evaluation: bool,
        aside: Sequence[Trajectory] = (),
    ) -> dict[str, Any]:
        """What the trainer gets, after everything is dumped, also what was put `aside`."""
        refused = [one for one in judged if isinstance(one, Refused)]
        played = _gathered(([*trajectories, *aside], refused, len(judged)), trainer)
        if trainer.accelerator.is_main_process:
            every = [one for share, _, _ in played for one in share]
            self._player.dump(every, step, evaluation)
        if not evaluation and all(len(refused) == count for _, refused, count in played):
            first = played[0][1][0]
            raise TrainError(
                f"step {step + 1}: none of the trajectories can be trained on; the first, {first.request_id}: "
                f"{first.why}"
            )
        return _columns(judged, trajectories, int(trainer.processing_class.eos_token_id))

    def _of_these_weights(
        self, judged: list[TrainingSample | Refused], step: int, max_staleness: int = 0
    ) -> list[TrainingSample | Refused]:
        """Refuse samples of other weights than were handed over for this step, or at most `max_staleness` earlier."""
        if not self._player.names_versions:
            return judged
        handed_over = {str(version) for version in range(step - max_staleness, step + 1)}

        def checked(one: TrainingSample | Refused) -> TrainingSample | Refused:
            if isinstance(one, Refused):
                return one
            versions = {version for told in one.weight_versions for version in told.split(",")}
            if versions <= handed_over:
                return one
            other = ", ".join(sorted(versions - handed_over))
            why = f"it was sampled with the weights {other}, not those of update {step}: did a server restart or join?"
            return Refused(one.request_id, Refusal.OTHER_WEIGHTS, why)

        return [checked(one) for one in judged]

    def _task_of(self, prompt: Any) -> Task:
        found = self._tasks.get(_key([Message.from_openai(said) for said in prompt]))
        if found is None:
            raise ConfigError(
                f"the trainer sent a prompt that belongs to none of the {len(self._tasks)} tasks of "
                f"{self.config.tasks.path!r}; train on `rollout.dataset()`. The prompt: {str(prompt)[:120]!r}"
            )
        return found

    def _my_offsets(self, shares: list[list[str]], trainer: Any, step: int, evaluation: bool) -> list[int]:
        """The samples of a task may be spread over processes, and each needs its own offset."""
        every = self._offsets[evaluation].of([task for share in shares for task in share], step)
        mine = int(trainer.accelerator.process_index)
        before = sum(map(len, shares[:mine]))
        return every[before : before + len(shares[mine])]

    def _report(
        self,
        trajectories: Sequence[Trajectory],
        judged: Sequence[TrainingSample | Refused],
        step: int,
        evaluation: bool,
        seconds: Mapping[str, float],
        groups: Mapping[str, int] | None = None,
        staleness: Mapping[int, int] | None = None,
    ) -> None:
        summary = Summary()
        for trajectory in trajectories:
            summary.add(trajectory)
        refused = tuple(one for one in judged if isinstance(one, Refused))
        self.observer.stepped(StepReport(step, evaluation, summary, refused, seconds, groups or {}, staleness or {}))


class RolloutReward:
    """A reward function for TRL that returns the trajectories' scores: final and tool rewards, weighted by the
    rollout's settings. None for trajectories without a score."""

    __name__ = "score"

    def __call__(self, *, score: Sequence[float | None], **_: Any) -> list[float | None]:
        return list(score)


def _check_trainer(config: RolloutConfig, trainer: Any) -> None:
    ours, theirs = config.sampling.temperature, float(trainer.args.temperature)
    if ours != theirs:
        raise ConfigError(
            f"sampling.temperature is {ours:g}, but the trainer's is {theirs:g}, at which TRL computes probabilities; "
            f"set GRPOConfig(temperature={ours:g})"
        )
    if trainer.tools:
        raise ConfigError("the trainer has `tools`: TRL would then train on tool results too; remove them")
    if trainer.use_vllm != (config.engine.kind == "vllm"):
        raise ConfigError(f"engine.kind is {config.engine.kind!r}, but the trainer's use_vllm is {trainer.use_vllm}")


def staleness(samples: Iterable[TrainingSample | Refused], step: int) -> Counter[int]:
    """Sampled tokens by age: the number of updates between their weights and those of `step`. Tokens of unknown weights
    are not counted."""
    versions = [one.token_versions or () for one in samples if isinstance(one, TrainingSample)]
    return Counter(step - int(version) for some in versions for version in some if version.isdecimal())


def _check_streaming(rollout: ToolyardRollout, trainer: Any, samples: int) -> None:
    n, theirs = rollout.config.n, int(trainer.args.num_generations)
    if n != theirs or samples % n:
        raise ConfigError(
            f"n is {n}, but the trainer asks for {samples} samples in groups of {theirs}; set "
            f"GRPOConfig(num_generations={n})"
        )
    if [*trainer.reward_funcs] != [rollout.reward]:
        raise ConfigError(
            "the rollout chooses its own tasks, so the columns of the data set belong to other tasks; the only reward "
            "function must be `rollout.reward`. Compute other rewards in the rollout (rewards.final)"
        )
    if getattr(trainer.args, "log_completions", False):
        raise ConfigError(
            "log_completions: the rollout chooses its own tasks, so TRL would show the wrong prompts; use "
            "`toolyard view`"
        )


def _check_asynchronous(trainer: Any) -> None:
    if not getattr(trainer, "divides_by_sampled", False):
        raise ConfigError(
            "asynchronous: the trainer's loss assumes samples of the current weights; use "
            "toolyard.train.trl.OffPolicyGRPOTrainer"
        )
    args = trainer.args
    if int(args.num_iterations) != 1 or int(args.steps_per_generation) != int(args.gradient_accumulation_steps):
        raise ConfigError(
            "asynchronous: every step must train its own samples once; set num_iterations to 1, and leave "
            "steps_per_generation unset"
        )


def _steps_of(trainer: Any) -> int | None:
    steps = int(trainer.state.max_steps)
    return steps if steps > 0 else None


def _gathered(mine: Any, trainer: Any) -> list[Any]:
    """The values of all processes, in order."""
    if trainer.accelerator.num_processes == 1:
        return [mine]
    accelerate: Any = import_module("accelerate.utils")
    return accelerate.gather_object([mine])


def _by_prompt(config: RolloutConfig) -> dict[bytes, Task]:
    """Tasks by prompt: TRL passes only prompts, so they must identify the task."""
    found: dict[bytes, Task] = {}
    for task in tasks_of(config):
        same = found.setdefault(_key(task.messages), task)
        if _unseen(same) != _unseen(task):
            raise ConfigError(
                f"tasks {config.tasks.path!r}: {same.id!r} and {task.id!r} have the same prompt, but differ in what "
                "only rewards or tools see. TRL passes only the prompt: remove one of them"
            )
    if not found:
        raise ConfigError(f"tasks {config.tasks.path!r}: the file has no tasks")
    return found


def _unseen(task: Task) -> tuple[Any, ...]:
    return task.ground_truth, task.data_source, task.tools_kwargs, task.interaction_kwargs


def _key(messages: Sequence[Message]) -> bytes:
    return encode([message.as_openai() for message in messages], sort=True)


def _columns(
    judged: Sequence[TrainingSample | Refused], trajectories: Sequence[Trajectory], filler: int
) -> dict[str, Any]:
    """One row per prompt, in order. `filler` is the single token of those that are not trained on."""
    prompts: list[list[int]] = []
    completions: list[list[int]] = []
    masks: list[list[int]] = []
    logprobs: list[list[float] | None] = []
    for one, trajectory in zip(judged, trajectories, strict=True):
        if isinstance(one, Refused):
            prompts.append(trajectory.tokens.prompt_ids or [filler])
            completions.append([filler])
            masks.append([0])
            logprobs.append([0.0])
            continue
        prompts.append(one.prompt_ids)
        completions.append(one.response_ids)
        masks.append(one.response_mask)
        logprobs.append(one.logprobs)
    return {
        "prompt_ids": prompts,
        "completion_ids": completions,
        "env_mask": masks,
        "logprobs": None if None in logprobs else logprobs,
        "score": [None if isinstance(one, Refused) else one.reward for one in judged],
        "trajectory": list(trajectories),
    }
