"""GRPO on samples of older weights."""

from __future__ import annotations

from typing import Any

import trl

from toolyard.errors import TrainError

_trl: Any = trl


class OffPolicyGRPOTrainer(_trl.GRPOTrainer):
    """TRL's GRPOTrainer, whose loss divides by the probabilities with which tokens were sampled.

    TRL divides by those of the weights before the update, which are the same if the samples are new. If they are older,
    the ratio must be between the current weights and those that sampled: the older the weights, the more is clipped.
    """

    divides_by_sampled = True

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        trainer: Any = super()
        output: dict[str, Any] = trainer._generate_and_score_completions(inputs)  # noqa: SLF001  (TRL has no hook)
        if self.model.training:
            if output.get("sampling_per_token_logps") is None:
                raise TrainError("asynchronous: the engine returned no log-probabilities for some samples")
            output["old_per_token_logps"] = output["sampling_per_token_logps"]
        return output
