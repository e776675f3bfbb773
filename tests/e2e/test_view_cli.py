"""`toolyard view` as scripts run it: without a terminal, and with files that are not dumps."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from viewing import DAMAGED, demo_dump, demo_lines, write_lines

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

    def test_lines_that_are_none_are_counted_apart(self, tmp_path: Path) -> None:
        dump, report = tmp_path / "0.jsonl", tmp_path / "report.html"
        write_lines(dump, [*demo_lines()[:3], DAMAGED, DAMAGED])
        done = view(dump, "--export", report)
        assert done.returncode == 0
        assert done.stderr.startswith(f"{report}: 3 trajectories, ")
        assert "; 2 lines are damaged (damaged:yes finds them)" in done.stderr

    def test_an_empty_dump_is_none_of_them(self, tmp_path: Path) -> None:
        (tmp_path / "0.jsonl").write_bytes(b"")
        done = view(tmp_path, "--export", tmp_path / "report.html")
        assert (done.returncode, "0 trajectories" in done.stderr) == (0, True)
