"""The embedded engine as it runs on a GPU: in rows, in a few fixed shapes, and there from CUDA graphs.

Everything but the graphs themselves is tested on the CPU too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from late import Late
from toolyard.engines.protocol import Finish, Generation, Sampling
from toolyard.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from toolyard.engines.transformers.engine import TransformersEngine
    from toolyard.engines.transformers.model import PackedModel

attentions = Late("toolyard.engines.transformers.attention")
batches = Late("toolyard.engines.transformers.batch")
engines = Late("toolyard.engines.transformers.engine")
graphs = Late("toolyard.engines.transformers.graphs")
models = Late("toolyard.engines.transformers.model")
projections = Late("toolyard.engines.transformers.projections")
static = Late("toolyard.engines.transformers.static")
torch = Late("torch")
transformers = Late("transformers")

VOCABULARY = 64
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WINDOWS = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}

COMPILED = (pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"))


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return request.param


def make_model(folder: Path, family: str = "Llama", **changes: object) -> Path:
    torch.manual_seed(5)
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **changes})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny"))


def make(folder: Path, device: str, *, torch_compile: bool = False, **options: Any) -> TransformersEngine:
    """An engine that computes in rows, wherever it runs."""
    engine = engines.TransformersEngine(folder, device=device, dtype="float32", **options)
    engine._load = lambda: load(folder, device, torch_compile=torch_compile)
    return engine


def load(folder: Path, device: str, *, torch_compile: bool = False) -> PackedModel:
    return models.load(folder, device, "float32", is_static=True, torch_compile=torch_compile)


def tokens_of(length: int, seed: int) -> list[int]:
    return torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


async def sample(engine: TransformersEngine, ids: Sequence[int], name: str = "r", **sampling: object) -> Generation:
    wanted = Sampling.model_validate({"max_tokens": 12, "temperature": 1.0, "seed": 1, **sampling})
    async with asyncio.timeout(60):
        return await engine.generate(ids, wanted, request_id=name)


def plain_model(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def assert_exact(plain: Any, prompt: Sequence[int], found: Generation) -> None:
    ids = [*prompt, *found.token_ids]
    with torch.inference_mode():
        scores = plain(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = [float(scores[at - 1, ids[at]]) for at in range(len(prompt), len(ids))]
    assert found.logprobs == pytest.approx(expected, abs=1e-4)


# Exactness ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "prefill_tokens", "torch_compile"),
    [
        ("Llama", 50, False),
        ("Qwen2", 50, False),  # its queries, keys and values have biases
        ("Gemma3Text", 4096, False),
        pytest.param("Llama", 50, True, marks=COMPILED),
    ],
)
async def test_log_probabilities_are_exact_as_requests_come_and_go(
    tmp_path, device, family, prefill_tokens, torch_compile
):
    folder = make_model(tmp_path, family, **(WINDOWS if family == "Gemma3Text" else {}))
    plain = plain_model(folder)

    async def play(engine: TransformersEngine, row: int) -> None:
        """Three turns. Some requests share a prompt, and all have turns of another length."""
        ids = tokens_of((3, 120, 14, 40, 300)[row % 5], row % 5)
        for turn in range(3):
            found = await sample(engine, ids, f"r{row}", seed=row, max_tokens=5 + (7 * row + 3 * turn) % 11)
            assert_exact(plain, ids, found)
            ids = [*ids, *found.token_ids, *tokens_of(2 + 9 * turn + row, turn)]

    options: Any = {"max_batch_size": 9, "prefill_tokens": prefill_tokens, "torch_compile": torch_compile}
    async with make(folder, device, **options) as engine, asyncio.TaskGroup() as tasks:
        for row in range(12):
            tasks.create_task(play(engine, row))


async def test_it_samples_what_the_packed_engine_samples(folder, device):
    prompts = [tokens_of(length, length) for length in (5, 40, 40, 90, 17, 1)]

    async def sampled(engine: TransformersEngine) -> list[Generation]:
        async with engine, asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(sample(engine, ids, f"r{row}", seed=row, max_tokens=30))
                for row, ids in enumerate(prompts)
            ]
        return [one.result() for one in running]

    packed = await sampled(engines.TransformersEngine(folder, device="cpu"))
    in_rows = await sampled(make(folder, device))
    assert [one.token_ids for one in in_rows] == [one.token_ids for one in packed]


async def test_the_next_turn_and_others_of_the_group_compute_only_what_is_new(folder, device):
    prompt = tokens_of(70, 1)
    async with make(folder, device) as engine:
        first = await sample(engine, prompt)
        assert first.cached_tokens == 0
        next_turn = [*prompt, *first.token_ids, *tokens_of(20, 2)]
        assert (await sample(engine, next_turn)).cached_tokens == len(prompt) + len(first.token_ids) - 1
        assert (await sample(engine, prompt, "of the group")).cached_tokens == len(prompt) - 1


async def test_a_request_that_is_aborted_in_its_prompt_leaves_nothing_wrong(folder, device):
    plain, long, short = plain_model(folder), tokens_of(900, 1), tokens_of(30, 2)
    async with make(folder, device, prefill_tokens=16) as engine:
        running = asyncio.ensure_future(sample(engine, long, "long"))
        assert_exact(plain, short, await sample(engine, short, "short"))
        await engine.abort("long")
        assert (await running).finish in (Finish.ABORT, Finish.LENGTH)
        assert_exact(plain, long, await sample(engine, long, "again"))


async def test_weights_that_are_no_numbers_leave_no_trace(folder, device):
    plain, prompt = plain_model(folder), tokens_of(30, 2)
    async with make(folder, device) as engine:
        await engine.update_weights({"model.norm.weight": torch.full((32,), torch.nan)}, "broken")
        with pytest.raises(Exception, match="not finite"):
            await sample(engine, prompt)
        await engine.update_weights({"model.norm.weight": plain.state_dict()["model.norm.weight"]}, "good")
        assert_exact(plain, prompt, await sample(engine, prompt))


async def test_what_is_no_number_in_one_request_fails_no_other(tmp_path, device):
    folder = make_model(tmp_path)
    model = load(folder, device)
    with torch.no_grad():
        model.model.get_input_embeddings().weight[50] = torch.nan
    batch = batches.Batch(model, most=8, prefill_tokens=100, cache_tokens=10_000)
    found = run(batch, [[3, 4, 5], [3, 50, 5]], 1)  # both end in the same step, and the second has moved by then
    assert [isinstance(one, EngineError) for one in found] == [False, True]
    found = run(batch, [[3, 4, 5], [7, 8, 9]], 1)
    assert not [one for one in found if isinstance(one, EngineError)]


# New weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("torch_compile", [False, pytest.param(True, marks=COMPILED)])
async def test_new_weights_are_used_whether_they_are_copied_or_replaced(folder, device, torch_compile):
    plain, prompt = plain_model(folder), tokens_of(40, 3)
    name = "model.layers.1.mlp.up_proj.weight"

    def replace(model: Any) -> None:
        """Puts a weight elsewhere in memory, where graphs would not find it."""
        weight = model.model.layers[1].mlp.up_proj.weight
        model.model.layers[1].mlp.up_proj.weight = torch.nn.Parameter(weight + 0.2, requires_grad=False)

    async with make(folder, device, torch_compile=torch_compile) as engine:
        for turn in range(3):  # enough for graphs
            assert_exact(plain, prompt, await sample(engine, prompt, f"before {turn}"))
        changed = plain.state_dict()[name] + 0.3
        await engine.update_weights({name: changed}, "copied")
        plain.load_state_dict({name: changed}, strict=False)
        assert_exact(plain, prompt, await sample(engine, prompt, "copied"))
        await engine.update_weights(replace, "replaced")
        plain.load_state_dict({name: changed + 0.2}, strict=False)
        assert_exact(plain, prompt, await sample(engine, prompt, "replaced"))


@pytest.mark.parametrize("torch_compile", [False, pytest.param(True, marks=COMPILED)])
async def test_a_function_may_add_hooks(folder, device, torch_compile):
    plain, prompt = plain_model(folder), tokens_of(40, 3)

    def add_hook(model: Any) -> None:
        model.model.layers[2].mlp.down_proj.register_forward_pre_hook(lambda _, given: (given[0] * 3,))

    async with make(folder, device, torch_compile=torch_compile) as engine:
        await sample(engine, prompt)
        await engine.update_weights(add_hook, "hooked")
        add_hook(plain)
        assert_exact(plain, prompt, await sample(engine, prompt))


async def test_requests_that_are_not_aborted_go_on_with_new_weights(folder, device):
    async with make(folder, device) as engine:
        whole = await sample(engine, tokens_of(20, 1), "whole", max_tokens=200, temperature=0.0)
        running = asyncio.ensure_future(sample(engine, tokens_of(20, 1), max_tokens=200, temperature=0.0))
        await asyncio.sleep(0.05)
        await engine.update_weights({}, "new", abort=False)
        assert (await running).token_ids == whole.token_ids


def test_after_new_weights_the_rows_stay_where_they_are_unless_they_are_too_large(folder, device):
    for cache_tokens, stays in ((10_000, True), (100, False)):
        batch = batches.Batch(load(folder, device), most=8, prefill_tokens=100, cache_tokens=cache_tokens)
        run(batch, [tokens_of(30, seed) for seed in range(3)])
        moves = batch._rows.moves
        batch.forget()
        run(batch, [tokens_of(30, seed) for seed in range(3)])
        assert (batch._rows.moves == moves) == stays


def run(batch: Any, prompts: Sequence[list[int]], most: int = 8) -> list[Any]:
    """Sample in the test's own thread. Returns generations, and errors of those that failed."""
    found: dict[int, Any] = {}
    for row, ids in enumerate(prompts):
        sampling = Sampling(max_tokens=most, temperature=1.0, seed=row)
        batch.add(
            batches.EngineJob(f"r{row}", list(ids), sampling, most, lambda one, row=row: found.update({row: one}))
        )
    while batch.is_busy:
        batch.step()
    return [found[row] for row in range(len(prompts))]


# Graphs ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def recorder():
    """Graphs of a computation that records its sizes, and "graphs" that do the same: no GPU is needed."""
    done: list[tuple[str, tuple[int, ...]]] = []

    class Replay:
        def __init__(self, size: tuple[int, ...]) -> None:
            self._size = size

        def replay(self) -> None:
            done.append(("replayed", self._size))

    class Recorder(graphs.Graphs):
        def __init__(self, slack: int) -> None:
            super().__init__("test", lambda size: done.append(("computed", size)), torch.device("cpu"), slack=slack)
            self._records = True

        def _capture(self, size: tuple[int, ...]) -> Replay:
            return Replay(size)

    return Recorder, done


def test_a_size_is_recorded_when_it_is_used_again(recorder):
    make_recorder, done = recorder
    sizes = make_recorder(slack=4)
    for _ in range(3):
        sizes.run((8, 128))
    sizes.run((8, 192))
    assert done == [("computed", (8, 128)), ("replayed", (8, 128)), ("replayed", (8, 128)), ("computed", (8, 192))]
    sizes.clear()
    sizes.run((8, 128))
    assert done[-1] == ("computed", (8, 128))


def test_a_larger_graph_serves_until_a_size_is_wanted_often(recorder):
    make_recorder, _ = recorder
    sizes = make_recorder(slack=4)
    for _ in range(2):
        sizes.run((16, 256))
    assert sizes.fitting((32, 128)) == (32, 128)  # more rows than it has
    assert sizes.fitting((8, 64)) == (8, 64)  # too few to pay for all of it
    used = [sizes.fitting((8, 128)) for _ in range(40)]
    assert used == [(16, 256)] * 32 + [(8, 128)] * 8


def test_the_number_of_graphs_is_bounded(recorder):
    make_recorder, _ = recorder
    sizes = make_recorder(slack=1)
    for rows in range(100):
        for _ in range(2):
            sizes.run((rows,))
        sizes.run((0,))
    assert len(sizes.recorded) == 64
    assert (0,) in sizes.recorded
    assert (1,) not in sizes.recorded


def test_what_cannot_be_recorded_is_computed_and_said_once(recorder, caplog):
    make_recorder, done = recorder
    sizes = make_recorder(slack=1)

    def refuse(size: tuple[int, ...]) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    sizes._capture = refuse
    for _ in range(4):
        sizes.run((8,))
    assert done == [("computed", (8,))] * 4
    (line,) = caplog.messages
    assert line.endswith("several times slower: operation not permitted when stream is capturing")


def test_after_a_lack_of_memory_recording_is_tried_again_later(recorder, caplog):
    make_recorder, done = recorder
    sizes = make_recorder(slack=1)
    capture, tried = sizes._capture, []

    def lack(size: tuple[int, ...]) -> Any:
        tried.append(len(done))
        if len(tried) == 1:
            raise torch.OutOfMemoryError("out of memory")
        return capture(size)

    sizes._capture = lack
    for _ in range(1100):
        sizes.run((8,))
    assert tried == [1, 1002]
    assert done == [("computed", (8,))] * 1002 + [("replayed", (8,))] * 98
    assert "several times slower for the next 1000 steps: out of memory" in caplog.text


def test_graphs_go_with_the_rows_that_they_were_recorded_for(folder, monkeypatch):
    model, peaks = load(folder, "cpu"), []
    batch = batches.Batch(model, most=64, prefill_tokens=1000, cache_tokens=8000)
    for kind in (batch._static._next, batch._static._prompts):
        kind._records = True
        compute = kind._compute
        kind._capture = lambda size, compute=compute: SimpleNamespace(replay=lambda: compute(size))
    step = batch.step

    def watched() -> None:
        step()
        peaks.append(batch._rows.capacity)

    monkeypatch.setattr(batch, "step", watched)
    run(batch, [tokens_of(60, seed) for seed in range(64)], 30)
    assert max(peaks) == 64 * 256
    assert batch._static.recorded == ([], []), "an idle engine keeps neither the rows nor their graphs"
    peaks.clear()
    run(batch, [tokens_of(60, 0)])  # of which all but one token are cached: nothing is filled first
    assert max(peaks) == 2 * 256


def test_graphs_are_recorded_and_a_model_that_refuses_is_sampled_without_them(folder, device, caplog):
    if device == "cpu":
        pytest.skip("needs a GPU")

    def look(_: object, inputs: Any) -> None:
        """What looks at values cannot be recorded."""
        inputs[0].sum().item()

    prompts = [tokens_of(length, length) for length in (5, 40, 40, 90, 17, 1)]
    found = []
    for refuses in (False, True):
        model = load(folder, device)
        if refuses:
            model.model.model.norm.register_forward_pre_hook(look)
        batch = batches.Batch(model, most=8, prefill_tokens=100, cache_tokens=10_000)
        with caplog.at_level(logging.WARNING):
            run(batch, prompts)
            found.append(run(batch, prompts))
        sizes, _ = batch._static.recorded
        assert bool(sizes) != refuses
        assert ("not recorded" in caplog.text) == refuses
    assert [one.token_ids for one in found[0]] == [one.token_ids for one in found[1]]


# Computed in other ways -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [None, 0.3])
def test_attention_by_products_is_attention(scale):
    query, key, value = torch.randn(5, 2, 3, 8), torch.randn(5, 2, 40, 8), torch.randn(5, 2, 40, 4)
    mask = torch.zeros(5, 1, 1, 40).masked_fill(
        torch.arange(40) > torch.tensor([3, 39, 0, 17, 20])[:, None, None, None], -torch.inf
    )
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    found = attentions.attend_by_products(query, key, value, attn_mask=mask, scale=scale)
    torch.testing.assert_close(found, expected)


def test_layers_with_the_same_input_are_one_product_and_keep_their_weights(folder):
    plain, merged = plain_model(folder), plain_model(folder)
    ids = torch.tensor([tokens_of(20, 1)])
    products = projections.Projections(merged)
    assert len(products) == 2 * SMALL["num_hidden_layers"]
    assert merged.state_dict().keys() == plain.state_dict().keys()
    with torch.inference_mode():
        torch.testing.assert_close(merged(ids).logits, plain(ids).logits)
    products.undo()
    with torch.inference_mode():
        torch.testing.assert_close(merged(ids).logits, plain(ids).logits, rtol=0, atol=0)


def test_layers_that_only_look_alike_compute_for_themselves():
    linear = torch.nn.Linear

    class Doubling(linear):
        def forward(self, given: Any) -> Any:
            return 2 * super().forward(given)

    def block(gate: Any, up: Any) -> Any:
        module = torch.nn.Module()
        module.gate_proj, module.up_proj = gate, up
        return module

    class Quantized(torch.nn.Parameter):
        """A weight whose type says how to compute with it."""

    same, with_shared_bias = linear(4, 5), linear(4, 5)
    with_shared_bias.bias = same.bias
    quantized = linear(4, 5)
    quantized.weight = Quantized(quantized.weight)
    shared = linear(4, 5)
    other = linear(4, 5)
    other.weight = shared.weight
    different_inputs = block(linear(4, 5), linear(4, 5))
    for apart in (
        block(linear(4, 5), Doubling(4, 5)),
        block(linear(4, 5), linear(3, 5)),
        block(linear(4, 5), linear(4, 5, bias=False)),
        block(linear(4, 5), linear(4, 5, dtype=torch.bfloat16)),
        block(linear(4, 5), quantized),
        block(linear(4, 5), None),
        block(same, same),
        block(same, with_shared_bias),
        torch.nn.ModuleList([block(shared, linear(4, 5)), block(linear(4, 5), other)]),
    ):
        assert len(projections.Projections(apart)) == 0

    one, two = torch.randn(2, 4), torch.randn(2, 4)
    gate, up = different_inputs.gate_proj, different_inputs.up_proj
    expected = gate(one), up(two), up(one)
    assert len(projections.Projections(different_inputs)) == 1
    for found, wanted in zip((gate(one), up(two), up(one)), expected, strict=True):
        torch.testing.assert_close(found, wanted)


def test_a_merge_that_fails_half_way_leaves_the_model_as_it_was(folder, monkeypatch):
    model, plain, join = load(folder, "cpu"), plain_model(folder), torch.cat
    ids, joined = torch.tensor([tokens_of(20, 1)]), []

    def join_three(parts: Any) -> Any:
        if len(joined) == 3:
            raise torch.OutOfMemoryError("out of memory")
        joined.append(parts)
        return join(parts)

    def replace(changed: Any) -> None:
        for one in changed.parameters():
            one.data = one.data + 0.1

    monkeypatch.setattr("torch.cat", join_three)
    with pytest.raises(torch.OutOfMemoryError):
        model.modify(replace)
    monkeypatch.undo()
    model.modify(replace)
    for _ in range(2):
        replace(plain)
    with torch.inference_mode():
        expected = plain(ids).logits
        model.model.set_attn_implementation("eager")
        torch.testing.assert_close(model.model(ids).logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_all_layers_of_a_model_share_what_is_compiled(tmp_path, monkeypatch):
    """Torch gives up, without a word, after eight versions of a function: the rest would not be compiled."""
    monkeypatch.setattr("torch._dynamo.config.fail_on_recompile_limit_hit", True)
    torch.compiler.reset()
    model = load(make_model(tmp_path, num_hidden_layers=12), "cpu", torch_compile=True)
    assert model.shape.layers == 12


def test_what_could_not_be_run_anyway_is_not_said_to_be_about_compiling(tmp_path):
    with pytest.raises(ConfigError, match="it cannot be run packed: its attention has softcap; use sglang or vllm"):
        models.load(make_model(tmp_path, "Gemma2"), "cpu", torch_compile=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_without_a_compiler_compiling_is_refused_and_says_why(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", (None, "no-such-compiler"))
    with pytest.raises(ConfigError, match=r"compiled: .*no-such-compiler.*; try it without torch_compile") as found:
        models.load(make_model(tmp_path / "model", hidden_size=40), "cpu", torch_compile=True)
    assert "\n" not in str(found.value)


# Sizes ----------------------------------------------------------------------------------------------------------------


def test_sizes_are_rounded_up_by_less_than_half_or_by_less_than_a_quarter():
    assert [static.rounded(number, 8) for number in (1, 8, 9, 12, 13, 17, 25, 33, 97)] == [
        *(8, 8, 12, 12, 16, 24, 32, 48, 128)
    ]
    assert [static.rounded(number) for number in (1, 2, 3, 4, 5, 6, 7, 9)] == [1, 2, 3, 4, 6, 6, 8, 12]
    assert [static.rounded(number, 128, steps=4) for number in (1, 129, 300, 500, 513, 641, 1025)] == [
        *(128, 160, 320, 512, 640, 768, 1280)
    ]
    for steps, most in ((2, 1.5), (4, 1.25)):
        assert all(number <= static.rounded(number, 8, steps=steps) < most * number + 1 for number in range(8, 3000))


@pytest.mark.parametrize(
    ("left", "room", "length"),
    [
        ([300], 4096, 300),  # one prompt, at once
        ([5000], 4096, 4096),  # as far as there is room
        ([300] * 16, 4096, 256),  # all together, though not to their end
        ([*[40] * 12, *[0] * 100], 4096, 40),  # results of tools, while others are sampling
        ([4000, *[40] * 12], 4096, 4000),  # the long one is worth a pass of its own
        ([700, *[40] * 100], 4096, 32),  # and here the short ones are
    ],
)
def test_a_pass_computes_as_much_as_it_can_in_its_time(left, room, length):
    assert static.best_length(left, room) == length
