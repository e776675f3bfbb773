"""A tool's states by trajectory, even under a framework that creates and releases an instance for every call.

verl does that: it nests `create_kwargs`, and passes `agent_data` to `execute`, whose `request_id` identifies the
trajectory. Such a state is kept beyond `release`, which does not end the trajectory, until it is the least recently
used of too many.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar
from uuid import uuid4

S = TypeVar("S")


class Trajectories(Generic[S]):
    """`make` builds a state from `create_kwargs`; `most` are kept of trajectories whose end is not reported."""

    def __init__(self, make: Callable[..., S], *, most: int = 4096) -> None:
        self._make = make
        self._most = most
        self._states: dict[str, S] = {}
        self._kept: dict[str, S] = {}
        """By trajectory; least recently used first."""
        self._visits: dict[str, str] = {}
        """Instances that share a kept state, with the trajectory they belong to."""
        self._owners: dict[str, weakref.ref[Any]] = {}
        """For each kept state, the `agent_data` it was first reached with."""
        self._over: deque[tuple[str, weakref.ref[Any]]] = deque()
        """Trajectories whose `agent_data` was garbage-collected, in whatever thread."""
        self._left: list[S] = []
        """States of finished trajectories, to be closed."""

    def __len__(self) -> int:
        return len(self._states)

    def begin(self, instance_id: str | None, kwargs: Mapping[str, Any]) -> tuple[str, S]:
        """Create a state with `create_kwargs`: those given, or those nested under that name.

        Raises:
            ValueError: that instance has not ended yet.
        """
        instance_id = instance_id or str(uuid4())
        if instance_id in self._states:  # replacing it would leak what it holds
            raise ValueError(f"instance {instance_id!r} already exists; every trajectory needs its own id")
        given = {key: value for key, value in kwargs.items() if key != "create_kwargs"}
        state = self._states[instance_id] = self._make(**{**given, **(kwargs.get("create_kwargs") or {})})
        return instance_id, state

    def key(self, instance_id: str, kwargs: Mapping[str, Any]) -> str:
        """Return the trajectory's name."""
        return str(getattr(kwargs.get("agent_data"), "request_id", None) or instance_id)

    def of(self, instance_id: str, kwargs: Mapping[str, Any]) -> S:
        """Return the state of the trajectory that this call belongs to.

        Raises:
            KeyError: `create` was not called for it.
        """
        state = self._states[instance_id]
        key = self.key(instance_id, kwargs)
        if key == instance_id:
            return state
        self._forget_if_over(key, kwargs["agent_data"])
        state = self._kept[key] = self._kept.pop(key, state)
        self._visits[instance_id] = key
        return state

    def _forget_if_over(self, key: str, agent_data: Any) -> None:
        """A name can be reused for another trajectory: with `full_determinism` verl restarts at det-0 each step."""
        known = self._owners.get(key)
        if known is not None and known() is agent_data:
            return
        if known is not None and key in self._kept:
            self._left.append(self._kept.pop(key))
        with contextlib.suppress(TypeError):  # without weak references only the name identifies it
            self._owners[key] = weakref.ref(agent_data, lambda owner: self._over.append((key, owner)))

    def end(self, instance_id: str) -> list[S]:
        """Return the states to close now: this instance's, unless its trajectory goes on, and those kept too long."""
        state = self._states.pop(instance_id, None)
        key = self._visits.pop(instance_id, None)
        closing = [] if state is None or (key is not None and self._kept.get(key) is state) else [state]
        while self._over:
            name, owner = self._over.popleft()
            if self._owners.get(name) is owner:
                del self._owners[name]
                closing += [self._kept.pop(name)] if name in self._kept else []
        closing += self._left
        self._left.clear()
        if len(self._kept) > self._most:
            in_use = set(self._visits.values())
            unused = [key for key in self._kept if key not in in_use]
            closing += [self._kept.pop(key) for key in unused[: len(self._kept) - self._most]]
        return closing

    def drain(self) -> list[S]:
        """Return all states, each once."""
        states = {id(state): state for state in [*self._states.values(), *self._kept.values(), *self._left]}
        for known in (self._states, self._kept, self._visits, self._owners, self._left):
            known.clear()
        return [*states.values()]
