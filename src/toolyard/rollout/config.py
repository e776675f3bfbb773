"""The settings of a run: a YAML file, every key of which the command line can override."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, get_args

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SecretStr,
    ValidationError,
)

from toolyard import settings
from toolyard.chat.protocol import TOOL_WRAPPER
from toolyard.engines.protocol import Sampling
from toolyard.errors import ConfigError
from toolyard.messages import JSON
from toolyard.rewards.combination import Weights
from toolyard.rollout.budget import RolloutLimits

EMBEDDED = Path(__file__).with_name("embedded.yaml")
"""What `toolyard rollout` does if it is told nothing: a small model on the CPU and the bundled problems."""
_SHOWN = 80
"""Characters of a wrong value or override that its message shows."""
OWN_TASKS = ("tasks.limit=null", "prompt.system=null", "prompt.examples=[]", "prompt.instruction=null")
"""Takes out of `EMBEDDED` what is made for the bundled problems: other tasks are played as they are."""
SETTINGS_BESIDE_DUMP = "rollout.json"
"""Lies in a dump's folder: the settings it was made with."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class EngineConfig(_Part):
    kind: Literal["transformers", "sglang", "vllm", "openai", "scripted", "replay"] = "transformers"
    """transformers: embedded, in this process. scripted: says what a file says. replay: what a tape recorded."""
    model: str | None = None
    """The embedded model: `smollm2-135m`, a folder, a .gguf file or a hub id. For servers: whose tokenizer and chat
    template are used; openai: the name that the server knows."""
    adapter: str | None = None
    """transformers: a folder with a LoRA adapter in PEFT's format, which is merged into the model's weights."""
    urls: tuple[str, ...] = ()
    """Of servers. A request stays with one of them, whose cache knows its beginning."""
    api_key: SecretStr | None = None
    """`${NAME}` takes it from the environment."""
    request_timeout_seconds: PositiveFloat = 600.0
    """Of one request, all tries at all servers included."""
    silence_seconds: PositiveFloat = 30.0
    """Several servers: requests leave one that has answered nothing for so long while others answer. One that does not
    answer its health check either is left sooner."""
    script: str | None = None
    """scripted: a JSON file: a list of what the assistant says turn by turn, or an object of such lists by task id."""
    tape: str | None = None
    """replay: whose samples are played, while tools and rewards are real."""
    device: str = "auto"
    dtype: str = "auto"
    max_batch_size: PositiveInt = 16
    """transformers: requests that are sampled at the same time."""


class ChatConfig(_Part):
    format: str = "auto"
    """auto, code_block, hermes, …: `toolyard chat check --help` lists them."""
    chat_template: str | None = None
    """A Jinja file, in place of the tokenizer's own."""
    tool_role: Literal["auto", "tool", "user"] = "auto"
    """Who tells the model what its tools answered: user, for models that know no other role. auto asks the template."""
    tool_wrapper: str = TOOL_WRAPPER
    """The text around it where that is a user, with `{}` for it."""
    syntax_options: JSON = Field(default_factory=dict[str, Any])
    """Of the syntax of calls: `{tool: python, argument: code}` for code_block, say."""
    near_miss: Literal["tell", "ignore"] = "ignore"
    """What becomes of text that looks like a call, but is not written as the format writes calls. tell: answered like a
    malformed call. ignore: an ordinary message. Either way the summary counts them."""
    images: Literal["auto", "show", "hide"] = "auto"
    """Whether a model sees the images that its tools return, or reads a line about each. auto: shown if the template
    has a place for them and the engine takes them (sglang, vllm). openai: hidden unless this says show, since nobody
    knows whether the server's model takes images."""
    template_kwargs: JSON = Field(default_factory=dict[str, Any])
    """What the template takes besides messages: enable_thinking, say."""


class PromptConfig(_Part):
    system: str | None = None
    """In place of the task's system message. None: as the task has it."""
    examples: tuple[JSON, ...] = ()
    """Messages between the system message and the task's own: a worked example."""
    instruction: str | None = None
    """Appended to the task's last message."""


class TaskConfig(_Part):
    path: str = "word-problems"
    """A .jsonl or .parquet file, or `word-problems`, which is bundled."""
    limit: PositiveInt | None = None
    """The first so many."""
    skip_bad_rows: bool = False


class RewardConfig(_Part):
    final: str = "gsm8k"
    """gsm8k, gsm8k:strict, math, code, code:fraction, code:continuous, default (by the task's data source), none, or
    `module:function` with verl's signature compute_score(data_source, solution_str, ground_truth, extra_info)."""
    options: JSON | None = None
    """Settings of the final reward: `{memory_limit_mb: 512}` for code, say; of a function, keyword arguments."""
    weights: Weights = Field(default_factory=Weights)


class InteractionConfig(_Part):
    class_name: str
    """Of a class that inherits from toolyard.rollout.interaction.BaseInteraction."""
    config: JSON = Field(default_factory=dict[str, Any])


class RolloutConfig(_Part):
    """Everything about a run. Paths are relative to the working directory."""

    tasks: TaskConfig = Field(default_factory=TaskConfig)
    prompt: PromptConfig = Field(default_factory=PromptConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    chat: ChatConfig = Field(default_factory=ChatConfig)
    sampling: Sampling = Field(default_factory=Sampling)
    tools: str | None = None
    """A YAML file of tools. None: Toolyard's own `code_interpreter` alone."""
    limits: RolloutLimits = Field(default_factory=RolloutLimits)
    rewards: RewardConfig = Field(default_factory=RewardConfig)
    interaction: InteractionConfig | None = None
    n: PositiveInt = 1
    """Samples of each task: a group."""
    concurrency: PositiveInt | None = None
    """Requests at once. None: 256; with the embedded engine, twice as many as it samples at the same time."""
    seed: int | None = 0
    """Of everything that is sampled here. None: engines choose."""
    step: NonNegativeInt = 0
    """The training step: names the file of the dump, and is part of every request's id."""
    rollout_data_dir: str | None = None
    """Where trajectories are dumped, as `<step>.jsonl`. None: nowhere."""
    retry_failed: bool = False
    """Play those again that the dump has as failed; their lines are replaced."""
    accept_changes: bool = False
    """Go on with a dump that was begun with other settings or tasks. Every line from then on names the changes."""
    record: str | None = None
    """A tape to write."""
    replay: str | None = None
    """A tape to play: no model, no tools."""

    @property
    def in_flight(self) -> int:
        """Requests at once. More than the embedded engine has room for would only wait in it, and look stuck."""
        embedded = self.engine.kind == "transformers" and self.replay is None
        return self.concurrency or (2 * self.engine.max_batch_size if embedded else 256)


Settings = TypeVar("Settings", bound=BaseModel)


def load_config(path: str | Path | None = None, overrides: Mapping[str, Any] | Sequence[str] = ()) -> RolloutConfig:
    """The settings of a YAML file (None: the defaults), with `overrides`: a nested mapping, or texts `a.b=value`, where
    the value is read as YAML.

    Raises:
        ConfigError: the file, an override or a key is wrong; the message names it.
    """
    place = "settings" if path is None else str(path)
    given = {} if path is None else read_settings(Path(path))
    given = merged(given, overrides) if isinstance(overrides, Mapping) else overridden(given, overrides)
    return validated(RolloutConfig, given, place, overrides)


def validated(
    model: type[Settings], given: JSON, place: str, overrides: Mapping[str, Any] | Sequence[str] = ()
) -> Settings:
    """`given` as a `model`. It is from `place`, and from `overrides`, which are in it already.

    Raises:
        ConfigError: with the first thing that is wrong: who said it, the key, the value, and what is known there.
    """
    try:
        return model.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "the file"
        unknown, missing = first["type"] == "extra_forbidden", first["type"] == "missing"
        problem = "unknown key" if unknown else first["msg"]
        known = _keys_beside(model, first["loc"]) if unknown else ""
        blamed = _override_of(first["loc"][:-1] if missing else first["loc"], overrides)
        if blamed is not None:
            place = "overrides" if isinstance(overrides, Mapping) else f"override {blamed[:_SHOWN]!r}"
            shown = "" if blamed.partition("=")[0] == key else f"{key}: "
            raise ConfigError(f"{place}: {shown}{problem}{known}") from None
        value = "" if missing else f"; given: {str(first['input'])[:_SHOWN]!r}"
        raise ConfigError(f"{place}: {key}: {problem}{value}{known}") from None


def _override_of(key: tuple[int | str, ...], overrides: Mapping[str, Any] | Sequence[str]) -> str | None:
    """The last one that says something about `key`. A mapping has no text of its own: an empty one."""
    if not key:
        return None
    if isinstance(overrides, Mapping):
        return "" if _sets(overrides, key) else None
    return next((text for text in reversed(overrides) if _sets(_parsed(text), key)), None)


def _sets(said: Any, key: tuple[int | str, ...]) -> bool:
    """Whether there is a value at `key`, or in place of all that could be there."""
    for part in key:
        if not isinstance(said, Mapping):
            break
        if part not in said:
            return False
        said = cast("Mapping[Any, Any]", said)[part]
    return True


def overridden(given: JSON, overrides: Iterable[str]) -> JSON:
    """`given` with texts `a.b=value` put into it, one after the other.

    Raises:
        ConfigError: one of them is no such text.
    """
    for override in overrides:
        given = merged(given, _parsed(override))
    return given


def _keys_beside(root: type[BaseModel], place: tuple[int | str, ...]) -> str:
    model: type[BaseModel] | None = root
    for key in place[:-1]:
        field = None if model is None else model.model_fields.get(str(key))
        model = None if field is None else _model_in(field.annotation)
    return "" if model is None else f"; known here: {', '.join(model.model_fields)}"


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Of `Part` and of `Part | None`: `Part`."""
    parts: tuple[Any, ...] = get_args(annotation) or (annotation,)
    return next((part for part in parts if isinstance(part, type) and issubclass(part, BaseModel)), None)


def read_settings(path: Path) -> JSON:
    """What a YAML file of settings says, with `${NAME}` from the environment.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        text = settings.expanded(path.read_text(encoding="utf-8"))
        found: Any = yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except KeyError as error:
        raise ConfigError(f"{path}: the environment variable {error} is not set") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: expected a mapping of settings, not {type(found).__name__}")
    return cast("JSON", found)


def _parsed(override: str) -> JSON:
    key, equals, value = override.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"override {override!r}: expected key=value, as in limits.response_length=2048")
    try:
        parsed: Any = yaml.safe_load(value)
    except yaml.YAMLError:
        raise ConfigError(f"override {override!r}: the value is not valid YAML") from None
    for part in reversed(key.split(".")):
        parsed = {part: parsed}
    return parsed


def merged(under: JSON, over: Mapping[str, Any]) -> JSON:
    """`under` with what `over` says in its place, key by key at every depth."""
    result = dict(under)
    for key, value in over.items():
        below: Any = result.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            result[key] = merged(cast("JSON", below), cast("JSON", value))
        else:
            result[key] = value
    return result
