"""Fair shares: weighted max-min, first between tenants and then between the processes of each."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolyard.limits.cluster.shares import Claim, fair_shares, fill

weights = st.sampled_from([0.01, 0.5, 1.0, 2.0, 3.0, 7.0, 100.0])
demands = st.integers(0, 200).map(float) | st.floats(0.0, 200.0)
capacities = st.integers(0, 300).map(float) | st.floats(0.0, 300.0)
wanted = st.dictionaries(st.sampled_from("abcdefgh"), st.tuples(demands, weights))
claims = st.lists(st.builds(Claim, st.sampled_from(["p", "q", "r"]), st.sampled_from("abcd"), weights, demands))


def close_to(expected: float):
    return pytest.approx(expected, rel=1e-6, abs=1e-6)


def by_tenant(shares: dict[str, dict[str, float]]) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for tenants in shares.values():
        for tenant, share in tenants.items():
            found[tenant] += share
    return dict(found)


# fill -----------------------------------------------------------------------------------------------------------------


@given(capacities, wanted)
def test_everything_is_given_out_or_everything_is_satisfied(capacity: float, wanted: dict[str, tuple[float, float]]):
    shares = fill(capacity, wanted)
    assert shares.keys() == wanted.keys()
    assert sum(shares.values()) == close_to(min(capacity, sum(demand for demand, _ in wanted.values())))


@given(capacities, wanted)
def test_nobody_gets_more_than_it_wants_or_less_than_nothing(capacity: float, wanted: dict[str, tuple[float, float]]):
    for name, share in fill(capacity, wanted).items():
        assert 0.0 <= share <= wanted[name][0]


@given(capacities, wanted)
def test_who_is_left_wanting_has_no_less_for_its_weight_than_anybody(
    capacity: float, wanted: dict[str, tuple[float, float]]
):
    """Max-min: a share can grow only by taking from one that is no larger, relative to its weight."""
    shares = fill(capacity, wanted)
    highest = max((shares[name] / weight for name, (_, weight) in wanted.items()), default=0.0)
    for name, (demand, weight) in wanted.items():
        if shares[name] < demand - 1e-6:
            assert shares[name] / weight == close_to(highest)


@given(capacities, wanted, st.permutations("abcdefgh"))
def test_the_order_of_asking_does_not_matter(capacity: float, wanted: dict[str, tuple[float, float]], order: list[str]):
    shares = fill(capacity, {name: wanted[name] for name in order if name in wanted})
    assert shares == close_to(fill(capacity, wanted))


@given(capacities, wanted, st.floats(0.0, 100.0))
def test_more_capacity_takes_nothing_from_anybody(capacity: float, wanted: dict[str, tuple[float, float]], more: float):
    before, after = fill(capacity, wanted), fill(capacity + more, wanted)
    for name, share in before.items():
        assert after[name] >= share - 1e-6


def test_weights_divide_what_all_want():
    assert fill(8, {"light": (100, 1.0), "heavy": (100, 3.0)}) == {"light": 2.0, "heavy": 6.0}


def test_what_one_does_not_want_goes_to_the_others_by_weight():
    assert fill(10, {"modest": (1, 5.0), "light": (100, 1.0), "heavy": (100, 2.0)}) == {
        "modest": 1.0,
        "light": 3.0,
        "heavy": 6.0,
    }


def test_nobody_asking_gets_nothing():
    assert fill(10, {}) == {}
    assert fair_shares(10, []) == {}


@pytest.mark.parametrize("apart", [1e3, 1e6, 1e9, 1e12])
def test_nothing_is_left_lying_however_far_apart_the_weights_are(apart: float):
    shares = fill(10, {"heavy": (4, apart), "light": (6, 1.0)})
    assert shares == {"heavy": 4, "light": close_to(6)}


# fair_shares ----------------------------------------------------------------------------------------------------------


@given(capacities, claims)
def test_together_they_get_the_capacity_or_all_that_is_wanted(capacity: float, claims: list[Claim]):
    total = sum(by_tenant(fair_shares(capacity, claims)).values())
    assert total == close_to(min(capacity, math.fsum(claim.demand for claim in claims)))


@given(capacities, claims)
def test_no_process_gets_more_for_a_tenant_than_it_wants_for_it(capacity: float, claims: list[Claim]):
    demand: dict[tuple[str, str], float] = defaultdict(float)
    for claim in claims:
        demand[claim.process, claim.tenant] += claim.demand
    shares = fair_shares(capacity, claims)
    assert {(process, tenant) for process, found in shares.items() for tenant in found} == demand.keys()
    for process, found in shares.items():
        for tenant, share in found.items():
            assert 0.0 <= share <= demand[process, tenant] * (1 + 1e-9)


@given(capacities, claims, st.lists(st.floats(0.01, 1.0), min_size=1, max_size=8))
def test_a_tenants_share_does_not_depend_on_the_number_of_its_processes(
    capacity: float, claims: list[Claim], parts: list[float]
):
    spread = [
        Claim(f"{claim.process}{n}", claim.tenant, claim.weight, claim.demand * part / sum(parts))
        if claim.tenant == "a"
        else claim
        for claim in claims
        for n, part in enumerate(parts if claim.tenant == "a" else [1.0])
    ]
    assert by_tenant(fair_shares(capacity, spread)) == close_to(by_tenant(fair_shares(capacity, claims)))


@given(capacities, claims)
def test_processes_of_one_tenant_share_alike_as_far_as_they_want_it(capacity: float, claims: list[Claim]):
    demand: dict[tuple[str, str], float] = defaultdict(float)
    for claim in claims:
        demand[claim.process, claim.tenant] += claim.demand
    shares = fair_shares(capacity, claims)
    for tenant in {claim.tenant for claim in claims}:
        here = {process: found[tenant] for process, found in shares.items() if tenant in found}
        for process, share in here.items():
            if share < demand[process, tenant] - 1e-6:
                assert share == close_to(max(here.values()))


def test_one_tenant_over_ten_processes_gets_as_much_as_another_in_one():
    many = [Claim(f"p{n}", "spread", 1.0, 50) for n in range(10)]
    shares = by_tenant(fair_shares(12, [*many, Claim("q", "single", 1.0, 50)]))
    assert shares == close_to({"spread": 6.0, "single": 6.0})


def test_a_tenant_has_the_highest_weight_that_any_of_its_processes_gives_it():
    shares = fair_shares(12, [Claim("p", "a", 1.0, 50), Claim("q", "a", 3.0, 50), Claim("q", "b", 1.0, 50)])
    assert by_tenant(shares) == close_to({"a": 9.0, "b": 3.0})
