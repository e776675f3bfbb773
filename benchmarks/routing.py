"""How often a request finds its group's prompt in a server's cache, and how even the servers' load is.

A simulation with the real `Router`: groups of 8 with 4 turns each, whose samples and tool calls take random times
(exponential, mean 1). *Found*: of the requests that are not the first of their group, the share that is sent to a
server that an earlier one was sent to. *Peak*: the requests in flight on the most loaded server, over the mean of all
servers, averaged over time.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter

from toolyard.failover import Router

GROUP, TURNS = 8, 4


def simulate(servers: int, in_flight: int, *, groups: int, by_prefix: bool, seed: int = 0) -> tuple[float, float]:
    """Return the share that was found, and the peak."""
    rng = random.Random(seed)
    router = Router([f"http://10.0.0.{number}:30000" for number in range(servers)])
    to_begin = [(group, offset) for group in reversed(range(groups)) for offset in range(GROUP)]
    events: list[tuple[float, int, int, int, int, str]] = []
    load, visited, found = Counter[str](), set[tuple[int, str]](), 0
    peaks: list[float] = []
    number = 0

    def ask(now: float, group: int, offset: int, turn: int) -> None:
        nonlocal found, number
        number += 1
        server = router.pick(f"{group}/{offset}", now, f"{group}/{turn and offset}" if by_prefix else None)
        if turn == 0:
            found += (group, server) in visited
            visited.add((group, server))
        load[server] += 1
        heapq.heappush(events, (now + rng.expovariate(1.0), number, group, offset, turn, server))

    for _ in range(in_flight):
        ask(0.0, *to_begin.pop(), 0)
    while events:
        now, _, group, offset, turn, server = heapq.heappop(events)
        if not server:  # a tool has answered
            ask(now, group, offset, turn)
            continue
        if to_begin:
            peaks.append(max(load.values()) * servers / load.total())
        router.done(server)
        load[server] -= 1
        if turn + 1 < TURNS:
            number += 1
            heapq.heappush(events, (now + rng.expovariate(1.0), number, group, offset, turn + 1, ""))
        elif to_begin:
            ask(now, *to_begin.pop(), 0)
    return found / (groups * (GROUP - 1)), sum(peaks) / len(peaks)


def main() -> None:
    print(f"{'servers':>8}{'in flight':>11}{'least loaded: found':>21}{'peak':>6}{'by prefix: found':>18}{'peak':>6}")
    for servers in (4, 16, 64):
        for each in (8, 32, 128):
            total = servers * each
            row = [
                figure
                for by_prefix in (False, True)
                for figure in simulate(servers, total, groups=max(200, total // 4), by_prefix=by_prefix)
            ]
            print(f"{servers:>8}{total:>11}{row[0]:>21.0%}{row[1]:>6.2f}{row[2]:>18.0%}{row[3]:>6.2f}")


if __name__ == "__main__":
    main()
