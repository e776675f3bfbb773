"""Makes the model, the problems and the teacher of the form that a CPU trains in minutes: python small.py [FOLDER]

The model has 120,000 random parameters; its tokens are words and whole numbers. Problems have two numbers; a fifth of
all pairs is for testing only. The teacher shows how to call the tool, with any of three operations: which one a story
asks for is left to GRPO.
"""

from __future__ import annotations

import itertools
import json
import operator
import random
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

STORIES = {
    "+": ("{who} has {a} {things} and buys {b} more .", "{who} finds {a} {things} and then {b} others ."),
    "-": ("{who} has {a} {things} and loses {b} again .", "{who} bakes {a} {things} and eats {b} himself ."),
    "*": ("{who} has {a} boxes with exactly {b} {things} .", "{who} fills {a} bags with just {b} {things} ."),
}
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
NAMES = ("Ann", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hana", "Ivo", "Jane", "Kim", "Lou")
THINGS = ("pens", "cakes", "stamps", "shells", "cards", "nuts")
INTRODUCTION = (
    "You can run Python code. To run code, write it like this: ```python print(12 * 7) ``` "
    "The code is run and its output is shown to you. Print the result. Then give the final answer.  Output: "
)
"""What the model reads besides, so that its words are tokens, too."""
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TAUGHT, TESTED = 1000, 100


def main(folder: str = "data/small") -> None:
    place, chance = Path(folder), random.Random(0)
    pairs = [(a, b) for a in range(3, 13) for b in range(2, a)]
    chance.shuffle(pairs)
    apart = len(pairs) // 5
    test, rest = (problems(some, chance) for some in (pairs[:apart], pairs[apart:]))
    taught, train = rest[:TAUGHT], rest[TAUGHT:]
    script = {row["id"]: shown(*row["numbers"], chance.choice(list(STORIES))) for row in taught}
    make_model(place / "model", [*(row["prompt"] for row in taught), *itertools.chain.from_iterable(script.values())])
    for name, rows in {"taught": taught, "train": train, "test": chance.sample(test, TESTED)}.items():
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{name}: {len(rows)} problems")
    (place / "teacher.json").write_text(json.dumps(script))


def problems(pairs: list[tuple[int, int]], chance: random.Random) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for (a, b), (sign, stories), who in itertools.product(pairs, STORIES.items(), NAMES):
        text = chance.choice(stories).format(who=who, a=a, b=b, things=chance.choice(THINGS))
        answer = str(OPERATIONS[sign](a, b))
        rows.append({"id": f"{who} {a} {sign} {b}", "prompt": text, "answer": answer, "numbers": [a, b]})
    chance.shuffle(rows)
    return rows


def shown(a: int, b: int, sign: str) -> list[str]:
    """What the teacher says: a program, and the number that it prints."""
    return [f"```python\nprint( {a} {sign} {b} )\n```\n", f"#### {OPERATIONS[sign](a, b)}"]


def make_model(folder: Path, texts: Iterable[str]) -> None:
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=800,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    numbers = " ".join(map(str, range(133))) + "\n"
    tokenizer.train_from_iterator([*texts, *[numbers, INTRODUCTION] * 100], trainer)
    end = tokenizer.token_to_id("<|im_end|>")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=end,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    told = {"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
