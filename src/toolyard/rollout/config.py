"""The settings of a run: a YAML file. The command line can override every key."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, cast, get_args

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SecretStr,
    ValidationError,
    model_validator,
)

from toolyard import settings
from toolyard.chat.protocol import TOOL_WRAPPER
from toolyard.engines.protocol import Sampling
from toolyard.errors import ConfigError
from toolyard.messages import JSON
from toolyard.rewards.combination import Weights
from toolyard.rollout.budget import RolloutLimits
from toolyard.sandbox.protocol import Limits

EMBEDDED = Path(__file__).with_name("embedded.yaml")
"""The defaults of `toolyard rollout`: a small model on the CPU and the bundled problems."""
_SHOWN = 80
"""Maximum characters of a wrong value or override shown in the error message."""
OVERRIDES_FOR_OWN_TASKS = ("tasks.limit=null", "prompt.system=null", "prompt.examples=[]", "prompt.instruction=null")
"""Overrides that remove from `EMBEDDED` what is specific to the bundled problems; other tasks are played unchanged."""
SETTINGS_BESIDE_DUMP = "rollout.json"
"""The file in a dump's folder with the settings of the run that made it."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class EngineConfig(_Part):
    kind: Literal["transformers", "sglang", "vllm", "openai", "scripted", "replay"] = "transformers"
    """transformers: embedded, in this process. scripted: reads its answers from a file. replay: from a tape."""
    model: str | None = None
    """The embedded model: `smollm2-135m`, a folder, a .gguf file or a hub id. For servers: the model whose tokenizer
    and chat template are used; openai: the model's name on the server."""
    adapter: str | None = None
    """transformers: a folder with a LoRA adapter in PEFT's format. It is merged into the model's weights."""
    urls: tuple[str, ...] = ()
    """Server URLs. All turns of a request go to the same server, to use its prefix cache; so do the first turns of a
    group, if its load allows."""
    directory: str | None = None
    """Instead of `urls`: a file with one URL per line, which may change during the run (`toolyard engines`)."""
    api_key: SecretStr | None = None
    """`${NAME}` reads it from the environment."""
    request_timeout_seconds: PositiveFloat = 600.0
    """Time limit for one HTTP request, including all retries on all servers."""
    silence_seconds: PositiveFloat = 30.0
    """With several servers: move requests away from a server that has been silent this long while others answer. A
    server that also fails its health check is left sooner."""
    script: str | None = None
    """scripted: a JSON file with a list of assistant messages, one per turn, or an object of such lists by task id."""
    tape: str | None = None
    """replay: the tape to take samples from. Tools and rewards still run."""
    device: str = "auto"
    dtype: str = "auto"
    torch_compile: bool = False
    """transformers, on a GPU: let torch compile the model's layers first, which takes up to half a minute and makes
    sampling faster. Needs a C compiler."""
    max_batch_size: PositiveInt = 16
    """transformers: maximum number of requests sampled at the same time."""

    @property
    def has_servers(self) -> bool:
        return self.kind in ("sglang", "vllm", "openai")


class ChatConfig(_Part):
    format: str = "auto"
    """auto, code_block, hermes, …: `toolyard chat check --help` lists them."""
    chat_template: str | None = None
    """A Jinja file that replaces the tokenizer's template."""
    tool_role: Literal["auto", "tool", "user"] = "auto"
    """The role of tool results. user: for models whose template has no tool role. auto: decided by the template."""
    tool_wrapper: str = TOOL_WRAPPER
    """The text around a tool result if `tool_role` is user; `{}` stands for the result."""
    syntax_options: JSON = Field(default_factory=dict[str, Any])
    """Options of the call syntax, for example `{tool: python, argument: code}` for code_block."""
    near_miss: Literal["tell", "ignore"] = "ignore"
    """How to treat text that looks like a call but is not in the format's syntax. tell: answer it like a malformed
    call. ignore: treat it as an ordinary message. The summary counts them either way."""
    images: Literal["auto", "show", "hide"] = "auto"
    """Whether the model sees the images that tools return, or a line of text for each. auto: shown if the template has
    a place for them and the engine accepts them (sglang, vllm). openai: hidden unless set to show, because there is no
    way to tell whether the server's model accepts images."""
    template_kwargs: JSON = Field(default_factory=dict[str, Any])
    """Extra variables for the template, for example enable_thinking."""


class PromptConfig(_Part):
    system: str | None = None
    """Replaces the task's system message. None: keep the task's."""
    examples: tuple[JSON, ...] = ()
    """Messages between the system message and the task's own: a worked example."""
    instruction: str | None = None
    """Appended to the task's last message."""


class TaskConfig(_Part):
    path: str = "word-problems"
    """A file (.jsonl, .json, their .gz, .parquet, .arrow), a folder of them (FOLDER or FOLDER:SPLIT), a data set on the
    Hugging Face hub (hf://OWNER/NAME[@REVISION][/CONFIG][:SPLIT]), or the bundled `word-problems`."""
    fields: dict[str, str] | None = None
    """Renames fields of rows: `{prompt: problem}` takes `problem` as the prompt."""
    limit: PositiveInt | None = None
    """Use only the first N tasks."""
    skip_bad_rows: bool = False


class RewardConfig(_Part):
    final: str = "gsm8k"
    """gsm8k, gsm8k:strict, math, code, code:fraction, code:continuous, judge (a language model), default (by the task's
    data source), none, or `module:function` with verl's signature compute_score(data_source, solution_str,
    ground_truth, extra_info)."""
    options: JSON | None = None
    """Settings of the final reward, such as `{memory_limit_mb: 512}` for code; for a function, keyword arguments."""
    weights: Weights = Field(default_factory=Weights)


class InteractionConfig(_Part):
    class_name: str
    """Dotted name of a subclass of toolyard.rollout.interaction.BaseInteraction."""
    config: JSON = Field(default_factory=dict[str, Any])


class AgentSandboxConfig(_Part):
    """Runs an agent's command in the sandbox: it sees `folder`, the interpreter and the system's programs, and reaches
    nothing but the gateway."""

    folder: str
    """Where the command starts. It can read it, and write to `$HOME` and `/tmp` only."""
    limits: Limits = Limits()
    """For memory, processes and files; its time is limited by the rollout's limits."""

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, given: Any) -> Any:
        return {"folder": given} if isinstance(given, str) else given


class AgentConfig(_Part):
    """An agent that plays the requests in place of Toolyard's own loop. It talks to the gateway, whose address is in
    its environment: OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY."""

    run: str
    """A command, in which `{task}` is the path of a JSON file and `{prompt}` the text of the task's last message; the
    JSON is on its standard input, too. Or `package.module:function`, which is called with an `AgentTask`."""
    score_from: Literal["messages", "output", "printed", "file"] = "messages"
    """messages, output: `rewards.final` judges what the model said on the main branch, or what the agent printed.
    printed: the last line that the agent prints is the score. file: the score is in the file $TOOLYARD_REWARD. A
    function returns it instead."""
    env: dict[str, str] = Field(default_factory=dict[str, str])
    """Variables that are added to the command's environment."""
    cwd: str | None = None
    """The command's folder. None: this one."""
    sandbox: AgentSandboxConfig | None = None
    """None: the command runs as your own program, with your environment. A string means `folder`."""
    fixed_sampling: bool = True
    """Sample as `sampling` says, whatever temperature, top_p, top_k and seed the agent asks for."""
    grace_seconds: PositiveFloat = 10.0
    """How long the agent may go on after the gateway has told it of a limit. Then it is killed."""

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, given: Any) -> Any:
        return {"run": given} if isinstance(given, str) else given


class ClusterConfig(_Part):
    """A Ray cluster whose nodes play the requests."""

    address: str = "auto"
    """Cluster address: `auto` for the one this machine belongs to, `host:port`, or `local` for a new one on this
    machine only."""
    workers: PositiveInt | None = None
    """None: one for each node."""
    cpus: NonNegativeFloat = 1.0
    """CPUs that Ray reserves for each worker."""
    gpus: NonNegativeFloat = 0.0
    """GPUs that Ray reserves for each worker: with the embedded engine, each worker has the model."""
    resource: str | None = None
    """Use only nodes with this Ray resource, for example `sandbox`."""
    term_seconds: PositiveFloat = 4.0
    """A worker that was silent for this long loses its requests to others."""
    shared_folder: bool = True
    """Workers that see the dump's folder write results and journals there. False, or if
    they do not see it: they send everything to the driver."""
    runtime_env: JSON = Field(default_factory=dict[str, Any])
    """Ray's runtime environment of the workers, for example `{working_dir: .}` if they do not share this one."""


class MetricsConfig(_Part):
    """An HTTP endpoint of the run: `/metrics` for Prometheus, `/status` for `toolyard top`."""

    port: int = Field(0, ge=0, le=65535)
    """0: any free port, which is printed."""
    host: str = "127.0.0.1"
    """Any other address makes the figures, request ids and task ids visible on the network."""


class LogConfig(_Part):
    """Logs of the run. They name requests and tasks, but contain no prompts and no answers."""

    format: Literal["text", "json"] = "text"
    """json: one object per line."""
    file: str | None = None
    """Append to this file. None: stderr."""
    level: Literal["debug", "info", "warning", "error"] = "info"
    """debug: also every change of a request's state."""


class RolloutConfig(_Part):
    """Everything about a run. Paths are relative to the working directory."""

    tasks: TaskConfig = Field(default_factory=TaskConfig)
    prompt: PromptConfig = Field(default_factory=PromptConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    chat: ChatConfig = Field(default_factory=ChatConfig)
    sampling: Sampling = Field(default_factory=Sampling)
    tools: str | None = None
    """A YAML file of tools. None: only Toolyard's `code_interpreter`."""
    limits: RolloutLimits = Field(default_factory=RolloutLimits)
    rewards: RewardConfig = Field(default_factory=RewardConfig)
    interaction: InteractionConfig | None = None
    agent: AgentConfig | None = None
    """An agent that handles the requests; a string means `run`. Turns, tokens and time are limited by `limits`. It
    brings its own tools, so `tools` is not used."""
    n: PositiveInt = 1
    """Samples per task; together they are a group."""
    concurrency: PositiveInt | None = None
    """Maximum number of requests in flight; on a cluster, in each worker. None: 256; with the embedded engine, twice
    its `max_batch_size`."""
    adaptive_concurrency: bool = False
    """Start fewer requests while the engine's servers report queued requests (SGLang, vLLM); at most
    `concurrency`. On a cluster, each worker does so for itself."""
    seed: int | None = 0
    """Seed for all sampling. None: engines choose."""
    step: NonNegativeInt = 0
    """The training step: it names the dump's file, and is part of every request's id."""
    rollout_data_dir: str | None = None
    """Folder for the dump, `<step>.jsonl`. None: no dump."""
    retry_failed: bool = False
    """Play failed requests of the dump again and replace their lines."""
    accept_changes: bool = False
    """Continue a dump started with different settings or tasks. Each new line records the changes."""
    cluster: ClusterConfig | None = None
    """Run on a Ray cluster. None: in this process."""
    metrics: MetricsConfig | None = None
    """Serve figures of the run over HTTP. None: do not."""
    logs: LogConfig | None = None
    """None: only warnings, as plain text on stderr."""
    faults: str | None = None
    """Inject faults: flaky-engine, flaky-tools, chaos, or a YAML file of your own."""
    record: str | None = None
    """Write a tape to this file."""
    replay: str | None = None
    """Play this tape: no model, no tools."""
    otel: str | None = None
    """Send traces to this OpenTelemetry collector (OTLP over HTTP), for example `http://127.0.0.1:4318`. `env`: to the
    one in OTEL_EXPORTER_OTLP_ENDPOINT."""

    @model_validator(mode="after")
    def _agent_alone(self) -> Self:
        other = "cluster" if self.cluster is not None else "interaction" if self.interaction is not None else None
        if self.agent is not None and other is not None:
            raise ValueError(f"agent and {other} cannot be used together")
        return self

    @property
    def in_flight(self) -> int:
        """Maximum number of requests in flight. More than the embedded engine has room for would only wait in its
        queue."""
        embedded = self.engine.kind == "transformers" and self.replay is None
        return self.concurrency or (2 * self.engine.max_batch_size if embedded else 256)


Settings = TypeVar("Settings", bound=BaseModel)


def load_config(path: str | Path | None = None, overrides: Mapping[str, Any] | Sequence[str] = ()) -> RolloutConfig:
    """Load the settings from a YAML file (None: the defaults) and apply `overrides`: a nested mapping, or strings
    `a.b=value`, whose values are parsed as YAML.

    Raises:
        ConfigError: the file, an override or a key is invalid; the message names it.
    """
    place = "settings" if path is None else str(path)
    given = {} if path is None else read_settings(Path(path))
    given = merged(given, overrides) if isinstance(overrides, Mapping) else overridden(given, overrides)
    return validated(RolloutConfig, given, place, overrides)


def validated(
    model: type[Settings], given: JSON, place: str, overrides: Mapping[str, Any] | Sequence[str] = ()
) -> Settings:
    """Validate `given` as a `model`. `place` names its origin in messages; `overrides` are already merged into it.

    Raises:
        ConfigError: names the first problem: the file or override, the key, the value, and the known keys.
    """
    try:
        return model.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "the file"
        unknown, missing = first["type"] == "extra_forbidden", first["type"] == "missing"
        problem = "unknown key" if unknown else first["msg"].removeprefix("Value error, ")
        known = _keys_beside(model, first["loc"]) if unknown else ""
        blamed = _override_of(first["loc"][:-1] if missing else first["loc"], overrides)
        if blamed is not None:
            place = "overrides" if isinstance(overrides, Mapping) else f"override {blamed[:_SHOWN]!r}"
            shown = "" if blamed.partition("=")[0] == key else f"{key}: "
            raise ConfigError(f"{place}: {shown}{problem}{known}") from None
        # A section may contain keys of APIs, and need not be shown.
        is_section = isinstance(cast("object", first["input"]), Mapping)
        hidden = missing or is_section or first["loc"][-1:] == ("api_key",)
        value = "" if hidden else f"; given: {str(first['input'])[:_SHOWN]!r}"
        raise ConfigError(f"{place}: {key}: {problem}{value}{known}") from None


def _override_of(key: tuple[int | str, ...], overrides: Mapping[str, Any] | Sequence[str]) -> str | None:
    """The last override that sets `key`, or None. For a mapping, which has no text, an empty string."""
    if not key:
        return None
    if isinstance(overrides, Mapping):
        return "" if _sets(overrides, key) else None
    return next((text for text in reversed(overrides) if _sets(_parsed(text), key)), None)


def _sets(said: Any, key: tuple[int | str, ...]) -> bool:
    """Whether there is a value at `key` or at one of its parents."""
    for part in key:
        if not isinstance(said, Mapping):
            break
        if part not in said:
            return False
        said = cast("Mapping[Any, Any]", said)[part]
    return True


def overridden(given: JSON, overrides: Iterable[str]) -> JSON:
    """Apply overrides of the form `a.b=value` to `given`, in order.

    Raises:
        ConfigError: an override does not have this form.
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
    """`Part`, given `Part` or `Part | None`."""
    parts: tuple[Any, ...] = get_args(annotation) or (annotation,)
    return next((part for part in parts if isinstance(part, type) and issubclass(part, BaseModel)), None)


def read_settings(path: Path) -> JSON:
    """Read a YAML file of settings; `${NAME}` in a value is replaced from the environment.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        found: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: expected a mapping of settings, not {type(found).__name__}")
    try:  # only now: a value must not be taken for YAML, or be shown in a complaint about it
        return {key: settings.expanded(value, f"{path}: {key}") for key, value in cast("JSON", found).items()}
    except settings.UnsetVariableError as error:
        raise ConfigError(str(error)) from None


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
    """Merge two nested mappings; values of `over` replace those of `under`."""
    result = dict(under)
    for key, value in over.items():
        below: Any = result.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            result[key] = merged(cast("JSON", below), cast("JSON", value))
        else:
            result[key] = value
    return result
