"""Writes selected trajectories in the conversational format that TRL's SFTTrainer takes.

    {"messages": […], "tools": "[…]", …}                  language modeling: use `assistant_only_loss`
    {"prompt": […], "completion": […], "tools": "[…]", …}

`tools` is JSON in a string, which TRL decodes: as columns of objects, data sets would add nulls to schemas that differ.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO, Literal

from toolyard.errors import ChatError, ConfigError, RecordError
from toolyard.export.conversations import Conversation, LeftOut, conversation_of
from toolyard.export.rendering import Match, PlainWriting, TemplateWriting, Written
from toolyard.messages import JSON
from toolyard.records.jsonl import encode
from toolyard.records.lines import trajectory_of
from toolyard.viewer.library import Library
from toolyard.viewer.protocol import Attempt
from toolyard.viewer.query import DAMAGED, Query
from toolyard.whole_file import whole_file

Format = Literal["messages", "prompt-completion"]
Progress = Callable[[int, int], None]
"""Called with the trajectories looked at, and all of them."""
_REPORTED = 200


@dataclass(frozen=True, slots=True)
class SftRules:
    """Which trajectories are exported, and how."""

    format: Format = "messages"
    per_task: int | None = None
    """At most so many per task: those with the highest scores; the seed decides between equal ones."""
    limit: int | None = None
    keep_duplicates: bool = False
    exact: bool = False
    """Only conversations that the template renders to the sampled tokens."""
    seed: int = 0


@dataclass(slots=True)
class SftSummary:
    """The result of `write_sft`."""

    conversations: int = 0
    tasks: int = 0
    runs: tuple[str, ...] = ()
    """Names of the folders that matching trajectories are in; empty for the dump's own."""
    size: int = 0
    """In bytes."""
    left_out: Counter[LeftOut] = field(default_factory=Counter[LeftOut])
    torn: int = 0
    """Files whose last line is incomplete."""
    over_limit: int = 0
    """Left out, because their task, or the file, has enough."""
    matches: Counter[Match] = field(default_factory=Counter[Match])
    """Empty without a tokenizer."""
    difference: str = ""
    """The first conversation that the template renders differently."""
    with_calls: int = 0
    with_examples: int = 0
    """Conversations whose prompt has messages of an assistant."""


def write_sft(
    library: Library,
    path: Path,
    query: Query,
    writing: PlainWriting | TemplateWriting,
    rules: SftRules | None = None,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> SftSummary:
    """Write the matching trajectories to the file `path`, which appears when it is complete. The same arguments write
    the same bytes.

    Raises:
        ConfigError: the file exists, cannot be written or belongs to the dump, or there is nothing to write.
    """
    rules = rules or SftRules()
    if rules.exact and isinstance(writing, PlainWriting):
        raise ConfigError("exact: the tokens can only be compared with a tokenizer")
    if library.has_file(path):
        raise ConfigError(f"{path} belongs to the dump; choose another name")
    with whole_file(path, overwrite=overwrite) as file:
        attempts = library.attempts(query)
        done = _Export(library, writing, rules, file).run(attempts, progress)
        done.runs = tuple(sorted({attempt.run for attempt in attempts}))
        done.torn = library.torn
        unseen = {LeftOut.DAMAGED: library.count(DAMAGED), LeftOut.BRANCH: len(library.scores(query)) - len(attempts)}
        done.left_out += Counter(unseen)
        if not done.conversations:
            why = ", ".join(f"{count} {reason}" for reason, count in done.left_out.most_common())
            raise ConfigError(f"no trajectory can be exported: {why or 'none matches the query'}")
    return done


class _Export:
    def __init__(
        self, library: Library, writing: PlainWriting | TemplateWriting, rules: SftRules, file: BinaryIO
    ) -> None:
        self._library, self._writing, self._rules, self._file = library, writing, rules, file
        self._seen: set[bytes] = set()
        self._done = SftSummary()

    def run(self, attempts: Sequence[Attempt], progress: Progress | None) -> SftSummary:
        done, reported, looked_at = self._done, 0, 0
        for candidates in _by_task(attempts, self._rules.seed):
            taken = 0
            lines = self._library.read([candidate.number for candidate in candidates])
            for position in range(len(candidates)):
                if taken == self._rules.per_task or done.conversations == self._rules.limit:
                    done.over_limit += len(candidates) - position
                    break
                left_out = self._write(next(lines, None))
                if left_out is None:
                    taken += 1
                else:
                    done.left_out[left_out] += 1
            done.tasks += bool(taken)
            looked_at += len(candidates)
            if progress is not None and (looked_at - reported >= _REPORTED or looked_at == len(attempts)):
                progress(looked_at, len(attempts))
                reported = looked_at
        return done

    def _write(self, line: bytes | None) -> LeftOut | None:
        """Write one conversation, or return why it is left out."""
        try:
            found = LeftOut.DAMAGED if line is None else conversation_of(trajectory_of(line))
        except RecordError:
            return LeftOut.DAMAGED
        if isinstance(found, LeftOut):
            return found
        try:
            written = self._writing.write(found)
        except ChatError as error:
            self._done.difference = self._done.difference or f"{found.trajectory.request_id}: {error}"
            return LeftOut.NOT_EXACT
        digest = blake2b(encode(written[:2], sort=True), digest_size=16).digest()
        if digest in self._seen and not self._rules.keep_duplicates:
            return LeftOut.DUPLICATE
        if isinstance(self._writing, TemplateWriting):
            match, difference = self._writing.match(found, written)
            if self._rules.exact and match is not Match.EXACT:
                return LeftOut.NOT_EXACT
            self._done.matches[match] += 1
            if difference:
                self._done.difference = self._done.difference or f"{found.trajectory.request_id}: {difference}"
        self._seen.add(digest)
        self._count(found, self._file.write(encode(self._row(found, written)) + b"\n"))
        return None

    def _row(self, found: Conversation, written: Written) -> JSON:
        trajectory = found.trajectory
        if self._rules.format == "messages":
            row: JSON = {"messages": [*written.prompt, *written.completion]}
        else:
            row = {"prompt": written.prompt, "completion": written.completion}
        if written.tools:
            row["tools"] = encode(written.tools).decode()
        return {**row, "task": trajectory.batch_data_id, "request_id": trajectory.request_id, "score": trajectory.score}

    def _count(self, found: Conversation, size: int) -> None:
        self._done.conversations += 1
        self._done.size += size
        self._done.with_calls += found.has_calls
        self._done.with_examples += any(message.role == "assistant" for message in found.prompt)


def _by_task(attempts: Sequence[Attempt], seed: int) -> Iterator[list[Attempt]]:
    """The attempts of each task, the best first; tasks in the order of their first lines."""
    tasks: dict[tuple[str, int, str], list[Attempt]] = {}
    for attempt in attempts:
        tasks.setdefault(attempt.task_key, []).append(attempt)
    chance = random.Random(seed)  # noqa: S311
    for found in tasks.values():
        order = [chance.random() for _ in found]
        ranked = sorted(
            zip(found, order, strict=True), key=lambda one: (one[0].score is None, -(one[0].score or 0.0), one[1])
        )
        yield [attempt for attempt, _ in ranked]
