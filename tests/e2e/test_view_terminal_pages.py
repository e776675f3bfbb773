"""The pages of `toolyard view` in the terminal: groups, calls, changes, waterfall. Two keys answer a question."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from test_view_terminal_hostile import ATTACKS, assert_harmless, attacked_everywhere
from textual.widgets import Input
from viewing import DAMAGED, VERL_LINE, demo_lines, write_lines
from viewing_terminal import Terminal, viewing

from patience import patient
from toolyard.records.lines import to_line
from toolyard.viewer.tui.completion import completions
from toolyard.viewer.tui.tables.table import TableView
from toolyard.viewer.tui.text import one_line, visible
from trajectory_samples import good_trajectory

SIZES = ((140, 45), (80, 24))
BEGAN = 1_700_000_000.0
FAILURE = {"whose": "ours", "stage": "GENERATING", "error": "the engine died: connection refused"}
RED = "\x1b[1;31mValueError:\x1b[0m too red\x1b[K"


def lines_of(step: int) -> list[dict]:
    """16 requests of 8 tasks, three seconds after each other. In step 1 one fails, in step 2 some scores differ."""
    found = []
    for at, line in enumerate(demo_lines()):
        line |= {"step": step, "request_id": f"{step}-{at:02}-{line['request_id']}"}
        line["started_at"] = BEGAN + 100 * step + 3 * at
        found.append(line)
    if step == 0:
        found[11]["finish_reason"] = "length"  # its call fails as well
    if step == 1:
        found[3] |= {"state": "FAILED", "finish_reason": "engine_failure", "score": None, "failure": FAILURE}
    if step == 2:
        for at, score in ((8, 0.0), (13, 1.0), (1, 0.0), (0, 1.0), (11, 1.0)):
            found[at]["score"] = score
    return found


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 trajectories of three steps; nothing changes it."""
    folder = tmp_path_factory.mktemp("pages")
    for step in range(3):
        write_lines(folder / f"{step}.jsonl", lines_of(step))
    return folder


def table(terminal: Terminal) -> TableView:
    return terminal.app._table


def keys(terminal: Terminal) -> str:
    """The last line, which is drawn a little later than the rest."""
    return terminal.screen.splitlines()[-1].rstrip()


def rows(terminal: Terminal) -> list[str]:
    """The table's rows as text."""
    count = table(terminal).rows.table.count
    return table(terminal).text.splitlines()[-count:] if count else []


# Questions ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES, ids=["140x45", "80x24"])
async def test_each_question_is_answered_by_two_keys_at_most(dump, size):
    async with viewing(dump, size=size) as terminal:
        for question, key, *answers in (
            ("why this score", "", "score    1", "truth    9"),
            ("which failed and why", "e", "✗ failed: engine_failure", "infrastructure failure", "connection"),
            ("all of them again", "e", "48 trajectories"),
            ("which tasks are all 0, all 1, mixed", "2", "24 groups:", "all 0 ·", "mixed", "word-problem-01"),
            ("which calls fail or are slow", "3", "6 failed (11%)", "slowest 858 ms", "NameError", "p95"),
            ("what changed between the steps", "4", "Step 0 → step 2:", "solved", "✓ solved", "× broken"),
            ("what did the step wait for", "5", "The step waited 103.7 s for request 0-15-", "100% of"),
        ):
            if key:
                await terminal.press(key)
            assert all(answer in terminal.screen for answer in answers), f"{question}:\n{terminal.screen}"
            strips = terminal.app.screen._compositor.render_strips()
            assert [strip.cell_length for strip in strips] == [size[0]] * size[1]
            await terminal.until(lambda: keys(terminal).endswith(("q quit", "5 waterfall", "y copy")))  # none is cut
        await terminal.press("1")
        assert "ASSISTANT  turn 1" in terminal.page.text
        assert max(map(len, terminal.page.text.splitlines())) > 40  # as wide as before


async def test_truncated_and_failed_calls_are_both_marked_in_the_list(dump):
    async with viewing(dump, query="step:0 finish:length failed_calls>0") as terminal:
        assert " !× Mia has 5 red" in terminal.screen
        await terminal.enter("/", "step:1 finish:stop failed_calls>0")
        assert "s  × Mia has 5 red" in terminal.screen


# Groups ---------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_groups_are_filtered_by_kind_sorted_and_opened(dump):
    async with viewing(dump) as terminal:
        await terminal.press("N", "2")  # step 0
        assert "8 groups: 3 all 0 · 5 mixed" in terminal.screen
        await terminal.press("f", "down", "enter")
        assert [row.split()[:2] for row in rows(terminal)] == [["all", "0"]] * 3
        await terminal.press("f", "home", "enter", "o", "down", "down", "enter")
        means = [row.split()[1] for row in rows(terminal) if row.startswith("mixed")]
        assert means == ["0.5"] * 5
        assert rows(terminal)[0].startswith("mixed")  # the highest mean first
        chosen = rows(terminal)[0].split()[-1]
        await terminal.press("enter")
        assert terminal.samples.count == 2
        assert {terminal.samples.row(at).task for at in range(2)} == {chosen}
        assert "group:" in terminal.screen.splitlines()[0]
        await terminal.press("escape")  # to the same row, with the same filter
        assert rows(terminal)[table(terminal).rows.cursor].split()[-1] == chosen
        assert terminal.samples.count == 16


@pytest.mark.exhaustive
async def test_a_group_of_one_run_is_not_mixed_up_with_that_of_another(tmp_path):
    for run in ("", "a", "b"):
        (tmp_path / run).mkdir(exist_ok=True)
        write_lines(tmp_path / run / "0.jsonl", lines_of(0)[:1] * 3)
    async with viewing(tmp_path) as terminal:
        await terminal.press("2")
        assert "3 groups" in terminal.screen
        files = set()
        for at in range(3):
            await terminal.press("g", *["j"] * at, "enter")
            assert terminal.samples.count == 3
            files.add(terminal.samples.row(0).file)
            await terminal.press("escape")
        assert files == {"0.jsonl", "a/0.jsonl", "b/0.jsonl"}


async def test_many_scores_are_counted_and_never_cut(tmp_path):
    def lines(task, scores):
        return [{**lines_of(0)[0], "batch_data_id": task, "score": score} for score in scores]

    different = [at / 64 for at in range(64)]
    write_lines(tmp_path / "0.jsonl", lines("binary", [0.0, 1.0] * 32) + lines("any", different) + lines("one", [0.25]))
    async with viewing(tmp_path, size=(80, 24)) as terminal:
        await terminal.press("2")
        assert "32×0  32×1" in terminal.screen
        assert "0 … 0.984" in terminal.screen
        assert "all equal" in terminal.screen
        assert "–" in next(row for row in rows(terminal) if row.startswith("all equal"))  # the std of one score


# Calls ----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_tools_errors_and_slow_calls_open_what_they_stand_for(dump):
    async with viewing(dump, size=(80, 24)) as terminal:
        await terminal.press("3")
        await terminal.press("enter")
        assert "filter tool=code_interpreter" in terminal.screen
        await terminal.press("escape")
        await terminal.press("j", "j", "j", "enter")  # the first error
        assert terminal.samples.count == 3
        assert "NameError: name 'Mia' is not defined" in terminal.screen  # scrolled to it
        await terminal.press("escape")
        await terminal.press("j", "j", "j", "j", "enter")  # the slowest call
        assert terminal.samples.count == 48
        assert terminal.page.text.startswith("0-00-")
        assert "ASSISTANT  turn 1" in terminal.screen


@pytest.mark.slow
async def test_filters_and_steps_hold_on_every_page(dump):
    async with viewing(dump) as terminal:
        await terminal.press("N", "3")
        assert "18 calls of 1 tool · 2 failed" in terminal.screen
        await terminal.enter("/", "verdict:failed")
        assert "2 calls of 1 tool · 2 failed (100%)" in terminal.screen
        await terminal.press("2")
        assert "2 groups" in terminal.screen
        await terminal.press("5")
        assert "2 requests, from" in terminal.screen
        await terminal.enter("/", "score>7")
        for key in "5342":
            await terminal.press(key)
            assert "No matches" in terminal.screen


@pytest.mark.slow
async def test_a_long_episode_is_read_turn_by_turn(tmp_path):
    write_lines(tmp_path / "0.jsonl", [to_line(good_trajectory(3, turns=30))])
    async with viewing(tmp_path, size=(80, 24)) as terminal:

        def at_the_top() -> str:
            return terminal.screen.splitlines()[1][34:].split("turn ")[-1].split()[0]

        await terminal.press("}", "}", "}", "{")
        assert at_the_top() == "2"
        await terminal.press("u")
        assert "turn 1 · " in terminal.screen, terminal.screen
        await terminal.press(*["down"] * 9, "enter")
        await terminal.until(lambda: at_the_top() == "10")


# Changes --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_the_steps_to_compare_are_chosen_by_keys_and_a_task_is_opened_in_both(dump):
    async with viewing(dump) as terminal:
        await terminal.press("4")
        kinds = {row.split()[-1]: row.split()[1] for row in rows(terminal) if row[0] != " "}
        assert "solved" in kinds.values()
        assert "broken" in kinds.values()
        await terminal.press("P")
        assert "Step 0 → step 1: 0 solved · 0 broken" in terminal.screen
        await terminal.press("N", "N", ">")
        assert "Step 1 → step 2:" in terminal.screen
        await terminal.press("<", "<")
        await terminal.press("f", "down", "enter")
        await terminal.press("enter")
        assert {terminal.samples.row(at).step for at in range(terminal.samples.count)} == {0, 2}
        assert len({terminal.samples.row(at).task for at in range(terminal.samples.count)}) == 1


@pytest.mark.slow
async def test_an_old_dump_of_one_step_has_neither_changes_nor_start_times(tmp_path):
    write_lines(tmp_path / "0.jsonl", demo_lines())
    async with viewing(tmp_path) as terminal:
        await terminal.press("5")
        assert "This dump has no start times; bars start at 0." in terminal.screen
        assert {row.index("█") for row in rows(terminal)} == {15}
        await terminal.press("4")
        assert "Only step 0 has trajectories; changes need two." in terminal.screen
        await terminal.press("P", "<", "enter", "o", "f", "G", "escape")
        assert "ASSISTANT" in terminal.page.text


# Waterfall ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_bars_start_when_the_requests_did(dump):
    async with viewing(dump) as terminal:
        await terminal.press("5")
        starts = [row.index("█") for row in rows(terminal)]
        assert starts == sorted(starts)
        assert starts[-1] > starts[0] + 30
        assert "◀" in rows(terminal)[-1]
        assert "from 2023-11-14 22:13:20 UTC" in terminal.screen
        await terminal.press("G", "enter")
        assert terminal.page.text.startswith("0-15-")
        await terminal.press("5", "N")
        assert "Step 1. The step waited" in terminal.screen
        await terminal.press("P")
        assert "Step 0. The step waited" in terminal.screen


# Other dumps ----------------------------------------------------------------------------------------------------------


async def test_what_a_dump_of_verl_does_not_say_is_a_dash(tmp_path):
    write_lines(tmp_path / "7.jsonl", [VERL_LINE, {**VERL_LINE, "score": None}])
    async with viewing(tmp_path, size=(150, 40)) as terminal:
        line = next(line for line in terminal.screen.splitlines() if "What is 2 + 2?" in line)
        assert line.split()[:6] == ["▌", "1", "1", "0", "–", "–"]  # neither tokens nor time
        await terminal.press("2")
        assert "1 group: 1 all 1" in terminal.screen
        assert "What is 2 + 2?" in terminal.screen  # a task without a name
        await terminal.press("3")
        assert "No tool calls." in terminal.screen
        await terminal.press("5")
        assert "No timings in this dump" in terminal.screen


@pytest.mark.slow
async def test_pages_of_an_empty_dump_fill_and_stay_where_they_are(tmp_path):
    (tmp_path / "0.jsonl").touch()
    async with viewing(tmp_path, size=(80, 24)) as terminal:
        for key in "5432":
            await terminal.press(key)
            assert "No trajectories yet" in terminal.screen
        lines = lines_of(0)
        write_lines(tmp_path / "0.jsonl", lines[:8])
        await terminal.until(lambda: table(terminal).rows.count == 6)
        await terminal.press("j", "j")
        chosen = rows(terminal)[2]
        write_lines(tmp_path / "0.jsonl", lines[8:])
        await terminal.until(lambda: table(terminal).rows.count == 8)
        assert rows(terminal)[table(terminal).rows.cursor].split()[-1] == chosen.split()[-1]
        (tmp_path / "0.jsonl").unlink()
        await terminal.until(lambda: "No trajectories yet" in terminal.screen)


async def test_nothing_hostile_reaches_a_page(tmp_path):
    said = "".join(ATTACKS.values()).replace("\ud800", "").replace("\udfff", "")
    line = attacked_everywhere(said)
    line["turns"][0]["tool_calls"][0] |= {"outcome": f"failed{said}", "error": f"Traceback\n{said} boom"}
    line["turns"][0]["timings"] = {"started": 0.0, "generating": 1e300, "tool_calling": 2.0}
    line["started_at"] = 1e300
    verl = {**VERL_LINE, "input": f"user\n{said}\nassistant\n"}
    write_lines(tmp_path / "0.jsonl", [line, {**line, "step": 1, "score": 1e308}, verl, DAMAGED])
    async with viewing(tmp_path, size=(90, 30)) as terminal:
        for key in "2345":
            await terminal.press(key)
            assert_harmless(terminal)
            await terminal.press("j", "j", "j")
            assert_harmless(terminal)
        await terminal.press("g", "enter")
        assert_harmless(terminal)


async def test_styles_of_programs_are_not_shown(tmp_path):
    line = lines_of(0)[11]
    line["turns"][0]["tool_calls"][0] |= {"response": f"10%\r20%\r\n{RED}\n", "error": RED}
    line["messages"] = [{**one, "content": RED} if one["role"] == "tool" else one for one in line["messages"]]
    write_lines(tmp_path / "0.jsonl", [line])
    async with viewing(tmp_path) as terminal:
        assert "ValueError: too red" in terminal.page.text
        assert not {"␛", "␍"} & set(terminal.page.text)
        assert "[1;31m" not in terminal.page.text
        await terminal.press("3")
        assert "ValueError: too red" in terminal.screen
        assert "\ufffd" not in terminal.screen


def test_only_what_carries_no_text_is_removed():
    assert visible("\x1b[31mred\x1b[0m \x1b(Bplain \x9b2Kx") == "red plain x"
    assert visible("\x1b]0;a title\x07 \x1bPsecret\x1b\\ \x1b") == "␛]0;a title␇ ␛Psecret␛\\ ␛"
    assert visible("\x1b\x1b[31m[2J") == "␛[2J"  # what remains is no sequence
    assert visible("a\r\nb\rc") == "a\nb\nc"
    assert one_line("\x1b[31m" * 20 + "x" * 50, 60) == "x" * 50


# Completion -----------------------------------------------------------------------------------------------------------


def test_a_filter_is_completed_word_by_word():
    def values_of(field, part):
        return [(value, 1) for value in ("stop", "length", 'two "words"') if part.casefold() in value]

    def offered(text):
        return completions(text, values_of, lambda: ["final", "tool/x", "with space"]).texts

    assert offered("sco") == ["score"]
    assert offered("score<1 fin") == ["score<1 finish:"]
    assert offered("-finish:st") == ["-finish:stop"]
    assert offered('finish="two') == ['finish="two \\"words\\""']
    assert offered("reward.") == ["reward.final", "reward.tool/x"]
    assert offered("damaged:y") == ["damaged:yes"]
    assert offered("sort:-ti") == ["sort:-time"]
    assert offered("score:n") == ["score:none"]
    assert offered("score<") == offered('text:"a b') == offered("") == offered("x:") == offered('"open quo') == []


@pytest.mark.slow
async def test_tab_completes_fields_and_values_of_the_dump(dump):
    async with viewing(dump, size=(80, 24)) as terminal:
        await terminal.press("/", *"fin")
        await terminal.until(lambda: "tab: finish:" in terminal.screen)
        await terminal.press_at_once("tab", "tab", *"en", "tab")  # in this order
        field = terminal.app.screen.query_one(Input)
        assert field.value == "finish:engine_failure"
        await terminal.press("enter")
        assert terminal.samples.count == 1
        await terminal.type("/", "finish:")
        await terminal.press("tab")
        first = field.value
        await terminal.press("tab")
        assert field.value != first  # the next one
        await terminal.press("escape")


# Colours --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_everything_can_be_read_without_colours(dump, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    async with viewing(dump, size=(100, 30)) as terminal:
        for key in ("", "T", "5", "4", "2"):
            if key:
                await terminal.press(key)
            for strip in terminal.app.screen._compositor.render_strips():
                for segment in strip:
                    for color in (segment.style.color, segment.style.bgcolor) if segment.style else ():
                        assert color is None or color.triplet is None or len(set(color.triplet)) == 1
        await terminal.press("5")
        signs = {char for line in terminal.screen.splitlines() for char in line} & set("█▓▒░▞")
        assert len(signs) == 5  # stages by sign


# Size -----------------------------------------------------------------------------------------------------------------


def long_line(at: int) -> bytes:
    return (
        json.dumps(
            {
                **VERL_LINE,
                "input": f"user\nQuestion {at // 8}\nassistant\n",
                "score": float(at % 8 > at // 8 % 9),
                "step": at // 1024,
            }
        ).encode()
        + b"\n"
    )


@pytest.mark.slow
async def test_only_visible_rows_of_a_large_page_are_drawn(tmp_path, monkeypatch):
    write_lines(tmp_path / "0.jsonl", [b"".join(map(long_line, range(4096)))])
    async with viewing(tmp_path, size=(80, 24)) as terminal:
        drawn = []
        line = table(terminal).rows.draw
        monkeypatch.setattr(table(terminal).rows, "draw", lambda *asked: drawn.append(asked[0]) or line(*asked))
        await terminal.press("2")
        assert "512 groups" in terminal.screen
        await terminal.press("G")
        assert table(terminal).rows.cursor == 511
        assert len(set(drawn)) < 100


@pytest.mark.exhaustive
async def test_pages_of_100_000_trajectories_open_at_once(tmp_path):
    write_lines(tmp_path / "0.jsonl", [b"".join(map(long_line, range(100_000)))])
    async with viewing(tmp_path, size=(80, 24)) as terminal:
        for key, seen in (
            ("2", "12,500 groups"),
            ("3", "No tool calls"),
            ("4", "Step 0 → step 97"),
            ("5", "No timings"),
        ):
            began = time.perf_counter()
            await terminal.press(key)
            await terminal.until(lambda seen=seen: seen in terminal.screen)
            assert time.perf_counter() - began < patient(10), key  # about a second when the machine is idle
