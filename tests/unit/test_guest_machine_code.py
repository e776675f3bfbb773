"""The machine code in the source is what it is said to be there."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from toolyard.sandbox.guest import machine_code, nursery, steps
from toolyard.sandbox.guest.kernel import MACHINE


@pytest.mark.parametrize("text", [steps.CODE, nursery.CODE], ids=["steps", "nursery"])
@pytest.mark.skipif(MACHINE != "x86_64", reason="there is no machine code for this architecture")
def test_the_machine_code_is_what_its_listing_says(text: str, tmp_path: Path) -> None:
    file = tmp_path / "code"
    file.write_bytes(b"".join(code for code, _ in machine_code.listing(text)))
    command = ["objdump", "-D", "-w", "-b", "binary", "-m", "i386:x86-64", "-M", "intel", str(file)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    lines = re.findall(r"^ +[0-9a-f]+:\t([0-9a-f ]+?) *\t(.+?) *$", said, re.MULTILINE)
    assert [(bytes.fromhex(code), " ".join(text.split())) for code, text in lines] == machine_code.listing(text)


@pytest.mark.skipif(MACHINE != "x86_64", reason="there is no machine code for this architecture")
def test_where_the_comments_say_a_part_begins_it_begins() -> None:
    """A number in a comment, as in `; 23: new`, is how many bytes come before."""
    for text in (steps.CODE, nursery.CODE):
        at = 0
        for line, (code, _) in zip(text.strip().splitlines(), machine_code.listing(text), strict=True):
            if said := re.search(r"; ([0-9a-f]+): ", line):
                assert int(said[1], 16) == at, line
            at += len(code)
        assert at <= 4096
