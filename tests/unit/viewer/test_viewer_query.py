"""The viewer's query language: valid queries, error messages, and the canonical spelling."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolyard.errors import ConfigError
from toolyard.viewer.query import (
    FIELDS,
    MAX_CONDITIONS,
    SORTABLE,
    Condition,
    Kind,
    Query,
    QueryError,
    Range,
    SortKey,
    parse_query,
)


def conditions(text: str) -> tuple[Condition, ...]:
    (found,) = parse_query(text).alternatives
    return found


# Understood -----------------------------------------------------------------------------------------------------------


def test_several_conditions_all_hold_and_bare_words_are_text() -> None:
    assert conditions('score<0.5 tools>2 finish:length text:"220000" pen "two words"') == (
        Condition("score", "<", 0.5),
        Condition("tools", ">", 2.0),
        Condition("finish", ":", "length"),
        Condition("text", ":", "220000"),
        Condition("text", ":", "pen"),
        Condition("text", ":", "two words"),
    )


def test_or_binds_weakest() -> None:
    query = parse_query("score:1 tools:2 or score:0 OR x")
    assert [len(found) for found in query.alternatives] == [2, 1, 1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("score=1", Condition("score", ":", 1.0)),
        ("score!=1", Condition("score", ":", 1.0, negated=True)),
        ("-score!=1", Condition("score", ":", 1.0)),
        ("score:-1.5e-3", Condition("score", ":", -0.0015)),
        ("SCORE>=1", Condition("score", ">=", 1.0)),
        ("score:none", Condition("score", ":", None)),
        ("score!=None", Condition("score", ":", None, negated=True)),
        ("score:0.2..0.8", Condition("score", ":", Range(0.2, 0.8))),
        ("step:10..", Condition("step", ":", Range(10, None))),
        ("-step:..10", Condition("step", ":", Range(None, 10), negated=True)),
        ("finish=stop", Condition("finish", "=", "stop")),
        ("finish!=stop", Condition("finish", "=", "stop", negated=True)),
        ('task=""', Condition("task", "=", "")),
        ("id:none", Condition("id", ":", "none")),
        ("damaged:YES", Condition("damaged", ":", True)),
        ("damaged!=yes", Condition("damaged", ":", True, negated=True)),
        ("-pen", Condition("text", ":", "pen", negated=True)),
        ("-", Condition("text", ":", "-")),
        ("--x", Condition("text", ":", "-x", negated=True)),
        ("<think>", Condition("text", ":", "<think>")),
        ("text=x", Condition("text", ":", "x")),
        ("text:none", Condition("text", ":", "none")),
        ('"or"', Condition("text", ":", "or")),
        (r'"a \"b\" \\ \d \n"', Condition("text", ":", 'a "b" \\ \\d \n')),
        ('text:a"b', Condition("text", ":", 'a"b')),
        ("file:run1/", Condition("file", ":", "run1/")),
    ],
)
def test_a_condition_is_read(text: str, expected: Condition) -> None:
    assert conditions(text) == (expected,)


def test_nothing_asks_for_everything_and_the_order_may_stand_anywhere() -> None:
    assert parse_query("  ") == Query()
    assert parse_query("sort:-time a sort:score sort:time") == Query(
        ((Condition("text", ":", "a"),),), (SortKey("time", descending=True), SortKey("score"))
    )


def test_needles_are_what_may_have_been_found() -> None:
    assert parse_query('a -b score<1 or "c d" text:a finish:e').needles == ("a", "c d")


def test_a_query_can_be_put_into_another_order() -> None:
    assert str(parse_query("a sort:score").sorted_by("time", descending=True)) == "text:a sort:-time"
    with pytest.raises(ConfigError, match="cannot sort by 'verdict'"):
        Query().sorted_by("verdict")


# Refused --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "position", "message"),
    [
        ("a scroe<1", 2, "unknown field 'scroe'; did you mean score?"),
        ("reward>1", 0, "did you mean score?"),
        ("request_id:x", 0, "did you mean id?"),
        ("http://x", 0, 'put it in quotes: "http://x"'),
        ("score <0.5", 6, "remove the spaces around the operator: score<0.5"),
        ("score< 0.5", 0, "score< must be followed by a number, without a space"),
        ("finish:", 0, "finish: must be followed by text"),
        ("score:abc", 6, "'abc' is not a number"),
        ("score:nan", 6, "'nan' is not a number"),
        ("score<1e999", 6, "is not a number"),
        ("score:٣", 6, "is not a number"),
        ("score:0.8..0.2", 6, "did you mean score:0.2..0.8?"),
        ("score:..", 6, "at least one end"),
        ("score:1..x", 9, "'x' is not a number"),
        ("score<1..2", 0, "write score:1..2"),
        ("score<none", 0, "write score:none"),
        ("step:none", 5, "step is always a number"),
        ("finish<stop", 0, "write finish:stop for contains or finish=stop for equals"),
        ('finish:""', 0, 'finish="" finds rows whose finish is empty'),
        ('step:"3"', 5, "remove the quotes"),
        ("damaged:maybe", 8, "write damaged:yes or damaged:no"),
        ("damaged<yes", 0, "write damaged:yes or damaged:no"),
        ("text<x", 0, "write text:x"),
        ('""', 0, "the text to search for is empty"),
        ('a "bc', 2, "the quote is not closed"),
        ('"bc\\', 0, "the quote is not closed"),
        ('"a"b', 3, "a space is missing after the quote"),
        ("a or", 4, "missing after `or`"),
        ("or a", 0, 'to search for the word, write "or"'),
        ("a or or b", 5, "missing before `or`"),
        ("a or sort:time", 14, "missing after `or`"),
        ("sort:scor", 5, "did you mean sort:score?"),
        ("sort:-seconds", 5, "did you mean sort:-time?"),
        ("sort:verdict", 5, "cannot sort by 'verdict'"),
        ("-sort:score", 0, "sort:-score for descending order"),
        ("order:score", 0, "did you mean sort?"),
        ("a " * (MAX_CONDITIONS + 1), 0, "at most"),
    ],
)
def test_what_is_wrong_is_told_with_its_place_and_what_would_be_right(text: str, position: int, message: str) -> None:
    with pytest.raises(QueryError) as refused:
        parse_query(text)
    assert message in str(refused.value)
    assert str(refused.value).startswith(f"at character {position + 1}: ")
    assert refused.value.position == position


@given(st.text(alphabet=st.one_of(st.sampled_from('<>=!:-". \\or"'), st.characters(codec=None)), max_size=40))
def test_any_text_is_a_query_or_refused(text: str) -> None:
    try:
        query = parse_query(text)
    except QueryError as error:
        query, at = Query(), error.position
    else:
        at = 0
    assert 0 <= at <= len(text)
    assert parse_query(str(query)) == query


# One spelling ---------------------------------------------------------------------------------------------------------


def of_kind(*kinds: Kind) -> st.SearchStrategy[str]:
    return st.sampled_from([name for name, kind in FIELDS.items() if kind in kinds])


numbers = st.floats(allow_nan=False, allow_infinity=False, width=32).map(lambda number: number + 0.0)
ranges = st.tuples(numbers, numbers).map(lambda ends: Range(min(ends), max(ends)))
some_text = st.text(min_size=1)
any_condition = st.one_of(
    st.builds(Condition, of_kind(Kind.NUMBER), st.sampled_from([":", "<", "<=", ">", ">="]), numbers, st.booleans()),
    st.builds(Condition, of_kind(Kind.NUMBER), st.just(":"), ranges, st.booleans()),
    st.builds(Condition, st.just("score"), st.just(":"), st.none(), st.booleans()),
    st.builds(Condition, of_kind(Kind.TEXT), st.sampled_from([":", "="]), some_text, st.booleans()),
    st.builds(Condition, of_kind(Kind.CONTENT), st.just(":"), some_text, st.booleans()),
    st.builds(Condition, of_kind(Kind.FLAG), st.just(":"), st.booleans(), st.booleans()),
)
any_query = st.builds(
    Query,
    st.lists(st.lists(any_condition, min_size=1, max_size=4).map(tuple), max_size=3).map(tuple),
    st.lists(
        st.builds(SortKey, st.sampled_from(SORTABLE), st.booleans()), max_size=3, unique_by=lambda key: key.field
    ).map(tuple),
)


@given(any_query)
def test_a_query_is_read_back_from_its_text(query: Query) -> None:
    assert parse_query(str(query)) == query


def test_spellings_of_one_query_have_one_text() -> None:
    text = "score<0.5 -finish=stop text:x or step:1..2 sort:-time"
    assert str(parse_query('sort:-time  SCORE<.5 finish!=stop "x" OR step:1.0..2')) == text
    assert str(parse_query("score=1.0 score:1")) == "score:1 score:1"
    assert str(parse_query('text:"a\nb" id:"c d"')) == 'text:"a\\nb" id:"c d"'
    assert parse_query(text) == parse_query(str(parse_query(text)))
    assert hash(parse_query(text)) == hash(parse_query(str(parse_query(text))))
