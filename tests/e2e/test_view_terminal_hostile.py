"""What models and broken programs write must neither reach a terminal nor stop the viewer. Every text is an attack."""

from __future__ import annotations

import json
import time
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from viewing import VERL_LINE, demo_lines, hostile_line, write_lines
from viewing_terminal import Terminal, viewing

from expensive import examples
from patience import patient
from toolyard.viewer.tui.conversation import Folds
from toolyard.viewer.tui.drawing import Pen, length
from toolyard.viewer.tui.palette import DARK, palette
from toolyard.viewer.tui.text import cut, fitted, one_line, spans, visible
from toolyard.viewer.tui.trajectory import Part

ATTACKS = {
    "sets the title": "\x1b]0;owned\x07",
    "clears the screen": "\x1b[2J\x1b[1;1H",
    "resets the terminal": "\x1bc",
    "eight-bit control sequence": "\x9b31m",
    "device control string": "\x1bP+q544e\x1b\\",
    "copies something": "\x1b]52;c;b3duZWQ=\x07",
    "rings, goes back, goes to the left": "\a\b\r\v\f",
    "NUL and DEL": "\x00\x7f",
    "turns the direction": "\u202egpj.exe\u202c \u2066x\u2069 \u200f",
    "invisible characters": "a\u200bb\u00adc\u2060d\ufeff\U000e0041",
    "joined emoji": "👨\u200d👩\u200d👧 ❤\ufe0f 👍🏽 🇩🇪",
    "a tower of marks": "Z" + "\u0301" * 500,
    "half a surrogate pair": "\ud800 and \udfff",
    "separators of lines": "a\u2028b\u2029c\x85d",
    "markup": "[bold red]loud[/] [/] [link=file:///]x[/link] [@click=app.quit]y[/] \\[b]",
    "wide and narrow": "日本語 ﾊﾝｶｸ \u3000 ｆｕｌｌ",
    "private and unassigned": "\ue000 \U000f0000 \u0378",
}


def is_harmless(char: str) -> bool:
    return char.isprintable() and unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


def assert_harmless(terminal: Terminal) -> None:
    found = {char for char in terminal.screen if char != "\n" and not is_harmless(char)}
    assert not found, f"{found!r} reached the screen"
    width = terminal.app.size.width
    assert {strip.cell_length for strip in terminal.app.screen._compositor.render_strips()} == {width}


# Texts ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_what_is_visible_is_harmless(attack):
    shown = visible(attack)
    assert all(is_harmless(char) for char in shown if char != "\n")
    assert visible(shown) == shown


def test_what_was_replaced_can_be_told():
    assert visible("\x1b]0; \u202e \x9b \x7f") == "␛]0; ⟨U+202E⟩ ⟨U+009B⟩ ␡"
    assert visible("a\n\tb [/] ❤\ufe0f") == "a\n\tb [/] ❤"
    assert len(visible("Z" + "\u0301" * 500)) == 4


@settings(max_examples=examples(200), deadline=None)
@given(st.text(max_size=80), st.integers(2, 40))
def test_any_text_is_wrapped_without_losing_a_character_or_passing_the_edge(text, width):
    line = visible(text).replace("\n", " ").expandtabs(4)
    for words in (False, True):
        pieces = spans(line, width, words=words)
        shown = "".join(line[start:end] for start, end in pieces)
        assert shown.replace(" ", "") == line.replace(" ", "")
        assert all(cell_len(line[start:end]) <= width for start, end in pieces)
    assert cell_len(fitted(one_line(text), width)) == width
    pen = Pen(palette(DARK), needles=["a", "0"])
    drawn = [*pen.text(text, width), *pen.code(text, "python", width)]
    assert all(length(row) <= width for row in drawn)


def test_a_long_text_is_cut_around_what_is_searched_for():
    text = "x" * 1000 + "needle" + "y" * 1000
    pen = Pen(palette(DARK), needles=["NEEDLE"])
    assert cut(text, 100).text == "x" * 100
    found = cut(text, 100, pen.wanted)
    assert "needle" in found.text
    assert found.before + len(found.text) + found.after == len(text)


# The viewer -----------------------------------------------------------------------------------------------------------


def attacked_everywhere(said: str) -> dict:
    """A line in which every text is an attack."""

    def attacked(value):
        if isinstance(value, str):
            return said + value
        if isinstance(value, list):
            return [attacked(inner) for inner in value]
        if isinstance(value, dict):
            return {key: attacked(inner) for key, inner in value.items()}
        return value

    line = demo_lines()[11]
    roles = [message["role"] for message in line["messages"]]
    line = attacked(line)
    for message, role in zip(line["messages"], roles, strict=True):
        message["role"] = role
    line["messages"][-1]["reasoning_content"] = said
    line["turns"][0]["tool_calls"][0]["arguments"] = json.dumps({"code": said, said: said, "language": said})
    line["metrics"][said] = line["rewards"][said] = 0.5
    line[said] = said
    line["failure"] = {"whose": said, "stage": said, "error": said}
    return line


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dump") / "\x1b[31mrun\x1b[0m [bold]x[b]"
    folder.mkdir()
    said = "".join(ATTACKS.values()).replace("\ud800", "").replace("\udfff", "")
    other = {**attacked_everywhere(said), "rollout_offset": 7, "request_id": f"b{said}"}
    other["tokens"]["response_ids"][5] += 1
    other["turns"][0]["sampled"]["text"] += said
    verl = {**VERL_LINE, "input": f"user\n{said}\nassistant\n", "output": f"<tool_call>{said}</tool_call>{said}"}
    half = json.dumps({**VERL_LINE, "output": "half \ud800 pair"}).encode() + b"\n"
    damaged = b'{"input": "' + said.encode() + b" \xff\xfe\n"
    write_lines(folder / "0.jsonl", [hostile_line(), attacked_everywhere(said), other, verl, half, damaged])
    return folder.parent


async def test_nothing_hostile_reaches_the_screen_in_any_view(hostile):
    async with viewing(hostile, size=(110, 60)) as terminal:
        terminal.app._looks = type(terminal.app._looks)(parts=frozenset(Part), folds=Folds(all_open=True))
        assert terminal.samples.count == 6
        for _ in range(6):
            for keys in (("t",), ("escape", "r"), ("r", "G")):
                await terminal.press(*keys)
                assert_harmless(terminal)
            await terminal.press("n")
        assert "damaged" in terminal.screen


@pytest.mark.slow
async def test_markup_is_shown_as_it_was_written(hostile):
    async with viewing(hostile, size=(200, 80)) as terminal:
        assert "[bold red]loud[/]" in terminal.screen
        await terminal.press("n")
        await terminal.press("y")
        assert "[bold red]loud[/]" in terminal.screen
        assert_harmless(terminal)
        await terminal.press("escape", "d")
        await terminal.until(lambda: "▼ first difference" in terminal.screen)
        assert_harmless(terminal)


@pytest.mark.slow
async def test_what_is_copied_cannot_end_a_paste(tmp_path):
    line = demo_lines()[0]
    line["turns"][0]["tool_calls"][0]["arguments"] = json.dumps({"code": "print(1)\x1b[201~\nrm -rf /\n\tx = '[/]'"})
    write_lines(tmp_path / "0.jsonl", [line])
    async with viewing(tmp_path) as terminal:
        await terminal.press("y")
        await terminal.press("down", "down", "down", "enter")
        assert terminal.app.clipboard == "print(1)\nrm -rf /\n\tx = '[/]'"


@pytest.mark.slow
async def test_a_search_for_markup_and_patterns_finds_the_characters(tmp_path):
    write_lines(tmp_path / "0.jsonl", [{**VERL_LINE, "output": "a [bold].*(b [/] c"}])
    async with viewing(tmp_path) as terminal:
        await terminal.enter("s", "[bold].*(")
        assert terminal.page.matches == 1
        assert "search '[bold].*('" in terminal.screen


@pytest.mark.exhaustive
async def test_ten_megabytes_do_not_stop_it_and_can_be_read_whole(tmp_path):
    text = "word " * 1_000_000 + "the needle " + "more " * 1_000_000
    write_lines(tmp_path / "0.jsonl", [VERL_LINE, {**VERL_LINE, "output": text}])
    async with viewing(tmp_path) as terminal:
        begun = time.monotonic()
        await terminal.press("n", "p", "n")
        await terminal.until(lambda: "more characters · press a to show all" in terminal.page.text)
        assert time.monotonic() - begun < patient(15)
        await terminal.enter("s", "the needle")
        assert "the needle" in terminal.screen
        await terminal.press("a")
        assert len(terminal.page.text) > 4_000_000


async def test_a_line_that_cannot_be_drawn_says_so(tmp_path, monkeypatch):
    def broken(*_):
        raise RuntimeError("nobody thought of \x1b]31 this")

    monkeypatch.setattr("toolyard.viewer.tui.pages.conversation", broken)
    write_lines(tmp_path / "0.jsonl", [VERL_LINE])
    async with viewing(tmp_path) as terminal:
        assert "This cannot be shown.\nRuntimeError: nobody thought of ␛]31 this" in terminal.page.text
        assert '"output": "It is 4."' in terminal.page.text  # but it can be read
