"""What README and docs show works: Python runs, files load, commands parse, links lead somewhere.

A fenced block with a title is a file, which later blocks of its page may use. A block that cannot run here has
`<!-- not run: why -->` before it, and is listed in `NOT_RUN`.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import gzip
import importlib
import inspect
import io
import itertools
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from toolyard.cli.app import command
from toolyard.limits.pool.local import ExecutionPool
from toolyard.rollout.config import load_config
from toolyard.rollout.faults.profile import load_profile
from toolyard.tools.registry import initialize_tools_from_config

CHECKOUT = Path(__file__).parents[2]
DOCS = CHECKOUT / "docs"
PAGES = [CHECKOUT / "README.md", *sorted(DOCS.rglob("*.md"))]
EXAMPLES = sorted((CHECKOUT / "examples").rglob("*.md"))
LANGUAGES = {"python", "yaml", "json", "console", "text"}
NOT_RUN = {
    "docs/guides/cluster.md": ["needs a Ray cluster"],
    "docs/guides/limits.md": ["needs a Ray cluster"],
    "docs/guides/mcp.md": ["loading it starts the servers"],
    "docs/guides/migrating-from-verl.md": ["needs a Ray cluster"],
    "docs/guides/rollouts.md": ["needs a server"],
    "docs/guides/training-trl.md": ["trains a 3B model", "trains a 3B model"],
}
"""By page: why each of its blocks that are not run is not."""
COMMAND: Any = command()
RECORDED = CHECKOUT / "tests" / "data" / "embedded.jsonl.gz"


@dataclass(frozen=True)
class Block:
    line: int
    language: str
    title: str | None
    text: str
    not_run: str | None


def blocks(page: Path) -> Iterator[Block]:
    lines = iter(enumerate(page.read_text().splitlines(), 1))
    before = ""
    for number, line in lines:
        opening = re.fullmatch(r"(`{3,})(\w*)(?: title=\"([^\"]+)\")?", line)
        if opening is None:
            before = line or before
            continue
        fence, language, title = opening.groups()
        text: list[str] = []
        for _, inner in lines:
            if inner == fence:
                break
            text.append(inner)
        reason = re.fullmatch(r"<!-- not run: (.+) -->", before)
        yield Block(number, language, title, "\n".join(text) + "\n", reason and reason[1])
        before = ""


def name(page: Path) -> str:
    return page.relative_to(CHECKOUT).as_posix()


def having(*languages: str) -> list[Path]:
    return [page for page in PAGES if any(block.language in languages for block in blocks(page))]


# Python, and the files it uses


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a page's blocks run: `runs/a` is a recorded dump, and modules that a page defines are forgotten."""
    known = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "runs/a").mkdir(parents=True)
    (tmp_path / "runs/a/0.jsonl").write_bytes(gzip.decompress(RECORDED.read_bytes()))
    yield tmp_path
    for module in set(sys.modules) - known:
        if str(tmp_path) in (getattr(sys.modules[module], "__file__", None) or ""):
            del sys.modules[module]


@pytest.mark.timeout(300)  # one of them samples with the embedded model
@pytest.mark.parametrize("page", having("python", "yaml", "json"), ids=name)
def test_the_blocks_of_a_page_run_in_order(page: Path, folder: Path) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    with asyncio.Runner() as runner:
        for block in blocks(page):
            where = f"{name(page)}:{block.line}"
            if block.not_run is not None:
                continue
            if block.title is not None:
                (folder / block.title).write_text(block.text)
                importlib.invalidate_caches()
                load(folder / block.title, runner)
            elif block.language == "python":
                run(block.text, where, names, runner)
            else:
                assert block.language in ("console", "text"), f"{where}: without a title nobody loads it"
    for value in names.values():
        if isinstance(value, ExecutionPool):  # otherwise it lives as long as the process
            value.close()


def run(text: str, where: str, names: dict[str, Any], runner: asyncio.Runner) -> None:
    """Run it, with `await` at the top level. What a comment behind a `print` says is printed."""
    code = compile(text, where, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        if code.co_flags & inspect.CO_COROUTINE:
            runner.run(eval(code, names))
        else:
            eval(code, names)
    left = printed.getvalue()
    for expected in re.findall(r"^ *print\(.*\)  # (.+)$", text, re.MULTILINE):
        _, found, left = left.partition(expected)
        assert found, f"{where}: {expected!r} is not printed (next): {printed.getvalue()!r}"


def load(file: Path, runner: asyncio.Runner) -> None:
    LOADERS[file.name if file.suffix in (".yaml", ".json") else file.suffix](file, runner)


def _tools(file: Path, runner: asyncio.Runner) -> None:
    async def load_and_close() -> None:
        for tool in initialize_tools_from_config(file):
            await tool.close()

    runner.run(load_and_close())


def _train(file: Path, runner: asyncio.Runner) -> None:
    from toolyard.train.config import load_train_config

    load_train_config(file)


def _agent_loop(file: Path, runner: asyncio.Runner) -> None:
    from toolyard.train.verl.settings import VerlSettings

    for entry in yaml.safe_load(file.read_text()):
        assert entry["_target_"] == "toolyard.train.verl.ToolyardAgentLoop"
        assert set(entry) - {"name", "_target_"} <= set(VerlSettings.model_fields)


def _mcp(file: Path, runner: asyncio.Runner) -> None:
    from toolyard.tools.mcp.config import read_servers

    assert read_servers(file)


LOADERS: dict[str, Callable[[Path, asyncio.Runner], object]] = {
    "tools.yaml": _tools,
    "faults.yaml": lambda file, runner: load_profile(str(file)),
    "rollout.yaml": lambda file, runner: load_config(file),
    "train.yaml": _train,
    "agent_loop.yaml": _agent_loop,
    "mcp.json": _mcp,
    ".py": lambda file, runner: compile(file.read_text(), file, "exec"),
    ".txt": lambda file, runner: None,
}


def test_only_these_blocks_are_not_run() -> None:
    found: dict[str, list[str]] = {}
    for page in PAGES:
        for block in blocks(page):
            if block.not_run is not None:
                found.setdefault(name(page), []).append(block.not_run.partition(";")[0])
    assert found == NOT_RUN


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_block_says_what_it_is(page: Path) -> None:
    assert {block.language for block in blocks(page)} <= LANGUAGES


# Commands


def commands(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Each line that starts with `$ `, with those that it goes on in, as words."""
    for block in blocks(page):
        if block.language != "console":
            continue
        text = re.sub(r"\\\n", " ", block.text)
        for line in re.findall(r"^\$ (.+)$", text, re.MULTILINE):
            if not line.startswith("curl"):
                yield f"{name(page)}:{block.line}", shlex.split(re.sub(r"\$\([^)]*\)", "OUTPUT", line))


@pytest.mark.parametrize("page", having("console"), ids=name)
def test_commands_have_the_options_that_they_are_shown_with(page: Path) -> None:
    for where, words in commands(page):
        match words:
            case ["toolyard", *given]:
                assert (wrong := usage_error(given)) is None, f"{where}: {shlex.join(words)}: {wrong}"
            case ["make", target]:
                assert re.search(rf"^{target}:.*## ", (CHECKOUT / "Makefile").read_text(), re.MULTILINE), where
            case ["pip", "install", wanted] | ["pip", "install", wanted, "openai"]:
                extras = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
                required = re.fullmatch(r"toolyard(?:\[([\w,]+)\])?", wanted)
                assert required is not None, where
                assert set((required[1] or "server").split(",")) <= set(extras), where
            case ["python", "-m", module, *_]:
                assert module == "verl.trainer.main_ppo", where
            case ["python", script, *_]:
                assert (CHECKOUT / script).is_file() or script == "make_tasks.py", where
            case ["docker" | "kubectl", *given]:
                files = [word for option, word in itertools.pairwise(given) if option == "-f" and "/" in word]
                assert all((CHECKOUT / file).is_file() or file.startswith("job/") for file in files), where
            case _:
                pytest.fail(f"{where}: nobody knows how to check {shlex.join(words)}")


def usage_error(given: list[str]) -> str | None:
    """What the command line would complain about, other than files that are not there."""
    current, context = COMMAND, None
    try:
        while True:
            context = current.make_context(current.name, given, parent=context)
            if not hasattr(current, "commands"):
                return None
            _, current, given = current.resolve_command(context, [*context._protected_args, *context.args])
    except Exception as error:  # typer's own copy of click raises, which has no public name
        said = str(error.format_message()) if hasattr(error, "format_message") else repr(error)
        return None if "does not exist" in said else said


def test_a_wrong_option_would_be_found() -> None:
    assert usage_error(["rollout", "--n", "8"]) is None
    assert "--no-such-option" in (usage_error(["rollout", "--no-such-option"]) or "")
    assert usage_error(["tools", "cal"]) is not None


# Links and paths


@pytest.mark.parametrize("page", [CHECKOUT / "README.md", CHECKOUT / "CHANGELOG.md", *EXAMPLES], ids=name)
def test_links_outside_the_site_lead_to_files(page: Path) -> None:
    """Those within docs are checked by `mkdocs build --strict`."""
    links = [link for link in re.findall(r"\]\(([^)]+)\)", page.read_text()) if "://" not in link]
    assert [link for link in links if not (page.parent / link.partition("#")[0]).exists()] == []


def test_the_site_has_every_page() -> None:
    listed = re.findall(r"[\w/-]+\.md", (CHECKOUT / "mkdocs.yml").read_text().partition("\nnav:")[2])
    assert sorted(listed) == sorted(page.relative_to(DOCS).as_posix() for page in PAGES if DOCS in page.parents)


# Troubleshooting


def constants() -> str:
    """Every text in the source, each on a line of its own; of an f-string, the pieces between its values."""
    found: list[str] = []
    for path in (CHECKOUT / "src").rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text()))
        found += [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return "\n".join(found)


def test_the_messages_that_troubleshooting_explains_are_in_the_source() -> None:
    source = constants()
    messages = [block.text for block in blocks(DOCS / "troubleshooting.md")]
    assert len(messages) > 20
    pieces = [piece.strip("\n") for message in messages for piece in message.split("…")]
    assert [piece for piece in pieces if len(piece) > 3 and piece not in source] == []


# Architecture


def test_the_paths_that_the_architecture_names_exist() -> None:
    text = (DOCS / "architecture.md").read_text()
    table = text.partition("## Where would I change …")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", table, re.MULTILINE)[2:]
    assert len(rows) > 20
    for what, where in rows:
        path = re.fullmatch(r"`([^` ]+)`", where)
        assert path is not None, f"{what!r} is answered by one path, not by {where}"
        assert (CHECKOUT / path[1]).exists(), path[1]
