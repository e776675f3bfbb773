"""Dark and light colors: one table for the widgets and for what is drawn line by line.

A color has one meaning: red is an infrastructure failure, amber a truncation, green is good, and everything else is
neutral. Whatever has a color also has a sign or a word, so that the viewer can be read without colors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from rich.style import Style
from textual.theme import Theme
from textual.widget import Widget

from toolyard.viewer.groups import SOLVED
from toolyard.viewer.protocol import Origin, Role, Stage

DARK, LIGHT = "toolyard-dark", "toolyard-light"

_COLORS = {
    DARK: {
        "background": "#15171c",
        "surface": "#1b1d22",
        "panel": "#262930",
        "text": "#d3d7de",
        "strong": "#f2f4f8",
        "muted": "#8a93a2",
        "faint": "#4d5563",
        "blue": "#7fa7f0",
        "cyan": "#6cc4cf",
        "green": "#93c47d",
        "amber": "#dcae6b",
        "pink": "#d98cc0",
        "red": "#e6788a",
        "violet": "#b49ae0",
        "match": "#5c4a1f",
        "current": "#dcae6b",
        "right": "#1d2f45",
        "left": "#30263f",
    },
    LIGHT: {
        "background": "#fbfaf7",
        "surface": "#f5f3ee",
        "panel": "#ebe8e1",
        "text": "#2c3038",
        "strong": "#0e1116",
        "muted": "#6b727d",
        "faint": "#b9b6ad",
        "blue": "#2b5fb8",
        "cyan": "#0b7482",
        "green": "#37752b",
        "amber": "#8f6200",
        "pink": "#a03a80",
        "red": "#b3263a",
        "violet": "#6b45a5",
        "match": "#f6e3a8",
        "current": "#e8b33c",
        "right": "#dbe8f8",
        "left": "#ebe2f6",
    },
}
_CODE_THEMES = {DARK: "one-dark", LIGHT: "friendly"}


def themes() -> list[Theme]:
    return [
        Theme(
            name=name,
            primary=colors["blue"],
            secondary=colors["cyan"],
            accent=colors["amber"],
            warning=colors["amber"],
            error=colors["red"],
            success=colors["green"],
            foreground=colors["text"],
            background=colors["background"],
            surface=colors["surface"],
            panel=colors["panel"],
            dark=name == DARK,
            variables={
                "muted": colors["muted"],
                "faint": colors["faint"],
                "footer-key-foreground": colors["blue"],
                "footer-background": colors["surface"],
                "input-selection-background": f"{colors['blue']} 35%",
                "block-cursor-background": colors["blue"],
                "block-cursor-foreground": colors["background"],
                "border-blurred": colors["panel"],
            },
        )
        for name, colors in _COLORS.items()
    ]


_STOPPED = ("timed_out", "truncated")


@dataclass(frozen=True, slots=True)
class Palette:
    """Styles for drawing. Only blocks, matches, the cursor and differences have a background."""

    text: Style
    strong: Style
    muted: Style
    faint: Style
    accent: Style
    good: Style
    fair: Style
    """Truncated: stopped by a limit."""
    bad: Style
    """An infrastructure failure, or a line that cannot be read."""
    unlikely: Style
    """Tokens of low probability."""
    block: Style
    """The background of programs."""
    cursor: Style
    """The background of the selected row."""
    match: Style
    current: Style
    left: Style
    right: Style
    """The backgrounds of differences."""
    roles: dict[Role, Style]
    stages: dict[Stage, Style]
    origins: dict[Origin, Style]
    code_theme: str

    def score(self, score: float | None) -> Style:
        return self.muted if score is None else self.good if score >= SOLVED else self.text

    def verdict(self, verdict: str) -> Style:
        """How a call ended. A program's own failure is neutral."""
        if verdict in _STOPPED or verdict.endswith("_exceeded"):
            return self.fair
        return self.good if verdict == "ok" else self.text


def palette_of(widget: Widget) -> Palette:
    """The palette of the current theme."""
    return palette(widget.app.theme)  # pyright: ignore[reportUnknownMemberType] - whatever the app returns


@cache
def palette(name: str) -> Palette:
    """The palette of the theme `name`."""
    colors = _COLORS.get(name, _COLORS[DARK])

    def ink(color: str, *, bold: bool | None = None) -> Style:
        return Style(color=colors[color], bold=bold)

    return Palette(
        text=ink("text"),
        strong=ink("strong", bold=True),
        muted=ink("muted"),
        faint=ink("faint"),
        accent=ink("blue"),
        good=ink("green"),
        fair=ink("amber"),
        bad=ink("red"),
        unlikely=Style(color=colors["pink"], underline=True),
        block=Style(bgcolor=colors["surface"]),
        cursor=Style(bgcolor=colors["panel"]),
        match=Style(bgcolor=colors["match"], color=colors["strong"], underline=True),
        current=Style(bgcolor=colors["current"], color=colors["background" if name != LIGHT else "strong"], bold=True),
        left=Style(bgcolor=colors["left"]),
        right=Style(bgcolor=colors["right"]),
        roles={
            Role.SYSTEM: ink("muted"),
            Role.USER: ink("cyan"),
            Role.ASSISTANT: ink("blue"),
            Role.TOOL: ink("violet"),
            Role.OTHER: ink("muted"),
        },
        stages={
            Stage.QUEUE: ink("faint"),
            Stage.ENGINE: ink("blue"),
            Stage.LIMITER: ink("pink"),
            Stage.TOOL: ink("violet"),
            Stage.INTERACTION: ink("cyan"),
            Stage.REWARD: ink("text"),
            Stage.OTHER: ink("muted"),
        },
        origins={Origin.PROMPT: ink("muted"), Origin.SAMPLED: ink("blue"), Origin.TOOL: ink("violet")},
        code_theme=_CODE_THEMES.get(name, _CODE_THEMES[DARK]),
    )


# Layout of the widgets.


CSS = """
Screen { background: $background; }

#top { text-wrap: nowrap; text-overflow: ellipsis; height: 1; background: $surface; color: $muted; padding: 0 1; }
#body { height: 1fr; }
#lists { width: 38%; min-width: 34; max-width: 72; background: $surface; }
.zoomed #lists, .comparing #lists, .tabled #lists, .tabled #page { display: none; }
#table { display: none; width: 1fr; background: $background; }
.tabled #table { display: block; }
#table Choices { height: 1fr; background: $background; scrollbar-background: $background; }
#head, #details { height: 3; background: $background; }
#details { background: $surface; }

.heading { height: 1; padding: 0 1; color: $muted; text-style: bold; }
#titles { height: 1; background: $surface; }

Choices {
    background: $surface;
    scrollbar-size: 1 1;
    scrollbar-gutter: stable;
    overflow-x: hidden;
    scrollbar-color: $faint;
    scrollbar-background: $surface;
    scrollbar-background-hover: $surface;
    scrollbar-background-active: $surface;
}
#steps { height: auto; max-height: 35%; }
#samples { height: 1fr; }

#page {
    width: 1fr;
    background: $background;
    scrollbar-size: 1 1;
    scrollbar-gutter: stable;
    overflow-x: hidden;
    scrollbar-color: $faint;
    scrollbar-background: $background;
    scrollbar-background-hover: $background;
    scrollbar-background-active: $background;
}

#prompt { height: auto; display: none; background: $panel; }
#prompt Horizontal { height: 1; }
#prompt-label { color: $background; background: $primary; text-style: bold; margin-right: 1; }
#prompt-input { width: 1fr; background: $panel; border: none; padding: 0; }
#prompt-hint { height: auto; max-height: 4; padding: 0 1; color: $muted; background: $panel; }
#prompt-hint.problem { color: $error; }

ModalScreen { align: center middle; background: $background 60%; }
.dialog {
    width: auto; min-width: 40; max-width: 90%; height: auto; max-height: 90%;
    background: $panel; border: round $faint; padding: 0 1;
}
.dialog, .dialog OptionList, .dialog SelectionList {
    scrollbar-size: 1 1;
    scrollbar-color: $faint;
    scrollbar-background: $panel;
    scrollbar-background-hover: $panel;
    scrollbar-background-active: $panel;
}
.dialog.wide { width: 78; }
.dialog-title { color: $primary; text-style: bold; margin: 1 0 0 0; }
.dialog OptionList, .dialog SelectionList {
    width: auto; max-width: 100%; height: auto; max-height: 18;
    background: $panel; border: none; padding: 0; margin: 1 0;
}
.dialog OptionList:focus, .dialog SelectionList:focus { background-tint: $panel; }
.dialog TextArea { height: 10; border: none; padding: 0; margin: 1 0; }
.dialog Input { margin: 1 0; }
Footer { background: $surface; }
"""
