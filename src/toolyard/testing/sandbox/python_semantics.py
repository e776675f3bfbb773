"""A Python program must behave as under `python main.py`, which passes this suite too."""

from __future__ import annotations

import pytest

from toolyard.sandbox.protocol import Sandbox, Verdict
from toolyard.testing.sandbox.contract import run
from toolyard.testing.sandbox.python_runtime import PythonRuntime


class PythonSemantics(PythonRuntime):
    """Subclass it and provide the class-scoped fixture `sandbox`: an open sandbox."""

    pytestmark = pytest.mark.asyncio(loop_scope="class")

    # ------------------------------------------------------------------------------------------ the main module
    async def test_main_is_fresh(self, sandbox: Sandbox) -> None:
        execution = await run(sandbox, "print(__name__, sorted(set(vars()) - {'__annotations__', '__cached__'}))")
        names = ["__builtins__", "__doc__", "__file__", "__loader__", "__name__", "__package__", "__spec__"]
        assert execution.stdout == f"__main__ {names}\n"

    async def test_main_knows_its_file(self, sandbox: Sandbox) -> None:
        execution = await run(
            sandbox,
            """
            '''Its docstring.'''
            import inspect, os, sys
            def f():
                return "source"
            folder, name = os.path.split(os.path.abspath(__file__))
            print(folder == os.getcwd() == os.path.abspath(sys.path[0]), sys.argv == [name], __doc__)
            print(inspect.getsource(f) == "def f():\\n    return \\"source\\"\\n")
            print(type(__loader__).__name__, __loader__.get_source("__main__") == open(__file__).read())
            """,
        )
        assert execution.stderr == ""
        assert execution.stdout == "True True Its docstring.\nTrue\nSourceFileLoader True\n"

    async def test_main_can_be_imported_by_name(self, sandbox: Sandbox) -> None:
        execution = await run(
            sandbox, "import sys, __main__; x = 1; print(__main__.x, __main__ is sys.modules[__name__])"
        )
        assert execution.stdout == "1 True\n"

    async def test_the_main_guard_is_true(self, sandbox: Sandbox) -> None:
        execution = await run(sandbox, "def main(): print('main')\nif __name__ == '__main__':\n    main()")
        assert execution.stdout == "main\n"

    async def test_classes_of_main_can_be_pickled(self, sandbox: Sandbox) -> None:
        execution = await run(
            sandbox,
            """
            import dataclasses, pickle
            @dataclasses.dataclass
            class Point:
                x: int
            print(pickle.loads(pickle.dumps(Point(1))) == Point(1), Point.__module__, vars().get("__annotations__", {}))
            """,
        )
        assert execution.stdout == "True __main__ {}\n"

    async def test_the_program_does_not_inherit_our_future_imports(self, sandbox: Sandbox) -> None:
        assert (await run(sandbox, "def f(x: int): ...\nprint(f.__annotations__)")).stdout == "{'x': <class 'int'>}\n"

    async def test_source_may_have_any_line_endings_and_an_encoding(self, sandbox: Sandbox) -> None:
        execution = await run(sandbox, "\ufeff# -*- coding: utf-8 -*-\r\nx = 'é'\r\nif x:\r\n    print(x)\r\n")
        assert execution.stdout == "é\n"

    # ------------------------------------------------------------------------------------------------- imports
    async def test_files_can_be_imported(self, sandbox: Sandbox) -> None:
        files = {
            "tool.py": b"import pack.inner\ndef answer(): return pack.inner.ANSWER",
            "pack/__init__.py": b"",
            "pack/inner.py": b"from . import other\nANSWER = other.ANSWER",
            "pack/other.py": b"ANSWER = 42",
        }
        for _ in range(4):
            execution = await run(sandbox, "import tool; print(tool.answer())", files=files)
            assert execution.stdout == "42\n"

    @pytest.mark.parametrize("name", ["colorsys", "json", "random", "numbers"])
    async def test_a_file_shadows_a_library_module_of_the_same_name(self, sandbox: Sandbox, name: str) -> None:
        execution = await run(sandbox, f"import {name}; print({name}.MINE)", files={f"{name}.py": b"MINE = 42"})
        assert execution.stdout == "42\n"

    async def test_a_missing_module_is_an_import_error_as_usual(self, sandbox: Sandbox) -> None:
        execution = await run(sandbox, "import no_such_module")
        assert (execution.verdict, execution.exit_code) == (Verdict.FAILED, 1)
        assert execution.stderr.endswith("ModuleNotFoundError: No module named 'no_such_module'\n")

    # ----------------------------------------------------------------------------------------------- tracebacks
    async def test_a_traceback_shows_the_programs_own_lines_and_no_others(self, sandbox: Sandbox) -> None:
        execution = await run(
            sandbox,
            """\
            print(__file__)
            def f():
                raise ValueError("no good")
            f()
            """,
        )
        assert (execution.verdict, execution.exit_code) == (Verdict.FAILED, 1)
        lines = [line for line in execution.stderr.splitlines() if line.strip(" ^~")]
        assert lines == [
            "Traceback (most recent call last):",
            f'  File "{execution.stdout.strip()}", line 4, in <module>',
            "    f()",
            f'  File "{execution.stdout.strip()}", line 3, in f',
            '    raise ValueError("no good")',
            "ValueError: no good",
        ]

    async def test_a_syntax_error_points_at_its_place(self, sandbox: Sandbox) -> None:
        execution = await run(sandbox, "x = 1\nif x = 2: pass\n")
        assert (execution.verdict, execution.exit_code, execution.stdout) == (Verdict.FAILED, 1, "")
        place, line, caret, message = execution.stderr.splitlines()
        assert place.endswith('main.py", line 2')
        assert line == "    if x = 2: pass"
        assert caret == "       ^^^^^"
        assert message.startswith("SyntaxError: invalid syntax")

    async def test_a_chained_exception_is_shown_whole(self, sandbox: Sandbox) -> None:
        execution = await run(sandbox, "try:\n    1 / 0\nexcept ZeroDivisionError:\n    {}['key']\n")
        assert "ZeroDivisionError: division by zero\n\nDuring handling of the above" in execution.stderr
        assert execution.stderr.endswith("KeyError: 'key'\n")

    async def test_the_programs_own_excepthook_is_used(self, sandbox: Sandbox) -> None:
        execution = await run(sandbox, "import sys\nsys.excepthook = lambda *found: print(found[1])\n1 / 0")
        assert (execution.exit_code, execution.stdout, execution.stderr) == (1, "division by zero\n", "")

    async def test_infinite_recursion_is_an_error_that_can_be_caught(self, sandbox: Sandbox) -> None:
        code = """
            def f(n): return n if n == 0 else f(n - 1)
            print(f(960))
            try:
                f(10**9)
            except RecursionError:
                print("caught")
            import sys
            sys.setrecursionlimit(100_000)
            print(f(20_000))
            sys.setrecursionlimit(1000)
            f(10**9)
        """
        execution = await run(sandbox, code)
        assert (execution.exit_code, execution.stdout) == (1, "0\ncaught\n0\n")
        assert "RecursionError: maximum recursion depth exceeded" in execution.stderr

    async def test_warnings_are_printed(self, sandbox: Sandbox) -> None:
        execution = await run(
            sandbox,
            """\
            import warnings
            for _ in range(2):
                warnings.warn("careful")
            warnings.warn("old", DeprecationWarning)
            async def forgotten(): ...
            forgotten()
            x = 1 is 1
            """,
        )
        assert execution.ok
        assert execution.stderr.count('UserWarning: careful\n  warnings.warn("careful")\n') == 1
        assert "main.py:4: DeprecationWarning: old" in execution.stderr
        assert "RuntimeWarning: coroutine 'forgotten' was never awaited" in execution.stderr
        assert 'main.py:7: SyntaxWarning: "is" with' in execution.stderr

    # ---------------------------------------------------------------------------------------------------- exits
    @pytest.mark.parametrize(
        ("how", "code", "words"),
        [
            ("sys.exit()", 0, ""),
            ("sys.exit(None)", 0, ""),
            ("sys.exit(3)", 3, ""),
            ("sys.exit(True)", 1, ""),
            ("sys.exit(-1)", 255, ""),
            ("sys.exit(300)", 44, ""),
            ("sys.exit('bye')", 1, "bye\n"),
            ("raise SystemExit((1, 2))", 1, "(1, 2)\n"),
            ("exit(4)", 4, ""),
            ("import os; sys.stdout.flush(); os._exit(5)", 5, ""),
        ],
    )
    async def test_every_way_to_exit(self, sandbox: Sandbox, how: str, code: int, words: str) -> None:
        execution = await run(sandbox, f"import sys\nprint('before')\n{how}\nprint('after')")
        assert (execution.exit_code, execution.stdout, execution.stderr) == (code, "before\n", words)

    async def test_an_exit_code_too_large_for_c_is_255(self, sandbox: Sandbox) -> None:
        assert (await run(sandbox, "import sys; sys.exit(2**100)")).exit_code == 255

    async def test_an_abort_is_a_signal(self, sandbox: Sandbox) -> None:
        execution = await run(sandbox, "import os; os.abort()")
        assert (execution.verdict, execution.exit_code) == (Verdict.SIGNALED, -6)

    async def test_an_uncaught_interrupt_is_a_signal(self, sandbox: Sandbox) -> None:
        code = (
            "import atexit, os, signal; atexit.register(print, 'at exit'); os.kill(os.getpid(), signal.SIGINT); input()"
        )
        execution = await run(sandbox, code)
        assert (execution.verdict, execution.exit_code, execution.stdout) == (Verdict.SIGNALED, -2, "at exit\n")
        assert execution.stderr.endswith("KeyboardInterrupt\n")

    async def test_a_program_shuts_down_in_pythons_order(self, sandbox: Sandbox) -> None:
        execution = await run(
            sandbox,
            """
            import atexit, sys, threading, time
            class Object:
                def __del__(self):
                    print("object", sys.maxsize > 0, helper())
            def helper():
                return time.time() > 0
            held = Object()
            def late():
                time.sleep(0.3)
                print("thread")
            threading.Thread(target=late).start()
            atexit.register(print, "first registered")
            atexit.register(print, "second registered")
            atexit.register(lambda: 1 / 0)
            print("last line")
            """,
        )
        assert execution.exit_code == 0
        assert execution.stdout.splitlines() == [
            "last line", "thread", "second registered", "first registered", "object True True",
        ]  # fmt: skip
        assert "ZeroDivisionError" in execution.stderr

    async def test_daemon_threads_are_not_waited_for(self, sandbox: Sandbox) -> None:
        code = "import threading, time\nthreading.Thread(target=time.sleep, args=[60], daemon=True).start()\nprint(1)"
        execution = await run(sandbox, code)
        assert (execution.verdict, execution.stdout) == (Verdict.OK, "1\n")

    async def test_an_exception_in_a_thread_does_not_fail_the_program(self, sandbox: Sandbox) -> None:
        code = "import threading\ndef work(): raise ValueError('in thread')\nthreading.Thread(target=work).start()"
        execution = await run(sandbox, code)
        assert execution.ok
        assert execution.stderr.startswith("Exception in thread Thread-1 (work):\nTraceback")
        assert execution.stderr.endswith("ValueError: in thread\n")

    async def test_files_left_open_are_flushed(self, sandbox: Sandbox) -> None:
        code = """
            file = open("left", "w")
            file.write("left open")
            def f(): return file
            import tool
            raise ValueError
        """
        tool = b"file = open('by_module', 'w'); file.write('by module'); import sys; me = sys.modules[__name__]"
        execution = await run(sandbox, code, files={"tool.py": tool}, fetch_files=["left", "by_module"])
        assert execution.files == {"left": b"left open", "by_module": b"by module"}

    async def test_what_was_printed_before_stdout_was_replaced_is_not_lost(self, sandbox: Sandbox) -> None:
        execution = await run(
            sandbox,
            "import sys\nprint('to stdout')\nsys.stdout = open('log', 'w')\nprint('to the file')",
            fetch_files=["log"],
        )
        assert (execution.exit_code, execution.stdout) == (0, "to stdout\n")
        assert execution.files == {"log": b"to the file\n"}

    @pytest.mark.parametrize(
        "how",
        [
            "sys.stdout.close()",
            "sys.stdout = None",
            "sys.stdout = io.TextIOWrapper(sys.stdout.detach(), encoding='utf-8')",
            "sys.stdout = io.TextIOWrapper(sys.stdout.buffer, encoding='utf-8')",
            "sys.stdout.reconfigure(encoding='utf-8', line_buffering=True)",
            "sys.stdout = os.fdopen(1, 'w')",
            "del sys.stdout",
        ],
    )
    async def test_a_program_ends_cleanly_whatever_it_did_to_stdout(self, sandbox: Sandbox, how: str) -> None:
        execution = await run(sandbox, f"import io, os, sys\nprint('é', flush=True)\n{how}")
        assert (execution.exit_code, execution.stdout, execution.stderr) == (0, "é\n", "")

    async def test_output_that_cannot_be_written_is_a_failure(self, sandbox: Sandbox) -> None:
        execution = await run(sandbox, "import os\nos.close(1)\nprint('lost')")
        assert execution.exit_code == 120
        assert "Bad file descriptor" in execution.stderr
