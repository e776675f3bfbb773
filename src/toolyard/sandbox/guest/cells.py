"""A session's interpreter: runs cells, returns results, keeps variables. Runs inside the program's process.

A cell behaves as in a notebook: the value of the last expression is displayed, `display()` shows any object, matplotlib
figures appear, `await` works at top level, and an exception ends the cell but not the session. Lines that start with
`!` run in the shell; `%matplotlib`, `%config` and `%load_ext` lines are accepted and do nothing.
"""

from __future__ import annotations

import ast
import asyncio
import base64
import inspect
import json
import linecache
import os
import signal
import struct
import subprocess
import sys
import traceback
from functools import partial
from typing import Any, NoReturn, cast

from . import frames, program

LENGTH = struct.Struct("<I")
_MAX_DISPLAY = 2 << 20
_RICH = (
    ("text/html", "_repr_html_"),
    ("text/markdown", "_repr_markdown_"),
    ("text/latex", "_repr_latex_"),
    ("image/svg+xml", "_repr_svg_"),
    ("image/png", "_repr_png_"),
    ("image/jpeg", "_repr_jpeg_"),
    ("application/json", "_repr_json_"),
)
_IGNORED_MAGICS = ("%matplotlib", "%config", "%load_ext", "%autoreload")


class Cells:
    def __init__(self, interpreter: program.Interpreter) -> None:
        self._namespace = interpreter.make_main().__dict__
        self._count = 0
        self._displayed: list[dict[str, str]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._namespace.update(display=self.display, __shell__=shell, __loader__=None, In=[""], Out={})
        del self._namespace["__file__"]

    def serve(self) -> NoReturn:
        while True:
            head = _read_exactly(frames.REQUEST.size)
            sizes = frames.REQUEST.unpack(head)[10:13]
            body = _read_exactly(sum(sizes))
            code = body[sizes[0] : sizes[0] + sizes[1]].decode("utf-8", "surrogateescape")
            answer = json.dumps(self._answer(code)).encode()
            data = memoryview(LENGTH.pack(len(answer)) + answer)
            while data:
                data = data[os.write(program.STATUS, data) :]

    def _answer(self, code: str) -> dict[str, Any]:
        error: dict[str, Any] | None = None
        self._displayed = []
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            try:
                self._run(code)
                self._show_figures()
            finally:
                # A SIGINT that arrives after the cell must not end the session.
                signal.signal(signal.SIGINT, signal.SIG_IGN)
        except SystemExit as exit_:
            error = {"ename": "SystemExit", "evalue": str(exit_.code), "traceback": [f"SystemExit: {exit_.code}"]}
        except BaseException as raised:
            error = _describe(raised)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception as failure:
                error = error or _describe(failure)
        return {"display": self._displayed, "error": error}

    def _run(self, code: str) -> None:
        self._count += 1
        self._namespace["In"].append(code)
        name = f"<cell {self._count}>"
        linecache.cache[name] = (len(code), None, [line + "\n" for line in code.split("\n")], name)
        tree = _parse(code, name)
        value: Any = None
        if tree.body and isinstance(tree.body[-1], ast.Expr) and not code.rstrip().endswith(";"):
            last = ast.Expression(tree.body.pop().value)  # type: ignore[attr-defined]
            self._execute(compile(tree, name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT))
            value = self._execute(compile(last, name, "eval", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT))
        else:
            self._execute(compile(tree, name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT))
        if value is not None:
            self._namespace["_"] = self._namespace["Out"][self._count] = value
            self.display(value)

    def _execute(self, code: Any) -> Any:
        result = eval(code, self._namespace)  # noqa: S307
        if code.co_flags & inspect.CO_COROUTINE:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
            return self._loop.run_until_complete(result)
        return result

    def display(self, *values: Any) -> None:
        for value in values:
            self._displayed.append(_bundle(value))

    def _show_figures(self) -> None:
        pyplot = sys.modules.get("matplotlib.pyplot")
        if pyplot is None:
            return
        for number in pyplot.get_fignums():
            self.display(pyplot.figure(number))
        pyplot.close("all")


def _parse(code: str, name: str) -> ast.Module:
    try:
        return ast.parse(code, name)
    except SyntaxError as error:
        # Look for notebook commands only if it is not valid Python: a `!` line inside a string must stay one.
        plain = _plain_python(code)
        if plain == code:
            raise
        try:
            return ast.parse(plain, name)
        except SyntaxError:
            raise error from None


def _bundle(value: Any) -> dict[str, str]:
    """A MIME bundle: always text/plain, plus what the object offers. A failing method is skipped."""
    bundle = {"text/plain": _clip(repr(value))}
    for mime, method in _RICH:
        offered: Any = getattr(cast("Any", type(value)), method, None)
        if offered is not None:
            content: Any = _try(partial(offered, value))
            if isinstance(content, tuple):  # some methods add metadata
                content = cast("tuple[Any, ...]", content)[0]
            if isinstance(content, bytes):
                content = base64.b64encode(content).decode()
            if content is not None:
                bundle[mime] = _clip(content if isinstance(content, str) else json.dumps(content))
    if "matplotlib.figure" in sys.modules and isinstance(value, sys.modules["matplotlib.figure"].Figure):
        import io

        buffer = io.BytesIO()
        value.savefig(buffer, format="png")
        bundle["image/png"] = base64.b64encode(buffer.getvalue()).decode()
    return bundle


def _try(call: Any) -> Any:
    try:
        return call()
    except Exception:
        return None


def _clip(text: str) -> str:
    return text if len(text) <= _MAX_DISPLAY else text[:_MAX_DISPLAY] + f"… ({len(text) - _MAX_DISPLAY} more)"


def _describe(error: BaseException) -> dict[str, Any]:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, ast.__file__):
        trace = trace.tb_next
    lines = traceback.format_exception(type(error), error, trace)
    return {
        "ename": type(error).__name__,
        "evalue": _try(lambda: str(error)) or "",
        "traceback": [_clip(line) for line in "".join(lines).splitlines()],
    }


def _plain_python(code: str) -> str:
    lines = code.split("\n")
    for index, line in enumerate(lines):
        stripped = line.lstrip()
        indent = line[: len(line) - len(stripped)]
        if stripped.startswith("!"):
            lines[index] = f"{indent}__shell__({stripped[1:]!r})"
        elif stripped.startswith(_IGNORED_MAGICS):
            lines[index] = indent + "pass"
    return "\n".join(lines)


def shell(command: str) -> None:
    sys.stdout.flush()
    subprocess.run(command, shell=True, check=False)  # noqa: S602 - the program's own shell, inside its own jail


def _read_exactly(size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = os.read(program.COMMAND, min(size - len(data), 1 << 20))
        if not chunk:
            os._exit(0)
        data += chunk
    return bytes(data)


def serve(interpreter: program.Interpreter) -> NoReturn:
    cells = Cells(interpreter)
    os.write(program.STATUS, LENGTH.pack(0))
    cells.serve()
