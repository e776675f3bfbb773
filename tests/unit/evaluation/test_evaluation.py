"""Evaluations of dumps, as a user would count them by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from toolyard.errors import ConfigError, RecordError
from toolyard.evaluation.comparison import compare
from toolyard.evaluation.results import Rules, evaluate
from toolyard.evaluation.runs import read_run
from toolyard.evaluation.tags import TaskTags, tags_by
from toolyard.records.lines import to_line
from toolyard.records.trajectory import BRANCH, Trajectory
from toolyard.viewer.query import QueryError
from trajectory_samples import good_trajectory


def sample(task: str, number: int, score: float | None, *, step: int = 0, **changes: object) -> Trajectory:
    named = {"request_id": f"{task}-{number}-{step}", "batch_data_id": task, "score": score, "step": step}
    return replace(good_trajectory(number, turns=1, tokens=3), **{**named, **changes})


def task(name: str, *scores: float | None, **changes: object) -> list[Trajectory]:
    return [sample(name, number, score, **changes) for number, score in enumerate(scores)]


def write(path: Path, *trajectories: Trajectory) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(map(to_line, trajectories)))


def verl_line(**fields: object) -> bytes:
    return json.dumps({"input": "How many?", "output": "7", "score": 0.5, "step": 1} | fields).encode()


def dump(folder: Path, *tasks: list[Trajectory]) -> Path:
    write(folder / "0.jsonl", *(one for found in tasks for one in found))
    return folder


QUICK = Rules(resamples=200)


def test_every_task_has_the_same_weight_however_many_samples_it_has(tmp_path: Path) -> None:
    dump(tmp_path, task("a", 1.0, 1.0, 1.0, 1.0), task("b", 0.0))
    found = evaluate(read_run(tmp_path), QUICK).whole
    assert found.estimates["mean"].value == 0.5
    assert (found.tasks, found.attempts, dict(found.samples)) == (2, 5, {4: 1, 1: 1})


def test_pass_at_k_is_the_unbiased_estimate_over_tasks(tmp_path: Path) -> None:
    dump(tmp_path, task("a", 1.0, 0.0, 0.0, 0.0), task("b", 0.0, 0.0, 0.0, 0.0))
    found = evaluate(read_run(tmp_path), QUICK)
    assert found.ks == (1, 2, 4)
    assert [found.whole.estimates[f"pass@{k}"].value for k in found.ks] == [0.125, 0.25, 0.5]


def test_a_sample_without_a_reward_is_counted_and_never_0(tmp_path: Path) -> None:
    failed = sample("a", 1, None, state="FAILED", finish_reason="engine_failure")
    nan = replace(sample("b", 1, None), finish_reason="stop")
    dump(tmp_path, [sample("a", 0, 1.0), failed, sample("b", 0, 1.0), nan])
    found = evaluate(read_run(tmp_path), QUICK).whole
    assert found.estimates["mean"].value == 1.0
    assert dict(found.without_reward) == {"engine_failure": 1, "stop": 1}
    assert found.estimates["pass@1"].value == 1.0
    assert "pass@2" not in found.estimates


def test_nan_and_infinite_rewards_are_unknown(tmp_path: Path) -> None:
    lines = [verl_line(input="a", score=value) for value in (float("nan"), float("inf"), 1.0)]
    (tmp_path / "0.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    found = evaluate(read_run(tmp_path), QUICK).whole
    assert found.estimates["mean"].value == 1.0
    assert sum(found.without_reward.values()) == 2


def test_without_any_reward_nothing_is_known(tmp_path: Path) -> None:
    dump(tmp_path, task("a", None, None), task("b", None))
    found = evaluate(read_run(tmp_path), QUICK)
    assert found.whole.estimates["mean"] == (None, None, 0)
    assert found.ks == ()


def test_one_sample_of_one_task_has_no_interval(tmp_path: Path) -> None:
    found = evaluate(read_run(dump(tmp_path, task("a", 1.0))), QUICK).whole
    assert found.estimates == {"mean": (1.0, None, 1), "pass@1": (1.0, None, 1)}


def test_the_tasks_with_too_few_samples_are_left_out_of_pass_at_k_and_counted(tmp_path: Path) -> None:
    dump(tmp_path, task("a", 1.0, 0.0), task("b", 0.0, 0.0), task("c", 1.0))
    found = evaluate(read_run(tmp_path), QUICK).whole
    assert found.estimates["pass@2"].value == 0.5
    assert (found.estimates["pass@2"].tasks, found.estimates["pass@1"].tasks) == (2, 3)


def test_runs_in_subfolders_are_named_and_can_be_left_out(tmp_path: Path) -> None:
    """Such as a training run's evaluations, whose tasks are others."""
    dump(tmp_path, task("a", 1.0, 0.0))
    (tmp_path / "eval").mkdir()
    dump(tmp_path / "eval", task("b", 1.0))
    both = read_run(tmp_path)
    assert len(both.attempts) == 3
    assert any("the runs ., eval are taken together" in note for note in both.notes), both.notes
    alone = read_run(tmp_path, query="-run:eval")
    assert (len(alone.attempts), alone.notes) == (2, [])


def test_the_threshold_says_what_is_solved(tmp_path: Path) -> None:
    run = read_run(dump(tmp_path, task("a", 0.5, 0.9)))
    assert evaluate(run, QUICK).whole.estimates["pass@1"].value == 0.0
    assert evaluate(run, Rules(threshold=0.5, resamples=200)).whole.estimates["pass@1"].value == 1.0


def test_a_part_of_the_reward_can_be_evaluated(tmp_path: Path) -> None:
    parts = [
        sample("a", 0, -0.1, rewards={"final": 1.0, "step": -1.1}),
        sample("a", 1, None, rewards={"final": None, "step": 0.0}),
    ]
    dump(tmp_path, parts)
    found = evaluate(read_run(tmp_path, reward="final"), QUICK).whole
    assert found.estimates["mean"].value == 1.0
    assert sum(found.without_reward.values()) == 1
    with pytest.raises(ConfigError, match=r"no line has a reward 'finale'; available: final, step"):
        read_run(tmp_path, reward="finale")


def test_k_beyond_the_samples_is_an_error_that_says_how_many_there_are(tmp_path: Path) -> None:
    run = read_run(dump(tmp_path, task("a", 1.0, 0.0)))
    with pytest.raises(ConfigError, match="no task has more than 2 samples"):
        evaluate(run, Rules(ks=(4,)))
    assert evaluate(run, Rules(ks=(2, 2), resamples=100)).ks == (2,)


def test_branches_of_a_session_count_once(tmp_path: Path) -> None:
    one = sample("a", 0, 1.0)
    dump(tmp_path, [replace(one, request_id=f"{one.request_id}{BRANCH}1"), one, sample("b", 0, 0.0)])
    assert evaluate(read_run(tmp_path), QUICK).whole.attempts == 2


def test_of_two_lines_of_a_request_the_last_counts(tmp_path: Path) -> None:
    dump(tmp_path, [sample("a", 0, 0.0), sample("a", 0, 1.0)])
    run = read_run(tmp_path)
    assert evaluate(run, QUICK).whole.estimates["mean"].value == 1.0
    assert any("1 line left out" in note for note in run.notes)


def test_damaged_lines_are_left_out_and_told(tmp_path: Path) -> None:
    dump(tmp_path, task("a", 1.0))
    with (tmp_path / "0.jsonl").open("ab") as file:
        file.write(b'{"input": 3}\n')
    run = read_run(tmp_path)
    assert len(run.attempts) == 1
    assert any("1 damaged line" in note for note in run.notes)


def test_a_line_that_was_cut_off_is_told(tmp_path: Path) -> None:
    dump(tmp_path, task("a", 1.0, 0.0))
    file = tmp_path / "0.jsonl"
    file.write_bytes(file.read_bytes()[:-100])
    run = read_run(tmp_path)
    assert len(run.attempts) == 1
    assert any("1 incomplete last line (still being written, or cut off) left out" in note for note in run.notes)


@pytest.mark.parametrize("content", [b"", b"\n"])
def test_an_empty_dump_is_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "0.jsonl").write_bytes(content)
    with pytest.raises(ConfigError, match="has no trajectories"):
        read_run(tmp_path)


def test_a_dump_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    for path, why in ((tmp_path / "no", "does not exist"), (tmp_path / "no*", "matches this pattern")):
        with pytest.raises((ConfigError, RecordError), match=why):
            read_run(str(path))


def test_a_query_selects_and_a_wrong_one_is_refused(tmp_path: Path) -> None:
    dump(tmp_path, task("a", 1.0), task("b", 0.0))
    assert evaluate(read_run(tmp_path, query="task=a"), QUICK).whole.tasks == 1
    with pytest.raises(ConfigError, match="no trajectory matches"):
        read_run(tmp_path, query="task=c")
    with pytest.raises(QueryError):
        read_run(tmp_path, query="tusk=c")


# Pooling --------------------------------------------------------------------------------------------------------------


def test_seeds_of_a_run_are_pooled_by_task(tmp_path: Path) -> None:
    for seed in range(3):
        dump(tmp_path / f"seed-{seed}", task("a", 1.0, 0.0), task("b", float(seed == 0)))
    expected = [("a", 3, 6), ("b", 1, 3)]
    for run in (
        read_run(str(tmp_path / "seed-*")),
        read_run([tmp_path / f"seed-{seed}" for seed in range(3)]),
        read_run(tmp_path),  # a folder of runs
    ):
        solved = {name: [one.score for one in run.attempts if one.task == name] for name in ("a", "b")}
        assert [(name, scores.count(1.0), len(scores)) for name, scores in solved.items()] == expected
    assert evaluate(run, QUICK).whole.estimates["mean"].value == pytest.approx((0.5 + 1 / 3) / 2)


def test_the_same_dump_twice_is_an_error(tmp_path: Path) -> None:
    dump(tmp_path / "a", task("a", 1.0))
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(ConfigError, match="would count twice"):
        read_run([tmp_path / "a", tmp_path / "b"])


def test_pooling_runs_of_other_settings_is_told_but_another_seed_is_not(tmp_path: Path) -> None:
    for name, settings in {
        "a": {"seed": 1, "sampling": {"temperature": 1.0}},
        "b": {"seed": 2, "sampling": {"temperature": 1.0}},
        "c": {"seed": 3, "sampling": {"temperature": 0.3}},
    }.items():
        dump(tmp_path / name, task("a", 1.0))
        (tmp_path / name / "rollout.json").write_text(json.dumps(settings))
    assert read_run([tmp_path / "a", tmp_path / "b"]).notes == []
    [note] = read_run([tmp_path / "a", tmp_path / "c"]).notes
    assert "sampling.temperature: 1.0 → 0.3" in note


def test_pooled_steps_are_told(tmp_path: Path) -> None:
    for step in (3, 7):
        write(tmp_path / f"{step}.jsonl", *task("a", 1.0, step=step))
    [note] = read_run(tmp_path).notes
    assert "2 steps are pooled, 3 to 7" in note


# Tags -----------------------------------------------------------------------------------------------------------------


def test_by_default_several_sources_are_divided(tmp_path: Path) -> None:
    dump(
        tmp_path,
        task("a", 1.0, data_source="math"),
        task("b", 0.0, data_source="math"),
        task("c", 1.0, data_source="unknown"),
    )
    found = evaluate(read_run(tmp_path), QUICK).by["source"]
    assert [(one.value, one.tasks, one.estimates["mean"].value) for one in found] == [("math", 2, 0.5), ("–", 1, 1.0)]
    dump(tmp_path / "one", task("a", 1.0, data_source="math"))
    assert evaluate(read_run(tmp_path / "one"), QUICK).by == {}


def test_by_step_divides_samples_and_steps_are_in_order(tmp_path: Path) -> None:
    write(tmp_path / "2.jsonl", *task("a", 0.0, step=2))
    write(tmp_path / "10.jsonl", *task("a", 1.0, step=10), *task("b", 1.0, step=10))
    found = evaluate(read_run(tmp_path), QUICK, by={"step": tags_by("step")}).by["step"]
    assert [(one.value, one.estimates["mean"].value) for one in found] == [("2", 0.0), ("10", 1.0)]


def test_tags_of_the_task_file_divide_a_dump(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "prompt": "?", "answer": "1", "level": 3, "tags": ["easy", "sums"]},
        {"id": "b", "prompt": "?", "answer": "1", "level": 5, "extra_info": {"tags": ["sums"], "inner": {"x": "y"}}},
    ]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = read_run(dump(tmp_path / "run", task("a", 1.0), task("b", 0.0), task("c", 1.0)))
    tags = TaskTags(tmp_path / "tasks.jsonl")
    by = {name: tags_by(name, tags) for name in ("level", "tags", "inner.x")}
    found = evaluate(run, QUICK, by=by).by
    assert [(one.value, one.estimates["mean"].value) for one in found["level"]] == [("3", 1.0), ("5", 0.0), ("–", 1.0)]
    assert [(one.value, one.tasks) for one in found["tags"]] == [("sums", 2), ("easy", 1), ("–", 1)]
    assert [(one.value, one.tasks) for one in found["inner.x"]] == [("y", 1), ("–", 2)]
    with pytest.raises(ConfigError, match=r"no task of .* has such a field; available: level, tags"):
        tags_by("levels", tags)
    with pytest.raises(ConfigError, match="--tasks FILE"):
        tags_by("level")


# Comparing ------------------------------------------------------------------------------------------------------------


def test_runs_are_compared_over_the_tasks_that_both_have(tmp_path: Path) -> None:
    before = read_run(dump(tmp_path / "x", task("a", 0.0, 0.0), task("b", 1.0, 1.0), task("gone", 1.0)))
    after = read_run(dump(tmp_path / "y", task("a", 1.0, 0.0), task("b", 1.0, 1.0), task("new", 0.0), task("n2", 0.0)))
    found = compare(before, after, QUICK)
    whole = found.whole.differences["mean"]
    assert (whole.before, whole.after, whole.difference, whole.tasks) == (0.5, 0.75, 0.25, 2)
    assert (whole.better, whole.worse, found.only_before, found.only_after) == (1, 0, 1, 2)
    assert whole.p == 1.0  # one task that differs can be swapped either way
    assert found.ks == (1, 2)


def test_a_difference_in_every_task_is_found_although_tasks_differ_far_more(tmp_path: Path) -> None:
    hard = [task(f"t{number}", number / 40, data_source="math") for number in range(40)]
    easy = [task(f"t{number}", number / 40 + 0.01, data_source="math") for number in range(40)]
    found = compare(read_run(dump(tmp_path / "x", *hard)), read_run(dump(tmp_path / "y", *easy)), QUICK)
    change = found.whole.differences["mean"]
    assert change.interval is not None
    assert change.interval.low > 0
    assert change.p is not None
    assert change.p < 0.001
    assert found.before.whole.estimates["mean"].interval is not None
    assert found.before.whole.estimates["mean"].interval.high > found.after.whole.estimates["mean"].interval.low  # type: ignore


def test_runs_without_a_common_task_have_no_difference(tmp_path: Path) -> None:
    found = compare(
        read_run(dump(tmp_path / "x", task("a", 0.0))), read_run(dump(tmp_path / "y", task("b", 1.0))), QUICK
    )
    assert found.whole.tasks == 0
    assert found.whole.differences["mean"].difference is None
    assert (found.only_before, found.only_after) == (1, 1)


def test_a_task_that_lost_all_its_rewards_is_not_worse(tmp_path: Path) -> None:
    before = read_run(dump(tmp_path / "x", task("a", 1.0), task("b", 1.0)))
    after = read_run(dump(tmp_path / "y", task("a", None), task("b", 1.0)))
    whole = compare(before, after, QUICK).whole.differences["mean"]
    assert (whole.difference, whole.tasks, whole.worse) == (0.0, 1, 0)


def test_tags_are_compared_value_by_value(tmp_path: Path) -> None:
    sides = [
        read_run(dump(tmp_path / name, task("a", 0.0, data_source="math"), task("b", score, data_source="code")))
        for name, score in (("x", 0.0), ("y", 1.0))
    ]
    found = compare(sides[0], sides[1], QUICK).by["source"]
    assert [(one.value, one.differences["mean"].difference) for one in found] == [("code", 1.0), ("math", 0.0)]


# Other trainers -------------------------------------------------------------------------------------------------------


def test_lines_of_verl_are_grouped_by_their_prompt(tmp_path: Path) -> None:
    lines = [verl_line(input=prompt, score=score) for prompt, score in (("p", 1), ("p", 0), ("q", 1), ("q", 1))]
    (tmp_path / "1.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    found = evaluate(read_run(tmp_path), QUICK).whole
    assert (found.tasks, found.estimates["mean"].value, found.estimates["pass@2"].value) == (2, 0.75, 1.0)


def test_completions_of_trl_are_evaluated(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    from toolyard.tasks.parquet_pyarrow import write_parquet

    rows = [
        {"step": 10, "prompt": f"p{number // 2}", "completion": "x", "accuracy": float(number % 2), "advantage": 0.1}
        for number in range(4)
    ]
    write_parquet(tmp_path / "completions_00010.parquet", rows)
    found = evaluate(read_run(tmp_path), QUICK).whole
    assert (found.tasks, found.attempts, found.estimates["mean"].value) == (2, 4, 0.5)
