"""Programs go to the zygote that has imported what they import."""

import pytest

from toolyard.sandbox.host.routing import LIGHT, choose_profile, imported_packages

PROFILES = {
    "numpy": frozenset({"numpy"}),
    "sympy": frozenset({"sympy"}),
    "science": frozenset({"numpy", "scipy", "pandas", "sympy"}),
}


@pytest.mark.parametrize(
    ("code", "packages"),
    [
        ("print(1)", set()),
        ("import numpy", {"numpy"}),
        ("import numpy as np, pandas as pd", {"numpy", "pandas"}),
        ("from numpy.linalg import inv", {"numpy"}),
        ("import scipy.stats", {"scipy"}),
        ("def f():\n    import sympy\n", {"sympy"}),
        ("x = 1  # import numpy", set()),
        ("s = 'important'", set()),
        ("from . import x", set()),
    ],
)
def test_imports_are_found_where_a_line_begins_with_them(code: str, packages: set[str]):
    assert imported_packages(code) == packages


@pytest.mark.parametrize(
    ("code", "profile"),
    [
        ("print(1)", LIGHT),
        ("import json", LIGHT),
        ("import numpy", "numpy"),
        ("import sympy", "sympy"),
        ("import numpy, sympy", "science"),
        ("import pandas", "science"),
    ],
)
def test_the_smallest_profile_that_covers_the_imports_is_chosen(code: str, profile: str):
    assert choose_profile(code, PROFILES) == profile


def test_routing_is_linear_in_the_length_of_the_code():
    assert choose_profile("import " + "a," * 200_000 + "\n" + " " * 200_000 + "x", PROFILES) == LIGHT
