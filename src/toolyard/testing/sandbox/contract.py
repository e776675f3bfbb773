"""What any `Sandbox` promises about the programs it runs, in any language; the test programs are in Python.

The tests see a sandbox only from outside, so they apply to remote ones too.
"""

from __future__ import annotations

import asyncio
import hashlib
import textwrap
import time
from typing import Any

import pytest

from toolyard.errors import ProgramError
from toolyard.sandbox.protocol import MIB, Execution, Limits, Program, Sandbox, Verdict

_FOREVER = "while True: pass"


async def run(sandbox: Sandbox, code: str, limits: Limits | None = None, **given: Any) -> Execution:
    """Run Python `code`, which may be indented; `given` are fields of `Program`."""
    return await sandbox.run(Program(textwrap.dedent(code), **given), limits)


class SandboxContract:
    """Subclass it and provide the class-scoped fixture `sandbox`: an open sandbox."""

    pytestmark = pytest.mark.asyncio(loop_scope="class")

    # ------------------------------------------------------------------------------------------------ outcomes
    async def test_it_is_a_sandbox(self, sandbox: Sandbox) -> None:
        assert isinstance(sandbox, Sandbox)

    async def test_a_program_that_ends_well_is_ok(self, sandbox: Sandbox) -> None:
        execution = await run(sandbox, "print('hello')")
        assert execution.verdict is Verdict.OK
        assert execution.ok
        assert execution.exit_code == 0
        assert (execution.stdout, execution.stderr) == ("hello\n", "")
        assert execution.compile is None
        assert not execution.truncated
        assert execution.files == {}

    async def test_an_empty_program_is_ok(self, sandbox: Sandbox) -> None:
        execution = await run(sandbox, "")
        assert (execution.verdict, execution.stdout, execution.stderr) == (Verdict.OK, "", "")

    @pytest.mark.parametrize("code", [1, 2, 42, 125, 126, 127, 255])
    async def test_an_exit_code_arrives_as_it_was(self, sandbox: Sandbox, code: int) -> None:
        execution = await run(sandbox, f"import os; os._exit({code})")
        assert (execution.verdict, execution.exit_code) == (Verdict.FAILED, code)

    @pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGTERM", "SIGABRT", "SIGUSR1"])
    async def test_a_signal_the_program_sends_itself_is_a_negative_exit_code(self, sandbox: Sandbox, name: str) -> None:
        execution = await run(
            sandbox,
            f"""
            import os, signal, sys
            print(int(signal.{name}), flush=True)
            os.kill(os.getpid(), signal.{name})
            """,
        )
        assert (execution.verdict, execution.exit_code) == (Verdict.SIGNALED, -int(execution.stdout))

    async def test_stdout_and_stderr_are_kept_apart(self, sandbox: Sandbox) -> None:
        execution = await run(
            sandbox,
            """
            import sys
            for n in range(3):
                print("out", n)
                print("err", n, file=sys.stderr)
            """,
        )
        assert execution.stdout == "out 0\nout 1\nout 2\n"
        assert execution.stderr == "err 0\nerr 1\nerr 2\n"

    async def test_an_execution_has_its_wall_time(self, sandbox: Sandbox) -> None:
        execution = await run(sandbox, "import time; time.sleep(0.3)")
        assert 0.3 <= execution.wall_seconds < 5

    async def test_an_execution_names_its_isolation_level(self, sandbox: Sandbox) -> None:
        assert (await run(sandbox, "")).isolation in {"full", "namespaces", "confined", "none", "unknown"}

    async def test_an_unknown_language_is_a_program_error(self, sandbox: Sandbox) -> None:
        with pytest.raises(ProgramError, match="klingon"):
            await sandbox.run(Program("nuqneH", "klingon"))

    async def test_arguments_and_variables_reach_the_program(self, sandbox: Sandbox) -> None:
        execution = await run(
            sandbox,
            "import os, sys; print(sys.argv[1:], os.environ['GREETING'])",
            args=["a b", "", "ü", "--x=1"],
            env={"GREETING": "hello, wörld"},
        )
        assert execution.stdout == "['a b', '', 'ü', '--x=1'] hello, wörld\n"

    # ------------------------------------------------------------------------------------------ standard input
    @pytest.mark.parametrize("stdin", [None, "", b""])
    async def test_no_input_is_end_of_file_at_once(self, sandbox: Sandbox, stdin: str | bytes | None) -> None:
        execution = await run(sandbox, "import sys; print(repr(sys.stdin.read()))", stdin=stdin)
        assert execution.stdout == "''\n"

    async def test_input_of_megabytes_arrives_whole(self, sandbox: Sandbox) -> None:
        lines = "".join(f"line {n} é\n" for n in range(400_000))
        execution = await run(
            sandbox,
            """
            import hashlib, sys
            data = sys.stdin.buffer.read()
            print(len(data), hashlib.sha256(data).hexdigest())
            """,
            stdin=lines,
        )
        sent = lines.encode()
        assert execution.stdout == f"{len(sent)} {hashlib.sha256(sent).hexdigest()}\n"

    async def test_input_need_not_be_text(self, sandbox: Sandbox) -> None:
        every_byte = bytes(range(256))
        execution = await run(sandbox, "import sys; print(sys.stdin.buffer.read().hex())", stdin=every_byte)
        assert execution.stdout == every_byte.hex() + "\n"

    async def test_input_that_is_never_read_does_no_harm(self, sandbox: Sandbox) -> None:
        execution = await run(sandbox, "print('done')", stdin=b"x" * (5 * MIB))
        assert (execution.verdict, execution.stdout) == (Verdict.OK, "done\n")

    async def test_input_and_output_of_megabytes_at_once_do_not_block_each_other(self, sandbox: Sandbox) -> None:
        execution = await run(
            sandbox,
            """
            import sys
            for line in sys.stdin:
                sys.stdout.write(line)
                sys.stderr.write(line)
            """,
            Limits(output_bytes=8 * MIB, run_seconds=30),
            stdin="0123456789abcde\n" * (3 * MIB // 16),
        )
        assert execution.ok
        assert len(execution.stdout) == len(execution.stderr) == 3 * MIB

    # -------------------------------------------------------------------------------------------------- limits
    async def test_a_time_out_is_a_verdict_that_keeps_what_was_flushed(self, sandbox: Sandbox) -> None:
        execution = await run(sandbox, f"print('so far', flush=True)\n{_FOREVER}", Limits(run_seconds=1))
        assert (execution.verdict, execution.exit_code) == (Verdict.TIMED_OUT, None)
        assert execution.stdout == "so far\n"
        assert 1 <= execution.wall_seconds < 5

    async def test_a_sleeping_program_times_out_too(self, sandbox: Sandbox) -> None:
        execution = await run(sandbox, "import time; time.sleep(60)", Limits(run_seconds=0.5))
        assert execution.verdict is Verdict.TIMED_OUT

    async def test_a_program_that_ignores_signals_times_out_too(self, sandbox: Sandbox) -> None:
        code = """
            import signal, time
            for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
                signal.signal(number, signal.SIG_IGN)
            while True:
                try: time.sleep(1)
                except BaseException: pass
        """
        execution = await run(sandbox, code, Limits(run_seconds=0.5))
        assert execution.verdict is Verdict.TIMED_OUT
        assert execution.wall_seconds < 5

    async def test_a_program_ends_when_its_first_process_ends(self, sandbox: Sandbox) -> None:
        """A child left behind that keeps the pipes open does not delay the end, and does not survive."""
        begun = time.monotonic()
        execution = await run(sandbox, "import subprocess; subprocess.Popen(['sleep', '60']); print('done')")
        assert (execution.verdict, execution.stdout) == (Verdict.OK, "done\n")
        assert time.monotonic() - begun < 8

    async def test_a_command_dies_of_a_broken_pipe_as_in_any_shell(self, sandbox: Sandbox) -> None:
        """Python ignores SIGPIPE; a command that inherits this would print an error or never end."""
        execution = await run(sandbox, "yes | head -1", Limits(run_seconds=5), language="bash")
        assert (execution.verdict, execution.stdout, execution.stderr) == (Verdict.OK, "y\n", "")

    async def test_cpu_time_over_the_limit_is_a_verdict(self, sandbox: Sandbox) -> None:
        execution = await run(sandbox, _FOREVER, Limits(cpu_seconds=1, run_seconds=30))
        assert execution.verdict is Verdict.CPU_EXCEEDED

    async def test_memory_over_the_limit_is_a_verdict_that_keeps_what_was_flushed(self, sandbox: Sandbox) -> None:
        code = """
            print("so far", flush=True)
            held = []
            try:
                while True:
                    held.append(b"x" * 8_000_000)
            except MemoryError:
                raise SystemExit("refused")
        """
        execution = await run(sandbox, code, Limits(memory_bytes=128 * MIB, run_seconds=30))
        # If the limit applies to the process, the program gets a MemoryError and can handle it.
        told = execution.verdict is Verdict.FAILED and execution.stderr == "refused\n"
        assert execution.verdict is Verdict.MEMORY_EXCEEDED or told
        assert execution.stdout == "so far\n"

    async def test_memory_below_the_limit_can_be_used(self, sandbox: Sandbox) -> None:
        execution = await run(sandbox, "print(len(b'x' * 200_000_000))", Limits(memory_bytes=512 * MIB))
        assert execution.stdout == "200000000\n"

    async def test_output_over_the_limit_is_cut_and_says_so(self, sandbox: Sandbox) -> None:
        code = "import sys; sys.stdout.write('o' * 100_000); sys.stderr.write('few')"
        execution = await run(sandbox, code, Limits(output_bytes=1000))
        assert execution.verdict is Verdict.OK
        assert execution.stdout == "o" * 1000
        assert execution.stderr == "few"
        assert execution.truncated
        assert execution.run is not None
        assert (execution.run.stdout_truncated, execution.run.stderr_truncated) == (True, False)

    async def test_output_of_exactly_the_limit_is_not_cut(self, sandbox: Sandbox) -> None:
        execution = await run(sandbox, "import sys; sys.stderr.write('e' * 1000)", Limits(output_bytes=1000))
        assert execution.stderr == "e" * 1000
        assert not execution.truncated

    async def test_a_flood_of_output_is_stopped(self, sandbox: Sandbox) -> None:
        code = "while True: print('flood' * 1000)"
        execution = await run(sandbox, code, Limits(output_bytes=1000, flood_bytes=4 * MIB, run_seconds=30))
        assert (execution.verdict, execution.exit_code) == (Verdict.OUTPUT_EXCEEDED, None)
        assert len(execution.stdout) == 1000
        assert execution.truncated

    async def test_output_that_is_not_utf8_is_escaped_as_text_and_whole_as_bytes(self, sandbox: Sandbox) -> None:
        raw = b"ok \xff\xfe \xc3 \xe2\x9c\x93\n"
        execution = await run(
            sandbox, f"import sys; sys.stdout.buffer.write({raw!r}); sys.stderr.buffer.write({raw!r})"
        )
        assert execution.run is not None
        assert execution.run.stdout_bytes == execution.run.stderr_bytes == raw
        assert execution.stdout == execution.stderr == "ok \\xff\\xfe \\xc3 ✓\n"

    async def test_zero_bytes_in_output_survive(self, sandbox: Sandbox) -> None:
        assert (await run(sandbox, "print('a\\0b')")).stdout == "a\0b\n"

    async def test_a_file_over_its_limit_fails_inside_the_program(self, sandbox: Sandbox) -> None:
        code = """
            import errno
            try:
                open("big", "wb", buffering=0).write(bytes(2_000_000)); open("big", "ab", buffering=0).write(b"x")
            except OSError as error:
                print(errno.errorcode[error.errno])
        """
        assert (await run(sandbox, code, Limits(file_bytes=1 * MIB))).stdout == "EFBIG\n"

    async def test_too_many_open_files_fail_inside_the_program(self, sandbox: Sandbox) -> None:
        code = """
            import errno
            held = []
            try:
                while True: held.append(open("/dev/null"))
            except OSError as error:
                print(errno.errorcode[error.errno], len(held) <= 64)
        """
        assert (await run(sandbox, code, Limits(open_files=64))).stdout == "EMFILE True\n"

    # --------------------------------------------------------------------------------------------------- files
    async def test_files_go_in_and_out_byte_for_byte(self, sandbox: Sandbox) -> None:
        every_byte = bytes(range(256)) * 1000
        execution = await run(
            sandbox,
            """
            import os
            os.makedirs("out/deep")
            data = open("in/a b.bin", "rb").read()
            open("out/deep/ü.bin", "wb").write(data[::-1])
            open("empty", "wb").close()
            """,
            files={"in/a b.bin": every_byte},
            fetch_files=["out/deep/ü.bin", "in/a b.bin", "empty"],
        )
        assert execution.files == {"out/deep/ü.bin": every_byte[::-1], "in/a b.bin": every_byte, "empty": b""}

    @pytest.mark.parametrize("name", ["../x", "a/../../x", "/../x", "..", "", "folder/", "nul\0"])
    async def test_a_name_that_leaves_the_directory_is_refused(self, sandbox: Sandbox, name: str) -> None:
        with pytest.raises(ProgramError):
            await run(sandbox, "print('ran')", files={name: b"x"})

    async def test_missing_names_and_non_files_are_left_out(self, sandbox: Sandbox) -> None:
        execution = await run(
            sandbox,
            """
            import os
            os.mkdir("folder")
            os.mkfifo("pipe")
            os.symlink("/etc/hostname", "link")
            open("there", "w").write("yes")
            """,
            fetch_files=["missing", "folder", "pipe", "link", "../../etc/hostname", "there"],
        )
        assert execution.files == {"there": b"yes"}

    @pytest.mark.parametrize("ending", ["raise ValueError", _FOREVER, "import os; os.abort()"])
    async def test_files_are_fetched_after_any_outcome(self, sandbox: Sandbox, ending: str) -> None:
        code = f"open('log', 'w').write('so far')\n{ending}"
        execution = await run(sandbox, code, Limits(run_seconds=1), fetch_files=["log"])
        assert not execution.ok
        assert execution.files == {"log": b"so far"}

    # -------------------------------------------------------------------------------------------- independence
    async def test_concurrent_programs_each_get_their_own_answer(self, sandbox: Sandbox) -> None:
        code = "import sys; open('n', 'w').write(sys.stdin.read()); print(open('n').read(), *sys.argv[1:])"
        async with asyncio.TaskGroup() as group:
            runs = [
                group.create_task(run(sandbox, code, stdin=f"in {n}", args=[str(n)], fetch_files=["n"]))
                for n in range(30)
            ]
        for n, one in enumerate(runs):
            assert one.result().stdout == f"in {n} {n}\n"
            assert one.result().files == {"n": f"in {n}".encode()}

    async def test_a_bad_neighbor_does_not_affect_the_others(self, sandbox: Sandbox) -> None:
        bad = ["import os; os.abort()", "raise SystemExit(3)", "x = b'x' * 10**10", "import os; os.kill(-1, 9)"]
        async with asyncio.TaskGroup() as group:
            for code in bad * 2:
                group.create_task(run(sandbox, code))
            good = [group.create_task(run(sandbox, f"print({n})")) for n in range(8)]
        assert [one.result().stdout for one in good] == [f"{n}\n" for n in range(8)]

    async def test_cancelling_stops_the_program(self, sandbox: Sandbox) -> None:
        """Programs that kept running would occupy every worker for a minute."""
        patient = Limits(run_seconds=60)
        begun = time.monotonic()
        async with asyncio.TaskGroup() as group:
            runs = [group.create_task(run(sandbox, "import time; time.sleep(60)", patient)) for _ in range(64)]
            await asyncio.sleep(1)
            for one in runs:
                one.cancel()
        assert (await run(sandbox, "print('next')")).stdout == "next\n"
        assert time.monotonic() - begun < 20

    async def test_a_run_leaves_nothing_for_the_next(self, sandbox: Sandbox) -> None:
        traces = """
            import builtins, json, math, os, sys, tempfile
            here = sorted(os.listdir())
            temporary = [name for name in os.listdir(tempfile.gettempdir()) if name.startswith("trace")]
            print(here, temporary, os.environ.get("TRACE"), hasattr(builtins, "trace"), hasattr(math, "trace"),
                  json.dumps("x"), "trace" in sys.modules, sys.getrecursionlimit(), "trace" in sys.path)
        """
        leave = """
            import builtins, json, math, os, subprocess, sys, tempfile
            open("trace", "w").close()
            open(os.path.join(tempfile.gettempdir(), "trace"), "w").close()
            os.environ["TRACE"] = "1"
            builtins.trace = math.trace = 1
            json.dumps = len
            sys.modules["trace"] = math
            sys.path.append("trace")
            sys.setrecursionlimit(5000)
            os.mkdir("locked"); os.chmod("locked", 0)
        """
        before = await run(sandbox, traces)
        assert before.ok
        for _ in range(4):
            assert (await run(sandbox, leave)).ok
        async with asyncio.TaskGroup() as group:
            after = [group.create_task(run(sandbox, traces)) for _ in range(8)]
        assert {one.result().stdout for one in after} == {before.stdout}
        assert "None False False" in before.stdout
