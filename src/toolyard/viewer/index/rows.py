"""What the index stores about a line: the columns to show, sort and filter by, and the text to search.

A line is damaged if and only if `trajectory_in` refuses it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from operator import attrgetter
from typing import Any, NamedTuple, cast

from toolyard.errors import RecordError
from toolyard.messages import JSON
from toolyard.records.jsonl import decode, encode, finite
from toolyard.records.lines import UNKNOWN, trajectory_of
from toolyard.records.trajectory import Trajectory
from toolyard.records.trl import as_verl, is_completion, rewards_of
from toolyard.viewer.ansi import without_styles
from toolyard.viewer.foreign import ForeignCounts, counts_in
from toolyard.viewer.index.plain import is_plain
from toolyard.viewer.index.search import folded
from toolyard.viewer.protocol import LineFacts

LABEL_CHARS = 200
PREVIEW_CHARS = 160
DAMAGED_CHARS = 100_000
"""How much of a damaged line can be searched."""

_END_CHARS = 2000
"""How much of an error is looked at for its last line."""
_OK = "ok"
_BLANK: dict[str, Any] = {"str": "", "int": 0}
"""What a damaged line says, by the type of a field."""
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


COLUMNS = tuple(fact.name for fact in fields(LineFacts))
"""The columns of the index that come from the line itself."""
_facts_of = attrgetter(*COLUMNS)


class CallEntry(NamedTuple):
    """A tool call, as the index has it."""

    at: int
    """Its place in the trajectory, from 0."""
    turn: int
    tool: str
    verdict: str
    """The sandbox's verdict if the outcome is ok, otherwise the outcome."""
    failed: bool
    seconds: float | None
    wait: float | None
    error: str
    """The last line of what went wrong; empty if it did not."""


class IndexEntry(NamedTuple):
    """Everything the index stores about one line."""

    facts: LineFacts
    calls: Sequence[CallEntry]
    rewards: Mapping[str, float]
    text: bytes
    """Its readable text, folded: see `search`."""

    @property
    def columns(self) -> tuple[Any, ...]:
        """The values of `COLUMNS`."""
        return _facts_of(self.facts)


def entry_of(line: bytes, step: int) -> IndexEntry:
    """`step`: the step of its file, for damaged lines."""
    try:
        said = decode(line)
        row: JSON = said if is_completion(said) else {}
        said = as_verl(row) if row else said
        if not is_plain(said):
            trajectory_in(line)
        entry = _entry(said)
        return entry._replace(rewards={label(name): one for name, one in rewards_of(row).items()}) if row else entry
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
    facts: dict[str, Any] = {name: _BLANK.get(kind) for name, kind in LineFacts.__annotations__.items()}
    facts |= {"step": _whole(step), "damaged": label(why) or "damaged"}
    return IndexEntry(
        LineFacts(**facts), (), {}, folded(line[: 4 * DAMAGED_CHARS].decode("utf-8", "replace")[:DAMAGED_CHARS])
    )


def label(text: str, limit: int = LABEL_CHARS) -> str:
    """`text` on one line and printable, so that nothing in it moves the cursor or changes the writing direction."""
    text = without_styles(text[: 4 * limit])
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
    entries = tuple(_call_entries(turns))
    counted = ForeignCounts(len(turns), len(calls)) if is_ours else counts_in(asked, answered)
    tokens: JSON = of_ours.get("tokens", {})
    prompt_ids, response_ids = tokens.get("prompt_ids", ()), tokens.get("response_ids", ())
    has_tokens = bool(prompt_ids or response_ids)
    failure: JSON = of_ours.get("failure") or {}
    request_id = said.get("request_id")
    facts = LineFacts(
        step=_whole(said.get("step", 0)),
        request_id="" if request_id is None else label(str(request_id)),
        task=task,
        group_id=zlib.crc32((task or asked).encode("utf-8", "surrogatepass")),
        sample=_whole(of_ours.get("rollout_offset", 0)),
        score=finite(said.get("score")),
        finish=label(of_ours.get("finish_reason", UNKNOWN)),
        state=label(of_ours.get("state", "COMPLETED")),
        failure=label(failure.get("error", "") or failure.get("cause", "")),
        source=label(of_ours.get("data_source", UNKNOWN)),
        truth=_truth(said.get("gts")),
        turns=counted.turns,
        tools=counted.tools,
        failed_tools=sum(entry.failed for entry in entries) if is_ours else None,
        prompt_tokens=len(prompt_ids) if has_tokens else None,
        response_tokens=len(response_ids) if has_tokens else None,
        sampled_tokens=tokens.get("response_mask", []).count(1) if has_tokens else None,
        chars=len(asked) + len(answered),
        started_at=finite(of_ours.get("started_at")),
        seconds=_seconds(of_ours.get("metrics", {}), turns) or None,
        preview=_preview(asked, messages, len(turns)),
        damaged="",
    )
    rewards = {
        label(name): value for name, one in of_ours.get("rewards", {}).items() if (value := _number(one)) is not None
    }
    parts = _parts(of_ours, messages, calls)
    return IndexEntry(facts, entries, rewards, folded(asked, answered, *_not_contained(asked, answered, parts)))


def _call_entries(turns: list[JSON]) -> Iterator[CallEntry]:
    at = 0
    for number, turn in enumerate(turns):
        for call in cast("list[JSON]", turn.get("tool_calls", ())):
            outcome, metrics = call.get("outcome", UNKNOWN), call.get("metrics", {})
            verdict = metrics.get("verdict")
            ended = _OK if verdict is None else label(verdict) if isinstance(verdict, str) else UNKNOWN
            failed = outcome != _OK or ended != _OK
            yield CallEntry(
                at,
                number,
                label(call["name"]),
                ended if outcome == _OK else label(outcome),
                failed,
                _number(call.get("seconds")) or None,
                _number(metrics.get("queue_seconds")),
                _last_line(call.get("error") or call.get("response", "")) if failed else "",
            )
            at += 1


def _last_line(text: str) -> str:
    return label(text[-_END_CHARS:].rstrip().rpartition("\n")[2].strip())


def _number(value: Any) -> float | None:
    try:
        return finite(value) if type(value) in (int, float) else None
    except OverflowError:
        return None


def _truth(value: Any) -> str:
    """On one line; a verl task may have the name of its scorer beside it."""
    if isinstance(value, dict):
        value = cast("JSON", value).get("ground_truth", value)
    text = value if isinstance(value, str) else ""
    if not isinstance(value, str | None):
        with suppress(RecordError, RecursionError):  # nested too deeply
            text = encode(value).decode("utf-8", "replace")
    return label(" ".join(text[: 4 * LABEL_CHARS].split()))


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
