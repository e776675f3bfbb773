"""Every language over HTTP, as clients of SandboxFusion use it: with its PyPI package, unchanged.

A program of `language_programs` does what its first line of input says. `julia`, `lean`, `swift` and, without an NVIDIA
driver or compiler, `python_gpu` and `cuda` cannot be had from Debian, npm or PyPI: there a stand-in takes the place of
the toolchain, and shows that its commands, files, limits and verdicts go the right way, not that the compiler works.
"""

from __future__ import annotations

import base64
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
from sandbox_fusion import CommandRunStatus, RunCodeRequest, RunCodeResponse, RunStatus, run_code
from serving import service_in_thread

from toolyard.sandbox import languages
from toolyard.sandbox.local import LocalSandbox
from toolyard.sandbox.protocol import MIB, Execution, Limits, Program, Verdict
from toolyard.sandbox.remote.sandbox import RemoteSandbox

PROGRAMS = {path.stem: path for path in (Path(__file__).parent / "language_programs").iterdir()}
GREETING = "hello from a file"

# Bash in the place of what runs a source, and of what compiles one.
_RUNS = 'exec bash "${@: -1}"'
_COMPILES = 'bash -n "${@: -1}" && { echo "#!/bin/bash"; cat "${@: -1}"; } > program && chmod +x program'
STAND_INS = {
    "julia": _RUNS,
    "lean": _RUNS,
    "swiftc": _COMPILES,
    "nvcc": "exec g++ -x c++ main.cu -o program",
    "nvidia-smi": "echo stand-in",
}
UNDERSTOOD = {"julia": "bash", "lean": "bash", "swift": "bash", "cuda": "cpp"}
"""What language the stand-in for a toolchain understands, where it is not that toolchain's own."""


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Found last on PATH, so that a real toolchain goes before."""
    folder = tmp_path_factory.mktemp("stand-ins") / "bin"
    folder.mkdir()
    for name, script in STAND_INS.items():
        (folder / name).write_text(f"#!/bin/bash\n{script}\n")
        (folder / name).chmod(0o755)
    for above in (folder, *folder.parents[:3]):
        above.chmod(above.stat().st_mode | 0o055)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{os.environ['PATH']}:{folder}")
        yield folder


@pytest.fixture(scope="module")
def url(stand_ins: Path) -> Iterator[str]:
    limits = Limits(memory_bytes=640 * MIB)
    with service_in_thread(lambda: LocalSandbox(workers=2, gpu=True), limits=limits, max_wait_seconds=300) as base:
        yield base


QUICK = frozenset({"python", "pytest"})
"""What `make test` tries; some of the others need many seconds for each program."""


def marked(name: str, *, quick: bool) -> Any:
    """Skipped without its toolchain, or without that of the language that a stand-in understands."""
    needs = pytest.mark.toolchain(UNDERSTOOD.get(name, "python" if name == "python_gpu" else name))
    return pytest.param(name, marks=[needs] if quick else [needs, pytest.mark.slow])


def ask(url: str, code: str, language: str, **fields: Any) -> RunCodeResponse:
    request = RunCodeRequest.construct(
        **{"code": code, "language": language, "compile_timeout": 120, "run_timeout": 120, "files": {}, **fields}
    )  # unchecked, for `c` is a name of ours
    return run_code(request, endpoint=url, max_attempts=1, client_timeout=600)


@pytest.mark.parametrize("name", [marked(row.name, quick=row.name in QUICK) for row in languages.ALL])
def test_a_language_does_all_that_its_users_expect(name: str, url: str, stand_ins: Path) -> None:
    row = languages.find_language(name)
    needs = [name for name in row.ways[0].needs if (shutil.which(name) or "").startswith(str(stand_ins))]
    understood = UNDERSTOOD.get(row.name, row.name) if needs else row.name
    program = PROGRAMS["python" if row.name == "python_gpu" else understood].read_text()
    self_test = languages.find_language(understood).self_test
    files = {"greeting.txt": base64.b64encode(f"{GREETING}\n".encode()).decode()}

    def run(mode: str, more: str = "", **fields: Any) -> RunCodeResponse:
        return ask(url, program + more, row.name, stdin=f"{mode}\n", files=files, **fields)

    with ThreadPoolExecutor(6) as pool:
        hello = pool.submit(ask, url, self_test, row.name, stdin=languages.SELF_TEST_STDIN.decode())
        reading, asserting = pool.submit(run, "files"), pool.submit(run, "assert")
        broken = pool.submit(run, "files", ")))) nonsense ((((\n")
        looping, eating = pool.submit(run, "loop", run_timeout=0.5), pool.submit(run, "eat")

    assert hello.result().status == RunStatus.Success, hello.result()
    assert languages.SELF_TEST_STDOUT.decode() in hello.result().run_result.stdout
    assert (hello.result().compile_result is None) == (row.ways[0].compile is None)

    assert reading.result().status == RunStatus.Success, reading.result()
    assert GREETING in reading.result().run_result.stdout

    failed = asserting.result()
    assert (failed.status, failed.run_result.status) == (RunStatus.Failed, CommandRunStatus.Finished), failed
    assert failed.run_result.return_code != 0

    refused = broken.result()
    assert refused.status == RunStatus.Failed, refused
    if row.ways[0].compile:
        assert refused.run_result is None
        assert refused.compile_result.return_code != 0
        assert refused.compile_result.stdout + refused.compile_result.stderr
    else:
        assert refused.run_result.return_code != 0

    stopped = looping.result()
    assert (stopped.status, stopped.run_result.status) == (RunStatus.Failed, CommandRunStatus.TimeLimitExceeded)
    assert stopped.run_result.return_code is None

    full = eating.result()
    assert (full.status, full.run_result.status) == (RunStatus.Failed, CommandRunStatus.Finished), full
    assert full.run_result.return_code != 0
    assert "survived" not in full.run_result.stdout


@pytest.mark.parametrize(
    "name", [marked(name, quick=name == "pytest") for name in ("pytest", "go_test", "jest", "D_ut", "junit")]
)
async def test_many_inputs_of_compiled_programs_and_test_runners_give_what_each_gives_alone(
    name: str, url: str
) -> None:
    quick = name not in ("pytest", "jest", "junit")  # the others need seconds to start
    limits = Limits(compile_seconds=120, run_seconds=1 if quick else 120, memory_bytes=640 * MIB)
    program = Program(PROGRAMS[name].read_text(), name, files={"greeting.txt": GREETING.encode(), "new": os.urandom(8)})
    modes = ["files\n", "assert\n", *(["loop\n"] if quick else []), "files\n"]
    async with RemoteSandbox(url) as remote:
        together = [execution async for execution in remote.run_each(program, modes, limits)]
        alone = [await remote.run(program.model_copy(update={"stdin": mode}), limits) for mode in modes[:-1]]

    def told(execution: Execution) -> tuple[Verdict, int | None, bool]:
        return execution.verdict, execution.exit_code, GREETING in execution.stdout

    assert told(together[0]) == told(together[-1]) == (Verdict.OK, 0, True)
    assert [told(one) for one in together[:-1]] == [told(one) for one in alone]
    assert together[1].verdict in (Verdict.FAILED, Verdict.SIGNALED)
    assert not quick or together[2].verdict is Verdict.TIMED_OUT
    if name != "pytest":
        assert [one.compile_cached for one in together] == [False, *[True] * (len(modes) - 1)]


@pytest.mark.parametrize(
    ("language", "near"),
    [("pyhton", "did you mean 'python' or"), ("Python", "did you mean 'python'"), ("cobol", "expected one of: python")],
)
def test_an_unknown_language_is_refused_with_those_that_are_near(language: str, near: str, url: str) -> None:
    for route, stdin in (("run_code", {"stdin": ""}), ("run_cases", {"stdins": [""]})):
        answer = requests.post(f"{url}/{route}", json={"code": "", "language": language, **stdin}, timeout=30)
        assert answer.status_code == 422
        (problem,) = answer.json()["detail"]
        assert problem["loc"] == ["body", "language"]
        assert near in problem["msg"]


def test_an_alias_of_ours_is_a_language_too(url: str) -> None:
    assert ask(url, "echo $((6 * 7))", "sh").run_result.stdout == "42\n"
