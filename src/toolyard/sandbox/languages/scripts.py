"""Languages that run from source."""

from __future__ import annotations

import dataclasses
import re

from toolyard.sandbox.languages.toolchains import Language, Toolchain, Way

_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

_LEAN_MAIN = re.compile(r"^[ \t]*(?:(?:partial|unsafe|noncomputable)[ \t]+)*def[ \t]+main\b", re.MULTILINE)


def _fit_lean(toolchain: Toolchain, code: str, memory_bytes: int) -> Toolchain:
    """A program with `main` is checked and then run; anything else is only checked."""
    if not _LEAN_MAIN.search(code):
        return toolchain
    lean, source = toolchain.run_argv
    return dataclasses.replace(toolchain, run_argv=(lean, "--run", source))


ROWS: tuple[Language, ...] = (
    Language(
        "bash",
        "Bash",
        "main.sh",
        aliases=("sh", "shell"),
        ways=(Way(needs=("bash",), run="{bash} main.sh", version="{bash} --version"),),
        self_test='read -r a b\necho "$((a + b))"\n',
    ),
    Language(
        "php",
        "PHP",
        "main.php",
        ways=(
            Way(
                needs=("php",), run="{php} -d zend.assertions=1 main.php", etc=("/etc/php",), version="{php} --version"
            ),
        ),
        self_test='<?php fscanf(STDIN, "%d %d", $a, $b); echo $a + $b, "\\n";\n',
    ),
    Language(
        "perl",
        "Perl",
        "main.pl",
        aliases=("pl",),
        ways=(Way(needs=("perl",), run="{perl} main.pl", etc=("/etc/perl",), version="{perl} -e 'print $^V'"),),
        libraries=("libtest-deep-perl",),
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
        libraries=("lua-unit",),
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
    ),
    Language(
        "racket",
        "Racket",
        "main.rkt",
        aliases=("rkt",),
        ways=(
            Way(
                needs=("racket",),
                # rackunit's checks only print failures. Its log turns them into the exit code.
                run='{racket} -l racket/base -t main.rkt -e "(with-handlers ([void void])'
                " ((dynamic-require 'rackunit/log 'test-log) #:display? #f #:exit? #t))\" --",
                etc=("/etc/racket",),
                version="{racket} --version",
            ),
        ),
        self_test="#lang racket\n(displayln (+ (read) (read)))\n",
    ),
    Language(
        "sql",
        "SQL",
        "main.sql",
        aliases=("sqlite",),
        ways=(
            Way(
                needs=("sqlite3",),
                run="{sqlite3} -bail -batch :memory: '.read main.sql'",
                version="{sqlite3} --version",
            ),
        ),
        self_test="CREATE TABLE input (line TEXT);\n.import /dev/stdin input\n"
        "SELECT substr(line, 1, instr(line, ' ')) + substr(line, instr(line, ' ')) FROM input;\n",
    ),
    Language(
        "lean",
        "Lean",
        "main.lean",
        aliases=("lean4",),
        ways=(Way(needs=("lean",), run="{lean} main.lean", version="{lean} --version"),),
        self_test="def main : IO Unit := do\n  let line ← (← IO.getStdin).getLine\n"
        '  let numbers := (line.trim.splitOn " ").map String.toNat!\n  IO.println (numbers.foldl (· + ·) 0)\n',
        fit=_fit_lean,
    ),
)
