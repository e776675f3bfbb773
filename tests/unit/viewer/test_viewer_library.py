"""The viewer's library: a query finds what a loop in Python finds, and rows say what their lines say."""

from __future__ import annotations

import json
import random
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from viewer_dumps import append, small, verl_line, write

from expensive import examples
from patience import patient
from toolyard.errors import RecordError
from toolyard.messages import Message
from toolyard.records.lines import to_line, trajectory_of
from toolyard.records.trajectory import CallRecord, Tokens
from toolyard.rollout.cluster.results import Results
from toolyard.viewer.index.rows import entry_of
from toolyard.viewer.index.sql import TABLES, order_by
from toolyard.viewer.library import Library
from toolyard.viewer.query import FIELDS, OF_CALLS, SORTABLE, Condition, Kind, Query, Range, SortKey, parse_query
from trajectory_samples import good_trajectory

# A query finds what a loop in Python finds ----------------------------------------------------------------------------

TEXTS = ("stop", "STOP", "length", "a b", "Straße", "", "x" * 10)


def random_line(chance: random.Random, number: int) -> bytes:
    kind = chance.random()
    if kind < 0.1:
        return chance.choice([b"{", b"[1]", b'{"input": 1}', b"\xff\xfe", b'"text"'])
    if kind < 0.3:
        score = chance.choice([None, 0, 1, 0.5, float("nan")])
        return verl_line(output=f"{chance.randrange(50)} Seven", score=score, step=chance.randrange(3))
    calls = tuple(
        CallRecord(
            "c",
            chance.choice(["tool", "Stopwatch"]),
            "{}",
            chance.choice(["ok", "timeout"]),
            "said",
            metrics={"verdict": verdict},
            seconds=chance.choice([0.0, 0.25, 2.0]),
        )
        for verdict in chance.choices(["ok", "failed", None], k=chance.randrange(3))
    )
    base = good_trajectory(number, turns=chance.randrange(1, 4), tokens=5)
    turns = (replace(base.turns[0], tool_calls=calls), *base.turns[1:])
    return to_line(
        replace(
            base,
            batch_data_id=chance.choice(TEXTS),
            score=chance.choice([None, 0.0, 0.25, 0.5, 1.0]),
            finish_reason=chance.choice(TEXTS),
            data_source=chance.choice(TEXTS),
            state=chance.choice(["COMPLETED", "FAILED"]),
            step=chance.randrange(4),
            turns=turns,
            metrics={"seconds": {"generating": chance.randrange(5), "pending": 0.5}},
            ground_truth=chance.choice([None, "length", ["a b", 3]]),
            rewards=chance.choice([{}, {"final": 0.5}, {"final": 1.0, "a.b": 0.25}]),
            started_at=chance.choice([None, 0.5, 20.0]),
        )
    ).rstrip()


def verdict_of(call: CallRecord) -> str:
    return call.outcome if call.outcome != "ok" else call.metrics.get("verdict") or "ok"


class Naive:
    """What a row should say, computed the long way."""

    def __init__(self, file: str, line: int, text: bytes) -> None:
        self.damaged, it = False, None
        try:
            it = trajectory_of(text)
        except RecordError:
            self.damaged = True
        calls = self.calls = [call for turn in it.turns for call in turn.tool_calls] if it else []
        ours, has_tokens = bool(it and it.turns), bool(it and it.tokens.prompt_ids)
        truth = it.ground_truth if it else None
        self.failed = bool(it and it.state == "FAILED")
        self.place = (file, line)
        self.values: dict[str, object] = {
            "score": it.score if it else None,
            "tools": len(calls) if it else None,
            "failed_calls": sum(verdict_of(call) != "ok" for call in calls) if ours else None,
            "turns": max(1, len(it.turns)) if it else None,  # verl's lines here have one
            "length": len(it.tokens.response_ids) if it and has_tokens else None,
            "prompt": len(it.tokens.prompt_ids) if it and has_tokens else None,
            "chars": len(it.input) + len(it.output) if it else 0,
            "time": sum(it.metrics["seconds"].values()) if it and it.metrics else None,
            "started": it.started_at if it else None,
            "group": zlib.crc32((it.batch_data_id or it.input).encode()) if it else 0,
            "truth": "" if truth is None else truth if isinstance(truth, str) else '["a b",3]',
            "reward.final": it.rewards.get("final") if it else None,
            "reward.a.b": it.rewards.get("a.b") if it else None,
            "step": it.step if it else 0,
            "line": line,
            "sample": it.rollout_offset if it else 0,
            "finish": it.finish_reason if it else "",
            "state": it.state if it else "",
            "source": it.data_source if it else "",
            "task": it.batch_data_id if it else "",
            "id": it.request_id if it else "",
            "file": file,
            "run": file.rpartition("/")[0],
        }
        self.verdicts = Counter(map(verdict_of, calls))
        said = (
            [it.input, it.output, *(message.content for message in it.messages)]
            if it
            else [text.decode("utf-8", "replace")]
        )
        said += [part for call in calls for part in (call.name, call.arguments, call.response)]
        asked = [call for message in it.messages for call in message.tool_calls] if it else []
        said += [part for call in asked for part in (call.name, call.arguments)]
        self.said = [part.casefold() for part in said]

    def holds_all(self, conditions: tuple[Condition, ...]) -> bool:
        together = [one for one in conditions if one.field in OF_CALLS and not one.negated]
        one_call = any(all(self._call_holds(call, one) for one in together) for call in self.calls)
        return (one_call or not together) and all(self.holds(one) for one in conditions if one not in together)

    def holds(self, condition: Condition) -> bool:
        if condition.field in OF_CALLS:
            return any(self._call_holds(call, condition) for call in self.calls) is not condition.negated
        return self._holds(condition) is not condition.negated

    def _call_holds(self, call: CallRecord, condition: Condition) -> bool:
        verdict = verdict_of(call)
        error = "" if verdict == "ok" else call.response
        own = {"tool": call.name, "verdict": verdict, "error": error, "call_time": call.seconds or None}
        return self._compared([own[condition.field]], condition)

    def _holds(self, condition: Condition) -> bool:
        if condition.field in ("damaged", "failed"):
            return (self.damaged if condition.field == "damaged" else self.failed) is condition.value
        return self._compared(self.said if condition.field == "text" else [self.values[condition.field]], condition)

    def _compared(self, values: list[Any], condition: Condition) -> bool:
        operator, wanted = condition.operator, condition.value
        if isinstance(wanted, str):
            folded = [str(text).casefold() for text in values]
            return wanted.casefold() in folded if operator == "=" else any(wanted.casefold() in text for text in folded)
        (value,) = values
        if value is None or wanted is None:
            return value is wanted
        assert isinstance(value, int | float)
        if isinstance(wanted, Range):
            return (wanted.low is None or value >= wanted.low) and (wanted.high is None or value <= wanted.high)
        return {
            ":": value == wanted,
            "<": value < wanted,
            "<=": value <= wanted,
            ">": value > wanted,
            ">=": value >= wanted,
        }[operator]


def in_order(rows: list[Naive], query: Query) -> list[tuple[str, int]]:
    found = [row for row in rows if not query.alternatives or any(map(row.holds_all, query.alternatives))]
    for key in reversed(query.sort):  # `sorted` keeps the order of equals
        known = [row for row in found if row.values[key.field] is not None]
        unknown = [row for row in found if row.values[key.field] is None]

        def value(row: Naive, field: str = key.field) -> object:
            it = row.values[field]
            return it.casefold() if isinstance(it, str) else it

        found = sorted(known, key=value, reverse=key.descending) + unknown
    return [row.place for row in found]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Library, list[Naive]]]:
    folder, chance, rows = tmp_path_factory.mktemp("mixed"), random.Random(3), []
    for name in ("2.jsonl", "10.jsonl", "run2/0.jsonl", "run10/0.jsonl"):
        lines = [random_line(chance, number) for number in range(60)]
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"\n".join(lines) + b"\n")
        rows += [Naive(name, at, line) for at, line in enumerate(lines, 1)]
    for row in rows:
        if row.damaged:
            row.values["step"] = int(Path(row.place[0]).stem)
    with Library.open(folder) as library:
        yield library, rows


few = st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 20.0])
words = st.sampled_from(
    ["stop", "STOP", "b", "strasse", "seven", "1", "ok", "failed", "run", "said", "run2", "request-1", "nowhere", "é"]
)


def fields(*kinds: Kind) -> st.SearchStrategy[str]:
    return st.sampled_from([name for name, kind in FIELDS.items() if kind in kinds])


some_condition = st.one_of(
    st.builds(Condition, fields(Kind.NUMBER), st.sampled_from([":", "<", "<=", ">", ">="]), few, st.booleans()),
    st.builds(Condition, fields(Kind.NUMBER), st.just(":"), st.builds(Range, st.none() | few, few), st.booleans()),
    st.builds(
        Condition, st.sampled_from(["score", "tools", "time", "reward.final"]), st.just(":"), st.none(), st.booleans()
    ),
    st.builds(Condition, st.sampled_from(["reward.final", "reward.a.b"]), st.sampled_from(":<>"), few, st.booleans()),
    st.builds(Condition, fields(Kind.TEXT), st.sampled_from([":", "="]), words, st.booleans()),
    st.builds(Condition, fields(Kind.CONTENT), st.just(":"), words, st.booleans()),
    st.builds(Condition, fields(Kind.FLAG), st.just(":"), st.booleans(), st.booleans()),
)
some_query = st.builds(
    Query,
    st.lists(st.lists(some_condition, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    st.lists(st.builds(SortKey, st.sampled_from(SORTABLE), st.booleans()), max_size=2).map(tuple),
)


@given(query=some_query, offset=st.integers(0, 50), limit=st.integers(0, 50), needle=words, backwards=st.booleans())
@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_query_finds_what_a_loop_in_python_finds(mixed, query, offset, limit, needle, backwards) -> None:
    library, rows = mixed
    expected = in_order(rows, query)
    found = library.rows(query, limit=1000)
    assert [(row.file, row.line) for row in found] == expected
    assert library.count(query) == len(expected)
    assert library.rows(query, offset=offset, limit=limit) == found[offset : offset + limit]
    assert [library.position(row.number, query) for row in found[:3]] == list(range(len(found[:3])))
    summaries = library.steps(query)
    assert sum(step.count + step.damaged for step in summaries) == len(expected)

    matching = [row for row in found if library.contains(row.number, needle)]
    assert [(row.file, row.line) for row in matching] == in_order(
        [row for row in rows if any(needle.casefold() in text for text in row.said)], query
    )
    around, here = [], None
    for _ in matching:
        row = library.next_match(needle, here, query, backwards=backwards)
        assert row is not None
        around.append(row)
        here = row.number
    assert around == (matching[::-1] if backwards else matching)
    again = library.next_match(needle, here, query, backwards=backwards)
    assert again == (around[0] if around else None)


def test_rows_say_what_their_lines_say(mixed) -> None:
    library, rows = mixed
    for row, naive in zip(library.rows(limit=1000), rows, strict=True):
        assert (row.file, row.line) == naive.place
        assert bool(row.damaged) is naive.damaged
        names = {"length": "response_tokens", "prompt": "prompt_tokens", "time": "seconds", "id": "request_id"}
        names |= {"failed_calls": "failed_tools", "started": "started_at", "group": "group_id"}
        for field, value in naive.values.items():
            assert "." in field or field == "run" or getattr(row, names.get(field, field)) == value, field
        assert library.row(row.number) == row
        trajectory = library.trajectory(row.number)
        assert (trajectory is None) is naive.damaged
        if trajectory is not None:
            assert (trajectory.request_id, trajectory.score) == (row.request_id, row.score)


def test_steps_are_summed_up(mixed) -> None:
    library, rows = mixed
    for summary in library.steps():
        own = [row for row in rows if row.values["step"] == summary.step]
        good = [row for row in own if not row.damaged]
        scores = [row.values["score"] for row in good if row.values["score"] is not None]
        assert summary.count == len(good)
        assert summary.damaged == len(own) - len(good)
        assert summary.scored == len(scores)
        if scores:
            assert summary.mean_score == pytest.approx(sum(scores) / len(scores))
            assert (summary.min_score, summary.max_score) == (min(scores), max(scores))
        for name, field in (("turns", "turns"), ("tools", "tools"), ("response_tokens", "length"), ("seconds", "time")):
            known = [row.values[field] for row in good if row.values[field] is not None]
            mean = sum(known) / len(known) if known else None
            assert getattr(summary, f"mean_{name}") == (mean and pytest.approx(mean))
        assert summary.failed == sum(row.failed for row in good)
        assert summary.finishes == Counter(row.values["finish"] for row in good)
        assert summary.verdicts == sum((row.verdicts for row in own), Counter())
    naive = [(row.values["step"], row.values["score"]) for row in rows if not row.damaged]
    assert Counter(library.scores()) == Counter(naive)
    asked = [pair for pair in naive if pair[1] is not None and pair[1] < 0.5]
    assert Counter(library.scores(parse_query("score<0.5"))) == Counter(asked)
    assert [summary.step for summary in library.steps()] == sorted({row.values["step"] for row in rows})
    assert library.steps(parse_query("text:nowhere")) == []


# What a row shows -----------------------------------------------------------------------------------------------------


def preview_of(**changes) -> str:
    return entry_of(to_line(small(1, **changes)), 0).facts.preview


def test_the_preview_is_what_the_user_said_last_before_the_model_began() -> None:
    example = (Message("user", "an example"), Message("assistant", "its answer"))
    asked = (Message("system", "be kind"), *example, Message("user", "the\n\t question"))
    said = (Message("assistant", "sampled"), Message("user", "and another"))
    assert preview_of(messages=(*asked, *said)) == "the question"
    assert preview_of(messages=asked, turns=()) == "the question"
    assert preview_of(messages=(Message("system", "only this"),)) == "only this"
    assert preview_of(messages=(), input="<|im_start|>user\nA?<|im_end|>\n<|im_start|>user\nB?<|im_end|>\n") == "B?"
    assert preview_of(messages=(), input="system\nbe kind\nuser\nC?\nassistant\n") == "C?"
    assert preview_of(messages=(), input="no template at all") == "no template at all"
    assert preview_of(messages=(Message("user", "\x1b[31m\u202e x\x1b]" * 1000),))[:5] == "\ufffd x\ufffd]"
    assert len(preview_of(messages=(Message("user", "word " * 1000),))) == 160


def test_seconds_are_those_of_the_request_where_the_line_says_so() -> None:
    def seconds(**changes) -> float:
        return entry_of(to_line(small(1, **changes)), 0).facts.seconds

    assert seconds(metrics={"seconds": {"generating": 2, "reward": 0.5, "odd": "x", "on": True}}) == 2.5
    assert seconds(metrics={"seconds": 3.5}) == 3.5
    assert seconds(metrics={"seconds": {"a": 10**400}}) is None
    assert seconds(metrics={}) == pytest.approx(good_trajectory(1, turns=1, tokens=3).turns[0].timings["generating"])
    assert entry_of(verl_line(), 0).facts.seconds is None


def test_requests_are_found_by_id_or_a_beginning_that_only_one_has(tmp_path: Path) -> None:
    for run in ("a", "b"):
        write(tmp_path / run / "1.jsonl", small(1, request_id="abc1"), small(2, request_id="abd2"))
    with Library.open(tmp_path) as library:
        assert [(row.file, row.line) for row in library.find("abc1")] == [("a/1.jsonl", 1), ("b/1.jsonl", 1)]
        assert library.find("abc") == library.find("abc1")
        assert library.find("ab") == library.find("ABC1") == library.find("") == library.find("x") == []


def test_neighbours_are_the_group_and_the_same_request_in_other_runs(tmp_path: Path) -> None:
    group = [small(seed, batch_data_id="t", rollout_offset=3 - seed, request_id=f"r{seed}") for seed in range(3)]
    others = [small(7, batch_data_id="t", step=2), small(8, batch_data_id="u"), small(9, batch_data_id="")]
    for run in ("a", "b"):
        write(tmp_path / run / "1.jsonl", *group, *others)
        append(tmp_path / run / "1.jsonl", verl_line(output="1") + b"\n" + verl_line(output="2") + b"\n{\n")
    with Library.open(tmp_path) as library:
        first, verl, damaged = (library.rows()[at] for at in (0, 6, 8))
        found = library.related(first.number)
        assert [row.request_id for row in found.group] == ["r2", "r1"]
        assert [(row.file, row.request_id) for row in found.elsewhere] == [("b/1.jsonl", "r0")]
        assert [(row.file, row.line) for row in library.related(verl.number).group] == [("a/1.jsonl", 8)]
        assert library.related(damaged.number) == library.related(10**9) == ([], [])


# Size -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    base = json.loads(to_line(replace(good_trajectory(1), tokens=Tokens(), messages=())))
    for step in range(20):
        lines = [
            json.dumps(
                base | {"request_id": f"{step}-{at}", "step": step, "score": at / 1000, "output": f"word{at} said"}
            )
            for at in range(1000)
        ]
        (folder / f"{step}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.exhaustive
def test_twenty_thousand_rows_are_indexed_once_and_then_answered_at_once(large: Path) -> None:
    started = time.monotonic()
    with Library.open(large) as library:
        built = time.monotonic() - started
        assert library.count() == 20_000
    started = time.monotonic()
    with Library.open(large) as library:
        assert library.rows(limit=50)[49].line == 50
        assert len(library.steps()) == 20
        first_screen = time.monotonic() - started
        assert library.count(parse_query("score<0.5 step:3..4")) == 1000
        assert library.rows(parse_query("sort:-score"), limit=1)[0].request_id == "0-999"
        assert library.count(parse_query("text:WORD77")) == 20 * 11
        assert library.next_match("word999 said", None, parse_query("sort:-step")).request_id == "19-999"
        assert library.next_match("word999 said", None, None, backwards=True).request_id == "19-999"
        assert library.position(library.find("7-500")[0].number) == 7500
        assert library.refresh() == 0
        answered = time.monotonic() - started
    assert max(built / 60, first_screen / 5, answered / 20) < patient(1), (built, first_screen, answered)


@pytest.mark.slow
def test_rows_are_reached_through_their_files_without_looking_at_all_of_them(large: Path) -> None:
    with Library.open(large) as library, library._index.store.reading() as connection:
        query = f"SELECT rows.number FROM {TABLES} ORDER BY {order_by(Query())}"
        plan = " ".join(step for *_, step in connection.execute(f"EXPLAIN QUERY PLAN {query}"))
    assert "SEARCH rows USING COVERING INDEX rows_of_file" in plan
    assert "TEMP B-TREE" not in plan


def test_the_results_of_a_clusters_workers_open_like_a_dump(tmp_path: Path) -> None:
    shards = tmp_path / "out" / ".cluster" / "0" / "shards"
    shards.mkdir(parents=True)
    entry = b'{"request_id":"request-1","kind":"tools","asked":{},"got":{"answer":null,"clock":[]}}'
    for worker in range(2):
        results = Results(shards / f"node-{worker}.jsonl")
        results.keep(0, [to_line(small(worker + 1)), entry, entry])
        results.close()
    with Library.open(shards) as library:
        assert [(row.request_id, row.damaged) for row in library.rows()] == [("request-1", ""), ("request-2", "")]
        assert library.trajectory(library.rows()[1].number) is not None
