"""JSON is read in two ways, by the standard decoder and by our own scanner: what both accept, they read the same
way."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_call_syntaxes_properties import VALUES

from expensive import examples
from toolyard.chat.protocol import ParsedTurn
from toolyard.chat.syntax import scanning, syntax_of
from toolyard.chat.syntax.scanning import BrokenError, scan_object

SCRAPS = st.sampled_from(
    ['"', "{", "}", "[", "]", ",", ":", " ", "\n", "\\", "\\u00e9", "\\ud800", "NaN", "-Infinity", "1", "01", "1e5",
     "-", "true", "null", '"a":', '"a": 1', "é", "\x00", "\t", "9" * 4400]
)  # fmt: skip


@given(
    value=st.dictionaries(st.text(max_size=5), VALUES, max_size=4),
    indent=st.sampled_from([None, 1]),
    scraps=st.lists(st.tuples(st.integers(0, 60), SCRAPS), max_size=2),
)
@example(value={}, indent=None, scraps=[(1, '"a": 1, "a": [2, 3]')])
@example(value={"a": 0}, indent=None, scraps=[(6, "9" * 4400)])
@example(value={"a": 0}, indent=None, scraps=[(6, "[" * 5000 + "]" * 5000 + ",")])
@settings(max_examples=examples(500), deadline=None)
def test_both_find_the_same_object(value: object, indent: int | None, scraps: list[tuple[int, str]]) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    for at, scrap in scraps:
        text = text[:at] + scrap + text[at:]
    quick = scanning._decode_object(text, 0)
    if quick is None:
        return
    careful = scanning._scan_object(text, 0)
    assert quick[:3] == careful[:3]
    for key, (start, end) in careful.members.items():
        assert json.dumps(quick.decoded[key]) == json.dumps(json.loads(text[start:end]))


@pytest.mark.parametrize(
    "broken", ['{"a": NaN}', '{"a": 1,}', '{"a" 1}', '{"a": "\n"}', '{"a": 01}', '{"a": 1', "{\"a\": 'b'}"]
)
def test_what_the_decoder_refuses_is_explained_by_the_scanner(broken: str) -> None:
    assert scanning._decode_object(broken, 0) is None
    with pytest.raises(BrokenError, match="the JSON is not"):
        scan_object(broken, 0)


def test_the_length_of_a_turn_makes_no_difference() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"a": [1, 2.50, "é"], "b": "</tool_call>"}}\n</tool_call>'
    broken = '<tool_call>\n{"name": "f", "arguments": {"a": NaN}}\n</tool_call>'
    short = syntax_of("hermes").parse(f"So.\n{call}{broken}")
    long = syntax_of("hermes").parse(f"{'So. ' * 20_000}\n{call}{broken}")
    assert len(short.calls) == len(short.malformed) == 1
    assert long == ParsedTurn(("So. " * 20_000).strip(), None, short.calls, short.malformed)
