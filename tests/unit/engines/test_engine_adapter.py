"""LoRA adapters: merged without PEFT, they do what PEFT does with them; what cannot be merged is refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from late import Late
from toolyard.engines.models import resolve_model
from toolyard.engines.protocol import Sampling
from toolyard.errors import ConfigError
from toolyard.rollout.assembly import open_rollout
from toolyard.rollout.config import load_config

engines = Late("toolyard.engines.transformers.engine")
torch = Late("torch")
transformers = Late("transformers")
peft = Late("peft")
safetensors_torch = Late("safetensors.torch")
adapters = Late("toolyard.engines.transformers.adapter")

VOCABULARY = 64
IDS = [[(7 * at + 3) % VOCABULARY for at in range(24)]]
EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def write_llama(folder: Path, *, tied: bool = False) -> Path:
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_gpt2(folder: Path) -> Path:
    torch.manual_seed(6)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=128, initializer_range=0.2
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"t{n}": n for n in range(VOCABULARY)}, unk_token="t0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="t1").save_pretrained(folder)


def write_adapter(folder: Path, base: Path, dtype: str = "float32", **settings: object) -> Path:
    """As after training: neither of the two matrices is zero."""
    torch.manual_seed(7)
    model = peft.get_peft_model(of(base), peft.LoraConfig(**{"target_modules": EVERY, "r": 4, **settings}))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.normal_(std=0.05)
    # If embeddings have an adapter, PEFT would save their own weights too.
    model.to(getattr(torch, dtype)).save_pretrained(folder, save_embedding_layers=False)
    return folder


def of(base: Path):
    return transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()


def logits(model):
    with torch.no_grad():
        return model(torch.tensor(IDS)).logits


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tmp_path_factory.mktemp("adapter"), base)


# Equality -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"lora_alpha": 32},
        {"use_rslora": True, "r": 8, "lora_alpha": 16},
        {"rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.up_proj": 6}, "alpha_pattern": {"^model.layers.0.*": 3}},
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": EVERY, "layers_to_transform": [1]},
        {"target_modules": r".*\.mlp\..*_proj", "fan_in_fan_out": False, "init_lora_weights": "gaussian"},
        {"dtype": "bfloat16"},
        {"dtype": "float16", "lora_dropout": 0.1},
    ],
    ids=lambda settings: ",".join(settings) or "default",
)
def test_merged_logits_are_those_of_peft(base, tmp_path, settings):
    folder = write_adapter(tmp_path / "adapter", base, **settings)
    model, plain = of(base), logits(of(base))
    adapters.read_adapter(folder).merge_into(model)
    theirs = peft.PeftModel.from_pretrained(of(base), folder).eval()
    expected = logits(theirs)
    assert (logits(model) - expected).abs().max() < 1e-5
    merged = theirs.merge_and_unload().state_dict()
    assert all((value - merged[name]).abs().max() < 1e-6 for name, value in model.state_dict().items())
    assert (expected - plain).abs().max() > 0.01, "the adapter does something"


@pytest.mark.parametrize("fan_in_fan_out", [True, False])
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
def test_layers_whose_weights_lie_the_other_way_are_merged_as_peft_does(tmp_path, fan_in_fan_out):
    """GPT-2's. `c_proj` of its attention is square: only the layer itself shows its orientation."""
    base = write_gpt2(tmp_path / "base")
    targets = ["c_attn", "c_proj", "c_fc"]
    folder = write_adapter(tmp_path / "adapter", base, target_modules=targets, fan_in_fan_out=fan_in_fan_out)
    model = of(base)
    adapters.read_adapter(folder).merge_into(model)
    expected = logits(peft.PeftModel.from_pretrained(of(base), folder).eval())
    assert (logits(model) - expected).abs().max() < 1e-5


async def test_the_engine_samples_from_the_model_with_its_adapter(base, adapter):
    async with engines.TransformersEngine(base, adapter=str(adapter), device="cpu") as engine:
        found = await engine.generate(IDS[0], Sampling(max_tokens=8, temperature=0), request_id="r")
    model = peft.PeftModel.from_pretrained(of(base), adapter).eval()
    ids = torch.tensor([[*IDS[0], *found.token_ids]])
    with torch.no_grad():
        scores = model(ids).logits[0].log_softmax(1)[len(IDS[0]) - 1 : -1]
    assert scores.argmax(1).tolist() == list(found.token_ids)
    right = scores.gather(1, torch.tensor(found.token_ids)[:, None])[:, 0]
    assert (torch.tensor(found.logprobs) - right).abs().max() < 1e-5


async def test_an_adapter_is_merged_into_weights_of_half_precision(base, adapter):
    """Rounded once, after the sum."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    before = model.model.layers[0].mlp.up_proj.weight.float()
    found = adapters.read_adapter(adapter)
    found.merge_into(model)
    right = (before + found.updates["model.layers.0.mlp.up_proj"].delta()).bfloat16()
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, right)


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "lora_only"}, "bias 'lora_only'"),
        ({"modules_to_save": ["lm_head"], "target_modules": ["q_proj"]}, "modules_to_save"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
        ({"target_modules": ["embed_tokens"]}, "lora_embedding_A"),
    ],
)
def test_what_cannot_be_merged_is_refused_by_name_with_the_way_out(base, tmp_path, settings, named):
    folder = write_adapter(tmp_path / "adapter", base, **settings)
    with pytest.raises(ConfigError, match=rf"{tmp_path}.*{named}.*merge_and_unload"):
        adapters.read_adapter(folder)


def changed(adapter: Path, folder: Path, config: dict | None = None, tensors=lambda found: None) -> Path:
    """A copy of an adapter, with some of its settings and tensors in another way."""
    shutil.copytree(adapter, folder)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | (config or {})))
    found = safetensors_torch.load_file(folder / "adapter_model.safetensors")
    tensors(found)
    safetensors_torch.save_file(found, folder / "adapter_model.safetensors")
    return folder


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_"


@pytest.mark.parametrize(
    ("config", "tensors", "named"),
    [
        ({"lora_bias": True}, lambda found: None, "lora_bias True"),
        ({"layer_replication": [[0, 2], [1, 2]]}, lambda found: None, "layer_replication"),
        ({"peft_type": "LOHA"}, lambda found: None, "peft_type 'LOHA'"),
        ({"of_the_year_2030": {"on": True}}, lambda found: None, "of_the_year_2030"),
        ({"r": 5}, lambda found: None, "the rank 5"),
        ({"lora_alpha": None}, lambda found: None, "lora_alpha"),
        ({}, lambda found: found.pop(f"{Q}B.weight"), "q_proj' needs both"),
        ({}, lambda found: found.pop(f"{Q}A.weight"), r"q_proj\.lora_B\.weight': not supported"),
        ({}, lambda found: found.update({"lm_head.bias": torch.zeros(1)}), r"'lm_head\.bias': not supported"),
        ({}, lambda found: found.clear(), "is empty"),
    ],
)
def test_nothing_in_the_files_is_passed_over(adapter, tmp_path, config, tensors, named):
    with pytest.raises(ConfigError, match=named):
        adapters.read_adapter(changed(adapter, tmp_path / "adapter", config, tensors))


@pytest.mark.parametrize("content", [None, b"", b"not a tensor file at all"])
def test_a_file_that_cannot_be_read_is_named(adapter, tmp_path, content):
    folder = changed(adapter, tmp_path / "adapter")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (folder / name).unlink()
        if content is not None:
            (folder / name).write_bytes(content)
        with pytest.raises(ConfigError, match=name):
            adapters.read_adapter(folder)


def test_an_adapter_of_another_model_changes_nothing(base, adapter, tmp_path):
    def merge(tensors) -> None:
        model = of(base)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        folder = changed(adapter, tmp_path / f"adapter-{len(list(tmp_path.iterdir()))}", {}, tensors)
        try:
            adapters.read_adapter(folder).merge_into(model)
        finally:
            assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    def renamed(found) -> None:
        for end in ("A.weight", "B.weight"):
            found[f"{Q}{end}".replace("layers.0", "layers.9")] = found.pop(f"{Q}{end}")

    with pytest.raises(ConfigError, match=r"no module 'model\.layers\.9\.self_attn\.q_proj'"):
        merge(renamed)
    with pytest.raises(ConfigError, match=r"q_proj' is \[32, 32\] in the model, but \[32, 31\] in the adapter"):
        merge(lambda found: found.update({f"{Q}A.weight": torch.ones(4, 31)}))


def test_weights_that_two_modules_share_are_not_changed_for_one(tmp_path):
    base = write_llama(tmp_path / "base", tied=True)
    torch.manual_seed(1)
    with pytest.warns(UserWarning, match="tie_word_embeddings"):
        folder = write_adapter(tmp_path / "adapter", base, target_modules=["lm_head"])
    with pytest.raises(ConfigError, match="lm_head' shares its weights"):
        adapters.read_adapter(folder).merge_into(of(base))


async def test_an_engine_with_a_wrong_adapter_says_so_when_it_is_entered(base, tmp_path):
    with pytest.raises(ConfigError, match=r"adapter_config\.json"):
        await engines.TransformersEngine(base, adapter=tmp_path, device="cpu").__aenter__()


def test_an_adapter_in_the_place_of_a_model_is_recognised(adapter):
    with pytest.raises(ConfigError, match=r"engine\.adapter"):
        resolve_model(adapter)


# Settings -------------------------------------------------------------------------------------------------------------


async def test_a_run_takes_an_adapter_by_its_settings(base, adapter):
    settings = [f"engine.model={base}", "chat.format=hermes", "engine.device=cpu"]
    template = base / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.content }} {% endfor %}")
    settings.append(f"chat.chat_template={template}")
    with pytest.raises(ConfigError, match=r"adapter .*nowhere: adapter_config\.json cannot be read"):
        async with open_rollout(load_config(None, [*settings, "engine.adapter=nowhere"])):
            pass
    with pytest.raises(ConfigError, match=rf"engine\.adapter '{adapter}': only transformers can merge one, not sglang"):
        async with open_rollout(
            load_config(None, [*settings, f"engine.adapter={adapter}", "engine.kind=sglang", "engine.urls=[http://x]"])
        ):
            pass
    async with open_rollout(load_config(None, [*settings, f"engine.adapter={adapter}"])) as opened:
        assert opened.setting.speaker is not None
