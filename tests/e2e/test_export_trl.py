"""What `toolyard export` writes is what TRL's SFTTrainer trains on: the sampled tokens, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from playing import Echo, request_for, said
from toolyard.chat.formats import open_format
from toolyard.chat.template import TemplateFormat
from toolyard.chat.tokenizers.opening import load_tokenizer
from toolyard.engines.protocol import Sampling
from toolyard.engines.scripted import ScriptedEngine
from toolyard.export.rendering import Match, PlainWriting, TemplateWriting
from toolyard.export.sft import SftRules, write_sft
from toolyard.records.lines import to_line
from toolyard.records.trajectory import Trajectory
from toolyard.rewards.registry import load_reward
from toolyard.rollout.budget import RolloutLimits
from toolyard.rollout.play.play import Play
from toolyard.rollout.play.setting import Setting
from toolyard.rollout.play.speaker import TokenSpeaker
from toolyard.viewer.library import Library
from toolyard.viewer.query import parse_query
from training import make_model

pytestmark = pytest.mark.slow  # imports TRL and torch, and trains

TOOLS = [Echo().tool_schema]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with Qwen2.5's template, as TRL ships it for training."""
    trl: Any = pytest.importorskip("trl")
    folder = make_model(tmp_path_factory.mktemp("model"))
    template = (Path(trl.__file__).parent / "chat_templates" / "qwen2_5_training.jinja").read_text()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    return folder


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Any:
    return load_tokenizer(model)


@pytest.fixture(scope="module")
def chat(tokenizer: Any) -> TemplateFormat:
    found = open_format(tokenizer)
    assert isinstance(found, TemplateFormat)
    return found


async def played(chat: TemplateFormat, tokenizer: Any, number: int, *lines: str) -> Trajectory:
    def encode(text: str) -> list[int]:
        return tokenizer.encode(f"{text}<|im_end|>")

    async with ScriptedEngine(list(lines), encode=encode, decode=tokenizer.decode) as engine:
        limits = RolloutLimits()
        speaker = TokenSpeaker(engine, chat, Sampling(max_tokens=4096), limits)
        place = Setting(speaker, {"echo": Echo()}, limits, load_reward("gsm8k"))
        return await Play(request_for(place, offset=number), place).run()


@pytest.fixture
async def dump(tmp_path: Path, chat: TemplateFormat, tokenizer: Any) -> Path:
    """One as the template writes calls, one with a call in other words, and one without calls."""
    odd = '<tool_call>\n{"arguments": {"text": "a"}, "name": "echo"}\n</tool_call>'
    lines = [
        await played(chat, tokenizer, 0, said("hi"), "It is 42."),
        await played(chat, tokenizer, 1, odd, "So it is 42."),
        await played(chat, tokenizer, 2, "It is 42."),
    ]
    folder = tmp_path / "dump"
    folder.mkdir()
    (folder / "0.jsonl").write_bytes(b"".join(map(to_line, lines)))
    return folder


def exported(folder: Path, target: Path, writing: Any, **rules: Any) -> Any:
    with Library.open(folder) as library:
        return write_sft(library, target, parse_query(""), writing, SftRules(**rules))


async def test_the_template_renders_calls_as_it_writes_them(
    dump: Path, tmp_path: Path, chat: TemplateFormat, tokenizer: Any
) -> None:
    writing = TemplateWriting(chat, tokenizer, TOOLS)
    done = exported(dump, tmp_path / "all.jsonl", writing)
    assert dict(done.matches) == {Match.EXACT: 2, Match.DIFFERENT: 1}
    assert '"arguments": {"text": "a"}' in done.difference.replace("\\n", "")
    done = exported(dump, tmp_path / "exact.jsonl", writing, exact=True)
    assert done.conversations == 2
    plain = exported(dump, tmp_path / "plain.jsonl", PlainWriting(TOOLS))
    assert plain.conversations == 3
    rows = [json.loads(line) for line in (tmp_path / "exact.jsonl").read_text().splitlines()]
    same = [json.loads(line) for line in (tmp_path / "plain.jsonl").read_text().splitlines()]
    assert all(row in same for row in rows), "a template that knows tools gets what any other would"


@pytest.mark.parametrize("form", ["messages", "prompt-completion"])
@pytest.mark.filterwarnings("ignore")
async def test_trl_trains_on_the_sampled_tokens(
    dump: Path, tmp_path: Path, model: Path, chat: TemplateFormat, tokenizer: Any, form: Any
) -> None:
    import datasets
    import torch
    import transformers
    import trl

    datasets.disable_progress_bars()
    exported(dump, tmp_path / "sft.jsonl", TemplateWriting(chat, tokenizer, TOOLS), exact=True, format=form)
    rows: Any = datasets.load_dataset(
        "json", data_files=str(tmp_path / "sft.jsonl"), split="train", cache_dir=str(tmp_path / "cache")
    )
    models: Any = transformers.AutoModelForCausalLM
    tokenizers: Any = transformers.AutoTokenizer
    weights = models.from_pretrained(model, dtype=torch.float32)
    before = [value.detach().clone() for value in weights.parameters()]
    trainer = trl.SFTTrainer(
        model=weights,
        args=trl.SFTConfig(
            output_dir=str(tmp_path / "out"),
            assistant_only_loss=True,
            max_length=None,
            max_steps=1,
            learning_rate=1e-2,
            per_device_train_batch_size=2,
            report_to="none",
            use_cpu=True,
            bf16=False,
            save_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            gradient_checkpointing=False,
        ),
        train_dataset=rows,
        processing_class=tokenizers.from_pretrained(model),
    )
    prepared = {row["request_id"]: row for row in trainer.train_dataset}
    with Library.open(dump) as library:
        trajectories = [library.trajectory(row.number) for row in library.rows()]
    checked = 0
    for one in trajectories:
        assert one is not None
        row = prepared.get(one.request_id)
        if row is None:
            continue
        tokens = [*one.tokens.prompt_ids, *one.tokens.response_ids]
        mask = [0] * len(one.tokens.prompt_ids) + one.tokens.response_mask
        assert row["input_ids"][: len(tokens)] == tokens
        assert tokenizer.decode(row["input_ids"][len(tokens) :]) == "\n"
        trained = [label != -100 for label in row["labels"]]
        assert all(is_trained for is_trained, sampled in zip(trained, mask, strict=False) if sampled)
        # Besides the sampled tokens, TRL's template counts the newlines around a message as the assistant's.
        others = [
            token
            for token, (is_trained, sampled) in zip(tokens, zip(trained, mask, strict=False), strict=False)
            if is_trained and not sampled
        ]
        assert set(tokenizer.decode(others)) <= {"\n"}
        checked += 1
    assert checked == 2
    trainer.train()
    assert any(not torch.equal(old, new) for old, new in zip(before, weights.parameters(), strict=True))
