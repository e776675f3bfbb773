"""What tests of training share: a model that learns in seconds, and a folder with everything a run needs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import yaml

CALL = "```python\nprint(6 * 7)\n```\n"
ANSWER = "#### 42"
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_model(folder: Path) -> Path:
    """Its tokens are bytes; it has two small random layers, and a context so long that it never fills up."""
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    alphabet = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ("<|im_start|>", "<|im_end|>")
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in specials])
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=tokenizer.get_vocab_size(),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=1024,
            eos_token_id=tokenizer.token_to_id("<|im_end|>"),
            pad_token_id=tokenizer.token_to_id("<|im_end|>"),
            bos_token_id=None,
        )
    )
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    said = {"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    return folder


EARNED = """
def earned(data_source, solution_str, ground_truth, extra_info):
    return ('42' in solution_str) + (sum(map(ord, solution_str)) % 100) / 100
"""


def make_place(folder: Path, model: Path, *, reward: str = EARNED, module: str = "my_reward") -> Path:
    """Tasks, a teacher's script and settings. What is earned depends on the answer, so that there is a gradient.

    Another reward needs another `module`: a process imports a module once."""
    rows = [{"id": f"t{number}", "prompt": f"6 times 7? ({number})", "answer": "42"} for number in range(4)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "script.json").write_text(json.dumps([CALL, ANSWER]))
    (folder / f"{module}.py").write_text(reward)
    settings = {
        "rollout": {
            "tasks": {"path": "tasks.jsonl"},
            "engine": {"model": str(model)},
            "chat": {"format": "code_block", "tool_role": "user"},
            "sampling": {"max_tokens": 32},
            "limits": {"max_assistant_turns": 3, "response_length": 160},
            "rewards": {"final": f"{module}:earned"},
            "n": 4,
        },
        "steps": 2,
        "prompts_per_step": 2,
        "micro_batch_size": 4,
        "learning_rate": 1e-4,
        "save_every": 1,
        "device": "cpu",
        "trl": {"gradient_checkpointing": False},
    }
    (folder / "train.yaml").write_text(yaml.safe_dump(settings))
    return folder


def command(*arguments: str) -> list[str]:
    return [str(Path(sys.executable).with_name("toolyard")), *arguments]


def toolyard(place: Path, *arguments: str, seconds: float = 110) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), cwd=place, capture_output=True, text=True, timeout=seconds, check=False)
