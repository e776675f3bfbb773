"""Values written as plain text: the tool's schema says whether `5` is a number or a string."""

from __future__ import annotations

from typing import Any

from toolyard.chat.protocol import Tools
from toolyard.chat.syntax.scanning import decode_value, quote
from toolyard.messages import JSON

PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
"""Qwen3-Coder's template writes values this way, and the model imitates it."""
_DEPTH = 8
"""Maximum number of references and alternatives of a schema that are followed."""


def read_value(tools: Tools, tool: str, key: str, text: str) -> str:
    """Return the JSON of what `text` means as that argument of that tool.

    A string stays exactly as written, including spaces. Anything else is JSON if it is valid JSON, otherwise text: the
    tool will reject it. If the schema says nothing, valid JSON other than a string is JSON.
    """
    allowed = _allowed(tools, tool, key)
    if allowed == {"string"}:
        return quote(text)
    bare = text.strip()
    if allowed & {"boolean", "null"}:
        bare = PYTHON_WORDS.get(bare, bare)
    value, is_json = decode_value(bare)
    if not is_json:
        return quote(text)
    if isinstance(value, str) and (not allowed or "string" in allowed):
        return quote(text)
    if "string" in allowed and not _kinds(value) & allowed:
        return quote(text)
    return bare


def _allowed(tools: Tools, tool: str, key: str) -> set[str]:
    """Return the types that the schema allows; empty if it does not say."""
    for known in tools:
        parameters = known.function.parameters
        if known.function.name == tool and key in parameters.properties:
            return _types(parameters.properties[key].model_dump(), parameters.model_extra or {}, _DEPTH)
    return set()


def _types(schema: Any, root: JSON, depth: int) -> set[str]:
    if not isinstance(schema, dict) or not depth:
        return set()
    known: JSON = schema  # pyright: ignore[reportUnknownVariableType]
    if isinstance(known.get("type"), str):
        return {known["type"]}
    if isinstance(known.get("type"), list):
        return set(map(str, known["type"]))
    for either in ("anyOf", "oneOf"):
        if isinstance(known.get(either), list):
            found = [_types(branch, root, depth - 1) for branch in known[either]]
            return set[str]().union(*found) if all(found) else set()
    if isinstance(known.get("enum"), list):
        return set[str]().union(*map(_kinds, known["enum"]))
    if isinstance(known.get("$ref"), str):
        return _types(_target(known["$ref"], root), root, depth - 1)
    return set()


def _target(reference: str, root: JSON) -> Any:
    """Resolve `#/$defs/Name`; nothing if it is elsewhere."""
    found: Any = root
    for step in reference.removeprefix("#/").split("/"):
        found = found.get(step) if isinstance(found, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return found  # pyright: ignore[reportUnknownVariableType]


def _kinds(value: Any) -> set[str]:
    """Return the JSON Schema types of a value."""
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int | float):
        return {"number", "integer"} if value % 1 == 0 else {"number"}
    return {"string"} if isinstance(value, str) else {"array"} if isinstance(value, list) else {"object"}
