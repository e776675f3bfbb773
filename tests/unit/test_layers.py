"""Imports only point downwards, as docs/architecture.md says. Read from the source, so lazy imports count too."""

from __future__ import annotations

import ast
import functools
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest

from toolyard.errors import MissingDependencyError

REPOSITORY = Path(__file__).parents[2]
SOURCE = REPOSITORY / "src" / "toolyard"

LAYERS = (
    {"_lazy", "_version", "connections", "durations", "images"},
    {"errors", "failover", "hosts", "messages", "settings", "supervision", "tokens"},
    {"sandbox", "limits", "gguf", "whole_file"},
    {"execution", "engines"},
    {"rewards"},
    {"tools", "chat", "records", "tasks"},
    {"turns"},
    {"gateway"},
    {"rollout"},
    {"train", "viewer", "testing"},
    {"evaluation", "export"},
    {"cli"},
)
"""Lowest first. What stands in one line does not import each other."""
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}

MODULE_OF = {
    "pyyaml": "yaml",
    "opentelemetry-sdk": "opentelemetry",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry",
}
"""Where a distribution's module is not called as the distribution."""

SERVER = {"prometheus_client", "starlette", "uvicorn", "uvloop"}
MAY_IMPORT_OPTIONAL = {
    # The service is one thing made of five packages, the extra `server`; no one of them could name it.
    "sandbox/service/": SERVER,
    # The gateway is served as the sandbox is.
    "gateway/service.py": {"starlette"},
    # The streams that the MCP SDK takes are anyio's.
    "tools/mcp/connection.py": {"anyio"},
    # The embedded engine is one thing made of the extra `hf`.
    "engines/transformers/": {"safetensors", "torch"},
    # Training with TRL needs the extra `trl`, which includes `hf`.
    "train/trl/": {"accelerate", "peft", "torch", "transformers"},
    # Samples as tensors, if torch is installed.
    "train/padding.py": {"torch"},
    # The viewer in the terminal is made with Textual.
    "viewer/tui/": {"textual"},
    "limits/pool/workers.py": {"ray"},
    # It repairs the tokenizer that transformers makes from a GGUF file.
    "gguf.py": {"tokenizers", "transformers"},
    # Contract suites are pytest classes, so pytest is installed where they run.
    "testing/": {"pytest"},
}
"""Files that import an optional package without being named for it, and why they may."""


@dataclass(frozen=True)
class Import:
    file: Path
    line: int
    module: str
    """Absolute. For `from x import y` where y is a module of ours: `x.y`."""
    eager: bool
    """Happens when the file itself is imported."""

    @property
    def place(self) -> str:
        return f"{self.file.relative_to(SOURCE)}:{self.line} imports {self.module}"

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]

    @property
    def part(self) -> str | None:
        """Which part of toolyard it points to; "" is the package itself, None is another package."""
        head, _, rest = self.module.partition(".")
        return rest.partition(".")[0] if head == "toolyard" else None


def part_of(file: Path) -> str:
    first = file.relative_to(SOURCE).parts[0]
    return "" if first == "__init__.py" else first.removesuffix(".py")


def module_of(file: Path) -> str:
    return ".".join(["toolyard", *file.relative_to(SOURCE).with_suffix("").parts]).removesuffix(".__init__")


def is_ours(module: str) -> bool:
    path = SOURCE.joinpath(*module.split(".")[1:])
    return path.is_dir() or path.with_suffix(".py").is_file()


def imports_of(file: Path) -> Iterator[Import]:
    package = ["toolyard", *file.relative_to(SOURCE).parent.parts]

    def walk(node: ast.AST, eager: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(file, child.lineno, alias.name, eager)
            elif isinstance(child, ast.ImportFrom):
                base = package[: len(package) - child.level + 1] if child.level else []
                module = ".".join([*base, *([child.module] if child.module else [])])
                for alias in child.names:
                    inner = f"{module}.{alias.name}"
                    ours = inner.startswith("toolyard.") and is_ours(inner)
                    yield Import(file, child.lineno, inner if ours else module, eager)
            else:
                lazy = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) or (
                    isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
                )
                yield from walk(child, eager and not lazy)

    yield from walk(ast.parse(file.read_text()), True)


FILES = sorted(SOURCE.rglob("*.py"))


@functools.cache
def all_imports() -> list[Import]:
    """Read when the first test asks: every process of a run imports this file, and one of them runs it."""
    return [found for file in FILES for found in imports_of(file)]


def listed(broken: list[Import]) -> str:
    return "\n".join(found.place for found in broken)


def test_there_is_something_to_test() -> None:
    assert len(all_imports()) > 100


def test_every_part_has_its_layer() -> None:
    assert {part_of(file) for file in FILES} - {""} <= LEVEL.keys()


def test_imports_only_point_downwards() -> None:
    broken = [
        found
        for found in all_imports()
        if found.part
        and part_of(found.file)  # the package itself names everything, lazily: see test_import_weight
        and found.part != part_of(found.file)
        and LEVEL[found.part] >= LEVEL[part_of(found.file)]
    ]
    assert not broken, listed(broken)


def test_our_own_code_imports_from_modules_not_from_the_package_itself() -> None:
    """`from toolyard import LocalSandbox` is for users. Among ourselves it would make a circle."""
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "toolyard" and not node.level:
                assert all(is_ours(f"toolyard.{alias.name}") for alias in node.names), file


def test_no_modules_import_each_other() -> None:
    """Also not lazily, for types only, or through others."""
    graph: dict[str, set[str]] = {module_of(file): set() for file in FILES}
    for found in all_imports():
        target = found.module if found.module in graph else f"toolyard.sandbox.{found.module}"  # `guest`, by itself
        if target in graph and target != module_of(found.file):
            graph[module_of(found.file)].add(target)
    while leaves := {module for module, imported in graph.items() if not imported}:
        graph = {module: imported - leaves for module, imported in graph.items() if module not in leaves}
    # What is left is in a circle, or imports one: the former are those that something left imports.
    circular = {module: sorted(imported) for module, imported in sorted(graph.items())}
    assert not circular, circular


def test_what_shares_a_prefix_is_a_folder() -> None:
    for folder in {file.parent for file in FILES}:
        names = [file.stem for file in folder.glob("*.py") if not file.stem.startswith("_")]
        prefixes = Counter(name.split("_")[0] for name in names)
        crowded = {prefix: count for prefix, count in prefixes.items() if count > 2}
        assert not crowded, f"{folder.relative_to(SOURCE)}: {crowded}"


def test_a_folder_can_be_taken_in_at_a_glance() -> None:
    sizes = Counter(file.parent for file in FILES if file.name != "__init__.py")
    assert {str(folder.relative_to(SOURCE)): size for folder, size in sizes.items() if size > 20} == {}


def test_the_sandbox_stands_alone() -> None:
    broken = [
        found
        for found in all_imports()
        if part_of(found.file) == "sandbox"
        and found.part
        not in (None, "", "sandbox", "_lazy", "_version", "connections", "errors", "failover", "hosts", "settings")
    ]
    assert not broken, listed(broken)


def test_the_guest_needs_nothing_but_the_standard_library_and_itself() -> None:
    """It runs under whichever interpreter programs get, which need not have Toolyard or anything else."""
    guest = [
        found
        for found in all_imports()
        if "guest" in found.file.relative_to(SOURCE).parts or found.file.name == "guest_main.py"
    ]
    own = ("toolyard.sandbox.guest", "guest")
    broken = [
        found
        for found in guest
        if found.top not in sys.stdlib_module_names
        and found.module not in own
        and not found.module.startswith(tuple(f"{name}." for name in own))
    ]
    assert guest
    assert not broken, listed(broken)


# Optional packages ----------------------------------------------------------------------------------------------------

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


def modules_of(requirements: list[str]) -> set[str]:
    names = [re.split(r"[\[<>=!~; ]", requirement)[0].lower() for requirement in requirements]
    return {MODULE_OF.get(name, name).replace("-", "_") for name in names}


REQUIRED = modules_of(PROJECT["dependencies"]) | {"pydantic_core"}  # half of pydantic, which demands its exact version
OPTIONAL = {module for extra in PROJECT["optional-dependencies"].values() for module in modules_of(extra)} - REQUIRED


@functools.cache
def outside() -> list[Import]:
    return [
        found for found in all_imports() if found.part is None and found.top not in {*sys.stdlib_module_names, "guest"}
    ]


def excused(file: Path) -> set[str]:
    name = str(file.relative_to(SOURCE))
    return {module for place, modules in MAY_IMPORT_OPTIONAL.items() if name.startswith(place) for module in modules}


def named_for(file: Path) -> set[str]:
    """The folders of a file and the words in its name: packages that it may import because it is named for them."""
    *folders, _ = file.relative_to(SOURCE).parts
    return {*folders, file.stem, *(name for name in OPTIONAL if name in file.stem)}


def test_every_package_that_is_imported_is_declared() -> None:
    broken = [found for found in outside() if found.top not in REQUIRED | OPTIONAL]
    assert not broken, listed(broken)


def test_a_file_that_imports_an_optional_package_is_named_for_it() -> None:
    broken = [
        found
        for found in outside()
        if found.top in OPTIONAL and found.top not in named_for(found.file) and found.top not in excused(found.file)
    ]
    assert not broken, listed(broken)


def test_no_package_imports_such_a_file_eagerly() -> None:
    optional_files = {found.file for found in outside() if found.top in OPTIONAL}
    modules = {".".join(["toolyard", *file.relative_to(SOURCE).with_suffix("").parts]) for file in optional_files}
    broken = [
        found for found in all_imports() if found.eager and found.file.name == "__init__.py" and found.module in modules
    ]
    assert not broken, listed(broken)


@pytest.mark.parametrize("place", MAY_IMPORT_OPTIONAL)
def test_every_excuse_is_needed(place: str) -> None:
    imported = {found.top for found in outside() if str(found.file.relative_to(SOURCE)).startswith(place)}
    assert MAY_IMPORT_OPTIONAL[place] <= imported


# What packages export -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "file", [file for file in FILES if "exports(" in file.read_text() and file.name == "__init__.py"]
)
def test_a_package_exports_what_it_says_and_type_checkers_see_the_same(file: Path) -> None:
    package = import_module(module_of(file))
    tree = ast.parse(file.read_text())
    blocks = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {alias.name: node.module for block in blocks for node in block.body for alias in node.names}  # type: ignore
    call = next(
        node.value for node in ast.walk(tree) if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
    )
    homes = ast.literal_eval(call.args[1])
    named = {name: home for home, names in homes.items() for name in names.split()}
    assert named == seen
    assert dir(package) == sorted(package.__all__) == sorted(named)
    for name, home in named.items():
        try:
            module = import_module(home)
        except MissingDependencyError as error:
            if "verl" not in str(error):  # the only framework that cannot be installed beside the others
                raise
        else:
            assert getattr(package, name) is getattr(module, name)
