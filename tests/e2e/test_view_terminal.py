"""`toolyard view` in the terminal, as a user sees it: keys, mouse, the screen."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import time
from pathlib import Path

import pytest
from textual.events import MouseScrollDown
from textual.widgets import Input
from viewing import DAMAGED, VERL_LINE, demo_dump, demo_lines, explained_line, pictured_line, write_lines
from viewing_terminal import viewing

from pictures import png
from toolyard.images import image_of
from toolyard.records.lines import to_line
from toolyard.viewer.library import Library
from toolyard.viewer.tui.app import Viewer
from toolyard.viewer.tui.lists import Titles
from toolyard.viewer.tui.screens import KEYS, Help
from trajectory_samples import decode, good_trajectory

THOUGHT = "First I count them, then I add."


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 trajectories of three steps; nothing changes it."""
    return demo_dump(tmp_path_factory.mktemp("demo"), steps=3)


def thoughtful_line() -> dict:
    line = demo_lines()[0]
    line["request_id"] = "thoughtful"
    line["messages"][-1]["reasoning_content"] = THOUGHT
    return line


# Reading --------------------------------------------------------------------------------------------------------------


async def test_a_trajectory_reads_as_a_conversation_with_its_score_and_times(demo):
    async with viewing(demo) as terminal:
        text = terminal.page.text
        for part in ("0000078ce6f905a093f486ef", "USER", "ASSISTANT  turn 1", "16.6 s", "✓ ok", "waited 824 ms"):
            assert part in text
        assert "score    1 = – × final 1 + – × tool/code_interpreter 0" in text
        assert "engine 18.5 s" in text
        (line,) = [line for line in text.splitlines() if "total = 5 + 4" in line]
        assert line.rstrip(" │").endswith("9")  # the result is shown beside the call
        assert text in terminal.page.text
        assert "#### 9" in terminal.screen


@pytest.mark.slow
@pytest.mark.parametrize("size", [(140, 45), (80, 24)])
async def test_below_the_score_stands_how_it_is_made_and_why(tmp_path, size):
    write_lines(tmp_path / "0.jsonl", [explained_line()])
    async with viewing(tmp_path, size) as terminal:
        text = terminal.page.text
        said = " ".join(text.replace("│", " ").split())
        assert "score 0 = 1 × final 0 + 0 × tool/code_interpreter 0 final: the answer 8 is not 9 truth 9" in said
        assert "final: the answer 8 is not 9" in terminal.screen


@pytest.mark.slow
async def test_a_picture_that_a_tool_returned_is_described(tmp_path):
    picture = image_of(png(20, 30))
    write_lines(tmp_path / "0.jsonl", [pictured_line(picture.url)])
    async with viewing(tmp_path) as terminal:
        assert f"▣ {picture}" in terminal.page.text


@pytest.mark.slow
async def test_in_a_small_terminal_a_result_stands_below_its_call(demo):
    async with viewing(demo, size=(80, 24)) as terminal:
        lines = terminal.page.text.splitlines()
        code = next(at for at, line in enumerate(lines) if "print(total)" in line)
        assert "✓ ok" in lines[code + 1]
        assert "│ 9" in lines[code + 2]


async def test_the_keys_of_the_seeds_move_between_samples_steps_and_lines(demo):
    async with viewing(demo, size=(80, 24)) as terminal:
        await terminal.press("n", "n", "p")
        assert terminal.row.request_id in terminal.page.text
        assert terminal.samples.cursor == 1
        await terminal.press("N", "N")
        assert {terminal.samples.row(at).step for at in range(terminal.samples.count)} == {1}
        assert terminal.row.request_id in terminal.page.text
        await terminal.press("P", "P")
        assert terminal.samples.count == 48
        await terminal.press("j")
        assert terminal.page.scroll_y > 0
        await terminal.press("G")
        assert terminal.page.scroll_y == terminal.page.max_scroll_y > 2
        await terminal.press("k")
        assert 0 < terminal.page.scroll_y < terminal.page.max_scroll_y
        await terminal.press("g")
        assert terminal.page.scroll_y == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("chosen_list", ["steps", "samples"])
async def test_what_is_chosen_while_a_list_is_looked_up_stays_chosen(demo, tmp_path, monkeypatch, chosen_list):
    looking, go_on = threading.Event(), threading.Event()
    look_up = Library.steps

    def slowly(library, query):
        looking.set()
        assert go_on.wait(10)
        return look_up(library, query)

    shutil.copytree(demo, tmp_path, dirs_exist_ok=True)
    async with viewing(tmp_path) as terminal:
        choices = getattr(terminal, chosen_list)
        await terminal.press("N")
        monkeypatch.setattr(Library, "steps", slowly)
        with (tmp_path / "0.jsonl").open("a") as file:
            file.write(json.dumps(thoughtful_line()) + "\n")
        assert await asyncio.to_thread(looking.wait, 10)
        choices.choose(2)
        go_on.set()
        time.sleep(0.1)  # noqa: ASYNC251 - what was looked up is there before anything else happens
        await terminal.settle()
        assert choices.cursor == 2
        assert terminal.samples.count == (16 if chosen_list == "steps" else 17)
        assert terminal.row.request_id in terminal.page.text


async def test_reasoning_is_folded_until_a_key_or_a_click_unfolds_it(tmp_path):
    write_lines(tmp_path / "0.jsonl", [thoughtful_line()])
    async with viewing(tmp_path) as terminal:
        assert "▸ reasoning" in terminal.page.text
        assert THOUGHT not in terminal.page.text
        await terminal.press("x")
        assert THOUGHT in terminal.page.text
        await terminal.press("x")
        line = next(at for at, line in enumerate(terminal.page.text.splitlines()) if "▸ reasoning" in line)
        await terminal.pilot.click(terminal.page, offset=(6, line))
        await terminal.settle()
        assert THOUGHT in terminal.page.text
        assert "▸ prompt: system and 12 more" in terminal.page.text  # only that one


async def test_tokens_are_shown_as_text_where_the_tokenizer_is_theirs(tmp_path):
    made = good_trajectory(3, turns=2)
    write_lines(tmp_path / "0.jsonl", [to_line(made)])
    async with viewing(tmp_path, decode=decode) as terminal:
        await terminal.press("f", *["down"] * 5, "space", "escape")
        await terminal.until(lambda: "sampled, turn 2" in terminal.page.text)
        tokens = terminal.page.text.partition("── tokens")[2]
        assert f"  {made.input}\n" in tokens
        assert f"  {made.turns[0].sampled.text}\n" in tokens
    async with viewing(tmp_path, decode=lambda ids: "another tokenizer") as terminal:
        await terminal.press("f", *["down"] * 5, "space", "escape")
        await terminal.until(lambda: "sampled, turn 2" in terminal.page.text)
        assert f"{ord(made.input[0])} {ord(made.input[1])} " in terminal.page.text


@pytest.mark.slow
async def test_plain_shows_the_texts_as_they_stand(demo):
    async with viewing(demo) as terminal:
        assert "<|im_start|>" not in terminal.page.text
        await terminal.press("r")
        assert "<|im_start|>system\n" in terminal.page.text
        assert "▎" not in terminal.page.text
        await terminal.press("r")
        assert "▎ ASSISTANT" in terminal.page.text


@pytest.mark.slow
async def test_fields_are_chosen_one_by_one_and_stay_chosen(demo):
    async with viewing(demo) as terminal:
        await terminal.press("f")
        await terminal.press("space", *["down"] * 4, "space", "down", "space", "escape")
        await terminal.until(lambda: "metrics" in terminal.page.text)
        assert "score" not in terminal.page.text.split("metrics")[0]
        assert '"sampled_tokens": 22' in terminal.page.text
        assert "sampled, turn 1 · 18 tokens from 379" in terminal.page.text
        await terminal.press("n")
        assert "metrics" in terminal.page.text


# Finding --------------------------------------------------------------------------------------------------------------


async def test_a_filter_is_checked_while_it_is_typed_and_lists_what_it_asks_for(demo):
    async with viewing(demo) as terminal:
        await terminal.type("/", "scor<1")
        assert "did you mean score?" in terminal.screen
        await terminal.press("enter")
        assert terminal.samples.count == 48  # and can be corrected
        await terminal.press("escape")
        await terminal.enter("/", "score<1 sort:-time step:0")
        assert [terminal.samples.row(at).score for at in range(3)] == [0.0, 0.0, 0.0]
        assert terminal.samples.row(0).seconds > 50
        assert terminal.row.request_id in terminal.page.text
        await terminal.press("N")
        await terminal.enter("/", "score>7")  # in no step: then all are listed
        assert "No matches" in terminal.page.text
        await terminal.enter("/", "")
        assert terminal.samples.count == 48


@pytest.mark.slow
async def test_letters_that_are_keys_elsewhere_can_be_typed(demo):
    async with viewing(demo) as terminal:
        await terminal.press("s", *"is/nNq", "escape")
        assert terminal.app.query_one(Input).value == "is/nNq"
        assert terminal.samples.cursor == 0
        assert "search" not in terminal.screen.splitlines()[0]


@pytest.mark.slow
async def test_keys_that_come_at_once_take_effect_in_their_order(demo):
    async with viewing(demo) as terminal:
        await terminal.press("/")
        await terminal.press_at_once(*"scor<1", *["backspace"] * 6, *"cor=1", "home", "s", "end", "left", "left", "e")
        field = terminal.app.screen.query_one(Input)
        assert field.value == "score=1"
        await terminal.press_at_once("backspace", "e", "enter")
        assert not field.has_focus
        assert "filter score:1" in terminal.screen


@pytest.mark.slow
async def test_samples_are_sorted_by_a_menu_and_by_a_click_on_a_title(demo):
    async with viewing(demo) as terminal:
        samples = terminal.samples
        await terminal.press("o")
        await terminal.press(*["down"] * 4, "enter")
        await terminal.until(lambda: samples.row(0).response_tokens == 305)
        await terminal.pilot.click(Titles, offset=(3, 0))
        await terminal.until(lambda: samples.row(0).score == 0.0)
        await terminal.pilot.click(Titles, offset=(3, 0))
        await terminal.until(lambda: samples.row(0).score == 1.0)
        assert "score▾" in terminal.screen


@pytest.mark.exhaustive
async def test_a_search_marks_its_matches_and_goes_on_to_other_trajectories(demo):
    async with viewing(demo, query="step:0") as terminal:
        await terminal.press("n")
        await terminal.enter("s", "TOTAL_MARBLES")
        assert terminal.samples.cursor == 11  # the next one that contains it
        count = terminal.page.matches
        assert count == 3
        assert "search 'TOTAL_MARBLES' 1/3" in terminal.screen
        await terminal.press("]", "]")
        assert (terminal.page.match, terminal.samples.cursor) == (2, 11)
        await terminal.enter("s", "red marbles")
        place = terminal.page.match, terminal.samples.cursor
        await terminal.press("]")
        assert (terminal.page.match, terminal.samples.cursor) == (0, 0)  # around
        await terminal.press("[")
        assert (terminal.page.match, terminal.samples.cursor) == place
        await terminal.press("escape")
        assert terminal.page.matches == 0


@pytest.mark.slow
async def test_a_match_far_below_is_scrolled_to(tmp_path):
    text = "\n".join(f"line {at}" for at in range(500))
    write_lines(tmp_path / "0.jsonl", [{**VERL_LINE, "output": text}])
    async with viewing(tmp_path, size=(80, 24)) as terminal:
        await terminal.enter("s", "line 49")
        assert "line 49" in terminal.screen
        assert terminal.page.matches == 11
        await terminal.press("]")
        assert "line 490" in terminal.screen
        await terminal.press("[", "[")  # the only trajectory: around
        assert (terminal.page.match, "line 499" in terminal.screen) == (10, True)


@pytest.mark.slow
async def test_what_nobody_said_is_told(demo):
    async with viewing(demo) as terminal:
        await terminal.type("s", "nobody said this")
        terminal.post("enter")
        await terminal.until(lambda: "no listed trajectory contains" in terminal.screen)


@pytest.mark.slow
async def test_a_match_in_what_is_folded_unfolds_it(demo):
    async with viewing(demo) as terminal:
        assert "Ann had 12 shells" not in terminal.page.text
        await terminal.enter("s", "ann had 12 shells")
        assert terminal.page.matches == 1
        assert "Ann had 12 shells" in terminal.screen


@pytest.mark.slow
async def test_a_request_is_found_by_the_beginning_of_its_id(demo):
    async with viewing(demo, query="score=1") as terminal:
        await terminal.enter("i", "0001d386c409")
        assert terminal.page.text.startswith("0001d386c409b86f5a014349")
        assert terminal.row.request_id == "0001d386c409b86f5a014349"
        assert terminal.samples.count == 48  # the filter would hide it
        await terminal.enter("i", "no such")
        await terminal.until(lambda: "no request id starts with 'no such'" in terminal.screen)


# Understanding --------------------------------------------------------------------------------------------------------


async def test_the_timeline_names_what_the_step_waited_for(demo):
    async with viewing(demo) as terminal:
        await terminal.press("t")
        text = terminal.page.text
        assert "limiter 1" in text
        assert "The step waited 58.7 s for request 0000d386c409b86f5a014349" in text
        assert "Critical path: 0000d386c409b86f5a014349" in text
        assert "█████" in text
        await terminal.press("n")  # the next one's, not back to the conversation
        assert terminal.row.request_id in terminal.page.text
        assert "this request" in terminal.page.text
        await terminal.press("escape")
        assert "▎ ASSISTANT" in terminal.page.text


@pytest.mark.slow
async def test_two_samples_of_a_task_are_compared_from_where_they_part(demo):
    async with viewing(demo) as terminal:
        await terminal.press("d")
        await terminal.until(lambda: "First difference: token 383" in terminal.page.text)
        lines = terminal.page.text.splitlines()
        parted = next(at for at, line in enumerate(lines) if "▼ first difference" in line)
        assert "total = 5 + 4" in lines[parted + 1]
        assert "Mia.get_marbles()" in lines[parted + 1]
        assert "failed" in terminal.page.text
        await terminal.press("escape")
        assert "▎ ASSISTANT" in terminal.page.text


@pytest.mark.exhaustive
async def test_the_id_the_program_and_the_conversation_can_be_copied(demo):
    async with viewing(demo) as terminal:
        copied = {}
        for at, name in ((0, "id"), (2, "conversation"), (3, "program")):
            await terminal.press("y")
            await terminal.press(*["down"] * at, "enter")
            copied[name] = terminal.app.clipboard
        assert copied["id"] == "0000078ce6f905a093f486ef"
        assert copied["program"] == "total = 5 + 4\nprint(total)"
        assert "[user]\nMia has 5 red marbles" in copied["conversation"]


async def test_help_names_every_key():
    documented = {key for _, keys in KEYS for names, _ in keys for key in names.split()}
    said = {
        "question_mark": "?",
        "slash": "/",
        "right_square_bracket": "]",
        "left_square_bracket": "[",
        "right_curly_bracket": "}",
        "left_curly_bracket": "{",
        "escape": "esc",
    }
    bound = {said.get(binding.key, binding.key) for binding in Viewer.BINDINGS}
    assert bound - {"?"} <= documented


@pytest.mark.slow
async def test_help_opens_over_everything_and_closes(demo):
    async with viewing(demo, size=(80, 24)) as terminal:
        await terminal.press("?")
        assert isinstance(terminal.app.screen, Help)
        assert "next, previous sample" in terminal.screen
        await terminal.press("escape")
        assert not isinstance(terminal.app.screen, Help)


# Other dumps ----------------------------------------------------------------------------------------------------------


async def test_lines_of_others_and_damaged_ones_are_shown_as_what_they_are(tmp_path):
    write_lines(tmp_path / "7.jsonl", [VERL_LINE, DAMAGED, demo_lines()[0]])
    async with viewing(tmp_path) as terminal:
        assert "▎ USER\n▎ What is 2 + 2?" in terminal.page.text
        assert "▎ It is 4." in terminal.page.text
        await terminal.press("n")
        assert "Line 2 of this file cannot be read" in terminal.page.text
        assert '{"input": "half a li' in terminal.page.text
        assert "damaged 7.jsonl:2" in terminal.screen
        await terminal.press("t", "r", "r", "d", "y")
        await terminal.press("escape", "x", "a")
        await terminal.press("n")
        assert "✓ ok" in terminal.page.text


async def test_a_dump_is_followed_and_nothing_that_is_read_moves(tmp_path):
    (tmp_path / "5.jsonl").touch()
    async with viewing(tmp_path, size=(80, 24)) as terminal:
        assert "No trajectories yet" in terminal.screen
        lines = demo_lines()
        write_lines(tmp_path / "5.jsonl", lines[:2])
        await terminal.until(lambda: terminal.samples.count == 2 and "ASSISTANT" in terminal.page.text)
        await terminal.press("n", "j", "j")
        read, place = terminal.row.request_id, terminal.page.scroll_y
        before = terminal.page.text
        await terminal.press("o")  # also under a menu
        write_lines(tmp_path / "1.jsonl", lines[2:8])
        await terminal.until(lambda: terminal.samples.count == 8)
        await terminal.press("escape")
        assert (terminal.row.request_id, terminal.samples.cursor) == (read, 7)
        assert (terminal.page.text, terminal.page.scroll_y) == (before, place)
        assert "8 trajectories" in terminal.screen


@pytest.mark.slow
async def test_a_dump_that_is_replaced_or_deleted_is_no_end(tmp_path):
    folder = tmp_path / "dump"
    folder.mkdir()
    write_lines(folder / "0.jsonl", demo_lines()[:4])
    async with viewing(folder) as terminal:
        await terminal.press("n")
        write_lines(folder / "new", demo_lines()[4:10])
        (folder / "new").rename(folder / "0.jsonl")
        await terminal.until(lambda: terminal.samples.count == 6)
        assert terminal.row.request_id in terminal.page.text
        shutil.rmtree(folder)
        await terminal.until(lambda: "not updating" in terminal.screen or terminal.samples.count == 0)
        await terminal.press("n", "p", "t", "t", "N")


@pytest.mark.slow
async def test_a_long_list_is_read_in_parts(tmp_path, monkeypatch):
    write_lines(
        tmp_path / "0.jsonl", [{**VERL_LINE, "step": at // 100, "request_id": f"r{at:04}"} for at in range(5000)]
    )
    asked: list[int] = []
    rows = Library.rows

    def counting(self, *arguments, offset=0, limit=100):
        asked.append(limit)
        return rows(self, *arguments, offset=offset, limit=limit)

    monkeypatch.setattr(Library, "rows", counting)
    async with viewing(tmp_path, size=(100, 30)) as terminal:
        assert "5,000 trajectories" in terminal.screen
        await terminal.press("end")
        assert terminal.page.text.startswith("r4999")
        await terminal.press("pageup", "home")
        assert terminal.page.text.startswith("r0000")
        assert sum(asked) <= 1000
        await terminal.press("shift+tab", "end")
        assert terminal.samples.row(0).step == 49


async def test_the_mouse_chooses_and_scrolls(demo):
    async with viewing(demo, size=(100, 20)) as terminal:
        await terminal.pilot.click(terminal.samples, offset=(10, 3))
        await terminal.settle()
        assert terminal.samples.cursor == 3
        assert terminal.row.request_id in terminal.page.text
        await terminal.pilot.click(terminal.steps, offset=(4, 2))
        await terminal.settle()
        assert terminal.row.step == 1
        await terminal.pilot._post_mouse_events([MouseScrollDown], terminal.page, offset=(5, 5))
        await terminal.until(lambda: terminal.page.scroll_y > 0)


@pytest.mark.slow
async def test_every_size_and_both_themes_fit(demo):
    async with viewing(demo) as terminal:
        for size, key in (((80, 24), "T"), ((200, 60), "t"), ((30, 8), "T"), ((120, 30), "d"), ((60, 10), "escape")):
            await terminal.pilot.resize_terminal(*size)
            await terminal.press(key)
            lines = terminal.app.screen._compositor.render_strips()
            assert [strip.cell_length for strip in lines] == [size[0]] * size[1]
