"""The JSON of our own session routes, which SandboxFusion does not have. Used by the service and `RemoteSandbox`.

POST   /v1/sessions             OpenSession  -> OpenedSession
POST   /v1/sessions/{id}/cells  CellOrder    -> CellResult
PUT    /v1/sessions/{id}/files  Files        -> nothing
GET    /v1/sessions/{id}/files?name=…&name=… -> Files
DELETE /v1/sessions/{id}                     -> nothing

A failure is an HTTP error with `ErrorReport` as its body.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, TypeAdapter

from toolyard.sandbox.protocol import CellResult, Limits

_WIRE = ConfigDict(frozen=True, extra="ignore")

SESSIONS = "/v1/sessions"
CELL_RESULT: TypeAdapter[CellResult] = TypeAdapter(CellResult)


class OpenSession(BaseModel):
    model_config = _WIRE

    limits: Limits | None = None
    """None: the server's default."""
    idle_seconds: PositiveFloat | None = None
    """Close the session after this long without a request. None, or more than the server allows: the server's value."""


class OpenedSession(BaseModel):
    model_config = _WIRE

    session_id: str
    idle_seconds: float


class CellOrder(BaseModel):
    model_config = _WIRE

    code: str
    seconds: float | None = Field(default=None, gt=0, allow_inf_nan=False)


class Files(BaseModel):
    model_config = _WIRE

    files: dict[str, str | None]
    """Path to base64; null is skipped."""


class ErrorReport(BaseModel):
    model_config = _WIRE

    detail: str
    error: str | None = None
    """Name of the `toolyard.errors` class. None: the response is not from our service."""
    retryable: bool = False
