"""The harness around answers, by running its programs under a bare interpreter, as any sandbox would."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from toolyard.errors import ConfigError
from toolyard.rewards.code import harness as code_harness
from toolyard.rewards.code.harness import Harness, HarnessReport
from toolyard.rewards.code.protocol import Case, Suite, SuiteKind
from toolyard.sandbox.host.routing import imported_packages


class Ran:
    def __init__(self, report: HarnessReport, stderr: str, code: int) -> None:
        self.word, self.value, self.printed = report.word, report.value, report.printed.decode()
        self.stderr, self.code = stderr, code


@pytest.fixture
def run(tmp_path: Path):
    def run(harness: Harness, case: Case) -> Ran:
        (tmp_path / "main.py").write_text(harness.program)
        done = subprocess.run(
            [sys.executable, "-I", "main.py"],
            cwd=tmp_path,
            input=harness.stdin(case, 0).encode(),
            capture_output=True,
            timeout=30,
            check=False,
        )
        return Ran(harness.read(done.stdout), done.stderr.decode(), done.returncode)

    return run


@pytest.fixture
def call(run: Any):
    def call(code: str, *arguments: Any, name: str = "f", setup: str = "") -> Ran:
        case = Case(arguments=arguments)
        return run(Harness(Suite(SuiteKind.FUNCTION, (case,), function=name, setup=setup), code), case)

    return call


@pytest.fixture
def tested(run: Any):
    def tested(code: str, test: str, setup: str = "") -> Ran:
        case = Case(test=test)
        return run(Harness(Suite(SuiteKind.ASSERTS, (case,), setup=setup), code), case)

    return tested


# Finding and calling the function -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    [
        "def f(a, b): return a + b",
        "f = lambda a, b: a + b",
        "import functools\n@functools.cache\ndef f(a, b): return a + b",
        "class Solution:\n    def f(self, a, b): return a + b",
        "class Solution:\n    @staticmethod\n    def f(a, b): return a + b",
        "class Base:\n    def f(self, a, b): return a + b\nclass Solution(Base): pass",
        "def g(): pass\nfrom operator import sub as f\nclass Solution:\n    def f(self, a, b): return a + b",
        "class Adder:\n    def f(self, a, b): return a + b\nclass Other:\n    def g(self): pass",
        "from __future__ import annotations\ndef f(a: Missing, b) -> Missing: return a + b",
        "# -*- coding: latin-1 -*-\ndef f(a, b): return a + b",
        "\ufeffdef f(a, b):\r\n    return a + b\r\n",
        "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: 'int'\ndef f(a, b): return P(a).x + b",
        "import pickle\nclass P: pass\ndef f(a, b):\n    pickle.loads(pickle.dumps(P()))\n    return a + b",
    ],
)
def test_a_function_is_found_wherever_an_answer_may_put_it(call: Any, code: str) -> None:
    ran = call(code, 1, 2)
    assert (ran.word, ran.value, ran.printed, ran.stderr, ran.code) == (code_harness.RETURNED, 3, "", "", 0)


@pytest.mark.parametrize("name", ["Solver.f", "Solution.f", "f"])
def test_a_name_may_say_whose_method_it_is(call: Any, name: str) -> None:
    code = "class Other:\n    def f(self): return 'Other'\nclass {0}:\n    def f(self): return '{0}'"
    owner = name.rpartition(".")[0] or "Solution"
    assert call(code.format(owner), name=name).value == owner
    assert call("def f(): return 'plain'", name=name).value == "plain"


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("def g(a): pass", "NameError: the program has no function and no method 'f'"),
        ("f = 3", "NameError: the program has no function and no method 'f'"),
        (
            "class A:\n    def f(self, a): pass\nclass B:\n    def f(self, a): pass",
            "NameError: the program has several methods 'f'",
        ),
        ("def f(): pass", "TypeError: f() takes 0 positional arguments but 1 was given"),
        ("class Solution:\n    def __init__(self, x): pass\n    def f(self, a): pass", "TypeError: "),
    ],
)
def test_a_function_that_cannot_be_called_is_an_exception_of_the_answer(call: Any, code: str, why: str) -> None:
    ran = call(code, 1)
    assert (ran.word, ran.code) == (code_harness.READY, 1)
    assert ran.stderr.startswith(why)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("(1, [2, (3,)])", [1, [2, [3]]]),
        ("{3, 1, 2}", [1, 2, 3]),
        ("[frozenset([2, 1])]", [[1, 2]]),
        ("__import__('collections').deque([1, 2])", [1, 2]),
        ("__import__('collections').Counter('aab')", {"a": 2, "b": 1}),
        ("{1: True, None: 2.5}", {"1": True, "null": 2.5}),
        ("None", None),
        ("10**30", 10**30),
        ("float('-inf')", -math.inf),
        ("'ü \\n \\ud800'", "ü \n \ud800"),
        ("__import__('enum').IntEnum('E', 'A').A", 1),
    ],
)
def test_what_json_has_a_word_for_arrives(call: Any, expression: str, value: Any) -> None:
    ran = call(f"def f(): return {expression}")
    assert (ran.word, ran.value) == (code_harness.RETURNED, value)


def test_nan_arrives_as_itself(call: Any) -> None:
    assert math.isnan(call("def f(): return float('nan')").value)


def test_values_of_numpy_are_numbers_and_lists(call: Any) -> None:
    pytest.importorskip("numpy")
    ran = call(
        "import numpy as np\ndef f(): return [np.int64(1), np.float32(0.5), np.bool_(True), np.arange(4).reshape(2, 2)]"
    )
    assert ran.value == [1, 0.5, True, [[0, 1], [2, 3]]]


@pytest.mark.parametrize(
    ("expression", "shown"),
    [
        ("1j", "1j"),
        ("[b'x', object]", "b'x'"),
        ("{(1, 2): 3}", "dict: keys must be str, int, float, bool or None, not tuple"),
        ("(lambda x: x.append(x) or x)([])", "list: Circular reference detected"),
        ("10**5000", "int: Exceeds the limit (4300 digits) for integer string conversion"),
        ("type('Odd', (), {'__repr__': lambda self: 1 / 0})()", "Odd: division by zero"),
        ("range(3)", "range(0, 3)"),
    ],
)
def test_what_json_has_no_word_for_is_told_in_words(call: Any, expression: str, shown: str) -> None:
    ran = call(f"def f(): return {expression}")
    assert ran.word == code_harness.ODD
    assert shown in ran.value


def test_a_value_nested_too_deeply_is_odd_and_harms_nobody(call: Any) -> None:
    ran = call(
        "import sys\nsys.setrecursionlimit(10**6)\ndef f():\n    x = []\n    for _ in range(900): x = [x]\n    return x"
    )
    assert ran.word == code_harness.RETURNED
    ran = call("def f():\n    x = []\n    for _ in range(99999): x = [x]\n    return x")
    assert ran.word == code_harness.ODD


def test_arguments_are_the_answers_own_to_change(call: Any) -> None:
    ran = call("def f(a, b):\n    a.append(b)\n    return [a, b]", [1], {"x": "ü"})
    assert ran.value == [[1, {"x": "ü"}], {"x": "ü"}]


def test_arguments_that_json_has_no_word_for_are_the_tasks_mistake() -> None:
    case = Case(arguments=({1, 2},))
    with pytest.raises(ConfigError, match="case 7: its arguments cannot be written as JSON"):
        Harness(Suite(SuiteKind.FUNCTION, (case,), function="f"), "").stdin(case, 7)


# What the answer does besides -----------------------------------------------------------------------------------------


def test_what_the_answer_prints_is_told_apart_from_what_it_returns(call: Any) -> None:
    code = "import os, sys\nprint('top')\ndef f():\n    print('in', end='')\n    os.write(1, b'raw')\n    return 'x'"
    ran = call(code)
    assert (ran.value, ran.printed) == ("x", "rawtop\nin")


def test_the_main_block_of_an_answer_does_not_run(call: Any) -> None:
    assert call("def f(): return 1\nif __name__ == '__main__':\n    print(f(), input())").printed == ""


@pytest.mark.parametrize(
    "reading",
    [
        "import sys; got = sys.stdin.read()",
        "import os; got = os.read(0, 100).decode()",
        "got = open('/dev/stdin').read()",
        "import subprocess; got = subprocess.run(['cat'], capture_output=True, text=True).stdout",
    ],
)
def test_the_answer_finds_its_stdin_empty(call: Any, reading: str) -> None:
    assert call(f"{reading}\ndef f(a): return [a, got]", "argument").value == ["argument", ""]


def test_input_at_top_level_raises_and_does_not_eat_the_arguments(call: Any) -> None:
    ran = call("n = input()\ndef f(a): return a", 1)
    assert (ran.word, ran.code) == (code_harness.READY, 1)
    assert ran.stderr.endswith("EOFError: EOF when reading a line\n")


@pytest.mark.parametrize(
    "mischief",
    [
        "import sys; sys.stdout = None",
        "import sys; sys.stdout.close()",
        "import os; os.close(1)",
        "import os; os.dup2(2, 1)",
        "import io, sys; sys.stdout = io.StringIO()",
        "import json; json.dumps = None",
        "import os; os.write = None",
        "global isinstance, type, repr; isinstance = type = repr = None",
        "import sys; sys.modules.clear()",
        "import threading, time; threading.Thread(target=time.sleep, args=(60,)).start()",
        "import atexit, os; atexit.register(os._exit, 3)",
    ],
)
def test_an_answer_that_breaks_things_around_it_still_returns(call: Any, mischief: str) -> None:
    ran = call(f"def f():\n    {mischief}\n    return 5")
    assert (ran.word, ran.value, ran.code) == (code_harness.RETURNED, 5, 0)


FORGE = """
import sys
frame = sys._getframe()
while frame.f_back is not None:
    frame = frame.f_back
    if "nonce" in frame.f_locals:
        nonce = frame.f_locals["nonce"].decode()
"""


def test_a_forged_result_is_overruled_by_the_one_that_is_returned(call: Any) -> None:
    ran = call(f"{FORGE}\ndef f():\n    print(f'\\n{{nonce}} returned 42')\n    return 1")
    assert (ran.word, ran.value) == (code_harness.RETURNED, 1)


@pytest.mark.parametrize("words", ["passed 0", 'task "no"', "ready 0", "returned", "returned [[", "x", "", "odd {"])
def test_no_forged_words_of_an_answer_that_then_leaves_can_do_harm(call: Any, words: str) -> None:
    ran = call(f"import os\n{FORGE}\ndef f():\n    os.write(1, f'\\n{{nonce}} {words}\\n'.encode())\n    os._exit(0)")
    assert ran.word in (code_harness.READY, code_harness.ODD)


def test_only_the_process_that_was_asked_answers(call: Any) -> None:
    code = "import os, time\ndef f():\n    time.sleep(0.1 if (child := os.fork()) == 0 else 0)\n    return child > 0"
    ran = call(code)
    assert (ran.word, ran.value, ran.printed) == (code_harness.RETURNED, True, "")


@pytest.mark.parametrize("leaving", ["import sys; sys.exit(0)", "import os; os._exit(0)", "raise SystemExit"])
def test_an_answer_that_leaves_early_has_returned_nothing(call: Any, leaving: str) -> None:
    for code in (f"def f(): return 1\n{leaving}", f"def f():\n    {leaving}"):
        ran = call(code)
        assert (ran.word, ran.code) == (code_harness.READY, 0)


# Tracebacks -----------------------------------------------------------------------------------------------------------


def test_a_traceback_shows_the_answers_own_lines_and_no_others(call: Any) -> None:
    code = "\n\ndef g(x):\n    return 1 / x\n\ndef f(a):\n    '''doc \\' \\\\ '''\n    return g(a)\n"
    assert [line for line in call(code, 0).stderr.splitlines() if set(line) - set(" ~^")] == [
        "Traceback (most recent call last):",
        '  File "answer.py", line 8, in f',
        "    return g(a)",
        '  File "answer.py", line 4, in g',
        "    return 1 / x",
        "ZeroDivisionError: division by zero",
    ]


@pytest.mark.parametrize("code", ["def f(:\n    pass", "def f():\nreturn 1", "x = '\0'", "'''open", "(" * 300])
def test_text_that_is_no_python_is_told_without_a_traceback(call: Any, code: str) -> None:
    ran = call(code)
    assert (ran.word, ran.code) == (code_harness.READY, 1)
    assert "Traceback" not in ran.stderr
    assert ran.stderr.splitlines()[-1].startswith(("SyntaxError: ", "IndentationError: "))


@pytest.mark.parametrize(
    "text", ["'''", "\\", "'", "\\'''\\", "a\rb", "\0" + "1", "\x0c", "\ud83d", "ü🎉", '"""', "{x}", "%s"]
)
def test_any_text_reaches_the_interpreter_as_it_is(call: Any, text: str) -> None:
    ran = call(f"def f():  # {text.replace(chr(13), '').replace(chr(0), '')}\n    return {text!r}")
    assert ran.value == text


def test_the_sandbox_can_see_what_the_answer_imports() -> None:
    harness = Harness(
        Suite(SuiteKind.FUNCTION, (), function="f", setup="import sympy"), "import numpy as np\nx = '''a'''"
    )
    assert {"numpy", "sympy"} <= imported_packages(harness.program)


@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("class Solution:\n    def f(self, x: List[int]) -> Optional[int]: return 1", 1),
        ("def f(x): return list(deque([inf > 1], maxlen=1)) + [math.gcd(4, 6), gcd(9, 6)]", [True, 2, 3]),
        ("def f(x): return heapq.nsmallest(1, [2, 1]) + [bisect.bisect_left([1], 2), bisect_left([1], 2)]", [1, 1, 1]),
        ("@lru_cache(None)\ndef g(): return 1\ndef f(x): return g()", 1),
        ("def gcd(a, b): return 'mine'\ndef f(x): return gcd(4, 6)", "mine"),
        ("gcd = 5\ndef f(x): return gcd", 5),
    ],
)
def test_names_that_judging_sites_import_for_everybody_are_there(call: Any, code: str, value: Any) -> None:
    ran = call(code, [1])
    assert (ran.value, ran.stderr) == (value, "")


def test_names_that_an_older_interpreter_lacks_are_not_there_and_harm_nobody(run: Any) -> None:
    case = Case(arguments=(4, 6))
    code = "def lcm(a, b): return a * b // gcd(a, b)\nf = lcm"
    harness = Harness(Suite(SuiteKind.FUNCTION, (case,), function="f"), code)
    harness.program = f"import math\ndel math.lcm\n{harness.program}"
    assert run(harness, case).value == 12


def test_test_code_has_these_names_as_well(tested: Any) -> None:
    assert tested("def f(x): return x", "assert math.isclose(f(1), 1) and f(inf) == inf").word == code_harness.PASSED


def test_names_that_the_answer_does_not_use_are_not_there(call: Any) -> None:
    code = "def f(x):  # a random string.\n    return [x.copy(), *(name for name in globals() if name[0] != '_')]"
    assert call(code, [1]).value == [[1], "f"]


# Setup ----------------------------------------------------------------------------------------------------------------


def test_the_setup_runs_before_the_answer_and_in_its_module(call: Any) -> None:
    ran = call("def f(x: List[int]): return base + x[0]", [1], setup="from typing import *\nbase = 2")
    assert ran.value == 3


@pytest.mark.parametrize("setup", ["import nosuchmodule", "x = = 1", "raise SystemExit"])
def test_a_setup_that_fails_is_not_the_answers_doing(call: Any, setup: str) -> None:
    ran = call("def f(): return 1", setup=setup)
    assert ran.word == code_harness.TASK_FAILED
    assert any(name in ran.value for name in ("ModuleNotFoundError: No module", "SyntaxError: ", "SystemExit: "))


# Test code ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "test",
    [
        "assert f(1) == 2",
        "def check(candidate):\n    assert candidate(1) == 2\ncheck(f)",
        "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(1), 2)\nunittest.main()",
        "if __name__ == '__main__':\n    assert f(1) == 2",
        "# ü\nassert 'ü' == '\\xfc' and f(1) == 2",
    ],
)
def test_tests_pass_and_fail_in_the_forms_they_are_written_in(tested: Any, test: str) -> None:
    assert tested("def f(x): return x + 1", test).word == code_harness.PASSED
    assert tested("def f(x): return x + 2", test).word == code_harness.FAILED


def test_the_test_that_failed_is_named_with_its_line(tested: Any) -> None:
    ran = tested("def f(x): return x", "assert f(1) == 1\nassert f(2) == 3, f'not {f(2)}'\n")
    assert (ran.word, ran.value) == (code_harness.FAILED, [2, "assert f(2) == 3, f'not {f(2)}'", "not 2"])
    assert "AssertionError: not 2" in ran.stderr


def test_an_assertion_of_the_answer_itself_is_its_own_crash(tested: Any) -> None:
    ran = tested("def f(x):\n    assert x > 5\n    return x", "assert f(1) == 1")
    assert (ran.word, ran.code) == (code_harness.READY, 1)
    assert 'File "answer.py", line 2, in f' in ran.stderr


def test_an_exception_in_a_test_is_the_answers_crash(tested: Any) -> None:
    ran = tested("def g(x): return x", "assert f(1) == 1")
    assert (ran.word, ran.code) == (code_harness.READY, 1)
    assert "NameError: name 'f' is not defined" in ran.stderr


@pytest.mark.parametrize("leaving", ["import sys; sys.exit(0)", "import os; os._exit(0)", "raise SystemExit"])
def test_an_answer_that_leaves_before_its_tests_are_over_has_not_passed(tested: Any, leaving: str) -> None:
    assert tested(f"{leaving}", "assert f(1) == 1").word == code_harness.READY
    assert tested(f"def f(x):\n    {leaving}", "assert f(1) == 1").word == code_harness.READY


UNITTEST = (
    "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(1), 2)\n"
    "if __name__ == '__main__':\n    unittest.main()"
)


@pytest.mark.parametrize(
    "code",
    [
        "exec('def f(x): raise SystemExit(0)')",
        "exec(compile('def f(x): raise SystemExit(0)', 'test.py', 'exec'))",
        "exec('def f(x): raise SystemExit(0)', {'__name__': 'unittest.main'})",
        "import sys\nf = sys.exit",
        "import sys\nf = type('F', (), {'__call__': lambda self, x: sys.exit()})()",
        "class F(SystemExit):\n    def __init__(self, x): raise SystemExit\nf = F",
        "import unittest\ndef f(x): raise unittest.SkipTest",
    ],
)
@pytest.mark.parametrize(
    "test", ["assert f(0) == 1\nassert f(1) == 2", "def check(g):\n    assert g(0)\ncheck(f)", UNITTEST]
)
def test_a_function_that_ends_the_program_in_the_middle_of_a_test_has_not_passed_it(
    tested: Any, code: str, test: str
) -> None:
    assert tested(code, test).word != code_harness.PASSED


@pytest.mark.parametrize(
    "leaving", ["import sys\nsys.exit()", "exit(0)", "raise SystemExit", "import sys\nsys.exit(\n0\n)"]
)
def test_a_test_may_end_the_program_itself(tested: Any, leaving: str) -> None:
    test = f"def main():\r\n    assert f(1) == 2\r\nmain()\r\n{leaving}"
    assert tested("def f(x): return x + 1", test).word == code_harness.PASSED
    assert tested("def f(x): return x", test).word == code_harness.FAILED
    assert tested("def f(x): return x", f"if f(1) != 2:\n    exit('no')\n{leaving}").value == [2, "exit('no')", "no"]


def test_test_code_that_is_no_python_is_the_tasks_mistake(tested: Any) -> None:
    ran = tested("import os\nos._exit(0)", "assert f(1) = 2")
    assert ran.word == code_harness.TASK_FAILED
    assert "SyntaxError" in ran.value


def test_test_code_is_not_on_the_answers_stdin(tested: Any) -> None:
    assert tested("import sys\nf = sys.stdin.read()", "assert f == ''").word == code_harness.PASSED


# Reading --------------------------------------------------------------------------------------------------------------


def test_a_result_that_was_cut_off_is_none() -> None:
    harness = Harness(Suite(SuiteKind.FUNCTION, (), function="f"), "")
    nonce = harness.stdin(Case(), 0).split("\n")[0].encode()
    whole = b"\n%b ready 0\nprinted\n%b returned [1, 2]\n" % (nonce, nonce)
    assert harness.read(whole) == HarnessReport(code_harness.RETURNED, [1, 2], b"printed", 7)
    for length in range(len(whole)):
        assert harness.read(whole[:length]).word in (None, code_harness.READY)


@pytest.mark.parametrize(
    ("text", "expected", "word"),
    [
        ("[" + "[], " * 500_000 + "[]]", [[]], code_harness.ODD),
        ("[" + "[], " * 500_000 + "[]]", [[]] * 500_001, code_harness.RETURNED),
        ("[" + "[], " * 250_000 + "[]]", [[]], code_harness.RETURNED),
        ("[" + "0.12345678901234567, " * 100_000 + "0]", [0] * 100_001, code_harness.RETURNED),
        ('"' + "\\ud83c" * 400_000 + '"', "x", code_harness.ODD),
    ],
)
def test_a_value_many_times_as_long_as_the_expected_one_is_not_taken_apart(text: str, expected: Any, word: str) -> None:
    harness = Harness(Suite(SuiteKind.FUNCTION, (), function="f"), "")
    nonce = harness.stdin(Case(), 0).split("\n")[0]
    report = harness.read(f"\n{nonce} ready 0\n\n{nonce} returned {text}\n".encode(), expected)
    assert report.word == word
    assert word == code_harness.RETURNED or report.value == f"{len(text) + 1} characters of JSON"


def test_two_harnesses_have_different_numbers() -> None:
    suite = Suite(SuiteKind.FUNCTION, (), function="f")
    one, other = (Harness(suite, "").stdin(Case(), 0) for _ in range(2))
    assert one != other
    assert Harness(suite, "").program == Harness(suite, "").program, "and it is no part of the program"
