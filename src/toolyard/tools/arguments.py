"""Check a call's arguments against the tool's schema, with messages a model can act on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import jsonschema_rs

from toolyard.errors import ConfigError
from toolyard.messages import JSON, OpenAIFunctionToolSchema, decode_arguments

_PROBLEMS = 5
_VALUE = 120


class ArgumentError(Exception):
    """The model's mistake: the message is for the model."""


class Arguments:
    """The argument check for one tool, compiled once."""

    def __init__(self, schema: OpenAIFunctionToolSchema) -> None:
        parameters = _without_nulls(schema.function.parameters.model_dump())
        self._name = schema.function.name
        self._expected = _signature(parameters)
        try:
            self._validator = jsonschema_rs.validator_for(parameters, retriever=_refuse_to_fetch)
        except (jsonschema_rs.ValidationError, ValueError) as error:
            reason = getattr(error, "message", str(error))
            raise ConfigError(f"tool {self._name!r}: its parameters are not a JSON Schema: {reason}") from None

    def check(self, given: str | Mapping[str, Any]) -> JSON:
        """Return the arguments as a dictionary, converted to the schema's types. Unknown arguments are kept.

        Raises:
            ArgumentError: they do not match the schema.
        """
        if isinstance(given, str):
            arguments, problem = decode_arguments(given or "{}")
            if problem is not None:
                raise ArgumentError(self._message([problem]))
        else:
            arguments = dict(given)
        try:
            if self._validator.is_valid(arguments):
                return arguments
            found = zip(self._validator.iter_errors(arguments), range(_PROBLEMS), strict=False)
            problems = [_describe(error) for error, _ in found]
        except ValueError as error:  # nested too deeply for the validator, or invalid Unicode
            problems = [f"the arguments cannot be checked: {error}"]
        raise ArgumentError(self._message(problems))

    def _message(self, problems: list[str]) -> str:
        return f"Error: {self._name} was not called: {'; '.join(problems)}. Expected arguments: {self._expected}"


def _refuse_to_fetch(uri: str) -> Any:
    """A schema may come from an untrusted server and must not make us fetch URLs."""
    raise ValueError(f"it refers to {uri}, but external schemas are not fetched; put it under $defs")


def _describe(error: Any) -> str:
    where = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in error.instance_path).lstrip(".")
    message = error.message if len(error.message) <= 3 * _VALUE else error.message[: 3 * _VALUE] + "…"
    return f"{where}: {message}" if where else message


def _signature(parameters: Mapping[str, Any]) -> str:
    """Describe the arguments on one line: `{"code": string, "timeout"?: number}`."""
    required = set(parameters.get("required", ()))
    known: Mapping[str, Any] = parameters.get("properties", {})
    parts = [
        f"{json.dumps(name)}{'' if name in required else '?'}: {_kind(schema, parameters)}"
        for name, schema in known.items()
    ]
    return "{" + ", ".join(parts) + "}"


def _kind(schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return "one of " + ", ".join(json.dumps(value) for value in schema["enum"])[:_VALUE]
    for either in ("anyOf", "oneOf"):
        if either in schema:
            return " or ".join(_kind(option, root) for option in schema[either])[:_VALUE]
    if "$ref" in schema:
        name = str(schema["$ref"]).rpartition("/")[2]
        known: Any = {**root.get("definitions", {}), **root.get("$defs", {})}.get(name, {})
        return str(known.get("type", name)) if isinstance(known, Mapping) else name  # pyright: ignore
    kind: Any = schema.get("type")
    if isinstance(kind, list):
        return " or ".join(str(one) for one in kind)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    if kind == "array" and isinstance(schema.get("items"), Mapping):
        return f"array of {_kind(schema['items'], root)}"
    return str(kind) if kind else "any"


_LITERAL = frozenset({"const", "default", "enum", "examples"})
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})


def _without_nulls(schema: Any) -> Any:
    """Some frameworks write `"enum": null` for "no enum", likewise for other keywords; JSON Schema forbids that."""
    if isinstance(schema, list):
        return [_without_nulls(one) for one in schema]  # pyright: ignore[reportUnknownVariableType]
    if not isinstance(schema, dict):
        return schema
    kept: JSON = {}
    for key, value in schema.items():  # pyright: ignore[reportUnknownVariableType]
        if key in _BY_NAME and isinstance(value, dict):
            kept[key] = {name: _without_nulls(one) for name, one in value.items()}  # pyright: ignore
        elif key in ("const", "default") or (key in _LITERAL and value is not None):
            kept[key] = value
        elif value is not None:
            kept[key] = _without_nulls(value)
    return kept
