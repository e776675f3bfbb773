"""Node.js, TypeScript and jest, with npm's globally installed packages."""

from __future__ import annotations

import os
import re
from pathlib import Path

from toolyard.sandbox.languages.toolchains import Found, Language, Way, beside_path

_ENV = {"NODE_PATH": "{packages}"}


def _packages(found: Found, search_path: str) -> Found:
    """Add `{packages}`: npm's global directories."""
    return {**found, "packages": os.pathsep.join(beside_path(search_path, "lib/node_modules"))}


def _node_strips_types(found: Found, search_path: str) -> Found | None:
    """Node.js runs TypeScript itself since 22.7. Its headers show the version without starting it."""
    header = Path(os.path.realpath(found["node"])).parent.parent / "include/node/node_version.h"
    try:
        numbers = dict(re.findall(r"#define NODE_(MAJOR|MINOR)_VERSION (\d+)", header.read_text()))
    except OSError:
        return None
    version = int(numbers.get("MAJOR", 0)), int(numbers.get("MINOR", 0))
    return _packages(found, search_path) if version >= (22, 7) else None


# Types are removed, not checked, in all of these ways: checking needs @types/node, which few machines have.
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
    if not library.is_file():
        return None
    return _packages({**found, "typescript": str(library), "transpile": _TRANSPILE}, search_path)


def _tsx_loader(found: Found, search_path: str) -> Found | None:
    """The loader beside the tsx command; the command itself would start another Node.js and connect over a socket."""
    loader = Path(os.path.realpath(found["tsx"])).with_name("loader.mjs")
    return _packages({**found, "loader": str(loader)}, search_path) if loader.is_file() else None


ROWS: tuple[Language, ...] = (
    Language(
        "nodejs",
        "Node.js",
        "main.js",
        aliases=("javascript", "js", "node"),
        ways=(Way(needs=("node",), run="{node} main.js", env=_ENV, version="{node} --version", adapt=_packages),),
        libraries=("npm:lodash",),
        self_test='const [a, b] = require("fs").readFileSync(0, "utf8").split(" ").map(Number);\nconsole.log(a + b);\n',
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
                env=_ENV,
                version="{esbuild} --version",
                adapt=_packages,
            ),
            Way(
                needs=("node",),
                run="{node} --no-warnings --experimental-transform-types main.ts",
                env=_ENV,
                version="{node} --version",
                adapt=_node_strips_types,
            ),
            Way(
                needs=("tsx", "node"),
                run="{node} --import {loader} main.ts",
                env=_ENV,
                version="{tsx} --version",
                adapt=_tsx_loader,
            ),
            Way(
                needs=("tsc", "node"),
                compile="{node} -e {transpile} {typescript} main.ts main.js",
                run="{node} main.js",
                artifacts=("main.js",),
                env=_ENV,
                version="{tsc} --version",
                adapt=_typescript_library,
            ),
            # TypeScript 7 is a native program and has no such library.
            Way(
                needs=("tsc", "node"),
                compile="{tsc} --noCheck --module commonjs --target es2022 main.ts",
                run="{node} main.js",
                artifacts=("main.js",),
                env=_ENV,
                version="{tsc} --version",
                adapt=_packages,
            ),
        ),
        libraries=("npm:lodash",),
        self_test='import * as fs from "fs";\nenum Base { Ten = 10 }\n'
        'const words: string[] = fs.readFileSync(0, "utf8").trim().split(" ");\n'
        "console.log(words.map((word) => parseInt(word, Base.Ten)).reduce((a, b) => a + b));\n",
    ),
    Language(
        "jest",
        "jest",
        "main.test.ts",
        ways=(
            Way(
                needs=("jest", "esbuild", "node"),
                # As CommonJS, where jest itself hoists `jest.mock` above the imports.
                compile="{esbuild} main.test.ts --format=cjs --platform=node --outfile=main.test.js"
                " --log-level=warning",
                run="{node} {jest} --config={} --rootDir=. --runInBand --cache=false --testMatch=**/main.test.js",
                artifacts=("main.test.js",),
                env=_ENV,
                version="{node} {jest} --version",
                adapt=_packages,
            ),
        ),
        libraries=("npm:lodash",),
        self_test='import * as fs from "fs";\n\ntest("sum", () => {\n'
        '  const words: string[] = fs.readFileSync(0, "utf8").trim().split(" ");\n'
        "  const sum = words.map(Number).reduce((a, b) => a + b);\n"
        "  process.stdout.write(`${sum}\\n`);\n  expect(sum).toBe(42);\n});\n",
    ),
)
