"""Made word problems: right answers, the same everywhere, and none that a test set has."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from itertools import islice

import pytest

from toolyard.chat.syntax import syntax_of
from toolyard.errors import ConfigError
from toolyard.rewards.gsm8k import final_answer
from toolyard.tasks import bundled
from toolyard.tasks.files import read_tasks
from toolyard.tasks.rows import Shape, shape_of
from toolyard.tasks.word_problems.files import write_problems
from toolyard.tasks.word_problems.generator import NAMES, distinct, draw, problems, rows, teacher_turns, templates_of
from toolyard.tasks.word_problems.templates import Template

TEMPLATES = (*templates_of("train"), *templates_of("unseen"))
INTERPRETER = """
import contextlib, io, json, sys
printed = []
for program in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(program, {})
    printed.append(out.getvalue())
print(json.dumps(printed))
"""


def lines(path) -> list:
    return [json.loads(line) for line in path.read_text().splitlines()]


def stories(question: str) -> str:
    """What is left without numbers and names."""
    people = "|".join(name for names in NAMES.values() for name in names.split())
    return re.sub(rf"\b({people})\b", "A", re.sub(r"\d+", "0", question))


class TestEveryTemplate:
    @pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.name)
    def test_programs_print_the_answers(self, template):
        chance = random.Random(template.name)
        drawn = [draw(template, chance) for _ in range(50)]
        ran = subprocess.run(
            [sys.executable, "-I", "-c", INTERPRETER],
            input=json.dumps([problem.program for problem in drawn]),
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        assert json.loads(ran.stdout) == [f"{problem.answer}\n" for problem in drawn]

    @pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.name)
    def test_questions_and_answers_are_whole_and_small(self, template):
        chance = random.Random(1)
        for _ in range(50):
            problem = draw(template, chance)
            assert 0 <= problem.answer <= 900
            assert problem.worked.endswith(f" = {problem.answer}.")
            assert 2 <= problem.program.count("\n") + 1 <= 5
            assert problem.question[0].isupper()
            assert problem.question.endswith("?")
            assert problem.question.count("?") == 1
            assert not re.search(r"[\[\]{}|]|  | [.,?]|\ba [aeio]|(ch|sh|x)s\b", problem.question)

    @pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.name)
    def test_a_question_says_all_numbers_that_its_program_has(self, template):
        problem = draw(template, random.Random(2))
        given = [int(number) for number in re.findall(r"^\w+ = (\d+)$", problem.program, re.MULTILINE)]
        assert given == [int(number) for number in re.findall(r"\d+", problem.question)]

    @pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.name)
    def test_divisions_come_out_even(self, template):
        chance = random.Random(3)
        for _ in range(50):
            for over, under in re.findall(r"(\d+) // (\d+)", draw(template, chance).worked):
                assert int(over) % int(under) == 0


def test_there_are_many_templates_and_a_fifth_of_them_is_kept_for_tests():
    train, unseen = templates_of("train"), templates_of("unseen")
    assert len(TEMPLATES) >= 40
    assert 0.15 <= len(unseen) / len(TEMPLATES) <= 0.25
    assert len({template.name for template in TEMPLATES}) == len({template.text for template in TEMPLATES})
    assert len({template.name for template in TEMPLATES}) == len(TEMPLATES)
    assert not {template.text for template in train} & {template.text for template in unseen}


def test_splits_have_no_question_in_common_even_apart_from_numbers_and_names():
    asked = [
        {stories(row["question"]) for row in rows(1000, seed=seed, split=split)}
        for seed, split in ((0, "train"), (0, "unseen"))
    ]
    assert not asked[0] & asked[1]


def test_none_is_one_of_the_bundled_problems_nor_the_same_story_with_other_numbers():
    found = bundled.find("word-problems")
    assert found is not None
    known = {stories(row["question"]) for row in lines(found.path)}
    made = {stories(row["question"]) for split in ("train", "unseen") for row in rows(3000, split=split)}
    assert len(known) == 60
    assert not known & made


def test_no_question_comes_twice_and_templates_come_equally_often():
    made = list(rows(3000, seed=5))
    assert len({row["question"] for row in made}) == len({row["id"] for row in made}) == 3000
    counts = Counter(row["template"] for row in made)
    assert len(counts) == len(templates_of("train"))
    assert max(counts.values()) - min(counts.values()) <= 1


def test_the_first_of_many_are_those_of_few():
    assert list(rows(30, seed=4)) == list(islice(rows(300, seed=4), 30))


def test_seeds_make_other_problems():
    one, other = ({row["question"] for row in rows(200, seed=seed)} for seed in (1, 2))
    assert len(one & other) < 5


def test_a_seed_makes_the_same_rows_on_every_machine_and_every_python():
    made = json.dumps([*rows(200, seed=1), *rows(200, seed=1, split="unseen")])
    assert hashlib.sha256(made.encode()).hexdigest()[:16] == "878a78db603cf3e0"
    module = "toolyard.tasks.word_problems.generator"
    again = f"import json; from {module} import rows; print(json.dumps(list(rows(50, seed=1))), end='')"
    for hash_seed in ("1", "2"):
        ran = subprocess.run(
            [sys.executable, "-c", again],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
        )
        assert ran.stdout == json.dumps(list(rows(50, seed=1)))


def test_no_split_of_another_name():
    with pytest.raises(ConfigError, match=r"split 'test': expected one of train, unseen"):
        problems(1, split="test")


def test_more_than_there_are_is_an_error_that_says_so():
    tiny = Template("tiny", "How many hours are {days} days?", {"days": (1, 3)}, "days * 24")
    made = distinct([tiny], 4, random.Random(0))
    assert {problem.answer for problem in islice(made, 3)} == {24, 48, 72}
    with pytest.raises(ConfigError, match="count 4: after 3 problems template 'tiny' has no new question; ask for"):
        next(made)


class TestTeacher:
    def test_turns_are_a_call_that_is_read_as_one_and_the_answer(self):
        for row in rows(50, seed=9):
            call, answer = teacher_turns(row)
            assert call.startswith('<tool_call>\n{"name": "code_interpreter", "arguments": {"code": "')
            parsed = syntax_of("hermes").parse(call)
            assert [(found.name, json.loads(found.arguments)) for found in parsed.calls] == [
                ("code_interpreter", {"code": row["program"]})
            ]
            assert not parsed.malformed
            assert final_answer(answer) == final_answer(row["answer"])


class TestFiles:
    def test_rows_make_tasks_whose_solution_the_model_is_not_shown(self, tmp_path):
        write_problems(tmp_path / "made.jsonl", 20, seed=7)
        tasks = list(read_tasks(tmp_path / "made.jsonl"))
        written = lines(tmp_path / "made.jsonl")
        assert {shape_of(row) for row in written} == {Shape.GSM8K}
        assert [task.id for task in tasks] == [f"made-7-{number}" for number in range(20)]
        for task, row in zip(tasks, written, strict=True):
            assert task.ground_truth == final_answer(row["answer"])
            assert task.data_source == "toolyard/made-problems"
            assert task.extra_info["program"] == row["program"]
            assert row["program"] not in task.messages[-1].content

    def test_the_script_has_turns_for_every_task(self, tmp_path):
        write_problems(tmp_path / "made.jsonl", 5, split="unseen", script=tmp_path / "new" / "teacher.json")
        script = json.loads((tmp_path / "new" / "teacher.json").read_text())
        assert script == {row["id"]: teacher_turns(row) for row in lines(tmp_path / "made.jsonl")}
        assert next(iter(script)) == "unseen-0-0"

    def test_a_file_is_replaced_only_if_it_is_said(self, tmp_path):
        (tmp_path / "teacher.json").write_text("precious")
        with pytest.raises(ConfigError, match=r"teacher\.json: already exists; --force replaces it"):
            write_problems(tmp_path / "made.jsonl", 5, script=tmp_path / "teacher.json")
        assert [path.name for path in tmp_path.iterdir()] == ["teacher.json"]
        write_problems(tmp_path / "made.jsonl", 5, script=tmp_path / "teacher.json", force=True)
        assert len(json.loads((tmp_path / "teacher.json").read_text())) == 5

    def test_what_cannot_be_written_is_said(self, tmp_path):
        with pytest.raises(ConfigError, match=r"made\.csv: its name must end in \.jsonl"):
            write_problems(tmp_path / "made.csv", 5)
        with pytest.raises(ConfigError, match=r"count 0: expected at least 1"):
            write_problems(tmp_path / "made.jsonl", 0)
        (tmp_path / "file").write_text("")
        with pytest.raises(ConfigError, match=r"made\.jsonl: cannot be written"):
            write_problems(tmp_path / "file" / "made.jsonl", 5)
