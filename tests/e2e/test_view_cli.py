"""`toolyard view` as scripts run it: without a terminal, and with files that are not dumps."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from viewing import DAMAGED, demo_dump, demo_lines, write_lines

from toolyard.cli.view.run import copy_selection
from toolyard.viewer.library import Library

TOOLYARD = str(Path(sys.executable).with_name("toolyard"))
SECONDS = 60
STREAMS = ("stdin", "stdout", "stderr")


def view(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [TOOLYARD, "view", *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


@pytest.fixture
def noise(tmp_path: Path) -> Path:
    """Bytes that are no dump, over several lines."""
    path = tmp_path / "noise.jsonl"
    path.write_bytes(b"\n".join(random.Random(1).randbytes(200).replace(b"\n", b"") for _ in range(5)) + b"\n")
    return path


class TestWithoutATerminal:
    def test_it_ends_at_once_and_says_what_to_do(self, tmp_path: Path) -> None:
        done = view(demo_dump(tmp_path))
        assert done.returncode == 1
        assert done.stdout == ""
        assert len(done.stderr.splitlines()) == 1
        assert done.stderr.startswith("toolyard: the viewer needs a terminal")
        assert "--web" in done.stderr
        assert "--export FILE" in done.stderr
        assert not (tmp_path / ".toolyard-index").exists()

    @pytest.mark.parametrize("other", STREAMS)
    def test_one_stream_that_is_none_is_enough(self, tmp_path: Path, other: str) -> None:
        demo_dump(tmp_path)
        host, terminal = os.openpty()
        with (tmp_path / "elsewhere").open("w+") as elsewhere:
            streams = dict.fromkeys(STREAMS, terminal) | {other: elsewhere.fileno()}
            done = subprocess.run([TOOLYARD, "view", tmp_path], timeout=SECONDS, **streams)
            os.close(terminal)
            said = (tmp_path / "elsewhere").read_text() if other == "stderr" else os.read(host, 10_000).decode()
            os.close(host)
        assert done.returncode == 1
        assert "needs a terminal" in said
        assert "\x1b[?1049h" not in said  # the alternate screen


class TestWhatIsNoDump:
    @pytest.mark.parametrize("mode", [["--export", "x.html"], ["--web", "--no-browser", "--port", "0"]])
    def test_a_file_without_a_trajectory_is_an_error_that_says_so(
        self, noise: Path, mode: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        done = view(noise, *mode)
        assert done.returncode == 1
        assert done.stderr.startswith(f"toolyard: {noise}: none of its 5 lines is a trajectory; line 1: ")
        assert len(done.stderr.splitlines()) == 1
        assert not (tmp_path / "x.html").exists()

    @pytest.mark.slow
    def test_lines_that_are_none_are_counted_apart(self, tmp_path: Path) -> None:
        dump, report = tmp_path / "0.jsonl", tmp_path / "report.html"
        write_lines(dump, [*demo_lines()[:3], DAMAGED, DAMAGED])
        done = view(dump, "--export", report)
        assert done.returncode == 0
        assert done.stderr.startswith(f"{report}: 3 trajectories, ")
        assert "; 2 lines are damaged (damaged:yes finds them)" in done.stderr

    @pytest.mark.slow
    def test_an_empty_dump_is_none_of_them(self, tmp_path: Path) -> None:
        (tmp_path / "0.jsonl").write_bytes(b"")
        done = view(tmp_path, "--export", tmp_path / "report.html")
        assert (done.returncode, "0 trajectories" in done.stderr) == (0, True)


class TestCopyingASelection:
    def test_it_says_how_many_and_the_copy_is_a_dump(self, tmp_path: Path) -> None:
        dump, copy = demo_dump(tmp_path / "dump", steps=2), tmp_path / "solved.jsonl"
        write_lines(dump / "1.jsonl", [DAMAGED])
        done = view(dump, "--select", "score=1 or damaged:yes sort:-step", "--to", copy)
        solved = [line for line in demo_lines() if line["score"] == 1]
        assert (done.returncode, done.stdout) == (0, "")
        assert done.stderr.startswith(f"{copy}: {2 * len(solved)} trajectories, ")
        assert done.stderr.endswith("MB; 1 damaged line left out\n")
        lines = copy.read_bytes().splitlines(keepends=True)
        whole = [path.read_bytes() for path in (dump / "0.jsonl", dump / "1.jsonl")]
        assert all(line in whole[at < len(solved)] for at, line in enumerate(lines))
        again = view(dump, "--to", copy)
        assert (again.returncode, "--force" in again.stderr) == (1, True)
        assert copy.read_bytes() == b"".join(lines)
        assert view(copy, "--export", tmp_path / "copy.html").stderr.startswith(
            f"{tmp_path / 'copy.html'}: {2 * len(solved)} trajectories"
        )
        audit = subprocess.run([TOOLYARD, "audit", copy], capture_output=True, text=True, timeout=SECONDS)
        assert (audit.returncode, f"{2 * len(solved)} trajectories" in audit.stdout + audit.stderr) == (0, True)

    @pytest.mark.slow
    def test_a_dash_is_standard_output_whose_reader_may_leave(self, tmp_path: Path) -> None:
        dump = demo_dump(tmp_path / "dump")
        done = view(dump, "-q", "line:2..3", "--to", "-")
        assert done.stdout.encode() == b"".join((dump / "0.jsonl").read_bytes().splitlines(keepends=True)[1:3])
        assert done.stderr.startswith("standard output: 2 trajectories, ")
        assert view(dump, "--to", "-", "--limit", 1).stderr.endswith("15 more were left out (--limit)\n")
        left = subprocess.run(
            f"{TOOLYARD} view {dump} --to - | head -c 10", shell=True, capture_output=True, timeout=SECONDS
        )
        assert (left.stdout, b"Traceback" in left.stderr) == (b'{"input": ', False)

    @pytest.mark.parametrize(
        ("options", "why"),
        [
            (["--to", "x.html"], "use --export x.html"),
            (["--to", "x.jsonl", "--web"], "cannot be used together"),
            (["--to", "x.jsonl", "--export", "y.html"], "cannot be used together"),
            (["--to", "x.jsonl", "--select", "scroe<1"], "unknown field 'scroe'"),
        ],
    )
    def test_what_makes_no_sense_is_refused_before_anything_is_written(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], why: str
    ) -> None:
        demo_dump(tmp_path / "dump")
        monkeypatch.chdir(tmp_path)
        done = view("dump", *options)
        assert done.returncode == 1
        assert why in done.stderr
        assert [path.name for path in tmp_path.iterdir()] == ["dump"]
        assert not (tmp_path / "dump" / ".toolyard-index").exists()

    def test_ctrl_c_leaves_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        seen: list[list[str]] = []

        def lines(library: Library, *args: object, **options: object) -> Iterator[bytes]:
            yield b"{}\n"
            seen.append([path.name for path in copies.iterdir()])
            signal.raise_signal(signal.SIGINT)
            yield b"{}\n"

        monkeypatch.setattr(Library, "lines", lines)
        dump, copies = demo_dump(tmp_path / "dump"), tmp_path / "copies"
        copies.mkdir()
        with pytest.raises(typer.Exit) as left:
            copy_selection(dump, copies / "new.jsonl", "", None, force=False)
        assert left.value.exit_code == 130
        assert capsys.readouterr().err == "interrupted; nothing was written\n"
        assert [name.endswith(".part") for name in seen[0]] == [True]
        assert list(copies.iterdir()) == []
