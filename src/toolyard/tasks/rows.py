"""Convert a row of a dataset to a `Task`. Three formats are supported, detected row by row:

    {"prompt": [{"role": …, "content": …}], "data_source": …, "reward_model": {"ground_truth": …}, "extra_info": {…}}
    {"question": …, "answer": "… #### 18"}
    {"prompt": "…" or [{"role": …}], "answer": …}

The first is verl's, the second GSM8K's own, the third plain; there `ground_truth` may replace `answer`. Every format
may have `id`, `system`, `data_source`, `extra_info`, `tools_kwargs` and `interaction_kwargs`. Other fields of a row are
passed to reward functions in `extra_info`.

A null in `extra_info`, in kwargs or in a message counts as absent: parquet fills every struct with the keys of all
rows, so the null may not have been in the data. In a ground truth nulls are kept.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from toolyard.errors import ConfigError, TaskError
from toolyard.messages import JSON, Message
from toolyard.rewards.gsm8k import final_answer
from toolyard.tasks.protocol import Task

GSM8K_SOURCE = "openai/gsm8k"
GSM8K_INSTRUCTION = "Let's think step by step and output the final answer after `####`."
GSM8K_TOOLS = ("calc_gsm8k_reward", "code_interpreter")
"""The tools that rows of GSM8K have kwargs for. A run without these tools ignores their kwargs."""

_ROLES = ("system", "user", "assistant", "tool")
_KWARGS = ("create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs")
_SHARED_FIELDS = frozenset({"id", "system", "data_source", "extra_info", "tools_kwargs", "interaction_kwargs"})
_ID_CHARS = 200
_VALUE_CHARS = 80


class Shape(StrEnum):
    """The format of a row: see above."""

    VERL = "verl"
    GSM8K = "gsm8k"
    PLAIN = "plain"


_FIELDS = {
    Shape.VERL: _SHARED_FIELDS | {"prompt", "reward_model"},
    Shape.GSM8K: _SHARED_FIELDS | {"question", "answer"},
    Shape.PLAIN: _SHARED_FIELDS | {"prompt", "answer", "ground_truth"},
}
"""Fields with a meaning of their own, by format; all others go to `extra_info`."""


@dataclass(frozen=True, slots=True)
class Wording:
    """Changes applied to every row of a file."""

    system: str | None = None
    """Replaces the row's system message, or is put before the others. Empty: no system message at all."""
    instruction: str | None = None
    """Appended to the last user message, unless already there. None: `GSM8K_INSTRUCTION` for GSM8K's rows only."""
    data_source: str | None = None
    """For rows without one. None: openai/gsm8k for GSM8K's rows, unknown for others."""


AS_WRITTEN = Wording()


def task_of_row(row: Any, task_id: str, wording: Wording = AS_WRITTEN) -> Task:
    """Convert `row` to a task. Numpy arrays and numbers in it become lists and numbers.

    Rows of GSM8K get kwargs for `GSM8K_TOOLS`, as in verl's data, whatever tools the run has: a run ignores the kwargs
    of tools that it does not have.

    Raises:
        TaskError: a field is missing or wrong; the message names it, but not the file.
    """
    try:
        shape = shape_of(row)
        given: JSON = _plain(row, drop_nulls=False)
        extra = _mapping(given, "extra_info")
        extra = {**{key: _plain(value) for key, value in given.items() if key not in _FIELDS[shape]}, **extra}
        extra = {key: value for key, value in extra.items() if value is not None}
        match shape:
            case Shape.VERL:
                truth = _of_reward_model(given)
            case Shape.GSM8K:
                truth = _number(given)
                extra = {"question": given["question"], "answer": given["answer"], **extra}
            case Shape.PLAIN:
                truth = _answer(given)
        kwargs = _tools_kwargs(given, extra)
        if shape is Shape.GSM8K:
            kwargs = {**gsm8k_kwargs(truth), **kwargs}
        elif extra.get("need_tools_kwargs") is True and not kwargs:
            raise TaskError("extra_info.need_tools_kwargs is true, but extra_info.tools_kwargs is missing")
        return Task(
            id=task_id,
            messages=_worded(_messages(given, shape), _text(given, "system"), shape, wording),
            ground_truth=truth,
            data_source=_source(given, shape, wording),
            extra_info=extra,
            tools_kwargs=kwargs,
            interaction_kwargs=_mapping(given, "interaction_kwargs") or _inner(extra, "interaction_kwargs") or None,
        )
    except RecursionError:
        raise TaskError("the row is nested too deeply to be a task") from None


def shape_of(row: Any) -> Shape:
    """Return the format of a row, by its fields.

    Raises:
        TaskError: none of the three.
    """
    if not isinstance(row, Mapping):
        raise TaskError(f"expected an object with fields, not {_short(row)}")
    there = {str(key) for key, value in row.items() if value is not None}  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    if "prompt" in there:
        return Shape.VERL if "reward_model" in there else Shape.PLAIN
    if "question" in there:
        return Shape.GSM8K
    fields = ", ".join(sorted(there)) or "none"
    raise TaskError(
        f"it has neither 'prompt' nor 'question'; fields: {_cut(fields)}; expected prompt and answer, question and "
        "answer, or verl's prompt and reward_model"
    )


def ids_of(row: Any, stem: str) -> tuple[str | None, str | None]:
    """Return the row's own id, and the one made from the split and index in `extra_info`, if they exist.

    `stem` replaces a missing split.

    Raises:
        TaskError: `id` is neither a string nor an integer.
    """
    if not isinstance(row, Mapping):
        return None, None
    given: Any = row.get("id")  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    own = _as_id(given)
    if given is not None and own is None:
        raise TaskError(
            f"id: expected an integer or a string of at most {_ID_CHARS} printable characters, not {_short(given)}"
        )
    extra: Any = row.get("extra_info")  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    if not isinstance(extra, Mapping):
        return own, None
    index, split = (_as_id(extra.get(key)) for key in ("index", "split"))  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    return own, None if index is None else f"{split or stem}-{index}"


def gsm8k_kwargs(ground_truth: str) -> dict[str, dict[str, JSON]]:
    return {name: {"create_kwargs": {"ground_truth": ground_truth}} for name in GSM8K_TOOLS}


# Ground truths --------------------------------------------------------------------------------------------------------


def _of_reward_model(row: JSON) -> Any:
    model = row["reward_model"]
    if not isinstance(model, dict):
        raise TaskError(f"reward_model: expected an object with ground_truth, not {_short(model)}")
    if "ground_truth" not in model:
        raise TaskError("reward_model.ground_truth is missing; use null if there is none")
    return model["ground_truth"]  # pyright: ignore[reportUnknownVariableType]


def _number(row: JSON) -> str:
    answer = row.get("answer")
    if answer is None:
        raise TaskError(
            "answer is missing; a row with 'question' is taken as GSM8K's, whose answer ends in '#### number'"
        )
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise TaskError(f"answer: expected a solution that ends in '#### number', not {_short(answer)}")
    try:
        return final_answer(answer)
    except ConfigError:
        raise TaskError(
            f"answer: {_short(answer)} does not end in '#### number', as GSM8K's do; for other kinds of answers name "
            "the field 'prompt' instead of 'question'"
        ) from None


def _answer(row: JSON) -> Any:
    found = [name for name in ("answer", "ground_truth") if name in row]
    if not found:
        raise TaskError("it has none of 'answer', 'ground_truth' and verl's 'reward_model'; use null if there is none")
    values = [row[name] for name in found if row[name] is not None]
    if len(values) > 1 and values[0] != values[1]:
        raise TaskError(f"answer {_short(values[0])} and ground_truth {_short(values[1])} differ; give one of them")
    return values[0] if values else None


# Conversations --------------------------------------------------------------------------------------------------------


def _messages(row: JSON, shape: Shape) -> list[Message]:
    name = "question" if shape is Shape.GSM8K else "prompt"
    prompt: Any = row[name]
    if isinstance(prompt, str):
        messages = [Message("user", prompt)]
    elif isinstance(prompt, list) and shape is not Shape.GSM8K:
        messages = [_message(f"{name}[{index}]", raw) for index, raw in enumerate(_plain(prompt))]
    else:
        kinds = "a string" if shape is Shape.GSM8K else "a string or a list of messages"
        raise TaskError(f"{name}: expected {kinds}, not {_short(prompt)}")
    if not messages:
        raise TaskError(f"{name}: the list of messages is empty")
    if messages[-1].role != "user":
        raise TaskError(f"{name}: the last message has the role {messages[-1].role!r}; expected a user message last")
    if not messages[-1].content.strip():
        raise TaskError(f"{name}: the user message is empty")
    return messages


def _message(place: str, raw: Any) -> Message:
    if not isinstance(raw, dict):
        raise TaskError(f"{place}: expected a message with role and content, not {_short(raw)}")
    fields: JSON = raw  # pyright: ignore[reportUnknownVariableType]
    if fields.get("role") not in _ROLES:
        raise TaskError(f"{place}.role: {_short(fields.get('role'))} is not one of {', '.join(_ROLES)}")
    for name in ("reasoning_content", "tool_call_id", "name"):
        if not isinstance(fields.get(name, ""), str):
            raise TaskError(f"{place}.{name}: expected a string, not {_short(fields[name])}")
    if not isinstance(fields.get("tool_calls", []), list):
        raise TaskError(f"{place}.tool_calls: expected a list, not {_short(fields['tool_calls'])}")
    if fields["role"] != "assistant" and "content" not in fields:
        raise TaskError(f"{place}.content is missing")
    try:
        return Message.from_openai(fields)
    except ValueError as error:
        raise TaskError(f"{place}: {error}") from None


def _worded(messages: list[Message], system: str | None, shape: Shape, wording: Wording) -> tuple[Message, ...]:
    system = system if wording.system is None else wording.system
    if system is not None:
        messages = [message for message in messages if message.role != "system"]
        messages = [Message("system", system), *messages] if system else messages
    instruction = wording.instruction
    if instruction is None:
        instruction = GSM8K_INSTRUCTION if shape is Shape.GSM8K else ""
    *before, last = messages
    if instruction and instruction not in last.content:
        last = replace(last, content=f"{last.content} {instruction}")
    return (*before, last)


# Other fields ---------------------------------------------------------------------------------------------------------


def _source(row: JSON, shape: Shape, wording: Wording) -> str:
    usual = GSM8K_SOURCE if shape is Shape.GSM8K else "unknown"
    return _text(row, "data_source") or wording.data_source or usual


def _tools_kwargs(row: JSON, extra: JSON) -> dict[str, dict[str, JSON]]:
    found = _mapping(row, "tools_kwargs") or _inner(extra, "tools_kwargs")
    for tool, kwargs in found.items():
        place = f"tools_kwargs[{tool!r}]"
        if not isinstance(kwargs, dict):
            raise TaskError(f"{place}: expected an object with {', '.join(_KWARGS)}, not {_short(kwargs)}")
        for kind, value in kwargs.items():  # pyright: ignore[reportUnknownVariableType]
            if kind not in _KWARGS:
                raise TaskError(f"{place}: unknown key {_short(kind)}; expected {', '.join(_KWARGS)}")
            if not isinstance(value, dict):
                raise TaskError(f"{place}.{kind}: expected an object, not {_short(value)}")
    return found


def _mapping(row: JSON, name: str) -> JSON:
    """Return a mapping; empty if it is missing or has only nulls."""
    return _as_mapping(row.get(name), name)


def _inner(extra: JSON, name: str) -> JSON:
    return _as_mapping(extra.get(name), f"extra_info.{name}")


def _as_mapping(value: Any, place: str) -> JSON:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise TaskError(f"{place}: expected an object, not {_short(value)}")
    return _plain(value) or {}


def _text(row: JSON, name: str) -> str | None:
    value = row.get(name)
    if value is not None and not isinstance(value, str):
        raise TaskError(f"{name}: expected a string, not {_short(value)}")
    return value


def _as_id(value: Any) -> str | None:
    if not isinstance(value, Mapping | list | tuple):
        value = _plain(value)
    if isinstance(value, float) and value.is_integer():  # a column of numbers with a gap somewhere
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, str | int):
        return None
    written = str(value)
    return written if 0 < len(written) <= _ID_CHARS and written.isprintable() else None


def _plain(value: Any, *, drop_nulls: bool = True) -> Any:
    """Convert to JSON values. A mapping with nothing but nulls becomes null."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str | float):  # includes numpy's, which JSON writers do not support
        return str(value) if isinstance(value, str) else float(value)
    if isinstance(value, Mapping):
        pairs = [(str(key), _plain(inner, drop_nulls=drop_nulls)) for key, inner in value.items()]  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        kept = {key: inner for key, inner in pairs if inner is not None or not drop_nulls}
        return kept if kept or not pairs else None
    if isinstance(value, list | tuple):
        return [_plain(inner, drop_nulls=drop_nulls) for inner in value]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    as_list = getattr(value, "tolist", None)
    return _plain(as_list(), drop_nulls=drop_nulls) if callable(as_list) else str(value)


def _short(value: Any) -> str:
    try:
        return _cut(repr(value))
    except RecursionError:
        return f"a {type(value).__name__} that is nested too deeply"


def _cut(written: str) -> str:
    return written if len(written) <= _VALUE_CHARS else written[:_VALUE_CHARS] + "…"
