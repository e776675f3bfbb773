"""The page `/status` of a run: what `toolyard top` shows. At most 20 requests and 256 nodes are listed."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

ADDRESS_FILE = ".metrics"
"""In a dump's folder while its run goes on: the URL of the endpoint."""
MAX_REQUESTS = 20
MAX_NODES = 256


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, allow_inf_nan=False)


class NodeRow(_Part):
    """A worker of a cluster, or the process itself."""

    name: str
    host: str
    pid: int
    states: dict[str, int]
    turns: int
    """Turns, sampled tokens and tool calls of requests that are running there."""
    sampled_tokens: int
    tool_calls: int


class RequestRow(_Part):
    request_id: str
    task: str
    node: str
    state: str
    seconds: float
    """In this state."""
    turn: int
    waits_for: str


class ServerRow(_Part):
    url: str
    in_flight: int
    answered: int
    failed: int
    is_up: bool


class SandboxRow(_Part):
    workers: int
    busy: int
    waiting: int
    sessions: int
    executions: dict[str, int]


class LimiterRow(_Part):
    name: str
    limit: int
    in_flight: int
    waiting: int
    wait_p50: float
    wait_p99: float


class StatusPage(_Part):
    toolyard: str
    """The version."""
    pid: int
    seconds: float
    """Since the run started."""
    planned: int
    """Requests of the run; 0 until its tasks are read."""
    done: int
    """Requests in the dump, those of earlier runs included."""
    done_before: int
    failed: int
    mean_score: float | None
    finish_reasons: dict[str, int]
    states: dict[str, int]
    """Running requests."""
    turns: int
    """Turns, sampled tokens and tool calls so far, those of running requests included."""
    sampled_tokens: int
    tool_calls: int
    is_blocked: bool
    """The event loop is blocked."""
    nodes: list[NodeRow]
    """The busiest first."""
    node_count: int
    ledger: dict[str, int]
    """The figures of a cluster's ledger; empty without one."""
    servers: list[ServerRow]
    sandbox: SandboxRow | None
    limiters: list[LimiterRow]
    slowest: list[RequestRow]
