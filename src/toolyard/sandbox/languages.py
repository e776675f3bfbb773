"""Which languages programs may be written in: one table, and what is particular about some of its rows.

`find_language` turns a name into a row, `resolve` turns a row into the `Toolchain` installed here. A row says how to
compile and run; its *ways* are the toolchains that can do it, best first.

Commands are run in the program's working directory with the source file in it, HOME and TMPDIR private and writable,
LANG=C.UTF-8, and the standard directories on PATH.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import shutil
import tomllib
from pathlib import Path

from toolyard.errors import ProgramError

from .protocol import MIB
from .toolchains import Found, Language, Toolchain, Way, inside, probe_version, resolve

__all__ = ["ALL", "Language", "Toolchain", "find_language", "probe_version", "resolve", "source_name_for"]

SELF_TEST_STDIN = b"20 22\n"
SELF_TEST_STDOUT = b"42\n"
"""Every row's self test adds the two numbers it is given: it proves the compiler, the runtime, stdin and stdout."""

CPP_FLAGS = ("-O2", "-std=c++17", "-pthread")
"""What decides whether a precompiled header fits a program: `headers` builds with these and no others."""


def source_name_for(language: Language, code: str) -> str:
    """The file name the compiler wants the code under: Java names the file after the public class in it."""
    return java_names(code)[0] if language.name == "java" else language.source_name


# Java ----------------------------------------------------------------------------------------------------------------

_JAVA_NOISE = re.compile(
    r'"""(?:\\.|[^\\])*?"""|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|//[^\n]*|/\*.*?\*/', re.DOTALL
)
_JAVA_TYPE = re.compile(
    r"(?P<brace>[{}])"
    r"|(?P<modifiers>(?:\b(?:public|abstract|final|strictfp|sealed|non-sealed)\s+)*)"
    r"\b(?:class|interface|enum|record)\s+(?P<name>[A-Za-z_$][\w$]*)"
    r"|(?P<main>\bvoid\s+main\s*\()"
)
_JAVA_PACKAGE = re.compile(r"^\s*package\s+([\w.]+)\s*;", re.MULTILINE)


def java_names(code: str) -> tuple[str, str]:
    """The source file's name and the class to start: `("Solver.java", "Solver")` for a `public class Solver`.

    The started class is the first top-level one that declares `main`, whether public or not.
    """
    text = _JAVA_NOISE.sub(" ", code)
    depth = 0
    types: list[str] = []
    public = started = None
    for match in _JAVA_TYPE.finditer(text):
        if match["brace"]:
            depth += 1 if match["brace"] == "{" else -1
        elif match["main"]:
            if depth == 0:  # a compact source file, from Java 25 on: its class is named after the file
                return "Main.java", "Main"
            if depth == 1:
                started = started or types[-1]
        elif depth == 0:
            types.append(match["name"])
            if "public" in match["modifiers"]:
                public = public or match["name"]
    first = types[0] if types else "Main"
    package = _JAVA_PACKAGE.search(text)
    main_class = started or public or first
    return f"{public or main_class}.java", f"{package[1]}.{main_class}" if package else main_class


def _fit_java(toolchain: Toolchain, code: str, memory_bytes: int) -> Toolchain:
    source_name, main_class = java_names(code)
    assert toolchain.compile_argv
    # The JVM would size its heap by the machine, and be killed for garbage it saw no reason to collect.
    heap = f"-Xmx{max(16, memory_bytes * 3 // 4 // MIB - 64)}m"
    run = (*(heap if part.startswith("-Xmx") else part for part in toolchain.run_argv[:-1]), main_class)
    return dataclasses.replace(
        toolchain, source_name=source_name, compile_argv=(*toolchain.compile_argv[:-1], source_name), run_argv=run
    )


# Adapting to what is installed ---------------------------------------------------------------------------------------


def _fast_linker(found: Found, search_path: str) -> Found:
    # Three times faster than ld.bfd on libstdc++; part of binutils in some distributions, so only where it is.
    path = shutil.which("ld.gold", path=search_path)
    return {**found, "linker": "-fuse-ld=gold" if path and inside(path) else ""}


def _real_rustc(found: Found, search_path: str) -> Found | None:
    """Look behind rustup's shim, which would want rustup's whole home and its environment inside the jail."""
    shim = found["rustc"]
    real = os.path.realpath(shim)
    sibling = os.path.join(os.path.dirname(shim), "rustup")
    if os.path.basename(real) != "rustup" and not (os.path.exists(sibling) and os.path.samefile(real, sibling)):
        return found
    cargo_home = Path(shim).parent.parent
    for home in (cargo_home.with_name(".rustup"), cargo_home.with_name("rustup"), Path.home() / ".rustup"):
        toolchains = sorted(path.parent.parent.name for path in home.glob("toolchains/*/bin/rustc"))
        if toolchains:
            # Without a default: "stable" sorts behind "nightly" and dated versions.
            wanted = _rustup_default(home / "settings.toml") or "stable"
            chosen = next((name for name in toolchains if name.startswith(wanted)), toolchains[-1])
            return {**found, "rustc": str(home / "toolchains" / chosen / "bin" / "rustc")}
    return None


def _rustup_default(settings: Path) -> str | None:
    try:
        value = tomllib.loads(settings.read_text()).get("default_toolchain")
    except (OSError, ValueError):
        return None
    return value if isinstance(value, str) else None


def _node_strips_types(found: Found, search_path: str) -> Found | None:
    """Node.js runs TypeScript by itself from 22.7 on. Its headers tell the version without starting it."""
    header = Path(os.path.realpath(found["node"])).parent.parent / "include/node/node_version.h"
    try:
        numbers = dict(re.findall(r"#define NODE_(MAJOR|MINOR)_VERSION (\d+)", header.read_text()))
    except OSError:
        return None
    version = int(numbers.get("MAJOR", 0)), int(numbers.get("MINOR", 0))
    return found if version >= (22, 7) else None


# Types are removed, not checked, whichever way is used: a check needs @types/node, which hardly any machine has.
_TRANSPILE = """
const [ts, source, target] = [require(process.argv[1]), process.argv[2], process.argv[3]];
const { outputText, diagnostics } = ts.transpileModule(require("fs").readFileSync(source, "utf8"), {
  fileName: source, reportDiagnostics: true,
  compilerOptions: { module: ts.ModuleKind.CommonJS, target: ts.ScriptTarget.ES2021, esModuleInterop: true },
});
const host = { getCanonicalFileName: (name) => name, getCurrentDirectory: () => "", getNewLine: () => "\\n" };
if (diagnostics.length) { process.stderr.write(ts.formatDiagnostics(diagnostics, host)); process.exit(1); }
require("fs").writeFileSync(target, outputText);
"""


def _typescript_library(found: Found, search_path: str) -> Found | None:
    library = Path(os.path.realpath(found["tsc"])).parent.parent / "lib/typescript.js"
    return {**found, "typescript": str(library), "transpile": _TRANSPILE} if library.is_file() else None


_JVM = "-XX:+UseSerialGC -XX:-UsePerfData -XX:ActiveProcessorCount=2"
_JAVAC = " ".join(f"-J{flag}" for flag in _JVM.split())
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

ALL: tuple[Language, ...] = (
    # The row is a description for doctor and other readers: LocalSandbox forks Python programs from a warm interpreter.
    Language(
        "python",
        "Python",
        "main.py",
        aliases=("python3", "py"),
        ways=(Way(needs=("python3",), run="{python3} main.py", version="{python3} --version"),),
        self_test="a, b = map(int, input().split())\nprint(a + b)\n",
    ),
    Language(
        "bash",
        "Bash",
        "main.sh",
        aliases=("sh", "shell"),
        ways=(Way(needs=("bash",), run="{bash} main.sh", version="{bash} --version"),),
        self_test='read -r a b\necho "$((a + b))"\n',
    ),
    Language(
        "c",
        "C",
        "main.c",
        ways=(
            Way(
                needs=("gcc",),
                compile="{gcc} -O2 -std=gnu17 -pthread -pipe {linker} main.c -o program -lm",
                run="./program",
                artifacts=("program",),
                version="{gcc} --version",
                adapt=_fast_linker,
            ),
        ),
        self_test="#include <math.h>\n#include <stdio.h>\n"
        'int main(void) { double a, b; scanf("%lf %lf", &a, &b); printf("%.0f\\n", floor(a + b)); }\n',
    ),
    Language(
        "cpp",
        "C++",
        "main.cpp",
        aliases=("c++", "cxx"),
        ways=(
            Way(
                needs=("g++",),
                compile=f"{{g++}} {' '.join(CPP_FLAGS)} -pipe {{linker}} main.cpp -o program",
                run="./program",
                artifacts=("program",),
                version="{g++} --version",
                adapt=_fast_linker,
            ),
        ),
        self_test="#include <iostream>\nint main() { int a, b; std::cin >> a >> b; std::cout << a + b << '\\n'; }\n",
    ),
    Language(
        "nodejs",
        "Node.js",
        "main.js",
        aliases=("javascript", "js", "node"),
        ways=(Way(needs=("node",), run="{node} main.js", version="{node} --version"),),
        self_test='const [a, b] = require("fs").readFileSync(0, "utf8").split(" ").map(Number);\nconsole.log(a + b);\n',
        sparse=True,
    ),
    Language(
        "typescript",
        "TypeScript",
        "main.ts",
        aliases=("ts",),
        ways=(
            Way(
                needs=("esbuild", "node"),
                compile="{esbuild} main.ts --format=cjs --platform=node --outfile=main.js --log-level=warning",
                run="{node} main.js",
                artifacts=("main.js",),
                version="{esbuild} --version",
            ),
            Way(
                needs=("node",),
                run="{node} --no-warnings --experimental-transform-types main.ts",
                version="{node} --version",
                adapt=_node_strips_types,
            ),
            Way(
                needs=("tsc", "node"),
                compile="{node} -e {transpile} {typescript} main.ts main.js",
                run="{node} main.js",
                artifacts=("main.js",),
                version="{tsc} --version",
                adapt=_typescript_library,
            ),
            # TypeScript 7 is a native program and has no such library.
            Way(
                needs=("tsc", "node"),
                compile="{tsc} --noCheck --module commonjs --target es2022 main.ts",
                run="{node} main.js",
                artifacts=("main.js",),
                version="{tsc} --version",
            ),
        ),
        self_test='import * as fs from "fs";\nenum Base { Ten = 10 }\n'
        'const words: string[] = fs.readFileSync(0, "utf8").trim().split(" ");\n'
        "console.log(words.map((word) => parseInt(word, Base.Ten)).reduce((a, b) => a + b));\n",
        sparse=True,
    ),
    Language(
        "go",
        "Go",
        "main.go",
        aliases=("golang",),
        ways=(
            Way(
                needs=("go",),
                compile="{go} build '-ldflags=-s -w' -o program main.go",
                run="./program",
                artifacts=("program",),
                # A thread for each core would meet the process limit on a large machine.
                env={"GOMAXPROCS": "2", "GOPROXY": "off", "GOTOOLCHAIN": "local", "GOTELEMETRY": "off"},
                version="{go} version",
            ),
        ),
        self_test='package main\n\nimport "fmt"\n\n'
        "func main() {\n\tvar a, b int\n\tfmt.Scan(&a, &b)\n\tfmt.Println(a + b)\n}\n",
        sparse=True,
    ),
    Language(
        "java",
        "Java",
        "Main.java",
        ways=(
            Way(
                needs=("javac", "java"),
                compile=f"{{javac}} {_JAVAC} -J-XX:TieredStopAtLevel=1 -J-Xmx512m -proc:none -encoding UTF-8"
                " -d classes Main.java",
                run=f"{{java}} {_JVM} -Xmx704m -cp classes:. Main",
                artifacts=("classes",),
                etc=("/etc/java-*",),
                version="{javac} -version",
            ),
        ),
        self_test="import java.util.Scanner;\n\npublic class SelfTest {\n"
        "    public static void main(String[] args) {\n        Scanner in = new Scanner(System.in);\n"
        "        System.out.println(in.nextInt() + in.nextInt());\n    }\n}\n",
        sparse=True,
        fit=_fit_java,
    ),
    Language(
        "rust",
        "Rust",
        "main.rs",
        aliases=("rs",),
        ways=(
            Way(
                needs=("rustc", "cc"),
                compile="{rustc} -O --edition 2021 -C linker={cc} -o program main.rs",
                run="./program",
                artifacts=("program",),
                version="{rustc} --version",
                adapt=_real_rustc,
            ),
        ),
        self_test="use std::io::Read;\n\nfn main() {\n    let mut text = String::new();\n"
        "    std::io::stdin().read_to_string(&mut text).unwrap();\n"
        '    println!("{}", text.split_whitespace().map(|word| word.parse::<i64>().unwrap()).sum::<i64>());\n}\n',
    ),
    Language(
        "php",
        "PHP",
        "main.php",
        ways=(Way(needs=("php",), run="{php} main.php", etc=("/etc/php",), version="{php} --version"),),
        self_test='<?php fscanf(STDIN, "%d %d", $a, $b); echo $a + $b, "\\n";\n',
    ),
    Language(
        "perl",
        "Perl",
        "main.pl",
        aliases=("pl",),
        ways=(Way(needs=("perl",), run="{perl} main.pl", etc=("/etc/perl",), version="{perl} -e 'print $^V'"),),
        self_test='use strict;\nuse warnings;\nmy ($x, $y) = split " ", <STDIN>;\nprint $x + $y, "\\n";\n',
    ),
    Language(
        "ruby",
        "Ruby",
        "main.rb",
        aliases=("rb",),
        ways=(Way(needs=("ruby",), run="{ruby} main.rb", version="{ruby} --version"),),
        self_test="puts gets.split.sum(&:to_i)\n",
    ),
    Language(
        "R",
        "R",
        "main.R",
        ways=(
            Way(
                needs=("Rscript",),
                run="{Rscript} --vanilla main.R",
                env=_ONE_THREAD,
                etc=("/etc/R",),
                version="{Rscript} --version",
            ),
        ),
        self_test='cat(sum(scan("stdin", quiet = TRUE)), "\\n", sep = "")\n',
    ),
    Language(
        "lua",
        "Lua",
        "main.lua",
        ways=tuple(
            Way(needs=(name,), run=f"{{{name}}} main.lua", version=f"{{{name}}} -v")
            for name in ("lua5.4", "lua", "lua5.3", "luajit")
        ),
        self_test='local a, b = io.read():match("(%d+) (%d+)")\nprint(string.format("%d", a + b))\n',
    ),
    Language(
        "julia",
        "Julia",
        "main.jl",
        aliases=("jl",),
        ways=(
            Way(
                needs=("julia",),
                run="{julia} --startup-file=no --history-file=no main.jl",
                env=_ONE_THREAD,
                version="{julia} --version",
            ),
        ),
        self_test="println(sum(parse.(Int, split(readline()))))\n",
        sparse=True,
    ),
    Language(
        "csharp",
        "C#",
        "main.cs",
        aliases=("c#", "cs"),
        ways=(
            Way(
                needs=("mcs", "mono"),
                compile="{mcs} -optimize+ -out:program.exe main.cs",
                run="{mono} program.exe",
                artifacts=("program.exe",),
                # Mono logs to stdout, at the least that it may not change its threads' priority.
                env={"MONO_LOG_DEST": "/dev/null"},
                etc=("/etc/mono",),
                version="{mono} --version",
            ),
        ),
        self_test="using System;\nusing System.Linq;\n\nclass Program {\n    static void Main() {\n"
        "        Console.WriteLine(Console.ReadLine().Split().Select(int.Parse).Sum());\n    }\n}\n",
        sparse=True,
    ),
)

NOT_OFFERED = frozenset(
    {"go_test", "cuda", "sql", "kotlin_script", "D_ut", "pytest", "junit", "jest", "scala", "verilog", "python_gpu"}
    | {"lean", "swift", "racket"}
)
"""SandboxFusion's other languages, so that asking for one gets a true answer."""

_BY_NAME = {name.casefold(): language for language in ALL for name in (language.name, *language.aliases)}


def own_name(name: str) -> str | None:
    """The table's own word for a language, also of an alias. None: it is not in the table; a service may know it."""
    language = _BY_NAME.get(name.casefold())
    return None if language is None else language.name


def find_language(name: str) -> Language:
    """The row for a language's name or alias, in any case.

    Raises:
        ProgramError: there is none; the message says what there is.
    """
    language = _BY_NAME.get(name.casefold())
    if language is not None:
        return language
    offered = ", ".join(row.name for row in ALL)
    if name in NOT_OFFERED:
        raise ProgramError(f"language {name!r} is SandboxFusion's, but not offered by Toolyard; there is: {offered}")
    close = dict.fromkeys(_BY_NAME[match].name for match in difflib.get_close_matches(name.casefold(), _BY_NAME))
    hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
    raise ProgramError(f"unknown language {name!r}{hint} (there is: {offered})")
