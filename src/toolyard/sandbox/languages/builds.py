"""Cache of compiled programs: a source compiled the same way is compiled once, no matter how many inputs it runs on.

An artifact leaves the jail that compiled it only for jails that run the same source, so a malicious compile can affect
no other program.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace

from toolyard.sandbox.guest import frames
from toolyard.sandbox.languages.toolchains import Toolchain
from toolyard.sandbox.protocol import Program, StageResult, Verdict


@dataclass(frozen=True, slots=True)
class Build:
    """The compiler's result, and the artifacts: empty unless it succeeded."""

    stage: StageResult
    artifacts: Mapping[str, bytes]

    @property
    def size(self) -> int:
        return sum(map(len, self.artifacts.values())) + len(self.stage.stdout_bytes) + len(self.stage.stderr_bytes)


def make_build(toolchain: Toolchain, stage: StageResult, files: Mapping[str, bytes]) -> Build:
    """A compile whose artifacts are missing or too large to transfer has failed, whatever the compiler says."""
    if stage.verdict is not Verdict.OK:
        return Build(stage, {})
    missing = [
        name for name in toolchain.artifacts if not any(file == name or file.startswith(f"{name}/") for file in files)
    ]
    if not missing:
        return Build(stage, files)
    largest = frames.MAX_FETCH_BYTES >> 20
    said = f"the compiler's output is missing or too large (more than {largest} MiB): {', '.join(missing)}\n"
    return Build(replace(stage, verdict=Verdict.FAILED, stderr_bytes=stage.stderr_bytes + said.encode()), {})


def build_key(toolchain: Toolchain, program: Program) -> bytes:
    digest = hashlib.sha256()
    parts = [toolchain.fingerprint, toolchain.source_name, program.code]
    for part in (*(text.encode("utf-8", "surrogatepass") for text in parts), *_files(program)):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def _files(program: Program) -> list[bytes]:
    pairs = [(name.encode(), content) for name, content in sorted(program.files.items())]
    return [part for pair in pairs for part in pair] + [repr(sorted(program.env.items())).encode()]


class Builds:
    """Evicts the least recently used by total size. Keeps failures too: they are as deterministic as successes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._size = 0
        self._kept: OrderedDict[bytes, Build] = OrderedDict()
        self._running: dict[bytes, asyncio.Future[None]] = {}

    async def get(self, key: bytes, make: Callable[[], Awaitable[tuple[Build, bool]]]) -> tuple[Build, bool]:
        """Return the build for `key` and whether it was cached. Concurrent callers with the same key compile once.

        `make` returns the build and whether to keep it (not if the compiler timed out).
        """
        while (running := self._running.get(key)) is not None:
            await asyncio.shield(running)
        if (build := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            return build, True
        done = self._running[key] = asyncio.get_running_loop().create_future()
        try:
            build, keep = await make()
        finally:
            del self._running[key]
            done.set_result(None)
        if keep:
            self._keep(key, build)
        return build, False

    def _keep(self, key: bytes, build: Build) -> None:
        if build.size > self._max_bytes:
            return
        self._kept[key] = build
        self._size += build.size
        while self._size > self._max_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._size -= oldest.size
