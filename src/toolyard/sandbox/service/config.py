"""How to serve: addresses, tokens, and the most that a client may ask for."""

from __future__ import annotations

import ssl
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from toolyard.errors import ConfigError
from toolyard.sandbox.protocol import GIB, MIB, Limits

ONLY_CLIENT = "default"
"""The name of a token that was given without one."""


class Token(BaseModel):
    """What a client proves itself by, and what it is called then. A client may have several, to change them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1)
    secret: str = Field(min_length=1, repr=False)


def read_tokens(lines: Iterable[str]) -> tuple[Token, ...]:
    """Tokens as `--token` and `--token-file` have them: SECRET or NAME SECRET. Empty lines and # comments are skipped.

    Raises:
        ConfigError: there is none, one cannot be sent in a header, or two clients have the same.
    """
    found: dict[str, Token] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        # No message shows a word of the line: it may be a secret.
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
    """How to serve. What to serve, the sandbox, is handed over beside it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    port: int = Field(default=8080, ge=0, le=65535)
    """0: any free one."""
    allow_hosts: tuple[str, ...] = ()
    """Names that requests may be sent to, beside those that `toolyard.hosts.OwnNames` always takes."""
    token: str | None = Field(default=None, min_length=1, repr=False)
    """Clients must send it as `Authorization: Bearer`. None, and no `tokens`: who can connect may run programs."""
    tokens: tuple[Token, ...] = ()
    """More of them, with names: limits for each client go by name, and without tokens by address."""
    allow_remote: bool = False
    """Bind beyond loopback although there is no token."""
    tls_cert: Path | None = None
    """PEM. With it, the service speaks HTTPS only."""
    tls_key: Path | None = None
    """None: it is in the file of the certificate."""
    max_waiting: NonNegativeInt = 4096
    """Programs that wait for a worker at once. The next is turned away at the door."""
    max_wait_seconds: PositiveFloat = 8.0
    """Longest wait for a worker. verl's client gives up 10 s after what the program itself may take, so a longer wait
    would run programs whose client is gone."""
    busy_status: Literal[504, 429, 503] = 504
    """verl's client tries again on 504 alone; any other status becomes a reward of -1."""
    max_in_flight_per_client: PositiveInt = 2048
    """Requests of one client that are being sent, wait or run. Half of the queue: the other half is for others."""
    max_cases: PositiveInt = 1024
    """Inputs in one request to `/run_cases`, which holds one worker for all of them."""
    max_request_bytes: PositiveInt = 64 * MIB
    max_buffered_bytes: PositiveInt = 1 * GIB
    """All request bodies that are being read, wait or run, together. Whatever needs more is told to come back."""
    max_request_seconds: PositiveFloat = 60.0
    """For the headers to arrive, and then for the body. A client may be slow, but not for ever."""
    max_files: PositiveInt = 4096
    """Files in one request, and names of files to fetch."""
    max_file_bytes: PositiveInt = 64 * MIB
    """All files of one request together."""
    limits: Limits = Limits()
    """For what a request does not say."""
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
    """The most a request may ask for. `cpu_seconds` is not looked at: real time bounds it."""
    max_sessions: NonNegativeInt = 128
    max_sessions_per_client: NonNegativeInt = 64
    session_idle_seconds: PositiveFloat = 600.0
    """A session that nobody used for this long is closed. Clients may ask for less, not for more."""
    grace_seconds: NonNegativeFloat = 10.0
    """How long running programs may go on once the service was told to stop."""

    @property
    def all_tokens(self) -> tuple[Token, ...]:
        return (Token(name=ONLY_CLIENT, secret=self.token), *self.tokens) if self.token else self.tokens

    def check(self) -> None:
        """
        Raises:
            ConfigError: it contradicts itself.
        """
        for _, message in excesses(dict(self.limits), self.max_limits):
            raise ConfigError(f"the default is more than the maximum: {message}")
        self.tls_context()

    def tls_context(self) -> ssl.SSLContext | None:
        """
        Raises:
            ConfigError: certificate and key cannot be read, or do not belong together.
        """
        if self.tls_cert is None:
            if self.tls_key is not None:
                raise ConfigError(f"TLS key {str(self.tls_key)!r}: there is no certificate for it")
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
    # Else OpenSSL asks for one on the terminal, which a service has nobody at.
    raise ValueError("the key has a password; give one without")


WIRE_NAMES = {"run_seconds": "run_timeout", "compile_seconds": "compile_timeout", "memory_bytes": "memory_limit_MB"}


def excesses(asked: Mapping[str, Any], most: Limits) -> Iterator[tuple[str, str]]:
    """Each of `asked`, by the names of `Limits`, that is above `most`: its name, and a sentence that says so."""
    for name, value in asked.items():
        allowed = getattr(most, name)
        if value is not None and allowed is not None and value > allowed:
            told = f"{_in_unit(name, value)}; this server allows at most {_in_unit(name, allowed)}"
            yield name, f"{WIRE_NAMES.get(name, name)} is {told}"


def _in_unit(name: str, value: Any) -> str:
    if name == "memory_bytes":
        return f"{value / MIB:.10g} MB"
    return f"{value:g} s" if name.endswith("_seconds") else str(value)
