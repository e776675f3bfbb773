"""From data to a trained model. Prints every command before running it, so that you can type them yourself.

python examples/gsm8k_grpo/run.py --smoke              two steps on a CPU, in minutes, without a network
python examples/gsm8k_grpo/run.py --gsm8k FOLDER       train on GSM8K, downloaded to FOLDER
python examples/gsm8k_grpo/run.py --smoke steps=4      with other settings for `toolyard train`
"""

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
SMOKE = [
    "output_dir=runs/smoke",
    "device=cpu",
    "rollout.engine.model=smollm2-135m",
    "rollout.chat={format: hermes, tool_role: user}",
    "rollout.sampling.max_tokens=80",
    "rollout.limits.max_assistant_turns=2",
    "rollout.n=2",
    "warm_start={tasks: data/made-train.jsonl, script: data/teacher.json, limit: 2, batch_size: 2}",
    "steps=2",
    "prompts_per_step=1",
    "lora={rank: 8, alpha: 16}",
    "beta=0",
    "save_every=2",
    "evaluate.tasks.limit=1",
    "evaluate.before=false",
    "trl.gradient_checkpointing=false",
]
"""Scales train.yaml down for a laptop: it exercises every part, but the model learns nothing. The teacher's traces call
a tool; two of them are too few for the model to do so."""


def published(folder: Path, split: str) -> Path:
    """GSM8K's own file, as in its repository or on the Hugging Face hub."""
    found = sorted(folder.glob(f"**/{split}.jsonl")) or sorted(folder.glob(f"main/{split}-*.parquet"))
    if not found:
        sys.exit(f"{folder} has neither {split}.jsonl nor main/{split}-*.parquet")
    return found[0].resolve()


def gsm8k(source: str | Path, split: str) -> list[str]:
    """Convert GSM8K's rows to verl's format, with the system message."""
    target, system = f"data/{split}.parquet", str(HERE / "system.txt")
    return ["tasks", "prepare", "gsm8k", str(source), target, "--split", split, "--system", system, "--force"]


def generate(target: str, count: int, seed: int, *more: str) -> list[str]:
    return ["tasks", "generate", target, "--count", str(count), "--seed", str(seed), *more, "--force"]


def data(args: argparse.Namespace) -> list[list[str]]:
    if args.smoke:
        sources = {"train": "data/made-train.jsonl", "test": "data/made-test.jsonl"}
        files = [
            generate(sources["train"], 16, 1, "--script", "data/teacher.json"),
            generate(sources["test"], 8, 2, "--split", "unseen"),
        ]
        return [*files, *(gsm8k(source, split) for split, source in sources.items())]
    return [gsm8k(published(args.gsm8k, split), split) for split in ("train", "test")]


def training(args: argparse.Namespace) -> list[str]:
    # The settings name files relative to this folder, but the current folder may be another.
    ours = [f"rollout_from={HERE / 'rollout.yaml'}", f"rollout.tools={HERE / 'tools.yaml'}"]
    return ["train", "--config", str(HERE / "train.yaml"), *ours, *(SMOKE if args.smoke else ()), *args.settings]


def launcher(args: argparse.Namespace) -> list[str]:
    if args.processes is None:
        return []
    if args.smoke:  # accelerate shards only on GPUs: here each process holds the whole model
        return [beside("torchrun"), "--standalone", "--nproc_per_node", str(args.processes), "--no-python"]
    sharded = ["--config_file", str(HERE / "fsdp.yaml"), "--num_processes", str(args.processes)]
    return [beside("accelerate"), "launch", *sharded, "--no_python"]


def beside(name: str) -> str:
    """A command of the current Python environment."""
    return str(Path(sys.executable).with_name(name))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--smoke", action="store_true")
    which.add_argument("--gsm8k", type=Path, metavar="FOLDER")
    parser.add_argument(
        "--work", type=Path, default=HERE, metavar="FOLDER", help="folder for data/ and runs/; default: this one"
    )
    parser.add_argument("--processes", type=int, metavar="N", help="train in N processes; on GPUs, sharded by FSDP")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings for `toolyard train`")
    args = parser.parse_intermixed_args()
    args.work.mkdir(parents=True, exist_ok=True)
    toolyard = beside("toolyard")
    commands = [[toolyard, *one] for one in data(args)] + [[*launcher(args), toolyard, *training(args)]]
    for command in commands:
        print("$", shlex.join([Path(command[0]).name, *command[1:]]), file=sys.stderr)
        status = subprocess.run(command, cwd=args.work).returncode
        if status:
            return status
    return 0


sys.exit(main())
