"""One task: a row of a data set, whatever its shape was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from toolyard.messages import JSON, Message


@dataclass(frozen=True, slots=True)
class Task:
    """What a group of requests begins with."""

    id: str
    """The same in every run over the same file: what a run is resumed by, and a tape found by."""
    messages: tuple[Message, ...]
    """The conversation so far; it ends with a user's message."""
    ground_truth: Any = None
    """For rewards only: no model gets to see it."""
    data_source: str = "unknown"
    """verl's word for the data set; reward functions may choose by it."""
    extra_info: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Whatever else the row had: handed to reward functions."""
    tools_kwargs: Mapping[str, Mapping[str, JSON]] = field(default_factory=dict[str, Mapping[str, JSON]])
    """By tool: create_kwargs, execute_kwargs, calc_reward_kwargs, release_kwargs."""
    interaction_kwargs: Mapping[str, Any] | None = None
    """For the user simulator, if the task has one."""
