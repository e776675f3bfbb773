"""Journals, and requests that are continued from them."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from playing import TOKENIZER, call, playing, request_for, scripted, setting
from toolyard.errors import RecordError
from toolyard.rollout.cluster.journal import ABOUT_TO_CALL, FolderJournals, JournalledCalls, StreamedJournal
from toolyard.rollout.external import StartOverError
from toolyard.rollout.play.play import Play
from toolyard.rollout.run_many import RolloutRun
from toolyard.tools.base import BaseTool, ToolResponse
from toolyard.tools.calls import handle_of
from toolyard.tools.code_interpreter import SandboxFusionTool
from toolyard.tools.function import tool
from toolyard.tools.policy import Recovery


async def certain() -> None:
    pass


class Counter(BaseTool):
    """Counts its calls by instance, so that its answers depend on its state."""

    def __init__(self, **policy: Any) -> None:
        super().__init__({"call": policy}, SCHEMA)
        self.calls = 0
        self.state: dict[str, int] = {}
        self.hangs_at = -1

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any):
        self.calls += 1
        if self.calls == self.hangs_at:
            await asyncio.sleep(3600)
        self.state[instance_id] = self.state.get(instance_id, 0) + 1
        return ToolResponse(text=f"count is {self.state[instance_id]}"), None, {}


SCHEMA = {
    "type": "function",
    "function": {"name": "count", "description": "Count.", "parameters": {"type": "object", "properties": {}}},
}
LINES = [call("count", {}), call("count", {}), call("count", {}), "Done."]


def by_prompt(sampled: list[int]):
    """An engine's script that depends on the prompt alone, as a model does, and counts its turns."""

    def say(request_id: str, turn: int, prompt: list[int]):
        said = TOKENIZER.decode(list(prompt)).count("count is")
        sampled.append(said)
        return LINES[said]

    return say


async def play(counter: BaseTool, journal, lines, **options: Any):
    async with playing(lines, [counter], reward="none", **options) as one:
        one.external = JournalledCalls(journal, one.request.request_id, certain)
        return await one.run()


async def cut_off(counter: Counter, journals: FolderJournals, at: int) -> None:
    """Its machine is lost during a call."""
    counter.hangs_at = at
    journal = journals.open("request")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await play(counter, journal, by_prompt([]))
    counter.hangs_at = -1


async def test_another_machine_goes_on_at_the_same_token_without_repeating_calls(tmp_path: Path):
    journals = FolderJournals(tmp_path)
    whole = await play(Counter(recovery="replay", repeatable=True), journals.open("other"), by_prompt([]))
    first = Counter(recovery="replay", repeatable=True)
    await cut_off(first, journals, at=3)
    second, sampled = Counter(recovery="replay", repeatable=True), []
    second.state = {whole.request_id: 2}
    trajectory = await play(second, journals.open("request"), by_prompt(sampled))
    assert trajectory.tokens == whole.tokens
    assert (second.calls, sampled) == (1, [3])


async def test_calls_that_build_up_state_run_again(tmp_path: Path):
    journals = FolderJournals(tmp_path)
    await cut_off(Counter(recovery="rerun", repeatable=True), journals, at=3)
    second = Counter(recovery="rerun", repeatable=True)
    trajectory = await play(second, journals.open("request"), by_prompt([]))
    assert second.calls == 3
    assert "count is 3" in trajectory.output


@pytest.mark.parametrize("recovery", list(Recovery))
async def test_what_differs_or_cannot_be_built_up_again_starts_over(tmp_path: Path, recovery: Recovery):
    journals = FolderJournals(tmp_path)
    await cut_off(Counter(recovery=recovery, repeatable=True), journals, at=3)
    second = Counter(recovery=recovery, repeatable=True)
    second.state = {}
    journal = journals.open("request")
    if recovery is Recovery.RERUN:
        second.execute = differs  # type: ignore[method-assign]
    if recovery is Recovery.REPLAY:
        assert (await play(second, journal, by_prompt([]))).finish_reason == "stop"
    else:
        with pytest.raises(StartOverError):
            await play(second, journal, by_prompt([]))


async def differs(instance_id: str, parameters: dict[str, Any], **kwargs: Any):
    return ToolResponse(text="something else"), None, {}


async def test_a_run_plays_from_the_beginning_what_cannot_be_continued(tmp_path: Path):
    journals = FolderJournals(tmp_path)
    counter = Counter(repeatable=True)
    async with scripted(by_prompt([])) as engine:
        place = setting(engine, [counter], reward="none")
        request = request_for(place)
        await_cut = Play(request.anew(), place, JournalledCalls(journals.open(request.request_id), "x", certain))
        counter.hangs_at = 2
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await await_cut.run()
        counter.hangs_at, counter.calls = -1, 0
        opened = []

        def calls_for(one):
            opened.append(journals.open(one.request_id))
            return JournalledCalls(opened[-1], one.request_id, certain)

        async with RolloutRun(place, [request], external_calls_for=calls_for) as run:
            (trajectory,) = [one async for one in run]
    assert trajectory.finish_reason == "stop"
    assert len(opened) == 2
    assert opened[1].past == []
    assert counter.calls == 3


async def test_a_call_under_way_is_not_repeated_unless_its_tool_says_so(tmp_path: Path):
    journals = FolderJournals(tmp_path)
    await cut_off(Counter(recovery="replay"), journals, at=2)
    second = Counter(recovery="replay")
    trajectory = await play(second, journals.open("request"), by_prompt([]))
    assert second.calls == 0
    assert trajectory.finish_reason == "tool_failure"
    assert trajectory.failure is not None
    assert "does not say that its calls are repeatable" in trajectory.failure.error


async def test_an_aborted_request_is_continued_as_if_it_had_not_been_aborted(tmp_path: Path):
    journals = FolderJournals(tmp_path)
    counter = Counter(recovery="replay", repeatable=True)
    counter.hangs_at = 2
    async with playing(by_prompt([]), [counter], reward="none") as one:
        journal = journals.open("request")
        one.external = JournalledCalls(journal, one.request.request_id, certain)
        running = asyncio.create_task(one.run())
        while counter.calls < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        one.abort()
        assert (await running).finish_reason == "aborted"
        journal.close(keep=True)
    trajectory = await play(Counter(recovery="replay", repeatable=True), journals.open("request"), by_prompt([]))
    assert trajectory.finish_reason == "stop"


async def test_a_worker_without_a_lease_makes_no_calls(tmp_path: Path):
    waits = asyncio.Event()
    counter = Counter(recovery="replay", repeatable=True)
    async with playing(by_prompt([]), [counter], reward="none") as one:
        one.external = JournalledCalls(FolderJournals(tmp_path).open("request"), one.request.request_id, waits.wait)
        running = asyncio.create_task(one.run())
        await asyncio.sleep(0.1)
        assert counter.calls == 0
        waits.set()
        assert (await running).finish_reason == "stop"


def test_each_worker_writes_a_file_of_its_own_that_begins_with_a_copy(tmp_path: Path):
    journals = FolderJournals(tmp_path)
    first = journals.open("a")
    first.append(b'{"kind":"begin"}')
    second = journals.open("a")
    first.append(b'{"kind":"too late"}')
    second.append(b'{"kind":"sampled"}')
    third = journals.open("a")
    assert [entry["kind"] for entry in third.past] == ["begin", "sampled"]
    third.close(keep=False)
    assert not list(tmp_path.iterdir())


def test_a_copy_that_was_not_finished_hides_nothing(tmp_path: Path):
    journals = FolderJournals(tmp_path)
    first = journals.open("r")
    for number in range(3):
        first.append(f'{{"number":{number}}}'.encode())
    (tmp_path / "r.2").write_bytes(b'{"number":0}\n{"num')  # its worker was killed while it copied
    assert [entry["number"] for entry in journals.open("r").past] == [0, 1, 2]


def test_a_torn_entry_was_not_heard(tmp_path: Path):
    (tmp_path / "a.1").write_bytes(b'{"kind":"begin"}\n{"kind":"sam')
    assert [entry["kind"] for entry in FolderJournals(tmp_path).open("a").past] == ["begin"]


def test_a_full_disk_is_told(tmp_path: Path):
    journal = FolderJournals(tmp_path).open("a")
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, journal._fd)
    os.close(full)
    with pytest.raises(RecordError, match="No space left"):
        journal.append(b"{}")


async def test_a_streamed_journal_tells_what_the_ledger_lacks_and_waits_until_it_has_it():
    pokes = []
    journal = StreamedJournal([b'{"kind":"begin"}'], lambda: pokes.append(1))
    assert journal.unsent() is None
    journal.append(b'{"kind":"' + ABOUT_TO_CALL.encode() + b'"}')
    assert journal.unsent() == (1, (b'{"kind":"about to call"}',))
    settling = asyncio.create_task(journal.settle())
    await asyncio.sleep(0)
    assert pokes
    assert not settling.done()
    journal.sent(2)
    await settling
    assert journal.unsent() is None
    assert journal.unsent(again=True) == (0, (b'{"kind":"begin"}', b'{"kind":"about to call"}'))
    journal.start_over()
    assert journal.unsent() == (0, ())


def test_functions_are_replayed_and_are_not_repeatable_unless_they_say_so():
    @tool
    def double(number: int) -> int:
        """Double it.

        Args:
            number: Any.
        """
        return 2 * number

    def told(one: BaseTool) -> tuple[Recovery, bool]:
        policy = handle_of(one).policy
        return policy.recovery, policy.repeatable

    assert told(double) == (Recovery.REPLAY, False)
    assert told(SandboxFusionTool({"type": "native"}, None)) == (Recovery.REPLAY, True)
    assert told(SandboxFusionTool({"type": "native", "stateful": True}, None)) == (Recovery.RERUN, True)
    assert told(Counter()) == (Recovery.RESTART, False)
