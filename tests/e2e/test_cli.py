"""The `toolyard` command as users and scripts run it: real processes, exit codes, signals."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from rich.console import Console

from toolyard import Limits, Program, Verdict, __version__
from toolyard.cli.sandbox.tour import take_tour
from toolyard.cli.sandbox.tour_programs import TourStop
from toolyard.errors import SandboxError
from toolyard.sandbox.local import LocalSandbox, SandboxConfig
from toolyard.sandbox.protocol import Execution

TOOLYARD = str(Path(sys.executable).parent / "toolyard")
SECONDS = 180


def toolyard(*args: str, stdin: bytes = b"", **env: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [TOOLYARD, *args], input=stdin, capture_output=True, timeout=SECONDS, env={**os.environ, **env}
    )


@pytest.fixture
def write(tmp_path: Path):
    def write_file(name: str, text: str | bytes) -> str:
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return write_file


@contextmanager
def started(*args: str, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [TOOLYARD, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **env}
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=SECONDS)


def left_behind_by(pid: int) -> list[str]:
    """Sandbox processes of that host: their command lines hold its pid."""
    found: list[str] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if str(pid).encode() in line and any(part.endswith(b"guest_main.py") for part in line):
                found.append(entry.name)
    return found


def interrupt(process: subprocess.Popen[bytes]) -> int:
    """Ctrl-C, once its sandbox is at work; returns the exit status."""
    deadline = time.monotonic() + SECONDS
    while not left_behind_by(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    return process.wait(SECONDS)


class TestEntry:
    def test_the_version(self) -> None:
        assert toolyard("--version").stdout.decode() == f"toolyard {__version__}\n"

    @pytest.mark.parametrize(
        ("args", "words"),
        [
            (["--help"], "toolyard sandbox tour"),
            (["sandbox", "--help"], "serve"),
            (["sandbox", "serve", "--help"], "curl localhost:8080/run_code"),
            (["sandbox", "run", "-h"], "toolyard sandbox run hello.py"),
            (["sandbox", "tour", "--help"], "hostile"),
            (["doctor", "--help"], "--json"),
        ],
    )
    def test_help_teaches_with_examples(self, args: list[str], words: str) -> None:
        done = toolyard(*args)
        assert done.returncode == 0
        assert words in done.stdout.decode()

    @pytest.mark.slow
    @pytest.mark.parametrize("args", [["nonsense"], ["sandbox", "run"], ["sandbox", "serve", "--port", "99999"]])
    def test_wrong_usage_exits_with_2(self, args: list[str]) -> None:
        done = toolyard(*args)
        assert done.returncode == 2
        assert b"Traceback" not in done.stderr


INTERRUPTED_WHILE_IMPORTING = """
import os, signal, sys
module = sys.argv.pop(1)
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
"""
AS_ITS_SCRIPT = """
sys.argv[0] = "toolyard"
from toolyard.cli.main import main
sys.exit(main())
"""


class TestCtrlC:
    @pytest.mark.parametrize(
        "module",
        [
            "typer",
            *(
                pytest.param(name, marks=pytest.mark.slow)
                for name in ("toolyard.cli.app", "toolyard.errors", "toolyard.cli.rollout", "toolyard.cli.tools.call")
            ),
        ],
    )
    def test_while_modules_are_imported_is_quiet(self, module: str) -> None:
        ran = [sys.executable, "-c", INTERRUPTED_WHILE_IMPORTING + AS_ITS_SCRIPT, module, "tools", "list"]
        done = subprocess.run(ran, capture_output=True, timeout=SECONDS)
        assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")

    def test_where_it_is_ignored_it_stays_ignored(self) -> None:
        code = f"{INTERRUPTED_WHILE_IMPORTING}signal.signal(signal.SIGINT, signal.SIG_IGN){AS_ITS_SCRIPT}"
        done = subprocess.run([sys.executable, "-c", code, "typer", "--version"], capture_output=True, timeout=SECONDS)
        assert (done.returncode, done.stderr) == (0, b"")

    def test_before_the_event_loop_runs_leaves_no_warning(self) -> None:
        code = """
async def work(): ...
import typer
from toolyard.cli.console import complete
try:
    complete(work())
except typer.Exit as end:
    sys.exit(end.exit_code)
"""
        ran = [sys.executable, "-c", INTERRUPTED_WHILE_IMPORTING + code, "asyncio"]
        done = subprocess.run(ran, capture_output=True, timeout=SECONDS)
        assert (done.returncode, done.stderr) == (130, b"interrupted\n")


class TestRun:
    @pytest.mark.parametrize(
        ("name", "code", "options", "status", "verdict"),
        [
            ("good.py", "print('hello')", [], 0, "ok"),
            ("bad.py", "raise SystemExit(3)", [], 3, "failed"),
            ("raises.py", "1 / 0", [], 1, "failed"),
            ("loop.py", "while True: pass", ["--timeout", "0.5"], 124, "timed_out"),
            ("hungry.py", "a = bytearray(b'x') * (900 << 20)", ["--memory-mb", "100"], 137, "memory_exceeded"),
            ("dies.py", "import os; os.kill(os.getpid(), 11)", [], 139, "signaled"),
            ("script.sh", "exit 7", [], 7, "failed"),
        ],
    )
    def test_it_exits_as_the_program_did_or_as_a_shell_shows_its_end(
        self, write, name: str, code: str, options: list[str], status: int, verdict: str
    ) -> None:
        done = toolyard("sandbox", "run", write(name, code), *options)
        assert done.returncode == status, done.stderr
        assert done.stderr.decode().splitlines()[-1].startswith(f"[{verdict} · ")

    def test_output_is_printed_byte_for_byte_and_the_verdict_apart_from_it(self, write) -> None:
        code = r"import os; os.write(1, b'\xff\x00no newline'); os.write(2, b'\xfe')"
        done = toolyard("sandbox", "run", write("raw.py", code))
        assert done.stdout == b"\xff\x00no newline"
        assert done.stderr.startswith(b"\xfe")
        assert b"isolation" in done.stderr
        assert toolyard("sandbox", "run", "--quiet", write("raw.py", code)).stderr == b"\xfe"

    @pytest.mark.slow
    def test_arguments_and_standard_input_reach_the_program(self, write) -> None:
        code = write("echo.py", "import sys; print(sys.argv[1:], sys.stdin.read())")
        assert toolyard("sandbox", "run", code, "a", "b").stdout == b"['a', 'b'] \n"
        assert toolyard("sandbox", "run", code, "--", "--json").stdout == b"['--json'] \n"
        assert toolyard("sandbox", "run", code, "--stdin", "-", stdin=b"ours").stdout == b"[] ours\n"
        assert toolyard("sandbox", "run", code, "--stdin", write("in", "filed")).stdout == b"[] filed\n"
        assert toolyard("sandbox", "run", code, stdin=b"not asked for").stdout == b"[] \n"

    @pytest.mark.exhaustive
    def test_the_program_itself_may_come_from_standard_input(self) -> None:
        assert toolyard("sandbox", "run", "-", "-l", "bash", stdin=b"echo $((6 * 7))").stdout == b"42\n"
        both = toolyard("sandbox", "run", "-", "-l", "bash", "--stdin", "-")
        assert both.returncode == 2
        assert toolyard("sandbox", "run", "-").returncode == 1

    def test_json_tells_everything(self, write) -> None:
        done = toolyard("sandbox", "run", "--json", write("x.py", "print('é'); raise SystemExit(4)"))
        told = json.loads(done.stdout)
        assert done.returncode == 4
        assert done.stderr == b""
        assert (told["verdict"], told["exit_code"], told["stdout"], told["compile"]) == ("failed", 4, "é\n", None)
        assert told["run"]["wall_seconds"] > 0

    @pytest.mark.slow
    @pytest.mark.toolchain("cpp")
    def test_a_compilers_complaint_is_on_stderr(self, write) -> None:
        done = toolyard("sandbox", "run", write("bad.cpp", "int main() {"))
        assert done.returncode == 1
        assert b"error" in done.stderr
        assert b"[compile_failed" in done.stderr

    @pytest.mark.parametrize(
        ("args", "words"),
        [
            (["{missing}.py"], "cannot read"),
            (["{file}", "-l", "klingon"], "klingon"),
            (["{file}", "--url", "http://127.0.0.1:1"], "127.0.0.1:1"),
            (["{file}", "--url", "nonsense"], "nonsense"),
            (["{file}", "--python", "/bin/false"], "/bin/false"),
        ],
    )
    def test_our_own_errors_are_one_line_and_exit_with_1(self, write, args: list[str], words: str) -> None:
        file = write("x.py", "print(1)")
        done = toolyard("sandbox", "run", *(arg.format(file=file, missing=file + "-missing") for arg in args))
        assert done.returncode == 1
        assert len(done.stderr.decode().splitlines()) == 1, done.stderr
        assert done.stderr.decode().startswith("toolyard: ")
        assert words in done.stderr.decode()

    def test_ctrl_c_stops_the_program_and_leaves_nothing_behind(self, write) -> None:
        with started("sandbox", "run", write("sleep.py", "import time; time.sleep(600)"), "-t", "600") as process:
            assert interrupt(process) == 130
            assert process.stderr is not None
            assert process.stderr.read() == b"interrupted\n"
            assert not left_behind_by(process.pid)


class TestDoctor:
    def test_json_is_complete_and_true_of_this_machine(
        self, grants, tmp_path: Path, without_torch: dict[str, str]
    ) -> None:
        # Two toolchains, since each is tried, and all of them together take half a minute.
        for name in ("bash", "perl"):
            (tmp_path / name).symlink_to(f"/usr/bin/{name}")
        done = toolyard("doctor", "--json", PATH=str(tmp_path), **without_torch)
        found = json.loads(done.stdout)
        assert done.returncode == (0 if found["can_run"] else 1)
        assert found["isolation"] == grants.level.value
        assert found["memory_limit"] == grants.memory_limit
        checks = {(check["group"], check["name"]): check for check in found["checks"]}
        working = {name for (group, name), check in checks.items() if group == "languages" and check["status"] == "ok"}
        assert working == {"python", "pytest", "bash", "perl"}
        assert "apt-get install golang-go" in checks["languages", "go"]["remedy"]
        assert ("kernel", "landlock") in checks
        assert ("hardware", "gpu") in checks
        assert ("extras", "server") in checks
        assert all(check["detail"] for check in checks.values())

    @pytest.mark.exhaustive
    def test_the_human_form_opens_with_its_verdict_and_ends_with_advice(self, without_torch: dict[str, str]) -> None:
        done = toolyard("doctor", PATH="/nowhere", **without_torch)
        lines = done.stdout.decode().splitlines()
        assert done.returncode == 0
        assert re.match(r"[✔!] The sandbox runs programs", lines[0])
        assert "golang-go" in done.stdout.decode()

    @pytest.mark.exhaustive
    def test_it_exits_with_1_where_programs_cannot_run(self, without_torch: dict[str, str]) -> None:
        done = toolyard("doctor", "--json", "--python", "/bin/false", **without_torch)
        found = json.loads(done.stdout)
        assert done.returncode == 1
        assert found["can_run"] is False
        assert "/bin/false" in next(check for check in found["checks"] if check["status"] == "broken")["detail"]


class TestTour:
    @pytest.mark.kernel("full")
    def test_every_stop_ends_as_it_should(self) -> None:
        done = toolyard("sandbox", "tour")
        if "the machine is too busy" in done.stdout.decode():  # for the fork bomb, beside other tests
            done = toolyard("sandbox", "tour")
        assert done.returncode == 0, done.stdout.decode()
        told = done.stdout.decode()
        assert "All ended as expected" in told
        for words in ("Fork bomb", "timed_out", "memory_exceeded", "SIGSEGV", "ZeroDivisionError", "isolation full"):
            assert words in told

    @pytest.mark.slow
    def test_ctrl_c_ends_it_with_130(self) -> None:
        with started("sandbox", "tour") as process:
            assert interrupt(process) == 130
            assert not left_behind_by(process.pid)

    @staticmethod
    async def visit(*stops: TourStop, isolation: str = "best") -> tuple[int, str]:
        console = Console(file=io.StringIO(), width=120)
        config = SandboxConfig.model_validate({"workers": 1, "isolation": isolation})
        status = await take_tour(config, console, stops)
        assert isinstance(console.file, io.StringIO)
        return status, console.file.getvalue()

    async def test_a_stop_that_ends_otherwise_fails_the_tour_and_is_named(self) -> None:
        stops = [
            TourStop("Honest", "", Program("print('[fine]')"), Limits(), Verdict.OK),
            TourStop("Impostor", "", Program("print(1)"), Limits(), Verdict.TIMED_OUT),
        ]
        status, told = await self.visit(*stops)
        assert status == 1
        assert "expected timed_out" in told
        assert "Did not end as expected: Impostor" in told
        assert "[fine]" in told

    async def test_a_failure_of_ours_fails_the_tour_and_the_tour_goes_on(self) -> None:
        broken = Program("print(1)", files={"../outside": b""})
        stops = [
            TourStop("Bad request", "", broken, Limits(), Verdict.OK),
            TourStop("Honest", "", Program("print('still here')"), Limits(), Verdict.OK),
        ]
        status, told = await self.visit(*stops)
        assert status == 1
        assert "sandbox failure" in told
        assert "still here" in told

    @pytest.mark.parametrize(("failures", "status"), [(2, 0), (3, 1)])
    async def test_a_failure_that_may_pass_is_tried_again(
        self, monkeypatch: pytest.MonkeyPatch, failures: int, status: int
    ) -> None:
        run, left = LocalSandbox.run, [SandboxError("the machine is too busy")] * failures

        async def busy(self: LocalSandbox, program: Program, limits: Limits) -> Execution:
            if left:
                raise left.pop()
            return await run(self, program, limits)

        monkeypatch.setattr(LocalSandbox, "run", busy)
        stop = TourStop("Honest", "", Program("print(1)"), Limits(), Verdict.OK)
        assert (await self.visit(stop))[0] == status

    async def test_a_missing_toolchain_is_shown_and_is_no_failure(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "/nowhere")
        status, told = await self.visit(TourStop("Go", "", Program("", "go"), Limits(), Verdict.OK))
        assert status == 0
        assert "not run" in told
        assert "golang-go" in re.sub(r"\s+", " ", told)

    async def test_what_only_walls_can_hold_is_left_out_where_there_are_none(self) -> None:
        harmful = TourStop("Shoots", "", Program("print('bang')"), Limits(), Verdict.OK, harmful=True)
        status, told = await self.visit(harmful, isolation="confined")
        assert status == 0
        assert "bang" not in told
        assert "skipped" in told


class TestServe:
    @staticmethod
    def url_of(process: subprocess.Popen[bytes]) -> str:
        assert process.stdout is not None
        line = process.stdout.readline().decode()
        found = re.search(r"https?://\S+", line)
        assert found, line or process.communicate(timeout=SECONDS)
        return found[0]

    @pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
    def test_it_answers_until_told_to_stop_and_then_sums_up(self, write, number: signal.Signals) -> None:
        with started("sandbox", "serve", "--port", "0", "--workers", "1") as process:
            url = self.url_of(process)
            done = toolyard("sandbox", "run", write("x.py", "print(6 * 7)"), "--url", url)
            assert (done.returncode, done.stdout) == (0, b"42\n")
            assert b"isolation" in done.stderr
            failed = toolyard("sandbox", "run", write("y.py", "raise SystemExit(5)"), "--url", f"{url}/run_code")
            assert failed.returncode == 5
            process.send_signal(number)
            said, complaint = process.communicate(timeout=SECONDS)
            assert (process.returncode, complaint) == (0, b"")
            assert "Served for" in said.decode()
            assert re.search(r"total\D+2\D", said.decode())
            assert not left_behind_by(process.pid)

    @pytest.mark.slow
    def test_the_token_of_the_environment_is_asked_for_and_sent(self, write) -> None:
        file = write("x.py", "print(1)")
        with started("sandbox", "serve", "--port", "0", TOOLYARD_SANDBOX_TOKEN="secret") as process:
            url = self.url_of(process)
            refused = toolyard("sandbox", "run", file, "--url", url)
            assert refused.returncode == 1
            assert b"token" in refused.stderr
            assert toolyard("sandbox", "run", file, "--url", url, TOOLYARD_SANDBOX_TOKEN="secret").returncode == 0
            assert toolyard("sandbox", "run", file, "--url", url, "--token", "secret").returncode == 0

    @pytest.mark.exhaustive
    def test_options_arrive_at_the_sandbox_and_the_service(self, write) -> None:
        limits = ["--memory-limit-mb", "100", "--run-timeout", "0.5", "--max-wait", "0.2", "--busy-status", "503"]
        with started("sandbox", "serve", "--port", "0", "--workers", "1", *limits) as process:
            url = self.url_of(process)

            def post(code: str, **fields: float) -> dict[str, Any]:
                body = json.dumps({"code": code, "language": "python", **fields}).encode()
                asked = Request(f"{url}/run_code", body, {"Content-Type": "application/json"})
                with urlopen(asked, timeout=SECONDS) as answer:
                    return json.load(answer)

            assert post("while True: pass")["run_result"]["status"] == "TimeLimitExceeded"
            assert post("a = bytearray(b'x') * (500 << 20)")["status"] == "Failed"
            with ThreadPoolExecutor(1) as pool:
                holding = pool.submit(post, "import time; time.sleep(3)", run_timeout=5)
                time.sleep(1)
                with pytest.raises(HTTPError) as busy:
                    post("print(1)")
                busy.value.close()
                assert busy.value.code == 503
                assert holding.result()["status"] == "Success"

    @pytest.mark.slow
    def test_tokens_of_a_file_and_tls_arrive_at_the_service(self, write) -> None:
        pair = write("pair.pem", "")
        command = (
            "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
        )
        made = subprocess.run(
            [*command.split(), "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "-", "-out", "-"],
            check=True,
            capture_output=True,
        )
        Path(pair).write_bytes(made.stdout)
        tokens, file = write("tokens.txt", "# team\nalice a1\nbob b2\n"), write("x.py", "print(1)")
        options = ["--port", "0", "--workers", "1", "--token-file", tokens, "--tls-cert", pair, "--max-timeout", "40"]
        with started("sandbox", "serve", *options, TOOLYARD_SANDBOX_TOKEN="unused") as process:
            url = self.url_of(process)
            assert url.startswith("https://")

            def ran(*more: str, **env: str) -> tuple[int, bytes]:
                done = toolyard("sandbox", "run", file, "--url", url, *more, TOOLYARD_SANDBOX_CA_FILE=pair, **env)
                return done.returncode, done.stdout + done.stderr

            assert ran("--token", "a1")[0] == ran(TOOLYARD_SANDBOX_TOKEN="b2")[0] == 0 != ran("--token", "unused")[0]
            assert b"at most 40 s" in ran("--token", "a1", "--timeout", "41")[1]

    @pytest.mark.slow
    def test_beyond_loopback_it_wants_a_token(self) -> None:
        done = toolyard("sandbox", "serve", "--host", "0.0.0.0", "--port", "0")
        assert done.returncode == 1
        assert b"token" in done.stderr

    def test_without_the_extra_the_pip_command_is_named(self) -> None:
        code = (
            "import sys\nsys.modules['uvicorn'] = None\nsys.argv = ['toolyard', 'sandbox', 'serve']\n"
            "from toolyard.cli.main import main\nmain()"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=SECONDS)
        assert done.returncode == 1
        assert b"pip install 'toolyard[server]'" in done.stderr
        assert b"Traceback" not in done.stderr
