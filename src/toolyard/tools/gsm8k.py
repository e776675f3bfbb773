"""`calc_gsm8k_reward` tells the model the reward of its answer to a GSM8K problem, so that it can try again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from toolyard.errors import ConfigError
from toolyard.messages import OpenAIFunctionToolSchema
from toolyard.rewards import gsm8k
from toolyard.rewards.explanation import Explanation, explain
from toolyard.tools.base import BaseTool, ToolResponse
from toolyard.tools.policy import Recovery
from toolyard.tools.trajectories import Trajectories

_MARK = "#### "

SCHEMA = OpenAIFunctionToolSchema.model_validate(
    {
        "type": "function",
        "function": {
            "name": "calc_gsm8k_reward",
            "description": "A tool for calculating the reward of gsm8k",
            "parameters": {
                "type": "object",
                "properties": {
                    "answer": {"type": "string", "description": "The model's answer to the GSM8K math problem"}
                },
                "required": ["answer"],
            },
        },
    }
)
"""As in verl."""


class Gsm8kConfig(BaseModel):
    """The tool's `config` in YAML."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: gsm8k.Method = "flexible"
    """How the answer is parsed and compared. `strict` does not accept 18.0 for 18."""
    format_score: FiniteFloat = 0.0
    """Score of an answer that is a number, but the wrong one."""
    score: FiniteFloat = 1.0
    """Score of the right answer."""
    penalty: FiniteFloat = Field(-0.05, le=0)
    """Step reward of an answer that does not improve on the best so far: guessing has a cost."""
    type: str = "native"
    call: dict[str, Any] = {}
    """How calls are made: see `CallPolicy`."""


@dataclass(slots=True)
class _State:
    """The state of one trajectory."""

    truth: str
    best: float = 0.0
    """The next answer must exceed it to avoid the penalty."""
    last: float = 0.0
    why: Explanation = field(default_factory=lambda: explain("no answer was given"))


class Gsm8kTool(BaseTool):
    """`toolyard.tools.gsm8k.Gsm8kTool` in YAML. Every trajectory needs its `ground_truth` in `create_kwargs`."""

    call_defaults: Mapping[str, Any] = {"recovery": Recovery.RERUN, "repeatable": True}

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        super().__init__(config, tool_schema)
        try:
            self.settings = Gsm8kConfig.model_validate(config)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ConfigError(f"config.{where}: {first['msg']}; given: {first['input']!r}") from None
        self._trajectories: Trajectories[_State] = Trajectories(self._new_state)

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return getattr(self, "tool_schema", None) or SCHEMA

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Start a trajectory; `ground_truth` is its problem's answer, in any form that `final_answer` reads.

        Raises:
            ConfigError: it is missing or not a number.
        """
        return self._trajectories.begin(instance_id, kwargs)[0], ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """Score an answer. The step reward is 0.0 if it improves on all previous answers, otherwise the penalty."""
        state = self._trajectories.of(instance_id, kwargs)
        answer = parameters.get("answer", "")
        if not isinstance(answer, str):  # models often give a number where a string is expected
            answer = str(answer)
        reward, state.why = self._score(answer, state.truth)
        step = 0.0 if reward > state.best else self.settings.penalty
        state.best, state.last = max(state.best, reward), reward
        metrics = {"score": reward, "best_score": state.best}
        return ToolResponse(text=f"Current parsed {answer=} {reward=}"), step, metrics

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """The score of the last answer, 0.0 if none was given.

        verl also scores the last answer, not the best: what the model ends with is its answer. If the best counted,
        trying every number would score as high as knowing the answer.
        """
        return self._trajectories.of(instance_id, kwargs).last

    async def explain_reward(self, instance_id: str) -> Mapping[str, Any]:
        return self._trajectories.of(instance_id, {}).why.as_json()

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self._trajectories.end(instance_id)

    async def close(self) -> None:
        self._trajectories.drain()

    def _new_state(self, ground_truth: Any = None, **others: Any) -> _State:
        if ground_truth is None:
            raise ConfigError(
                f"tool {self.name!r}: create needs ground_truth: give each row "
                f"tools_kwargs[{self.name!r}]['create_kwargs']['ground_truth']"
            )
        return _State(gsm8k.final_answer(ground_truth))

    def _score(self, answer: str, truth: str) -> tuple[float, Explanation]:
        settings = self.settings
        # verl puts the mark before every answer. Not for `flexible`: it would read "3 + 15 = 18" as 3, where verl's
        # scorer reads 18.
        if settings.method == "strict" and _MARK not in answer:
            answer = _MARK + answer.strip()
        return gsm8k.explained_score(answer, truth, settings.method, settings.format_score, settings.score)
