"""What can be copied from a trajectory.

Text is copied as `visible` shows it, which differs only for hostile text: an escape sequence that ends a terminal's
paste mode would let the rest run as a command.
"""

from __future__ import annotations

from typing import NamedTuple

from toolyard.records.trajectory import Trajectory
from toolyard.viewer.conversation import conversation
from toolyard.viewer.protocol import Bubble, Row
from toolyard.viewer.tui.text import counted, one_line, visible

MOST_CHARS = 1_000_000
"""Terminals refuse more, and few accept this much."""
_MOST_PROGRAMS = 50


class Copy(NamedTuple):
    label: str
    text: str


def copies(row: Row, trajectory: Trajectory | None, raw: str) -> list[Copy]:
    """`raw`: the raw line, for lines that cannot be read."""
    found = [Copy(f"request id  {row.request_id}", row.request_id)] if row.request_id else []
    found.append(Copy(f"location  {row.file}:{row.line}", f"{row.file}:{row.line}"))
    if trajectory is None:
        return [_fit(copy) for copy in (*found, Copy(f"raw line, {counted(len(raw), 'character')}", raw))]
    bubbles = conversation(trajectory)
    text = "\n\n".join(map(_as_text, bubbles))
    programs = [call.code for bubble in bubbles for call in bubble.calls if call.code]
    programs += [
        piece.text for bubble in bubbles if bubble.turn is not None for piece in bubble.pieces if piece.kind == "code"
    ]
    found.append(Copy(f"conversation, {counted(len(text), 'character')}", text))
    found += [Copy(f"program {at}  {code[:60]}", code) for at, code in enumerate(programs[:_MOST_PROGRAMS], 1)]
    for name, raw_text in (("output", trajectory.output), ("input", trajectory.input)):
        found.append(Copy(f"raw {name}, {counted(len(raw_text), 'character')}", raw_text))
    return [_fit(copy) for copy in found]


def _fit(copy: Copy) -> Copy:
    return Copy(one_line(copy.label, 100), visible(copy.text[:MOST_CHARS]))


def _as_text(bubble: Bubble) -> str:
    parts = [f"[{bubble.role.value}]"]
    parts += [
        f"```{piece.language or ''}\n{piece.text}\n```" if piece.kind == "code" else piece.text
        for piece in bubble.pieces
    ]
    for call in bubble.calls:
        asked = call.code if call.code is not None else call.arguments
        parts.append(
            f"[call {call.name}]\n{asked}\n[{call.verdict or call.outcome}]\n{call.error or ''}{call.response}"
        )
    return "\n".join(parts)
