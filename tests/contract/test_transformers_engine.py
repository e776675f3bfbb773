"""The embedded engine, on a tiny model with random weights: the engine contract and more."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from late import Late
from patience import processor_time
from toolyard.engines.protocol import Finish, Generation, Sampling
from toolyard.engines.stops import StopTexts
from toolyard.errors import ConfigError, EngineError, EngineRequestError
from toolyard.records.audit import are_logprobs
from toolyard.testing import EngineContract

if TYPE_CHECKING:
    from toolyard.engines.transformers.engine import TransformersEngine

engines = Late("toolyard.engines.transformers.engine")
torch = Late("torch")
transformers = Late("transformers")

VOCABULARY = 128
CONTEXT = 4096
PROMPT = list(b"Once upon a time")


def decode(ids: Sequence[int]) -> str:
    return bytes(ids).decode("ascii", "replace")


def make_model(folder: Path, *, layers: int = 2, **changes: object) -> Path:
    """Random weights, but letters only: all other tokens are unlikely. Attention counts, and so do positions."""
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": CONTEXT,
            "tie_word_embeddings": False,
            "initializer_range": 0.4,
            **changes,
        }
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        others = [token for token in range(VOCABULARY) if not chr(token).isalpha()]
        model.lm_head.weight[others] = 0
        model.lm_head.weight *= 0.5
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny"))


class TestTransformersEngine(EngineContract):
    prompt = PROMPT
    vocabulary = VOCABULARY
    context = CONTEXT
    endless = 4000

    @pytest.fixture(autouse=True)
    def _folder(self, folder: Path) -> None:
        self.folder = folder

    @pytest_asyncio.fixture(scope="class", loop_scope="class")
    @classmethod
    async def engine(cls, folder: Path):
        async with engines.TransformersEngine(folder, device="cpu", decode=decode) as engine:
            yield engine

    def make(self) -> TransformersEngine:
        return engines.TransformersEngine(self.folder, device="cpu", decode=decode)

    def decode(self, ids: Sequence[int]) -> str:
        return decode(ids)


# Beyond the protocol --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(folder: Path):
    """The same model as transformers runs it: one sequence at a time, all at once."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def make(folder: Path, **options: object) -> TransformersEngine:
    return engines.TransformersEngine(folder, device="cpu", **{"decode": decode, **options})


async def sample(engine: TransformersEngine, ids: Sequence[int], name: str = "r", **sampling: object) -> Generation:
    wanted = Sampling.model_validate({"max_tokens": 12, "temperature": 1.0, "seed": 1, **sampling})
    async with asyncio.timeout(30):
        return await engine.generate(ids, wanted, request_id=name)


async def sample_all(engine: TransformersEngine, prompts: Sequence[list[int]], **sampling: object) -> list[Generation]:
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(sample(engine, ids, f"r{at:03}", **{"seed": at, **sampling}))
            for at, ids in enumerate(prompts)
        ]
    return [done.result() for done in running]


def prompt_of(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(65, 123, (length,), generator=generator).tolist()


def expected_logprobs(plain, prompt: list[int], sampled: list[int], temperature: float = 1.0) -> list[float]:
    with torch.inference_mode():
        scores = (plain(torch.tensor([[*prompt, *sampled]])).logits[0] / temperature).log_softmax(-1)
    return [float(scores[len(prompt) + at - 1, token]) for at, token in enumerate(sampled)]


def assert_exact(plain, prompt: list[int], found: Generation, temperature: float = 1.0) -> None:
    assert found.logprobs == pytest.approx(expected_logprobs(plain, prompt, found.token_ids, temperature), abs=1e-4)


@pytest.mark.parametrize("prefill_tokens", [512, 7])
async def test_in_a_ragged_batch_log_probabilities_are_those_of_each_sequence_alone(folder, plain, prefill_tokens):
    prompts = [prompt_of(length, length) for length in (1, 3, 40, 90, 17, 64, 33, 2, 70)]
    async with make(folder, prefill_tokens=prefill_tokens, max_batch_size=5) as engine:
        found = await sample_all(engine, prompts, max_tokens=20)
    for prompt, one in zip(prompts, found, strict=True):
        assert len(one.token_ids) == 20
        assert_exact(plain, prompt, one)


async def test_log_probabilities_are_those_at_the_temperature_whatever_else_limits_the_choice(folder, plain):
    prompt = prompt_of(30, 1)
    async with make(folder) as engine, asyncio.TaskGroup() as together:
        for at, sampling in enumerate(
            (
                {"temperature": 0.0},
                {"temperature": 2.0},
                {"temperature": 0.3, "top_p": 0.5},
                {"top_k": 3},
                {"min_p": 0.4},
                {"repetition_penalty": 1.7, "temperature": 0.5},
            )
        ):

            async def check(name: str, sampling: dict[str, float]) -> None:
                found = await sample(engine, prompt, name, **sampling)
                assert_exact(plain, prompt, found, sampling.get("temperature", 1.0) or 1.0)

            together.create_task(check(f"r{at}", sampling))


async def test_what_a_seed_samples_does_not_depend_on_who_is_beside_it(folder):
    prompts = [prompt_of(10 + at, at) for at in range(8)]
    async with make(folder) as engine:
        together = await sample_all(engine, prompts, top_p=0.9)
        alone = [await sample(engine, prompt, f"alone-{at}", seed=at, top_p=0.9) for at, prompt in enumerate(prompts)]
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]


async def test_the_next_turn_computes_only_what_is_new(folder, plain):
    prompt = prompt_of(50, 2)
    async with make(folder) as engine:
        first = await sample(engine, prompt)
        assert first.cached_tokens == 0
        longer = [*prompt, *first.token_ids, *prompt_of(9, 3)]
        second = await sample(engine, longer)
        assert second.cached_tokens == len(prompt) + len(first.token_ids) - 1
        assert_exact(plain, longer, second)


async def test_requests_that_begin_alike_share_what_is_computed_for_the_beginning(folder, plain):
    shared = prompt_of(100, 4)
    prompts = [shared, shared, *([*shared, *prompt_of(5, at)] for at in range(4))]
    async with make(folder) as engine:
        found = await sample_all(engine, prompts)
        for prompt, one in zip(prompts, found, strict=True):
            assert_exact(plain, prompt, one)
        assert sorted(one.cached_tokens or 0 for one in found) == [0, 99, 100, 100, 100, 100]


async def test_a_history_that_was_changed_is_not_taken_for_the_old_one(folder, plain):
    prompt = prompt_of(40, 5)
    async with make(folder) as engine:
        await sample(engine, prompt)
        changed = [*prompt[:20], 65 + (prompt[20] - 64) % 26, *prompt[21:]]
        again = await sample(engine, changed)
        assert again.cached_tokens == 20
        assert_exact(plain, changed, again)


@pytest.mark.parametrize("cache_tokens", [0, 40])
async def test_no_more_is_kept_than_allowed(folder, cache_tokens):
    first, second = prompt_of(20, 6), prompt_of(20, 7)
    async with make(folder, cache_tokens=cache_tokens) as engine:
        await sample(engine, first, "one")
        await sample(engine, second, "two")
        assert (await sample(engine, second, "two")).cached_tokens == (19 if cache_tokens else 0)
        assert (await sample(engine, first, "one")).cached_tokens == 0


async def test_an_aborted_request_goes_on_from_what_is_kept(folder):
    prompt = prompt_of(30, 8)
    async with make(folder) as engine:
        running = asyncio.ensure_future(sample(engine, prompt, max_tokens=4000))
        await asyncio.sleep(0.2)
        await engine.abort("r")
        aborted = await running
        assert aborted.finish is Finish.ABORT
        so_far = [*prompt, *aborted.token_ids]
        assert ((await sample(engine, so_far)).cached_tokens or 0) >= len(so_far) - 1


async def test_it_says_how_many_tokens_it_has_sampled_before_the_turn_ends(folder):
    async with make(folder) as engine:
        assert (engine.sampled_tokens("r"), engine.steps()) == (0, 0)
        running = asyncio.ensure_future(sample(engine, PROMPT, max_tokens=4000))
        async with asyncio.timeout(30):
            while engine.sampled_tokens("r") < 5:  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0.001)
        assert not running.done()
        steps = engine.steps()
        await engine.abort("r")
        assert 5 <= len((await running).token_ids) <= engine.steps()
        assert engine.steps() >= steps > 0
        assert engine.sampled_tokens("r") == 0


async def test_an_engine_with_nothing_to_do_takes_no_cpu(folder):
    import time

    async with make(folder) as engine:
        await sample(engine, PROMPT)
        before = time.process_time()
        await asyncio.sleep(0.5)
        assert time.process_time() - before < processor_time(0.1)


async def test_repetition_is_penalised(folder):
    async with make(folder) as engine:
        found = await sample(engine, PROMPT, max_tokens=10, repetition_penalty=1e6, temperature=0.0)
        assert len(set(found.token_ids)) == 10
        assert not set(found.token_ids) & set(PROMPT)


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        ({}, 6),
        ({"top_k": 2}, 2),
        ({"top_p": 0.75}, 3),
        ({"top_p": 0.01}, 1),
        ({"min_p": 0.3}, 3),
        ({"top_k": 3, "top_p": 0.7}, 2),
        ({"temperature": 0.5, "min_p": 0.3}, 2),
    ],
)
def test_tokens_are_taken_as_often_as_the_sampling_says(sampling, kept):
    from toolyard.engines.transformers.sampling import Chooser, choose

    likely = torch.tensor([0.4, 0.25, 0.15, 0.1, 0.06, 0.04])
    wanted = Sampling.model_validate({"seed": 3, **sampling})
    chooser = Chooser(wanted, [], 600, torch.device("cpu"))
    places = torch.randperm(600, generator=torch.Generator().manual_seed(1))[:6]
    logits = torch.full((1, 600), -1e9)
    logits[0, places] = likely.log()
    draws = 3000
    tokens, logprobs = choose(logits.expand(draws, -1), [chooser] * draws)
    shares = likely ** (1 / wanted.temperature)
    told = (shares / shares.sum()).log().tolist()
    shares[kept:] = 0
    shares /= shares.sum()
    for place, share, own in zip(places.tolist(), shares.tolist(), told, strict=True):
        assert tokens.count(place) / draws == pytest.approx(share, abs=0.04)
        assert all(logprobs[at] == pytest.approx(own, abs=1e-4) for at, token in enumerate(tokens) if token == place)
    assert set(tokens) <= set(places[:kept].tolist())


async def test_an_unlikely_token_at_a_temperature_near_0_has_a_valid_log_probability(folder):
    async with make(folder) as engine:
        found = await sample(engine, PROMPT, max_tokens=30, repetition_penalty=50.0, temperature=1e-5)
    assert are_logprobs(found.logprobs or [0.0])
    assert min(found.logprobs or [0.0]) < -1000


def test_a_flat_distribution_is_cut_where_it_should_be_though_its_head_is_long():
    from toolyard.engines.transformers.sampling import Chooser, choose

    logits = torch.linspace(0, -1, 5000)[None].repeat(400, 1)
    for sampling, kept in (({"top_k": 1000}, 1000), ({"top_p": 0.9}, 4335), ({"top_k": 1000, "top_p": 0.5}, 475)):
        chooser = Chooser(Sampling.model_validate({"seed": 1, **sampling}), [], 5000, torch.device("cpu"))
        tokens, _ = choose(logits, [chooser] * 400)
        assert kept * 0.95 < max(tokens) <= kept * 1.01


# New weights ----------------------------------------------------------------------------------------------------------


async def test_new_weights_change_answers_and_their_version_and_nothing_old_is_used(folder, tmp_path):
    other = make_model(tmp_path / "other", rope_theta=100.0)
    new = transformers.AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32)
    with torch.no_grad():
        new.model.layers[0].mlp.up_proj.weight += 0.3
    prompt = prompt_of(30, 9)
    async with make(folder, weight_version="first") as engine:
        before = await sample(engine, prompt)
        await engine.update_weights(new.state_dict(), "second")
        after = await sample(engine, prompt)
        assert (before.weight_version, after.weight_version, engine.weight_version) == ("first", "second", "second")
        assert after.cached_tokens == 0
        assert after.logprobs != before.logprobs
        await engine.update_weights(lambda model: model.load_state_dict(_weights_of(folder)), "third")
        again = await sample(engine, prompt)
        assert again.token_ids == before.token_ids
        assert again.logprobs == pytest.approx(before.logprobs, abs=1e-4)


def _weights_of(folder: Path):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()


@pytest.mark.parametrize("abort", [True, False])
async def test_what_is_being_sampled_is_aborted_for_new_weights_or_goes_on_with_them(folder, abort):
    async with make(folder) as engine:
        whole = await sample(engine, PROMPT, "whole", max_tokens=400, temperature=0.0)
        running = [
            asyncio.ensure_future(sample(engine, PROMPT, f"r{at}", max_tokens=400, temperature=0.0)) for at in range(3)
        ]
        await asyncio.sleep(0.1)
        await engine.update_weights({}, "new", abort=abort)  # the same weights: nothing but the version changes
        for found in [await one for one in running]:
            if abort:
                assert (found.finish, found.weight_version) == (Finish.ABORT, "0")
                assert found.token_ids == whole.token_ids[: len(found.token_ids)]
            else:
                assert (found.finish, found.weight_version) == (Finish.LENGTH, "new")
                assert found.token_ids == whole.token_ids
                assert len(found.logprobs or ()) == 400


async def test_weights_that_do_not_fit_are_refused_and_change_nothing(folder):
    async with make(folder) as engine:
        before = await sample(engine, PROMPT)
        good = {"model.norm.weight": torch.zeros(64)}
        for bad in ({**good, "no.such": torch.zeros(1)}, {**good, "lm_head.weight": torch.zeros(1, 2)}):
            with pytest.raises(ConfigError, match="weight"):
                await engine.update_weights(bad, "bad")
        after = await sample(engine, PROMPT)
        assert (after.token_ids, after.weight_version) == (before.token_ids, "0")


async def test_weights_that_are_no_numbers_fail_requests_and_leave_no_trace(folder, plain):
    async with make(folder) as engine:
        kept = {"model.norm.weight": plain.state_dict()["model.norm.weight"].clone()}
        await engine.update_weights({"model.norm.weight": torch.full((64,), math.nan)}, "broken")
        for found in await asyncio.gather(*(sample(engine, PROMPT, f"r{n}") for n in range(3)), return_exceptions=True):
            assert isinstance(found, EngineError)
            assert "not finite" in str(found)
        await engine.update_weights(kept, "good")
        for prompt, found in zip([PROMPT, PROMPT[:5]], await sample_all(engine, [PROMPT, PROMPT[:5]]), strict=True):
            assert_exact(plain, prompt, found)


# Failures -------------------------------------------------------------------------------------------------------------


async def test_a_step_that_fails_fails_its_requests_and_the_engine_goes_on(folder, plain):
    async with make(folder) as engine:
        await sample(engine, PROMPT)

        def break_once(model) -> None:
            def out_of_memory(*_: object) -> None:
                handle.remove()
                raise RuntimeError("out of memory")

            handle = model.model.layers[1].register_forward_pre_hook(out_of_memory)

        await engine.update_weights(break_once, "0")
        first, second = await asyncio.gather(
            sample(engine, PROMPT, "a"), sample(engine, prompt_of(9, 9), "b"), return_exceptions=True
        )
        assert isinstance(first, EngineError)
        assert first.retryable
        assert "out of memory" in str(first)
        if not isinstance(second, EngineError):  # it came a step later
            assert_exact(plain, prompt_of(9, 9), second)
        assert_exact(plain, PROMPT, await sample(engine, PROMPT, "a"))


async def test_an_answer_of_a_loop_that_is_gone_disturbs_nobody(folder):
    engine = make(folder)
    await engine.__aenter__()

    def in_another_loop() -> None:
        async def leave() -> None:
            task = asyncio.ensure_future(sample(engine, PROMPT, "gone", max_tokens=3000))
            await asyncio.sleep(0.05)
            task.cancel()

        asyncio.run(leave())

    await asyncio.to_thread(in_another_loop)
    assert (await sample(engine, PROMPT)).finish is Finish.LENGTH
    await engine.__aexit__()


async def test_entering_can_be_cancelled(folder):
    engine = make(folder)
    task = asyncio.ensure_future(engine.__aenter__())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(EngineRequestError, match="not open"):
        await sample(engine, PROMPT)


async def test_stop_texts_without_a_tokenizer_are_refused_with_the_reason(folder):
    async with engines.TransformersEngine(folder, device="cpu") as engine:
        with pytest.raises(EngineRequestError, match="tokenizer"):
            await sample(engine, PROMPT, stop=("x",))
        assert (await sample(engine, PROMPT)).finish is Finish.LENGTH


async def test_an_abort_while_the_tokenizer_is_being_loaded_is_not_lost(folder):
    loaded = asyncio.Event()
    async with make(folder, decode=None) as engine:
        loop = asyncio.get_running_loop()

        def load_slowly():
            asyncio.run_coroutine_threadsafe(loaded.wait(), loop).result(20)
            return decode

        engine._load_decoder = load_slowly
        running = asyncio.ensure_future(sample(engine, PROMPT, max_tokens=4000, stop=("\n",)))
        await asyncio.sleep(0.05)
        await engine.abort("r")
        loaded.set()
        assert (await running).finish is Finish.ABORT


async def test_models_and_options_that_do_not_work_are_refused_on_entering(folder, tmp_path):
    for bad, complaint in (
        (engines.TransformersEngine(tmp_path / "nothing", device="cpu"), "cannot be loaded"),
        (engines.TransformersEngine(folder, device="abacus"), "abacus"),
        (engines.TransformersEngine(folder, device="cpu", dtype="int8"), "int8"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            await bad.__aenter__()
    with pytest.raises(ConfigError, match="max_batch_size"):
        engines.TransformersEngine(folder, max_batch_size=0)


async def test_a_gpu_that_this_torch_cannot_use_is_refused(folder):
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    with pytest.raises(ConfigError, match="cannot be loaded on cuda"):
        await engines.TransformersEngine(folder, device="cuda").__aenter__()


async def test_a_model_with_another_attention_is_refused(tmp_path):
    torch.manual_seed(0)
    small = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    capped = transformers.Gemma2Config(
        **small, num_attention_heads=4, num_key_value_heads=2, attn_logit_softcapping=50.0
    )
    transformers.Gemma2ForCausalLM(capped).save_pretrained(tmp_path / "capped")
    mamba = transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1)
    transformers.MambaForCausalLM(mamba).save_pretrained(tmp_path / "mamba")
    for name in ("capped", "mamba"):
        with pytest.raises(ConfigError, match="sglang or vllm"):
            await make(tmp_path / name).__aenter__()


async def test_the_context_is_never_longer_than_the_models_own(folder):
    async with make(folder, max_model_len=10**6) as engine:
        assert engine.context == CONTEXT
    async with make(folder, max_model_len=30) as engine:
        assert len((await sample(engine, prompt_of(20, 1), max_tokens=50)).token_ids) == 10
        with pytest.raises(EngineRequestError, match="no room"):
            await sample(engine, prompt_of(30, 1))


# The real one ---------------------------------------------------------------------------------------------------------


async def test_the_embedded_model_answers():
    from toolyard.engines.models import DEFAULT_MODEL, EMBEDDED, embedded_folder

    there = embedded_folder(EMBEDDED[DEFAULT_MODEL])
    if (fault := there.fault()) is not None:
        pytest.skip(f"{DEFAULT_MODEL}: {fault}; `toolyard models fetch`")
    tokenizer = transformers.AutoTokenizer.from_pretrained(there.path)
    assert tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"]) == [1, 2]
    for text in ("1234 + 5", "a  12\n\n1. x", "def f(x):\n    return 2*x\n", "naïve 🎉 ½ ٣", "<|im_end|>"):
        ids = tokenizer(text).input_ids
        assert tokenizer.decode(ids) == text
        assert ids[0] != 1
    assert len(tokenizer("\n\n1").input_ids) == 2  # digits are words of their own, and so are the lines before them
    conversation = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
    async with engines.TransformersEngine(there.path, device="cpu") as engine:
        found = await sample(engine, ids, temperature=0.0, stop=("Paris",))
    assert (found.finish, found.stop_text) == (Finish.STOP, "Paris")


# Stop texts -----------------------------------------------------------------------------------------------------------


@given(
    text=st.text("ab`\né😀", max_size=40),
    stops=st.lists(st.text("ab`\né😀", min_size=1, max_size=5), min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=20),
)
def test_a_stop_text_is_found_with_the_token_that_completes_it_wherever_tokens_part(text, stops, sizes):
    pieces, rest, at = list[bytes](), text.encode(), 0
    while rest:
        size = sizes[at % len(sizes)]
        pieces, rest, at = [*pieces, rest[:size]], rest[size:], at + 1

    def decoded(ids: Sequence[int]) -> str:
        return b"".join(pieces[token] for token in ids).decode("utf-8", "replace")

    watch = StopTexts(stops, decoded)
    for count in range(1, len(pieces) + 1):
        whole = decoded(range(count))
        complete = [stop for stop in stops if stop in whole]
        found = watch.add(count - 1)
        assert (found in complete) if complete else (found is None)
        if complete:
            break


def test_looking_for_stop_texts_costs_the_same_for_every_token():
    looked_at = 0

    def decoded(ids: Sequence[int]) -> str:
        nonlocal looked_at
        looked_at += len(ids)
        return "\N{REPLACEMENT CHARACTER}" * len(ids)  # the worst there is: no character ever ends

    watch = StopTexts(("\n```\n",), decoded)
    for token in range(1000):
        assert watch.add(token) is None
    assert looked_at < 1000 * 30
