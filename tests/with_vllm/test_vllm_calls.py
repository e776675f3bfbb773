"""Several turns with real calls at a real vLLM, by tokens and by messages: exact, as the embedded engine would sample
them, and through the death of the server."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from vllm_server import CALLS_TEMPLATE, CONTEXT, KINDS, NAME, START_SECONDS, VllmServer, free_port, serving

from toolyard.chat.protocol import Tokenizer
from toolyard.engines.protocol import Sampling
from toolyard.engines.transformers.engine import TransformersEngine
from toolyard.records.audit import audit
from toolyard.records.dump import read_dump
from toolyard.records.trajectory import Trajectory
from toolyard.rollout.config import RolloutConfig, load_config
from toolyard.rollout.run import run_rollouts

ENGINES = ("vllm", "openai")


def solved(question: str, code: str) -> list[dict[str, Any]]:
    function = {"name": "code_interpreter", "arguments": f'{{"code": "{code}"}}'}
    called = [{"id": "c", "type": "function", "function": function}]
    return [{"role": "user", "content": question}, {"role": "assistant", "content": "", "tool_calls": called}]


EXAMPLES = [
    *solved("Tom has 3 boxes with 4 pens each. How many pens does Tom have?", "print(3 * 4)"),
    *solved("Ann has 30 nuts and gives 12 of them away. How many nuts are left?", "print(30 - 12)"),
    *solved("A shop has 7 red hats and 6 green hats. How many hats does it have?", "print(7 + 6)"),
]
"""Small as it is, the model does as it is shown: it calls."""


def config_of(kind: str, url: str, model: Path, folder: Path, **changes: Any) -> RolloutConfig:
    # By messages, the server renders and parses; by tokens, we do, with the same template.
    chat = {"chat_template": str(CALLS_TEMPLATE), "format": "hermes"} if kind == "vllm" else {}
    given = {
        "tasks": {"path": "word-problems", "limit": 6},
        "prompt": {"system": "Answer with a call of code_interpreter that prints the result.", "examples": EXAMPLES},
        "engine": {"kind": kind, "model": str(model) if kind == "vllm" else NAME, "urls": [url]},
        "chat": chat,
        "sampling": {"temperature": 0.0, "max_tokens": 80},
        "limits": {"max_assistant_turns": 3, "response_length": 400, "max_model_len": CONTEXT, "engine_retries": 10},
        "rollout_data_dir": str(folder),
    }
    return load_config(None, {**given, **changes})


def played(folder: Path) -> list[Trajectory]:
    return [line.trajectory for line in read_dump(folder)]


def check(ended: list[Trajectory], tokenizer: Tokenizer) -> None:
    """Whole, exact to the token, and with calls that ran."""
    for trajectory in ended:
        assert (trajectory.failure, trajectory.metrics.get("token_drift")) == (None, None)
        assert trajectory.token_exact
        # By messages, the texts are those of the messages.
        assert audit(trajectory, tokenizer.decode if trajectory.input.startswith("<|im_start|>") else None) == []
    longer = [one for one in ended if len(one.turns) > 1]
    made = [call for one in longer for turn in one.turns for call in turn.tool_calls]
    assert sum(call.outcome == "ok" and call.response.strip() != "" for call in made) >= len(ended) // 2, made


@pytest.mark.parametrize("server", ["calls"], indirect=True, scope="session")
@pytest.mark.parametrize("kind", ENGINES)
async def test_turns_with_calls_are_those_of_the_embedded_engine(
    kind: str, server: VllmServer, model: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    result = await run_rollouts(config_of(kind, server.url, model, tmp_path))
    ended = played(tmp_path)
    assert (result.missing, len(ended)) == (0, 6)
    check(ended, tokenizer)
    compared = differing = 0
    async with TransformersEngine(model, device="cpu", dtype="float32") as embedded:
        for trajectory in ended:
            tokens = trajectory.tokens
            assert tokens.response_logprobs is not None
            for turn in trajectory.turns:
                said = turn.sampled
                prompt = [*tokens.prompt_ids, *tokens.response_ids[: said.start]]
                theirs = tokens.response_ids[said.start : said.end]
                wanted = Sampling(
                    max_tokens=len(theirs), temperature=0.0, stop_token_ids=(tokenizer.eos_token_id or 0,)
                )
                ours = await embedded.generate(prompt, wanted, request_id=trajectory.request_id)
                same = next(
                    (at for at, (a, b) in enumerate(zip(ours.token_ids, theirs, strict=False)) if a != b), len(theirs)
                )
                differing += same < len(theirs)
                compared += same
                expected = (ours.logprobs or [])[:same]
                assert tokens.response_logprobs[said.start : said.start + same] == pytest.approx(expected, abs=1e-3)
    assert compared > 100
    assert differing <= 1, "two tokens may be equally likely once"


@pytest.mark.timeout(3 * START_SECONDS)
async def test_runs_go_on_after_kill_9_and_a_restart_of_the_server(
    model: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    port, started = free_port(), ExitStack()
    with started:
        server = started.enter_context(serving(model, port, KINDS["calls"]))
        async with asyncio.TaskGroup() as tasks:
            for kind in ENGINES:
                config = config_of(kind, server.url, model, tmp_path / kind, n=2, concurrency=3)
                tasks.create_task(run_rollouts(config))
            while not (all(_lines(tmp_path / kind) for kind in ENGINES) and await asyncio.to_thread(server.running)):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            server.kill()
            dumped = {kind: _lines(tmp_path / kind) for kind in ENGINES}
            await asyncio.to_thread(started.enter_context, serving(model, port, KINDS["calls"]))
        for kind in ENGINES:
            ended = played(tmp_path / kind)
            assert 0 < dumped[kind] < len(ended) == 12
            check(ended, tokenizer)


def _lines(folder: Path) -> int:
    return sum(file.read_bytes().count(b"\n") for file in folder.glob("*.jsonl"))
