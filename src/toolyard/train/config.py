"""The settings of a training run: a YAML file, every key of which the command line can override."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
"""What `toolyard train` does if it is told nothing: GRPO on the embedded model, for some minutes."""
ROLLOUTS = "rollouts"
"""The folder of dumps in a run's own."""
SMOKE: JSON = {
    "steps": 1,
    "prompts_per_step": 1,
    "save_every": 1,
    "rollout": {"n": 2, "sampling": {"max_tokens": 64}},
}
"""The smallest run that goes through everything."""

_TRAINABLE = ("transformers", "vllm", "sglang")
_NOT_FOR_TRAINING = ("step", "record", "replay", "retry_failed")


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class LoraConfig(_Part):
    """Train a small adapter beside the weights, which stay as they are (needs `peft`)."""

    rank: PositiveInt = 16
    alpha: PositiveFloat = 32.0
    """What the adapter says counts alpha / rank."""
    targets: str | tuple[str, ...] = "all-linear"
    """Layers by name; all-linear: all but the output layer."""


class WarmStartConfig(_Part):
    """A supervised start: the model first learns to say what good trajectories say, and only the sampled tokens of
    them. They are read from a `dump`, or played by a `script` on `tasks`, with the real tools."""

    dump: str | None = None
    """A folder of dumps, or one file of it."""
    tasks: str | None = None
    """Those of the script; None: the rollout's own."""
    script: str | None = None
    """What a teacher says turn by turn, by task id, as for `engine.kind: scripted`."""
    limit: PositiveInt | None = None
    """The first so many trajectories."""
    min_score: float | None = 1.0
    """Those with less are left out, and those without one. None: all of them serve."""
    epochs: PositiveFloat = 1.0
    learning_rate: PositiveFloat = 2e-4
    batch_size: PositiveInt = 16
    """Trajectories of one update, of all processes together."""
    micro_batch_size: PositiveInt = 8
    """Those that a device takes at once, at most."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.dump is None) == (self.script is None):
            raise ConfigError("warm_start: name a dump to learn from, or a script to play (and one of them only)")
        if self.dump is not None and self.tasks is not None:
            raise ConfigError(f"warm_start.tasks {self.tasks!r}: they are for a script, and a dump has its own")
        return self


class EvaluateConfig(_Part):
    """Tasks that are played and not trained on. Their trajectories are dumped in `eval` beside the others."""

    tasks: TaskConfig
    n: PositiveInt = 1
    """Samples of each."""
    temperature: NonNegativeFloat = 0.0
    before: bool = True
    """Also the model as it is before the first step, after a warm start."""
    every: PositiveInt | None = None
    """Steps. None: only at the end."""


class TrainConfig(_Part):
    """Everything about a training run. Paths are relative to the working directory."""

    output_dir: str | None = None
    """Where everything is written: checkpoints, metrics, dumps, the model. None: a new folder below training/."""
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    """How trajectories come about; `rollout.n` is the size of a group, and `rollout.engine.model` what is trained."""
    steps: NonNegativeInt = 100
    """Updates, those of a run that is resumed included. 0: the supervised start alone."""
    prompts_per_step: PositiveInt = 8
    """Tasks of one update, of all processes together; each is played `rollout.n` times."""
    shuffle: bool = True
    """Tasks come in an order of chance, another one each time that all were had. False: as they stand."""
    micro_batch_size: PositiveInt = 8
    """Trajectories that a device takes at once, at most. Smaller takes less memory and changes nothing else."""
    learning_rate: PositiveFloat = 1e-5
    beta: NonNegativeFloat = 0.0
    """What the distance from the model at the start costs (KL). 0 saves the memory for it."""
    lora: LoraConfig | None = None
    """None: all weights are trained."""
    warm_start: WarmStartConfig | None = None
    evaluate: EvaluateConfig | None = None
    save_every: PositiveInt = 20
    """Steps from one checkpoint to the next. There is always one of the last step."""
    keep_checkpoints: PositiveInt = 2
    """The last so many."""
    seed: int = 0
    """Of adapters, of the order of tasks, and of rollouts that have none of their own."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["auto", "float32", "mixed", "bfloat16"] = "auto"
    """mixed: weights in float32, computed with in bfloat16. bfloat16: the weights too, which takes half the memory and
    loses small updates unless there is an adapter. auto: float32 on the CPU, else mixed."""
    trl: JSON = Field(default_factory=dict[str, Any])
    """Anything else that TRL's GRPOConfig takes: `{loss_type: dr_grpo, gradient_checkpointing: false}`, say."""

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, given: Any) -> Any:
        """Where the rollouts' own settings follow from those of the run."""
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
            raise ConfigError(f"rollout.n is {rollout.n}: GRPO compares the samples of a task, and needs at least 2")
        if rollout.sampling.temperature <= 0:
            raise ConfigError("rollout.sampling.temperature is 0: all samples would be alike, with nothing to compare")
        if rollout.engine.kind not in _TRAINABLE:
            raise ConfigError(
                f"rollout.engine.kind {rollout.engine.kind!r}: it does not sample from the weights that are trained; "
                f"expected {', '.join(_TRAINABLE)}"
            )
        if not self.steps and self.warm_start is None:
            raise ConfigError("steps is 0, and there is no warm_start: nothing is to be done")
        for name in _NOT_FOR_TRAINING:
            if getattr(rollout, name) != RolloutConfig.model_fields[name].default:
                raise ConfigError(f"rollout.{name}: it is for `toolyard rollout`, and not for training")
        return self

    def placed(self, output_dir: str) -> TrainConfig:
        """The same, written there; trajectories below it in `rollouts`, unless they have a place of their own."""
        folder = self.rollout.rollout_data_dir or f"{output_dir}/{ROLLOUTS}"
        rollout = self.rollout.model_copy(update={"rollout_data_dir": folder})
        return self.model_copy(update={"output_dir": output_dir, "rollout": rollout})


def load_train_config(
    path: str | Path | None = None, overrides: Mapping[str, Any] | Sequence[str] = (), *, smoke: bool = False
) -> TrainConfig:
    """The settings of a YAML file (None: the defaults), with `overrides`: a nested mapping, or texts `a.b=value`, where
    the value is read as YAML. `smoke`: what `SMOKE` says, unless the overrides say otherwise.

    A key `rollout_from` names a file of `toolyard rollout`, or `embedded`: its settings are then those of `rollout`,
    except where the file itself or an override says otherwise under `rollout`.

    Raises:
        ConfigError: a file or a key is wrong; the message names it.
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
