"""`@tool`: what a model learns about a function, and what the function gets from a model."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional

import pytest
from pydantic import AfterValidator, BaseModel, Field

from patience import patient
from toolyard.errors import ConfigError
from toolyard.messages import OpenAIFunctionToolSchema
from toolyard.tools import BaseTool, ToolResponse, open_instance, tool
from toolyard.tools.arguments import ArgumentError
from toolyard.tools.function import FunctionTool, read_docstring
from toolyard.tools.instance import ToolOutcome, ToolResult

if TYPE_CHECKING:
    from decimal import Decimal


class Place(BaseModel):
    """Somewhere."""

    lat: float
    lon: float
    inside: Optional[Place] = None  # noqa: UP045 - the older way to write it


class Trip(BaseModel):
    start: Place
    days: int = 1


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Found:
    title: str
    when: date


def even(value: int) -> int:
    if value % 2:
        raise ValueError(f"{value} is odd")
    return value


@tool
def look_up(
    word: str,
    language: Literal["en", "zh"] = "en",
    limit: Optional[int] = None,  # noqa: UP045
    pages: list[int] = [1, 2],  # noqa: B006 - that is the default's schema
    exact: Annotated[bool, Field(description="Only this very word.")] = False,
) -> str:
    """Look a word up
    in the dictionary.

    This paragraph is for people.

    Args:
        word: What to look up.
            It may be a phrase.
        language (str, optional): The dictionary: of which language.
        exact: Not read: the annotation says more.

    Returns:
        Its meaning.
    """
    return f"{word} {language} {limit} {pages} {exact}"


@tool
def plan(trip: Trip, stops: list[Place], via: Annotated[Place | None, Field(description="On the way.")] = None) -> str:
    """Plan a trip."""
    assert isinstance(trip, Trip)
    assert all(isinstance(stop, Place) for stop in stops)
    return f"{trip.days} days, {len(stops)} stops, {type(via).__name__}"


def parameters_of(one: BaseTool) -> dict[str, Any]:
    return one.tool_schema.function.parameters.model_dump()


async def call(one: BaseTool, arguments: str | dict[str, Any], request_id: str = "request") -> ToolResult:
    async with open_instance(one, request_id) as instance:
        return await instance.call(arguments)


class TestSchema:
    def test_comes_from_the_signature_and_the_docstring(self) -> None:
        assert look_up.tool_schema.model_dump() == {
            "type": "function",
            "function": {
                "name": "look_up",
                "description": "Look a word up in the dictionary.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "word": {"type": "string", "description": "What to look up. It may be a phrase."},
                        "language": {
                            "type": "string",
                            "enum": ["en", "zh"],
                            "description": "The dictionary: of which language.",
                            "default": "en",
                        },
                        "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
                        "pages": {"type": "array", "items": {"type": "integer"}, "default": [1, 2]},
                        "exact": {"type": "boolean", "description": "Only this very word.", "default": False},
                    },
                    "required": ["word"],
                },
            },
        }

    def test_nested_models_are_kept_whole_and_their_definitions_are_shared(self) -> None:
        found = parameters_of(plan)
        assert found["$defs"].keys() == {"Place", "Trip"}
        assert found["$defs"]["Place"]["description"] == "Somewhere."
        assert found["$defs"]["Place"]["required"] == ["lat", "lon"]
        assert found["properties"]["trip"] == {"$ref": "#/$defs/Trip"}
        assert found["properties"]["stops"] == {"type": "array", "items": {"$ref": "#/$defs/Place"}}
        assert found["properties"]["via"]["description"] == "On the way."
        assert found["required"] == ["trip", "stops"]

    def test_name_and_description_can_be_given(self) -> None:
        @tool(name="add", description="Adds.", config={"call": {"timeout_seconds": 5}})
        def plus(a: int, b: int) -> int:
            """Not this."""
            return a + b

        assert (plus.name, plus.tool_schema.function.description) == ("add", "Adds.")
        assert plus.config == {"call": {"timeout_seconds": 5}}

    def test_of_a_function_without_parameters_or_docstring(self) -> None:
        @tool
        def now() -> str:
            return "late"

        assert now.tool_schema.function.description == ""
        assert parameters_of(now) == {"type": "object", "properties": {}, "required": []}

    def test_constraints_reach_the_model(self) -> None:
        @tool
        def roll(sides: Annotated[int, Field(ge=2, le=100)], colour: Colour) -> str:
            return f"{sides} {colour}"

        found = parameters_of(roll)
        assert found["properties"]["sides"] == {"type": "integer", "minimum": 2, "maximum": 100}
        assert found["$defs"]["Colour"]["enum"] == ["red", "blue"]

    def test_a_default_that_json_has_no_word_for_still_makes_the_parameter_optional(self) -> None:
        nothing: Any = object()

        @tool
        def search(text: str, after: date = nothing) -> str:
            return text

        found = parameters_of(search)
        assert found["required"] == ["text"]
        assert "default" not in found["properties"]["after"]

    def test_a_return_type_that_only_exists_for_the_type_checker_does_not_matter(self) -> None:
        @tool
        def price(what: str) -> Decimal: ...

        assert price.name == "price"

    def test_parameters_may_be_called_as_pydantic_calls_its_own(self) -> None:
        @tool
        def save(schema: str, copy: int, model_config: str, self: str, _hidden: str) -> str:
            return schema

        assert parameters_of(save)["required"] == ["schema", "copy", "model_config", "self", "_hidden"]


class TestDocstring:
    def test_rest(self) -> None:
        found = read_docstring(
            "Do it.\n\n:param first: The first,\n    on two lines.\n:param int second: The second.\n"
            ":type first: str\n:returns: Nothing."
        )
        assert found.description == "Do it."
        assert found.parameters == {"first": "The first, on two lines.", "second": "The second."}

    def test_a_google_section_ends_where_the_next_begins(self) -> None:
        found = read_docstring("Do it.\n\nArgs:\n  a: One: two.\n\n  b: Three.\n\nRaises:\n  ValueError: never.")
        assert found.parameters == {"a": "One: two.", "b": "Three."}

    @pytest.mark.parametrize("text", ["", "Args:\n    a: One.", ":param a: One."])
    def test_there_may_be_no_description(self, text: str) -> None:
        assert read_docstring(text).description == ""

    def test_a_description_may_hold_a_colon(self) -> None:
        assert read_docstring("Note: this is slow.\nBut sure.").description == "Note: this is slow. But sure."


class TestStillAFunction:
    def test_it_is_called_as_before(self) -> None:
        assert look_up("tree", limit=3) == "tree en 3 [1, 2] False"

    async def test_an_async_one_is_awaited_as_before(self) -> None:
        @tool
        async def double(x: int) -> int:
            return 2 * x

        assert await double(4) == 8

    def test_it_keeps_its_name_docstring_and_signature(self) -> None:
        assert look_up.__name__ == "look_up"
        assert (look_up.__doc__ or "").startswith("Look a word up")
        assert list(inspect.signature(look_up).parameters) == ["word", "language", "limit", "pages", "exact"]

    def test_attributes_of_the_function_do_not_become_the_tools(self) -> None:
        def search(text: str) -> str:
            return text

        search.name = "nonsense"  # pyright: ignore[reportFunctionMemberAccess]
        assert tool(search).name == "search"

    def test_methods_of_an_object_can_be_tools(self) -> None:
        class Counter:
            total = 0

            def add(self, n: int) -> int:
                """Add."""
                self.total += n
                return self.total

        counter = Counter()
        add = tool(counter.add)
        assert add(2) == 2
        assert parameters_of(add)["required"] == ["n"]


class TestCalls:
    async def test_arguments_arrive_in_the_annotated_types(self) -> None:
        trip = {"start": {"lat": 1, "lon": 2}, "days": 3}
        found = await call(plan, {"trip": trip, "stops": [{"lat": 0, "lon": 0}], "via": {"lat": 5, "lon": 5}})
        assert found.response.text == "3 days, 1 stops, Place"

    async def test_other_types_too(self) -> None:
        got: list[object] = []

        @tool
        def take(day: date, colour: Colour, names: set[str], pair: tuple[int, str]) -> None:
            got.extend([day, colour, names, pair])

        await call(take, '{"day": "2024-02-29", "colour": "blue", "names": ["a"], "pair": [1, "x"]}')
        assert got == [date(2024, 2, 29), Colour.BLUE, {"a"}, (1, "x")]

    async def test_what_is_left_out_has_the_functions_own_default(self) -> None:
        assert (await call(look_up, '{"word": "oak"}')).response.text == "oak en None [1, 2] False"

    async def test_a_default_may_be_in_a_field(self) -> None:
        @tool
        def both(a: int = Field(3, description="A."), b: Annotated[int, Field(default=4)] = 5) -> str:
            return f"{a} {b}"

        assert parameters_of(both)["required"] == []
        assert parameters_of(both)["properties"]["a"] == {"type": "integer", "description": "A.", "default": 3}
        assert (await call(both, "{}")).response.text == "3 5"

    async def test_a_default_in_an_annotation_reaches_a_function_that_has_none(self) -> None:
        @tool
        def one(a: Annotated[int, Field(default=4)]) -> int:
            return a

        assert (await call(one, "{}")).response.text == "4"

    async def test_arguments_that_nobody_asked_for_are_harmless(self) -> None:
        found = await call(look_up, '{"word": "oak", "executes": "True"}')
        assert found.outcome is ToolOutcome.OK

    @pytest.mark.parametrize("arguments", ['{"word": 1}', "{}", '{"word": "a", "language": "fr"}', '{"word": '])
    async def test_wrong_arguments_never_reach_the_function(self, arguments: str) -> None:
        assert (await call(look_up, arguments)).outcome is ToolOutcome.BAD_ARGUMENTS

    async def test_what_only_pydantic_can_check_is_told_to_the_model(self) -> None:
        @tool
        def halve(n: Annotated[int, AfterValidator(even)]) -> int:
            return n // 2

        with pytest.raises(ArgumentError, match=r"^Error: halve was not called: n: Value error, 3 is odd$"):
            await halve.execute("id", {"n": 3})
        assert (await call(halve, {"n": 3})).outcome is ToolOutcome.BAD_ARGUMENTS

    async def test_a_framework_that_checks_nothing_gets_a_clear_error(self) -> None:
        with pytest.raises(ArgumentError, match=r"'trip' is missing; stops\[0\]\.lat: Field required"):
            await plan.execute("id", {"stops": [{"lon": 1}]})

    async def test_the_trajectorys_id_is_not_the_models_to_give(self) -> None:
        @tool
        def remember(what: str, instance_id: str) -> str:
            return f"{instance_id}: {what}"

        assert list(parameters_of(remember)["properties"]) == ["what"]
        found = await call(remember, '{"what": "x", "instance_id": "somebody else"}', "request-7")
        assert found.response.text == "request-7: x"

    async def test_under_verl_the_id_is_the_trajectorys_not_the_calls(self) -> None:
        @tool
        def whose(instance_id: str) -> str:
            return instance_id

        class AgentData:
            request_id = "trajectory"

        response, _, _ = await whose.execute("call-1", {}, agent_data=AgentData())
        assert response.text == "trajectory"


class TestThreads:
    async def test_a_plain_function_does_not_hold_up_the_event_loop(self) -> None:
        free = threading.Event()

        @tool
        def wait() -> bool:
            return free.wait(30)

        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            waiting = group.create_task(call(wait, "{}"))
            await asyncio.sleep(0.05)
            free.set()  # only a loop that is free can do this
        assert waiting.result().response.text == "true"

    async def test_context_variables_are_there(self) -> None:
        who = contextvars.ContextVar("who", default="nobody")

        @tool
        def ask() -> str:
            return who.get()

        who.set("trajectory 3")
        assert (await call(ask, "{}")).response.text == "trajectory 3"

    async def test_calls_that_hang_take_no_thread_from_the_others(self) -> None:
        free = threading.Event()

        @tool(config={"call": {"timeout_seconds": 0.05}})
        def hang() -> None:
            free.wait(60)

        @tool
        def quick() -> str:
            return "here"

        async with asyncio.TaskGroup() as group:
            hanging = [group.create_task(call(hang, "{}")) for _ in range(40)]
        assert {task.result().outcome for task in hanging} == {ToolOutcome.TIMED_OUT}
        assert (await call(quick, "{}")).response.text == "here"
        free.set()

    async def test_an_async_function_is_cancelled_at_its_time_limit(self) -> None:
        stopped = asyncio.Event()

        @tool(config={"call": {"timeout_seconds": 0.05}})
        async def hang() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                stopped.set()

        assert (await call(hang, "{}")).outcome is ToolOutcome.TIMED_OUT
        assert stopped.is_set()

    async def test_a_thread_that_ends_after_its_loop_disturbs_nobody(self) -> None:
        free, ended = threading.Event(), threading.Event()

        @tool(config={"call": {"timeout_seconds": 0.05}})
        def late() -> None:
            free.wait(30)
            threading.Timer(0.05, ended.set).start()

        await asyncio.to_thread(lambda: asyncio.run(call(late, "{}")))
        free.set()
        assert await asyncio.to_thread(ended.wait, 30)  # a warning of the thread would fail this test

    async def test_a_wrapper_that_hides_an_async_function_is_awaited(self) -> None:
        def wrapper(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                return function(*args, **kwargs)

            return wrapped

        @tool
        @wrapper
        async def double(x: int) -> int:
            return 2 * x

        assert (await call(double, '{"x": 4}')).response.text == "8"


class TestFailures:
    @pytest.mark.parametrize("error", [ValueError("no"), StopIteration("no"), SystemExit(3), TimeoutError("no")])
    @pytest.mark.parametrize("in_loop", [False, True])
    async def test_whatever_it_raises_is_told_and_ends_nothing_else(self, error: BaseException, in_loop: bool) -> None:
        @tool
        def plain() -> None:
            raise error

        @tool
        async def awaited() -> None:
            raise error

        async with asyncio.timeout(30):
            found = await call(awaited if in_loop else plain, "{}")
        assert found.outcome is ToolOutcome.RAISED
        assert "failed" in (found.response.text or "")
        assert "Traceback" in (found.error or "")


class TestAnswers:
    @pytest.mark.parametrize(
        ("returned", "text", "reward", "metrics"),
        [
            ("plain", "plain", None, {}),
            (None, None, None, {}),
            (3, "3", None, {}),
            (True, "true", None, {}),
            ({"a": [1, "Zürich"]}, '{"a": [1, "Zürich"]}', None, {}),
            (ToolResponse(text="made"), "made", None, {}),
            (("said", 0.5), "said", 0.5, {}),
            (("said", None, {"n": 1}), "said", None, {"n": 1}),
            ((ToolResponse(text="made"), 1, {}), "made", 1.0, {}),
            ((3, 4), "[3, 4]", None, {}),
            (("a", "b"), '["a", "b"]', None, {}),
            ((1, 2, 3, 4), "[1, 2, 3, 4]", None, {}),
            (Place(lat=1, lon=2), '{"lat": 1.0, "lon": 2.0, "inside": null}', None, {}),
            ([Found("x", date(2024, 1, 2))], '[{"title": "x", "when": "2024-01-02"}]', None, {}),
            ({"tags": {"a"}, "colour": Colour.RED}, '{"tags": ["a"], "colour": "red"}', None, {}),
            (float("nan"), "NaN", None, {}),
        ],
    )
    async def test_what_is_returned_is_what_the_model_reads(self, returned, text, reward, metrics) -> None:
        @tool
        def answer() -> Any:
            return returned

        found = await call(answer, "{}")
        assert (found.outcome, found.response.text, found.reward, found.metrics) == (
            ToolOutcome.OK,
            text,
            reward,
            metrics,
        )

    async def test_a_reward_may_be_a_number_of_numpy(self) -> None:
        numpy = pytest.importorskip("numpy")

        @tool
        def answer() -> Any:
            return "said", numpy.float32(0.5)

        assert (await call(answer, "{}")).reward == 0.5

    async def test_an_answer_that_contains_itself_is_still_an_answer(self) -> None:
        ring: list[Any] = []
        ring.append(ring)

        @tool
        def answer() -> Any:
            return ring

        assert (await call(answer, "{}")).response.text == "[[...]]"

    async def test_what_json_has_no_word_for_is_written_as_text(self) -> None:
        class Odd:
            def __str__(self) -> str:
                return "odd"

        @tool
        def answer() -> Any:
            return {"x": Odd()}

        assert (await call(answer, "{}")).response.text == '{"x": "odd"}'


class TestRefusals:
    """Told at once, with the function's name and the parameter's."""

    @staticmethod
    def refusal(function: Any, **options: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            tool(**options)(function)
        return str(caught.value)

    def test_a_parameter_without_annotation(self) -> None:
        def search(text, limit: int = 3): ...

        told = self.refusal(search)
        assert "search: parameter 'text' has no annotation" in told
        assert __name__ in told

    def test_star_args(self) -> None:
        def search(*texts: str): ...

        assert "search: parameter 'texts': *texts has no schema" in self.refusal(search)

    def test_star_star_kwargs(self) -> None:
        def search(text: str, **rest: str): ...

        assert "search: parameter 'rest': **rest has no schema" in self.refusal(search)

    def test_a_positional_only_parameter(self) -> None:
        def search(text: str, /): ...

        told = self.refusal(search)
        assert "search: parameter 'text': models pass arguments by name" in told

    def test_an_annotation_that_cannot_be_found(self) -> None:
        def search(text: Nowhere): ...  # noqa: F821

        told = self.refusal(search)
        assert "search: parameter 'text': its annotation 'Nowhere' cannot be read: name 'Nowhere'" in told
        assert "top level" in told

    def test_a_type_that_json_cannot_hold(self) -> None:
        def search(text: str, key: threading.Event): ...

        assert "search: parameter 'key': <class 'threading.Event'> cannot be written as JSON" in self.refusal(search)

    def test_a_callable(self) -> None:
        def search(key: Callable[[str], str]): ...

        assert "search: parameter 'key'" in self.refusal(search)

    def test_an_instance_id_that_is_no_text(self) -> None:
        def search(instance_id: int): ...

        told = self.refusal(search)
        assert "search: parameter 'instance_id' receives the trajectory's id; annotate it as str" in told

    @pytest.mark.parametrize("thing", [functools.partial(print), 3, dict])
    def test_what_is_no_function(self, thing: Any) -> None:
        assert "@tool expects a function" in self.refusal(thing)

    def test_a_generator(self) -> None:
        def search(text: str):
            yield text

        assert "search: generators are not supported" in self.refusal(search)

    def test_a_name_that_no_model_can_write(self) -> None:
        assert "'<lambda>' is not a valid tool name" in self.refusal(lambda: 3)
        assert "'look up' is not a valid tool name" in self.refusal(look_up.function, name="look up")

    def test_a_key_of_its_config_that_does_not_exist(self) -> None:
        told = self.refusal(look_up.function, config={"timeout": 3})
        assert "look_up: config: unknown key 'timeout'; a function's are type, call" in told


class TestConfigured:
    def test_is_a_copy(self) -> None:
        copy = look_up.configured({"type": "native", "call": {"retries": 0}})
        assert isinstance(copy, FunctionTool)
        assert copy is not look_up
        assert copy.config == {"type": "native", "call": {"retries": 0}}
        assert look_up.config == {}
        assert copy.tool_schema == look_up.tool_schema
        assert copy("oak").startswith("oak")

    def test_the_decorators_config_holds_where_the_file_says_nothing(self) -> None:
        @tool(name="add", config={"call": {"timeout_seconds": 5}})
        def plus(a: int, b: int) -> int:
            return a + b

        copy = plus.configured({"type": "native"})
        assert copy.config == {"type": "native", "call": {"timeout_seconds": 5}}
        assert copy.name == "add"

    async def test_another_schema_may_describe_otherwise(self) -> None:
        schema = OpenAIFunctionToolSchema.model_validate(
            {
                "function": {
                    "name": "dictionary",
                    "description": "查词",
                    "parameters": {"properties": {"word": {"type": "string"}}, "required": ["word"]},
                }
            }
        )
        copy = look_up.configured({}, schema)
        assert copy.name == "dictionary"
        assert (await call(copy, '{"word": "oak"}')).outcome is ToolOutcome.OK

    @pytest.mark.parametrize(
        ("properties", "told"),
        [
            ({"word": {}, "speed": {}}, "has a parameter 'speed'"),
            ({"language": {}}, "lacks 'word', which the function needs"),
        ],
    )
    def test_another_schema_must_fit_the_function(self, properties: dict[str, Any], told: str) -> None:
        schema = OpenAIFunctionToolSchema.model_validate(
            {"function": {"name": "look_up", "parameters": {"properties": properties}}}
        )
        with pytest.raises(ConfigError, match=f"look_up: its tool_schema {told}"):
            look_up.configured({}, schema)


async def test_starting_a_thread_costs_little() -> None:
    @tool
    def nothing() -> None: ...

    async with open_instance(nothing, "request") as instance:
        start = time.perf_counter()
        for _ in range(200):
            await instance.call("{}")
        assert (time.perf_counter() - start) / 200 < patient(0.02)
