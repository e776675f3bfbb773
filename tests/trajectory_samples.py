"""Trajectories as a rollout makes them: token-exact, of any shape."""

from __future__ import annotations

import random

from toolyard.messages import Message, ToolCall
from toolyard.records.trajectory import CallRecord, Failure, Sampled, Tokens, Trajectory, Turn
from toolyard.tokens import ids_crc


def decode(ids) -> str:
    """A tokenizer whose tokens are characters."""
    return "".join(map(chr, ids))


def good_trajectory(
    seed: int = 0, *, turns: int = 3, request_id: str = "", step: int = 1, logprobs: bool = True, tokens: int = 12
) -> Trajectory:
    """COMPLETED, token-exact, with calls in all turns but the last."""
    chance = random.Random(seed)
    name = request_id or f"request-{seed}"
    prompt = [chance.randrange(97, 123) for _ in range(tokens)]
    response: list[int] = []
    mask: list[int] = []
    made: list[Turn] = []
    crc, counted = ids_crc(prompt), 0
    messages = [Message("system", "You are a calculator."), Message("user", decode(prompt))]
    for at in range(turns):
        start = len(response)
        crc, counted = ids_crc(response[counted:], crc), start
        said = [chance.randrange(97, 123) for _ in range(chance.randint(1, tokens))]
        response += said
        mask += [1] * len(said)
        last = at == turns - 1
        calls = () if last else tuple(_call(f"call_{at}_{one}", chance) for one in range(chance.randint(1, 2)))
        made.append(
            Turn(
                Sampled(start, len(response), decode(said), "stop", crc, ("7",), start),
                calls,
                {"started": float(at), "generating": chance.random()},
            )
        )
        asked = tuple(ToolCall(call.id, call.name, call.arguments) for call in calls)
        messages.append(Message("assistant", decode(said), tool_calls=asked))
        for call in calls:
            messages.append(Message("tool", call.response, tool_call_id=call.id, name=call.name))
            answer = [ord(char) for char in call.response]
            response += answer
            mask += [0] * len(answer)
    chances = [-chance.random() * 5 if one else 0.0 for one in mask]
    return Trajectory(
        request_id=name,
        batch_data_id=f"task-{seed // 8}",
        rollout_offset=seed % 8,
        state="COMPLETED",
        finish_reason="stop",
        input=decode(prompt),
        output=decode(response),
        ground_truth="220000",
        score=chance.choice([0.0, 1.0]),
        step=step,
        messages=tuple(messages),
        tokens=Tokens(prompt, response, mask, chances if logprobs else None),
        turns=tuple(made),
        rewards={"gsm8k": 1.0, "code_interpreter": 0.0},
        metrics={"turns": turns, "seconds": chance.random()},
        data_source="openai/gsm8k",
    )


def failed_trajectory(request_id: str = "failed") -> Trajectory:
    """Ended before anything was sampled."""
    return Trajectory(
        request_id=request_id,
        batch_data_id="task-0",
        rollout_offset=0,
        state="FAILED",
        finish_reason="engine_failure",
        input="",
        output="",
        ground_truth=None,
        score=None,
        step=1,
        messages=(Message("user", "hello"),),
        tokens=Tokens(),
        turns=(),
        rewards={},
        metrics={},
        failure=Failure("ours", "generating", "EngineError: away"),
    )


def _call(name: str, chance: random.Random) -> CallRecord:
    return CallRecord(
        id=name,
        name="code_interpreter",
        arguments='{"code": "print(1)"}',
        outcome="ok",
        response=str(chance.randrange(1000)),
        reward=0.0,
        metrics={"verdict": "finished"},
        seconds=chance.random(),
        attempts=1,
    )
