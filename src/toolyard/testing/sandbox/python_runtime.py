"""The part of `PythonSemantics` about the runtime: streams, processes, threads, signals and randomness."""

from __future__ import annotations

import pytest

from toolyard.sandbox.protocol import Limits, Sandbox
from toolyard.testing.sandbox.contract import run


class PythonRuntime:
    """Inherited by `PythonSemantics`."""

    pytestmark = pytest.mark.asyncio(loop_scope="class")

    # -------------------------------------------------------------------------------------------------- streams
    async def test_the_standard_streams_behave_like_pipes(self, sandbox: Sandbox) -> None:
        execution = await run(
            sandbox,
            """
            import sys
            for stream in (sys.stdin, sys.stdout, sys.stderr):
                print(stream.name, stream.fileno(), stream.encoding, stream.isatty(), stream.line_buffering)
            print(sys.stdout is sys.__stdout__, open("x", "w").encoding.lower())
            """,
        )
        assert execution.stdout.splitlines() == [
            "<stdin> 0 utf-8 False False",
            "<stdout> 1 utf-8 False False",
            "<stderr> 2 utf-8 False True",
            "True utf-8",
        ]

    async def test_text_of_any_script_is_written(self, sandbox: Sandbox) -> None:
        execution = await run(sandbox, "import sys\nprint('héllo ✓ 🎉 漢字')\nprint('ü \\ud800', file=sys.stderr)")
        assert (execution.stdout, execution.stderr) == ("héllo ✓ 🎉 漢字\n", "ü \\ud800\n")

    async def test_input_is_read_line_by_line(self, sandbox: Sandbox) -> None:
        code = """
            import sys
            print([input(), input("? "), sys.stdin.readline(), *sys.stdin])
            try:
                input()
            except EOFError:
                print("end")
        """
        execution = await run(sandbox, code, stdin="one\ntwo ü\r\nthree\nfour\nfive")
        assert execution.stdout == "? ['one', 'two ü\\r', 'three\\n', 'four\\n', 'five']\nend\n"

    async def test_output_appears_in_the_order_of_its_flushes(self, sandbox: Sandbox) -> None:
        execution = await run(
            sandbox,
            """
            import os, subprocess, sys
            print("parent, buffered")
            subprocess.run(["echo", "child"])
            sys.stdout.flush()
            os.write(1, b"raw\\n")
            os.dup2(1, 2)
            for n in range(2):
                print("out", n, flush=True)
                print("err", n, file=sys.stderr)
            """,
        )
        assert execution.stdout == "child\nparent, buffered\nraw\nout 0\nerr 0\nout 1\nerr 1\n"

    # ------------------------------------------------------------------------------------- processes and threads
    async def test_children_are_started_with_the_same_interpreter_and_path(self, sandbox: Sandbox) -> None:
        execution = await run(
            sandbox,
            """
            import os, subprocess, sys
            code = "import os, sys; print(os.environ['PATH'], sys.version_info[:2], os.getcwd())"
            expected = f"{os.environ['PATH']} {sys.version_info[:2]} {os.getcwd()}\\n"
            for command in (sys.executable, "python3"):
                print(subprocess.check_output([command, "-c", code], text=True) == expected)
            print(subprocess.run("exit 3", shell=True).returncode, os.system("true"), os.popen("echo hi").read())
            """,
        )
        assert execution.stdout == "True\nTrue\n3 0 hi\n\n"

    @pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
    async def test_multiprocessing_works(self, sandbox: Sandbox, method: str) -> None:
        code = f"""
            import multiprocessing as mp, tool
            from concurrent.futures import ProcessPoolExecutor
            class Point:
                def __init__(self, x): self.x = x
            def move(point): return Point(tool.twice(point.x))
            if __name__ == "__main__":
                mp.set_start_method({method!r})
                with mp.Pool(2) as pool:
                    print([point.x for point in pool.map(move, map(Point, range(5)))])
                queue = mp.Queue()
                child = mp.Process(target=queue.put, args=[42])
                child.start()
                print(queue.get(), child.join(), child.exitcode)
                with ProcessPoolExecutor(2) as pool:
                    print(list(pool.map(abs, [-1, -2])))
        """
        files = {"tool.py": b"def twice(n): return 2 * n"}
        execution = await run(sandbox, code, Limits(run_seconds=60), files=files)
        assert execution.stderr == ""
        assert execution.stdout == "[0, 2, 4, 6, 8]\n42 None 0\n[1, 2]\n"

    @pytest.mark.parametrize("method", ["fork", "spawn"])
    async def test_a_process_and_a_pipe_work(self, sandbox: Sandbox, method: str) -> None:
        code = f"""
            import multiprocessing as mp, sys
            def work(end):
                end.send(end.recv() + 1)
                sys.exit(3)
            if __name__ == "__main__":
                mp.set_start_method({method!r})
                here, there = mp.Pipe()
                child = mp.Process(target=work, args=[there])
                child.start()
                here.send(41)
                print(here.recv(), child.join(), child.exitcode)
        """
        execution = await run(sandbox, code, Limits(run_seconds=60))
        assert (execution.stdout, execution.stderr) == ("42 None 3\n", "")

    async def test_threads_and_locks_work(self, sandbox: Sandbox) -> None:
        execution = await run(
            sandbox,
            """
            from concurrent.futures import ThreadPoolExecutor
            import threading
            print(threading.current_thread() is threading.main_thread(), threading.active_count())
            total, lock = 0, threading.Lock()
            def add(n):
                global total
                with lock:
                    total += n
                return n
            with ThreadPoolExecutor(4) as pool:
                print(list(pool.map(add, range(5))), total)
            """,
        )
        assert execution.stdout == "True 1\n[0, 1, 2, 3, 4] 10\n"

    async def test_a_forked_child_ends_like_any_process(self, sandbox: Sandbox) -> None:
        execution = await run(
            sandbox,
            """
            import os, sys
            pid = os.fork()
            if pid == 0:
                print("child")
                sys.exit(7)
            print("parent", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            """,
        )
        assert execution.stdout == "child\nparent 7\n"

    async def test_signal_handlers_and_alarms_work(self, sandbox: Sandbox) -> None:
        execution = await run(
            sandbox,
            """
            import signal, time
            print(signal.getsignal(signal.SIGINT) is signal.default_int_handler, signal.getsignal(signal.SIGTERM) == 0)
            print(signal.pthread_sigmask(signal.SIG_BLOCK, []))
            signal.signal(signal.SIGALRM, lambda number, frame: print("alarm", number == signal.SIGALRM))
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            time.sleep(0.3)
            signal.signal(signal.SIGUSR1, lambda *_: print("user"))
            signal.raise_signal(signal.SIGUSR1)
            """,
        )
        assert execution.stdout == "True True\nset()\nalarm True\nuser\n"

    async def test_asyncio_works(self, sandbox: Sandbox) -> None:
        execution = await run(
            sandbox,
            """
            import asyncio, sys
            async def one(n):
                await asyncio.sleep(0.01)
                return n
            async def main():
                child = await asyncio.create_subprocess_exec("echo", "child", stdout=-1)
                print(await asyncio.gather(*map(one, range(3))), (await child.communicate())[0])
            asyncio.run(main())
            """,
        )
        assert (execution.stdout, execution.stderr) == ("[0, 1, 2] b'child\\n'\n", "")

    # ----------------------------------------------------------------------------------------------- randomness
    async def test_random_numbers_differ_in_every_run(self, sandbox: Sandbox) -> None:
        code = """
            import os, random, secrets, tempfile, uuid
            print(random.random(), os.urandom(4).hex(), secrets.token_hex(4), uuid.uuid4(), tempfile.mktemp())
        """
        values = [(await run(sandbox, code)).stdout.split() for _ in range(6)]
        for column in zip(*values, strict=True):
            assert len(set(column)) == 6

    async def test_numpys_random_numbers_differ_in_every_run(self, sandbox: Sandbox) -> None:
        code = "import numpy as np\nprint(np.random.rand(), np.random.default_rng().random())"
        found = [await run(sandbox, code) for _ in range(6)]
        if "No module named 'numpy'" in found[0].stderr:
            pytest.skip("the sandbox's interpreter has no numpy")
        for column in zip(*(one.stdout.split() for one in found), strict=True):
            assert len(set(column)) == 6
