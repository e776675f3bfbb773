"""The main job with a real vLLM: several turns, code that runs, and every token accounted for."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm_server import CONTEXT, VllmServer

from toolyard.chat.protocol import Tokenizer
from toolyard.records.audit import audit
from toolyard.records.dump import read_dump
from toolyard.rollout.config import load_config
from toolyard.rollout.run import run_rollouts

EXAMPLES = [
    {"role": "user", "content": "Tom has 3 boxes with 4 pens each. How many pens does Tom have?"},
    {"role": "assistant", "content": "```python\nprint(3 * 4)\n```\n"},
    {"role": "user", "content": "Ann has 30 nuts and gives 12 of them away. How many nuts are left?"},
    {"role": "assistant", "content": "```python\nprint(30 - 12)\n```\n"},
]
"""Small as it is, the model does as it is shown: it calls."""


@pytest.mark.parametrize("server", ["plain", "tokens"], indirect=True, scope="session")
async def test_rollouts_of_several_turns_are_exact_to_the_token(
    server: VllmServer, model: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    config = load_config(
        None,
        {
            "tasks": {"path": "word-problems", "limit": 4},
            "prompt": {"system": "Answer with python code that prints the result.", "examples": EXAMPLES},
            "engine": {"kind": "vllm", "model": str(model), "urls": [server.url]},
            "chat": {"format": "code_block"},
            "sampling": {"temperature": 0.3, "max_tokens": 80},
            "limits": {"max_assistant_turns": 3, "response_length": 400, "max_model_len": CONTEXT},
            "n": 2,
            "rollout_data_dir": str(tmp_path),
        },
    )
    result = await run_rollouts(config)
    played = [line.trajectory for line in read_dump(tmp_path)]
    assert (result.missing, len(played)) == (0, 8)
    for trajectory in played:
        assert audit(trajectory, tokenizer.decode) == []
        assert (trajectory.token_exact, trajectory.failure) == (True, None)
        assert trajectory.tokens.response_logprobs is not None
    longer = [trajectory for trajectory in played if len(trajectory.turns) > 1]
    assert any(call.outcome == "ok" for trajectory in longer for call in trajectory.turns[0].tool_calls)
