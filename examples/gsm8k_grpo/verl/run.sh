#!/usr/bin/env bash
# GRPO on GSM8K in verl (0.9.1), with SGLang servers, and Toolyard's agent loop and tools. Arguments are passed to verl:
#   verl/run.sh trainer.nnodes=2 actor_rollout_ref.model.path=Qwen/Qwen3-4B
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd) # verl's workers start in other folders

exec "${PYTHON:-python3}" -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$here/data/train.parquet" \
    data.val_files="$here/data/test.parquet" \
    data.train_batch_size=256 \
    data.max_prompt_length=1024 \
    data.max_response_length=1024 \
    data.return_raw_chat=True \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.actor.entropy_coeff=0 \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=32 \
    actor_rollout_ref.rollout.name=sglang \
    actor_rollout_ref.rollout.mode=async \
    actor_rollout_ref.rollout.n=16 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32 \
    actor_rollout_ref.rollout.multi_turn.enable=True \
    actor_rollout_ref.rollout.multi_turn.max_assistant_turns=5 \
    actor_rollout_ref.rollout.multi_turn.tool_config_path="$here/tools.yaml" \
    actor_rollout_ref.rollout.agent.default_agent_loop=toolyard \
    actor_rollout_ref.rollout.agent.agent_loop_config_path="$here/verl/agent_loop.yaml" \
    algorithm.use_kl_in_reward=False \
    trainer.logger='["console"]' \
    trainer.project_name=gsm8k_grpo \
    trainer.experiment_name=toolyard \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes=1 \
    trainer.save_freq=20 \
    trainer.test_freq=20 \
    trainer.total_epochs=15 \
    trainer.default_local_dir="$here/runs/verl" \
    trainer.rollout_data_dir="$here/runs/verl/rollouts" \
    "$@"
