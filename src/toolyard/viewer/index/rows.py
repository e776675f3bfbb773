"""What the index stores about a line: the columns to show, sort and filter by, and the text to search.

A line is damaged if and only if `trajectory_in` refuses it.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields
from operator import attrgetter
from typing import Any, NamedTuple, cast

from toolyard.errors import RecordError
from toolyard.messages import JSON
from toolyard.records.jsonl import decode, finite
from toolyard.records.lines import UNKNOWN, trajectory_of
from toolyard.records.trajectory import Trajectory
from toolyard.viewer.index.plain import is_plain
from toolyard.viewer.index.search import folded
from toolyard.viewer.protocol import LineFacts

LABEL_CHARS = 200
PREVIEW_CHARS = 160
DAMAGED_CHARS = 100_000
"""How much of a damaged line can be searched."""

_OK = "ok"
_SPEAKERS = (
    "<|im_start|>user\n",
    "<|start_header_id|>user<|end_header_id|>\n",
    "<start_of_turn>user\n",
    "<|user|>",
    "[INST]",
    "\nuser\n",
)
"""How templates start a user message; the last is what verl leaves of the first, without special tokens."""
_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|assistant|>", "[/INST]", "\nassistant\n")
_LOOKED_FOR = 200
"""How many parts are looked up in input and output: a line of a million messages must not take hours."""


_FACTS = tuple(fact.name for fact in fields(LineFacts))
_facts_of = attrgetter(*_FACTS)
COLUMNS = (*_FACTS, "family")
"""The columns of the index that come from the line itself."""


class IndexEntry(NamedTuple):
    """Everything the index stores about one line."""

    facts: LineFacts
    family: int
    """Equal for the samples of one task: a hash of its name or, if lines have none, of the prompt."""
    verdicts: Mapping[str, int]
    """Number of calls by verdict."""
    text: bytes
    """Its readable text, folded: see `search`."""

    @property
    def columns(self) -> tuple[Any, ...]:
        """The values of `COLUMNS`."""
        return (*_facts_of(self.facts), self.family)


def entry_of(line: bytes, step: int) -> IndexEntry:
    """`step`: the step of its file, for damaged lines."""
    try:
        said = decode(line)
        if not is_plain(said):
            trajectory_in(line)
        return _entry(said)
    except RecordError as error:
        return damaged(str(error), line, step)
    except Exception as error:  # an unforeseen line must not prevent the others from being shown
        return damaged(f"{type(error).__name__}: {error}", line, step)


def trajectory_in(line: bytes) -> Trajectory:
    """
    Raises:
        RecordError: the line is not a trajectory, for whatever reason.
    """
    try:
        return trajectory_of(line)
    except RecordError:
        raise
    except Exception as error:  # as above
        raise RecordError(f"not a trajectory: {type(error).__name__}: {error}") from None


def damaged(why: str, line: bytes, step: int) -> IndexEntry:
    facts = LineFacts(_whole(step), "", "", 0, None, "", "", "", 0, 0, 0, 0, 0, 0, 0, 0.0, "", label(why) or "damaged")
    return IndexEntry(facts, 0, {}, folded(line[: 4 * DAMAGED_CHARS].decode("utf-8", "replace")[:DAMAGED_CHARS]))


def label(text: str, limit: int = LABEL_CHARS) -> str:
    """`text` on one line and printable, so that nothing in it moves the cursor or changes the writing direction."""
    short = text if len(text) <= limit else f"{text[: limit - 1]}…"
    return short if short.isprintable() else "".join(char if char.isprintable() else "\ufffd" for char in short)


def _entry(said: JSON) -> IndexEntry:
    is_ours = type(said.get("format_version")) is int
    of_ours: JSON = said if is_ours else {}
    asked, answered = cast("str", said["input"]), cast("str", said["output"])
    task = label(of_ours.get("batch_data_id", ""))
    messages: list[JSON] = of_ours.get("messages", [])
    turns: list[JSON] = of_ours.get("turns", [])
    calls: list[JSON] = [call for turn in turns for call in turn.get("tool_calls", ())]
    verdicts, failed = _verdicts(calls)
    tokens: JSON = of_ours.get("tokens", {})
    request_id = said.get("request_id")
    facts = LineFacts(
        step=_whole(said.get("step", 0)),
        request_id="" if request_id is None else label(str(request_id)),
        task=task,
        sample=_whole(of_ours.get("rollout_offset", 0)),
        score=finite(said.get("score")),
        finish=label(of_ours.get("finish_reason", UNKNOWN)),
        state=label(of_ours.get("state", "COMPLETED")),
        source=label(of_ours.get("data_source", UNKNOWN)),
        turns=len(turns),
        tools=len(calls),
        failed_tools=failed,
        prompt_tokens=len(tokens.get("prompt_ids", ())),
        response_tokens=len(tokens.get("response_ids", ())),
        sampled_tokens=tokens.get("response_mask", []).count(1),
        chars=len(asked) + len(answered),
        seconds=_seconds(of_ours.get("metrics", {}), turns),
        preview=_preview(asked, messages, len(turns)),
        damaged="",
    )
    family = zlib.crc32((task or asked).encode("utf-8", "surrogatepass"))
    parts = _parts(of_ours, messages, calls)
    return IndexEntry(facts, family, verdicts, folded(asked, answered, *_not_contained(asked, answered, parts)))


def _verdicts(calls: list[JSON]) -> tuple[Counter[str], int]:
    """Calls by verdict, and how many failed."""
    found: Counter[str] = Counter()
    failed = 0
    for call in calls:
        outcome, verdict = call.get("outcome", UNKNOWN), call.get("metrics", {}).get("verdict")
        ended = _OK if verdict is None else label(verdict) if isinstance(verdict, str) else UNKNOWN
        found[label(outcome) if outcome != _OK else ended] += 1
        failed += outcome != _OK or ended != _OK
    return found, failed


def _seconds(metrics: JSON, turns: list[JSON]) -> float:
    said = metrics.get("seconds")
    if isinstance(said, dict):
        return _sum(cast("JSON", said))
    if said is not None:
        return _sum({"all": said})
    return sum(_sum({**turn.get("timings", {}), "started": 0.0}) for turn in turns)


def _sum(stages: JSON) -> float:
    try:
        return finite(sum(value for value in stages.values() if type(value) in (int, float))) or 0.0
    except OverflowError:
        return 0.0


def _preview(asked: str, messages: list[JSON], turns: int) -> str:
    """`turns`: number of sampled assistant messages; earlier ones are examples in the prompt."""
    examples = sum(message["role"] == "assistant" for message in messages) - turns
    said, by_user = "", False
    for message in messages:
        role = message["role"]
        if role == "assistant":
            if examples <= 0:
                break
            examples -= 1
        elif role == "user" or not by_user:
            said, by_user = _content(message), role == "user"
    beginning = (said or _last_asked(asked))[: 8 * PREVIEW_CHARS]
    return label(" ".join(beginning.split()), PREVIEW_CHARS)


def _last_asked(prompt: str) -> str:
    """The part of a plain-text prompt after the last marker of a user, or all of it."""
    prompt = f"\n{prompt}"  # so that a marker at the very start follows a newline, like any other
    start = max((at + len(mark) for mark in _SPEAKERS if (at := prompt.rfind(mark)) >= 0), default=0)
    said = prompt[start : start + 8 * PREVIEW_CHARS]
    return said[: min((at for mark in _ENDS if (at := said.find(mark)) >= 0), default=len(said))]


def _whole(value: int) -> int:
    """`value` clamped to SQLite's range."""
    return max(-(1 << 63), min(value, (1 << 63) - 1))


# The text to search in ------------------------------------------------------------------------------------------------


def _parts(said: JSON, messages: list[JSON], calls: list[JSON]) -> Iterator[Any]:
    """All parts of a line whose text can be searched."""
    arguments: list[Any] = []
    for message in messages:
        yield _content(message)
        yield message.get("reasoning_content")
        for asked in cast("list[JSON]", message.get("tool_calls") or ()):
            function: JSON = asked.get("function", asked)
            yield function["name"]
            arguments.append(function.get("arguments"))
    for call in calls:
        yield call["name"]
        yield call.get("response", "")
        yield call.get("error")
        arguments.append(call.get("arguments"))
    yield from _argument_texts(arguments)
    for turn in cast("list[JSON]", said.get("turns", ())):
        yield turn.get("sampled", {}).get("text", "")
    failure: JSON = said.get("failure") or {}
    yield failure.get("error", "")


def _not_contained(asked: str, answered: str, parts: Iterator[Any]) -> Iterator[str]:
    """The parts that input and output do not contain; they contain most of a conversation."""
    seen: set[str] = set()
    for part in parts:
        if not isinstance(part, str) or not (text := part.strip()) or text in seen:
            continue
        if len(seen) < _LOOKED_FOR and (text in answered or text in asked):
            seen.add(text)
            continue
        seen.add(text)
        yield text


def _content(message: JSON) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = cast("list[Any]", content) if isinstance(content, list) else []
    return "".join(part if isinstance(part, str) else part.get("text", "") for part in parts)


def _argument_texts(arguments: list[Any]) -> Iterator[str]:
    """Arguments as written, and as shown: a program with its line breaks and quotes."""
    seen: set[str] = set()
    for said in arguments:
        if not isinstance(said, str):
            yield from _texts_in(said)
        elif said not in seen:
            seen.add(said)
            yield said
            if "\\" in said:
                with suppress(RecordError, ValueError):
                    yield from _texts_in(decode(said.encode()))


def _texts_in(value: Any) -> Iterator[str]:
    stack: list[Any] = [value]
    while stack:
        value = stack.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            stack += reversed(cast("JSON", value).values())
        elif isinstance(value, list):
            stack += reversed(cast("list[Any]", value))
