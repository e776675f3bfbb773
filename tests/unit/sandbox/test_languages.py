"""The language table, and how it meets machines: real ones here, and pretended ones in temporary directories."""

import os
import re
import time
from pathlib import Path

import pytest

from patience import processor_time
from toolyard import settings
from toolyard.errors import ProgramError, ToolchainMissingError
from toolyard.sandbox import languages
from toolyard.sandbox.languages import find_language, probe_version, refuse_unknown, remedy, resolve
from toolyard.sandbox.languages.jvm import java_names, scala_main
from toolyard.sandbox.languages.toolchains import INSTALLED_BY, installation
from toolyard.sandbox.protocol import MIB, Program

REPOSITORY = Path(__file__).parents[3]

SANDBOX_FUSION = (
    *("python", "cpp", "nodejs", "go", "go_test", "java", "php", "csharp", "bash", "typescript", "sql", "rust", "cuda"),
    *("lua", "R", "perl", "D_ut", "ruby", "scala", "julia", "pytest", "junit", "kotlin_script", "jest", "verilog"),
    *("python_gpu", "lean", "swift", "racket"),
)

every_language = pytest.mark.parametrize("language", languages.ALL, ids=lambda row: row.name)


def executable(path: Path, script: str = "exit 1") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


# The table


def test_names_and_aliases_are_unique_in_any_case():
    names = [name.casefold() for row in languages.ALL for name in (row.name, *row.aliases)]
    assert len(names) == len(set(names))


@every_language
def test_row_is_complete(language):
    assert language.title
    assert language.self_test.endswith("\n")
    for way in language.ways:
        assert way.needs
        assert way.version
        assert (way.compile is None) == (way.artifacts == ())
        assert language.source_name in (way.compile or way.run)


def test_every_name_is_sandbox_fusions_but_for_c():
    assert {row.name for row in languages.ALL} == {*SANDBOX_FUSION, "c"}


def test_ci_installs_every_toolchain_and_library_that_can_be_had():
    script = (REPOSITORY / ".ci" / "toolchains").read_text()
    needs = [name for row in languages.ALL for name in row.ways[0].needs if name not in ("python3", "bash", "cc")]
    wanted = {INSTALLED_BY.get(name, name) for name in needs} | {
        name for row in languages.ALL for name in row.libraries
    }
    words = set(re.findall(r"[\w.+-]+", script))
    missing = {name for name in wanted if not name.startswith(("https:", "pip:")) and name.split(":")[-1] not in words}
    assert missing == set()


@pytest.mark.parametrize(
    ("alias", "name"),
    [("JavaScript", "nodejs"), ("C++", "cpp"), ("r", "R"), ("TS", "typescript"), ("Kotlin", "kotlin_script")],
)
def test_aliases_work_in_any_case(alias, name):
    assert find_language(alias).name == name


def test_a_huge_name_of_a_language_is_refused_at_once_and_not_repeated():
    """Looking for names that are near took 19 s for 30 MB, and no other request was answered meanwhile."""
    began = time.process_time()
    refused = refuse_unknown("python" * 1_000_000)
    assert time.process_time() - began < processor_time(0.5)
    assert refused is not None
    assert refused.startswith(f"unknown language '{('python' * 7)[:40]}…' (expected one of: python, ")


def test_unknown_language_is_told_what_there_is_and_what_may_be_meant():
    with pytest.raises(ProgramError, match=r"'javva'; did you mean 'java'") as caught:
        find_language("javva")
    assert all(row.name in str(caught.value) for row in languages.ALL)


@pytest.mark.parametrize(("name", "near"), [("Python", "'python'"), ("PYTEST", "'pytest'"), ("golangg", "'go'")])
def test_a_service_takes_names_and_aliases_as_they_are_written(name, near):
    refused = refuse_unknown(name)
    assert refused
    assert near in refused
    assert all(refuse_unknown(one) is None for row in languages.ALL for one in (row.name, *row.aliases))


# Meeting a machine


@pytest.mark.parametrize("language", [row for row in languages.ALL if row.name != "python"], ids=lambda row: row.name)
def test_missing_toolchain_is_named_with_its_package(language, tmp_path):
    with pytest.raises(ToolchainMissingError) as caught:
        resolve(language, str(tmp_path), modules=())
    for name in language.ways[0].needs:
        if name != "python3":
            assert repr(name.removeprefix("python:")) in str(caught.value)
            assert INSTALLED_BY.get(name, name).removeprefix("npm:").removeprefix("pip:") in str(caught.value)


def test_what_is_missing_is_installed_by_the_tool_that_has_it(tmp_path):
    assert remedy(find_language("jest"), str(tmp_path)) == "apt-get install esbuild nodejs; npm install -g jest"
    assert remedy(find_language("pytest"), str(tmp_path), modules=()) == "pip install pytest"
    assert remedy(find_language("lean"), str(tmp_path)) == "see https://lean-lang.org/install"


def test_only_what_is_absent_is_called_missing(tmp_path):
    executable(tmp_path / "mcs")
    with pytest.raises(ToolchainMissingError, match="C# needs 'mono', which") as caught:
        resolve(find_language("csharp"), str(tmp_path))
    assert "mono-mcs" not in str(caught.value)


def test_resolving_starts_no_process(tmp_path):
    trace = tmp_path / "ran"
    for name in ("gcc", "g++", "go", "rustc", "cc", "javac", "java", "node", "tsc", "esbuild", "perl", "ld.gold"):
        executable(tmp_path / "bin" / name, f"touch {trace}")
    for name in ("c", "cpp", "go", "rust", "java", "nodejs", "typescript", "perl"):
        resolve(find_language(name), str(tmp_path / "bin"))
    assert not trace.exists()


def test_fingerprint_changes_with_the_compiler_and_only_then(tmp_path):
    gcc = executable(tmp_path / "gcc")
    first = resolve(find_language("c"), str(tmp_path)).fingerprint
    assert resolve(find_language("c"), str(tmp_path)).fingerprint == first
    executable(gcc, "exit 22")
    assert resolve(find_language("c"), str(tmp_path)).fingerprint != first


def test_without_a_fast_linker_the_default_one_is_used(tmp_path):
    executable(tmp_path / "g++")
    argv = resolve(find_language("cpp"), str(tmp_path)).compile_argv
    assert argv
    assert all(argv)
    assert not any("-fuse-ld" in part for part in argv)


def test_what_the_jail_does_not_show_anyway_is_bound_by_its_prefix(tmp_path):
    node = executable(tmp_path / "node-22" / "bin" / "node")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "node").symlink_to(node)
    toolchain = resolve(find_language("nodejs"), str(tmp_path / "links"))
    assert toolchain.run_argv == (str(node), "main.js")
    assert toolchain.binds == (str(tmp_path / "node-22"),)


@pytest.mark.parametrize("place", ["bin", ".local/bin"])
def test_executable_in_the_home_directory_does_not_expose_the_rest_of_it(place, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    node = executable(tmp_path / place / "node")
    assert resolve(find_language("nodejs"), str(node.parent)).binds == (str(node),)


def test_npm_package_is_bound_with_the_packages_it_loads(tmp_path):
    modules = tmp_path / "lib" / "node_modules"
    target = executable(modules / "esbuild" / "bin" / "esbuild")
    executable(tmp_path / "bin" / "node")
    (tmp_path / "bin" / "esbuild").symlink_to(target)
    assert str(modules) in resolve(find_language("typescript"), str(tmp_path / "bin")).binds


def test_probing_a_broken_toolchain_gives_no_version(tmp_path):
    executable(tmp_path / "gcc", "exit 1")
    assert probe_version(resolve(find_language("c"), str(tmp_path))) is None


# Rust


def rustup(home: Path, *toolchains: str, default: str | None = None) -> str:
    shim = executable(home / ".cargo" / "bin" / "rustup")
    (shim.parent / "rustc").symlink_to("rustup")
    cc = executable(home / "gcc" / "bin" / "cc")
    for name in toolchains:
        executable(home / ".rustup" / "toolchains" / name / "bin" / "rustc")
    if default:
        (home / ".rustup" / "settings.toml").write_text(f'version = "12"\ndefault_toolchain = "{default}"\n')
    return f"{shim.parent}:{cc.parent}"


@pytest.mark.parametrize(
    ("default", "chosen"), [("1.80-x86", "1.80-x86"), ("nightly", "nightly-x86"), (None, "stable-x86")]
)
def test_rustups_shim_is_replaced_by_the_compiler_behind_it(default, chosen, tmp_path):
    path = rustup(tmp_path, "1.80-x86", "nightly-x86", "stable-x86", default=default)
    toolchain = resolve(find_language("rust"), path)
    root = tmp_path / ".rustup" / "toolchains" / chosen
    assert toolchain.compile_argv
    assert toolchain.compile_argv[0] == str(root / "bin" / "rustc")
    assert toolchain.binds == (str(root), str(tmp_path / "gcc"))


def test_rustup_without_a_toolchain_is_a_missing_toolchain(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ToolchainMissingError, match="'rustc'"):
        resolve(find_language("rust"), rustup(tmp_path))


# TypeScript


@pytest.mark.parametrize(("version", "works"), [((20, 19), False), ((22, 6), False), ((22, 7), True), ((24, 0), True)])
def test_typescript_runs_on_node_alone_from_22_7_on(version, works, tmp_path):
    executable(tmp_path / "bin" / "node")
    header = tmp_path / "include" / "node" / "node_version.h"
    header.parent.mkdir(parents=True)
    header.write_text(f"#define NODE_MAJOR_VERSION {version[0]}\n#define NODE_MINOR_VERSION {version[1]}\n")
    if works:
        assert resolve(find_language("typescript"), str(tmp_path / "bin")).compile_argv is None
    else:
        with pytest.raises(ToolchainMissingError, match=r"'esbuild'.*tsc \+ node would also work"):
            resolve(find_language("typescript"), str(tmp_path / "bin"))


# Java


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("public class Main { public static void main(String[] a) {} }", ("Main.java", "Main")),
        ("public final class Solver { static public void main(String... a) {} }", ("Solver.java", "Solver")),
        ("final public class Solver { public static void main(String[] a) {} }", ("Solver.java", "Solver")),
        ("class Helper {}\nclass App { public static void main(String[] a) {} }", ("App.java", "App")),
        ("public class Data {}\nclass App { public static void main(String[] a) {} }", ("Data.java", "App")),
        ("public interface Shape {} record Dot(int x) {}", ("Shape.java", "Shape")),
        ("package a.b;\npublic class C { public static void main(String[] s) {} }", ("C.java", "a.b.C")),
        ("// public class No {}\n/* public class No {} */ public class Yes {}", ("Yes.java", "Yes")),
        ('class A { String s = "} public class No {"; char c = \'"\'; }\npublic class Yes {}', ("Yes.java", "Yes")),
        ('class A { String s = """\n } public class No { " """; }\npublic class Yes {}', ("Yes.java", "Yes")),
        (
            "class Outer { public static class Inner {} public static void main(String[] a) {} }",
            ("Outer.java", "Outer"),
        ),
        ("record P(int x) {}\nvoid main() { }", ("Main.java", "Main")),
        ("not java at all", ("Main.java", "Main")),
        ("", ("Main.java", "Main")),
    ],
)
def test_java_file_is_named_after_its_public_class_and_started_at_main(code, expected):
    assert java_names(code) == expected


def test_java_program_gets_its_own_names_and_a_heap_below_its_memory_limit(tmp_path):
    executable(tmp_path / "javac")
    executable(tmp_path / "java")
    toolchain = resolve(find_language("java"), str(tmp_path))
    fitted = toolchain.fitted("public class Kettle { public static void main(String[] a) {} }", 512 * MIB)
    assert fitted.source_name == "Kettle.java"
    assert fitted.compile_argv
    assert fitted.compile_argv[-1] == "Kettle.java"
    assert fitted.run_argv[-1] == "Kettle"
    assert "-Xmx320m" in fitted.run_argv
    assert fitted.fingerprint == toolchain.fingerprint


def test_java_is_taken_from_the_jdk_that_compiles(tmp_path):
    executable(tmp_path / "old" / "java")
    jdk = executable(tmp_path / "jdk" / "bin" / "javac").parent
    executable(jdk / "java")
    toolchain = resolve(find_language("java"), f"{tmp_path / 'old'}:{jdk}")
    assert toolchain.run_argv[0] == str(jdk / "java")


def test_jars_and_node_packages_are_looked_for_beside_the_executables(tmp_path):
    for name in ("javac", "java", "node"):
        executable(tmp_path / "bin" / name)
    with pytest.raises(ToolchainMissingError, match=r"'junit-platform-console-standalone.jar'.*apt-get install junit5"):
        resolve(find_language("junit"), str(tmp_path / "bin"))
    jar = tmp_path / "share" / "java" / "junit-platform-console-standalone.jar"
    jar.parent.mkdir(parents=True)
    jar.touch()
    toolchain = resolve(find_language("junit"), str(tmp_path / "bin"))
    assert toolchain.compile_argv
    assert f".:{jar}" in toolchain.compile_argv
    assert "NODE_PATH" not in resolve(find_language("nodejs"), str(tmp_path / "bin")).env
    (tmp_path / "lib" / "node_modules").mkdir(parents=True)
    node = resolve(find_language("nodejs"), str(tmp_path / "bin"))
    assert node.env["NODE_PATH"] == str(tmp_path / "lib" / "node_modules")
    assert node.env["NODE_PATH"] in node.binds


# Other languages


@pytest.mark.parametrize(
    ("code", "started"),
    [
        ("object Main extends App { println(1) }", "Main"),
        ("object Solver extends Helper with App { }", "Solver"),
        ("object Helper { }\nobject Problem { def main(args: Array[String]): Unit = {} }", "Problem"),
        ("case class P(x: Int)\n// object No extends App\nobject Yes extends App", "Yes"),
        ("@main def hello(): Unit = println(1)", "hello"),
        ("println(1)", "Main"),
    ],
)
def test_scala_starts_the_object_that_can_be_started(code, started):
    assert scala_main(code) == started


def test_lean_is_run_where_there_is_something_to_run(tmp_path):
    lean = executable(tmp_path / "lean")
    toolchain = resolve(find_language("lean"), str(tmp_path))
    proof = toolchain.fitted("theorem two : 1 + 1 = 2 := rfl\n", 512 * MIB)
    program = toolchain.fitted("partial def main : IO Unit := main\n", 512 * MIB)
    assert proof.run_argv == (str(lean), "main.lean")
    assert program.run_argv == (str(lean), "--run", "main.lean")


def test_pytest_runs_the_code_as_a_file_of_tests_with_its_arguments():
    row = find_language("pytest")
    assert row.in_python
    ran = row.in_python(Program("def test(): pass", "pytest", files={"conftest.py": b""}, args=("-k", "x")))
    assert ran.files == {"test_main.py": b"def test(): pass", "conftest.py": b""}
    assert tuple(ran.args) == ("-p", "no:hypothesispytest", "-k", "x")
    assert row.in_python(Program("import hypothesis", "pytest")).args == ()


def test_pytest_is_missing_where_the_programs_python_does_not_have_it():
    with pytest.raises(
        ToolchainMissingError,
        match=r"pytest needs 'pytest', which the programs' Python does not offer.*pip install pytest",
    ):
        resolve(find_language("pytest"), settings.search_path(), modules=())


@every_language
def test_installed_toolchain_tells_its_version(language):
    try:
        toolchain = resolve(language, settings.search_path())
    except ToolchainMissingError as error:
        if os.environ.get("CI") == "true" and "https:" not in str(error):
            raise
        pytest.skip(str(error))
    assert probe_version(toolchain, seconds=30)


# The documentation


def documented(row: languages.Language) -> str:
    names = ", ".join([f"`{row.name}`", *row.aliases])
    preferred = row.ways[0]
    packages = [INSTALLED_BY.get(name, name) for name in preferred.needs if name not in ("python3", "bash")]
    needs = " + ".join(name.removeprefix("python:") for name in preferred.needs)
    stages = "compile, run" if preferred.compile else "run"
    libraries = installation(row.libraries) or "–"
    return f"| {names} | {row.source_name} | {needs} | {stages} | {installation(packages) or '–'} | {libraries} |"


def test_the_table_in_the_documentation_is_this_one():
    text = (REPOSITORY / "docs" / "guides" / "languages.md").read_text()
    expected = "\n".join(documented(row) for row in languages.ALL)
    assert expected in text, f"docs/guides/languages.md should have:\n{expected}"
