"""The exact-token audit: checks that a trajectory's tokens are those the model sampled and saw, and that its parts
agree.

It reads one trajectory and does no I/O. A tokenizer is needed only to check and show texts. Time is linear in the
number of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from toolyard.messages import Message
from toolyard.records.differences import excerpt, first_index, text_difference
from toolyard.records.trajectory import Tokens, Trajectory, Turn, session_of
from toolyard.tokens import ids_crc

Decode = Callable[[Sequence[int]], str]
"""Turns ids into text. Raises an exception of any kind for an id that the tokenizer does not have."""

_NO_LOGPROB = -9999.0
"""Some servers return this value for a missing logprob."""
_LOGPROB_TOLERANCE = 1e-3
"""Engines compute in 16 bits: the logprob of a certain token may come out slightly above 0."""
_CONTEXT_IDS = 8


class ProblemKind(StrEnum):
    """What can be wrong with a trajectory."""

    UNREADABLE = "unreadable"
    """The line is not a trajectory. Only in dumps."""
    DUPLICATE = "duplicate"
    """Two lines of a file have the same request id. Only in dumps."""
    LENGTHS = "lengths"
    """Ids, mask and logprobs of the response differ in length."""
    IDS = "ids"
    """A token id is not an integer ≥ 0, or, with a tokenizer, not in its vocabulary."""
    SPANS = "spans"
    """The sampled spans of the turns are out of order, overlap, or lie outside the response."""
    MASK = "mask"
    """The mask does not match the sampled spans of the turns."""
    LOGPROBS = "logprobs"
    """The logprob of a sampled token is not a valid logprob, or that of another token is not 0."""
    PROMPT = "prompt"
    """A turn was sampled from a prompt other than the tokens before it."""
    MISSING = "missing"
    """There is text or a turn without tokens, or there are tokens without a turn."""
    STOP = "stop"
    """A turn's finish is stop, but it does not end with its stop token or stop text."""
    MESSAGES = "messages"
    """The messages do not match the turns."""
    OUTCOME = "outcome"
    """State, failure and score contradict each other."""
    TEXT = "text"
    """`input` or `output` does not match the decoded tokens. Only with a tokenizer."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem that the audit found."""

    kind: ProblemKind
    where: str
    """The field, such as `turns[1].sampled` or `tokens.response_mask[17]`."""
    message: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.where}: {self.message}"


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where ids differ from the expected ones."""

    index: int
    expected: int
    found: int | None
    """None if the ids end there."""
    before: str
    """What precedes it in both: text if it could be decoded, otherwise ids. So are the next two."""
    expected_next: str
    found_next: str

    def __str__(self) -> str:
        found = "the end" if self.found is None else str(self.found)
        return (
            f"at {self.index}: expected {self.expected} {self.expected_next}, found {found} {self.found_next}, "
            f"after {self.before}"
        )


def try_decode(ids: Sequence[int], decode: Decode) -> str | None:
    """The text of `ids`; None if the tokenizer does not have one of them."""
    try:
        return decode(ids)
    except Exception:
        return None


def check_extension(
    expected_prefix: Sequence[int], ids: Sequence[int], decode: Decode | None = None
) -> Difference | None:
    """Check that `ids` starts with `expected_prefix`. Returns the first difference, or None."""
    length = len(expected_prefix)
    prefix = expected_prefix if isinstance(expected_prefix, list) else list(expected_prefix)
    beginning = ids[:length]
    if (beginning if isinstance(beginning, list) else list(beginning)) == prefix:
        return None
    at = first_index(prefix, beginning)
    assert at is not None
    end = at + _CONTEXT_IDS
    return Difference(
        index=at,
        expected=expected_prefix[at],
        found=ids[at] if at < len(ids) else None,
        before=_say(expected_prefix[max(0, at - _CONTEXT_IDS) : at], decode),
        expected_next=_say(expected_prefix[at:end], decode),
        found_next=_say(ids[at:end], decode),
    )


def audit(trajectory: Trajectory, decode: Decode | None = None, vocab_size: int | None = None) -> list[Problem]:
    """Return all problems; an empty list means that the trajectory can be trained on.

    `decode` and `vocab_size` are those of the model's tokenizer.

    Tokens are checked only if `token_exact` is set. A check that depends on one that failed is skipped: spans outside
    the response say nothing about its mask.
    """
    problems = list(_outcome(trajectory))
    problems += _messages(trajectory.messages, trajectory.turns, bool(session_of(trajectory)))
    if trajectory.token_exact:
        problems += _tokens(trajectory, decode, vocab_size)
    return problems


# Tokens ---------------------------------------------------------------------------------------------------------------


def _tokens(trajectory: Trajectory, decode: Decode | None, vocab_size: int | None) -> Iterator[Problem]:
    tokens, turns = trajectory.tokens, trajectory.turns
    ids = (("prompt_ids", tokens.prompt_ids), ("response_ids", tokens.response_ids))
    shape = [*_lengths(tokens), *(problem for name, some in ids for problem in _ids(name, some, vocab_size))]
    spans = list(_spans(turns, len(tokens.response_ids)))
    yield from (*shape, *spans, *_missing(trajectory))
    if not shape and not spans:
        yield from _mask(tokens, turns)
        yield from _logprobs(tokens, turns)
        yield from _stops(tokens, turns)
    if not any(problem.kind is ProblemKind.IDS for problem in shape):
        if not spans:
            yield from _prompts(tokens, turns, decode)
        if decode is not None:
            yield from _text("input", trajectory.input, tokens.prompt_ids, decode)
            yield from _text("output", trajectory.output, tokens.response_ids, decode)


def _lengths(tokens: Tokens) -> Iterator[Problem]:
    expected = len(tokens.response_ids)
    for name, values in (("response_mask", tokens.response_mask), ("response_logprobs", tokens.response_logprobs)):
        if values is not None and len(values) != expected:
            message = f"has {len(values)} values for {expected} response_ids"
            yield Problem(ProblemKind.LENGTHS, f"tokens.{name}", message)


def _ids(name: str, ids: Sequence[int], vocab_size: int | None) -> Iterator[Problem]:
    most = 1 << 63 if vocab_size is None else vocab_size
    if not ids or (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < most):
        return
    at = next(at for at, one in enumerate(ids) if type(one) is not int or not 0 <= one < most)
    known = "" if vocab_size is None else f" in a vocabulary of {vocab_size}"
    yield Problem(ProblemKind.IDS, f"tokens.{name}[{at}]", f"{ids[at]!r} is not a token id{known}")


def _stops(tokens: Tokens, turns: Sequence[Turn]) -> Iterator[Problem]:
    for at, turn in enumerate(turns):
        sampled, where = turn.sampled, f"turns[{at}].sampled.stopped_by"
        if sampled.finish != "stop" or sampled.stopped_by == "":
            continue
        last = tokens.response_ids[sampled.end - 1] if sampled.end > sampled.start else None
        if sampled.stopped_by is None:
            yield Problem(ProblemKind.STOP, where, "the turn stopped, but not at a stop token or stop text")
        elif isinstance(sampled.stopped_by, int) and sampled.stopped_by != last:
            yield Problem(ProblemKind.STOP, where, f"is the token {sampled.stopped_by}, but the turn ends with {last}")
        elif isinstance(sampled.stopped_by, str) and sampled.stopped_by not in sampled.text:
            yield Problem(ProblemKind.STOP, where, f"is {sampled.stopped_by!r}, which is not in the turn")


def _spans(turns: Sequence[Turn], length: int) -> Iterator[Problem]:
    end = 0
    for at, turn in enumerate(turns):
        span = turn.sampled
        if span.start < end or span.end < span.start or span.end > length:
            expected = f"expected {end} <= start <= end <= {length}"
            yield Problem(ProblemKind.SPANS, f"turns[{at}].sampled", f"start {span.start}, end {span.end}; {expected}")
        end = max(end, span.end)


def _missing(trajectory: Trajectory) -> Iterator[Problem]:
    tokens, turns = trajectory.tokens, trajectory.turns
    if turns and not tokens.prompt_ids:
        yield Problem(ProblemKind.MISSING, "tokens.prompt_ids", "is empty, but there are turns")
    if tokens.response_ids and not turns:
        message = f"is empty, but there are {len(tokens.response_ids)} response_ids"
        yield Problem(ProblemKind.MISSING, "turns", message)
    for name, text, ids in (
        ("prompt_ids", trajectory.input, tokens.prompt_ids),
        ("response_ids", trajectory.output, tokens.response_ids),
    ):
        if text and not ids:
            said = "input" if name == "prompt_ids" else "output"
            yield Problem(ProblemKind.MISSING, f"tokens.{name}", f"is empty, but the {said} is {excerpt(text)}")


def _pieces(turns: Sequence[Turn], length: int) -> Iterator[tuple[int, int, bool]]:
    """Split the response into sampled and given pieces: start, end, whether it was sampled."""
    end = 0
    for turn in turns:
        yield end, turn.sampled.start, False
        yield turn.sampled.start, turn.sampled.end, True
        end = turn.sampled.end
    yield end, length, False


def _mask(tokens: Tokens, turns: Sequence[Turn]) -> Iterator[Problem]:
    mask = tokens.response_mask
    wanted: list[int] = []
    for start, end, sampled in _pieces(turns, len(mask)):
        wanted += [int(sampled)] * (end - start)
    if mask == wanted and set(map(type, mask)) <= {int}:
        return
    at = next(at for at, one in enumerate(mask) if type(one) is not int or one != wanted[at])
    why = "a turn sampled that token" if wanted[at] else "no turn sampled that token"
    yield Problem(ProblemKind.MASK, f"tokens.response_mask[{at}]", f"is {mask[at]!r}; expected {wanted[at]}, as {why}")


def _logprobs(tokens: Tokens, turns: Sequence[Turn]) -> Iterator[Problem]:
    logprobs = tokens.response_logprobs
    if logprobs is None:
        return
    pieces = list(_pieces(turns, len(logprobs)))
    given = (logprobs[start:end] for start, end, sampled in pieces if not sampled)
    if are_logprobs(logprobs) and not any(map(any, given)):
        return
    for start, end, sampled in pieces:
        piece = logprobs[start:end]
        good = are_logprobs(piece) if sampled else piece == [0.0] * len(piece)
        if good:
            continue
        at = start + next(at for at, one in enumerate(piece) if not (are_logprobs([one]) if sampled else one == 0))
        why = "the logprob of a sampled token must be a number ≤ 0" if sampled else "that token was not sampled"
        yield Problem(ProblemKind.LOGPROBS, f"tokens.response_logprobs[{at}]", f"is {logprobs[at]!r}, but {why}")
        return


def are_logprobs(values: Sequence[float]) -> bool:
    """Whether all values are valid logprobs."""
    if not values:
        return True
    if not set(map(type, values)) <= {float, int}:
        return False
    if max(values) > _LOGPROB_TOLERANCE or min(values) <= _NO_LOGPROB:
        return False
    total = sum(values)
    return total == total  # max and min can miss a NaN; the sum cannot


def _prompts(tokens: Tokens, turns: Sequence[Turn], decode: Decode | None) -> Iterator[Problem]:
    """Each prompt must be the previous prompt, its sampled tokens, and the tokens given after them. Compared by running
    checksums."""
    crc, done = ids_crc(tokens.prompt_ids), 0
    for at, turn in enumerate(turns):
        start = turn.sampled.start
        crc, done = ids_crc(tokens.response_ids[done:start], crc), start
        if crc != turn.sampled.prompt_crc:
            where = f"turns[{at}].sampled.prompt_crc"
            yield Problem(ProblemKind.PROMPT, where, _other_prompt(tokens, turn, crc, decode))
            return  # later turns build on this one


def _other_prompt(tokens: Tokens, turn: Turn, crc: int, decode: Decode | None) -> str:
    start, asked = turn.sampled.start, turn.sampled.prompt_crc
    ids = [*tokens.prompt_ids, *tokens.response_ids]
    expected = len(tokens.prompt_ids) + start
    end = _say(ids[max(0, expected - _CONTEXT_IDS) : expected], decode)
    said = f"the engine's prompt (crc {asked}) is not the {expected} ids before this turn (crc {crc}), ending in {end}"
    length = _length_of(ids, asked)
    if length is None:
        return said
    end = _say(ids[max(0, length - _CONTEXT_IDS) : length], decode)
    return f"{said}: it is the first {length} ids, ending in {end}"


def _length_of(ids: list[int], crc: int) -> int | None:
    """The length of the prefix with that checksum, if any."""
    running = 0
    for at in range(len(ids)):
        running = ids_crc(ids[at : at + 1], running)
        if running == crc:
            return at + 1
    return None


def _text(name: str, text: str, ids: Sequence[int], decode: Decode) -> Iterator[Problem]:
    try:
        said = decode(ids)
    except Exception as error:
        message = f"the tokenizer cannot decode its tokens: {type(error).__name__}: {str(error)[:200]}"
        yield Problem(ProblemKind.TEXT, name, message)
        return
    if (found := text_difference(said, text)) is not None:
        at, expected, is_now = found
        yield Problem(
            ProblemKind.TEXT, name, f"differs from its tokens at character {at}: {is_now}, tokens: {expected}"
        )


def _say(ids: Sequence[int], decode: Decode | None) -> str:
    text = try_decode(ids, decode) if decode is not None and ids else None
    return str(list(ids)) if text is None else repr(text)  # unknown ids are the very problem to show


# The rest -------------------------------------------------------------------------------------------------------------


def _outcome(trajectory: Trajectory) -> Iterator[Problem]:
    state, failure, score = trajectory.state, trajectory.failure, trajectory.score
    if state == "FAILED":
        if failure is None:
            yield Problem(ProblemKind.OUTCOME, "failure", "is missing, but the state is FAILED")
        if score is not None:
            yield Problem(ProblemKind.OUTCOME, "score", f"is {score!r}, but the state is FAILED")
    elif state == "COMPLETED":
        if failure is not None:
            message = f"is set, but the state is COMPLETED: {excerpt(failure.error)}"
            yield Problem(ProblemKind.OUTCOME, "failure", message)
        if score is not None and not math.isfinite(score):
            yield Problem(ProblemKind.OUTCOME, "score", f"is {score!r}, not a finite number")
    else:
        yield Problem(ProblemKind.OUTCOME, "state", f"is {state!r}, expected COMPLETED or FAILED")


def _messages(messages: Sequence[Message], turns: Sequence[Turn], of_an_agent: bool) -> Iterator[Problem]:
    """The last assistant messages must be those of the turns; the prompt may contain others before them. That of an
    agent, which may have compacted its history, may end with the result of a call."""
    if not turns:
        return
    spoken = [at for at, message in enumerate(messages) if message.role == "assistant"]
    if len(spoken) < len(turns):
        message = f"{len(turns)} turns, but {len(spoken)} assistant messages"
        yield Problem(ProblemKind.MESSAGES, "messages", message)
        return
    begins = spoken[-len(turns) :]
    wrong = ("assistant",) if of_an_agent else ("assistant", "tool")
    if begins[0] > 0 and (role := messages[begins[0] - 1].role) in wrong:
        message = (
            f"more assistant messages than turns ({len(turns)}): a prompt does not end with a message of role {role}"
        )
        yield Problem(ProblemKind.MESSAGES, f"messages[{begins[0] - 1}]", message)
    for at, (turn, begin, end) in enumerate(zip(turns, begins, [*begins[1:], len(messages)], strict=True)):
        answered = [message.tool_call_id for message in messages[begin + 1 : end] if message.role == "tool"]
        called = [call.id for call in turn.tool_calls]
        # A malformed call may have been answered without a tool message. In the last turn, calls may be unanswered,
        # because the request ended there.
        needed = [] if at == len(turns) - 1 else [call.id for call in turn.tool_calls if call.outcome != "malformed"]
        if not _is_subsequence(answered, called) or not _is_subsequence(needed, answered):
            message = f"called {called}, but answered {answered}"
            yield Problem(ProblemKind.MESSAGES, f"turns[{at}].tool_calls", message)


def _is_subsequence(some: Sequence[str | None], all_of: Sequence[str | None]) -> bool:
    rest = iter(all_of)
    return all(one in rest for one in some)
