"""Training with servers: who gets the trainer's weights, and how. Real trainers; the servers stand in for SGLang and
vLLM, which cannot run here, and speak their routes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from toolyard.errors import ConfigError, EngineError
from toolyard.records.dump import read_dump
from toolyard.testing.engine.servers import SGLANG, VLLM, EngineServer
from toolyard.train.config import AsynchronousConfig, load_train_config
from toolyard.train.samples import Refusal, token_versions
from toolyard.train.trl.rollout import StepObserver, StepReport, ToolyardRollout
from toolyard.train.trl.stream import StreamSettings
from training import make_model, make_place
from training_trl import make_trainer, recomputed, small_config, write_tasks

pytestmark = [
    pytest.mark.filterwarnings("default::DeprecationWarning"),
    pytest.mark.filterwarnings("default::FutureWarning"),
    pytest.mark.filterwarnings("default::UserWarning"),
]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("small"))


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    return write_tasks(tmp_path / "tasks.jsonl")


def at(server: EngineServer, kind: str, small: Path) -> dict[str, Any]:
    return {"kind": kind, "model": str(small), "urls": [server.url]}


@pytest.mark.parametrize("with_adapter", [False, True])
async def test_sglang_reads_the_whole_model_of_every_step_from_a_folder(
    small: Path, tasks: Path, tmp_path: Path, with_adapter: bool
) -> None:
    import peft
    import transformers

    lora = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False) if with_adapter else None
    async with EngineServer((SGLANG,)) as server:

        def play() -> tuple[Any, list[dict[str, Any]]]:
            with ToolyardRollout(small_config(small, tasks, engine=at(server, "sglang", small))) as rollout:
                trainer = make_trainer(rollout, small, tmp_path / "out", peft=lora)
                prompts = [row["prompt"] for row in rollout.dataset()]
                first = rollout(prompts, trainer)
                trainer.state.global_step = 1
                for value in trainer.model.parameters():
                    value.data.mul_(1.01)
                return trainer.model, [first, rollout(prompts, trainer)]

        model, batches = await asyncio.to_thread(play)
    sent = server.posts("/update_weights_from_disk")
    assert [body["weight_version"] for body in sent] == ["0", "1"]
    assert [body["model_path"] for body in sent] == [str(tmp_path / "out" / "weights" / n) for n in "01"]
    assert [folder.name for folder in (tmp_path / "out" / "weights").iterdir()] == ["1"], "the last is enough"
    loaded = transformers.AutoModelForCausalLM.from_pretrained(sent[1]["model_path"])
    ids = [5, 9, 70, 3, 77]
    apart = zip(recomputed(loaded, ids[:2], ids[2:]), recomputed(model, ids[:2], ids[2:]), strict=True)
    assert max(abs(one - other) for one, other in apart) < 1e-4
    for version, batch in enumerate(batches):
        told = {told for one in batch["trajectory"] for turn in one.turns for told in turn.sampled.weight_versions}
        assert told == {str(version)}


async def test_while_the_trainer_updates_sglang_samples_and_goes_on_from_the_same_token_with_new_weights(
    small: Path, tasks: Path, tmp_path: Path
) -> None:
    from toolyard.train.trl.off_policy import OffPolicyGRPOTrainer

    reports: list[StepReport] = []

    class Watching(StepObserver):
        def stepped(self, report: StepReport) -> None:
            reports.append(report)

    async with EngineServer((SGLANG,), token_seconds=0.03) as server:  # slower than updates
        config = small_config(
            small,
            tasks,
            engine=at(server, "sglang", small),
            sampling={"temperature": 0.8, "max_tokens": 128},
            rollout_data_dir=str(tmp_path / "dump"),
        )

        def play() -> None:
            stream = StreamSettings(asynchronous=AsynchronousConfig(max_staleness=2))
            with ToolyardRollout(config, observer=Watching(), stream=stream) as rollout:
                trainer = make_trainer(
                    rollout, small, tmp_path / "out", kind=OffPolicyGRPOTrainer, temperature=0.8, max_steps=4
                )
                trainer.train()

        await asyncio.to_thread(play)
    assert [max(report.staleness) <= 2 for report in reports] == [True] * 4
    turns = [turn.sampled for line in read_dump(tmp_path / "dump") for turn in line.trajectory.turns]
    assert len(turns) >= 16
    assert {version for turn in turns for version in turn.weight_versions} <= {*"0123"}
    assert any(len(turn.version_starts) > 1 for turn in turns), "no weights changed in the middle of an answer"
    assert not server.running


@pytest.mark.exhaustive
async def test_an_evaluation_at_the_same_servers_leaves_running_requests_the_weights_they_are_finished_with(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from toolyard.train.trl.run import run_training

    monkeypatch.chdir(tmp_path)
    make_place(tmp_path, small, module="shared_reward")
    async with EngineServer((SGLANG,), token_seconds=0.03) as server:
        settings = load_train_config(
            "train.yaml",
            {
                "output_dir": "runs/a",
                "steps": 3,
                "asynchronous": {"max_staleness": 1, "on_update": "finish"},
                "evaluate": {"tasks": {"path": "tasks.jsonl", "limit": 1}, "every": 1, "before": False},
                "rollout": {"engine": {"kind": "sglang", "urls": [server.url]}, "sampling": {"max_tokens": 128}},
            },
        )
        result = await asyncio.to_thread(run_training, settings)
    assert [line["step"] for line in result.evaluations] == [1, 2, 3]
    trained = [line.trajectory for line in read_dump("runs/a/rollouts")]
    assert len(trained) == 24
    assert [one for one in trained if len({*(token_versions(one) or ())} - {""}) != 1] == []


async def test_a_server_that_does_not_take_the_weights_ends_the_run_by_name(
    small: Path, tasks: Path, tmp_path: Path
) -> None:
    async with EngineServer((SGLANG,)) as server:
        server.rewrite = lambda answer: {**answer, "success": False} if "success" in answer else answer

        def play() -> None:
            with ToolyardRollout(small_config(small, tasks, engine=at(server, "sglang", small))) as rollout:
                make_trainer(rollout, small, tmp_path / "out").train()

        with pytest.raises(EngineError, match=r"http://127\.0\.0\.1:\d+/update_weights_from_disk: the new weights"):
            await asyncio.to_thread(play)


@pytest.mark.parametrize("max_staleness", [0, 1])
async def test_samples_of_a_server_that_was_restarted_are_not_trained_on(
    small: Path, tasks: Path, tmp_path: Path, max_staleness: int
) -> None:
    from toolyard.train.trl.off_policy import OffPolicyGRPOTrainer

    reports: list[StepReport] = []

    class Watching(StepObserver):
        def begins(self, step: int, requests: int, evaluation: bool) -> None:
            if step == 1:  # it has only begun: its weights follow
                server.rewrite = restarted

        def stepped(self, report: StepReport) -> None:
            reports.append(report)

    def restarted(answer: dict[str, Any]) -> dict[str, Any]:
        """The first answer of a server after its start."""
        if "meta_info" in answer and not told:
            told.append(answer["meta_info"]["weight_version"])
            answer["meta_info"] |= {"weight_version": "default", "weight_versions": None}
        return answer

    told: list[str] = []
    async with EngineServer((SGLANG,)) as server:
        config = small_config(small, tasks, engine=at(server, "sglang", small))

        def play() -> None:
            asynchronous = AsynchronousConfig(max_staleness=max_staleness) if max_staleness else None
            stream = StreamSettings(asynchronous=asynchronous) if asynchronous else None
            kind = OffPolicyGRPOTrainer if asynchronous else None
            with ToolyardRollout(config, observer=Watching(), stream=stream) as rollout:
                make_trainer(rollout, small, tmp_path / "out", max_steps=3, kind=kind).train()

        await asyncio.to_thread(play)
    refused = [one for report in reports for one in report.refused]
    assert [one.refusal for one in refused] == [Refusal.OTHER_WEIGHTS]
    assert "the weights default, not those of update" in refused[0].why


async def test_on_a_cluster_servers_of_a_directory_get_the_weights(small: Path, tasks: Path, tmp_path: Path) -> None:
    from toolyard.rollout.assembly import open_sglang

    notes: list[str] = []
    async with EngineServer((SGLANG,)) as first, EngineServer((SGLANG,)) as second:
        (tmp_path / "engines.yaml").write_text(f"- {first.url}\n")
        engine = {"kind": "sglang", "model": str(small), "directory": str(tmp_path / "engines.yaml")}
        async with open_sglang(small_config(small, tasks, engine=engine), notes.append) as servers:
            await servers.update_weights_from_disk(small, "7")
            (tmp_path / "engines.yaml").write_text(f"- {first.url}\n- {second.url}\n")
            async with asyncio.timeout(30):
                while len(servers.urls) < 2:  # noqa: ASYNC110 - nothing tells when a server joins
                    await asyncio.sleep(0.05)
            await servers.update_weights_from_disk(small, "8")
        assert (first.weight_version, second.weight_version) == ("8", "8")
    assert [f"added {second.url}" in note for note in notes] == [True]


async def test_vllm_is_asked_where_trl_has_it_and_its_weights_are_left_to_trl(
    small: Path, tasks: Path, tmp_path: Path
) -> None:
    async with EngineServer((VLLM,)) as server:

        def play() -> dict[str, Any]:
            with ToolyardRollout(small_config(small, tasks, engine={"kind": "vllm", "model": str(small)})) as rollout:
                trainer = make_trainer(rollout, small, tmp_path / "out")
                # TRL's own client needs vLLM and NCCL: the trainer gets a stand-in.
                trainer.use_vllm, trainer.vllm_mode = True, "colocate"
                prompts = [row["prompt"] for row in rollout.dataset()]
                with pytest.raises(ConfigError, match=r"vllm_mode is 'colocate', but rollouts need a server"):
                    rollout(prompts, trainer)
                trainer.vllm_mode = "server"
                trainer.vllm_generation = SimpleNamespace(vllm_client=SimpleNamespace(base_url=server.url))
                return rollout(prompts, trainer)

        batch = await asyncio.to_thread(play)
    assert len(server.posts("/v1/completions")) == 4
    assert all(len(ids) == 8 for ids in batch["completion_ids"])
    assert not (tmp_path / "out" / "weights").exists()
