"""The compiler as a way in: it is a large program, and it reads what the source tells it to."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from hostile import below_us, open_to_everybody, run, until
from ways import Way

from patience import patient
from toolyard.sandbox.local import LocalSandbox
from toolyard.sandbox.protocol import MIB, Limits, Program, Verdict

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.toolchain("c"), pytest.mark.toolchain("cpp")]
in_runs_and_batches = pytest.mark.parametrize("any_way", ["best", "confined", "batch"], indirect=True)
"""Sessions have no compilers of their own."""


@pytest.fixture(scope="module")
def host_header(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("headers") / "secret.h"
    path.write_text('#define SECRET "the host\'s secret"\n')
    return open_to_everybody(path)


@pytest.mark.parametrize(
    "source",
    [
        '#include "{path}"\n#include <stdio.h>\nint main(void) {{ puts(SECRET); }}',
        (
            '__asm__(".globl s\\ns: .incbin \\"{path}\\"\\n.byte 0");\n#include <stdio.h>\n'
            "extern char s[];\nint main(void) {{ puts(s); }}"
        ),
        '#if __has_include("{path}")\n#error found it\n#endif\nint main(void) {{ return 3; }}',
        '#pragma GCC dependency "{path}"\nint main(void) {{ return 3; }}',
    ],
    ids=["include", "incbin", "has_include", "dependency"],
)
@in_runs_and_batches
async def test_a_host_file_cannot_be_compiled_in(any_way: Way, host_header: Path, source: str) -> None:
    for path in (str(host_header), "/etc/shadow", "/proc/1/environ", "/proc/self/environ"):
        execution = await run(any_way, source.format(path=path), "c")
        said = "".join(stage.stdout + stage.stderr for stage in (execution.compile, execution.run) if stage)
        assert "the host's secret" not in said
        assert "root:" not in said
        assert "PYTEST" not in said
        if path != "/proc/self/environ":
            assert execution.verdict is Verdict.COMPILE_FAILED or execution.exit_code == 3


@pytest.mark.any_user
async def test_a_compiler_bomb_ends_within_its_limits(any_level: LocalSandbox) -> None:
    bombs = {
        "endless include": '#include "main.c"\nint main(void) { return 0; }',
        "exponential macros": "".join(f"#define A{n + 1} A{n} A{n} A{n} A{n}\n" for n in range(30))
        + "#define A0 x,\nint y[] = { A30 };\nint main(void) { return 0; }",
    }
    for source in bombs.values():
        began = time.monotonic()
        execution = await any_level.run(
            Program(source, "c"), Limits(compile_seconds=2, memory_bytes=256 * MIB, run_seconds=2)
        )
        assert execution.verdict is Verdict.COMPILE_FAILED
        assert execution.run is None
        assert time.monotonic() - began < patient(6)


@pytest.mark.any_user
async def test_endless_template_recursion_ends_within_its_limits(any_level: LocalSandbox) -> None:
    source = """
template <int N, int M> struct A { static constexpr int value = A<N - 1, M>::value + A<N - 1, M + N>::value; };
template <int M> struct A<0, M> { static constexpr int value = M; };
int main() { return A<800, 0>::value; }
"""
    began = time.monotonic()
    execution = await any_level.run(Program(source, "cpp"), Limits(compile_seconds=2, run_seconds=2))
    assert execution.verdict is Verdict.COMPILE_FAILED
    assert execution.compile
    assert time.monotonic() - began < patient(6)


@pytest.mark.any_user
async def test_endless_recursion_while_compiling_is_stopped_by_the_clock(any_level: LocalSandbox) -> None:
    source = (
        "constexpr long f(long n) { return n < 2 ? n : f(n - 1) + f(n - 2); }\nconstexpr long x = f(90);\nint main() {}"
    )
    execution = await any_level.run(Program(source, "cpp"), Limits(compile_seconds=1, run_seconds=2))
    assert execution.verdict is Verdict.COMPILE_FAILED
    assert execution.compile
    assert execution.compile.verdict in (Verdict.TIMED_OUT, Verdict.FAILED)


@pytest.mark.any_user
async def test_endless_complaints_are_cut(any_level: LocalSandbox) -> None:
    source = "\n".join(f"int f{n}(void) {{ return undeclared_{n}_{'x' * 200}; }}" for n in range(300))
    execution = await any_level.run(Program(source, "c"), Limits(compile_seconds=20, output_bytes=10_000))
    assert execution.verdict is Verdict.COMPILE_FAILED
    assert execution.compile
    assert len(execution.compile.stderr_bytes) <= 10_000
    assert execution.compile.stderr_truncated


@pytest.mark.any_user
async def test_a_program_too_large_to_hand_over_is_a_failed_compile(any_level: LocalSandbox) -> None:
    """The compiler did well, but what it made is larger than a result may be: not our failure, and not a mystery."""
    execution = await any_level.run(
        Program("char x[90 << 20] = {1}; int main(void) { return x[0]; }", "c"),
        Limits(compile_seconds=20, file_bytes=128 * MIB),
    )
    assert execution.verdict is Verdict.COMPILE_FAILED
    assert execution.compile
    assert "large" in execution.stderr


async def test_a_program_that_fills_the_disk_while_compiling_is_a_failed_compile(any_level: LocalSandbox) -> None:
    execution = await any_level.run(
        Program("char x[600 << 20] = {1}; int main(void) { return x[0]; }", "c"), Limits(compile_seconds=20)
    )
    assert execution.verdict is Verdict.COMPILE_FAILED
    assert execution.run is None


@pytest.mark.any_user
async def test_a_file_named_like_the_result_does_not_damage_it(any_level: LocalSandbox) -> None:
    source = '#include <stdio.h>\nint main(void) { puts("mine"); }'
    for name in ("main", "a.out", "main.o", "program"):
        execution = await any_level.run(Program(source, "c", files={name: b"#!/bin/sh\necho theirs\n"}))
        assert execution.stdout == "mine\n", (name, execution)


@pytest.mark.any_user
async def test_a_poisoned_build_is_only_its_own_sources(any_level: LocalSandbox) -> None:
    """Builds are kept by content: same source with another file beside it is another build."""
    source = '#include "value.h"\n#include <stdio.h>\nint main(void) { printf("%d\\n", VALUE); }'
    for value in (1, 2, 1):
        execution = await any_level.run(Program(source, "c", files={"value.h": f"#define VALUE {value}".encode()}))
        assert execution.stdout == f"{value}\n"


async def test_nothing_the_compiler_started_outlives_it(any_level: LocalSandbox) -> None:
    source = (
        "constexpr long f(long n) { return n < 2 ? n : f(n - 1) + f(n - 2); }\nconstexpr long x = f(91);\nint main() {}"
    )
    running = asyncio.ensure_future(any_level.run(Program(source, "cpp"), Limits(compile_seconds=2)))
    await until(lambda: below_us("cc1plus"))
    assert (await running).verdict is Verdict.COMPILE_FAILED
    assert below_us("cc1plus") == []


@in_runs_and_batches
async def test_a_compiled_program_is_jailed_like_any_other(any_way: Way, host_header: Path) -> None:
    source = """
        #include <errno.h>
        #include <fcntl.h>
        #include <stdio.h>
        #include <sys/socket.h>
        #include <unistd.h>
        #include <signal.h>
        int main(void) {
            const char *places[] = {"HOST HEADER", "/etc/shadow", "/proc/1/environ", "/proc/1/mem", "/root/.bashrc"};
            for (int i = 0; i < 5; i++)
                if (open(places[i], O_RDONLY) >= 0) printf("read %s\\n", places[i]);
            if (open("/usr/planted", O_WRONLY | O_CREAT, 0644) >= 0) puts("planted");
            if (socket(AF_INET, SOCK_STREAM, 0) >= 0) puts("socket");
            kill(-1, SIGKILL);
            kill(getppid(), SIGKILL);
            extern char **environ;
            for (char **each = environ; *each; each++) puts(*each);
            return 7;
        }
        """
    execution = await run(any_way, source.replace("HOST HEADER", str(host_header)), "c")
    assert execution.exit_code == 7, execution
    lines = execution.stdout.splitlines()
    assert not [line for line in lines if line.startswith(("read", "planted", "socket"))]
    assert not [line for line in lines if "PYTEST" in line]
