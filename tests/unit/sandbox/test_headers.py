"""Precompiled headers and packages: they save time, and change nothing else."""

import asyncio
import os
import subprocess
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from toolyard import settings
from toolyard.errors import ToolchainMissingError
from toolyard.sandbox.languages import find_language, resolve
from toolyard.sandbox.languages.headers import EVERYTHING, LEARN_AFTER, GoPackages, PrecompiledHeaders, leading_includes

IOSTREAM = frozenset({"iostream"})
VECTOR = frozenset({"vector"})
HELLO = '#include <iostream>\nint main() { std::cout << "hello\\n"; }\n'


@pytest.fixture
def toolchain():
    try:
        return resolve(find_language("cpp"), settings.search_path())
    except ToolchainMissingError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))


@asynccontextmanager
async def maintained(headers):
    async with asyncio.TaskGroup() as group:
        task = group.create_task(headers.maintain())
        try:
            yield
        finally:
            task.cancel()


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - a compiler in the background has no event to wait for
            await asyncio.sleep(0.02)


def compile_cpp(headers, code, directory, *extra):
    (directory / "main.cpp").write_text(code)
    argv = (*headers.toolchain.compile_argv, *headers.flags(code, directory=str(headers.directory)), *extra)
    env = {"PATH": "/usr/bin:/bin", "LC_ALL": "C"}
    return subprocess.run(argv, cwd=directory, env=env, capture_output=True, text=True, timeout=60)


def output_of(program):
    return subprocess.run([program], capture_output=True, timeout=10, check=True).stdout


def commands_naming(text):
    """Command lines of all processes on the machine that hold this text."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if text.encode() in (command := path.read_bytes()):
                found.append(command)
    return found


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("", []),
        ("int main() {}", []),
        ("#include <iostream>", ["iostream"]),
        ("// hello\n\n# include<vector>  // why\r\n/* a\n b */ #include <map>\nint x;", ["vector", "map"]),
        ("#include <bits/stdc++.h>\nusing namespace std;\n#include <vector>\n", [EVERYTHING]),
        ("#define _GLIBCXX_DEBUG\n#include <vector>\n", []),
        ('#pragma GCC optimize("O3")\n#include <vector>\n', []),
        ("#include <vector>\n#define min(a, b) a\n#include <algorithm>\n", ["vector"]),
        ('#include "mine.h"\n#include <vector>\n', []),
        ("#include <vector>\n#include <boost/any.hpp>\n#include <map>\n", ["vector"]),
        ("// a comment that goes on \\\n#include <vector>\n#include <map>\n", []),
        ("/* never closed\n#include <vector>\n", []),
        ("#if 0\n#include <vector>\n#endif\n", []),
        ("#include <vector> int x;\n", []),
    ],
)
def test_only_headers_that_nothing_precedes_are_counted(code, names):
    assert leading_includes(code) == names


async def test_first_program_does_not_wait_and_the_next_ones_profit(toolchain, tmp_path):
    headers = PrecompiledHeaders(toolchain, cache=tmp_path / "cache", starters=[IOSTREAM])
    async with maintained(headers):
        assert headers.flags(HELLO) == ()
        await until(lambda: IOSTREAM in headers.ready)
    assert headers.flags(HELLO) == ("-include", "/opt/toolyard/headers/iostream.h")
    done = compile_cpp(headers, HELLO, tmp_path, "-H")
    assert done.returncode == 0
    assert f"! {headers.directory}/iostream.h.gch" in done.stderr
    assert output_of(tmp_path / "program") == b"hello\n"


async def test_nothing_is_built_before_the_first_program(toolchain, tmp_path):
    headers = PrecompiledHeaders(toolchain, cache=tmp_path, starters=[VECTOR])
    async with maintained(headers):
        await asyncio.sleep(0.2)
    assert list(headers.directory.iterdir()) == []


async def test_program_that_forgot_a_header_still_does_not_compile(toolchain, tmp_path):
    headers = PrecompiledHeaders(toolchain, cache=tmp_path / "cache", starters=[VECTOR, VECTOR | IOSTREAM])
    code = "#include <vector>\nint main() { std::vector<int> v; std::cout << v.size(); }\n"
    async with maintained(headers):
        headers.flags(code)
        await until(lambda: len(headers.ready) == 2)
    done = compile_cpp(headers, code, tmp_path)
    assert done.returncode == 1
    assert "'cout' is not a member of 'std'" in done.stderr


async def test_messages_about_headers_name_the_program_and_no_path_of_ours(toolchain, tmp_path):
    headers = PrecompiledHeaders(toolchain, cache=tmp_path / "cache", starters=[IOSTREAM])
    code = "#include <iostream>\nstruct S {};\nint main() { std::cout << S{}; }\n"
    async with maintained(headers):
        headers.flags(code)
        await until(lambda: IOSTREAM in headers.ready)
    done = compile_cpp(headers, code, tmp_path)
    assert "main.cpp:3:24: error" in done.stderr
    assert "from main.cpp:1" in done.stderr
    assert str(tmp_path) not in done.stderr


async def test_order_of_includes_does_not_matter_and_the_largest_fitting_set_is_taken(toolchain, tmp_path):
    headers = PrecompiledHeaders(toolchain, cache=tmp_path, starters=[VECTOR, VECTOR | {"map"}])
    async with maintained(headers):
        headers.flags("#include <vector>\n")
        await until(lambda: len(headers.ready) == 2)
    assert headers.flags("#include <set>\n#include <map>\n#include <cstdio>\n#include <vector>\n")[1].endswith(
        "/map,vector.h"
    )
    assert headers.flags("#include <cstdio>\n#include <vector>\n")[1].endswith("/vector.h")
    assert headers.flags("#include <map>\n") == ()


async def test_a_set_that_programs_keep_asking_for_is_learned(toolchain, tmp_path):
    headers = PrecompiledHeaders(toolchain, cache=tmp_path, starters=[])
    async with maintained(headers):
        for _ in range(LEARN_AFTER):
            assert headers.flags("#include <vector>\n") == ()
        await until(lambda: VECTOR in headers.ready)
    assert headers.flags("#include <vector>\n")


async def test_two_processes_worth_of_builders_build_once_and_both_profit(toolchain, tmp_path):
    first, second = (PrecompiledHeaders(toolchain, cache=tmp_path, starters=[VECTOR]) for _ in range(2))
    async with maintained(first), maintained(second):
        first.flags("#include <vector>\n")
        second.flags("#include <vector>\n")
        await until(lambda: first.ready == second.ready == {VECTOR})
    assert sorted(path.name for path in first.directory.iterdir()) == [".lock", "vector.h", "vector.h.gch"]


async def test_cancelled_build_leaves_no_compiler_and_no_rubbish(toolchain, tmp_path):
    headers = PrecompiledHeaders(toolchain, cache=tmp_path, starters=[frozenset({EVERYTHING})])
    async with maintained(headers):
        headers.flags("#include <vector>\n")
        await until(lambda: any(headers.directory.glob(".build-*/everything.h")))
        await asyncio.sleep(0.2)
    assert [path.name for path in headers.directory.iterdir()] == [".lock"]
    assert commands_naming(str(tmp_path)) == []


async def test_finished_sets_are_found_again_and_a_vanished_one_is_not_used(toolchain, tmp_path):
    headers = PrecompiledHeaders(toolchain, cache=tmp_path, starters=[VECTOR])
    async with maintained(headers):
        headers.flags("#include <vector>\n")
        await until(lambda: VECTOR in headers.ready)
    again = PrecompiledHeaders(toolchain, cache=tmp_path)
    assert again.flags("#include <vector>\n")
    (again.directory / "vector.h").unlink()
    assert again.flags("#include <vector>\n") == ()


async def test_unwritable_cache_only_costs_time(toolchain, tmp_path):
    (tmp_path / "file").write_text("in the way")
    headers = PrecompiledHeaders(toolchain, cache=tmp_path / "file", starters=[VECTOR])
    async with maintained(headers):
        assert headers.flags("#include <vector>\n") == ()
        await asyncio.sleep(0.1)
    assert headers.ready == frozenset()


# Go


def pretended_go(root: Path) -> str:
    """A Go that leaves a trace in its cache instead of compiling."""
    go = root / "bin" / "go"
    go.parent.mkdir(parents=True)
    go.write_text('#!/bin/sh\nmkdir -p "$GOCACHE/00" && echo "$1" >> "$GOCACHE/00/commands"\n')
    go.chmod(0o755)
    return str(go.parent)


async def test_go_packages_are_built_once_and_then_used(tmp_path):
    toolchain = resolve(find_language("go"), pretended_go(tmp_path / "go"))
    packages = GoPackages(toolchain, cache=tmp_path / "cache")
    assert packages.env() == {}
    await packages.maintain()
    assert packages.env() == {"GOCACHE": "/opt/toolyard/go/packages"}
    again = GoPackages(toolchain, cache=tmp_path / "cache")
    assert again.env()
    await again.maintain()
    assert (again.directory / "packages/00/commands").read_text() == "list\nbuild\ntest\n"


async def test_go_that_comes_with_compiled_packages_needs_no_others(tmp_path):
    path = pretended_go(tmp_path / "go")
    (tmp_path / "go/pkg/linux_amd64").mkdir(parents=True)
    (tmp_path / "go/pkg/linux_amd64/fmt.a").touch()
    packages = GoPackages(resolve(find_language("go"), path), cache=tmp_path / "cache")
    assert not packages.needed
    assert packages.env() == {}
    await packages.maintain()
    assert list(packages.directory.iterdir()) == []
