"""The settings of a training run: a YAML file. The command line can override every key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import floor
from pathlib import Path
from typing import Any, Literal, Self, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from toolyard.errors import ConfigError
from toolyard.messages import JSON
from toolyard.rollout.config import EMBEDDED as EMBEDDED_ROLLOUT
from toolyard.rollout.config import RolloutConfig, TaskConfig, merged, overridden, read_settings, validated

EMBEDDED = Path(__file__).with_name("embedded.yaml")
"""The defaults of `toolyard train`: GRPO on the embedded model, for a few minutes."""
ROLLOUTS = "rollouts"
"""The folder for dumps inside a run's folder."""
SMOKE: JSON = {
    "steps": 1,
    "prompts_per_step": 1,
    "save_every": 1,
    "rollout": {"n": 2, "sampling": {"max_tokens": 64}},
}
"""The smallest run that exercises every part."""

_TRAINABLE = ("transformers", "vllm", "sglang")
_NOT_FOR_TRAINING = ("step", "record", "replay", "retry_failed", "faults")


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


Tracker = Literal["tensorboard", "wandb", "trackio"]


class LoraConfig(_Part):
    """Train a small adapter and leave the weights unchanged (needs `peft`)."""

    rank: PositiveInt = 16
    alpha: PositiveFloat = 32.0
    """The adapter's output is scaled by alpha / rank."""
    targets: str | tuple[str, ...] = "all-linear"
    """Names of the layers to adapt; all-linear: all linear layers except the output layer."""


class WarmStartConfig(_Part):
    """A supervised start: the model is first trained on the sampled tokens of good trajectories. They are read from a
    `dump`, or played by a `script` on `tasks`, with the real tools."""

    dump: str | None = None
    """A dump's folder, or one of its files."""
    tasks: str | None = None
    """The script's tasks. None: the rollout's."""
    script: str | None = None
    """A teacher's messages, turn by turn and by task id, as for `engine.kind: scripted`."""
    limit: PositiveInt | None = None
    """Use only the first N trajectories."""
    min_score: float | None = 1.0
    """Leave out trajectories with a lower score or none. None: use all of them."""
    epochs: PositiveFloat = 1.0
    learning_rate: PositiveFloat = 2e-4
    batch_size: PositiveInt = 16
    """Trajectories per update, over all processes."""
    micro_batch_size: PositiveInt = 8
    """Maximum trajectories per device at once."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.dump is None) == (self.script is None):
            raise ConfigError("warm_start: set either a dump to learn from or a script to play")
        if self.dump is not None and self.tasks is not None:
            raise ConfigError(f"warm_start.tasks {self.tasks!r}: only for a script; a dump has its own tasks")
        return self


class EvaluateConfig(_Part):
    """Tasks that are played but not trained on. Their trajectories are dumped to `eval` in the dump's folder."""

    tasks: TaskConfig
    n: PositiveInt = 1
    """Samples per task."""
    temperature: NonNegativeFloat = 0.0
    before: bool = True
    """Also evaluate before the first step, after a warm start."""
    every: PositiveInt | None = None
    """Evaluate every N steps. None: only at the end."""


class DynamicSamplingConfig(_Part):
    """Groups whose scores are all equal teach nothing: put them aside, and sample other tasks in their place. They are
    dumped, marked and counted."""

    max_groups: float = Field(default=2.0, ge=1.0)
    """Sample at most this many groups for each one that is trained, per step. Then groups of equal scores fill up the
    step."""

    def spare(self, groups: int) -> int:
        """How many groups a step of so many may replace.

        Raises:
            ConfigError: none, although more than one may be sampled for each.
        """
        spare = floor(round((self.max_groups - 1) * groups, 6))
        if not spare and self.max_groups > 1:
            raise ConfigError(
                f"dynamic_sampling.max_groups {self.max_groups:g}: with {groups} per step in each process, no group "
                f"could be replaced; set it to at least {1 + 1 / groups:.3g}"
            )
        return spare


class AsynchronousConfig(_Part):
    """Rollouts go on while the trainer updates. Every sampled token has the version of its weights, and the loss
    divides by the probability with which it was sampled."""

    max_staleness: NonNegativeInt = 1
    """Train on tokens whose weights are at most this many updates old: rollouts run that many steps ahead. 0:
    synchronous training."""
    on_update: Literal["continue", "finish"] = "continue"
    """What to do with running requests when the weights change. continue: sample on from the same token with the new
    weights. finish: the update waits until they have finished with the old ones; none starts meanwhile."""


class TrainConfig(_Part):
    """Everything about a training run. Paths are relative to the working directory."""

    output_dir: str | None = None
    """Folder for checkpoints, metrics, dumps and the model. None: a new folder in training/."""
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    """How trajectories are played; `rollout.n` is the group size, and `rollout.engine.model` the model to train."""
    steps: NonNegativeInt = 100
    """Total updates, including those before a resume. 0: only the supervised start."""
    prompts_per_step: PositiveInt = 8
    """Tasks per update, over all processes; each is played `rollout.n` times."""
    shuffle: bool = True
    """Shuffle the tasks, differently for each pass over them. False: file order."""
    micro_batch_size: PositiveInt = 8
    """Maximum trajectories per device at once. Lower it to save memory; the result is the same."""
    learning_rate: PositiveFloat = 1e-5
    beta: NonNegativeFloat = 0.0
    """Weight of the KL penalty toward the initial model. 0 saves the memory for a reference model."""
    lora: LoraConfig | None = None
    """None: train all weights."""
    warm_start: WarmStartConfig | None = None
    evaluate: EvaluateConfig | None = None
    dynamic_sampling: DynamicSamplingConfig | None = None
    """None: train every group."""
    asynchronous: AsynchronousConfig | None = None
    """None: play a step, then train it."""
    save_every: PositiveInt = 20
    """Save a checkpoint every N steps, and after the last step."""
    keep_checkpoints: PositiveInt = 2
    """Keep only the last N checkpoints."""
    seed: int = 0
    """Seed for adapters, the order of tasks, and rollouts without their own."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["auto", "float32", "mixed", "bfloat16"] = "auto"
    """mixed: weights in float32, computation in bfloat16. bfloat16: the weights too, which halves the memory but loses
    small updates unless there is an adapter. auto: float32 on the CPU, otherwise mixed."""
    tracker: Tracker | tuple[Tracker, ...] = ()
    """Also send every step's metrics to tensorboard, wandb or trackio, or to a list of them."""
    trl: JSON = Field(default_factory=dict[str, Any])
    """Any other settings of TRL's GRPOConfig, such as `{loss_type: dr_grpo, gradient_checkpointing: false}`."""

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, given: Any) -> Any:
        """Fill in rollout settings that follow from those of the run."""
        if not isinstance(given, Mapping):
            return given
        whole = cast("JSON", given)
        rollout = whole.get("rollout", {})
        if not isinstance(rollout, Mapping):
            return whole
        follows: JSON = {"seed": whole.get("seed", 0)}
        if whole.get("device") == "cpu":
            follows["engine"] = {"device": "cpu"}
        return {**whole, "rollout": merged(follows, cast("JSON", rollout))}

    @model_validator(mode="after")
    def _trainable(self) -> Self:
        rollout = self.rollout
        if rollout.n < 2:
            raise ConfigError(
                f"rollout.n is {rollout.n}: GRPO compares the samples of a task, so it must be at least 2: rollout.n=8"
            )
        if rollout.sampling.temperature <= 0:
            raise ConfigError("rollout.sampling.temperature is 0: all samples would be equal, with nothing to compare")
        if rollout.engine.kind not in _TRAINABLE:
            raise ConfigError(
                f"rollout.engine.kind {rollout.engine.kind!r}: it cannot sample from the weights being trained; "
                f"expected {', '.join(_TRAINABLE)}"
            )
        if not self.steps and self.warm_start is None:
            raise ConfigError("steps is 0 and there is no warm_start: nothing to do")
        self._check_stream()
        for name in _NOT_FOR_TRAINING:
            if getattr(rollout, name) != RolloutConfig.model_fields[name].default:
                raise ConfigError(f"rollout.{name}: only for `toolyard rollout`, not for training")
        return self

    def _check_stream(self) -> None:
        for name in ("dynamic_sampling", "asynchronous"):
            if getattr(self, name) is not None and self.rollout.cluster is not None:
                raise ConfigError(f"{name}: not supported with rollout.cluster; remove one of them")
        check_asynchronous(self.rollout, self.asynchronous)

    @property
    def trackers(self) -> tuple[Tracker, ...]:
        return (self.tracker,) if isinstance(self.tracker, str) else self.tracker

    def with_output_dir(self, output_dir: str) -> TrainConfig:
        """A copy with this output folder. Trajectories go to `rollouts` in it, unless a folder is set for them."""
        folder = self.rollout.rollout_data_dir or f"{output_dir}/{ROLLOUTS}"
        rollout = self.rollout.model_copy(update={"rollout_data_dir": folder})
        return self.model_copy(update={"output_dir": output_dir, "rollout": rollout})


def check_asynchronous(rollout: RolloutConfig, asynchronous: AsynchronousConfig | None) -> None:
    """
    Raises:
        ConfigError: these rollouts cannot go on while the trainer updates.
    """
    if asynchronous is None or not asynchronous.max_staleness:
        return
    if rollout.engine.kind == "vllm":
        raise ConfigError(
            "asynchronous: TRL changes the weights of its vLLM server while requests run, and does not say which "
            "token has which; use engine.kind transformers or sglang for the rollouts"
        )
    if rollout.agent is not None and not rollout.agent.fixed_sampling:
        raise ConfigError(
            "asynchronous: with agent.fixed_sampling: false, agents choose their own temperature, but the loss needs "
            "the probabilities at sampling.temperature; remove one of them"
        )


def load_train_config(
    path: str | Path | None = None, overrides: Mapping[str, Any] | Sequence[str] = (), *, smoke: bool = False
) -> TrainConfig:
    """Load the settings from a YAML file (None: the defaults) and apply `overrides`: a nested mapping, or strings
    `a.b=value`, whose values are parsed as YAML. `smoke` applies `SMOKE` before the overrides.

    The key `rollout_from` names a settings file of `toolyard rollout`, or `embedded`, as the base of `rollout`. Keys
    under `rollout` in this file or in an override take precedence.

    Raises:
        ConfigError: a file or a key is invalid; the message names it.
    """
    place = "settings" if path is None else str(path)
    given = {} if path is None else read_settings(Path(path))
    if smoke:
        given = merged(given, SMOKE)
    given = merged(given, overrides) if isinstance(overrides, Mapping) else overridden(given, overrides)
    source: Any = given.pop("rollout_from", None)
    if source is not None:
        if not isinstance(source, str):
            raise ConfigError(f"{place}: rollout_from: expected a file or 'embedded', not {str(source)[:80]!r}")
        base = read_settings(EMBEDDED_ROLLOUT if source == "embedded" else Path(source))
        changed: Any = given.get("rollout") or {}
        given["rollout"] = merged(base, cast("JSON", changed)) if isinstance(changed, Mapping) else changed
    return validated(TrainConfig, given, place, overrides)
