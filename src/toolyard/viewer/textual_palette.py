"""Colours, in dark and in light: one table for the widgets and for what is drawn line by line."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from rich.style import Style
from textual.theme import Theme
from textual.widget import Widget

from .protocol import Origin, Role, Stage

DARK, LIGHT = "toolyard-dark", "toolyard-light"

_COLOURS = {
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
        "orange": "#e39a66",
        "red": "#e6788a",
        "violet": "#b49ae0",
        "match": "#5c4a1f",
        "current": "#dcae6b",
        "added": "#1f3328",
        "removed": "#3a2329",
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
        "orange": "#b0561b",
        "red": "#b3263a",
        "violet": "#6b45a5",
        "match": "#f6e3a8",
        "current": "#e8b33c",
        "added": "#dff0dc",
        "removed": "#f8dfe0",
    },
}
_CODE_THEMES = {DARK: "one-dark", LIGHT: "friendly"}


def themes() -> list[Theme]:
    return [
        Theme(
            name=name,
            primary=colours["blue"],
            secondary=colours["cyan"],
            accent=colours["amber"],
            warning=colours["amber"],
            error=colours["red"],
            success=colours["green"],
            foreground=colours["text"],
            background=colours["background"],
            surface=colours["surface"],
            panel=colours["panel"],
            dark=name == DARK,
            variables={
                "muted": colours["muted"],
                "faint": colours["faint"],
                "footer-key-foreground": colours["blue"],
                "footer-background": colours["surface"],
                "input-selection-background": f"{colours['blue']} 35%",
                "block-cursor-background": colours["blue"],
                "block-cursor-foreground": colours["background"],
                "border-blurred": colours["panel"],
            },
        )
        for name, colours in _COLOURS.items()
    ]


@dataclass(frozen=True, slots=True)
class Palette:
    """Styles of what is drawn. Only those of blocks and matches have a background."""

    text: Style
    strong: Style
    muted: Style
    faint: Style
    accent: Style
    good: Style
    fair: Style
    bad: Style
    block: Style
    """The ground that programs stand on."""
    cursor: Style
    """The ground of the chosen row."""
    match: Style
    current: Style
    added: Style
    removed: Style
    roles: dict[Role, Style]
    stages: dict[Stage, Style]
    origins: dict[Origin, Style]
    code_theme: str

    def score(self, score: float | None) -> Style:
        if score is None:
            return self.muted
        return self.good if score >= 0.75 else self.bad if score <= 0.25 else self.fair


def palette_of(widget: Widget) -> Palette:
    """Of the theme that is chosen now."""
    return palette(widget.app.theme)  # pyright: ignore[reportUnknownMemberType] - whatever the app returns


@cache
def palette(name: str) -> Palette:
    """Of one of our themes."""
    colours = _COLOURS.get(name, _COLOURS[DARK])

    def ink(colour: str, *, bold: bool | None = None) -> Style:
        return Style(color=colours[colour], bold=bold)

    return Palette(
        text=ink("text"),
        strong=ink("strong", bold=True),
        muted=ink("muted"),
        faint=ink("faint"),
        accent=ink("blue"),
        good=ink("green"),
        fair=ink("amber"),
        bad=ink("red"),
        block=Style(bgcolor=colours["surface"]),
        cursor=Style(bgcolor=colours["panel"]),
        match=Style(bgcolor=colours["match"], color=colours["strong"]),
        current=Style(
            bgcolor=colours["current"], color=colours["background" if name != LIGHT else "strong"], bold=True
        ),
        added=Style(color=colours["green"], bgcolor=colours["added"]),
        removed=Style(color=colours["red"], bgcolor=colours["removed"]),
        roles={
            Role.SYSTEM: ink("violet"),
            Role.USER: ink("cyan"),
            Role.ASSISTANT: ink("blue"),
            Role.TOOL: ink("amber"),
            Role.OTHER: ink("muted"),
        },
        stages={
            Stage.QUEUE: ink("faint"),
            Stage.ENGINE: ink("blue"),
            Stage.LIMITER: ink("red"),
            Stage.TOOL: ink("amber"),
            Stage.INTERACTION: ink("cyan"),
            Stage.REWARD: ink("green"),
            Stage.OTHER: ink("muted"),
        },
        origins={Origin.PROMPT: ink("muted"), Origin.SAMPLED: ink("blue"), Origin.TOOL: ink("amber")},
        code_theme=_CODE_THEMES.get(name, _CODE_THEMES[DARK]),
    )
