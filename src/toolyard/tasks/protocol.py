"""One task: a row of a dataset, whatever its format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from toolyard.messages import JSON, Message


@dataclass(frozen=True, slots=True)
class Task:
    """What a group of requests starts with."""

    id: str
    """The same in every run over the same file; used to resume a run and to find a tape."""
    messages: tuple[Message, ...]
    """The conversation so far; it ends with a user message."""
    ground_truth: Any = None
    """For rewards only: never shown to a model."""
    data_source: str = "unknown"
    """verl's name for the dataset; reward functions may depend on it."""
    extra_info: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Everything else in the row; passed to reward functions."""
    tools_kwargs: Mapping[str, Mapping[str, JSON]] = field(default_factory=dict[str, Mapping[str, JSON]])
    """create_kwargs, execute_kwargs, calc_reward_kwargs and release_kwargs, by tool."""
    interaction_kwargs: Mapping[str, Any] | None = None
    """For the user simulator, if the task has one."""
