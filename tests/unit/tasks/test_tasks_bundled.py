"""The word problems that come with Toolyard: every answer is computed again."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from toolyard.errors import TaskError
from toolyard.rewards.gsm8k import compute_score, final_answer
from toolyard.tasks import bundled
from toolyard.tasks.files import open_tasks
from toolyard.tasks.rows import GSM8K_INSTRUCTION

FILE = bundled.find("word-problems").path
ROWS = [json.loads(line) for line in FILE.read_text().splitlines()]
OPERATIONS = re.compile(r"[-+*/]")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_every_answer_is_what_its_expression_computes(row):
    computed = eval(row["expression"], {"__builtins__": {}, "sum": sum, "range": range})
    assert float(final_answer(row["answer"])) == pytest.approx(computed, abs=1e-9)
    solution, mark, _ = row["answer"].rpartition("\n#### ")
    assert mark
    assert compute_score(row["answer"], row["answer"], "strict") == 1.0
    # Whichever way it is read: the last number of the solution is the answer too.
    assert compute_score(solution, row["answer"], "flexible") == 1.0


def test_the_set_has_sixty_different_problems_the_easiest_first():
    assert len({row["question"] for row in ROWS}) == len({row["id"] for row in ROWS}) == len(ROWS) == 60
    assert all(len(OPERATIONS.findall(row["expression"])) <= 2 for row in ROWS[:8])
    assert all(len(row["question"]) < 110 for row in ROWS[:8])


def test_not_all_answers_are_alike():
    answers = [final_answer(row["answer"]) for row in ROWS]
    assert max(Counter(answers).values()) <= 4
    assert sum(answer.startswith("-") for answer in answers) >= 3
    assert sum("." in answer for answer in answers) >= 3


def test_the_name_does_wherever_a_path_does():
    tasks = list(open_tasks("word-problems"))
    assert len(tasks) == 60
    assert {task.data_source for task in tasks} == {"toolyard/word-problems"}
    assert (tasks[0].id, tasks[0].ground_truth) == ("word-problem-01", "9")
    assert tasks[0].messages[-1].content.endswith(GSM8K_INSTRUCTION)


def test_a_file_of_the_same_name_is_reached_by_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("word-problems").mkdir()
    assert len(list(open_tasks("word-problems", limit=3))) == 3
    with pytest.raises(TaskError, match="the folder has no data files"):
        open_tasks("./word-problems")
