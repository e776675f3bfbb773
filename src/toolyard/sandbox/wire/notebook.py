"""SandboxFusion's JSON for notebooks: `POST /run_jupyter`, built on a session's `CellResult`s."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, Field

from toolyard.errors import ProgramError, ToolyardError
from toolyard.sandbox.protocol import CellResult, Verdict
from toolyard.sandbox.wire.programs import (
    AT_TIME_LIMIT,
    INCOMING,
    KILL_NOTES,
    KILLED,
    OUTGOING,
    RunStatus,
    Seconds,
    StageReport,
    encode_files,
)

KERNELS = ("python3", "python")


class RunJupyterRequest(BaseModel):
    model_config = INCOMING

    cells: list[str]
    cell_timeout: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Per cell. Zero: only `total_timeout` applies."""
    total_timeout: Seconds = 45.0
    kernel: str = "python3"
    files: dict[str, str | None] = {}
    fetch_files: list[str] = []


class RaisedError(BaseModel):
    model_config = OUTGOING

    ename: str
    evalue: str
    traceback: list[str]


class CellReport(BaseModel):
    model_config = OUTGOING

    stdout: str
    stderr: str
    display: list[dict[str, Any]] = []
    error: list[RaisedError] = []


class RunJupyterResponse(BaseModel):
    model_config = OUTGOING

    status: RunStatus
    message: str = ""
    driver: StageReport | None = None
    cells: list[CellReport] = []
    executor_pod_name: str | None = None
    files: dict[str, str] = {}


def check_kernel(request: RunJupyterRequest) -> None:
    """Check that the kernel is Python, the only one sessions have.

    Raises:
        ProgramError: another kernel was requested.
    """
    if request.kernel not in KERNELS:
        raise ProgramError(f"unknown kernel {request.kernel!r}; expected one of {KERNELS}")


def write_notebook(
    cells: Sequence[CellResult], *, seconds: float, out_of_time: bool, files: Mapping[str, bytes]
) -> RunJupyterResponse:
    """A cell that raises leaves `status` at Success, as in Jupyter.

    A cell stopped at a limit makes it Failed: as TimeLimitExceeded if time ran out (also `out_of_time`: `total_timeout`
    passed before the last cell), otherwise as killed, with the reason in the driver's stderr.
    """
    driver = StageReport(status="Finished", execution_time=seconds, return_code=0, stdout="", stderr="")
    stopped = [cell.verdict for cell in cells if cell.verdict not in (Verdict.OK, Verdict.FAILED)]
    if out_of_time or any(verdict in AT_TIME_LIMIT for verdict in stopped):
        driver = driver.model_copy(update={"status": "TimeLimitExceeded", "return_code": None})
    elif stopped or any(cell.session_lost for cell in cells):
        note = KILL_NOTES.get(stopped[0] if stopped else Verdict.FAILED, "The interpreter died.")
        driver = driver.model_copy(update={"return_code": KILLED, "stderr": f"{note}\n"})
    return RunJupyterResponse(
        status="Success" if driver.return_code == 0 else "Failed",
        driver=driver,
        cells=[_report(cell) for cell in cells],
        files=encode_files(files),
    )


def write_notebook_failure(error: ToolyardError) -> RunJupyterResponse:
    return RunJupyterResponse(status="SandboxError", message=str(error) or type(error).__name__)


def _report(cell: CellResult) -> CellReport:
    raised: list[RaisedError] = []
    if cell.error is not None:
        raised = [RaisedError(ename=cell.error.ename, evalue=cell.error.evalue, traceback=[*cell.error.traceback])]
    elif not cell.ok:
        # A notebook shows why a cell ended early; a cell that we stopped has no exception of its own to show.
        raised = [RaisedError(ename=cell.verdict.name, evalue="the cell was stopped at a limit", traceback=[])]
    return CellReport(
        stdout=cell.stdout, stderr=cell.stderr, display=[dict(bundle) for bundle in cell.display], error=raised
    )
