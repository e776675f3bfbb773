"""Settings of the agent loop for verl: the keys of its entry in `agent_loop_config_path`, which override verl's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from toolyard.errors import ConfigError
from toolyard.messages import JSON
from toolyard.rewards.combination import Weights
from toolyard.rollout.budget import RolloutLimits
from toolyard.rollout.config import AgentConfig, ChatConfig, InteractionConfig

PLACE = "agent loop toolyard"
NO_REWARD = "none"


class VerlSettings(BaseModel):
    """Settings of the agent loop. Paths are relative to the working directory of verl's workers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tool_config_path: str | None = None
    """A YAML file of tools. None: verl's `rollout.multi_turn.tool_config_path`; if that is not set either, no tools."""
    chat: ChatConfig = Field(default_factory=ChatConfig)
    """`template_kwargs` are added to verl's `data.apply_chat_template_kwargs` and override them. verl's
    `multi_turn.format` names one of verl's parsers and is ignored."""
    reward: str = NO_REWARD
    """gsm8k, math, code, default, `module:function`, …: see `toolyard.rewards.registry`. none: verl's reward workers
    compute the score, by verl's settings."""
    reward_options: JSON | None = None
    reward_weights: Weights = Field(default_factory=Weights)
    """Weights of the rewards of tools, steps and a user simulator relative to `reward`."""
    failure_reward: FiniteFloat = 0.0
    """Reward of a failed trajectory if no other of its group has a score yet; otherwise it gets their mean. It is never
    trained on, but verl has no absent rewards and includes it in the group's mean."""
    limits: RolloutLimits = Field(default_factory=RolloutLimits)
    """Limits not set here come from verl's `rollout` and `rollout.multi_turn`: see `limits_from_verl`."""
    interaction: InteractionConfig | None = None
    agent: AgentConfig | None = None
    """An agent of your own plays the samples: see `AgentConfig`. verl's tools are not used then."""
    rollout_data_dir: str | None = None
    """Folder for dumps, with a subfolder for each worker process, by verl's step. Only verl's newer trainer passes the
    step to agent loops; otherwise the version of the weights is used. Validation is included, since verl does not tell
    agent loops about it. None: no dump."""

    @property
    def scores(self) -> bool:
        return self.reward != NO_REWARD


def settings_of(given: Mapping[str, Any], rollout: Any, template_kwargs: Mapping[str, Any] | None) -> VerlSettings:
    """`given`, merged over verl's `actor_rollout_ref.rollout` and `data.apply_chat_template_kwargs`.

    Raises:
        ConfigError: a key is unknown or invalid, or verl's settings use a feature that only verl's own loop has.
    """
    if rollout.multi_turn.get("function_tool_path"):
        raise ConfigError(
            "rollout.multi_turn.function_tool_path: only verl's own loop supports it; decorate the functions with "
            "toolyard.tools.tool and list them in the tool YAML"
        )
    known = limits_from_verl(rollout)
    wanted: JSON = {key: _plain(value) for key, value in given.items()}
    wanted["limits"] = _over(known, wanted.get("limits"))
    chat: Any = _over({"template_kwargs": {}}, wanted.get("chat"))
    if isinstance(chat, dict):
        chat = {**cast("JSON", chat), "template_kwargs": _over(_plain(template_kwargs or {}), chat["template_kwargs"])}
    wanted["chat"] = chat
    if wanted.get("tool_config_path") is None:
        wanted["tool_config_path"] = rollout.multi_turn.get("tool_config_path")
    try:
        settings = VerlSettings.model_validate(wanted)
    except ValidationError as error:
        raise ConfigError(_told(error)) from None
    for name in ("prompt_length", "response_length"):
        ours, verls = getattr(settings.limits, name), known[name]
        if ours > verls:
            raise ConfigError(f"{PLACE}: limits.{name}: {ours} is more than verl's rollout.{name}, which is {verls}")
    return settings


def limits_from_verl(rollout: Any) -> JSON:
    """verl's settings as Toolyard's limits.

    `max_tool_response_length` counts characters in verl, and tokens here. verl counts tool results as user turns, which
    allows one more assistant message than that. Without a limit in verl, `response_length` is one: each turn has at
    least one token.
    """
    turns = rollout.multi_turn
    rounds = turns.get("max_user_turns")
    counted = [turns.get("max_assistant_turns"), rounds and rounds + 1]
    limits: JSON = {
        "prompt_length": rollout.prompt_length,
        "response_length": rollout.response_length,
        "max_assistant_turns": min([count for count in counted if count] or [rollout.response_length]),
        "max_model_len": rollout.get("max_model_len"),
    }
    for name in ("max_parallel_calls", "max_tool_response_length", "tool_response_truncate_side"):
        limits[name] = turns.get(name)
    return {key: value for key, value in limits.items() if value is not None}


def _over(under: JSON, given: Any) -> Any:
    """`given`, with missing keys taken from `under`. Anything but a mapping is returned unchanged, for validation."""
    if given is None:
        return under
    return {**under, **cast("JSON", given)} if isinstance(given, dict) else given


def _plain(value: Any) -> Any:
    """Convert OmegaConf containers to Python's."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in cast("JSON", value).items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(inner) for inner in cast("Sequence[Any]", value)]
    return value


def _told(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden" and len(first["loc"]) == 1:
        return f"{PLACE}: unknown key {where!r}; expected one of {', '.join(VerlSettings.model_fields)}"
    return f"{PLACE}: {where}: {first['msg']}; given: {str(first['input'])[:80]!r}"
