"""What tests of TRL's trainer share."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from toolyard.rollout.config import RolloutConfig, load_config
from toolyard.train.trl.rollout import ToolyardRollout

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")


def write_tasks(path: Path, count: int = 4) -> Path:
    rows = [{"id": f"sum-{n}", "question": f"What is {n} + 1?", "answer": f"#### {n + 1}"} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def small_config(model: Path, tasks: Path, **changes: Any) -> RolloutConfig:
    given = {
        "tasks": {"path": str(tasks)},
        "engine": {"kind": "transformers", "model": str(model), "device": "cpu"},
        "chat": {"format": "code_block", "tool_role": "user"},
        "sampling": {"temperature": 1.0, "max_tokens": 8},
        "limits": {"response_length": 64, "prompt_length": 900},
        "n": 2,
    }
    return load_config(None, {**given, **changes})


def make_trainer(
    rollout: ToolyardRollout, model: Path, folder: Path, *, peft: Any = None, kind: Any = None, **changes: Any
) -> Any:
    """`kind`: the trainer's class, if it is not GRPOTrainer."""
    import torch
    import transformers
    import trl

    given = {
        "output_dir": str(folder),
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "temperature": 1.0,
        "max_completion_length": 64,
        "learning_rate": 1e-2,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "gradient_checkpointing": False,
    }
    models: Any = transformers.AutoModelForCausalLM
    tokenizers: Any = transformers.AutoTokenizer
    trainer = (kind or trl.GRPOTrainer)(
        model=models.from_pretrained(model, dtype=torch.float32),
        args=trl.GRPOConfig(**{**given, **changes}),
        reward_funcs=[rollout.reward],
        rollout_func=rollout,
        train_dataset=rollout.dataset(),
        processing_class=tokenizers.from_pretrained(model, padding_side="left"),
        peft_config=peft,
    )
    trainer.model.train()  # training mode: otherwise it evaluates
    return trainer


def recomputed(model: Any, prompt_ids: list[int], response_ids: list[int], temperature: float = 1.0) -> list[float]:
    """The log-probabilities of the response by a plain forward pass, as the trainer's model has them now."""
    import torch

    ids = torch.tensor([[*prompt_ids, *response_ids]])
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0].float()
    start = len(prompt_ids)
    told = torch.log_softmax(logits[start - 1 : -1] / temperature, 1)
    return told.gather(1, ids[0, start:, None])[:, 0].tolist()
