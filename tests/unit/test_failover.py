"""Where requests go, decided without a clock and without a socket."""

from __future__ import annotations

import runpy
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expensive import examples
from toolyard.failover import Router


def visit(router: Router, request_id: str, now: float = 0.0, prefix: str | None = None) -> str:
    server = router.pick(request_id, now, prefix)
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


@settings(max_examples=examples(200), deadline=None)
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


# Servers that come and go ---------------------------------------------------------------------------------------------


def test_a_server_that_is_added_gets_new_requests_and_the_others_stay() -> None:
    router = Router(["a"])
    before = {f"r{number}": visit(router, f"r{number}") for number in range(10)}
    router.add("b")
    assert {visit(router, f"new{number}") for number in range(10)} == {"b"}, "it has the least to do"
    assert {request: visit(router, request) for request in before} == before


def test_a_server_that_is_removed_gets_nothing_more_and_its_requests_may_end() -> None:
    router = Router(["a", "b"])
    homes = {f"r{number}": router.pick(f"r{number}", 0.0) for number in range(10)}
    router.remove("a")
    assert router.servers == ["b"]
    assert {visit(router, request) for request in homes} == {"b"}
    for call in (router.answered, router.done):
        call("a")
    router.failed("a", 0.0, gone=True)
    router.hold("a", 0.0)
    router.release("a", 99.0)
    assert not router.is_held("a", 99.0)


def test_a_server_that_returns_is_new_but_for_what_it_still_has_to_do() -> None:
    router = Router(["a", "b"])
    homes = [router.pick(f"r{number}", 0.0) for number in range(4)]
    router.failed("a", 0.0, gone=True)
    router.remove("a")
    router.add("a")
    router.add("a")
    assert router._servers["a"].in_flight == homes.count("a") == 2
    assert "a" in {visit(router, f"new{number}") for number in range(9)}, "it does not rest any more"


def test_without_servers_there_is_nothing_to_pick() -> None:
    router = Router([])
    with pytest.raises(LookupError, match="no servers"):
        router.pick("r", 0.0)
    router.remove("never there")
    router.add("a")
    assert visit(router, "r") == "a"


CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["pick", "pick", "done", "gone", "hold", "wait", "add", "remove", "version"]),
        st.integers(0, 7),
    ),
    max_size=200,
)


@settings(max_examples=examples(300), deadline=None)
@given(CHANGES)
def test_whatever_comes_and_goes_the_books_are_right_and_the_removed_get_nothing(events: list[tuple[str, int]]) -> None:
    names = ["a", "b", "c"]
    router, now = Router(names, remembered=4), 0.0
    there, homes, out = {*names}, dict[str, str](), list[str]()
    for event, n in events:
        name = names[n % 3]
        match event:
            case "pick" if there:
                request = f"r{n}"
                is_known = request in router._homes and router._is_up(router._homes[request], now)
                server = router.pick(request, now, f"p{n % 2}" if n % 3 else None)
                assert server in there
                assert not is_known or server == homes[request], "it stays where it was"
                homes[request] = server
                out.append(server)
            case "done" if out:
                router.done(out.pop(n % len(out)))
            case "gone":
                router.failed(name, now, gone=True)
            case "hold":
                router.hold(name, now)
            case "wait":
                now += n
            case "add":
                router.add(name)
                there.add(name)
            case "remove":
                router.remove(name)
                there.discard(name)
            case "version":
                router.know_version(name, n)
            case _:
                pass
        counted = {name: found.in_flight for name, found in [*router._servers.items(), *router._removed.items()]}
        assert Counter(out) == Counter(counted)
        assert min(counted.values(), default=0) >= 0
        assert all(router._removed[name].in_flight > 0 for name in router._removed)
        assert {*router.servers} == there
        assert {*router._homes.values()} <= there
        assert sum(found.at_home for found in router._servers.values()) == len(router._homes) <= 4


# Groups and versions --------------------------------------------------------------------------------------------------


def test_a_group_shares_a_server_as_long_as_its_load_is_fair() -> None:
    router = Router(["a", "b", "c", "d"])
    for number in range(80):
        router.pick(f"other{number}", 0.0)
    group = Counter(router.pick(f"r{number}", 0.0, "its prompt") for number in range(8))
    assert len(group) <= 2, group
    flood = Counter(router.pick(f"f{number}", 0.0, "one prompt") for number in range(1000))
    assert max(flood.values()) <= 1.25 * 1088 / 4 + 1, "one prompt for all does not overload its server"


def test_processes_agree_about_a_groups_server_and_a_new_server_moves_few_groups() -> None:
    def assigned(*servers: str) -> list[str]:
        return [visit(Router(servers), "r", prefix=f"group {number}") for number in range(400)]

    before, after = assigned("a", "b", "c", "d"), assigned("e", "d", "c", "b", "a")
    moved = [now for then, now in zip(before, after, strict=True) if then != now]
    assert {*moved} == {"e"}
    assert 40 < len(moved) < 130, "about a fifth"
    assert all(60 < count < 140 for count in Counter(before).values()), "about a quarter each"


def test_most_of_a_group_finds_its_prompt_and_the_load_stays_even() -> None:
    routing = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "routing.py"))
    found, peak = routing["simulate"](8, 256, groups=80, by_prefix=True)
    found_before, peak_before = routing["simulate"](8, 256, groups=80, by_prefix=False)
    assert (found_before < 0.6, found > 0.8) == (True, True), (found_before, found)
    assert peak < peak_before + 0.3, (peak_before, peak)


def test_new_requests_go_to_the_newest_weights_and_others_stay() -> None:
    router = Router(["a", "b", "c"])
    homes = {f"r{number}": visit(router, f"r{number}") for number in range(9)}
    router.know_version("a", 1)
    router.know_version("b", 2)
    assert {visit(router, f"new{number}") for number in range(9)} == {"b", "c"}, "that of c is unknown"
    assert {visit(router, f"of a group{number}", prefix=str(number)) for number in range(30)} == {"b", "c"}
    assert {request: visit(router, request) for request in homes} == homes
    router.know_version("a", 2)
    assert "a" in {visit(router, f"newer{number}") for number in range(9)}


def test_old_weights_are_better_than_none() -> None:
    router = Router(["a", "b"])
    router.know_version("a", 1)
    router.know_version("b", 2)
    router.failed("b", 0.0, gone=True)
    assert visit(router, "r", 0.5) == "a"
