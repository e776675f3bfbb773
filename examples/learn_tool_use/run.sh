#!/bin/bash
# The whole experiment, about 15 minutes on one H200. Arguments are passed to `toolyard train`, e.g. steps=200.
set -euo pipefail
cd "$(dirname "$0")"
toolyard=${TOOLYARD:-toolyard}
out=${OUT_DIR:-runs/learn}

$toolyard tasks generate data/train.jsonl --count 2000 --seed 11 --force
$toolyard tasks generate data/traces.jsonl --count 480 --seed 12 --script data/teacher.json --force
$toolyard tasks generate data/unseen.jsonl --count 200 --seed 13 --split unseen --force
$toolyard tasks generate data/test.jsonl --count 200 --seed 14 --force

play() { # arguments: a name, and optionally an adapter
    for tasks in data/test.jsonl data/unseen.jsonl word-problems; do
        $toolyard rollout play.yaml --tasks "$tasks" --out "$out-play/$1-$(basename "$tasks" .jsonl)" ${2:+--set engine.adapter="$2"}
    done
}

play untrained
$toolyard train -c train.yaml --out "$out" "$@"
play warm-start "$out/warm_start"
play grpo "$out/model"
