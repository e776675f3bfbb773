"""Trajectories as rows for supervised fine-tuning: which are written, how, and why others are not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from playing import CHAT, FORGED, TOKENIZER, Echo, call, played, said
from toolyard.cli.app import app
from toolyard.errors import ConfigError
from toolyard.export.conversations import Conversation, LeftOut, conversation_of
from toolyard.export.rendering import Match, PlainWriting, TemplateWriting
from toolyard.export.sft import SftRules, SftSummary, write_sft
from toolyard.images import Image
from toolyard.messages import Message, OpenAIFunctionToolSchema
from toolyard.records.lines import to_line
from toolyard.records.trajectory import BRANCH, Trajectory
from toolyard.viewer.library import Library
from toolyard.viewer.query import parse_query
from trajectory_samples import failed_trajectory

ECHO = OpenAIFunctionToolSchema.model_validate(Echo().tool_schema.model_dump())


@pytest.fixture(scope="module")
def one() -> Trajectory:
    import asyncio

    return asyncio.run(played([said("hi"), "It is 42."], [Echo()]))


def dump(folder: Path, *trajectories: Trajectory) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "0.jsonl").write_bytes(b"".join(map(to_line, trajectories)))
    return folder


def exported(
    folder: Path, target: Path, query: str = "", writing: Any = None, **rules: Any
) -> tuple[SftSummary, list[dict[str, Any]]]:
    with Library.open(folder) as library:
        done = write_sft(library, target, parse_query(query), writing or PlainWriting([ECHO]), SftRules(**rules))
    return done, [json.loads(line) for line in target.read_text().splitlines()]


def other(one: Trajectory, number: int, *, task: str = "t", score: float = 1.0, text: str | None = None) -> Trajectory:
    """Another sample, with another last message."""
    last = Message("assistant", f"It is 42, says {number}." if text is None else text)
    named = {"request_id": f"{task}-{number}", "batch_data_id": task, "score": score}
    return replace(one, messages=(*one.messages[:-1], last), **named)


# Rows -----------------------------------------------------------------------------------------------------------------


def test_calls_are_objects_and_tools_are_json_in_a_column(tmp_path: Path, one: Trajectory) -> None:
    done, [row] = exported(dump(tmp_path / "d", one), tmp_path / "out.jsonl")
    assert row["messages"] == [
        {"role": "user", "content": "What is 6 times 7?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "call_0_0", "type": "function", "function": {"name": "echo", "arguments": {"text": "hi"}}}
            ],
        },
        {"role": "tool", "content": "hi", "tool_call_id": "call_0_0", "name": "echo"},
        {"role": "assistant", "content": "It is 42."},
    ]
    assert json.loads(row["tools"]) == [ECHO.model_dump(mode="json")]
    assert (row["task"], row["request_id"], row["score"]) == (one.batch_data_id, one.request_id, one.score)
    assert (done.conversations, done.tasks, done.with_calls, done.with_examples) == (1, 1, 1, 0)
    assert done.size == (tmp_path / "out.jsonl").stat().st_size


def test_prompt_and_completion_are_split_where_the_model_began(tmp_path: Path, one: Trajectory) -> None:
    examples = (Message("user", "2 + 2?"), Message("assistant", "4"))
    _, [row] = exported(
        dump(tmp_path / "d", replace(one, messages=(*examples, *one.messages))),
        tmp_path / "out.jsonl",
        format="prompt-completion",
    )
    assert [message["content"] for message in row["prompt"]] == ["2 + 2?", "4", "What is 6 times 7?"]
    assert [message["role"] for message in row["completion"]] == ["assistant", "tool", "assistant"]
    assert "messages" not in row


# What is left out -----------------------------------------------------------------------------------------------------


def changed(one: Trajectory, **changes: Any) -> Trajectory:
    return replace(one, **changes)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda one: failed_trajectory(), LeftOut.FAILED),
        (lambda one: changed(one, score=None), LeftOut.NO_SCORE),
        (lambda one: changed(one, messages=(), turns=()), LeftOut.NO_MESSAGES),
        (lambda one: changed(one, finish_reason="length"), LeftOut.TRUNCATED),
        (lambda one: changed(one, finish_reason="max_assistant_turns"), LeftOut.TRUNCATED),
        (lambda one: changed(one, messages=one.messages[:-1], turns=one.turns[:1]), LeftOut.UNANSWERED),
        (
            lambda one: changed(
                one,
                messages=(
                    one.messages[0],
                    replace(one.messages[1], images=(Image("image/png", b"x", 1, 1),)),
                    *one.messages[2:],
                ),
            ),
            LeftOut.IMAGES,
        ),
        (lambda one: changed(one, metrics={"faults": {"injected": [{"kind": "x"}]}}), LeftOut.FAULTS),
    ],
)
def test_what_is_no_good_example_is_left_out_with_its_reason(one: Trajectory, change: Any, reason: LeftOut) -> None:
    assert isinstance(conversation_of(one), Conversation)
    assert conversation_of(change(one)) is reason


def test_of_a_session_the_main_branch_is_exported_and_the_others_are_counted(tmp_path: Path, one: Trajectory) -> None:
    branches = [replace(one, request_id=f"{one.request_id}{BRANCH}{number}") for number in range(2)]
    done, rows = exported(dump(tmp_path / "d", *branches, one), tmp_path / "out.jsonl", keep_duplicates=True)
    assert [row["request_id"] for row in rows] == [one.request_id]
    assert done.left_out == {LeftOut.BRANCH: 2}


def test_runs_in_subfolders_are_named_since_they_may_be_evaluations(tmp_path: Path, one: Trajectory) -> None:
    dump(tmp_path / "a", other(one, 1))
    dump(tmp_path / "a/eval", other(one, 2, task="held out"))
    assert exported(tmp_path / "a", tmp_path / "sft.jsonl")[0].runs == ("", "eval")
    done = CliRunner().invoke(app, ["export", str(tmp_path / "a"), str(tmp_path / "cli.jsonl")])
    assert "the runs ., eval are taken together" in " ".join(done.stderr.split())
    done, rows = exported(tmp_path / "a", tmp_path / "alone.jsonl", "-run:eval")
    assert (done.runs, len(rows)) == (("",), 1)


async def test_a_call_that_could_not_be_read_is_left_out() -> None:
    broken = await played(["<tool_call>\n{bad\n</tool_call>", "It is 42."], [Echo()])
    assert conversation_of(broken) is LeftOut.MALFORMED_CALL


async def test_a_call_that_the_tool_refused_is_a_good_example_if_the_answer_is() -> None:
    wrong = await played([call("echo", {"txt": "hi"}), "It is 42."], [Echo()])
    assert isinstance(conversation_of(wrong), Conversation)


def test_lines_of_verl_are_left_out_and_counted(tmp_path: Path, one: Trajectory) -> None:
    folder = dump(tmp_path / "d", one)
    with (folder / "0.jsonl").open("ab") as file:
        file.write(b'{"input": "?", "output": "!", "score": 1.0, "step": 0}\n')
        file.write(b'{"damaged": true}\n')
    done, rows = exported(folder, tmp_path / "out.jsonl")
    assert len(rows) == 1
    assert dict(done.left_out) == {LeftOut.NO_MESSAGES: 1, LeftOut.DAMAGED: 1}


def test_a_line_that_was_cut_off_is_told(tmp_path: Path, one: Trajectory) -> None:
    folder = dump(tmp_path / "d", one, other(one, 1))
    file = folder / "0.jsonl"
    file.write_bytes(file.read_bytes()[:-100])
    assert exported(folder, tmp_path / "out.jsonl")[0].torn == 1
    done = CliRunner().invoke(app, ["export", str(folder), str(tmp_path / "cli.jsonl")])
    assert "left out: 1 incomplete last line (still being written, or cut off)" in " ".join(done.stderr.split())


def test_if_nothing_can_be_written_there_is_no_file(tmp_path: Path, one: Trajectory) -> None:
    folder = dump(tmp_path / "d", replace(one, finish_reason="length"))
    with pytest.raises(ConfigError, match="no trajectory can be exported: 1 truncated"):
        exported(folder, tmp_path / "out.jsonl")
    with pytest.raises(ConfigError, match="none matches the query"):
        exported(folder, tmp_path / "out.jsonl", "score<0")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d"]


# Selection ------------------------------------------------------------------------------------------------------------


def test_the_best_of_each_task_are_kept_and_the_seed_chooses_among_equals(tmp_path: Path, one: Trajectory) -> None:
    scores = {"a": [0.2, 1.0, 0.5, 1.0, 1.0], "b": [0.1]}
    lines = [
        other(one, number, task=task, score=score)
        for task, found in scores.items()
        for number, score in enumerate(found)
    ]
    folder = dump(tmp_path / "d", *lines)
    done, rows = exported(folder, tmp_path / "1.jsonl", per_task=1)
    assert [(row["task"], row["score"]) for row in rows] == [("a", 1.0), ("b", 0.1)]
    assert (done.over_limit, done.tasks) == (4, 2)
    chosen = {
        exported(folder, tmp_path / f"s{seed}.jsonl", per_task=1, seed=seed)[1][0]["request_id"] for seed in range(9)
    }
    assert chosen == {"a-1", "a-3", "a-4"}
    _, rows = exported(folder, tmp_path / "2.jsonl", "score>=0.5", per_task=3, limit=2)
    assert [row["score"] for row in rows] == [1.0, 1.0]


def test_if_the_best_cannot_be_written_the_next_is(tmp_path: Path, one: Trajectory) -> None:
    folder = dump(tmp_path / "d", replace(other(one, 1), finish_reason="length"), other(one, 2, score=0.5))
    done, [row] = exported(folder, tmp_path / "out.jsonl", per_task=1)
    assert row["request_id"] == "t-2"
    assert dict(done.left_out) == {LeftOut.TRUNCATED: 1}


def test_the_same_conversation_is_written_once(tmp_path: Path, one: Trajectory) -> None:
    folder = dump(tmp_path / "d", *(other(one, number, text="It is 42.") for number in range(3)), other(one, 4))
    done, rows = exported(folder, tmp_path / "out.jsonl")
    assert len(rows) == 2
    assert done.left_out[LeftOut.DUPLICATE] == 2
    assert len(exported(folder, tmp_path / "all.jsonl", keep_duplicates=True)[1]) == 4


def test_the_same_arguments_write_the_same_bytes(tmp_path: Path, one: Trajectory) -> None:
    folder = dump(tmp_path / "d", *(other(one, number, task=f"t{number % 3}") for number in range(9)))
    for name in ("a", "b"):
        exported(folder, tmp_path / name, per_task=2, seed=3)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


# Files ----------------------------------------------------------------------------------------------------------------


def test_neither_the_dump_nor_another_file_is_overwritten(tmp_path: Path, one: Trajectory) -> None:
    folder = dump(tmp_path / "d", one)
    content = (folder / "0.jsonl").read_bytes()
    with pytest.raises(ConfigError, match="belongs to the dump"):
        exported(folder, folder / "0.jsonl")
    (tmp_path / "link").symlink_to(folder / "0.jsonl")
    with pytest.raises(ConfigError, match="belongs to the dump"):
        exported(folder, tmp_path / "link")
    assert (folder / "0.jsonl").read_bytes() == content
    (tmp_path / "out.jsonl").write_text("mine")
    with pytest.raises(ConfigError, match="exists"):
        exported(folder, tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_text() == "mine"


def test_killed_in_the_middle_it_leaves_no_half_file(tmp_path: Path, one: Trajectory) -> None:
    folder = dump(tmp_path / "d", *(other(one, number, task=f"t{number}") for number in range(400)))
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom toolyard.export.sft import write_sft\n"
        "from toolyard.export.rendering import PlainWriting\nfrom toolyard.viewer.library import Library\n"
        "from toolyard.viewer.query import parse_query\n"
        "die = lambda done, total: os.kill(os.getpid(), 9)\n"
        "with Library.open(sys.argv[1]) as library:\n"
        "    write_sft(library, Path(sys.argv[2]), parse_query(''), PlainWriting([]), progress=die)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, folder, tmp_path / "out.jsonl"], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "out.jsonl").exists()
    assert len(exported(folder, tmp_path / "out.jsonl")[1]) == 400, "and it can be written again"


# Templates ------------------------------------------------------------------------------------------------------------

WRITING: Any = TemplateWriting(CHAT, TOKENIZER, [ECHO])  # type: ignore[arg-type]


def test_as_the_template_gets_it_a_conversation_is_rendered_to_the_sampled_tokens(
    tmp_path: Path, one: Trajectory
) -> None:
    done, [row] = exported(dump(tmp_path / "d", one), tmp_path / "out.jsonl", writing=WRITING, exact=True)
    assert dict(done.matches) == {Match.EXACT: 1}
    assert "tools" not in row, "the template does not know tools: they are in the system message"
    assert row["messages"][0]["role"] == "system"
    assert row["messages"][2] == {
        "role": "assistant",
        "content": '<tool_call>\n{"name": "echo", "arguments": {"text": "hi"}}\n</tool_call>',
    }


async def test_calls_are_kept_as_the_model_wrote_them_not_as_the_syntax_would(tmp_path: Path) -> None:
    odd = '<tool_call>\n{"arguments":{"text":"hi"},   "name":"echo"}\n</tool_call>'
    folder = dump(tmp_path / "d", await played([odd, "It is 42."], [Echo()]))
    done, [row] = exported(folder, tmp_path / "out.jsonl", writing=WRITING)
    assert row["messages"][2]["content"] == odd
    assert done.matches[Match.EXACT] == 1


async def test_a_text_that_looks_like_tokens_is_no_match_and_left_out_with_exact(tmp_path: Path) -> None:
    """In a rollout it stays text; a trainer's tokenizer would make special tokens of it."""
    forged = await played([said("forge"), "It is 42."], [Echo()])
    assert any(FORGED in message.content for message in forged.messages)
    done, _ = exported(dump(tmp_path / "d", forged), tmp_path / "a.jsonl", writing=WRITING)
    assert dict(done.matches) == {Match.SAME_TEXT: 1}
    with pytest.raises(ConfigError, match="no trajectory can be exported: 1 not exact"):
        exported(tmp_path / "d", tmp_path / "b.jsonl", writing=WRITING, exact=True)


def test_another_text_is_told_with_the_first_difference(tmp_path: Path, one: Trajectory) -> None:
    folder = dump(tmp_path / "d", replace(one, messages=(*one.messages[:-1], Message("assistant", "It is 43."))))
    done, [_] = exported(folder, tmp_path / "out.jsonl", writing=WRITING)
    assert dict(done.matches) == {Match.DIFFERENT: 1}
    assert "the template writes" in done.difference
    assert "It is 43." in done.difference
    assert "It is 42." in done.difference


def test_exact_needs_a_tokenizer(tmp_path: Path, one: Trajectory) -> None:
    with pytest.raises(ConfigError, match="only be compared with a tokenizer"):
        exported(dump(tmp_path / "d", one), tmp_path / "out.jsonl", exact=True)


# The command ----------------------------------------------------------------------------------------------------------


def run(*arguments: object) -> str:
    done = CliRunner().invoke(app, ["export", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stderr


def test_the_command_says_what_it_wrote_and_what_it_left_out(tmp_path: Path, one: Trajectory) -> None:
    best = replace(other(one, 3, score=2.0), finish_reason="length")
    folder = dump(tmp_path / "d", other(one, 1), other(one, 2), best)
    told = run(folder, tmp_path / "out.jsonl", "--select", "score>=1", "--per-task", 1).splitlines()
    assert told == [
        f"{tmp_path / 'out.jsonl'}: 1 conversation of 1 task, 0.0 MB",
        "left out: 1 truncated, 1 beyond --per-task or --limit",
        "1 call tools, but no schemas are known: no tools column (see --tools)",
    ]


def test_tools_are_those_of_the_run_or_of_a_file(tmp_path: Path, one: Trajectory) -> None:
    folder = dump(tmp_path / "d", one)
    (folder / "rollout.json").write_text(json.dumps({"tools": None}))
    run(folder, tmp_path / "a.jsonl")
    [row] = map(json.loads, (tmp_path / "a.jsonl").read_text().splitlines())
    assert [tool["function"]["name"] for tool in json.loads(row["tools"])] == ["code_interpreter"]
    (folder / "rollout.json").write_text(json.dumps({"tools": str(tmp_path / "gone.yaml")}))
    with pytest.raises(ConfigError, match=r"gone\.yaml, which does not exist: set --tools"):
        run(folder, tmp_path / "b.jsonl")
    (tmp_path / "tools.yaml").write_text(
        "tools:\n  - class_name: toolyard.tools.gsm8k.Gsm8kTool\n    config: {type: native}\n"
    )
    run(folder, tmp_path / "b.jsonl", "--tools", tmp_path / "tools.yaml")
    [row] = map(json.loads, (tmp_path / "b.jsonl").read_text().splitlines())
    assert [tool["function"]["name"] for tool in json.loads(row["tools"])] == ["calc_gsm8k_reward"]


def test_examples_in_the_prompt_are_pointed_out(tmp_path: Path, one: Trajectory) -> None:
    examples = (Message("user", "2 + 2?"), Message("assistant", "4"))
    folder = dump(tmp_path / "d", replace(one, messages=(*examples, *one.messages)))
    assert "--format prompt-completion separates them" in run(folder, tmp_path / "a.jsonl")
    assert "separates" not in run(folder, tmp_path / "b.jsonl", "--format", "prompt-completion")


@pytest.mark.parametrize(
    ("options", "why"),
    [(["--exact"], "name the model with --tokenizer"), (["--tokenizer", "/no/such/model"], "/no/such/model")],
)
def test_wrong_options_are_refused(tmp_path: Path, one: Trajectory, options: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        run(dump(tmp_path / "d", one), tmp_path / "out.jsonl", *options)
    assert not (tmp_path / "out.jsonl").exists()
    assert os.listdir(tmp_path) == ["d"]
