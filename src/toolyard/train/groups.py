"""Groups: the samples of one task, compared with each other as in GRPO.

A sample's advantage is its reward above the mean of its group. Special cases:

* All rewards are equal: every advantage is exactly 0.0. Such a group does not change the policy; its tokens still count
  in a loss that is averaged over tokens, and for a KL penalty. To leave it out, as DAPO does, keep only groups with
  `has_signal`.
* Only one sample, because the others were refused: the same, since there is nothing to compare it with.
* Fewer samples than requested: mean and standard deviation are those of the remaining samples. Refused samples are not
  replaced: an infrastructure failure counts neither for nor against the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from toolyard.train.samples import TrainingSample

Scale = Literal["group", "none"]
_AT_LEAST = 1e-4
"""Added to the standard deviation, so that nearly equal rewards are not blown up. TRL's value."""


@dataclass(frozen=True, slots=True)
class SampleGroup:
    """The samples of one task in one step; at least one."""

    name: str
    """`TrainingSample.group`."""
    samples: list[TrainingSample]

    @property
    def rewards(self) -> list[float]:
        """One for each session: all branches of a session have its reward, which counts once."""
        by_session = {sample.session or index: sample.reward for index, sample in enumerate(self.samples)}
        return list(by_session.values())

    @property
    def has_signal(self) -> bool:
        """Whether two rewards differ, so that there is something to learn."""
        rewards = self.rewards
        return min(rewards) != max(rewards)

    @property
    def mean(self) -> float:
        rewards = self.rewards
        return math.fsum(rewards) / len(rewards)

    @property
    def deviation(self) -> float:
        """Sample standard deviation (divided by n - 1), as in TRL and verl; 0.0 if `has_signal` is false."""
        if not self.has_signal:
            return 0.0
        mean, rewards = self.mean, self.rewards
        return math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))

    def advantages(self, scale: Scale = "group") -> list[float]:
        """One per sample: its reward minus the group's mean; with "group", divided by the group's standard deviation.

        "none" does not divide (Dr. GRPO): dividing gives easy and hard tasks more weight than those in between.
        """
        if not self.has_signal:
            return [0.0] * len(self.samples)  # exactly 0, without rounding errors
        mean = self.mean
        unit = self.deviation + _AT_LEAST if scale == "group" else 1.0
        return [(sample.reward - mean) / unit for sample in self.samples]


def grouped(samples: Iterable[TrainingSample]) -> list[SampleGroup]:
    """Group samples by `TrainingSample.group`, in the order of each group's first sample."""
    groups: dict[str, list[TrainingSample]] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    return [SampleGroup(name, members) for name, members in groups.items()]
