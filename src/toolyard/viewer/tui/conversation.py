"""A conversation as lines: messages, calls next to their results, reasoning folded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.segment import Segment
from rich.style import Style

from toolyard.records.trajectory import Trajectory, Turn
from toolyard.viewer.protocol import Bubble, CallView, Picture, Piece, Role
from toolyard.viewer.tui.drawing import TURN, Line, Pen, beside, clipped, filled, length, prefixed, spread
from toolyard.viewer.tui.palette import Palette
from toolyard.viewer.tui.text import counted, format_number, format_seconds, one_line

_BESIDE_WIDTH, _ALWAYS_BESIDE_WIDTH = 70, 130
"""From the first width on, a result is shown beside its call if both fit without wrapping; from the second, always."""
_SHOWN_PROMPT, _SHOWN_PROMPT_CHARS = 2, 1_500
"""Messages and characters shown unfolded before the last message of a prompt."""
_BUBBLE_COST = 100
_OURS = ("failed", "raised")
"""Outcomes of calls that say nothing about the model."""
PROMPT = "prompt"


@dataclass(frozen=True, slots=True)
class Folds:
    """Which parts are unfolded: none or all, except those that were toggled."""

    all_open: bool = False
    toggled: frozenset[str] = frozenset()

    def is_open(self, key: str) -> bool:
        return self.all_open != (key in self.toggled)

    def toggle(self, key: str) -> Folds:
        return Folds(self.all_open, self.toggled ^ {key})


def conversation_lines(
    pen: Pen, bubbles: Sequence[Bubble], trajectory: Trajectory, width: int, folds: Folds
) -> list[Line]:
    lines: list[Line] = []
    earlier = _earlier(bubbles)
    if earlier:
        hidden = bubbles[:earlier]
        label = _prompt_label(hidden)
        is_open = folds.is_open(PROMPT) or pen.holds(*(piece.text for bubble in hidden for piece in bubble.pieces))
        lines += [clipped(pen.heading(PROMPT, label, is_open=is_open), width), []]
        earlier = 0 if is_open else earlier
    for at in range(earlier, len(bubbles)):
        if not pen.spend(_BUBBLE_COST):
            lines.append(pen.note(f"… {counted(len(bubbles) - at, 'more message')}", width))
            break
        lines += [*_bubble(pen, bubbles[at], trajectory, width, folds, str(at)), []]
    return lines


def _earlier(bubbles: Sequence[Bubble]) -> int:
    """How many messages at the start are folded together."""
    prompt = next((at for at, bubble in enumerate(bubbles) if bubble.turn is not None), len(bubbles))
    before = bubbles[: max(0, prompt - 1)]
    chars = sum(len(piece.text) for bubble in before for piece in bubble.pieces)
    return len(before) if len(before) > _SHOWN_PROMPT or chars > _SHOWN_PROMPT_CHARS else 0


def _prompt_label(hidden: Sequence[Bubble]) -> str:
    chars = sum(len(piece.text) for bubble in hidden for piece in bubble.pieces)
    more = len(hidden) - 1
    others = f" and {counted(more, 'more message')}" if more else ""
    return f"prompt: {hidden[0].role.value}{others}, {counted(chars, 'character')}"


def _bubble(pen: Pen, bubble: Bubble, trajectory: Trajectory, width: int, folds: Folds, key: str) -> list[Line]:
    palette = pen.palette
    color = palette.roles[bubble.role]
    inner = width - 2
    title: Line = [Segment(bubble.role.value.upper(), color + Style(bold=True))]
    if bubble.name:
        title.append(Segment(f" {one_line(bubble.name, 40)}", palette.muted))
    if bubble.turn is not None:
        title.append(Segment(f"  turn {bubble.turn + 1}", palette.muted + Style.from_meta({TURN: bubble.turn})))
    lines = spread(title, [Segment(_timings(bubble, trajectory), palette.muted)], inner)
    for at, piece in enumerate(bubble.pieces):
        if at and "code" in (piece.kind, bubble.pieces[at - 1].kind):
            lines.append([])
        lines += _piece(pen, piece, inner, folds, f"{key}.{at}")
    for call in bubble.calls:
        lines += _call(pen, call, inner)
    lines += _images(pen, bubble.images, inner)
    if not bubble.pieces and not bubble.calls and not bubble.images:
        lines.append([Segment("(empty)", palette.faint)])
    return prefixed(lines, Segment("▎ ", color))


def _timings(bubble: Bubble, trajectory: Trajectory) -> str:
    parts: list[str] = []
    if bubble.turn is not None and bubble.turn < len(trajectory.turns):
        sampled = trajectory.turns[bubble.turn].sampled
        parts.append(counted(max(0, sampled.end - sampled.start), "token"))
        if sampled.finish not in ("stop", "unknown"):
            parts.append(f"ended by {one_line(sampled.finish, 20)}")
    names = {"generating": "", "tool_calling": "tools ", "interacting": "user "}
    parts += [f"{said}{format_seconds(bubble.timings[name])}" for name, said in names.items() if name in bubble.timings]
    return " · ".join(parts)


def _piece(pen: Pen, piece: Piece, width: int, folds: Folds, key: str) -> list[Line]:
    if piece.kind == "reasoning":
        is_open = folds.is_open(key) or pen.holds(piece.text)
        label = f"reasoning, {counted(len(piece.text), 'character')}"
        heading = [clipped(pen.heading(key, label, is_open=is_open), width)]
        ink = pen.palette.muted + Style(italic=True)
        return heading + (prefixed(pen.text(piece.text, width - 2, ink), Segment("  ")) if is_open else [])
    if piece.kind == "code":
        return prefixed(pen.code(piece.text, piece.language, width - 2), Segment("  "))
    return pen.text(piece.text, width)


def turn_label(number: int, turn: Turn) -> str:
    """A turn on one line; `number` is from 0."""
    calls = ", ".join(f"{call.name} {call.metrics.get('verdict') or call.outcome}" for call in turn.tool_calls)
    sampled = counted(max(0, turn.sampled.end - turn.sampled.start), "token")
    return f"turn {number + 1} · {sampled} · {calls or one_line(turn.sampled.text, 60)}"


# Calls ----------------------------------------------------------------------------------------------------------------


def _ending(palette: Palette, call: CallView) -> tuple[str, Style]:
    """How a call ended: a sign and its style."""
    if call.outcome in ("", "unknown"):
        return "·", palette.muted
    if call.outcome in _OURS:
        return "✗", palette.bad
    style = palette.verdict(_verdict(call))
    return {palette.good: "✓", palette.fair: "!"}.get(style, "×"), style


def _verdict(call: CallView) -> str:
    return call.verdict if call.outcome == "ok" and call.verdict else call.outcome


def _call(pen: Pen, call: CallView, width: int) -> list[Line]:
    palette = pen.palette
    sign, style = _ending(palette, call)
    ink = palette.faint if sign in "✓·" else style
    tool = palette.roles[Role.TOOL]
    asked: Line = [Segment(one_line(call.name, 60) or "(no name)", tool + Style(bold=True))]
    if call.language and call.language != "python":
        asked.append(Segment(f" {one_line(call.language, 20)}", palette.muted))
    ended = _ended(pen, call, Segment(f"{sign} ", style))
    if left := _room_for_call(call, width):
        room = width - 7
        right = room - left
        body = beside(_asked(pen, call, left), _answer(pen, call, right), left, Segment(" │ ", ink))
        rows = [[Segment("│ ", ink), *filled(line, room + 3), Segment(" │", ink)] for line in body]
        return [
            [*_edge("╭", asked, left + 2, ink), *_edge("┬", ended, right + 2, ink), Segment("╮", ink)],
            *rows,
            [Segment(f"╰{'─' * (left + 2)}┴{'─' * (right + 2)}╯", ink)],
        ]
    room = width - 4

    def sides(lines: list[Line]) -> list[Line]:
        return [[Segment("│ ", ink), *filled(line, room), Segment(" │", ink)] for line in lines]

    return [
        [*_edge("╭", asked, room + 2, ink), Segment("╮", ink)],
        *sides(_asked(pen, call, room)),
        [*_edge("├", ended, room + 2, ink), Segment("┤", ink)],
        *sides(_answer(pen, call, room)),
        [Segment(f"╰{'─' * (room + 2)}╯", ink)],
    ]


def _room_for_call(call: CallView, width: int) -> int:
    """Width of the call beside its result; 0 if the result goes below it."""
    room = width - 7
    asked = max(_longest(call.code or ""), _longest(call.arguments))
    labels = (len(image.label) + 2 for image in call.images)
    answered = max(_longest(call.response), _longest(call.error or ""), *labels)
    if width >= _BESIDE_WIDTH and asked + answered <= room:
        return max(asked, min(room // 2, room - answered))
    return room // 2 if width >= _ALWAYS_BESIDE_WIDTH else 0


def _edge(corner: str, title: Line, width: int, ink: Style) -> Line:
    """A corner and a border of `width` with a title."""
    shown = clipped(title, width - 4)
    return [Segment(f"{corner}─ ", ink), *shown, Segment(f" {'─' * (width - 3 - length(shown))}", ink)]


def _ended(pen: Pen, call: CallView, sign: Segment) -> Line:
    parts: list[str] = []
    if call.seconds:
        parts.append(format_seconds(call.seconds))
    if call.wait_seconds >= 0.001:
        parts.append(f"waited {format_seconds(call.wait_seconds)}")
    if call.reward is not None:
        parts.append(f"reward {format_number(call.reward)}")
    shown = Segment(one_line(_verdict(call), 40) or "part of the prompt", sign.style)
    return [sign, shown, Segment("".join(f" · {part}" for part in parts), pen.palette.muted)]


def _asked(pen: Pen, call: CallView, width: int) -> list[Line]:
    lines: list[Line] = []
    if call.arguments and (call.arguments != "{}" or call.code is None):
        lines += pen.code(call.arguments, "json", width)
    if call.code is not None:
        lines += pen.code(call.code, call.language, width)
    return lines or [[Segment("(no arguments)", pen.palette.faint)]]


def _answer(pen: Pen, call: CallView, width: int) -> list[Line]:
    lines: list[Line] = []
    if call.error and call.error.strip() not in call.response:
        lines += pen.text(call.error, width, pen.palette.muted)
    if call.response.strip():
        lines += pen.text(call.response.removesuffix("\n"), width)
    lines += _images(pen, call.images, width)
    return lines or [[Segment("(no output)", pen.palette.faint)]]


def _images(pen: Pen, images: Sequence[Picture], width: int) -> list[Line]:
    """The labels of images: a terminal cannot show them."""
    return [clipped([Segment(f"▣ {one_line(image.label, 80)}", pen.palette.muted)], width) for image in images]


def _longest(text: str) -> int:
    return max((len(line) for line in text[:20_000].split("\n")), default=0)
