"""`toolyard tasks generate`, and a teacher that solves what it made."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOLYARD = str(Path(sys.executable).parent / "toolyard")


def toolyard(*args: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([TOOLYARD, *map(str, args)], capture_output=True, text=True, timeout=90, cwd=cwd)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A tokenizer folder: every byte is a token, and ChatML's special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("model")
    alphabet = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text("{}")
    return folder


def test_problems_are_written_and_are_tasks(tmp_path):
    made = toolyard("tasks", "generate", "made.jsonl", "--count", "7", "--seed", "3", "--split", "unseen", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    assert "wrote 7 problems to made.jsonl" in made.stderr
    checked = toolyard("tasks", "check", "made.jsonl", "--json", cwd=tmp_path)
    assert checked.returncode == 0
    assert json.loads(checked.stdout)["data_sources"] == {"toolyard/made-problems": 7}
    shown = json.loads(toolyard("tasks", "show", "made.jsonl", "--json", "--limit", "1", cwd=tmp_path).stdout)
    assert shown[0]["id"] == "unseen-3-0"


def test_what_is_wrong_is_said_and_nothing_is_written(tmp_path):
    wrong = toolyard("tasks", "generate", "made.jsonl", "--split", "test", cwd=tmp_path)
    assert wrong.returncode == 1
    assert "split 'test': expected one of train, unseen" in wrong.stderr
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "made.jsonl").write_text("precious")
    there = toolyard("tasks", "generate", "made.jsonl", cwd=tmp_path)
    assert there.returncode == 1
    assert "made.jsonl: already exists; --force replaces it" in there.stderr
    assert (tmp_path / "made.jsonl").read_text() == "precious"


@pytest.mark.kernel("confined")
def test_the_teacher_solves_every_problem_with_the_real_sandbox(tmp_path, model):
    made = toolyard("tasks", "generate", "made.jsonl", "--count", "20", "--script", "teacher.json", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    done = toolyard(
        *("rollout", "--tasks", "made.jsonl", "--engine", "scripted", "--model", model, "--format", "hermes"),
        *("--set", "engine.script=teacher.json", "--set", "prompt={system: null, instruction: null, examples: []}"),
        *("--set", "limits={response_length: 4096, prompt_length: 8192}", "--max-tokens", "1024"),
        *("-n", "1", "--limit", "20", "--out", "dump", "--json"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["score"] == {"count": 20, "mean": 1.0, "deviation": 0.0}
    assert summary["tool_calls"] == [{"tool": "code_interpreter", "outcome": "ok", "count": 20}]
    assert summary["token_exact"] == 20
