"""Lines as verl dumps them, made with real chat templates and real tokenizers.

`python tests/unit/viewer/foreign_dumps.py` writes them to `tests/data/foreign_dumps.jsonl`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from material import FAMILIES, family_tokenizer
from toolyard.chat import protocol
from toolyard.chat.formats import open_format
from toolyard.chat.protocol import ParsedCall
from toolyard.chat.template import TemplateFormat
from toolyard.chat.tokenizers.fast import FastTokenizer
from toolyard.messages import Message, OpenAIFunctionToolSchema

FILE = Path(__file__).parents[2] / "data" / "foreign_dumps.jsonl"
TOOL = OpenAIFunctionToolSchema.model_validate(
    {
        "type": "function",
        "function": {
            "name": "python",
            "description": "Run it.",
            "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
        },
    }
)
PROMPT = [Message("system", "You add numbers."), Message("user", "What is 2+2?")]
CODES = (("print(2+2)", "print('}')"), ("x = 5\nprint(x)",))
RESULTS = (("4", "{'a': 1}"), ("5",))
ANSWER = "The answer is 4."
NAMES = [*(name for name in FAMILIES if name != "command-r-plus"), "smollm2"]
"""The families that trainers' examples use."""


def line_of(chat: TemplateFormat, tokenizer: protocol.Tokenizer) -> tuple[list[int], list[int]]:
    """The ids of a prompt and of its response: two calls, one call, and an answer. Llama and Gemma write no prose
    before a call."""
    harmony = chat.syntax.name == "harmony"
    prompt, response = chat.render(PROMPT, [TOOL]), list[int]()
    for turn, (codes, results) in enumerate(zip(CODES, RESULTS, strict=True)):
        ids = [f"call0{turn}00{at}" for at in range(len(codes))]
        calls = [ParsedCall("python", json.dumps({"code": code}), i) for code, i in zip(codes, ids, strict=True)]
        prose = "" if chat.syntax.name == "llama3" else "I run it.\n"
        if harmony:
            prose = f"<|channel|>analysis<|message|>{prose}<|end|><|start|>assistant"
        sampled = tokenizer.encode(prose + chat.syntax.write(calls))
        answers = [Message("tool", text, tool_call_id=i, name="python") for text, i in zip(results, ids, strict=True)]
        response += [*sampled, *chat.extension(prompt + response, sampled, answers, [TOOL])]
    return prompt, response + tokenizer.encode(f"<|channel|>final<|message|>{ANSWER}" if harmony else ANSWER)


def lines_of(family: str) -> Iterator[dict[str, Any]]:
    """With special tokens, and without, as verl decodes them."""
    tokenizer = family_tokenizer(family)
    chat = open_format(tokenizer)
    assert isinstance(chat, TemplateFormat)
    assert isinstance(tokenizer, FastTokenizer)
    prompt, response = line_of(chat, tokenizer)
    for skip in (False, True):
        said, answered = (tokenizer.backend.decode(ids, skip_special_tokens=skip) for ids in (prompt, response))
        name = f"{family}, {'without' if skip else 'with'} special tokens"
        yield {"input": said, "output": answered, "gts": "4", "score": 1.0, "step": 1, "template": name}


if __name__ == "__main__":
    FILE.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for name in NAMES for line in lines_of(name)))
