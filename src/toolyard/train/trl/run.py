"""A complete training run: GRPO by TRL, with Toolyard's rollouts.

    result = run_training(load_train_config("train.yaml"))

Under `accelerate launch` or `torchrun`, every process calls it; the main one writes.
"""

from __future__ import annotations

import os
import shlex
import shutil
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any

from toolyard.errors import ConfigError, RecordError, ToolyardError, TrainError, summarize
from toolyard.messages import JSON
from toolyard.train.config import TrainConfig
from toolyard.train.metrics import EVALUATIONS, METRICS, MetricsFile, read_metrics
from toolyard.train.observer import TrainObserver, TrainResult
from toolyard.train.order import TaskOrder
from toolyard.train.run_folder import (
    MODEL,
    NEW_MODEL,
    OLD_MODEL,
    PLOT,
    POSITIONS,
    STATE,
    Checkpoint,
    RunFolder,
    last_checkpoint,
    read_position,
    steps_of,
)
from toolyard.train.trl.arguments import (  # first: it reports missing packages
    check_failure,
    grpo_config,
    load_model,
    load_tokenizer,
    on_cpu,
    tell_of_resuming,
)
from toolyard.train.trl.callbacks import Reports, TrainingCallback, check_evaluation
from toolyard.train.trl.off_policy import OffPolicyGRPOTrainer
from toolyard.train.trl.processes import Processes
from toolyard.train.trl.rollout import ToolyardRollout
from toolyard.train.trl.stopping import StopSignals
from toolyard.train.trl.stream import StreamSettings
from toolyard.train.trl.supervised import supervised_start
from toolyard.train.trl.trackers import open_trackers

import torch  # isort: skip
import transformers  # isort: skip
import trl  # isort: skip
from toolyard.engines.transformers.model import without_bars  # isort: skip

_trl: Any = trl

_DISK_FULL = 2**20
"""Free bytes below which a failure is taken for one of the disk: not every error says so."""


def run_training(config: TrainConfig, observer: TrainObserver | None = None, *, resume: bool = False) -> TrainResult:
    """Train until `config.steps` are done. After SIGINT or SIGTERM the current step is finished, a checkpoint is saved,
    and the result names the signal. A second signal ends it at once; it can be resumed from its last checkpoint.

    Raises:
        ToolyardError: it cannot start or continue.
        KeyboardInterrupt: a second signal ended it; the argument is the signal's number.
    """
    cpu = on_cpu(config)
    with Processes(cpu=cpu) as processes, without_bars():
        folder = config.output_dir
        if folder is None:
            folder = processes.broadcast(f"training/{datetime.now().astimezone():%Y%m%d-%H%M%S}")
        told = observer if observer is not None and processes.is_main else TrainObserver()
        with StopSignals(told.stopping) as stopping:
            try:
                return _Run(config.with_output_dir(folder), told, processes, stopping, cpu=cpu).train(resume)
            except KeyboardInterrupt:
                found = last_checkpoint(Path(folder))
                told.note(
                    "stopped before the first checkpoint"
                    if found is None
                    else f"stopped; --out {shlex.quote(folder)} --resume continues after step {found.step}"
                )
                raise


def _is_full(folder: Path) -> bool:
    return folder.exists() and shutil.disk_usage(folder).free < _DISK_FULL


def _on_trainer_device(config: TrainConfig, device: str) -> TrainConfig:
    """The config with its engine on the trainer's device: with several GPUs, each process has its own."""
    engine = config.rollout.engine
    if engine.device != "auto":
        return config
    rollout = config.rollout.model_copy(update={"engine": engine.model_copy(update={"device": device})})
    return config.model_copy(update={"rollout": rollout})


class _Run:
    """One process's part of a run."""

    def __init__(
        self, config: TrainConfig, observer: TrainObserver, processes: Processes, stopping: StopSignals, *, cpu: bool
    ) -> None:
        assert config.output_dir is not None
        self.config = config
        self.folder = Path(config.output_dir)
        self.observer = observer
        self.processes = processes
        self.stopping = stopping
        self.cpu = cpu

    def train(self, resume: bool) -> TrainResult:
        try:
            return self._train(resume)
        except ToolyardError:
            raise
        except Exception as error:  # what saves models and tokenizers raises errors of its own kinds
            is_full = _is_full(self.folder)
            if "No space left on device" not in str(error) and not is_full:
                raise
            where = f"cannot write to {self.folder}: " if is_full else ""  # or shared memory, or /tmp
            said = " ".join(summarize(error).split())
            raise RecordError(
                f"{where}no space left on device ({said}); free some space, then continue with --resume"
            ) from error

    def _train(self, resume: bool) -> TrainResult:
        config = self.config
        args = grpo_config(config, cpu=self.cpu, processes=self.processes.count)
        with ExitStack() as stack:
            checkpoint = self._begun(stack, resume)
            self.config = config = _on_trainer_device(config, str(args.device))
            done = 0 if checkpoint is None else checkpoint.step
            result = TrainResult(self.folder, steps=done, steps_before=done)
            if done < config.steps or (config.steps and steps_of(self.folder / MODEL) != done):
                result.steps = self._trained(stack, args, checkpoint)
            elif config.steps:
                self.observer.note(f"all {config.steps} steps are already done")
            elif config.warm_start is not None:
                tokenizer = load_tokenizer(config, self.observer)
                result.model = supervised_start(config, tokenizer, self.observer, self.processes, cpu=self.cpu)
            self._sum_up(result)
        return result

    def _begun(self, stack: ExitStack, resume: bool) -> Checkpoint | None:
        """Decided by the main process for all: the others might see files that it has written meanwhile."""
        decided: Checkpoint | ToolyardError | None = None
        if self.processes.is_main:
            try:
                folder = stack.enter_context(RunFolder(self.folder))
                decided = folder.begin(self.config, resume=resume, note=self.observer.note)
            except ToolyardError as error:
                decided = error
        decided = self.processes.broadcast(decided)
        if isinstance(decided, ToolyardError):
            raise decided
        return decided

    def _trained(self, stack: ExitStack, args: Any, checkpoint: Checkpoint | None) -> int:
        """Train, and return the number of steps that are done."""
        stack.enter_context(open_trackers(self.config.trackers, self.folder))
        reports = Reports(self.observer)
        done = 0 if checkpoint is None else checkpoint.step
        stream = self._stream(done)
        rollout = stack.enter_context(ToolyardRollout(self.config.rollout, observer=reports, stream=stream))
        dataset = self._in_order(rollout.dataset())
        check_evaluation(self.config)
        files = self._files(stack, done, streams=stream is not None)
        callback = TrainingCallback(
            self.config, self.observer, reports, rollout, self.stopping, self.processes, files, self._draw
        )
        trainer = self._trainer(args, rollout, dataset, callback, checkpoint)
        callback.trainer = trainer
        tell_of_resuming(args, self.observer)
        try:
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint.path))
        except torch.OutOfMemoryError as error:
            said = " ".join(str(error).split())[:200]
            raise TrainError(f"out of GPU memory: lower micro_batch_size, or use lora; {said}") from error
        except Exception as error:
            if not trainer.state.global_step:
                check_failure(error, self.config)
            raise
        done = int(trainer.state.global_step)
        if done >= self.config.steps:
            self._save(trainer)
        elif self._signal() is None:
            raise TrainError(f"TRL ended after {done} of {self.config.steps} steps; is a setting in `trl` the reason?")
        return done

    def _trainer(
        self,
        args: Any,
        rollout: ToolyardRollout,
        dataset: Any,
        callback: TrainingCallback,
        checkpoint: Checkpoint | None,
    ) -> Any:
        config = self.config
        tokenizer = load_tokenizer(config, self.observer)
        start = None
        if config.lora is not None and checkpoint is not None and (checkpoint.path / "adapter_config.json").exists():
            # The trainer would ignore the checkpoint's adapter if there is a second one, for the reference model.
            start = checkpoint.path
        elif config.warm_start is not None:
            start = supervised_start(config, tokenizer, self.observer, self.processes, cpu=self.cpu)
        self.observer.note("loading the model")
        model = load_model(config, self.observer, start=start)
        # TRL's documented way to silence its warning that `rollout_func` is experimental.
        os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
        try:
            trainer = self._trainer_class()(
                model=model,
                args=args,
                reward_funcs=[rollout.reward],
                rollout_func=rollout,
                train_dataset=dataset,
                processing_class=tokenizer,
                callbacks=[callback],
            )
        except ValueError as error:
            raise ConfigError(f"TRL rejects these settings: {error}") from error
        except Exception as error:
            check_failure(error, config)
            raise
        trainer.remove_callback(transformers.PrinterCallback)
        return trainer

    def _trainer_class(self) -> Any:
        settings = self.config.asynchronous
        return _trl.GRPOTrainer if settings is None or not settings.max_staleness else OffPolicyGRPOTrainer

    def _stream(self, done: int) -> StreamSettings | None:
        """How tasks are streamed after `done` steps; None if the trainer's order is played."""
        config, processes = self.config, self.processes
        if config.dynamic_sampling is None and config.asynchronous is None:
            return None
        start = None
        if done:
            start = read_position(self.folder / POSITIONS, done, processes.index, processes.count)
        if done and start is None:
            self.observer.note(f"{POSITIONS} has no line for step {done}: continuing with the next tasks")
        return StreamSettings(
            config.dynamic_sampling, config.asynchronous, seed=config.seed, shuffle=config.shuffle, start=start
        )

    def _in_order(self, dataset: Any) -> Any:
        """The tasks of the whole run, in order. TRL's own order would start over with every resume."""
        wanted = self.config.prompts_per_step
        if len(dataset) < wanted:
            raise ConfigError(
                f"tasks {self.config.rollout.tasks.path!r}: the file has {len(dataset)} tasks, fewer than "
                f"prompts_per_step {wanted}"
            )
        order = TaskOrder(len(dataset), seed=self.config.seed, shuffle=self.config.shuffle)
        return dataset.select(order.first(self.config.steps * wanted))

    def _files(self, stack: ExitStack, done: int, *, streams: bool) -> dict[str, MetricsFile] | None:
        if not self.processes.is_main:
            return None
        wanted = {
            METRICS: True,
            EVALUATIONS: self.config.evaluate is not None,
            POSITIONS: streams,
        }
        names = [name for name, is_wanted in wanted.items() if is_wanted]
        return {name: stack.enter_context(MetricsFile(self.folder / name, steps=done)) for name in names}

    # ------------------------------------------------------------------------------------------------------- ending it
    def _save(self, trainer: Any) -> None:
        """Save the trained model atomically."""
        if trainer.is_fsdp_enabled:  # in one piece, even if checkpoints are sharded
            trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
        model, new, old = (self.folder / name for name in (MODEL, NEW_MODEL, OLD_MODEL))
        trainer.save_model(str(new))
        if self.processes.is_main:
            shutil.rmtree(new / "ref", ignore_errors=True)  # the reference adapter is not part of the result
            trainer.state.save_to_json(str(new / STATE))
            if model.exists():
                model.rename(old)
            new.rename(model)
            shutil.rmtree(old, ignore_errors=True)
        self.processes.broadcast(None)

    def _signal(self) -> int | None:
        """The signal that asked any of the processes to stop."""
        signals: list[int | None] = self.processes.gather(self.stopping.signal)
        return next((one for one in signals if one is not None), None)

    def _sum_up(self, result: TrainResult) -> None:
        if self.config.steps and result.steps >= self.config.steps:
            result.model = self.folder / MODEL
        else:
            result.interrupted_by = self._signal()
        if not self.processes.is_main:
            return
        found = last_checkpoint(self.folder)
        result.checkpoint = None if found is None else found.path
        result.lines, result.evaluations = self._read()
        if result.lines and (self.folder / PLOT).exists():
            result.plot = self.folder / PLOT

    def _draw(self) -> None:
        """The plot is a convenience: if it cannot be drawn, training continues."""
        try:
            from toolyard.train.plot_matplotlib import draw
        except ModuleNotFoundError as error:
            self.observer.note(f"no plot: {error.name} is not installed; pip install 'toolyard[trl]'")
            return
        draw(*self._read(), self.folder / PLOT)

    def _read(self) -> tuple[list[JSON], list[JSON]]:
        """The lines of steps and of evaluations, if any."""
        steps, evaluations = (
            read_metrics(path) if (path := self.folder / name).exists() else [] for name in (METRICS, EVALUATIONS)
        )
        return steps, evaluations
