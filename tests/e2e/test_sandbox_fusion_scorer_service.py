"""Our version of verl's scorer, on real programs: our service on a socket, the embedded sandbox, and bad servers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import Peer, http, service_in_thread

from patience import patient
from toolyard.errors import RewardError
from toolyard.rewards import blocking
from toolyard.rewards.sandbox_fusion import call_sandbox_api, check_correctness, compute_score
from toolyard.sandbox.isolation import GUEST_MAIN
from toolyard.sandbox.local import LocalSandbox

DONE = {"status": "Success", "message": "", "compile_result": None, "run_result": {"status": "Finished"}}


@pytest.fixture(scope="module", autouse=True)
def nothing_stays_open() -> Iterator[None]:
    yield
    blocking.close()


@pytest.fixture(scope="module")
def service() -> Iterator[str]:
    with service_in_thread(lambda: LocalSandbox(workers=2)) as base:
        yield f"{base}/run_code"


@pytest.fixture(params=["service", "embedded"])
def url(request: pytest.FixtureRequest) -> str:
    return request.getfixturevalue("service") if request.param == "service" else ""


ECHO = "import sys; sys.stdout.write(sys.stdin.read())"

PROGRAMS: dict[str, tuple[str, str, dict[str, Any], list[Any], list[str]]] = {
    # name: language, code, cases, results, words
    "right": ("python", "print(int(input()) ** 2)", {"inputs": ["3"], "outputs": ["9"]}, [True], ["success"]),
    "wrong": ("python", "print(0)", {"inputs": ["3"], "outputs": ["9"]}, [False], ["wrong_answer"]),
    "stdin": ("python", ECHO, {"inputs": [None, "", "hé\n"], "outputs": ["", "", "hé"]}, [True] * 3, ["success"] * 3),
    "any output": ("python", "print(3)", {"inputs": [""], "outputs": [None]}, [True], ["success"]),
    "crash": ("python", "1 / 0", {"inputs": [""], "outputs": [""]}, [-2], ["runtime_error"]),
    "exit code": ("python", "raise SystemExit(3)", {"inputs": [""], "outputs": [""]}, [-2], ["runtime_error"]),
    "syntax": ("python", "print(", {"inputs": ["", ""], "outputs": ["", ""]}, [-2, -2], ["runtime_error"] * 2),
    "memory": ("python", "x = bytearray(1 << 29)", {"inputs": [""], "outputs": [""]}, [-2], ["runtime_error"]),
    "loop": (
        "python",
        "x = input()\nwhile x == 'loop': pass\nprint(1)",
        {"inputs": ["go", "loop", "go"], "outputs": ["1"] * 3},
        [True, -3, True],
        ["success", "timeout", "success"],
    ),
    "function": (
        "python",
        "class Solution:\n    def add(self, a: List[int], b: int) -> List[int]:\n        return [x + b for x in a]",
        {"fn_name": "add", "inputs": ["[1, 2]\n3", "[]\n1", "[None]\n1"], "outputs": ["[4, 5]", "[]", "[]"]},
        [True, True, -2],
        ["success", "success", "runtime_error"],
    ),
    "assertions": (
        "python",
        "def f(x): return x + 1",
        {"assert_case": ["assert f(1) == 2", "assert f(1) == 3"]},
        [True, -2],
        ["success", "runtime_error"],
    ),
    "assertions that call a function": (
        "python",
        "class Solution:\n    def f(self, xs: List[int]) -> int:\n        return Counter(xs)[1]",
        {"fn_name": "f", "assert_case": ["assert Solution().f([1, 1]) == 2", "assert Solution().f([1]) == 2"]},
        [True, -2],
        ["success", "runtime_error"],
    ),
    "assertions and values of a function": (
        "python",
        "def f(x): return x + 1",
        {
            "fn_name": "f",
            "inputs": ["1"] * 3,
            "outputs": ["2", "3", "2"],
            "assert_case": ["assert f(2) == 3", "assert f(2) == 3", "assert f(2) == 4"],
        },
        [True, False, -2],
        ["success", "wrong_answer", "runtime_error"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_have_the_same_results_at_the_service_and_embedded(url: str, name: str) -> None:
    language, code, in_outs, results, words = PROGRAMS[name]
    timeout = 1 if name == "loop" else 10
    found, metadata = check_correctness(url, in_outs, code, timeout, 256, language)
    assert [one["status"] for one in metadata] == words
    assert found == results
    for one in metadata:
        assert isinstance(one["api_response"], dict)


def test_an_unknown_language_says_nothing_about_the_answer(url: str) -> None:
    found, (told,) = check_correctness(url, {"inputs": [""], "outputs": [""]}, "qapla", 10, 256, "klingon")
    assert found == [-1]
    assert told["status"] in ("api_error", "sandbox_error"), "refused by the service, or by the embedded sandbox"
    assert "klingon" in str(told)


@pytest.mark.toolchain("cpp")
def test_compiled_programs_have_their_results_too(url: str) -> None:
    code = (
        "#include <iostream>\nint main() { int x; std::cin >> x; if (x == 7) return 5; std::cout << x * 2 << '\\n'; }"
    )
    results, metadata = check_correctness(
        url, {"inputs": ["1", "2", "7"], "outputs": ["2", "5", ""]}, code, language="cpp", timeout=30
    )
    assert results == [True, False, -2]
    assert [one["compile_status"] for one in metadata] == ["Finished"] * 3
    assert metadata[2]["exit_code"] == 5

    results, metadata = check_correctness(
        url, {"inputs": ["1", "2"], "outputs": ["", ""]}, "a = b", language="cpp", timeout=30
    )
    assert results == [-4, -4]
    for one in metadata:
        assert one["status"] == "compile_error"
        assert "error" in one["compile_stderr"]
        assert one["run_status"] is None


def test_an_endless_loop_costs_its_time_out_and_no_more(url: str) -> None:
    code = "x = int(input())\nwhile x == 7: pass\nprint(x)"
    numbers = [str(number) for number in range(20)]
    begun = time.monotonic()
    results, _ = check_correctness(url, {"inputs": numbers, "outputs": numbers}, code, timeout=1)
    assert results == [True] * 7 + [-3] + [True] * 12
    assert time.monotonic() - begun < patient(4)


@pytest.mark.slow
def test_two_hundred_cases_with_loops_among_them_end_in_their_order(service: str) -> None:
    # They sleep: on a loaded machine, one that needs the CPU may starve, which is our failure (-1) and not its timeout.
    code = "import time\nx = int(input())\nwhile x % 50 == 7: time.sleep(1)\nprint(x)"
    numbers = [str(number) for number in range(200)]
    results, _ = check_correctness(service, {"inputs": numbers, "outputs": numbers}, code, timeout=2.0)
    assert results == [-3 if number % 50 == 7 else True for number in range(200)]


def test_loops_that_the_service_turns_away_for_a_while_are_still_their_own_doing() -> None:
    with service_in_thread(lambda: LocalSandbox(workers=2), max_wait_seconds=0.2) as base:
        in_outs = {"inputs": [""] * 5, "outputs": [""] * 5}
        results, metadata = check_correctness(f"{base}/run_code", in_outs, "while True: pass", timeout=0.4)
    assert results == [-3] * 5, metadata


def test_a_score_by_running(url: str) -> None:
    answer = "So:\n```python\nprint(sum(map(int, input().split())))\n```\nThat adds them."
    tests = json.dumps({"inputs": ["1 2", "3 4", "5 x", "0 0"], "outputs": ["3", "7", "5", "0"]})
    score, metadata = compute_score(url, None, 1024, answer, tests, continuous=True)
    assert score == 0.75
    assert metadata[2]["stderr"].strip().endswith("invalid literal for int() with base 10: 'x'")


def test_a_long_output_is_compared_to_its_end() -> None:
    expected = "x" * (4 << 20)
    code = f"import sys; print('x' * {4 << 20}, end=sys.stdin.read())"
    assert check_correctness("", {"inputs": ["", "y"], "outputs": [expected] * 2}, code)[0] == [True, False]


async def test_a_running_event_loop_may_ask_though_it_is_blocked_meanwhile(service: str) -> None:
    assert check_correctness(service, {"inputs": [""], "outputs": ["1"]}, "print(1)")[0] == [True]


# Servers that are not well --------------------------------------------------------------------------------------------


class CountingPeer(Peer):
    """Counts connections, and takes `seconds` for each answer."""

    def __init__(self, *script: bytes | None, silent: bool = False, seconds: float = 0.0) -> None:
        super().__init__(*script, silent=silent)
        self.seconds = seconds
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        read = reader.readexactly

        async def read_slowly(length: int) -> bytes:
            await asyncio.sleep(self.seconds)
            return await read(length)

        reader.readexactly = read_slowly
        await super().serve(reader, writer)


@contextlib.asynccontextmanager
async def peer(*script: bytes | None, silent: bool = False, seconds: float = 0.0) -> AsyncIterator[CountingPeer]:
    one = CountingPeer(*script, silent=silent, seconds=seconds)
    server = await asyncio.start_server(one.serve, "127.0.0.1", 0)
    one.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield one
    finally:
        server.close()


async def ask(url: str, **other: Any) -> tuple[dict[str, Any] | None, str | None]:
    given = {"code": "print(1)", "stdin": "", "compile_timeout": 1, "run_timeout": 1, "memory_limit_mb": 64, **other}
    return await asyncio.to_thread(call_sandbox_api, url, **given)


async def test_a_request_has_the_eight_fields_and_the_answer_is_as_it_came() -> None:
    async with peer(http(200, DONE)) as server:
        assert await ask(f"{server.url}/run_code", stdin=None, language="go") == (DONE, None)
        assert await ask(server.url) == (DONE, None)  # the base will do
        assert await ask(f"{server.url}/run_code/") == (DONE, None)
    assert json.loads(server.requests[0]) == {
        "code": "print(1)",
        "stdin": None,
        "language": "go",
        "compile_timeout": 1,
        "run_timeout": 1,
        "memory_limit_MB": 64,
        "files": {},
        "fetch_files": [],
    }


@pytest.mark.parametrize("status", [429, 503, 504])
async def test_a_busy_server_is_asked_again(status: int) -> None:
    async with peer(http(status, "busy", Retry_After="0.2"), http(status), http(200, DONE)) as server:
        begun = time.monotonic()
        assert await ask(server.url) == (DONE, None)
        assert time.monotonic() - begun >= 0.2
    assert len(server.requests) == 3


async def test_a_server_that_turns_everybody_away_at_once_is_down() -> None:
    async with peer(http(503)) as server:
        response, error = await ask(server.url)
    assert response is None
    assert error is not None
    assert "busy (HTTP 503)" in error
    assert 3 <= len(server.requests) <= 10


async def test_a_server_with_a_queue_is_asked_for_as_long_as_that_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """It lets every request wait before it turns it away, which one that is down does not."""
    monkeypatch.setattr("toolyard.rewards.sandbox_fusion.call._QUEUE_SECONDS", 0.4)
    async with peer(*[http(504)] * 6, http(200, DONE), seconds=0.1) as server:
        assert await ask(server.url) == (DONE, None)
    assert len(server.requests) == 7


async def test_a_connection_that_breaks_is_made_again() -> None:
    async with peer(None, http(200, DONE)) as server:
        assert await ask(server.url) == (DONE, None)
    assert len(server.requests) == 2


async def test_a_server_that_always_hangs_up_is_given_up() -> None:
    async with peer(None) as server:
        response, error = await ask(server.url)
    assert response is None
    assert "broke the connection" in str(error)
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (http(500, "out of paper"), "HTTP 500"),
        (http(422, "no code"), "refused"),
        (http(401, "who?"), "token"),
        (http(404, "nothing here"), "HTTP 404"),
        (http(200, "<html>"), "JSONDecodeError"),
        (http(200, [1]), "not a JSON object"),
        (http(200, "null"), "not a JSON object"),
    ],
)
async def test_any_other_answer_is_an_error_at_once(reply: bytes, said: str) -> None:
    async with peer(reply) as server:
        response, error = await ask(server.url)
    assert response is None
    assert said in str(error)
    assert len(server.requests) == 1


async def test_nobody_there_is_an_error_after_a_few_seconds() -> None:
    async with peer() as server:
        url = server.url
    begun = time.monotonic()
    response, error = await ask(url)
    assert response is None
    assert "cannot connect" in str(error)
    assert time.monotonic() - begun < patient(15)


async def test_a_server_that_never_answers_is_waited_for_ten_seconds_more_than_the_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("toolyard.rewards.sandbox_fusion._MARGIN_SECONDS", 0.2)
    async with peer(silent=True) as server:
        begun = time.monotonic()
        response, error = await ask(server.url, compile_timeout=0.2, run_timeout=0.1)
    assert 0.4 < time.monotonic() - begun < patient(5)
    assert response is None
    assert "no answer within 0.5 s" in str(error)
    assert len(server.requests) == 1


@pytest.mark.parametrize("url", ["mock_url", "ftp://there/run_code", "http://", "http://[::1/run_code"])
async def test_a_url_that_is_none_is_an_error(url: str) -> None:
    response, error = await ask(url)
    assert response is None
    assert error


@pytest.mark.parametrize("other", [{"stdin": b"bytes"}, {"memory_limit_mb": "much"}, {"run_timeout": -1}])
@pytest.mark.parametrize("where", ["service", "embedded"])
async def test_a_request_that_makes_no_sense_is_an_error(service: str, where: str, other: dict[str, Any]) -> None:
    response, error = await ask(service if where == "service" else "", **other)
    assert response is None
    assert error


async def test_connections_are_used_again() -> None:
    many = {"inputs": [""] * 200, "outputs": [None] * 200}
    async with peer(http(200, DONE)) as server:
        for _ in range(3):
            results, _ = await asyncio.to_thread(check_correctness, server.url, many, "…")
            assert results == [True] * 200
    assert len(server.requests) == 600
    assert server.connections <= 40


async def test_an_outage_is_no_score_through_a_socket_either() -> None:
    async with peer(http(500, "out of paper")) as server:
        with pytest.raises(RewardError, match="out of paper"):
            await asyncio.to_thread(
                compute_score, server.url, None, 1024, "```python\n1\n```", {"inputs": [""], "outputs": [""]}
            )


# Processes ------------------------------------------------------------------------------------------------------------

SCRIPT = """
    import multiprocessing, os, sys
    from toolyard.rewards.sandbox_fusion import check_correctness

    def score(_):
        print(os.getpid(), flush=True)
        return check_correctness("", {"inputs": ["2"], "outputs": ["4"]}, "print(int(input()) ** 2)")[0]

    if __name__ == "__main__":
        context = multiprocessing.get_context(sys.argv[1])
        assert score(0) == [True]
        with context.Pool(1) as pool:
            assert pool.map(score, range(2), chunksize=1) == [[True]] * 2
        child = context.Process(target=score, args=[0])
        child.start()
        child.join()
        assert child.exitcode == 0
        assert score(0) == [True]
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_have_sandboxes_of_their_own_and_leave_none_behind(tmp_path: Path, method: str) -> None:
    file = tmp_path / "script.py"
    file.write_text(textwrap.dedent(SCRIPT))
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", str(file), method],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    hosts = set(done.stdout.split())
    assert len(hosts) == 3
    deadline = time.monotonic() + 5
    while (left := guests_of(hosts)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


def guests_of(hosts: set[str]) -> list[str]:
    """Sandbox processes started by these. Their command lines contain their host's process id."""
    found: list[str] = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = entry.read_text().split("\0")
            if GUEST_MAIN in words and words[words.index(GUEST_MAIN) + 1] in hosts:
                found.append(entry.parent.name)
    return found


def test_the_sandbox_of_this_process_can_be_closed_and_opens_again_when_it_is_needed() -> None:
    me = {str(os.getpid())}
    blocking.close()
    of_others = set(guests_of(me))
    assert check_correctness("", {"inputs": [""], "outputs": [""]}, "")[0] == [True]
    opened = set(guests_of(me)) - of_others
    assert opened
    blocking.close()
    assert not opened & set(guests_of(me))
    assert check_correctness("", {"inputs": [""], "outputs": [""]}, "")[0] == [True]
