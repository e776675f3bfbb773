"""Translates the settings of a run to TRL's: batches, precision, the model and its adapter."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import toolyard.engines.transformers.openmp  # noqa: F401  # pyright: ignore[reportUnusedImport]  (before torch)
from toolyard.engines.models import resolve_model
from toolyard.errors import ConfigError, MissingDependencyError, summarize
from toolyard.rollout.assembly import DEFAULT_MODEL
from toolyard.train.config import LoraConfig, TrainConfig
from toolyard.train.observer import TrainObserver

try:
    import peft
    import torch
    import transformers
    import trl
except ModuleNotFoundError as missing:
    raise MissingDependencyError((missing.name or "trl").partition(".")[0], "trl", "training") from missing

from toolyard.train.trl.trackers import check_trackers, tracking_arguments  # isort: skip

_trl: Any = trl
"""TRL imports its names lazily, which type checkers cannot follow."""
_INSTEAD = {
    "bf16": "precision",
    "eval_steps": "evaluate",
    "eval_strategy": "evaluate",
    "fp16": "precision",
    "gradient_accumulation_steps": "micro_batch_size and prompts_per_step",
    "max_completion_length": "rollout.limits.response_length",
    "min_p": "rollout.sampling",
    "num_generations": "rollout.n",
    "num_train_epochs": "steps",
    "max_steps": "steps",
    "per_device_train_batch_size": "micro_batch_size",
    "repetition_penalty": "rollout.sampling",
    "report_to": "tracker",
    "save_steps": "save_every",
    "save_strategy": "save_every",
    "save_total_limit": "keep_checkpoints",
    "shuffle_dataset": "shuffle",
    "temperature": "rollout.sampling.temperature",
    "top_k": "rollout.sampling",
    "top_p": "rollout.sampling",
    "use_cpu": "device",
    "use_vllm": "rollout.engine.kind",
    "vllm_mode": "rollout.engine.kind",
    "vllm_server_base_url": "rollout.engine.urls",
}
"""TRL's settings, and the Toolyard settings that determine them."""
_OWN = {"output_dir", "learning_rate", "beta", "seed", "resume_from_checkpoint"}
"""TRL's settings that are Toolyard settings of the same name."""
_MISTAKES = (ValueError, TypeError, KeyError, AttributeError)
"""What TRL raises for settings that it checks only when it needs them."""
_SET_HERE = {"logging_steps", "logging_strategy", "disable_tqdm"}
"""Fixed, because the metrics rely on them."""


def on_cpu(config: TrainConfig) -> bool:
    """Whether to train on the CPU.

    Raises:
        ConfigError: the device is not available, or does not support the precision.
    """
    has_gpu = torch.cuda.is_available()
    if config.device == "cuda" and not has_gpu:
        raise ConfigError("device 'cuda': torch finds no GPU on this machine; use device: auto to fall back to the CPU")
    cpu = config.device == "cpu" or not has_gpu
    if cpu and config.precision not in ("auto", "float32"):
        raise ConfigError(f"precision {config.precision!r} is for GPUs; the CPU uses float32: remove the setting")
    return cpu


def is_mixed(config: TrainConfig, *, cpu: bool) -> bool:
    """Whether to compute in bfloat16."""
    return not cpu and config.precision != "float32"


def grpo_config(config: TrainConfig, *, cpu: bool, processes: int) -> Any:
    """TRL's `GRPOConfig` for a run.

    Raises:
        ConfigError: TRL rejects the settings, a key of `trl` is set elsewhere here, or a tracker is not installed.
    """
    _check_keys(config)
    check_trackers(config.trackers)
    batches = Batches.of(config, processes)
    rollout, sampling = config.rollout, config.rollout.sampling
    assert config.output_dir is not None
    given: dict[str, Any] = {
        "output_dir": config.output_dir,
        "max_steps": config.steps,
        "per_device_train_batch_size": batches.micro_batch,
        "gradient_accumulation_steps": batches.accumulation,
        "num_generations": rollout.n,
        "max_completion_length": rollout.limits.response_length,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": max(sampling.top_k, 0),
        "min_p": sampling.min_p or None,
        "repetition_penalty": sampling.repetition_penalty,
        "learning_rate": config.learning_rate,
        # A run can be resumed for more steps; a schedule with an end would have to change then.
        "lr_scheduler_type": "constant",
        "beta": config.beta,
        "seed": config.seed,
        "shuffle_dataset": False,  # the dataset is already in order
        "save_strategy": "steps",
        "save_steps": config.save_every,
        "save_total_limit": config.keep_checkpoints,
        "logging_strategy": "steps",
        "logging_steps": 1,
        **tracking_arguments(config.trackers, Path(config.output_dir)),
        "disable_tqdm": True,
        "use_cpu": cpu,
        "bf16": is_mixed(config, cpu=cpu),
        "dataloader_pin_memory": not cpu,
        "disable_dropout": True,
        "ddp_find_unused_parameters": False,
    }
    if rollout.engine.kind == "vllm":
        if len(rollout.engine.urls) != 1:
            raise ConfigError("rollout.engine.urls: TRL sends its weights to one vLLM server; give exactly one URL")
        given |= {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": rollout.engine.urls[0]}
    try:
        return _trl.GRPOConfig(**{**given, **config.trl})
    except Exception as error:  # also those of what it imports for a setting
        raise ConfigError(f"TRL rejects these settings: {error}") from error


def check_failure(error: Exception, config: TrainConfig) -> None:
    """Take an error of a tracker, or of TRL if it has settings of its own, for one of those settings: neither checks
    all of them at once.

    Raises:
        ConfigError: it is one.
    """
    tracker = type(error).__module__.partition(".")[0]
    if tracker in config.trackers:
        raise ConfigError(f"tracker {tracker}: {' '.join(str(error).split())}") from error
    if config.trl and isinstance(error, _MISTAKES):
        said = " ".join(summarize(error).split())
        raise ConfigError(f"TRL fails with these settings (trl: {', '.join(config.trl)}): {said}") from error


def tell_of_resuming(args: Any, observer: TrainObserver) -> None:
    """Name settings with which a resumed run differs from one without an interruption."""
    updates = args.num_iterations * args.steps_per_generation // args.gradient_accumulation_steps
    reasons = {
        "num_iterations or steps_per_generation": updates > 1,  # samples wait for their updates
        "save_only_model": args.save_only_model,
        "sync_ref_model": args.sync_ref_model,
    }
    for name in (name for name, is_so in reasons.items() if is_so):
        observer.note(f"trl.{name}: a resumed run will not equal one without an interruption")


def _check_keys(config: TrainConfig) -> None:
    known = {field.name for field in dataclasses.fields(_trl.GRPOConfig) if field.init}
    for key in config.trl:
        if key in _INSTEAD:
            raise ConfigError(f"trl.{key}: set {_INSTEAD[key]} instead")
        if key in _OWN:
            raise ConfigError(f"trl.{key}: set {key} outside of `trl`")
        if key in _SET_HERE:
            raise ConfigError(f"trl.{key}: cannot be changed, because every step writes a line of metrics")
        if key not in known:
            close = get_close_matches(key, known, 3)
            hint = f"; did you mean {' or '.join(close)}?" if close else ""
            raise ConfigError(f"trl.{key}: TRL {trl.__version__}'s GRPOConfig has no such setting{hint}")


# The model ------------------------------------------------------------------------------------------------------------


def load_tokenizer(config: TrainConfig, observer: TrainObserver) -> Any:
    """The tokenizer of the model.

    Raises:
        ConfigError: it cannot be loaded.
    """
    place = _place(config, observer)
    loaded: Any = transformers.AutoTokenizer
    try:
        return loaded.from_pretrained(place, padding_side="left")
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {str(place)!r} has no tokenizer that can be loaded: {error}") from error


def load_model(config: TrainConfig, observer: TrainObserver, *, start: Path | None = None) -> Any:
    """The model to train, with its adapter if the settings ask for one.

    Args:
        start: Folder to load the trained part from: a whole model, or the adapter if there is one.

    Raises:
        ConfigError: it cannot be loaded.
    """
    place = _place(config, observer) if start is None or config.lora is not None else start
    dtype = torch.bfloat16 if config.precision == "bfloat16" else torch.float32
    models: Any = transformers.AutoModelForCausalLM
    try:
        model = models.from_pretrained(place, dtype=dtype)
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise ConfigError(f"model {str(place)!r} cannot be loaded: {error}") from error
    if config.lora is None:
        return model
    if start is not None:
        adapters: Any = peft.PeftModel
        return adapters.from_pretrained(model, start, is_trainable=True)
    return _with_adapter(model, config.lora, config.seed)


def _with_adapter(model: Any, lora: LoraConfig, seed: int) -> Any:
    targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
    made: Any = peft.LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, task_type="CAUSAL_LM")  # pyright: ignore[reportArgumentType]
    transformers.set_seed(seed)  # adapters are initialized randomly
    wrap: Any = peft.get_peft_model
    try:
        return wrap(model, made)
    except ValueError as error:
        raise ConfigError(f"lora.targets {lora.targets!r}: {error}") from error


def _place(config: TrainConfig, observer: TrainObserver) -> str | Path:
    return resolve_model(config.rollout.engine.model or DEFAULT_MODEL, progress=observer.note)


# Batches --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Batches:
    """How a step is split: micro_batch x accumulation x processes = prompts_per_step x n."""

    micro_batch: int
    accumulation: int

    @staticmethod
    def of(config: TrainConfig, processes: int) -> Batches:
        """
        Raises:
            ConfigError: a step's prompts cannot be split evenly over the processes.
        """
        prompts, rest = divmod(config.prompts_per_step, processes)
        if rest:
            raise ConfigError(
                f"prompts_per_step {config.prompts_per_step} is not a multiple of {processes}, the number of processes"
            )
        share = prompts * config.rollout.n
        micro = max(size for size in range(1, min(share, config.micro_batch_size) + 1) if share % size == 0)
        return Batches(micro, share // micro)
