"""One frame of `toolyard top`: a page of figures that fits the terminal."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.console import ConsoleDimensions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from toolyard.cli.outcomes import duration
from toolyard.rollout.watching.page import StatusPage
from toolyard.viewer.tui.text import one_line

_RATE_SECONDS = 10.0
"""Window over which rates are computed."""
_PLENTY = 1000
"""Rows, where there is no screen to fit."""


class _Count(NamedTuple):
    seconds: float
    requests: int
    turns: int
    tokens: int
    calls: int


class Rates:
    """Counts per second, over the last seconds."""

    def __init__(self) -> None:
        self._counts: deque[_Count] = deque()

    @classmethod
    def since_start(cls, page: StatusPage) -> Rates:
        rates = cls()
        rates._counts.append(_Count(0.0, 0, 0, 0, 0))
        rates.add(page)
        return rates

    def add(self, page: StatusPage) -> None:
        done = page.done - page.done_before
        now = _Count(page.seconds, done, page.turns, page.sampled_tokens, page.tool_calls)
        if self._counts and now.seconds < self._counts[-1].seconds:  # another run at the same address
            self._counts.clear()
        self._counts.append(now)
        while len(self._counts) > 2 and now.seconds - self._counts[0].seconds > _RATE_SECONDS:
            self._counts.popleft()

    def __str__(self) -> str:
        first, last = self._counts[0], self._counts[-1]
        seconds = last.seconds - first.seconds
        rates = [max(0.0, now - then) / seconds if seconds > 0 else 0.0 for then, now in zip(first, last, strict=True)]
        _, requests, turns, tokens, calls = rates
        return f"{tokens:.0f} tokens/s  {turns:.1f} turns/s  {calls:.1f} tool calls/s  {requests:.2f} requests/s"


def frame(
    page: StatusPage, rates: Rates, url: str, size: ConsoleDimensions | None = None, problem: str = ""
) -> RenderableType:
    """`size`: of the screen, if it is to fill one."""
    width, height = size or (None, _PLENTY)
    lines = _header(page, rates, url, problem)[:height]
    left = height - len(lines)
    servers, nodes, slowest = _servers(page), _nodes(page), _slowest(page)
    tables: list[RenderableType] = []
    for title, rows, count, share in (
        ("servers", servers, len(page.servers), 4),
        ("nodes", nodes, page.node_count, 3),
        ("slowest requests", slowest, len(slowest) - 1, 1),
    ):
        room = max(1, left // share - 2)  # a title, and an empty line before it
        if len(rows) > 1 and left > 2:
            shown = rows[: 1 + room]
            tables.append(_table(title, shown, count - len(shown) + 1, width))
            left -= len(shown) + 1
    return Group(*(Text(line, no_wrap=True, overflow="ellipsis", style=style) for line, style in lines), *tables)


def _header(page: StatusPage, rates: Rates, url: str, problem: str) -> list[tuple[str, str]]:
    share = f" ({100 * page.done / page.planned:.0f} %)" if page.planned else ""
    score = "–" if page.mean_score is None else f"{page.mean_score:.3f}"
    states = _joined(f"{state.lower().replace('_', ' ')} {count}" for state, count in page.states.items() if count)
    lines = [
        (f"{one_line(url)}  process {page.pid}  running for {duration(page.seconds)}", "bold"),
        (f"done {page.done}/{page.planned}{share}  failed {page.failed}  mean reward {score}", ""),
        (f"running {sum(page.states.values())}  {states}", ""),
        (str(rates), ""),
    ]
    if page.sandbox is not None:
        box = page.sandbox
        programs = _joined(f"{verdict} {count}" for verdict, count in box.executions.items())
        busy = f"{box.busy}/{box.workers} busy  {box.waiting} waiting  {box.sessions} sessions"
        lines.append((f"sandbox  {busy}  programs: {programs or 'none'}", ""))
    for one in page.limiters:
        waits = f"waits p50 {duration(one.wait_p50)}, p99 {duration(one.wait_p99)}"
        told = f"limiter {one_line(one.name, 40)}  {one.in_flight}/{one.limit} in flight  {one.waiting} waiting"
        lines.append((f"{told}  {waits}", ""))
    if page.ledger:
        lines.append((f"ledger  {_joined(f'{key} {count}' for key, count in page.ledger.items())}", ""))
    if page.finish_reasons:
        lines.append((f"ended  {_joined(f'{why} {count}' for why, count in page.finish_reasons.items())}", ""))
    if page.is_blocked:
        lines.append(("the event loop is blocked: a tool or reward does not let others run", "bold yellow"))
    if problem:
        lines.append((one_line(problem), "bold red"))
    return lines


def _joined(parts: Iterable[str]) -> str:
    return one_line(", ".join(parts), 400)


Rows = Sequence[Sequence[str]]
"""The first one has the titles."""


def _servers(page: StatusPage) -> Rows:
    rows = [
        (one_line(one.url), str(one.in_flight), str(one.answered), str(one.failed), "up" if one.is_up else "resting")
        for one in page.servers
    ]
    return [("server", "in flight", "answered", "failed", "state"), *rows]


def _nodes(page: StatusPage) -> Rows:
    if not page.ledger:
        return []
    rows = [
        (
            one_line(one.name, 40),
            one_line(one.host, 40),
            str(one.pid),
            str(sum(one.states.values())),
            str(one.turns),
            str(one.sampled_tokens),
            str(one.tool_calls),
        )
        for one in page.nodes
    ]
    return [("worker", "host", "process", "running", "turns", "tokens", "calls"), *rows]


def _slowest(page: StatusPage) -> Rows:
    rows = [
        (
            one_line(one.request_id, 40),
            one.state.lower().replace("_", " "),
            duration(one.seconds),
            str(one.turn),
            one_line(one.task, 24),
            one_line(one.waits_for),
        )
        for one in page.slowest
    ]
    return [("request", "state", "for", "turn", "task", "waits for"), *rows]


def _table(title: str, rows: Rows, hidden: int, width: int | None) -> Table:
    more = f" ({hidden} more)" if hidden else ""
    table = Table(
        box=None, pad_edge=False, width=width, title=f"{title}{more}", title_justify="left", header_style="dim",
        title_style="bold",
    )  # fmt: skip
    for place, name in enumerate(rows[0]):
        table.add_column(name, no_wrap=True, overflow="ellipsis", ratio=1 if place == len(rows[0]) - 1 else None)
    for row in rows[1:]:
        table.add_row(*map(Text, row))
    return table
