"""Languages of the Java virtual machine. Assertions are enabled in all of them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

from toolyard.sandbox.languages.toolchains import Found, Language, Toolchain, Way, find_jar, inside
from toolyard.sandbox.protocol import MIB

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
    """The source file's name and the class to run: `("Solver.java", "Solver")` for a `public class Solver`.

    The class to run is the first top-level one that declares `main`, whether public or not.
    """
    text = _JAVA_NOISE.sub(" ", code)
    depth = 0
    types: list[str] = []
    public = started = None
    for match in _JAVA_TYPE.finditer(text):
        if match["brace"]:
            depth += 1 if match["brace"] == "{" else -1
        elif match["main"]:
            if depth == 0:  # a compact source file (Java 25): its class is named after the file
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


_SCALA_STARTED = re.compile(
    r"\bobject\s+(?P<object>\w+)|(?P<app>\bextends\s+(?:\w+\s+with\s+)*App\b)|(?P<main>\bdef\s+main\s*\()"
    r"|@main\s+def\s+(?P<function>\w+)"
)


def scala_main(code: str) -> str:
    """The object to run: the first that extends App or declares `main`, or a function marked `@main`."""
    current = "Main"
    for match in _SCALA_STARTED.finditer(_JAVA_NOISE.sub(" ", code)):
        if match["function"]:
            return match["function"]
        if not match["object"]:
            return current
        current = match["object"]
    return current


def _heap(memory_bytes: int) -> str:
    # The JVM would size its heap by the machine, and be killed for garbage it had no reason to collect.
    return f"-Xmx{max(16, memory_bytes * 3 // 4 // MIB - 64)}m"


def _with_heap(argv: tuple[str, ...], memory_bytes: int) -> tuple[str, ...]:
    return tuple(_heap(memory_bytes) if part.startswith("-Xmx") else part for part in argv)


def _fit_java(toolchain: Toolchain, code: str, memory_bytes: int) -> Toolchain:
    source_name, main_class = java_names(code)
    assert toolchain.compile_argv
    return dataclasses.replace(
        toolchain,
        source_name=source_name,
        compile_argv=(*toolchain.compile_argv[:-1], source_name),
        run_argv=(*_with_heap(toolchain.run_argv[:-1], memory_bytes), main_class),
    )


def _fit_junit(toolchain: Toolchain, code: str, memory_bytes: int) -> Toolchain:
    fitted = _fit_java(toolchain, code, memory_bytes)
    return dataclasses.replace(fitted, run_argv=_with_heap(toolchain.run_argv, memory_bytes))


def _fit_scala(toolchain: Toolchain, code: str, memory_bytes: int) -> Toolchain:
    run_argv = (*_with_heap(toolchain.run_argv[:-1], memory_bytes), scala_main(code))
    return dataclasses.replace(toolchain, run_argv=run_argv)


def _fit_kotlin(toolchain: Toolchain, code: str, memory_bytes: int) -> Toolchain:
    options = " ".join(_with_heap(tuple(toolchain.env["JAVA_OPTS"].split()), memory_bytes))
    return dataclasses.replace(toolchain, env={**toolchain.env, "JAVA_OPTS": options})


def _jars(*names: str) -> Callable[[Found, str], Found]:
    def adapt(found: Found, search_path: str) -> Found:
        """Add `{libraries}`: those of the jars that are installed, each after a colon."""
        jars = (find_jar(name, search_path) for name in names)
        return {**found, "libraries": "".join(f":{jar}" for jar in jars if jar and inside(jar))}

    return adapt


_JVM = "-XX:+UseSerialGC -XX:-UsePerfData -XX:ActiveProcessorCount=2"
_COMPILER = f"{_JVM} -XX:TieredStopAtLevel=1 -Xmx512m"
"""A compiler run is mostly over before code from the second-tier compiler pays off."""
_JAVAC = " ".join(f"-J{flag}" for flag in _COMPILER.split())
_JAVA_LIBRARIES = ("javatuples.jar",)
_CONSOLE = "junit-platform-console-standalone.jar"

ROWS: tuple[Language, ...] = (
    Language(
        "java",
        "Java",
        "Main.java",
        ways=(
            Way(
                needs=("javac", "java"),
                compile=f"{{javac}} {_JAVAC} -proc:none -encoding UTF-8 -cp .{{libraries}} -d classes Main.java",
                run=f"{{java}} {_JVM} -ea -Xmx704m -cp classes:.{{libraries}} Main",
                artifacts=("classes",),
                etc=("/etc/java-*",),
                version="{javac} -version",
                adapt=_jars(*_JAVA_LIBRARIES),
            ),
        ),
        libraries=("libjavatuples-java",),
        self_test="import java.util.Scanner;\n\npublic class SelfTest {\n"
        "    public static void main(String[] args) {\n        Scanner in = new Scanner(System.in);\n"
        "        System.out.println(in.nextInt() + in.nextInt());\n    }\n}\n",
        fit=_fit_java,
    ),
    Language(
        "junit",
        "JUnit",
        "MainTest.java",
        ways=(
            Way(
                needs=("javac", "java", _CONSOLE),
                compile=f"{{javac}} {_JAVAC} -proc:none -encoding UTF-8"
                f" -cp .:{{{_CONSOLE}}}{{libraries}} -d classes MainTest.java",
                run=f"{{java}} {_JVM} -ea -Xmx704m -cp classes:.:{{{_CONSOLE}}}{{libraries}}"
                " org.junit.platform.console.ConsoleLauncher"
                " --disable-banner --disable-ansi-colors --scan-classpath classes",
                artifacts=("classes",),
                etc=("/etc/java-*",),
                version="{javac} -version",
                adapt=_jars("junit4.jar", "hamcrest.jar", *_JAVA_LIBRARIES),
            ),
        ),
        libraries=("junit4", "libjavatuples-java"),
        self_test="import static org.junit.jupiter.api.Assertions.assertEquals;\n\nimport java.util.Scanner;\n"
        "import org.junit.jupiter.api.Test;\n\nclass SumTest {\n    @Test\n    void sum() {\n"
        "        Scanner in = new Scanner(System.in);\n        int sum = in.nextInt() + in.nextInt();\n"
        "        System.out.println(sum);\n        assertEquals(42, sum);\n    }\n}\n",
        fit=_fit_junit,
    ),
    Language(
        "scala",
        "Scala",
        "main.scala",
        ways=(
            Way(
                needs=("scalac", "java", "scala-library.jar"),
                compile="{scalac} -d program.jar main.scala",
                run=f"{{java}} {_JVM} -ea -Xmx704m -cp program.jar:.:{{scala-library.jar}} Main",
                artifacts=("program.jar",),
                env={"JAVA_OPTS": _COMPILER, "JAVACMD": "{java}"},
                etc=("/etc/java-*",),
                version="{scalac} -version",
            ),
        ),
        self_test='object Main extends App {\n  println(scala.io.StdIn.readLine().split(" ").map(_.toInt).sum)\n}\n',
        fit=_fit_scala,
    ),
    Language(
        "kotlin_script",
        "Kotlin scripts",
        "main.kts",
        aliases=("kotlin", "kts", "kt"),
        ways=(
            Way(
                needs=("kotlinc", "java"),
                run="{kotlinc} -script main.kts",
                # The script runs in the compiler's own JVM, which warns that these options are outdated.
                env={"JAVA_OPTS": f"-XX:-PrintWarnings -ea {_COMPILER}", "JAVACMD": "{java}"},
                etc=("/etc/java-*",),
                version="{kotlinc} -version",
            ),
        ),
        self_test='println(readLine()!!.split(" ").map { it.toInt() }.sum())\n',
        fit=_fit_kotlin,
    ),
)
