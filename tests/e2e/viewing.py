"""What the viewers' tests share: dumps, and a server in a thread."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from toolyard.records.audit import Decode
from toolyard.viewer.library import Library
from toolyard.viewer.notes import Notes
from toolyard.viewer.web.answers import Answers
from toolyard.viewer.web.server import Server

DEMO = Path(__file__).parent.parent / "data" / "embedded.jsonl.gz"
SCRIPT = "<script>document.title='run'</script><img src=x onerror=\"document.title='run'\">"
ESCAPES = "\x1b]0;owned\x07\x1b[31mred\x1b[0m \u202egnp.exe \x00 [bold red]loud[/]"


def demo_lines() -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.decompress(DEMO.read_bytes()).splitlines()]


def write_lines(path: Path, lines: list[Any]) -> None:
    with path.open("ab") as file:
        for line in lines:
            file.write(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n")


def demo_dump(folder: Path, *, steps: int = 1) -> Path:
    """The demo's trajectories, over this many steps."""
    folder.mkdir(exist_ok=True)
    for step in range(steps):
        lines = [{**line, "step": step, "request_id": f"{step:04}{line['request_id'][4:]}"} for line in demo_lines()]
        write_lines(folder / f"{step}.jsonl", lines)
    return folder


def troubled_dump(folder: Path, *, steps: int = 4) -> Path:
    """The demo's trajectories over several steps, with what goes wrong in real runs: in each step an engine that fails,
    a message that is cut off, a program that runs too long, and an episode of many turns."""
    for step in range(steps):
        lines = [{**line, "step": step, "request_id": f"{step:04}{line['request_id'][4:]}"} for line in demo_lines()]
        for line in lines[1 : 2 + step % 3]:
            line |= failed_fields("engine_failure", "GENERATING", REFUSED)
        lines[5]["finish_reason"] = "length"
        slow = lines[7]["turns"][0]["tool_calls"][0]
        slow["metrics"]["verdict"], slow["response"] = "timed_out", "\x1b[1;31mtimed out\x1b[0m after 10 s\n"
        lengthen(lines[8], 12)
        write_lines(folder / f"{step}.jsonl", lines)
    return folder


REFUSED = "all 3 attempts failed: \x1b[31mConnection refused\x1b[0m (http://10.0.0.7:30000)\nTraceback\n  in generate"


def failed_fields(finish: str, stage: str, error: str) -> dict[str, Any]:
    failure = {"whose": "ours", "stage": stage, "error": error, "source": "http://10.0.0.7:30000", "cause": ""}
    return {"state": "FAILED", "finish_reason": finish, "failure": failure, "score": None, "rewards": {}}


def lengthen(line: dict[str, Any], times: int) -> None:
    """Repeat the first call of a trajectory, every third time with a program that fails."""
    asked = next(at for at, message in enumerate(line["messages"]) if message.get("tool_calls"))
    call, answer = (json.dumps(message) for message in line["messages"][asked : asked + 2])
    turn = json.dumps(line["turns"][0])
    for at in range(1, times + 1):
        line["messages"][asked:asked] = [
            json.loads(text.replace("call_0_0", f"call_{at}_1")) for text in (call, answer)
        ]
        again = json.loads(turn.replace("call_0_0", f"call_{at}_1"))
        again["tool_calls"][0]["metrics"]["verdict"] = "ok" if at % 3 else "failed"
        line["turns"].insert(0, again)


def pictured_line(picture: str) -> dict[str, Any]:
    """The demo's first trajectory, with an image in its tool's answer: a data URL."""
    line = demo_lines()[0]
    line["request_id"] = "pictured"
    answer = next(message for message in line["messages"] if message["role"] == "tool")
    shown = {"type": "image_url", "image_url": {"url": picture}}
    answer["content"] = [{"type": "text", "text": answer["content"]}, shown]
    answer["tool_call_id"] = line["turns"][0]["tool_calls"][0]["id"]
    return line


def explained_line() -> dict[str, Any]:
    """The demo's first trajectory, as if its answer had been wrong, with weights and reasons."""
    line = demo_lines()[0]
    line["request_id"], line["score"], line["rewards"]["final"] = "explained", 0.0, 0.0
    final = {"weight": 1.0, "reason": "the answer 8 is not 9", "extracted": "8", "expected": "9"}
    line["reward_details"] = {"final": final, "tool/code_interpreter": {"weight": 0.0}}
    return line


def hostile_line() -> dict[str, Any]:
    """The demo's first trajectory, with markup, escapes and controls wherever a model or a task writes."""
    line = demo_lines()[0]
    said = f"{SCRIPT} {ESCAPES} </script></style>"
    line["request_id"], line["step"] = "hostile", 7
    line["messages"][-3]["content"] = said
    line["messages"][-1]["content"] = said
    line["gts"] = said
    line["finish_reason"] = said
    line["batch_data_id"] = said
    line["turns"][0]["sampled"]["text"] = said
    call = line["turns"][0]["tool_calls"][0]
    call["name"] = call["outcome"] = call["response"] = said
    call["arguments"] = json.dumps({"code": said, said: said, "language": said})
    call["metrics"] = {said: said, "__proto__": {"polluted": 1}, "verdict": said}
    line["metrics"] |= {said: said, "__proto__": {"polluted": 1}, "constructor": said}
    line["rewards"] |= {said: 1.0, "__proto__": 0.5, "constructor": said}
    texts = {"reason": said, "extracted": said, "expected": said, "weight": said}
    line["reward_details"] = {"final": texts, said: texts, "__proto__": texts, "constructor": said}
    line |= {said: said, "__proto__": {"polluted": 1}, "data_source": said}
    line["failure"] = {"whose": said, "stage": said, "error": said}
    return line


VERL_LINE = {"input": "user\nWhat is 2 + 2?\nassistant\n", "output": "It is 4.", "gts": "4", "score": 1.0, "step": 7}
DAMAGED = b'{"input": "half a li\n'


@contextmanager
def served(
    folder: Path,
    *,
    port: int = 0,
    decode: Decode | None = None,
    of: type[Answers] = Answers,
    token: str | None = None,
    read_only: str = "",
) -> Generator[str]:
    """The address of a server over that folder, in a thread of its own."""
    with Library.open(folder) as library:
        loop = asyncio.new_event_loop()
        answers = of(library, title=folder.name, decode=decode, notes=Notes(library.folder, read_only=read_only))
        server = Server(answers, port=port, token=token)
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        try:
            asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result(30)
            try:
                yield server.url
            finally:
                asyncio.run_coroutine_threadsafe(server.__aexit__(), loop).result(30)
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(30)
            loop.close()
