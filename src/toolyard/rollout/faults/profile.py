"""Which faults a run gets, and how often: a YAML file, or one of the bundled profiles.

Whether a fault strikes depends only on the profile's seed and on where in the run it could: the request, the turn, the
attempt. So the same seed injects the same faults, however long anything takes.
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from toolyard.errors import ConfigError
from toolyard.rollout.config import read_settings, validated

_FOLDER = Path(__file__).with_name("profiles")
BUNDLED = tuple(sorted(path.stem for path in _FOLDER.glob("*.yaml")))
_LONGEST = 7 * 86400.0


class Chance(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    rate: float = Field(ge=0, le=1)
    """The share of opportunities at which it strikes: 0 never, 1 always."""


class Delay(Chance):
    seconds: float = Field(gt=0, le=_LONGEST)


class ServerError(Chance):
    status: Literal[500, 502, 503, 504] = 503


class ServerBusy(Chance):
    retry_after_seconds: float = Field(0.1, ge=0, le=_LONGEST)


class FaultProfile(BaseModel):
    """A kind that is left out does not occur. Engine faults exclude each other: the first that strikes counts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = ""
    """In reports and dumps; by default the name of the file."""
    seed: int = 0
    if_missing: Literal["error", "skip"] = "error"
    """What to do about kinds that this run cannot have, such as `worker_kill` in one process. error: do not start.
    skip: say so and go on without them."""

    engine_error: ServerError | None = None
    """Per attempt: the server answers with `status`. Engines in this process raise an error."""
    engine_busy: ServerBusy | None = None
    """Per attempt: the server answers 429 with Retry-After."""
    engine_reset: Chance | None = None
    """Per attempt: the connection is reset."""
    engine_stall: Delay | None = None
    """Per attempt: nothing happens for `seconds`, then the attempt goes on."""
    tool_timeout: Delay | None = None
    """Per call: the tool hangs, and its time limit is `seconds`."""
    malformed_call: Chance | None = None
    """Per message with calls: none of them can be parsed. The sampled tokens stay as they are."""
    sandbox_kill: Chance | None = None
    """Per program that a tool runs in the embedded sandbox: kill -9 of the worker that runs it."""
    limiter_kill: Chance | None = None
    """Per call of `code_interpreter`: the actor of its limiter on Ray is killed."""
    worker_kill: Chance | None = None
    """Per line of the dump, on a cluster: kill -9 of one of the workers."""
    slow_disk: Delay | None = None
    """Per line of the dump: writing it takes `seconds` longer."""

    def strikes(self, kind: str, *place: object) -> bool:
        """Whether this kind strikes at `place`: always the same answer for the same seed and place."""
        fault: Chance | None = getattr(self, kind)
        return fault is not None and _drawn(self.seed, kind, *place) < fault.rate

    def choice(self, count: int, *place: object) -> int:
        """A number below `count`."""
        return int(_drawn(self.seed, "choice", *place) * count)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Those that may strike."""
        found = {name: getattr(self, name) for name in type(self).model_fields}
        return tuple(name for name, fault in found.items() if isinstance(fault, Chance) and fault.rate > 0)

    @property
    def mark(self) -> dict[str, Any]:
        """For the lines of the dump."""
        return {"profile": self.name, "seed": self.seed}


def load_profile(spec: str) -> FaultProfile:
    """
    Args:
        spec: The name of a bundled profile, or the path of a YAML file.

    Raises:
        ConfigError: there is no such profile, or it is invalid; the message names the key.
    """
    path = _FOLDER / f"{spec}.yaml" if spec in BUNDLED else Path(spec)
    if not path.is_file():
        raise ConfigError(f"faults {spec!r}: no such file; the bundled profiles are {', '.join(BUNDLED)}")
    return validated(FaultProfile, {"name": path.stem, **read_settings(path)}, spec)


def _drawn(*place: object) -> float:
    """A number of [0, 1), evenly distributed over places."""
    digest = blake2b("\0".join(map(str, place)).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53
