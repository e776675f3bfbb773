"""Every error Toolyard raises, and whose failure each one is.

Three parties can fail, and training must tell them apart:

* the *model*: its program crashed, looped or asked for too much. That is data, never an exception: it comes back as
  an `Execution` with a `Verdict`.
* the *task* or its author: a bad request, a bad file, a bad configuration. `ConfigError`, `ProgramError`.
* *us*: a worker died, the service is away, the kernel refused. `SandboxError`, `LimiterError`, `EngineError` and their
  children. A failure of ours must never be turned into a score of 0; `retryable` says whether trying again can help.

Errors are wrapped on their way up (`raise RewardError(…) from error`), and the blame travels with them: see `blame`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

TASK, OURS = "task", "ours"

_CAUSE_CHARS = 500


class ToolyardError(Exception):
    """Root of the tree: `except ToolyardError` catches what Toolyard raises on purpose and nothing else."""

    retryable: bool = False
    """Whether the same call may succeed if it is simply made again."""
    whose: str = OURS
    """Whose failure it is, unless it was caused by another error of this tree: then that one says."""
    source: str = ""
    """What failed: the URL of a server, a tool."""


class Blame(NamedTuple):
    whose: str
    source: str
    """The innermost that is known: the server rather than the tool that asked it."""
    cause: str
    """The last cause, in a line."""


def blame(error: BaseException) -> Blame:
    """Who and what is to blame for an error, by what it was caused by. What is not of our tree is a defect: ours."""
    chain = list(_causes(error))
    known = [one for one in chain if isinstance(one, ToolyardError)]
    sources = [one.source for one in known if one.source]
    return Blame(known[-1].whose if known else OURS, sources[-1] if sources else "", in_short(chain[-1]))


def bare(error: BaseException) -> BaseException:
    """Out of the groups that task groups put around a single error."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
        error = error.exceptions[0]  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    return error  # pyright: ignore[reportUnknownVariableType]


def in_short(error: BaseException) -> str:
    """Its kind and its words, also of an error that cannot be printed."""
    kind = type(error).__name__
    try:
        said = str(error).strip()
    except Exception:
        said = ""
    said = said if len(said) <= _CAUSE_CHARS else said[:_CAUSE_CHARS] + "…"
    return f"{kind}: {said}" if said else kind


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:  # somebody may have tied a knot
        error = bare(error)
        seen.add(id(error))
        yield error
        error = error.__cause__


class ConfigError(ToolyardError):
    """A setting, argument or file of the caller is wrong. The message names it, its value and the way out."""

    whose = TASK


class MissingDependencyError(ConfigError):
    """An optional dependency is not installed. The message holds the pip command that installs it.

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
    """The sandbox failed, not the program. Never score this."""

    retryable = True


class SandboxBusyError(SandboxError):
    """The program could not start within the time it was allowed to wait for a free worker."""

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        """Seconds after which trying again has a fair chance; None if the service did not say."""


class SandboxClosedError(SandboxError):
    """The sandbox was closed before the program finished."""

    retryable = False


class IsolationError(SandboxError):
    """The machine does not grant the isolation that was asked for. `toolyard doctor` tells what is missing."""

    retryable = False


class SessionLostError(SandboxError):
    """The session's interpreter is gone (killed at a limit, or expired), and its variables with it."""

    retryable = False


class LimiterError(ToolyardError):
    """The limiter failed or refused. Nothing was started on its account."""

    retryable = True


class LimiterTimeoutError(LimiterError, TimeoutError):
    """The permit's turn did not come in time."""


class LimiterClosedError(LimiterError):
    """The limiter was closed."""

    retryable = False


class LimitConflictError(LimiterError, ConfigError):
    """A limiter of that name exists, with another limit."""

    retryable = False
    whose = OURS


class PermitExpiredError(LimiterError):
    """The permit was held longer than `max_hold_seconds`; it was taken back, and the execution under it cancelled."""

    retryable = False


class ExecutionWorkerDiedError(LimiterError):
    """The process that ran the function was killed or crashed; what it did until then is unknown."""


class ToolError(ToolyardError):
    """A tool's instance could not be created for a trajectory, which therefore cannot begin."""


class EngineError(ToolyardError):
    """The engine did not sample: it is away, overloaded or broken. Nothing was added to the conversation."""

    retryable = True


class EngineRequestError(EngineError):
    """The engine refused the request (too long, a parameter it does not know): the same one is refused again."""

    retryable = False


class ChatError(ToolyardError):
    """A conversation cannot be put into tokens, or not so that it extends the tokens that were sampled."""

    whose = TASK


class TaskError(ToolyardError):
    """A row of a task file is not what it should be. The message names the file and the line."""

    whose = TASK


class RecordError(ToolyardError):
    """A dump or a tape cannot be read or written."""


class DivergenceError(ToolyardError):
    """A replay did something else than its tape. The message shows the first difference."""


class InteractionError(ToolyardError):
    """A user simulator failed."""

    whose = TASK


class RewardError(ToolyardError):
    """A reward could not be computed. There is none then: never 0."""

    def __init__(self, message: str, *, whose: str = TASK) -> None:
        """`whose`: OURS if it was not the reward function's or the task's doing."""
        super().__init__(message)
        self.whose = whose


class TrainError(ToolyardError):
    """A training run cannot go on: there is nothing to train on, or a checkpoint is not usable."""
