"""What `toolyard audit` does: read a dump, collect problems, and print them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolyard.chat.protocol import Tokenizer
from toolyard.cli.console import print_json, printable
from toolyard.errors import RecordError
from toolyard.records.audit import Problem, ProblemKind, audit
from toolyard.records.dump import dump_files, lines_of, not_a_dump, read_line
from toolyard.records.trajectory import Trajectory

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem and its line."""

    file: str
    line: int
    request_id: str
    problem: Problem


@dataclass(slots=True)
class Findings:
    """Counts of a dump, and its problems."""

    path: str
    limit: int
    files: int = 0
    trajectories: int = 0
    """Lines that can be read: `token_exact` + `not_token_exact` + `bad_trajectories`."""
    token_exact: int = 0
    """They claim to be token-exact, and no problem was found."""
    not_token_exact: int = 0
    """They do not claim to be token-exact, and no problem was found."""
    bad_trajectories: int = 0
    """With at least one problem."""
    tokens: int = 0
    """In token-exact trajectories, including prompts."""
    response_tokens: int = 0
    sampled_tokens: int = 0
    problems: Counter[ProblemKind] = field(default_factory=Counter[ProblemKind])
    first: list[Finding] = field(default_factory=list[Finding])
    """At most `limit`."""

    @property
    def masked_share(self) -> float | None:
        """Share of response tokens that the model did not sample and is not trained on."""
        return 1 - self.sampled_tokens / self.response_tokens if self.response_tokens else None

    def note(self, file: Path, line: int, request_id: str, problems: list[Problem]) -> None:
        for problem in problems:
            self.problems[problem.kind] += 1
            if len(self.first) < self.limit:
                self.first.append(Finding(str(file), line, request_id, problem))

    def count(self, trajectory: Trajectory, *, is_bad: bool) -> None:
        self.trajectories += 1
        if is_bad:
            self.bad_trajectories += 1
        elif not trajectory.token_exact:
            self.not_token_exact += 1
        else:
            tokens = trajectory.tokens
            self.token_exact += 1
            self.tokens += len(tokens.prompt_ids) + len(tokens.response_ids)
            self.response_tokens += len(tokens.response_ids)
            self.sampled_tokens += tokens.response_mask.count(1)


def audit_dump(path: Path, tokenizer: str | None, limit: int, console: Console) -> Findings:
    """Audit all lines, with progress on `console` if it is a terminal.

    Raises:
        RecordError: the dump does not exist or is empty.
        ConfigError: the tokenizer does not exist.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    files = dump_files(path)
    if not files:
        raise RecordError(not_a_dump(path))
    known = _tokenizer(tokenizer)
    seen: set[tuple[Path, str]] = set()
    findings = Findings(str(path), limit, len(files))
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("auditing", total=sum(file.stat().st_size for file in files))
        for file in files:
            for number, line in lines_of(file):
                _check(findings, file, number, line, known, seen)
                progress.update(bar, advance=len(line), description=f"{findings.trajectories} trajectories")
    if not findings.trajectories and not findings.problems:
        raise RecordError(f"{path} has no trajectories: its files are empty")
    return findings


def _check(
    findings: Findings,
    file: Path,
    number: int,
    line: bytes,
    tokenizer: Tokenizer | None,
    seen: set[tuple[Path, str]],
) -> None:
    try:
        trajectory = read_line(file, number, line).trajectory
    except RecordError as error:
        why = str(error).removeprefix(f"{file}:{number}: ")
        findings.note(file, number, "", [Problem(ProblemKind.UNREADABLE, "line", why)])
        return
    decode, size = (None, None) if tokenizer is None else (tokenizer.decode, tokenizer.vocab_size)
    problems = audit(trajectory, decode, size)
    key = file, trajectory.request_id
    if trajectory.request_id and key in seen:
        problems.append(Problem(ProblemKind.DUPLICATE, "request_id", "another line of the file has the same one"))
    seen.add(key)
    findings.count(trajectory, is_bad=bool(problems))
    findings.note(file, number, trajectory.request_id, problems)


def _tokenizer(tokenizer: str | None) -> Tokenizer | None:
    if tokenizer is None:
        return None
    from toolyard.chat.tokenizers.opening import load_tokenizer

    return load_tokenizer(tokenizer)


# Printing -------------------------------------------------------------------------------------------------------------


def print_findings(findings: Findings, console: Console | None) -> int:
    """Print tables to `console`, or JSON to stdout if it is None. Returns the exit status."""
    status = 1 if findings.problems else 0
    if console is None:
        print_json(_fields(findings))
        return status
    if findings.first:
        _print_problems(findings, console)
    _print_table(findings, console)
    return status


def _print_problems(findings: Findings, console: Console) -> None:
    from rich.text import Text

    for found in findings.first:
        request = f" · {found.request_id}" if found.request_id else ""
        console.print(Text(printable(f"{found.file}:{found.line}{request}"), style="bold"), soft_wrap=True)
        console.print(Text(printable(f"  {found.problem}")), soft_wrap=True)
    hidden = findings.problems.total() - len(findings.first)
    if hidden:
        console.print(f"and {hidden} more; --limit {findings.problems.total()} shows all", style="dim")


def _print_table(findings: Findings, console: Console) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    if findings.problems:
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        table.add_column("problem", style="bold red")
        table.add_column("count", justify="right")
        for kind, count in findings.problems.most_common():
            table.add_row(kind.value, f"{count:,}")
        console.print(table)
    bad = f"{findings.bad_trajectories:,} with problems"
    console.print(
        f"{findings.trajectories:,} trajectories in {findings.files:,} {'file' if findings.files == 1 else 'files'}: "
        f"{findings.token_exact:,} token-exact, {findings.not_token_exact:,} not token-exact, "
        + (f"[bold red]{bad}[/]" if findings.bad_trajectories else bad)
    )
    if (share := findings.masked_share) is not None:
        console.print(f"{findings.tokens:,} tokens in the token-exact ones, {share:.1%} of the responses masked")
    if unreadable := findings.problems[ProblemKind.UNREADABLE]:
        console.print(f"{unreadable:,} unreadable {'line' if unreadable == 1 else 'lines'}", style="bold red")
    if not findings.problems:
        console.print("no problems", style="green")


def _fields(findings: Findings) -> dict[str, Any]:
    return {
        "path": findings.path,
        "files": findings.files,
        "trajectories": findings.trajectories,
        "token_exact": findings.token_exact,
        "not_token_exact": findings.not_token_exact,
        "tokens": findings.tokens,
        "response_tokens": findings.response_tokens,
        "sampled_tokens": findings.sampled_tokens,
        "masked_share": findings.masked_share,
        "bad_trajectories": findings.bad_trajectories,
        "problems": {kind.value: count for kind, count in findings.problems.most_common()},
        "first": [
            {
                "file": found.file,
                "line": found.line,
                "request_id": found.request_id,
                "kind": found.problem.kind.value,
                "where": found.problem.where,
                "message": found.problem.message,
            }
            for found in findings.first
        ],
    }
