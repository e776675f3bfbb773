"""`toolyard chat`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from chat_models import CODE_TOOL, TEMPLATES, write_folder
from toolyard.cli.chat import app
from toolyard.errors import ConfigError


def run(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def test_check_prints_a_table_of_what_was_seen(tmp_path: Path) -> None:
    code, told = run("check", write_folder(tmp_path), "--conversations", 3)
    assert code == 0
    assert "template:hermes" in told
    assert told.count("passed") == 9
    assert "arguments of calls are rewritten" in told


def test_check_tells_all_as_json(tmp_path: Path) -> None:
    code, told = run(
        "check", write_folder(tmp_path), "--conversations", 3, "--seed", 5, "--json", "--format", "code_block"
    )
    report = json.loads(told)
    assert code == 0
    assert (report["format"], report["seed"], report["passed"]) == ("template:code_block", 5, True)
    assert {check["outcome"] for check in report["checks"]} <= {"passed", "n.a.", "rewrites"}


def test_check_exits_with_1_if_a_check_failed(tmp_path: Path) -> None:
    lying = tmp_path / "lying.jinja"
    said = "message.content + '<|im_end|>"
    lying.write_text(TEMPLATES["qwen"].replace(said, said.replace("content", "content | replace('six', 'five')")))
    code, told = run("check", write_folder(tmp_path), "--chat-template", lying, "--conversations", 30)
    assert code == 1
    assert "failed" in told


def test_what_is_wrong_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no tokenizer"):
        run("check", tmp_path)
    assert run("check", write_folder(tmp_path), "--tool-role", "nobody")[0] == 2


def test_render_prints_the_prompt(tmp_path: Path) -> None:
    said, tools = tmp_path / "messages.json", tmp_path / "tools.json"
    said.write_text(json.dumps([{"role": "user", "content": "Hello"}]))
    tools.write_text(json.dumps([CODE_TOOL.model_dump(mode="json")]))
    code, told = run("render", write_folder(tmp_path), "--messages", said, "--tools", tools)
    assert code == 0
    assert "code_interpreter" in told
    assert told.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n\n")
    ids = json.loads(run("render", tmp_path, "--messages", said, "--json")[1])["ids"]
    assert ids[0] == 1


@pytest.mark.parametrize("wrong", ["{", "{}", "[]", "[1]", '[{"role": "user", "content": 1}]'])
def test_messages_that_are_none_are_told(tmp_path: Path, wrong: str) -> None:
    (tmp_path / "messages.json").write_text(wrong)
    with pytest.raises(ConfigError, match=r"messages\.json: "):
        run("render", write_folder(tmp_path), "--messages", tmp_path / "messages.json")
