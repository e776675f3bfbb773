"""What any `Sandbox` promises about its sessions."""

from __future__ import annotations

import asyncio

import pytest

from toolyard.errors import ProgramError, SessionLostError
from toolyard.sandbox.protocol import Limits, Sandbox, Session, Verdict


class SessionContract:
    """Subclass it and provide the class-scoped fixture `sandbox`: an open sandbox."""

    pytestmark = pytest.mark.asyncio(loop_scope="class")

    async def test_a_session_keeps_variables_imports_and_functions(self, sandbox: Sandbox) -> None:
        async with sandbox.session() as session:
            assert isinstance(session, Session)
            assert (await session.run("import math\nx = 20\ndef twice(n): return 2 * n")).ok
            result = await session.run("x += 1\nprint(twice(x), math.floor(2.5))")
            assert (result.verdict, result.stdout, result.stderr) == (Verdict.OK, "42 2\n", "")
            assert (result.display, result.error, result.session_lost) == ((), None, False)

    async def test_output_belongs_to_its_cell(self, sandbox: Sandbox) -> None:
        async with sandbox.session() as session:
            first = await session.run("import sys; print('one', end=''); print('err', file=sys.stderr)")
            second = await session.run("print('two')")
        assert (first.stdout, first.stderr) == ("one", "err\n")
        assert (second.stdout, second.stderr) == ("two\n", "")

    async def test_the_last_expression_is_displayed(self, sandbox: Sandbox) -> None:
        async with sandbox.session() as session:
            assert (await session.run("40 + 2")).display == ({"text/plain": "42"},)
            assert (await session.run("_ + 1")).display == ({"text/plain": "43"},)
            for silent in ("x = 1", "None", "1;", "", "# only a comment"):
                assert (await session.run(silent)).display == ()

    async def test_an_object_is_displayed_as_richly_as_it_can(self, sandbox: Sandbox) -> None:
        async with sandbox.session() as session:
            await session.run("class Table:\n def __repr__(self): return 'plain'\n def _repr_html_(self): return '<b>'")
            result = await session.run("display(1, 'two')\nTable()")
        plain, html = "text/plain", "text/html"
        assert result.display == ({plain: "1"}, {plain: "'two'"}, {plain: "plain", html: "<b>"})

    async def test_an_exception_ends_the_cell_and_not_the_session(self, sandbox: Sandbox) -> None:
        async with sandbox.session() as session:
            result = await session.run("x = 1\nprint('before')\nraise ValueError('no good')\nx = 2")
            assert (result.verdict, result.stdout, result.session_lost) == (Verdict.FAILED, "before\n", False)
            assert result.error is not None
            assert (result.error.ename, result.error.evalue) == ("ValueError", "no good")
            assert "line 3" in "\n".join(result.error.traceback)
            assert "raise ValueError('no good')" in "\n".join(result.error.traceback)
            assert (await session.run("x")).display == ({"text/plain": "1"},)

    @pytest.mark.parametrize(
        ("code", "ename"),
        [
            ("print('not closed'", "SyntaxError"),
            ("import sys; sys.exit(3)", "SystemExit"),
            ("raise KeyboardInterrupt", "KeyboardInterrupt"),
            ("def f(): f()\nf()", "RecursionError"),
            ("class Odd:\n def __repr__(self): raise OSError('odd')\nOdd()", "OSError"),
        ],
    )
    async def test_a_session_survives_a_failing_cell(self, sandbox: Sandbox, code: str, ename: str) -> None:
        async with sandbox.session() as session:
            await session.run("x = 1")
            result = await session.run(code)
            assert result.error is not None
            assert (result.verdict, result.error.ename, result.session_lost) == (Verdict.FAILED, ename, False)
            assert (await session.run("x")).display == ({"text/plain": "1"},)

    @pytest.mark.parametrize("wait", ["while True: pass", "import time; time.sleep(60)"])
    async def test_a_time_out_ends_the_cell_and_not_the_session(self, sandbox: Sandbox, wait: str) -> None:
        async with sandbox.session() as session:
            await session.run("x = 1")
            result = await session.run(f"print('so far', flush=True)\n{wait}", seconds=0.5)
            assert (result.verdict, result.stdout, result.session_lost) == (Verdict.TIMED_OUT, "so far\n", False)
            assert result.error is not None
            assert (await session.run("x")).display == ({"text/plain": "1"},)

    async def test_a_cell_that_will_not_stop_ends_the_session(self, sandbox: Sandbox) -> None:
        stubborn = "import time\nwhile True:\n try: time.sleep(60)\n except BaseException: pass"
        async with sandbox.session() as session:
            result = await session.run(stubborn, seconds=0.5)
            assert (result.verdict, result.session_lost) == (Verdict.TIMED_OUT, True)
            with pytest.raises(SessionLostError):
                await session.run("1")

    async def test_a_session_whose_process_was_killed_stays_lost(self, sandbox: Sandbox) -> None:
        async with sandbox.session() as session:
            result = await session.run("print('last words', flush=True)\nimport os; os.kill(os.getpid(), 9)")
            assert (result.ok, result.stdout, result.session_lost) == (False, "last words\n", True)
            for _ in range(2):
                with pytest.raises(SessionLostError):
                    await session.run("1")

    async def test_a_closed_session_says_so(self, sandbox: Sandbox) -> None:
        async with sandbox.session() as session:
            await session.close()
            await session.close()
            with pytest.raises(SessionLostError, match="closed"):
                await session.run("1")

    async def test_files_go_in_and_out(self, sandbox: Sandbox) -> None:
        every_byte = bytes(range(256))
        async with sandbox.session() as session:
            await session.write_files({"in/a b.bin": every_byte, "tool.py": b"def answer(): return 42"})
            result = await session.run(
                "import tool\nopen('out.bin', 'wb').write(open('in/a b.bin', 'rb').read()[::-1])\ntool.answer()"
            )
            assert result.display == ({"text/plain": "42"},)
            names = ["out.bin", "in/a b.bin", "missing", "in", "../../etc/hostname"]
            assert await session.read_files(names) == {"out.bin": every_byte[::-1], "in/a b.bin": every_byte}

    @pytest.mark.parametrize("name", ["../x", "/../x", "a/../../x", ""])
    async def test_a_name_that_leaves_the_directory_is_refused(self, sandbox: Sandbox, name: str) -> None:
        async with sandbox.session() as session:
            with pytest.raises(ProgramError):
                await session.write_files({name: b"x"})
            assert (await session.run("1")).ok

    async def test_output_over_the_limit_is_cut_and_says_so(self, sandbox: Sandbox) -> None:
        async with sandbox.session(Limits(output_bytes=1000)) as session:
            result = await session.run("print('x' * 100_000)")
            assert (result.ok, result.stdout, result.truncated) == (True, "x" * 1000, True)
            assert not (await session.run("print(1)")).truncated

    async def test_a_cell_has_no_stdin(self, sandbox: Sandbox) -> None:
        async with sandbox.session() as session:
            result = await session.run("input()")
            assert result.error is not None
            assert result.error.ename == "EOFError"

    async def test_await_works_at_top_level(self, sandbox: Sandbox) -> None:
        async with sandbox.session() as session:
            await session.run("import asyncio\nasync def answer():\n await asyncio.sleep(0)\n return 42")
            assert (await session.run("await answer()")).display == ({"text/plain": "42"},)
            assert (await session.run("asyncio.run(answer())")).display == ({"text/plain": "42"},)

    async def test_classes_of_a_session_can_be_pickled_and_inspected(self, sandbox: Sandbox) -> None:
        async with sandbox.session() as session:
            await session.run("class Point:\n    x = 1\ndef f():\n    return 'source'")
            result = await session.run("import inspect, pickle\npickle.loads(pickle.dumps(Point())).x")
            assert result.display == ({"text/plain": "1"},)
            assert (
                await session.run("print(inspect.getsource(f), end='')")
            ).stdout == "def f():\n    return 'source'\n"

    async def test_concurrent_sessions_are_isolated(self, sandbox: Sandbox) -> None:
        async def one(number: int) -> str:
            async with sandbox.session() as session:
                await session.run(f"x = {number}; open('x', 'w').write(str(x))")
                await asyncio.sleep(0.1)
                return (await session.run("print(x, open('x').read())")).stdout

        async with asyncio.TaskGroup() as group:
            sessions = [group.create_task(one(number)) for number in range(6)]
        assert [session.result() for session in sessions] == [f"{n} {n}\n" for n in range(6)]

    async def test_a_session_leaves_nothing_for_the_next(self, sandbox: Sandbox) -> None:
        async with sandbox.session() as session:
            await session.run("x = 1; open('x', 'w').close(); import os; os.environ['X'] = '1'")
        async with sandbox.session() as session:
            result = await session.run("import os; print('x' in globals(), os.path.exists('x'), 'X' in os.environ)")
        assert result.stdout == "False False False\n"

    async def test_a_session_between_cells_occupies_no_worker(self, sandbox: Sandbox) -> None:
        async with sandbox.session() as first, sandbox.session() as second, sandbox.session() as third:
            for session in (first, second, third, first):
                assert (await session.run("1")).ok
