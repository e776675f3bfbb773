"""This machine's toolchains, with caches that speed up compiling."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Container, Mapping
from dataclasses import replace

from toolyard import settings
from toolyard.errors import ToolchainMissingError
from toolyard.sandbox.languages import headers
from toolyard.sandbox.languages.table import ALL
from toolyard.sandbox.languages.toolchains import Language, Toolchain, resolve
from toolyard.sandbox.protocol import Limits, Program


class Compilers:
    """Every language found here. Precompiled headers and packages are built in the background after the first program
    that could use them.

    `modules`: the modules that the programs' Python has, out of those that rows of the table need.
    """

    def __init__(self, modules: Container[str]) -> None:
        self._modules = modules
        self._found: dict[str, Toolchain] = {}
        for language in ALL:
            with contextlib.suppress(ToolchainMissingError):
                self._found[language.name] = resolve(language, settings.search_path(), modules)
        cpp, go = self._found.get("cpp"), self._found.get("go")
        self._headers = headers.PrecompiledHeaders(cpp) if cpp else None
        self._go = headers.GoPackages(go) if go else None
        if self._go and not self._go.needed:
            self._go = None
        self._background: list[asyncio.Task[None]] = []

    @property
    def read_only(self) -> set[str]:
        """Host paths that the toolchains must be able to read."""
        commands = (found for found in self._found.values() if not found.language.in_python)
        return {path for toolchain in commands for path in toolchain.binds}

    @property
    def binds(self) -> dict[str, str]:
        """Host directories and where compilers in the jail find them."""
        places = ((self._headers, headers.HEADERS_IN_JAIL), (self._go, headers.GO_PACKAGES_IN_JAIL))
        return {str(cache.directory): place for cache, place in places if cache and cache.directory.is_dir()}

    def start(self) -> None:
        for cache in (self._headers, self._go):
            if cache is not None:
                self._background.append(asyncio.get_running_loop().create_task(cache.maintain()))

    async def stop(self) -> None:
        for task in self._background:
            task.cancel()
        await asyncio.wait(self._background) if self._background else None
        self._background.clear()

    def find(self, language: Language) -> Toolchain:
        """
        Raises:
            ToolchainMissingError: the language has no compiler or runtime here.
        """
        return self._found.get(language.name) or resolve(language, settings.search_path(), self._modules)

    def toolchain(self, language: Language, program: Program, limits: Limits, *, precompiled: bool) -> Toolchain:
        """How to compile and run this program. `precompiled`: whether the jail can see our precompiled files.

        Raises:
            ToolchainMissingError: the language has no compiler or runtime here.
        """
        fitted = self.find(language).fitted(program.code, limits.memory_bytes)
        if not precompiled or fitted.compile_argv is None:
            return fitted
        if language.name == "cpp" and self._headers:
            return replace(fitted, compile_argv=fitted.compile_argv + self._headers.flags(program.code))
        if language.name in ("go", "go_test") and self._go:
            environment: Mapping[str, str] = {**fitted.env, **self._go.env()}
            return replace(fitted, env=environment)
        return fitted
