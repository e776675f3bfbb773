"""The compile cache: one compile per program, and never one program's artifact for another."""

import asyncio

import pytest

from toolyard.sandbox.languages.builds import Build, Builds, build_key
from toolyard.sandbox.languages.toolchains import Language, Toolchain
from toolyard.sandbox.protocol import Program, StageResult, Verdict

TOOLCHAIN = Toolchain(
    language=Language(name="x", title="X", source_name="main.x", ways=(), self_test=""),
    source_name="main.x", compile_argv=("cc",), run_argv=("./main",), version_argv=("cc",), env={}, binds=(),
    artifacts=("main",), fingerprint="f",
)  # fmt: skip


def build(size: int = 10) -> Build:
    return Build(StageResult(Verdict.OK, 0), {"main": bytes(size)})


async def test_concurrent_requests_of_one_program_compile_once():
    builds, compiled = Builds(1000), 0

    async def make() -> tuple[Build, bool]:
        nonlocal compiled
        compiled += 1
        await asyncio.sleep(0.01)
        return build(), True

    results = await asyncio.gather(*(builds.get(b"k", make) for _ in range(50)))
    assert compiled == 1
    assert sum(cached for _, cached in results) == 49


async def test_a_failed_compile_attempt_of_ours_does_not_block_the_next():
    builds = Builds(1000)

    async def fail() -> tuple[Build, bool]:
        await asyncio.sleep(0)
        raise RuntimeError("worker died")

    async def make() -> tuple[Build, bool]:
        return build(), True

    first = asyncio.ensure_future(builds.get(b"k", fail))
    await asyncio.sleep(0)
    second = asyncio.ensure_future(builds.get(b"k", make))
    with pytest.raises(RuntimeError):
        await first
    assert await second == (build(), False)


async def test_a_compile_that_hit_the_clock_is_not_kept():
    builds = Builds(1000)

    async def make() -> tuple[Build, bool]:
        return build(), False

    assert (await builds.get(b"k", make))[1] is False
    assert (await builds.get(b"k", make))[1] is False


async def test_the_cache_stays_within_its_size_and_drops_the_least_recently_used():
    builds = Builds(100)

    async def make() -> tuple[Build, bool]:
        return build(40), True

    await builds.get(b"a", make)
    await builds.get(b"b", make)
    await builds.get(b"a", make)
    await builds.get(b"c", make)
    assert (await builds.get(b"a", make))[1] is True
    assert (await builds.get(b"b", make))[1] is False


def test_anything_that_can_change_the_result_changes_the_key():
    programs = [
        Program("a", "c"),
        Program("b", "c"),
        Program("a", "c", files={"x.h": b"1"}),
        Program("a", "c", files={"x.h": b"2"}),
        Program("a", "c", files={"y.h": b"1"}),
        Program("a", "c", env={"CPATH": "/tmp"}),
        Program("ax.h1", "c"),
    ]
    assert len({build_key(TOOLCHAIN, program) for program in programs}) == len(programs)


def test_stdin_and_arguments_do_not_change_the_key():
    programs = [Program("a", "c"), Program("a", "c", stdin="1"), Program("a", "c", args=["1"])]
    assert len({build_key(TOOLCHAIN, program) for program in programs}) == 1
