"""How the trajectories of a step are shared by processes and cut to what a device takes at once."""

from __future__ import annotations

from dataclasses import dataclass

from toolyard.errors import ConfigError

from .config import TrainConfig


@dataclass(frozen=True, slots=True)
class Batches:
    """How one step is cut up: micro_batch x accumulation x processes = prompts_per_step x n."""

    micro_batch: int
    accumulation: int

    @staticmethod
    def of(config: TrainConfig, processes: int) -> Batches:
        """
        Raises:
            ConfigError: the processes cannot share a step's prompts.
        """
        prompts, rest = divmod(config.prompts_per_step, processes)
        if rest:
            raise ConfigError(
                f"prompts_per_step {config.prompts_per_step} cannot be shared by {processes} processes: take a multiple"
            )
        share = prompts * config.rollout.n
        micro = max(size for size in range(1, min(share, config.micro_batch_size) + 1) if share % size == 0)
        return Batches(micro, share // micro)
