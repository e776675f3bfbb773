"""Builds the sandbox's C library when Hatch makes a wheel or an editable install.

Without a compiler the installation succeeds, and batches of programs run more slowly; `toolyard doctor` says so.
"""

from __future__ import annotations

import runpy
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = "src/toolyard/sandbox/guest/native"


class GuestLibrary(BuildHookInterface):  # pyright: ignore
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        try:
            runpy.run_path(str(Path(self.root, NATIVE, "build.py")))["build"]()
        except (OSError, subprocess.CalledProcessError) as error:
            Path(self.root, NATIVE, "guest.so").unlink(missing_ok=True)  # of an older source
            reason = getattr(error, "stderr", "") or error
            self.app.display_warning(f"without the sandbox's C library: {reason}")
            return
        build_data["artifacts"].append(f"/{NATIVE}/guest.so")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
