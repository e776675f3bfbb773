#!/bin/bash
# The whole experiment with one seed, about ten minutes on one H200. Arguments are passed to `toolyard train`: seed=2, steps=100,
# or --resume after an interrupt. OUT_DIR is the run's folder, from this one.
set -euo pipefail
cd "$(dirname "$0")"
toolyard=${TOOLYARD:-toolyard}
out=${OUT_DIR:-runs/learn}

$toolyard tasks generate data/train.jsonl --count 4000 --seed 11 --force
$toolyard tasks generate data/unseen.jsonl --count 200 --seed 13 --split unseen --force
$toolyard rollout --print-config > data/play.yaml # the prompt of training, at temperature 0.5

play() { # arguments: a name, and optionally an adapter
    for tasks in data/unseen.jsonl word-problems; do
        $toolyard rollout data/play.yaml --tasks "$tasks" --n 4 --seed 5 --max-tokens 96 --out "$out-play/$1-$(basename "$tasks" .jsonl)" \
            --set tasks.limit=null --set engine.dtype=float32 --set engine.max_batch_size=256 ${2:+--set engine.adapter="$2"}
    done
}

play before
$toolyard train -c train.yaml --out "$out" "$@"
rm -rf "$out-play"/after-* # of an earlier model
play after "$out/model"
for tasks in unseen word-problems; do $toolyard eval "$out-play/before-$tasks" "$out-play/after-$tasks"; done
