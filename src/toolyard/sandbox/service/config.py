"""Service settings: addresses, tokens, and the most a client may request."""

from __future__ import annotations

import ssl
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from toolyard.errors import ConfigError
from toolyard.sandbox.protocol import GIB, MIB, Limits

ONLY_CLIENT = "default"
"""The name of a token given without one."""


class Token(BaseModel):
    """A client's secret and name. A client may have several tokens, so that it can rotate them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1)
    secret: str = Field(min_length=1, repr=False)


def read_tokens(lines: Iterable[str]) -> tuple[Token, ...]:
    """Parse tokens as given to `--token` and `--token-file`: SECRET or NAME SECRET. Skips empty lines and # comments.

    Raises:
        ConfigError: there is none, one cannot be sent in a header, or two clients share one.
    """
    found: dict[str, Token] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        # Messages never show a word of the line: it may be a secret.
        if len(words) > 2:
            raise ConfigError(f"token {number}: expected SECRET or NAME SECRET, got {len(words)} words")
        name, secret = words[0] if len(words) == 2 else ONLY_CLIENT, words[-1]
        if not (secret.isascii() and secret.isprintable()):
            raise ConfigError(f"token {number}: expected printable ASCII characters, which a header can carry")
        if secret in found and found[secret].name != name:
            raise ConfigError(f"token {number}: two clients have the same token")
        found[secret] = Token(name=name, secret=secret)
    if not found:
        raise ConfigError("expected one or more tokens, got no token")
    return tuple(found.values())


class ServiceConfig(BaseModel):
    """How to serve. The sandbox to serve is passed separately."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    port: int = Field(default=8080, ge=0, le=65535)
    """0: any free port."""
    allow_hosts: tuple[str, ...] = ()
    """Host names that requests may use, in addition to those that `toolyard.hosts.OwnNames` always accepts."""
    token: str | None = Field(default=None, min_length=1, repr=False)
    """Clients send it as `Authorization: Bearer`. None, and no `tokens`: anyone who can connect may run programs."""
    tokens: tuple[Token, ...] = ()
    """More tokens, with names. Per-client limits apply by token name, or by address if there are no tokens."""
    allow_remote: bool = False
    """Bind to non-loopback addresses even without a token."""
    tls_cert: Path | None = None
    """PEM. If set, the service speaks HTTPS only."""
    tls_key: Path | None = None
    """None: the key is in the certificate file."""
    max_waiting: NonNegativeInt = 4096
    """Programs that may wait for a worker at once. Further ones are refused immediately."""
    max_wait_seconds: PositiveFloat = 8.0
    """Longest wait for a worker. verl's client gives up 10 s after the program's own time limit, so with a longer wait
    programs would run whose client is gone."""
    busy_status: Literal[504, 429, 503] = 504
    """verl's client retries on 504 only; any other status becomes a reward of -1."""
    max_in_flight_per_client: PositiveInt = 2048
    """Requests of one client being received, waiting or running. The default leaves half of the queue to others."""
    max_cases: PositiveInt = 1024
    """Inputs per `/run_cases` request, which holds one worker for all of them."""
    max_request_bytes: PositiveInt = 64 * MIB
    max_buffered_bytes: PositiveInt = 1 * GIB
    """Total size of request bodies that are being received, waiting or running. Beyond it, clients must retry later."""
    max_request_seconds: PositiveFloat = 60.0
    """Time for the headers to arrive, and again for the body. Clients may be slow, but not forever."""
    max_files: PositiveInt = 4096
    """Files per request, and file names to fetch."""
    max_file_bytes: PositiveInt = 64 * MIB
    """Total size of the files of one request."""
    limits: Limits = Limits()
    """Defaults for what a request does not specify."""
    max_limits: Limits = Limits(
        run_seconds=3600,
        compile_seconds=3600,
        memory_bytes=16 * GIB,
        processes=4096,
        open_files=65536,
        file_bytes=16 * GIB,
        disk_bytes=16 * GIB,
        output_bytes=256 * MIB,
        flood_bytes=16 * GIB,
    )
    """The most a request may ask for. `cpu_seconds` is ignored: real time bounds it."""
    max_sessions: NonNegativeInt = 128
    max_sessions_per_client: NonNegativeInt = 64
    session_idle_seconds: PositiveFloat = 600.0
    """Close a session after this long without use. Clients may ask for less, not for more."""
    grace_seconds: NonNegativeFloat = 10.0
    """How long running programs may continue after the service is asked to stop."""

    @property
    def all_tokens(self) -> tuple[Token, ...]:
        return (Token(name=ONLY_CLIENT, secret=self.token), *self.tokens) if self.token else self.tokens

    def check(self) -> None:
        """
        Raises:
            ConfigError: the settings contradict each other.
        """
        for _, message in exceeded_limits(dict(self.limits), self.max_limits):
            raise ConfigError(f"the default exceeds the maximum: {message}")
        self.tls_context()

    def tls_context(self) -> ssl.SSLContext | None:
        """
        Raises:
            ConfigError: certificate and key cannot be read, or do not belong together.
        """
        if self.tls_cert is None:
            if self.tls_key is not None:
                raise ConfigError(f"TLS key {str(self.tls_key)!r}: no certificate is set for it")
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        named = " and ".join(str(path) for path in (self.tls_cert, self.tls_key) if path is not None)
        try:
            context.load_cert_chain(self.tls_cert, self.tls_key, password=_no_password)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise ConfigError(f"TLS certificate and key {named}: {reason}") from error
        return context


def _no_password() -> str:
    # Otherwise OpenSSL prompts for one on the terminal, and a service has no user there.
    raise ValueError("the key is password-protected; use a key without a password")


WIRE_NAMES = {"run_seconds": "run_timeout", "compile_seconds": "compile_timeout", "memory_bytes": "memory_limit_MB"}


def exceeded_limits(asked: Mapping[str, Any], most: Limits) -> Iterator[tuple[str, str]]:
    """Yield each of `asked` (keyed by `Limits` field) that is above `most`: its name, and a message."""
    for name, value in asked.items():
        allowed = getattr(most, name)
        if value is not None and allowed is not None and value > allowed:
            detail = f"{_in_unit(name, value)}; this server allows at most {_in_unit(name, allowed)}"
            yield name, f"{WIRE_NAMES.get(name, name)} is {detail}"


def _in_unit(name: str, value: Any) -> str:
    if name == "memory_bytes":
        return f"{value / MIB:.10g} MB"
    return f"{value:g} s" if name.endswith("_seconds") else str(value)
