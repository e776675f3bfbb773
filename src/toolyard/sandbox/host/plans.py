"""A program ready for a worker: what to send apart from its input, and how to convert the reply to an `Execution`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from toolyard.sandbox.guest import frames
from toolyard.sandbox.host.requests import Order, as_bytes, manifest, stage_result, unpack_files
from toolyard.sandbox.host.worker import WorkerReply
from toolyard.sandbox.languages.builds import Build
from toolyard.sandbox.languages.toolchains import Toolchain
from toolyard.sandbox.protocol import Execution, Program, Verdict


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    order: Order
    build: Build | None = None
    """The compiler's result; None for Python and other languages that are not compiled."""
    cached: bool = False
    queued: float = 0.0
    """Seconds the compile stage waited for a worker."""
    gpu: bool = False
    """Whether it sees the machine's GPUs."""
    warm: bool = False
    """Whether runs are forked from a prepared process, so cheaply that many are best run one after the other."""

    @property
    def compiles(self) -> bool:
        return self.build is None or self.build.stage.verdict is Verdict.OK

    def again(self) -> ExecutionPlan:
        """The plan for the next input."""
        return replace(self, cached=self.build is not None, queued=0.0)

    def execution(self, reply: WorkerReply | None, level: str, queued: float = 0.0) -> Execution:
        """Convert the worker's reply. None: compilation failed."""
        compiled = self.build.stage if self.build else None
        stage = stage_result(reply) if reply else None
        return Execution(
            stage.verdict if stage else Verdict.COMPILE_FAILED,
            stage,
            compiled,
            files=unpack_files(reply.extra) if reply else {},
            isolation=level,
            queue_seconds=self.queued + queued,
            compile_cached=self.cached,
        )


def python_plan(program: Program) -> ExecutionPlan:
    meta = (tuple(program.args), dict(program.env), manifest(program.files, 0o644))
    return ExecutionPlan(Order(frames.RUN_PYTHON, meta, program.code, program.files, program.fetch_files))


def sources(toolchain: Toolchain, program: Program) -> dict[str, bytes]:
    return {toolchain.source_name: as_bytes(program.code), **program.files}


def compile_order(toolchain: Toolchain, program: Program) -> Order:
    files = sources(toolchain, program)
    meta = (toolchain.compile_argv, {**toolchain.env, **program.env}, manifest(files, 0o644))
    fetch = [name for artifact in toolchain.artifacts for name in (artifact, artifact + "/")]
    return Order(frames.RUN_COMMAND, meta, "", files, fetch)


def run_order(toolchain: Toolchain, program: Program, artifacts: Mapping[str, bytes]) -> Order:
    given = {name: content for name, content in sources(toolchain, program).items() if name not in artifacts}
    files = (*manifest(given, 0o644), *manifest(artifacts, 0o755))
    meta = ((*toolchain.run_argv, *program.args), {**toolchain.env, **program.env}, files)
    return Order(frames.RUN_COMMAND, meta, "", {**given, **artifacts}, program.fetch_files)
