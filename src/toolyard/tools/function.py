"""`@tool` turns a typed, documented function into a tool; it can still be called as a function.

    @tool
    def distance(town: str, unit: Literal["km", "miles"] = "km") -> float:
        \"""How far it is to a town.

        Args:
            town: Its name, without the country.
        \"""

The model's schema comes from the annotations and the docstring; the function receives arguments of the annotated types.
The model reads what it returns: text as is, anything else as JSON. A tuple `(text, reward)` or `(text, reward,
metrics)` adds a step reward and metrics, as `BaseTool.execute` does. A parameter `instance_id: str` is hidden from the
model and receives the trajectory's id.

A plain function runs in a thread, and a thread cannot be stopped: after `call.timeout_seconds` the trajectory goes on
without its answer, while the function keeps running. An `async` function is cancelled.
"""

from __future__ import annotations

import functools
import inspect
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar, Generic, ParamSpec, TypeVar, overload

from pydantic import PydanticUserError, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import PydanticSerializationError, to_jsonable_python

from toolyard.errors import ConfigError
from toolyard.messages import JSON, OpenAIFunctionToolSchema
from toolyard.tools.answers import normalize
from toolyard.tools.arguments import ArgumentError
from toolyard.tools.base import BaseTool, ToolResponse
from toolyard.tools.calls import run_method
from toolyard.tools.policy import Recovery

P = ParamSpec("P")
R = TypeVar("R")

_INSTANCE_ID = "instance_id"
_NAME = re.compile(r"[\w.-]{1,64}")
_CONFIG_KEYS = ("type", "call")


@overload
def tool(function: Callable[P, R], /) -> FunctionTool[P, R]: ...
@overload
def tool(
    *, name: str | None = None, description: str | None = None, config: JSON | None = None
) -> Callable[[Callable[P, R]], FunctionTool[P, R]]: ...
def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    config: JSON | None = None,
) -> Any:
    """Make a tool from a function. `config` may hold `call` (see `CallPolicy`); a YAML file may override it.

    Raises:
        ConfigError: the function cannot be shown to a model; the message names it and the parameter.
    """
    if function is None:
        return functools.partial(FunctionTool[..., Any], name=name, description=description, config=config)
    return FunctionTool(function, name=name, description=description, config=config)


class FunctionTool(BaseTool, Generic[P, R]):
    """Made by `@tool`. In YAML, `class_name` is the function's dotted name."""

    call_defaults: Mapping[str, Any] = {"recovery": Recovery.REPLAY}

    def __init__(
        self,
        function: Callable[P, R],
        *,
        name: str | None = None,
        description: str | None = None,
        config: JSON | None = None,
        tool_schema: OpenAIFunctionToolSchema | None = None,
    ) -> None:
        self.function = function
        label = _label(function)
        self._parameters = _parameters_of(function, label)
        self._told_instance = _INSTANCE_ID in inspect.signature(function).parameters
        unknown = [key for key in config or {} if key not in _CONFIG_KEYS]
        if unknown:
            keys = ", ".join(_CONFIG_KEYS)
            raise ConfigError(f"{label}: config: unknown key {unknown[0]!r}; a function's are {keys}")
        if tool_schema is None:
            tool_schema = _schema_of(function, label, self._parameters, name, description)
        super().__init__(config or {}, tool_schema)
        self._check_schema_fits(label)
        functools.update_wrapper(self, function, updated=())  # do not copy the function's attributes

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    def configured(self, config: JSON, tool_schema: OpenAIFunctionToolSchema | None = None) -> FunctionTool[P, R]:
        """Return a tool for the same function. `config` overrides the decorator's, `tool_schema` the generated one."""
        return FunctionTool(
            self.function, config={**self.config, **config}, tool_schema=tool_schema or self.tool_schema
        )

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """Call the function.

        Raises:
            ArgumentError: an argument is not of the annotated type.
        """
        arguments = self._converted(parameters)
        if self._told_instance:
            arguments[_INSTANCE_ID] = _trajectory_of(instance_id, kwargs)
        try:
            returned = await run_method(self.function, **arguments)
        except SystemExit as error:  # it would end the whole run
            raise RuntimeError(f"it asked to exit: {error!r}") from error
        return normalize(returned if _is_full_answer(returned) else _to_json_value(returned))

    def _converted(self, given: Mapping[str, Any]) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        problems: list[str] = []
        for parameter in self._parameters:
            try:
                arguments.update(parameter.converted(given))
            except ValidationError as error:
                problems += [_describe(parameter.name, one) for one in error.errors()]
            except KeyError:
                problems.append(f"{parameter.name!r} is missing")
        if problems:
            raise ArgumentError(f"Error: {self.name} was not called: {'; '.join(problems)}")
        return arguments

    def _check_schema_fits(self, label: str) -> None:
        """A schema from the YAML file may change descriptions, but not the parameters."""
        shown = self.tool_schema.function.parameters.properties.keys()
        own = [parameter.name for parameter in self._parameters]
        for name in shown - set(own):
            raise ConfigError(f"{label}: its tool_schema has a parameter {name!r}; the function has {own}")
        for parameter in self._parameters:
            if parameter.required and parameter.name not in shown:
                raise ConfigError(f"{label}: its tool_schema lacks {parameter.name!r}, which the function needs")


# From the signature ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Parameter:
    name: str
    adapter: TypeAdapter[Any]
    default: Any
    """The function's own default, or `inspect.Parameter.empty`. A default from a pydantic `Field` is in `adapter`."""

    @property
    def required(self) -> bool:
        return self.default is inspect.Parameter.empty and self.adapter.get_default_value() is None

    def converted(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Convert the argument; the result is empty if the function's own default applies.

        Raises:
            KeyError: it is required but missing.
            ValidationError: it is not of the annotated type.
        """
        if self.name in given:
            return {self.name: self.adapter.validate_python(given[self.name])}
        if self.default is not inspect.Parameter.empty:
            return {}
        default = self.adapter.get_default_value()
        if default is None:
            raise KeyError(self.name)
        return {self.name: default.value}

    def with_default(self, schema: JSON) -> JSON:
        if self.default is inspect.Parameter.empty:
            return schema
        try:
            return {**schema, "default": self.adapter.dump_python(self.default, mode="json", warnings=False)}
        except PydanticSerializationError:  # not expressible in JSON: the model only learns that it is optional
            return schema


class _SchemaWithoutTitles(GenerateJsonSchema):
    """Omit titles that only repeat the names."""

    ignored_warning_kinds: ClassVar[Any] = {"skipped-choice", "non-serializable-default"}

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _label(function: Any) -> str:
    """Return the function's name for error messages."""
    if not (inspect.isfunction(function) or inspect.ismethod(function)):
        raise ConfigError(f"@tool expects a function, not {function!r}")
    label = f"@tool {function.__module__}.{function.__qualname__}"
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(f"{label}: generators are not supported; return a value")
    return label


def _parameters_of(function: Any, label: str) -> list[_Parameter]:
    """Return the parameters that the model supplies."""
    found: list[_Parameter] = []
    for parameter in inspect.signature(function).parameters.values():
        where = f"{label}: parameter {parameter.name!r}"
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            stars = "*" if parameter.kind is parameter.VAR_POSITIONAL else "**"
            raise ConfigError(f"{where}: {stars}{parameter.name} has no schema; give each parameter a name and a type")
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ConfigError(f"{where}: models pass arguments by name; remove the '/' after it")
        if parameter.annotation is parameter.empty:
            raise ConfigError(f"{where} has no annotation; write for example {parameter.name}: str")
        annotation = _resolved(function, parameter, where)
        if parameter.name != _INSTANCE_ID:
            found.append(_parameter(parameter, annotation, where))
        elif annotation is not str:
            raise ConfigError(f"{where} receives the trajectory's id; annotate it as str, not {annotation!r}")
    return found


def _resolved(function: Any, parameter: inspect.Parameter, where: str) -> Any:
    """Evaluate the annotation, which is a string under `from __future__ import annotations`."""
    holder = SimpleNamespace(__annotations__={parameter.name: parameter.annotation})
    try:
        return typing.get_type_hints(holder, inspect.unwrap(function).__globals__, include_extras=True)[parameter.name]
    except Exception as error:
        way_out = "; types must be defined at the top level of the module" if isinstance(error, NameError) else ""
        raise ConfigError(
            f"{where}: its annotation {parameter.annotation!r} cannot be read: {error}{way_out}"
        ) from error


def _parameter(parameter: inspect.Parameter, annotation: Any, where: str) -> _Parameter:
    default = parameter.default
    if isinstance(default, FieldInfo):  # x: int = Field(3, description="…")
        annotation, default = Annotated[annotation, default], parameter.empty
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(annotation)
        adapter.json_schema(schema_generator=_SchemaWithoutTitles)
    except PydanticUserError as error:
        raise ConfigError(f"{where}: {annotation!r} cannot be written as JSON: {error.message}") from error
    return _Parameter(parameter.name, adapter, default)


def _schema_of(
    function: Any, label: str, parameters: list[_Parameter], name: str | None, description: str | None
) -> OpenAIFunctionToolSchema:
    name = name or str(function.__name__)
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{label}: {name!r} is not a valid tool name; use up to 64 letters, digits, '_', '-' and '.'")
    documented = read_docstring(inspect.getdoc(function) or "")
    schemas, shared = TypeAdapter.json_schemas(
        [(parameter.name, "validation", parameter.adapter) for parameter in parameters],
        schema_generator=_SchemaWithoutTitles,
    )
    properties: JSON = {}
    for parameter in parameters:
        schema = parameter.with_default(schemas[parameter.name, "validation"])
        if parameter.name in documented.parameters:
            schema.setdefault("description", documented.parameters[parameter.name])
        properties[parameter.name] = schema
    required = [parameter.name for parameter in parameters if parameter.required]
    return OpenAIFunctionToolSchema.model_validate(
        {
            "type": "function",
            "function": {
                "name": name,
                "description": documented.description if description is None else description,
                "parameters": {"type": "object", "properties": properties, "required": required, **shared},
            },
        }
    )


# Calls ----------------------------------------------------------------------------------------------------------------


def _trajectory_of(instance_id: str, kwargs: Mapping[str, Any]) -> str:
    """verl creates an instance for every call and identifies the trajectory by `agent_data`."""
    return str(getattr(kwargs.get("agent_data"), "request_id", None) or instance_id)


def _is_full_answer(returned: Any) -> bool:
    """`(text, reward)` or `(text, reward, metrics)`; any other tuple is data."""
    parts: tuple[Any, ...] = returned if isinstance(returned, tuple) else ()  # pyright: ignore[reportUnknownVariableType]
    if len(parts) not in (2, 3):
        return False
    text, reward, *metrics = parts
    return (
        isinstance(text, str | ToolResponse | None)
        and (reward is None or hasattr(reward, "__float__"))  # includes numpy's and torch's numbers
        and all(isinstance(one, Mapping) for one in metrics)
    )


def _to_json_value(returned: Any) -> Any:
    """Convert what JSON cannot express (dates, dataclasses, sets, models) to the nearest JSON value."""
    if returned is None or isinstance(returned, str | ToolResponse):
        return returned
    try:
        return to_jsonable_python(returned, fallback=str, inf_nan_mode="constants", bytes_mode="base64")
    except ValueError:  # for example a circular reference
        return returned


def _describe(name: str, error: Any) -> str:
    where = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in error["loc"])
    return f"{name}{where}: {error['msg']}"


# Docstrings: the description of a function and its parameters, in Google style or reST.


_SECTION = re.compile(r"(Args|Arguments|Parameters|Params):\s*")
_GOOGLE = re.compile(r"\*{0,2}(\w+)\s*(?:\(.*?\))?\s*:\s*(.*)")
"""`name: text` or `name (type, optional): text`."""
_REST = re.compile(r":(?:param|parameter|arg|argument)\s+(?:[^:]*\s)?\*{0,2}(\w+)\s*:\s*(.*)")
"""`:param name: text` or `:param type name: text`."""
_OTHER = re.compile(r":\w+[^:]*:|[A-Z]\w+:\s*$")
"""Another field or section, which is not for the model."""


@dataclass(frozen=True, slots=True)
class Docstring:
    description: str = ""
    """The first paragraph, on one line."""
    parameters: dict[str, str] = field(default_factory=dict[str, str])


def read_docstring(text: str) -> Docstring:
    """Parse a docstring dedented by `inspect.getdoc`."""
    lines = text.strip().splitlines()
    first: list[str] = []
    for line in lines:
        if not line.strip() or _OTHER.match(line):
            break
        first.append(line.strip())
    return Docstring(" ".join(first), {**_from_rest(lines), **_from_google(lines)})


def _from_google(lines: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    inside, indent, name = False, 0, ""
    for line in lines:
        depth = len(line) - len(line.lstrip())
        if not line.strip():
            continue
        if depth == 0:
            inside, indent, name = _SECTION.fullmatch(line) is not None, 0, ""
        elif inside:
            indent = indent or depth
            entry = _GOOGLE.match(line.strip()) if depth <= indent else None
            if entry:
                name, found[entry[1]] = entry[1], entry[2]
            elif name:
                found[name] = f"{found[name]} {line.strip()}".strip()
    return found


def _from_rest(lines: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    name = ""
    for line in lines:
        entry = _REST.match(line.strip())
        if entry:
            name, found[entry[1]] = entry[1], entry[2]
        elif not line.strip() or line.strip().startswith(":"):
            name = ""
        elif name:
            found[name] = f"{found[name]} {line.strip()}".strip()
    return found
