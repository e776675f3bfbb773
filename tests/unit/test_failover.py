"""Where requests go, decided without a clock and without a socket."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolyard.failover import Router


def visit(router: Router, request_id: str, now: float = 0.0) -> str:
    server = router.pick(request_id, now)
    router.done(server)
    return server


def test_a_request_stays_where_it_was_first_sent() -> None:
    router = Router(["a", "b", "c"])
    homes = {f"r{n}": visit(router, f"r{n}") for n in range(100)}
    assert {request: visit(router, request) for request in homes} == homes


def test_new_requests_go_to_the_server_with_the_least_to_do() -> None:
    router = Router(["a", "b"])
    assert Counter(router.pick(f"r{n}", 0.0) for n in range(10)) == {"a": 5, "b": 5}
    for _ in range(5):
        router.done("b")
    assert {router.pick(f"new{n}", 0.0) for n in range(5)} == {"b"}


def test_requests_are_spread_even_if_they_come_one_after_the_other() -> None:
    router = Router(["a", "b", "c", "d"])
    assert Counter(visit(router, f"r{n}") for n in range(100)) == dict.fromkeys("abcd", 25)


def test_two_routers_do_not_start_with_the_same_server() -> None:
    first = {visit(Router(["a", "b", "c", "d"]), f"process {n}") for n in range(40)}
    assert first == set("abcd")


def test_a_request_moves_when_its_server_is_gone_and_stays_there() -> None:
    router = Router(["a", "b"])
    home = visit(router, "r")
    other = "b" if home == "a" else "a"
    router.failed(home, 0.0, gone=True)
    assert visit(router, "r", 0.1) == other
    router.answered(home)
    assert visit(router, "r", 50.0) == other


def test_one_wrong_answer_moves_nobody_and_two_in_a_row_do() -> None:
    router = Router(["a", "b"])
    home = visit(router, "r")
    router.failed(home, 0.0, gone=False)
    assert visit(router, "r", 0.0) == home
    router.answered(home)
    router.failed(home, 0.0, gone=False)
    assert visit(router, "r", 0.0) == home
    router.failed(home, 0.0, gone=False)
    assert visit(router, "r", 0.0) != home


def test_after_its_rest_a_server_is_tried_by_one_request_only() -> None:
    router = Router(["a", "b"], probe_seconds=5.0)
    router.failed("a", 0.0, gone=True)
    assert {visit(router, f"r{n}", 0.9) for n in range(10)} == {"b"}
    assert [visit(router, f"s{n}", 1.0) for n in range(10)].count("a") == 1
    router.answered("a")
    assert "a" in {visit(router, f"t{n}", 1.1) for n in range(10)}


@pytest.mark.parametrize("failures", [1, 2, 3, 6, 50])
def test_a_server_that_keeps_failing_rests_longer_but_not_for_ever(failures: int) -> None:
    router, now = Router(["a", "b"], probe_seconds=0.0), 0.0
    for _ in range(failures):
        now += 31.0
        visit(router, "probe", now)
        router.failed("a", now, gone=True)
    rest = min(30.0, 2.0 ** (failures - 1))
    assert {visit(router, f"r{n}", now + rest - 0.01) for n in range(10)} == {"b"}
    assert "a" in {visit(router, f"s{n}", now + rest + 0.01) for n in range(10)}


def test_a_hundred_requests_that_break_together_are_one_failure() -> None:
    router = Router(["a", "b"])
    for _ in range(100):
        router.failed("a", 0.0, gone=True)
    assert "a" in {visit(router, f"r{n}", 1.01) for n in range(10)}


def test_if_all_rest_the_next_to_come_back_is_used() -> None:
    router = Router(["a", "b"])
    router.failed("b", 0.0, gone=True)
    router.failed("a", 0.5, gone=True)
    assert visit(router, "r", 0.6) == "b"


def test_only_the_latest_requests_are_remembered() -> None:
    router = Router(["a", "b"], remembered=10)
    for n in range(10_000):
        visit(router, f"r{n}")
    assert len(router._homes) == 10
    assert sum(server.at_home for server in router._servers.values()) == 10


EVENTS = st.lists(
    st.tuples(st.sampled_from(["pick", "done", "answered", "gone", "wrong", "wait"]), st.integers(0, 5)), max_size=200
)


@settings(max_examples=200, deadline=None)
@given(EVENTS)
def test_whatever_happens_there_is_a_server_and_the_books_are_right(events: list[tuple[str, int]]) -> None:
    servers = ["a", "b", "c"]
    router, now = Router(servers, remembered=3), 0.0
    out: list[str] = []
    for event, n in events:
        server = servers[n % 3]
        match event:
            case "pick":
                out.append(router.pick(f"r{n}", now))
            case "done" if out:
                router.done(out.pop())
            case "answered":
                router.answered(server)
            case "gone" | "wrong":
                router.failed(server, now, gone=event == "gone")
            case _:
                now += n
        assert Counter(out) == Counter({name: found.in_flight for name, found in router._servers.items()})
        assert sum(found.at_home for found in router._servers.values()) == len(router._homes) <= 3
        assert all(found.rests_until <= now + 30 for found in router._servers.values())


# Held servers ---------------------------------------------------------------------------------------------------------


def test_a_held_server_is_not_tried_before_it_is_released() -> None:
    router = Router(["a", "b"])
    router.hold("a", 0.0)
    assert {router.pick(f"r{number}", 100.0) for number in range(4)} == {"b"}, (
        "its rest is over, but nobody released it"
    )
    assert router.is_held("a", 100.0)
    router.release("a", 100.0)
    assert "a" in {router.pick(f"s{number}", 100.0) for number in range(4)}


def test_a_held_server_rests_longer_each_time_until_it_answers() -> None:
    router = Router(["a", "b"])
    for rest in (30.0, 60.0, 120.0):
        router.hold("a", 0.0)
        assert not router.is_held("a", rest - 1)
        assert router.is_held("a", rest)
        router.release("a", rest)
    router.answered("a")
    router.hold("a", 0.0)
    assert router.is_held("a", 30.0)


def test_a_held_server_is_not_released_before_its_rest_is_over() -> None:
    router = Router(["a", "b"])
    router.hold("a", 0.0)
    router.release("a", 29.0)
    assert router.is_held("a", 30.0)


def test_what_a_held_server_still_fails_changes_nothing() -> None:
    router = Router(["a", "b"])
    router.hold("a", 0.0)
    for _ in range(9):
        router.failed("a", 31.0, gone=True)  # requests that were there before
    assert router.is_held("a", 31.0)


def test_if_all_are_held_the_next_to_come_back_is_used() -> None:
    router = Router(["a", "b"])
    router.hold("a", 5.0)
    router.hold("b", 0.0)
    assert router.pick("r", 10.0) == "b"


def test_servers_come_and_go_and_what_was_under_way_may_still_report() -> None:
    router = Router([])
    router.add("a")
    assert [router.pick(f"r{number}", 0.0) for number in range(2)] == ["a", "a"]
    router.add("b")
    router.add("a")  # known: nothing changes
    assert router.pick("r2", 0.0) == "b"
    router.remove("a")
    assert router.pick("r0", 0.0) == "b"
    router.done("a")
    router.failed("a", 0.0, gone=True)
    router.hold("a", 0.0)
    router.answered("a")
    router.report("a", 3)
    assert router.pick("r3", 0.0) == "b"


def test_capacity_and_the_load_of_others_count() -> None:
    router = Router([])
    router.add("small", capacity=1)
    router.add("large", capacity=3)
    picked = [router.pick(f"r{number}", 0.0) for number in range(8)]
    assert picked.count("large") == 6
    router.report("small", 2)  # all of them ours
    assert router.pick("r8", 0.0) == "large" or router.pick("r9", 0.0) == "large"
    router.report("large", 90)
    assert {router.pick(f"s{number}", 0.0) for number in range(9)} == {"small"}


def test_the_loads_count_every_answer_and_every_failure() -> None:
    router = Router(["a", "b"])
    for _ in range(3):
        router.failed("a", 0.0, gone=True)  # of those that fail together, one decides how long it rests
    router.answered("b")
    server = router.pick("r", 0.0)
    assert router.loads(0.0) == [("a", 0, 0, 3, False), ("b", int(server == "b"), 1, 0, True)]
    assert router.loads(60.0)[0][-1]
