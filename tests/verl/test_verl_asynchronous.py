"""Our agent loop under verl's fully asynchronous trainer, whose servers abort what they sample when the weights change.

Real: verl's client, which resumes such answers, its load balancer, Ray actors, message queue and batches; our loop,
tools and sandbox. A stand-in: the server, which is scripted.
"""

from __future__ import annotations

import asyncio
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import ray
import serving
from omegaconf import open_dict
from scripted import Configure
from serving import ROLLOUT, batch_of, row, unpadded, with_our_loop
from test_tools_under_verl import CODE_INTERPRETER, cluster, code, heard
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from toolyard.records.dump import read_dump

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about trainers that are not installed
    from verl.experimental.fully_async_policy.detach_utils import RolloutSample, assemble_batch_from_rollout_samples
    from verl.experimental.fully_async_policy.fully_async_rollouter import FullyAsyncAgentLoopManager
    from verl.experimental.fully_async_policy.message_queue import MessageQueue, MessageQueueClient

__all__ = ["cluster"]  # a fixture


class UpdatedServer:
    """Says its lines turn by turn. In the middle of a line with a `|` the weights change: what was said so far is
    returned as aborted, and the rest is said by the next version, with other probabilities."""

    def __init__(self, model: str, script: dict[str, list[str]]) -> None:
        self._tokenizer = hf_tokenizer(model)
        self._pieces = {
            question: [piece for line in lines for piece in re.findall(r"[^|]+\|?", line)]
            for question, lines in script.items()
        }
        self.version = 7

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        prompt = self._tokenizer.decode(prompt_ids)
        [question] = [question for question in self._pieces if question in prompt]
        piece = self._pieces[question].pop(0)
        last = not piece.endswith("|")
        ids = self._tokenizer.encode(piece + self._tokenizer.eos_token if last else piece[:-1])
        said = TokenOutput(
            token_ids=ids,
            log_probs=[-1.0 / self.version] * len(ids),
            stop_reason="completed" if last else "aborted",
            num_preempted=0,
            extra_fields={"global_steps": self.version},
        )
        if not last:
            self.version += 1
        return said


@pytest.mark.usefixtures("cluster")
async def test_an_answer_that_is_aborted_by_an_update_goes_on_with_the_new_weights(
    model: str, configure: Configure, tmp_path: Path
) -> None:
    for module in (serving, sys.modules[__name__]):
        ray.cloudpickle.register_pickle_by_value(module)
    folder, one = tmp_path / "rollouts", f"{ROLLOUT}.agent.num_workers=1"
    settings = {"reward": "gsm8k", "rollout_data_dir": str(folder)}
    config = with_our_loop(configure, tmp_path, [CODE_INTERPRETER], one, **settings)
    with open_dict(config):
        config.async_training = {"partial_rollout": True}
    first, second = code("print(6 * 7)"), "It is 42.\n#### 42"
    half = len(first) // 2
    lines = [f"{first[:half]}|{first[half:]}", f"{second[:3]}|{second[3:5]}|{second[5:]}"]
    script = {"Product?": lines, "Sum?": ["#### 9"]}
    server = ray.remote(UpdatedServer).remote(model, script)
    balancer = ray.remote(GlobalRequestLoadBalancer).remote({"one": server})
    manager = await FullyAsyncAgentLoopManager.create(config, FullyAsyncLLMServerClient(config, balancer))
    queue = MessageQueueClient(MessageQueue.remote(config, 4))  # pyright: ignore[reportAttributeAccessIssue]
    for question, truth in (("Unknown?", "1"), ("Product?", "42"), ("Sum?", "9")):
        output = await manager.generate_sequences_single(batch_of([row(question, truth=truth)]))
        sample = RolloutSample(output, question, 0, {"count": 1})
        assert await queue.put_sample(ray.cloudpickle.dumps(sample))
    taken = [ray.cloudpickle.loads((await queue.get_sample())[0]) for _ in range(3)]
    metrics = [dict(one) for sample in taken for one in sample.full_batch.meta_info["metrics"]]
    batch = await asyncio.to_thread(assemble_batch_from_rollout_samples, taken, hf_tokenizer(model), config)
    assert batch.meta_info["fully_async/partial/max_partial_span"] == 3
    assert batch.meta_info["fully_async/partial/total_partial_num"] == 1
    assert list(batch.meta_info["trajectory_param_versions"]) == [0, 10, 10]

    batch.meta_info["metrics"] = metrics
    lost, played, other = unpadded(batch)
    assert not any(lost.mask), "no server has ever answered"
    end = hf_tokenizer(model).eos_token
    parts = played.parts(hf_tokenizer(model).decode)
    assert parts == [(1, first + end), (0, heard("42\n")), (1, second + end)]
    assert (played.reward, other.reward) == (1.0, 1.0)
    assert (played.told["min_global_steps"], played.told["max_global_steps"]) == (7, 10)
    assert (other.told["min_global_steps"], other.told["max_global_steps"]) == (10, 10)
    # Each token has the probability with which its own version sampled it.
    assert played.logprobs is not None
    sampled = [round(-1 / value) for value, mask in zip(played.logprobs, played.mask, strict=True) if mask]
    lengths = [half, len(first) - half + 1, 3, 2, len(second) - 5 + 1]
    assert sampled == [
        version for version, length in zip((7, 8, 8, 9, 10), lengths, strict=True) for _ in range(length)
    ]
    [dumped] = [line.trajectory for one in folder.iterdir() for line in read_dump(one) if line.trajectory.turns[1:]]
    assert [turn.sampled.weight_versions for turn in dumped.turns] == [("7-8",), ("8-10",)]
