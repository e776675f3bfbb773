"""Every error Toolyard raises, and whose failure each one is.

Three parties can fail, and training must tell them apart:

* the *model*: its program crashed, looped or asked for too much. That is data, never an exception: it comes back as
  an `Execution` with a `Verdict`.
* the *task* or its author: a bad request, a bad file, a bad configuration. `ConfigError`, `ProgramError`.
* *us*: a worker died, the service is away, the kernel refused. `SandboxError`, `LimiterError`, `EngineError` and their
  children. A failure of ours must never be turned into a score of 0; `retryable` says whether trying again can help.
"""

from __future__ import annotations


class ToolyardError(Exception):
    """Root of the tree: `except ToolyardError` catches what Toolyard raises on purpose and nothing else."""

    retryable: bool = False
    """Whether the same call may succeed if it is simply made again."""


class ConfigError(ToolyardError):
    """A setting, argument or file of the caller is wrong. The message names it, its value and the way out."""


class MissingDependencyError(ConfigError):
    """An optional dependency is not installed. The message holds the pip command that installs it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs {package!r}, which is not installed: pip install 'toolyard[{extra}]'")


class ProgramError(ToolyardError):
    """The program cannot be run as asked (unknown language, bad file name, too large): the request's fault."""


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


class TaskError(ToolyardError):
    """A row of a task file is not what it should be. The message names the file and the line."""


class RecordError(ToolyardError):
    """A dump or a tape cannot be read or written."""


class DivergenceError(ToolyardError):
    """A replay did something else than its tape. The message shows the first difference."""


class InteractionError(ToolyardError):
    """A user simulator failed."""


class RewardError(ToolyardError):
    """A reward could not be computed. There is none then: never 0."""


class TrainError(ToolyardError):
    """A training run cannot go on: there is nothing to train on, or a checkpoint is not usable."""
