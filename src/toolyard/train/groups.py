"""Groups: the samples of one task, compared with each other as GRPO does it.

A sample is worth what it earned above the mean of its group. What follows from that for odd groups:

* All rewards are equal: every advantage is exactly 0.0. Such a group moves the policy nowhere; its tokens still count
  in a loss that is averaged over tokens, and for a KL penalty. To leave it out, as DAPO does, keep the groups with
  `has_signal`.
* One sample, the others having been refused: likewise, as there is nothing to compare it with.
* Fewer samples than were asked for: mean and deviation are of those that are there. Nobody stands in for a refused
  one: a failure of ours counts neither for nor against the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from toolyard.train.samples import TrainingSample

Scale = Literal["group", "none"]
_AT_LEAST = 1e-4
"""Added to the deviation, so that rewards that hardly differ are not blown up. TRL's value."""


@dataclass(frozen=True, slots=True)
class SampleGroup:
    """What was sampled for one task in one step; at least one sample."""

    name: str
    """`TrainingSample.group`."""
    samples: list[TrainingSample]

    @property
    def rewards(self) -> list[float]:
        return [sample.reward for sample in self.samples]

    @property
    def has_signal(self) -> bool:
        """Whether two rewards differ, so that there is something to learn."""
        rewards = self.rewards
        return min(rewards) != max(rewards)

    @property
    def mean(self) -> float:
        return math.fsum(self.rewards) / len(self.samples)

    @property
    def deviation(self) -> float:
        """Of the sample (divided by n - 1), as TRL and verl take it; 0.0 where `has_signal` is false."""
        if not self.has_signal:
            return 0.0
        mean = self.mean
        return math.sqrt(math.fsum((reward - mean) ** 2 for reward in self.rewards) / (len(self.samples) - 1))

    def advantages(self, scale: Scale = "group") -> list[float]:
        """One for each sample: its reward less the group's mean, with "group" divided by the group's deviation.

        "none" leaves it at that (Dr. GRPO): division makes easy and hard tasks weigh more than those between.
        """
        if not self.has_signal:
            return [0.0] * len(self.samples)  # not what rounding leaves of a mean
        mean = self.mean
        unit = self.deviation + _AT_LEAST if scale == "group" else 1.0
        return [(reward - mean) / unit for reward in self.rewards]


def grouped(samples: Iterable[TrainingSample]) -> list[SampleGroup]:
    """By `TrainingSample.group`, each in the order of its first sample, however they are mixed."""
    groups: dict[str, list[TrainingSample]] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    return [SampleGroup(name, members) for name, members in groups.items()]
