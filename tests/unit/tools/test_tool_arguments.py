"""Whatever a model writes as arguments is checked, never raises anything else, and errors are useful."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolyard.errors import ConfigError
from toolyard.messages import OpenAIFunctionToolSchema
from toolyard.tools.arguments import ArgumentError, Arguments

PLACE = {
    "type": "object",
    "properties": {"lat": {"type": "number"}, "lon": {"type": "number"}, "inside": {"$ref": "#/$defs/Place"}},
    "required": ["lat", "lon"],
}


def arguments(properties: dict[str, Any], required: list[str] | None = None, **more: Any) -> Arguments:
    parameters = {"type": "object", "properties": properties, "required": required or [], **more}
    schema = {"type": "function", "function": {"name": "search", "parameters": parameters}}
    return Arguments(OpenAIFunctionToolSchema.model_validate(schema))


def told(check: Arguments, given: str | dict[str, Any]) -> str:
    with pytest.raises(ArgumentError) as caught:
        check.check(given)
    return str(caught.value)


TEXT = arguments({"text": {"type": "string"}, "limit": {"type": "integer"}, "any": {}}, ["text"])
ROUTE = arguments(
    {
        "via": {"type": "array", "items": {"$ref": "#/$defs/Place"}},
        "when": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "mode": {"type": "string", "enum": ["walk", "drive"]},
    },
    ["via"],
    **{"$defs": {"Place": PLACE}},
)


class TestGoodArguments:
    @pytest.mark.parametrize("given", ['{"text": "a", "limit": 3}', {"text": "a", "limit": 3}])
    def test_come_back_as_a_dictionary(self, given: Any) -> None:
        assert TEXT.check(given) == {"text": "a", "limit": 3}

    def test_the_callers_dictionary_stays_his_own(self) -> None:
        given = {"text": "a"}
        assert TEXT.check(given) is not given

    def test_nested_through_references(self) -> None:
        via = [{"lat": 1, "lon": 2.5, "inside": {"lat": 0, "lon": 0}}]
        assert ROUTE.check(json.dumps({"via": via, "when": None, "mode": "walk"}))["via"] == via

    def test_nothing_at_all_is_an_empty_object(self) -> None:
        assert arguments({"text": {"type": "string"}}).check("") == {}

    def test_those_that_nobody_asked_for_are_harmless(self) -> None:
        assert TEXT.check('{"text": "a", "executes": "True"}') == {"text": "a", "executes": "True"}

    def test_unless_the_schema_forbids_them(self) -> None:
        strict = arguments({"text": {"type": "string"}}, additionalProperties=False)
        assert "'executes' was unexpected" in told(strict, '{"text": "a", "executes": "True"}')

    def test_a_whole_number_may_be_written_with_a_point(self) -> None:
        assert TEXT.check('{"text": "a", "limit": 3.0}')["limit"] == 3

    def test_a_large_integer_is_exact(self) -> None:
        assert TEXT.check(f'{{"text": "", "limit": {10**300}}}')["limit"] == 10**300

    def test_large_ones(self) -> None:
        text = "a" * 5_000_000
        assert TEXT.check(json.dumps({"text": text, "any": list(range(100_000))}))["text"] == text


class TestWrongArguments:
    def test_every_error_names_the_tool_says_that_it_was_not_called_and_what_it_expects(self) -> None:
        assert told(TEXT, "{}") == (
            'Error: search was not called: "text" is a required property. '
            'Expected arguments: {"text": string, "limit"?: integer, "any"?: any}'
        )

    @pytest.mark.parametrize(
        ("given", "words"),
        [
            ('{"text": 3}', 'text: 3 is not of type "string"'),
            ('{"text": null}', 'text: null is not of type "string"'),
            ('{"text": "a", "limit": "3"}', 'limit: "3" is not of type "integer"'),
            ('{"text": "a", "limit": 1.5}', 'limit: 1.5 is not of type "integer"'),
            ('{"text": "a", "limit": true}', 'limit: true is not of type "integer"'),
            ('{"text": ["a"]}', 'text: ["a"] is not of type "string"'),
        ],
    )
    def test_wrong_types(self, given: str, words: str) -> None:
        assert words in told(TEXT, given)

    def test_several_at_once_are_told_at_once(self) -> None:
        said = told(TEXT, '{"text": 1, "limit": "x"}')
        assert 'text: 1 is not of type "string"' in said
        assert 'limit: "x" is not of type "integer"' in said

    def test_nested_ones_are_told_by_their_place(self) -> None:
        said = told(ROUTE, '{"via": [{"lat": 1, "lon": 2}, {"lat": 1, "lon": 2, "inside": {"lat": "x", "lon": 0}}]}')
        assert 'via[1].inside.lat: "x" is not of type "number"' in said

    def test_what_is_missing_inside_too(self) -> None:
        assert 'via[0]: "lon" is a required property' in told(ROUTE, '{"via": [{"lat": 1}]}')

    def test_one_that_is_none_of_the_choices(self) -> None:
        said = told(ROUTE, '{"via": [], "mode": "swim"}')
        assert 'mode: "swim"' in said
        assert 'one of "walk", "drive"' in said

    def test_one_that_fits_no_alternative(self) -> None:
        assert 'when: "soon"' in told(ROUTE, '{"via": [], "when": "soon"}')

    def test_what_was_expected_is_told_for_alternatives_and_references_too(self) -> None:
        expected = told(ROUTE, '{"via": [], "when": "soon"}').partition("Expected arguments: ")[2]
        assert '"when"?: integer or null' in expected
        assert '"via": array of object' in expected

    def test_a_thousand_errors_are_told_in_few_words(self) -> None:
        numbers = arguments({"n": {"type": "array", "items": {"type": "integer"}}})
        said = told(numbers, json.dumps({"n": ["x"] * 1000}))
        assert len(said) < 1000
        assert "n[0]" in said

    def test_a_large_value_is_not_said_back(self) -> None:
        assert len(told(TEXT, json.dumps({"text": "a", "limit": "x" * 1_000_000}))) < 1000


class TestMalformed:
    @pytest.mark.parametrize(
        ("given", "words"),
        [
            ('{"text": "a"', "not valid JSON"),
            ("{'text': 'a'}", "not valid JSON"),
            ('{"text": "a"} and more', "not valid JSON: Extra data"),
            ('{"text": "a",}', "not valid JSON"),
            ('{"text": "two\nlines"}', "not valid JSON: Invalid control character"),
            ("print(1)", "not valid JSON"),
            ("   ", "not valid JSON"),
            ("null", "not a JSON object, but null"),
            ("[1]", "not a JSON object, but an array"),
            ('"text"', "not a JSON object, but a string"),
            ("3", "not a JSON object, but a number"),
            ("true", "not a JSON object, but a boolean"),
        ],
    )
    def test_is_told_where_and_why(self, given: str, words: str) -> None:
        said = told(TEXT, given)
        assert words in said
        assert 'Expected arguments: {"text": string' in said

    def test_the_place_is_shown(self) -> None:
        assert "(character 9, near '{\"text\": }'" in told(TEXT, '{"text": }')


class TestStrangeNumbers:
    @pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400"])
    def test_that_are_no_json_are_no_numbers(self, number: str) -> None:
        check = arguments({"n": {"type": "number"}})
        assert "number" in told(check, f'{{"n": {number}}}')

    @pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
    def test_also_where_anything_goes(self, number: str) -> None:
        assert number in told(TEXT, f'{{"text": "a", "any": [{number}]}}')

    def test_the_model_is_told_what_it_wrote(self) -> None:
        assert "null" not in told(arguments({"n": {"type": "number"}}), '{"n": NaN}')

    def test_with_more_digits_than_python_reads(self) -> None:
        assert "not valid JSON" in told(TEXT, f'{{"text": "a", "limit": {"1" * 5000}}}')


class TestStrangeStructures:
    def test_nested_deeper_than_json_can_be_read(self) -> None:
        assert "not valid JSON: " in told(TEXT, f'{{"any": {"[" * 100_000}{"]" * 100_000}}}')

    @pytest.mark.parametrize("depth", [100, 200])
    def test_deeply_nested(self, depth: int) -> None:
        nested = "[" * depth + "]" * depth
        assert TEXT.check(f'{{"text": "a", "any": {nested}}}')
        assert "text: [[" in told(TEXT, f'{{"text": {nested}}}')

    @pytest.mark.parametrize("depth", [300, 900])
    def test_nested_deeper_than_the_validator_goes(self, depth: int) -> None:
        assert "text" in told(TEXT, f'{{"text": {"[" * depth}{"]" * depth}}}')

    def test_half_an_emoji_in_a_value(self) -> None:
        assert TEXT.check('{"text": "\\ud83d"}') == {"text": "\ud83d"}

    def test_half_an_emoji_in_a_key(self) -> None:
        assert "the arguments cannot be checked: 'utf-8' codec" in told(TEXT, '{"text": "a", "\\ud83d": 1}')

    def test_of_two_equal_keys_the_last_counts(self) -> None:
        assert TEXT.check('{"text": 1, "text": "b"}') == {"text": "b"}

    @given(
        st.recursive(
            st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.floats(allow_nan=False) | st.text(),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        )
    )
    def test_any_json_is_either_good_or_told(self, value: Any) -> None:
        try:
            found = TEXT.check(json.dumps(value))
        except ArgumentError:
            return
        assert isinstance(found["text"], str)


class TestSchemas:
    def test_the_seeds_write_no_enum_as_null(self) -> None:
        check = arguments({"code": {"type": "string", "description": "The code to execute.", "enum": None}}, ["code"])
        assert check.check('{"code": "1"}') == {"code": "1"}
        assert '{"code": string}' in told(check, "{}")

    def test_null_may_be_a_choice(self) -> None:
        check = arguments({"mode": {"enum": ["a", None]}, "same": {"const": None}})
        assert check.check('{"mode": null, "same": null}') == {"mode": None, "same": None}
        assert "mode" in told(check, '{"mode": "b"}')
        assert "same" in told(check, '{"same": 1}')

    @pytest.mark.parametrize("name", ["enum", "const", "default", "examples"])
    def test_a_parameter_may_be_called_as_a_keyword_of_json_schema(self, name: str) -> None:
        check = arguments({name: {"type": "string", "enum": None}})
        assert check.check({name: "x"}) == {name: "x"}

    @pytest.mark.parametrize("key", ["description", "type", "items"])
    def test_other_keys_may_be_null_as_well(self, key: str) -> None:
        assert arguments({"code": {key: None}}).check('{"code": "1"}') == {"code": "1"}

    def test_several_types(self) -> None:
        check = arguments({"n": {"type": ["integer", "null"]}})
        assert check.check('{"n": null}') == {"n": None}
        assert '{"n"?: integer or null}' in told(check, '{"n": "x"}')

    @pytest.mark.parametrize(
        "properties",
        [
            {"a": {"type": "strng"}},
            {"a": {"$ref": "#/$defs/Nowhere"}},
            {"a": {"pattern": "("}},
            {"a": {"minimum": "x"}},
        ],
    )
    def test_one_that_is_none_is_refused_when_the_tool_is_made(self, properties: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match=r"^tool 'search': its parameters are not a JSON Schema: "):
            arguments(properties)

    def test_a_reference_to_another_host_is_not_followed(self) -> None:
        from http.server import BaseHTTPRequestHandler, HTTPServer
        from threading import Thread

        asked: list[str] = []

        class Schemas(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append(self.path)
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *args: Any) -> None: ...

        with HTTPServer(("127.0.0.1", 0), Schemas) as server:
            thread = Thread(target=server.serve_forever)
            thread.start()
            try:
                with pytest.raises(ConfigError):
                    arguments({"a": {"$ref": f"http://127.0.0.1:{server.server_port}/schema.json"}})
            finally:
                server.shutdown()
                thread.join()
        assert not asked
