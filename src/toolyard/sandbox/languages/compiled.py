"""Languages that compile to executables."""

from __future__ import annotations

import os
import shutil
import tomllib
from pathlib import Path

from toolyard.sandbox.languages.toolchains import Found, Language, Way, beside_path, inside

CPP_FLAGS = ("-O2", "-std=c++17", "-pthread")
"""A precompiled header works only with the same flags: `headers` builds with exactly these."""

_GO = {
    # One thread per core would hit the process limit on a large machine.
    "GOMAXPROCS": "2",
    "GOPROXY": "off",
    "GOTOOLCHAIN": "local",
    "GOTELEMETRY": "off",
    # A program without a go.mod may import Debian's Go packages.
    "GO111MODULE": "auto",
    "GOPATH": "{packages}",
}
_TESTIFY = "golang-github-stretchr-testify-dev"


def _fast_linker(found: Found, search_path: str) -> Found:
    # Three times faster than ld.bfd on libstdc++. Not every distribution's binutils has it.
    path = shutil.which("ld.gold", path=search_path)
    return {**found, "linker": "-fuse-ld=gold" if path and inside(path) else ""}


def _debian_packages(found: Found, search_path: str) -> Found:
    return {**found, "packages": os.pathsep.join(beside_path(search_path, "share/gocode"))}


def _real_rustc(found: Found, search_path: str) -> Found | None:
    """Find the real rustc behind rustup's shim, which would need rustup's home and environment inside the jail."""
    shim = found["rustc"]
    real = os.path.realpath(shim)
    sibling = os.path.join(os.path.dirname(shim), "rustup")
    if os.path.basename(real) != "rustup" and not (os.path.exists(sibling) and os.path.samefile(real, sibling)):
        return found
    cargo_home = Path(shim).parent.parent
    for home in (cargo_home.with_name(".rustup"), cargo_home.with_name("rustup"), Path.home() / ".rustup"):
        toolchains = sorted(path.parent.parent.name for path in home.glob("toolchains/*/bin/rustc"))
        if toolchains:
            # If there is no default: "stable" sorts after "nightly" and dated versions.
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


ROWS: tuple[Language, ...] = (
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
        "cuda",
        "CUDA",
        "main.cu",
        aliases=("cu",),
        ways=(
            Way(
                needs=("nvcc", "g++"),
                compile="{nvcc} -O2 -std=c++17 -ccbin {g++} main.cu -o program",
                run="./program",
                artifacts=("program",),
                version="{nvcc} --version",
            ),
        ),
        gpu=True,
        self_test="#include <cstdio>\n\n__global__ void add(int *a, const int *b) { *a += *b; }\n\n"
        'int main() {\n    int a, b;\n    std::scanf("%d %d", &a, &b);\n    int devices = 0;\n'
        "    if (cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0) {\n        int *on_device;\n"
        "        cudaMalloc(&on_device, 2 * sizeof(int));\n"
        "        cudaMemcpy(on_device, &a, sizeof(int), cudaMemcpyHostToDevice);\n"
        "        cudaMemcpy(on_device + 1, &b, sizeof(int), cudaMemcpyHostToDevice);\n"
        "        add<<<1, 1>>>(on_device, on_device + 1);\n"
        "        cudaMemcpy(&a, on_device, sizeof(int), cudaMemcpyDeviceToHost);\n"
        '    } else {\n        a += b;\n    }\n    std::printf("%d\\n", a);\n}\n',
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
                env=_GO,
                version="{go} version",
                adapt=_debian_packages,
            ),
        ),
        libraries=(_TESTIFY,),
        self_test='package main\n\nimport "fmt"\n\n'
        "func main() {\n\tvar a, b int\n\tfmt.Scan(&a, &b)\n\tfmt.Println(a + b)\n}\n",
    ),
    Language(
        "go_test",
        "Go tests",
        "main_test.go",
        ways=(
            Way(
                needs=("go",),
                compile="{go} test -c '-ldflags=-s -w' -o program main_test.go",
                run="./program",
                artifacts=("program",),
                env=_GO,
                version="{go} version",
                adapt=_debian_packages,
            ),
        ),
        libraries=(_TESTIFY,),
        self_test='package main\n\nimport (\n\t"fmt"\n\t"testing"\n)\n\nfunc TestSum(t *testing.T) {\n'
        "\tvar a, b int\n\tfmt.Scan(&a, &b)\n\tfmt.Println(a + b)\n"
        '\tif a+b != 42 {\n\t\tt.Error("not 42")\n\t}\n}\n',
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
        "swift",
        "Swift",
        "main.swift",
        ways=(
            Way(
                needs=("swiftc",),
                compile="{swiftc} -O -o program main.swift",
                run="./program",
                artifacts=("program",),
                version="{swiftc} --version",
            ),
        ),
        self_test='print(readLine()!.split(separator: " ").map { Int($0)! }.reduce(0, +))\n',
    ),
    Language(
        "D_ut",
        "D unit tests",
        "main.d",
        aliases=("d", "dlang"),
        ways=(
            Way(
                needs=("ldc2", "cc"),
                compile="{ldc2} -unittest -main --gcc={cc} -of=program main.d",
                run="./program",
                artifacts=("program",),
                etc=("/etc/ldc2.conf",),
                version="{ldc2} --version",
            ),
            Way(
                needs=("gdc",),
                compile="{gdc} -funittest -fmain -o program main.d",
                run="./program",
                artifacts=("program",),
                version="{gdc} --version",
            ),
        ),
        self_test='import std.stdio;\n\nunittest {\n    int a, b;\n    readf("%d %d", a, b);\n'
        "    writeln(a + b);\n    assert(a + b == 42);\n}\n",
    ),
    Language(
        "verilog",
        "Verilog",
        "main.sv",
        aliases=("systemverilog", "sv"),
        ways=(
            Way(
                needs=("iverilog", "vvp"),
                # Modules that the source does not define are looked up in files of the same name.
                compile="{iverilog} -g2012 -y . -Y .sv -o program.vvp main.sv",
                run="{vvp} -n program.vvp",
                artifacts=("program.vvp",),
                version="{iverilog} -V",
            ),
        ),
        self_test="module main;\n  integer a, b, count;\n  initial begin\n"
        '    count = $fscanf(32\'h8000_0000, "%d %d", a, b);\n'
        '    $display("%0d", a + b);\n    $finish(0);\n  end\nendmodule\n',
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
                # Mono logs to stdout, if only that it may not change thread priorities.
                env={"MONO_LOG_DEST": "/dev/null"},
                etc=("/etc/mono",),
                version="{mono} --version",
            ),
        ),
        self_test="using System;\nusing System.Linq;\n\nclass Program {\n    static void Main() {\n"
        "        Console.WriteLine(Console.ReadLine().Split().Select(int.Parse).Sum());\n    }\n}\n",
    ),
)
