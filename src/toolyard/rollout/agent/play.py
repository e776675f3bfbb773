"""One request that an agent plays: a session of the gateway from its beginning to its trajectories."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass, field, replace
from functools import partial

from pydantic import TypeAdapter

from toolyard.errors import RewardError
from toolyard.gateway.branches import Branch
from toolyard.gateway.config import SessionLimits
from toolyard.gateway.conversation import SampledTurn
from toolyard.gateway.records import audited, with_branch
from toolyard.gateway.sessions import Session, SessionEnd
from toolyard.messages import JSON
from toolyard.records.trajectory import Failure, Trajectory
from toolyard.rewards.protocol import FinalScore
from toolyard.rollout.agent.run import AgentExit, AgentTask
from toolyard.rollout.blame import OURS, TASK, StageFailure
from toolyard.rollout.budget import RolloutLimits
from toolyard.rollout.finish import FinishReason, RolloutState
from toolyard.rollout.play.conclusion import conclude
from toolyard.rollout.play.play import Play
from toolyard.rollout.play.setting import AgentSetting, ScoreFrom
from toolyard.tokens import ids_crc

_REASONS = {
    SessionEnd.MAX_TURNS: FinishReason.MAX_ASSISTANT_TURNS,
    SessionEnd.MAX_TOKENS: FinishReason.LENGTH,
    SessionEnd.MAX_SECONDS: FinishReason.REQUEST_DEADLINE,
}


@dataclass(frozen=True, slots=True)
class AgentRun:
    """What an agent did."""

    branches: list[Branch]
    """The last is the main one."""
    exit: AgentExit
    limit: SessionEnd | None = None
    engine_failure: str = ""
    """The last failure of the engine that the agent was told of."""
    counts: JSON = field(default_factory=dict[str, object])


_RUN = TypeAdapter[AgentRun | StageFailure](AgentRun | StageFailure)


class AgentPlay(Play):
    """A `Play` in which an agent decides what is said, and calls the tools."""

    async def _run_to_completion(self) -> Trajectory:
        request, limits = self.request, self.setting.limits
        agents = self.setting.agent
        assert agents is not None
        request.stage_since = time.monotonic()
        # The gateway and the agent's own end come first: this bound is for an agent that cannot be killed.
        patience = limits.request_seconds + 2 * agents.grace_seconds + limits.grace_seconds
        self._deadline = self._clock.now() + patience
        request.state, request.waits_for = RolloutState.GENERATING, "the agent"
        began = self.external.now()
        async with self._stack:
            run = await self._asked("agent", self._question, _RUN, self._run_agent, patience)
            self.stages["agent"] = self.external.now() - began
            branches: list[Branch] = []
            if isinstance(run, StageFailure):
                self._end(run.reason, run.failure)
            else:
                branches = run.branches
                self._take(run)
            trajectory = await conclude(self, self._stack, None)
        if not branches:
            return trajectory
        session, count = self.request.request_id, len(branches)
        *others, main = [with_branch(trajectory, branch, session, at, count) for at, branch in enumerate(branches)]
        return replace(main, branches=tuple(map(audited, others)))

    def _question(self) -> JSON:
        request = self.request
        return {"task": request.batch_data_id, "sample": request.rollout_offset, "seed": request.seed}

    async def _run_agent(self) -> AgentRun:
        request, agents = self.request, self.setting.agent
        assert agents is not None
        assert agents.agent is not None
        assert agents.gateway is not None
        sessions, key = agents.gateway.sessions, secrets.token_urlsafe(16)
        session = sessions.create(
            request.request_id,
            key=key,
            limits=_session_limits(self.setting.limits),
            seed=request.seed,
            on_turn=self._note_turn,
        )
        task = AgentTask(
            request.batch_data_id,
            request.task.messages[-1].content,
            [message.as_openai() for message in request.task.messages],
            agents.gateway.session_url(session.id),
            key,
            session.id,
            request.task.extra_info,
        )
        try:
            ended = await self.supervised(agents.agent.run(task, lambda: _is_over(session, agents)), "agent")
        finally:
            sessions.remove(session, "the agent has ended")
            sessions.forget(session.id)
        return AgentRun(
            session.branches(agents.chat), ended, session.limit, session.engine_failure, session.counts.as_json()
        )

    def _note_turn(self, turn: SampledTurn) -> None:
        self.request.sampled_tokens += len(turn.answer.generation.token_ids)
        self.request.stage_since = time.monotonic()

    def _take(self, run: AgentRun) -> None:
        """Make the main branch the conversation of the request."""
        request = self.request
        request.metrics["session"] = run.counts
        request.metrics["agent"] = {"exit": run.exit.code, "output": run.exit.output[-2000:]}
        if run.exit.errors:
            request.metrics["agent"]["errors"] = run.exit.errors[-2000:]
        if run.branches:
            main = run.branches[-1]
            tokens = main.tokens
            request.messages = list(main.messages)
            request.input_ids = [*tokens.prompt_ids, *tokens.response_ids]
            request.prompt_tokens, request.prompt_text = len(tokens.prompt_ids), main.prompt_text
            request.response_mask, request.response_logprobs = tokens.response_mask, tokens.response_logprobs
            request.crc = ids_crc(request.input_ids)
            request.turns = list(main.turns)
            request.sampled_tokens = sum(tokens.response_mask)
            self.solution = _solution(main)
        self._end(*_outcome(run))
        agents = self.setting.agent
        assert agents is not None
        if agents.score_from == "output":
            self.solution = run.exit.output
        elif agents.score_from != "messages":
            self.given_score = partial(_score, run.exit, agents.score_from)

    def _end(self, reason: FinishReason, failure: Failure | None) -> None:
        self.request.state, self.request.finish_reason, self.failure = reason.state, reason, failure


def _session_limits(limits: RolloutLimits) -> SessionLimits:
    return SessionLimits(
        max_turns=limits.max_assistant_turns,
        max_seconds=limits.request_seconds,
        max_model_len=limits.max_model_len or limits.prompt_length + limits.response_length,
        idle_seconds=limits.request_seconds + 3600,  # its process says when it ends
    )


async def _is_over(session: Session, agents: AgentSetting) -> None:
    """Return when the agent must be killed: some time after a limit was reached."""
    try:
        async with asyncio.timeout(session.limits.max_seconds):
            await session.limited.wait()
    except TimeoutError:
        session.limit = SessionEnd.MAX_SECONDS
    await asyncio.sleep(agents.grace_seconds)


def _outcome(run: AgentRun) -> tuple[FinishReason, Failure | None]:
    stage = RolloutState.GENERATING.value
    if run.limit is SessionEnd.MAX_SECONDS:
        return FinishReason.REQUEST_DEADLINE, Failure(OURS, stage, "the agent reached its time limit")
    if run.limit is not None and run.branches:
        return _REASONS[run.limit], None
    errors = run.exit.errors.strip()
    last = errors.splitlines()[-1] if errors else ""
    if run.exit.code != 0:
        ended = "was killed" if run.exit.code is None else f"exited with {run.exit.code}"
        if run.engine_failure:
            return FinishReason.ENGINE_FAILURE, Failure(OURS, stage, run.engine_failure, cause=run.engine_failure)
        told = f"the agent {ended}" + (f":\n{errors[-2000:]}" if errors else "")
        return FinishReason.AGENT_FAILURE, Failure(TASK, stage, told, source="agent", cause=last or told)
    if not run.branches:
        told = "the agent ended without a request to the gateway: does it read OPENAI_BASE_URL or ANTHROPIC_BASE_URL?"
        return FinishReason.AGENT_FAILURE, Failure(TASK, stage, told, source="agent", cause=last or told)
    return FinishReason.STOP, None


def _solution(branch: Branch) -> str:
    """What the model said on it."""
    sampled = len(branch.turns)
    spoken = [message.content for message in branch.messages if message.role == "assistant"]
    return "\n".join(spoken[-sampled:]) if sampled else ""


def _score(ended: AgentExit, score_from: ScoreFrom) -> FinalScore:
    """The score that the agent itself reports.

    Raises:
        RewardError: there is none, or it is not a number.
    """
    lines = ended.output.strip().splitlines()
    text = ended.returned or (ended.score if score_from == "file" else (lines or [None])[-1])
    if text is None:
        place = "nothing was printed" if score_from == "printed" else "there is no file $TOOLYARD_REWARD"
        raise RewardError(f"the agent reported no score: {place}")
    try:
        value = float(text.strip())
    except ValueError:
        raise RewardError(f"the agent's score is not a number: {text[:200]!r}") from None
    if value != value or value in (float("inf"), float("-inf")):
        raise RewardError(f"the agent's score is not a finite number: {text[:200]!r}")
    return FinalScore(value)
