"""Test cases in the forms that data sets write them; and that a mistake in them is never read as something else."""

import contextlib
import json
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expensive import examples
from patience import processor_time
from toolyard.errors import ConfigError
from toolyard.rewards.code.cases import read_suite
from toolyard.rewards.code.protocol import Case, Comparison, Suite, SuiteKind
from toolyard.rewards.code.values import Wrapped, value_difference


def stdio(*pairs: tuple[str, str], **options) -> Suite:
    return Suite(SuiteKind.STDIO, tuple(Case(stdin=given, expected=wanted) for given, wanted in pairs), **options)


def calls(function: str, *pairs: tuple[tuple, object], **options) -> Suite:
    cases = tuple(Case(arguments=given, expected=wanted) for given, wanted in pairs)
    return Suite(SuiteKind.FUNCTION, cases, function=function, **options)


def asserts(*tests: str, **options) -> Suite:
    return Suite(SuiteKind.ASSERTS, tuple(Case(test=test) for test in tests), **options)


CHECK = "def check(candidate):\n    assert candidate(1) == 2\n"


@pytest.mark.parametrize(
    ("tests", "suite"),
    [
        ({"inputs": ["1\n"], "outputs": ["2\n"]}, stdio(("1\n", "2\n"))),
        ({"inputs": ["", "x"], "outputs": ["y", ""]}, stdio(("", "y"), ("x", ""))),
        ({"inputs": [["3", "1 2 3"]], "outputs": [["6", "7"]]}, stdio(("3\n1 2 3", "6\n7"))),
        ({"inputs": [[3, 1.5]], "outputs": [6]}, stdio(("3\n1.5", "6"))),
        ({"inputs": [[]], "outputs": [[]]}, stdio(("", ""))),
        ({"inputs": ("1",), "outputs": ("2",)}, stdio(("1", "2"))),
        ({"inputs": '["1", "2"]', "outputs": "['3', '4']"}, stdio(("1", "3"), ("2", "4"))),
        ({"inputs": [b"\xc3\xa9"], "outputs": ["é"]}, stdio(("é", "é"))),
        ({"inputs": ["1"], "outputs": ["2"], "fn_name": None, "test_list": None, "checker": ""}, stdio(("1", "2"))),
        ({"inputs": ["1"], "outputs": ["2"], "fn_name": "", "asserts": []}, stdio(("1", "2"))),
        ({"inputs": ["1"], "outputs": ["2"], "difficulty": "hard", "time_limit": 2}, stdio(("1", "2"))),
        ({"inputs": ["1"], "outputs": ["2"], "language": "C++"}, stdio(("1", "2"), language="cpp")),
        (
            {"inputs": ["1"], "outputs": ["2"], "checker": "raise SystemExit(0)"},
            stdio(("1", "2"), checker="raise SystemExit(0)"),
        ),
        (
            {"inputs": ["1"], "outputs": ["2"], "comparison": {"mode": "tokens", "relative_tolerance": None}},
            stdio(("1", "2"), comparison=Comparison(mode="tokens")),
        ),
        (
            {"inputs": ["1"], "outputs": ["2"], "comparison": Comparison(ignore_case=True)},
            stdio(("1", "2"), comparison=Comparison(ignore_case=True)),
        ),
        ({"input_output": '{"inputs": ["1"], "outputs": ["2"]}', "question": "?"}, stdio(("1", "2"))),
        ({"input_output": {"inputs": ["1"], "outputs": ["2"]}}, stdio(("1", "2"))),
        ([{"input": "1", "output": "2", "testtype": "stdin"}], stdio(("1", "2"))),
        ([{"input": "", "output": "", "testtype": None, "metadata": "{}"}], stdio(("", ""))),
    ],
)
def test_stdin_and_stdout(tests, suite):
    assert read_suite(tests) == suite


@pytest.mark.parametrize(
    ("tests", "suite"),
    [
        ({"fn_name": "f", "inputs": [[1, [2]]], "outputs": [3]}, calls("f", ((1, [2]), 3))),
        ({"fn_name": "f", "inputs": [[]], "outputs": [None]}, calls("f", ((), None))),
        ({"fn_name": "f", "inputs": [[(1, 2)]], "outputs": [(3, 4)]}, calls("f", (([1, 2],), [3, 4]))),
        ({"fn_name": "f", "inputs": [["5"]], "outputs": ["6"]}, calls("f", (("5",), "6"))),
        ({"fn_name": "Solution.f", "inputs": [[1]], "outputs": [True]}, calls("Solution.f", ((1,), True))),
        ({"fn_name": "Solution().f", "inputs": [[1]], "outputs": [2]}, calls("Solution.f", ((1,), 2))),
        ({"fn_name": "f", "inputs": ["[1, 2]\n3"], "outputs": ["[1]"]}, calls("f", (([1, 2], 3), [1]))),
        ({"fn_name": "f", "inputs": ['"a b"\n\n'], "outputs": ['"c"\n']}, calls("f", (("a b",), "c"))),
        ({"fn_name": "f", "inputs": ["True\n(1, 'x')"], "outputs": ["None"]}, calls("f", ((True, [1, "x"]), None))),
        ({"fn_name": "f", "inputs": ["true\nnull"], "outputs": ["abc"]}, calls("f", ((True, None), "abc"))),
        ({"fn_name": "f", "inputs": ["[1,\n 2]"], "outputs": ["{'a': 1}"]}, calls("f", (([1, 2],), {"a": 1}))),
        ({"fn_name": "f", "inputs": [""], "outputs": ["007"]}, calls("f", ((), "007"))),
        ({"fn_name": "f", "inputs": ["1\r\n2\r\n"], "outputs": [3]}, calls("f", ((1, 2), 3))),
        ({"fn_name": "f", "inputs": [[{"a": 1}]], "outputs": [{1: 2}]}, calls("f", (({"a": 1},), {"1": 2}))),
        (
            {"fn_name": "f", "inputs": [["x"], ["y"]], "outputs": ["[1]", '{"a": 2}']},
            calls("f", (("x",), [1]), (("y",), {"a": 2})),
        ),
        (
            {"fn_name": "f", "inputs": [["x"], ["y"]], "outputs": ["[1]", "2"]},
            calls("f", (("x",), "[1]"), (("y",), "2")),
        ),
        ({"fn_name": "f", "inputs": [["x"]], "outputs": ["[x"]}, calls("f", (("x",), "[x"))),
        (
            {"fn_name": "f", "inputs": [[1]], "outputs": [2], "setup": "import os", "import_prefix": "import re\n"},
            calls("f", ((1,), 2), setup="import os\nimport re"),
        ),
        (
            [{"input": "1\n2", "output": "[3]", "testtype": "functional", "metadata": {"func_name": "f"}}],
            calls("f", ((1, 2), [3])),
        ),
        (
            [{"input": "1", "output": "3", "testtype": "functional", "metadata": '{"func_name": "f"}'}],
            calls("f", ((1,), 3)),
        ),
    ],
)
def test_calls(tests, suite):
    assert read_suite(tests) == suite


@pytest.mark.parametrize(
    ("tests", "suite"),
    [
        ({"assert_case": ["assert f(1) == 2", "assert f(2)"]}, asserts("assert f(1) == 2", "assert f(2)")),
        ({"asserts": ["assert f(1)"]}, asserts("assert f(1)")),
        ({"test_list": ["f(1)"], "test_setup_code": "import re"}, asserts("f(1)", setup="import re")),
        (
            {"test_list": ["assert f()"], "test_imports": ["import re", "import os"]},
            asserts("assert f()", setup="import re\nimport os"),
        ),
        ({"assert_case": ["assert f()"], "inputs": [""], "outputs": [None]}, asserts("assert f()")),
        ({"test": CHECK, "entry_point": "f"}, asserts(f"{CHECK}\n\ncheck(f)\n")),
        ({"test": CHECK, "entry_point": "Solution().f"}, asserts(f"{CHECK}\n\ncheck(Solution().f)\n")),
        ({"test": f"{CHECK}\ncheck(f)\n"}, asserts(f"{CHECK}\ncheck(f)\n")),
        ({"test": "assert f(1) == 2"}, asserts("assert f(1) == 2")),
        (
            {"asserts": ["console.assert(f() === 1)"], "language": "js"},
            asserts("console.assert(f() === 1)", language="nodejs"),
        ),
    ],
)
def test_test_code(tests, suite):
    assert read_suite(tests) == suite


def test_a_suite_is_taken_as_it_is():
    suite = stdio(("1", "2"))
    assert read_suite(suite) is suite
    with pytest.raises(ConfigError, match="cases: there are none"):
        read_suite(Suite(SuiteKind.STDIO, ()))


@pytest.mark.parametrize(
    "wrap", [json.dumps, lambda tests: json.dumps(tests).encode(), lambda tests: "\ufeff" + json.dumps(tests)]
)
def test_json_is_read_from_text_and_from_text_within_text(wrap):
    tests = {"fn_name": "f", "inputs": [[1, "é"]], "outputs": [{"a": None}]}
    expected = calls("f", ((1, "é"), {"a": None}))
    assert read_suite(wrap(tests)) == expected
    assert read_suite(json.dumps(json.dumps(tests))) == expected
    assert read_suite(json.dumps(json.dumps(json.dumps(tests)))) == expected


def test_arrays_are_lists():
    arrays = {
        "fn_name": np.str_("f"),
        "inputs": np.array([np.array([1, 2]), np.array([3, 4])], dtype=object),
        "outputs": np.array([np.int64(3), np.float64(0.5)], dtype=object),
    }
    suite = read_suite(arrays)
    assert suite == calls("f", ((1, 2), 3), ((3, 4), 0.5))
    assert {type(item) for case in suite.cases for item in (*case.arguments, case.expected)} == {int, float}
    assert read_suite({"inputs": np.array(["1", "2"]), "outputs": np.array([3, 4])}) == stdio(("1", "3"), ("2", "4"))
    assert read_suite({"test_list": np.array(["assert f()"], dtype=object)}) == asserts("assert f()")


def test_rows_of_a_table_have_every_column():
    rows = [
        {"inputs": ["1"], "outputs": ["2"]},
        {"fn_name": "f", "inputs": ["3"], "outputs": ["4"]},
        {"asserts": ["assert f()"]},
    ]
    columns = ("inputs", "outputs", "fn_name", "asserts")
    table = pa.Table.from_pylist([{key: row.get(key) for key in columns} for row in rows])
    assert [read_suite(row) for row in table.to_pylist()] == [
        stdio(("1", "2")),
        calls("f", ((3,), 4)),
        asserts("assert f()"),
    ]


# APPS's lists of one


def test_outputs_are_wrapped_only_if_all_are_lists_of_one():
    wrapped = read_suite({"fn_name": "f", "inputs": [[1], [2]], "outputs": [[3], [[4]]]})
    assert [type(case.expected) for case in wrapped.cases] == [Wrapped, Wrapped]
    assert value_difference(3, wrapped.cases[0].expected, Comparison()) is None
    assert value_difference([4], wrapped.cases[1].expected, Comparison()) is None
    plain = read_suite({"fn_name": "f", "inputs": [[1], [2]], "outputs": [[3], [4, 5]]})
    assert [type(case.expected) for case in plain.cases] == [list, list]
    assert value_difference(3, plain.cases[0].expected, Comparison()) is not None


def test_a_list_of_one_in_text_is_a_list():
    suite = read_suite({"fn_name": "f", "inputs": ["1"], "outputs": ["[3]"]})
    assert value_difference(3, suite.cases[0].expected, Comparison()) == "got 3, expected [3]"


# Mistakes

PAIR = {"inputs": ["1"], "outputs": ["2"]}
CALL = {"fn_name": "f", "inputs": [[1]], "outputs": [2]}


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ("", "is not JSON"),
        ("assert f(1) == 2", "is not JSON"),
        (b"\xff", "is not UTF-8"),
        ("5", "expected a mapping or a list of them, not int"),
        (None, "not NoneType"),
        ({}, "inputs: missing"),
        ({"question": "?"}, r"inputs: missing; given: \['question'\]"),
        ({"inputs": ["1"]}, "outputs: missing"),
        ({"inputs": [], "outputs": []}, "inputs: there are no test cases"),
        ({"inputs": ["1"], "outputs": ["1", "2"]}, "'1 inputs and 2 outputs'"),
        ({"inputs": "1", "outputs": ["1"]}, "inputs: expected a list; given: 1"),
        ({"inputs": "abc", "outputs": ["1"]}, "inputs: expected a list; given: 'abc'"),
        ({"inputs": {"a": 1}, "outputs": ["1"]}, r"inputs: expected a list; given: \{'a': 1\}"),
        ({"inputs": [None], "outputs": ["1"]}, r"inputs\[0\]: expected text, a number, or a list of lines; given: N"),
        ({"inputs": ["1"], "outputs": [True]}, r"outputs\[0\]: expected text.*given: True"),
        ({"inputs": [[[1, 2], 3]], "outputs": ["1"]}, 'for calls with arguments write "fn_name"'),
        ({"inputs": [{"a": 1}], "outputs": ["1"]}, r"inputs\[0\]: expected text"),
        ({"inputs": ["\ud800"], "outputs": ["1"]}, r"inputs\[0\]: cannot be a program"),
        ({"inputs": ["1"], "outputs": ["\ud800"]}, r"outputs\[0\]: cannot be a program"),
        ({"inputs": [10**5000], "outputs": ["1"]}, r"inputs\[0\]: cannot be written.*given: a huge number"),
        ({"inputs": [object()], "outputs": ["1"]}, r"inputs\[0\]: JSON cannot express the type object"),
        ('{"inputs": [1' + "0" * 5000 + '], "outputs": [1]}', "is not JSON: Exceeds the limit"),
        ("[" * 100_000, "nested too deeply"),
        # Keys
        ({"input": ["1"], "outputs": ["2"]}, "input: unknown; did you mean 'inputs'"),
        ({**PAIR, "fnname": "f"}, "fnname: unknown; did you mean 'fn_name'"),
        ({**PAIR, "function_name": "f"}, "did you mean 'fn_name'"),
        ({**PAIR, "func_name": "f"}, "did you mean 'fn_name'"),
        ({**PAIR, "Checker": "x"}, "did you mean 'checker'"),
        ({**PAIR, "comparision": {}}, "did you mean 'comparison'"),
        ({**PAIR, "lang": "cpp"}, "did you mean 'language'"),
        ({"assert_cases": ["assert f()"]}, "did you mean 'assert_case'"),
        ({"tests": "assert f()"}, "did you mean 'test'"),
        ({**PAIR, 1: 2}, "expected a string as key"),
        ({**PAIR, "entry_point": "f"}, 'entry_point: only allowed with "test"; for calls use "fn_name"'),
        # Options
        ({**PAIR, "language": "pyton"}, "language: unknown language 'pyton'; did you mean 'python'"),
        (
            {**PAIR, "comparison": {"mode": "words"}},
            "comparison.mode: Input should be 'lines', 'trimmed', 'tokens' or 'exact'",
        ),
        ({**PAIR, "comparison": {"tolerance": 1}}, "comparison.tolerance: Extra inputs.*known: mode, absolute_t"),
        ({**PAIR, "comparison": "tokens"}, "comparison: is not JSON"),
        ({**PAIR, "comparison": [1]}, "comparison: Input should be"),
        ({**PAIR, "checker": "if"}, "checker: is not Python"),
        ({**PAIR, "checker": "def check(): pass"}, "checker: cannot fail"),
        ({**CALL, "checker": "exit(0)"}, "checker: only for stdin and stdout"),
        ({**PAIR, "setup": "import os"}, "setup: only for calls and test code"),
        ({**CALL, "setup": "import"}, "setup: is not Python"),
        # Calls
        ({**CALL, "fn_name": "a.b.c"}, "fn_name: expected the name of a function"),
        ({**CALL, "fn_name": "f(x)"}, "fn_name: expected the name"),
        ({**CALL, "fn_name": 5}, "fn_name: expected the name"),
        ({**CALL, "inputs": [5]}, r"inputs\[0\]: expected a list of arguments"),
        ({**CALL, "inputs": [{"x": 1}]}, r"inputs\[0\]: expected a list of arguments"),
        ({**CALL, "inputs": ["x = 1"]}, r"inputs\[0\]: expected one argument per line"),
        ({**CALL, "inputs": ["1 2"]}, r"inputs\[0\]: expected one argument per line"),
        ({**CALL, "inputs": ["[1, 2\n3]\n4"]}, r"inputs\[0\]: expected one argument per line"),
        ({**CALL, "inputs": ["{1, 2}"]}, r"inputs\[0\]: JSON cannot express the type set"),
        ({**CALL, "inputs": ["{1: 2}"]}, r"inputs\[0\]: expected text as key of a mapping, as in JSON; given: 1"),
        ({**CALL, "inputs": [[{1: 2}]]}, r"inputs\[0\]: expected text as key"),
        ({**CALL, "outputs": [{(1, 2): 3}]}, r"outputs\[0\]: expected text as key"),
        ({**CALL, "outputs": [{1, 2}]}, r"outputs\[0\]: JSON cannot express the type set"),
        ({**CALL, "inputs": ["1"], "outputs": ["[1, 2"]}, r"outputs\[0\]: neither JSON nor a Python literal"),
        ({**CALL, "inputs": ["1"], "outputs": ['"abc']}, r"outputs\[0\]: neither JSON nor a Python literal"),
        ({"fn_name": "f", "inputs": ["1", [2]], "outputs": [1, 2]}, r"inputs\[1\]: some inputs are text"),
        # Test code
        ({"asserts": []}, "asserts: it has no test cases"),
        ({"asserts": 5}, "asserts: expected a list"),
        ({"asserts": [""]}, r"asserts\[0\]: it has no code"),
        ({"asserts": ["assert f(", "assert f()"]}, r"asserts\[0\]: is not Python"),
        ({"asserts": ["assert f()", "f(1) == 2"]}, r"asserts\[1\]: cannot fail"),
        ({"test": "def test_f():\n    assert f()\n"}, "test: cannot fail"),
        ({"test": "# nothing"}, "test: cannot fail"),
        ({"test": "import unittest\nclass T(unittest.TestCase):\n    pass\n"}, "test: cannot fail"),
        ({"test": CHECK}, r"entry_point: missing: the test defines check\(candidate\), and nothing calls it"),
        ({"test": "assert f()", "entry_point": "f"}, r"test: with entry_point it must define check\(candidate\)"),
        ({"test": CHECK, "entry_point": "f; exit()"}, "entry_point: expected the name of a function"),
        ({"test": "assert f()", "asserts": ["assert f()"]}, "asserts and test: two forms"),
        ({"asserts": ["assert f()"], **PAIR}, "asserts and inputs: two forms at once"),
        ({"asserts": ["assert f('\ud800')"]}, r"asserts\[0\]: cannot be a program"),
        # Lists
        ([], "there are no test cases"),
        (["assert f()"], r"\[0\]: expected a mapping"),
        ([{"input": "1"}], r"\[0\].output: missing"),
        ([{"inputs": "1", "output": "2"}], r"\[0\].inputs: unknown; did you mean 'input'"),
        ([{"input": "1", "output": "2", "testtype": "call"}], r"\[0\].testtype: expected 'stdin' or 'functional'"),
        ([{"input": "1", "output": "2", "testtype": "functional"}], "metadata.func_name: expected one name"),
        (
            [{"input": "", "output": ""}, {"input": "", "output": "", "testtype": "functional"}],
            "testtype: expected the same",
        ),
        (
            [{"input": "x", "output": "2", "testtype": "functional", "fn_name": "f"}],
            r"\[0\].input: expected one argument",
        ),
    ],
)
def test_a_mistake_is_named_and_never_read_as_something_else(tests, message):
    with pytest.raises(ConfigError, match=message) as raised:
        read_suite(tests)
    assert "accepted forms: " in str(raised.value)
    assert len(str(raised.value)) < 800


def test_python_literals_are_read_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_suite({"fn_name": "f", "inputs": [r"'\d'"], "outputs": [1]}).cases[0].arguments == (r"\d",)
        read_suite({"asserts": [r"assert f('\d')"]})


def test_suites_can_be_read_in_many_threads():
    with ThreadPoolExecutor(8) as pool:
        done = list(pool.map(read_suite, [{"asserts": [f"assert f('\\d', {n})"]} for n in range(400)]))
    assert [suite.cases[0].test for suite in done] == [f"assert f('\\d', {n})" for n in range(400)]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(st.tuples(st.lists(JSON, max_size=3), JSON), min_size=1, max_size=4))
@settings(max_examples=examples(100), deadline=None)
def test_calls_read_from_lists_and_from_text_are_the_same(pairs):
    inputs, outputs = [given for given, _ in pairs], [wanted for _, wanted in pairs]
    as_text = {
        "fn_name": "f",
        "inputs": ["\n".join(map(json.dumps, given)) for given in inputs],
        "outputs": list(map(json.dumps, outputs)),
    }
    suite = read_suite(as_text)
    assert [list(case.arguments) for case in suite.cases] == inputs
    assert [case.expected for case in suite.cases] == outputs
    listed = read_suite(json.dumps({"fn_name": "f", "inputs": inputs, "outputs": outputs}))
    assert [case.arguments for case in listed.cases] == [case.arguments for case in suite.cases]
    for case, wanted in zip(listed.cases, outputs, strict=True):
        if not all(isinstance(output, str) for output in outputs):
            assert value_difference(wanted, case.expected, Comparison()) is None


KEYS = st.sampled_from(["inputs", "outputs", "fn_name", "asserts", "test", "language", "other"])


@given(JSON | st.dictionaries(KEYS, JSON))
@settings(max_examples=examples(200), deadline=None)
def test_anything_is_either_a_suite_with_cases_or_a_config_error(tests):
    for given_as in (tests, json.dumps(tests)):
        with contextlib.suppress(ConfigError):
            assert read_suite(given_as).cases


# Size


@pytest.mark.parametrize(
    "build",
    [
        lambda: {"inputs": ["1 " * 5_000_000] * 4, "outputs": ["2\n" * 5_000_000] * 4},
        lambda: {"inputs": [["1 2 3"] * 300_000], "outputs": [["1"] * 300_000]},
        lambda: {"fn_name": "f", "inputs": [[list(range(1_000_000))]], "outputs": [list(range(1_000_000))]},
        lambda: {"fn_name": "f", "inputs": [str(list(range(1_000_000)))], "outputs": ["1"]},
        lambda: {"inputs": ["1"] * 50_000, "outputs": ["2"] * 50_000},
        lambda: {"asserts": [f"assert f({n})" for n in range(2_000)]},
        lambda: {"test": "assert f()\n" * 500_000},
    ],
)
def test_large_suites_take_linear_time(build):
    tests = build()
    started = time.process_time()
    assert read_suite(tests).cases
    assert time.process_time() - started < processor_time(8)


@pytest.mark.parametrize(
    "tests",
    [
        "x" * 20_000_000,
        {"inputs": "[" + "1," * 5_000_000, "outputs": ["1"]},
        {"inputs": [["x" * 20_000_000, None]], "outputs": ["1"]},
        {"fn_name": "f", "inputs": ["x\n" * 1_000_000], "outputs": ["1"]},
        {"fn_name": "f", "inputs": ["1"], "outputs": ["[" * 1_000_000]},
        {"inputs": ["1"], "x" * 20_000_000: ["1"]},
        {**PAIR, "language": "x" * 20_000_000},
        {"x" * 1_000_000: 1},
    ],
    ids=range(8),
)
def test_a_large_mistake_has_a_short_message(tests):
    started = time.process_time()
    with pytest.raises(ConfigError) as raised:
        read_suite(tests)
    assert len(str(raised.value)) < 1000
    assert time.process_time() - started < processor_time(8)
