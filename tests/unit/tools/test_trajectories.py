"""States by trajectory, under a framework that announces a trajectory's end, and under one that does not."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from toolyard.tools.trajectories import Trajectories


@dataclass
class State:
    given: dict[str, Any] = field(default_factory=dict)


def make(**given: Any) -> State:
    return State(given)


def visit(states: Trajectories[State], request_id: str) -> tuple[State, list[State]]:
    """A call, as verl makes it; returns the state it had, and what was to be closed after it."""
    instance_id, _ = states.begin(None, {"create_kwargs": {"x": 1}})
    state = states.of(instance_id, {"agent_data": SimpleNamespace(request_id=request_id)})
    return state, states.end(instance_id)


def test_a_state_lives_from_begin_to_end() -> None:
    states = Trajectories(make)
    instance_id, state = states.begin("r1", {"x": 1})
    assert (instance_id, state.given) == ("r1", {"x": 1})
    assert states.of("r1", {}) is state
    assert states.of("r1", {"agent_data": SimpleNamespace(request_id="r1")}) is state
    assert (states.end("r1"), len(states)) == ([state], 0)
    assert states.end("r1") == [], "ending twice is fine"
    with pytest.raises(KeyError):
        states.of("r1", {})


def test_two_trajectories_cannot_have_one_id() -> None:
    states = Trajectories(make)
    states.begin("r1", {})
    with pytest.raises(ValueError, match="instance 'r1' already exists"):
        states.begin("r1", {})
    states.end("r1")
    states.begin("r1", {})


def test_a_trajectory_told_by_agent_data_keeps_its_state_from_call_to_call() -> None:
    states = Trajectories(make)
    first, closing = visit(states, "a")
    assert (first.given, closing) == ({"x": 1}, [])
    again, unused = visit(states, "a")
    assert again is first
    assert [state is not first for state in unused] == [True], "the one that was made for the call, and not needed"
    assert visit(states, "b")[0] is not first
    assert (len(states), len(states.drain())) == (0, 2)


def test_of_too_many_kept_states_the_longest_unused_is_to_be_closed() -> None:
    states = Trajectories(make, most=2)
    a, _ = visit(states, "a")
    b, _ = visit(states, "b")
    assert visit(states, "a")[0] is a
    assert visit(states, "c")[1] == [b]
    assert visit(states, "a")[0] is a


def test_a_kept_state_in_use_is_not_closed() -> None:
    states = Trajectories(make, most=1)
    instance_id, _ = states.begin(None, {})
    used = states.of(instance_id, {"agent_data": SimpleNamespace(request_id="a")})
    b, closing = visit(states, "b")
    assert closing == [b]
    assert visit(states, "a")[0] is used
    assert states.end(instance_id) == []


def test_drain_gives_each_state_once() -> None:
    states = Trajectories(make)
    instance_id, state = states.begin(None, {})
    states.of(instance_id, {"agent_data": SimpleNamespace(request_id="a")})
    assert states.drain() == [state]
    assert states.end(instance_id) == []


def test_the_same_name_with_another_agent_data_is_another_trajectory():
    """With `full_determinism` verl begins at det-0 in every step."""

    class AgentData:
        request_id = "det-0"

    made: Trajectories[list[int]] = Trajectories(list)
    step, next_step = AgentData(), AgentData()
    for number, agent_data in enumerate((step, step, next_step)):
        made.begin(str(number), {})
        made.of(str(number), {"agent_data": agent_data}).append(number)
    assert made.of("2", {"agent_data": next_step}) == [2]
    assert [0, 1] in made.end("2")
    assert made.drain()
