"""Two trajectories side by side, with their first difference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.segment import Segment
from rich.style import Style

from toolyard.viewer.protocol import Comparison, DiffLine, Divergence, Row
from toolyard.viewer.tui.drawing import Line, Pen, beside, clipped, filled
from toolyard.viewer.tui.text import counted, fitted, one_line
from toolyard.viewer.tui.trajectory import section

_SAME = "same"
_SIGNS = {"changed": "≠", "left": "−", "right": "+"}
_NAME, _FACT = 24, 20
_CONTEXT = 3
"""Equal lines to show before and after a difference."""
_LINE_COST = 20


def comparison_lines(pen: Pen, left: Row, right: Row, found: Comparison, width: int) -> list[Line]:
    palette = pen.palette
    half = (width - 5) // 2
    titles = [[[Segment(_name(row, half), palette.strong)]] for row in (left, right)]
    lines = beside(titles[0], titles[1], half + 2, Segment(" │ ", palette.faint))
    lines += [[], *(_fact(pen, *fact, width) for fact in found.facts), []]
    if found.divergence is None:
        return [*lines, [Segment("All tokens are the same.", palette.good)]]
    lines += _divergence(pen, found.divergence, width)
    parts: list[tuple[str, Sequence[DiffLine]]] = [("prompt", found.prompt)] if found.prompt else []
    parts += [(f"turn {turn.turn + 1}{', same' if turn.same else ''}", turn.lines) for turn in found.turns]
    parted = False
    for title, diff in parts:
        lines += [[], section(pen, title, width)]
        for line in _with_context(diff, pen):
            if isinstance(line, int):
                lines.append(pen.note(f"  … {counted(line, 'equal line')}", width))
                continue
            if line.kind != _SAME and not parted:
                parted = True
                lines.append([Segment("▼ first difference", palette.accent + Style(bold=True))])
            lines += _pair(pen, line, half)
            if not pen.spend(_LINE_COST):
                return [*lines, pen.note("… and more", width)]
    return lines


def _name(row: Row, width: int) -> str:
    name = one_line(row.request_id) or f"{one_line(row.file)}:{row.line}"
    about = f"{name} · {row.task and f'sample {row.sample} · '}step {row.step}"
    return fitted(one_line(about), width)


def _fact(pen: Pen, name: str, left: str, right: str, width: int) -> Line:
    palette = pen.palette
    ink = palette.muted if left == right else palette.strong
    return clipped(
        [
            Segment(f"{fitted(one_line(name), _NAME)} ", palette.muted),
            Segment(f"{fitted(one_line(left), _FACT)} ", ink),
            Segment(one_line(right), ink),
        ],
        width,
    )


def _divergence(pen: Pen, found: Divergence, width: int) -> list[Line]:
    palette = pen.palette
    where = "" if found.token is None else f": token {found.token}"
    lines: list[Line] = [[Segment(f"First difference{where}", palette.accent + Style(bold=True))]]
    lines += pen.text(found.explanation, width)
    for side, said in (("left", found.left), ("right", found.right)):
        lines.append(clipped([Segment(f"  {side:<6}", palette.muted), Segment(one_line(said), palette.text)], width))
    return lines


def _with_context(diff: Sequence[DiffLine], pen: Pen) -> Iterator[DiffLine | int]:
    """The lines. Long runs of equal ones are replaced by their number."""
    for same, run in groupby(diff, lambda line: line.kind == _SAME):
        lines = list(run)
        hidden = len(lines) - 2 * _CONTEXT
        if same and hidden > 1 and not pen.whole and not pen.holds(*(line.left for line in lines)):
            yield from lines[:_CONTEXT]
            yield hidden
            yield from lines[-_CONTEXT:]
        else:
            yield from lines


def _pair(pen: Pen, line: DiffLine, half: int) -> list[Line]:
    palette = pen.palette
    same = line.kind == _SAME
    grounds = [Style()] * 2 if same else [palette.left, palette.right]
    sides: list[list[Line]] = []
    for said, ground in zip((line.left, line.right), grounds, strict=True):
        ink = palette.muted if same else palette.text + ground
        drawn = [] if said is None else pen.text(said, half, ink, words=False)
        sides.append([filled(row, half, ground) for row in drawn])
    rows = beside(sides[0], sides[1], half, Segment(" │ ", palette.faint))
    sign = Segment(f"{_SIGNS.get(line.kind, ' ')} ", palette.accent)
    return [[sign if at == 0 else Segment("  "), *row] for at, row in enumerate(rows)]
