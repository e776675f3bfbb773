"""The embedded engine on tiny models of real architectures: right beyond every window and rope switch, or refused.

Each model has random weights, and a window or switch so short that sequences pass it several times.
"""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from late import Late
from toolyard.engines.protocol import Sampling
from toolyard.errors import ConfigError, EngineRequestError

if TYPE_CHECKING:
    from toolyard.engines.transformers.engine import TransformersEngine

engines = Late("toolyard.engines.transformers.engine")
torch = Late("torch")
transformers = Late("transformers")

WINDOW = 16
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 4.0, 8.0, 16.0],
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
SCALED = {**YARN, "llama_4_scaling_beta": 0.5}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}


def make_model(folder: Path, family: str, **changes: object) -> Path:
    torch.manual_seed(5)
    own = copy.deepcopy({**SMALL, **changes})  # a config changes what it is given
    config = getattr(transformers, f"{family}Config")(**own)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    return folder


def tokens_of(length: int, seed: int) -> list[int]:
    return torch.randint(3, 64, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


async def play(engine: TransformersEngine, name: str, prompt: list[int], turns: int, most: int):
    """A conversation: the positions of its sampled tokens, and their log-probabilities."""
    ids, found = prompt, dict[int, float]()
    for turn in range(turns):
        ids = [*ids, *(tokens_of(7, turn) if turn else ())]
        sampling = Sampling(max_tokens=most, temperature=1.0, seed=turn)
        answer = await engine.generate(ids, sampling, request_id=name)
        assert len(answer.token_ids) == most
        found |= {len(ids) + at: logprob for at, logprob in enumerate(answer.logprobs or ())}
        ids = [*ids, *answer.token_ids]
    return ids, found


async def largest_difference(
    folder: Path, lengths: tuple[int, ...], *, turns: int = 3, most: int = 12, **options: Any
) -> float:
    """Of the log-probabilities of conversations that are played side by side, from those of a plain forward pass over
    the whole of each."""
    prefill: Any = {"prefill_tokens": 50, "max_batch_size": 3, **options}
    async with engines.TransformersEngine(folder, device="cpu", **prefill) as engine, asyncio.TaskGroup() as tasks:
        played = [
            tasks.create_task(play(engine, f"r{length}", tokens_of(length, length), turns, most)) for length in lengths
        ]
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    differences: list[float] = []
    for ids, found in (one.result() for one in played):
        with torch.inference_mode():
            expected = plain(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
        differences += [abs(float(expected[at - 1, ids[at]]) - logprob) for at, logprob in found.items()]
    return max(differences)


async def largest_difference_from_alone(folder: Path, prompts: list[list[int]], **options: Any) -> float:
    """Of the log-probabilities of conversations that are played side by side, from those of each by itself."""
    settings: Any = {"turns": 2, "most": 12}
    async with engines.TransformersEngine(folder, device="cpu", **options) as engine:
        alone = [await play(engine, f"alone {at}", prompt, **settings) for at, prompt in enumerate(prompts)]
        async with asyncio.TaskGroup() as tasks:
            beside = [
                tasks.create_task(play(engine, f"beside {at}", prompt, **settings)) for at, prompt in enumerate(prompts)
            ]
    assert [one.result()[0] for one in beside] == [ids for ids, _ in alone], "other tokens were sampled"
    pairs = [(one.result()[1], found) for one, (_, found) in zip(beside, alone, strict=True)]
    return max(abs(one[at] - found[at]) for one, found in pairs for at in found)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        pytest.param("Llama", {}, id="llama"),
        pytest.param("Gemma3Text", {"sliding_window": WINDOW, "layer_types": ALTERNATING}, id="gemma3"),
        pytest.param("DeepseekV3", {"rope_parameters": YARN, **EXPERTS, **LATENT}, id="deepseek_v3"),
    ],
)
async def test_neighbours_in_a_batch_do_not_change_log_probabilities(tmp_path, family, changes):
    folder = make_model(tmp_path, family, **changes)
    prompts = [tokens_of(length, length) for length in (3, 120, 14, 40, 31)]
    assert await largest_difference_from_alone(folder, prompts, prefill_tokens=50, max_batch_size=4) < 1e-4


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        pytest.param("Mistral", {"sliding_window": WINDOW}, id="mistral"),
        pytest.param("Gemma3Text", {"sliding_window": WINDOW, "layer_types": ALTERNATING}, id="gemma3"),
        pytest.param("Cohere2", {"sliding_window": WINDOW, "layer_types": ALTERNATING}, id="cohere2"),
        pytest.param("Olmo3", {"sliding_window": WINDOW, "layer_types": ALTERNATING}, id="olmo3"),
        pytest.param(
            "Qwen2", {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1}, id="qwen2"
        ),
        pytest.param("Phi3", {"sliding_window": WINDOW}, id="phi3"),
        pytest.param("Qwen3", {"rope_parameters": YARN}, id="yarn"),
        pytest.param("Llama", {"rope_parameters": LLAMA3}, id="llama3-rope"),
        pytest.param("Llama", {"rope_parameters": DYNAMIC}, id="dynamic-rope"),
        pytest.param("Ministral3", {"rope_parameters": SCALED}, id="ministral3"),
        pytest.param("DeepseekV3", {"rope_parameters": YARN, **EXPERTS, **LATENT}, id="deepseek_v3"),
    ],
)
async def test_beyond_windows_and_rope_switches_log_probabilities_are_exact(tmp_path, family, changes):
    folder = make_model(tmp_path, family, **changes)
    assert await largest_difference(folder, (3, 120, 14, 40, 31)) < 1e-4


@pytest.mark.parametrize(
    ("family", "rope"),
    [("Phi3", LONGROPE), ("Llama", LONGROPE), ("Llama", DYNAMIC)],
    ids=["phi3-longrope", "llama-longrope", "llama-dynamic"],
)
async def test_a_context_ends_where_the_rope_factors_would_change(tmp_path, family, rope, caplog):
    most = "max_position_embeddings" if rope is DYNAMIC else "original_max_position_embeddings"
    folder = make_model(tmp_path, family, rope_parameters=rope, **{most: 32})
    async with engines.TransformersEngine(folder, device="cpu") as engine:
        assert engine.context == 32
        assert ("longrope" in caplog.text) == (rope is LONGROPE)
        with pytest.raises(EngineRequestError, match="no room in a context of 32"):
            await engine.generate(tokens_of(32, 1), Sampling(max_tokens=1), request_id="r")
    assert await largest_difference(folder, (3, 13, 19, 22, 9), turns=1, most=10) < 1e-4


async def test_a_context_beyond_a_rope_switch_is_refused_by_name(tmp_path):
    folder = make_model(tmp_path, "Phi3", rope_parameters=LONGROPE, original_max_position_embeddings=32)
    with pytest.raises(ConfigError, match=r"longrope .* beyond 32 tokens, but max_model_len is 33: .* sglang or vllm"):
        await engines.TransformersEngine(folder, device="cpu", max_model_len=33).__aenter__()


@pytest.mark.parametrize(
    ("family", "changes", "complaint"),
    [
        ("Llama4Text", {"attention_chunk_size": WINDOW, **EXPERTS}, "chunked_attention"),
        ("Llama4Text", {"no_rope_layers": [0, 0, 0], **EXPERTS}, "attn_temperature_tuning"),
        (
            "Qwen3Next",
            {"num_experts": 0, "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
            "linear_attention",
        ),
        ("Lfm2", {"layer_types": ["conv", "full_attention", "conv"]}, "conv"),
        ("FalconH1", {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}, "hybrid"),
        ("GptOss", {"sliding_window": WINDOW, **EXPERTS}, "s_aux"),
        ("Gemma2", {"sliding_window": WINDOW}, "softcap"),
        (
            "Qwen2Moe",
            {**EXPERTS, "sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1},
            "differ",
        ),
        ("GPTJ", {"rotary_dim": 8}, "cannot be replaced"),
    ],
)
async def test_what_the_engine_cannot_compute_is_refused_by_name(tmp_path, family, changes, complaint):
    folder = make_model(tmp_path, family, **changes)
    with pytest.raises(ConfigError, match=rf"cannot be used .*{complaint}.* sglang or vllm"):
        await engines.TransformersEngine(folder, device="cpu").__aenter__()
