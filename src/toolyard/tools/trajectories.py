"""A tool's states by trajectory, also under a framework that creates and releases around every single call.

verl does so: it passes `create_kwargs` nested, and hands `agent_data` to `execute`, whose `request_id` says which.
A state that was reached that way is kept beyond `release`, which is not the trajectory's end, until it is the longest
unused of many.
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
    """`make` makes a state of `create_kwargs`; `most` are kept of trajectories whose end we are not told of."""

    def __init__(self, make: Callable[..., S], *, most: int = 4096) -> None:
        self._make = make
        self._most = most
        self._states: dict[str, S] = {}
        self._kept: dict[str, S] = {}
        """By trajectory; the longest unused first."""
        self._visits: dict[str, str] = {}
        """Of instances that came for a kept state: whose."""
        self._owners: dict[str, weakref.ref[Any]] = {}
        """Of kept states: the `agent_data` they were first reached with."""
        self._over: deque[tuple[str, weakref.ref[Any]]] = deque()
        """Trajectories whose `agent_data` is gone, noted by whatever thread collects garbage."""
        self._left: list[S] = []
        """States of trajectories that are over, to be closed."""

    def __len__(self) -> int:
        return len(self._states)

    def begin(self, instance_id: str | None, kwargs: Mapping[str, Any]) -> tuple[str, S]:
        """A new state, made with `create_kwargs`: those given, or those nested under that name.

        Raises:
            ValueError: that instance has not ended yet.
        """
        instance_id = instance_id or str(uuid4())
        if instance_id in self._states:  # or what the first one holds would never be closed
            raise ValueError(f"instance {instance_id!r} exists already: every trajectory needs an id of its own")
        given = {key: value for key, value in kwargs.items() if key != "create_kwargs"}
        state = self._states[instance_id] = self._make(**{**given, **(kwargs.get("create_kwargs") or {})})
        return instance_id, state

    def key(self, instance_id: str, kwargs: Mapping[str, Any]) -> str:
        """The trajectory's name."""
        return str(getattr(kwargs.get("agent_data"), "request_id", None) or instance_id)

    def of(self, instance_id: str, kwargs: Mapping[str, Any]) -> S:
        """The state of the trajectory that this call belongs to.

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
        """The same name does not make the same trajectory: with `full_determinism` verl begins at det-0 each step."""
        known = self._owners.get(key)
        if known is not None and known() is agent_data:
            return
        if known is not None and key in self._kept:
            self._left.append(self._kept.pop(key))
        with contextlib.suppress(TypeError):  # one that takes no weak reference is told by its name alone
            self._owners[key] = weakref.ref(agent_data, lambda owner: self._over.append((key, owner)))

    def end(self, instance_id: str) -> list[S]:
        """What there is to close now: its own state, unless the trajectory goes on with it, and those kept too long."""
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
        """All, each once."""
        states = {id(state): state for state in [*self._states.values(), *self._kept.values(), *self._left]}
        for known in (self._states, self._kept, self._visits, self._owners, self._left):
            known.clear()
        return [*states.values()]
