"""Settings of the gateway."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt

from toolyard.engines.protocol import Sampling

MIB = 1 << 20


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SessionLimits(_Part):
    """What one session may use. A request beyond a limit gets an error that clients do not repeat; the session is over
    then."""

    max_turns: PositiveInt | None = None
    """Sampled assistant messages, in all branches together."""
    max_tokens: PositiveInt | None = None
    """Sampled tokens, in all branches together."""
    max_seconds: PositiveFloat | None = None
    """Time since the session's first request, or since it was created."""
    max_model_len: PositiveInt | None = None
    """Prompt and answer of one request. A longer prompt gets OpenAI's `context_length_exceeded`, on which agents
    compact their history; the session goes on."""
    idle_seconds: PositiveFloat = 600.0
    """A session without requests for this long is ended, without a score."""
    max_requests: PositiveInt = 256
    """Requests of one session that may be in progress at the same time."""


class GatewayConfig(_Part):
    host: str = "127.0.0.1"
    port: int = Field(default=8090, ge=0, le=65535)
    """0: any free port."""
    allow_hosts: tuple[str, ...] = ()
    """Host names that requests may use, in addition to those that `toolyard.hosts.OwnNames` always accepts."""
    tokens: tuple[str, ...] = Field(default=(), repr=False)
    """Clients send one as their API key. Empty: anyone who can connect may use the gateway."""
    allow_remote: bool = False
    """Listen on addresses that other machines can reach even without a token."""
    open_sessions: bool = True
    """A request for an unknown session opens it. False: sessions must be created first."""
    sampling: Sampling = Sampling()
    """Used for what a request does not set. `max_tokens` is also the most that a request may ask for."""
    fixed_sampling: bool = False
    """Ignore what requests say about temperature, top_p, top_k, min_p and seed: the trainer decides how to sample."""
    limits: SessionLimits = SessionLimits()
    max_sessions: PositiveInt = 4096
    generate_seconds: PositiveFloat = 600.0
    """Time limit for one answer, including retries."""
    engine_retries: int = Field(default=3, ge=0)
    engine_retry_pause_seconds: PositiveFloat = 0.5
    max_request_bytes: PositiveInt = 32 * MIB
    max_buffered_bytes: PositiveInt = 512 * MIB
    """Total size of request bodies that are being received or answered."""
    max_request_seconds: PositiveFloat = 60.0
    """Time for the headers of a request to arrive, and again for its body."""
    ping_seconds: PositiveFloat = 10.0
    """A stream whose answer takes longer than this begins with pings, so that clients and proxies keep it open."""
    grace_seconds: NonNegativeFloat = 10.0
    """How long answers may still be sampled after the gateway is asked to stop."""
