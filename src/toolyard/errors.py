"""Every error Toolyard raises, and whose failure each one is.

Three parties can fail, and training must tell them apart:

* the *model*: its program crashed, looped or asked for too much. That is data, never an exception: it comes back as
  an `Execution` with a `Verdict`.
* the *task* or its author: a bad request, a bad file, a bad configuration. `ConfigError`, `ProgramError`.
* *us*: a worker died, the service is unreachable, the kernel refused. `SandboxError`, `LimiterError`, `EngineError` and
  their subclasses. Never turn our own failure into a score of 0; `retryable` says whether trying again can help.

Errors are wrapped on their way up (`raise RewardError(…) from error`); `blame` finds out whose failure it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

TASK, OURS = "task", "ours"

_CAUSE_CHARS = 500


class ToolyardError(Exception):
    """Base class: `except ToolyardError` catches what Toolyard raises on purpose and nothing else."""

    retryable: bool = False
    """Whether the same call may succeed if you simply make it again."""
    whose: str = OURS
    """Whose failure it is, unless another Toolyard error caused this one: then that one decides."""
    source: str = ""
    """What failed: the URL of a server, or a tool."""


class Blame(NamedTuple):
    whose: str
    source: str
    """The innermost one known: the server rather than the tool that called it."""
    cause: str
    """The root cause, in one line."""


def blame(error: BaseException) -> Blame:
    """Find who and what is to blame by following the causes. An error that is not a `ToolyardError` is our own bug."""
    chain = list(_causes(error))
    known = [one for one in chain if isinstance(one, ToolyardError)]
    sources = [one.source for one in known if one.source]
    return Blame(known[-1].whose if known else OURS, sources[-1] if sources else "", summarize(chain[-1]))


def unwrap(error: BaseException) -> BaseException:
    """Unwrap the exception groups that task groups put around a single error."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
        error = error.exceptions[0]  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    return error  # pyright: ignore[reportUnknownVariableType]


def summarize(error: BaseException) -> str:
    """The error's type and message; works even if `str(error)` raises."""
    kind = type(error).__name__
    try:
        said = str(error).strip()
    except Exception:
        said = ""
    said = said if len(said) <= _CAUSE_CHARS else said[:_CAUSE_CHARS] + "…"
    return f"{kind}: {said}" if said else kind


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:  # causes may form a cycle
        error = unwrap(error)
        seen.add(id(error))
        yield error
        error = error.__cause__


class ConfigError(ToolyardError):
    """A setting, argument or file is wrong. The message names it, its value and how to fix it."""

    whose = TASK


class MissingDependencyError(ConfigError):
    """An optional dependency is not installed. The message contains the pip command that installs it.

    `otherwise`: what to do instead of installing it, as in "use a server: --engine openai".
    """

    def __init__(self, package: str, extra: str, purpose: str, *, otherwise: str = "") -> None:
        remedy = f"pip install 'toolyard[{extra}]'" + (f", or {otherwise}" if otherwise else "")
        super().__init__(f"{purpose} needs {package!r}, which is not installed: {remedy}")


class ProgramError(ToolyardError):
    """The program cannot be run as asked (unknown language, bad file name, too large): the request's fault."""

    whose = TASK


class ToolchainMissingError(ProgramError):
    """The language is known, but this machine has no compiler or runtime for it."""


class SandboxError(ToolyardError):
    """The sandbox failed, not the program. Never score this as a wrong answer."""

    retryable = True


class SandboxBusyError(SandboxError):
    """The program could not start within the time it was allowed to wait for a free worker."""

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        """Seconds to wait before trying again; None if the service did not say."""


class SandboxClosedError(SandboxError):
    """The sandbox was closed before the program finished."""

    retryable = False


class IsolationError(SandboxError):
    """The machine does not provide the requested isolation. `toolyard doctor` shows what is missing."""

    retryable = False


class SessionLostError(SandboxError):
    """The session's interpreter is gone (killed at a limit, or expired), and its variables with it."""

    retryable = False


class LimiterError(ToolyardError):
    """The limiter failed or refused. Nothing was started."""

    retryable = True


class LimiterTimeoutError(LimiterError, TimeoutError):
    """No permit became available in time."""


class LimiterClosedError(LimiterError):
    """The limiter was closed."""

    retryable = False


class LimitConflictError(LimiterError, ConfigError):
    """A limiter with this name exists and has a different limit."""

    retryable = False
    whose = OURS


class PermitExpiredError(LimiterError):
    """The permit was held longer than `max_hold_seconds`; it was taken back and its execution cancelled."""

    retryable = False


class ExecutionWorkerDiedError(LimiterError):
    """The process that ran the function crashed or was killed; how far the function got is unknown."""


class ToolError(ToolyardError):
    """A tool instance could not be created, so the trajectory cannot start."""


class EngineError(ToolyardError):
    """The engine did not sample: it is unreachable, overloaded or broken. The conversation is unchanged."""

    retryable = True


class EngineRequestError(EngineError):
    """The engine rejected the request (too long, unknown parameter); the same request would be rejected again."""

    retryable = False


class ChatError(ToolyardError):
    """A conversation cannot be tokenized, or its tokens would not extend the tokens that were sampled."""

    whose = TASK


class TaskError(ToolyardError):
    """A row of a task file is invalid. The message names the file and the line."""

    whose = TASK


class ClusterError(ToolyardError):
    """A cluster cannot play: no node fits, or workers die again and again."""


class RecordError(ToolyardError):
    """A dump or a tape cannot be read or written."""


class DivergenceError(ToolyardError):
    """A replay diverged from its tape. The message shows the first difference."""


class InteractionError(ToolyardError):
    """A user simulator failed."""

    whose = TASK


class RewardError(ToolyardError):
    """A reward could not be computed. The reward is then absent, never 0."""

    def __init__(self, message: str, *, whose: str = TASK) -> None:
        """`whose`: pass OURS if neither the reward function nor the task is at fault."""
        super().__init__(message)
        self.whose = whose


class TrainError(ToolyardError):
    """Training cannot continue: there is nothing to train on, or a checkpoint is unusable."""
