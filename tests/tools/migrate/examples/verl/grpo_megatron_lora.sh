# Arguments of volcengine/verl, examples/grpo_trainer/run_qwen2-7b_math_megatron_lora.sh, at b178a3cd56f58b2d502255daba591e92833930a7
rollout_name="vllm" # sglang or vllm
adv_estimator=grpo
max_prompt_length=1024
max_response_length=1024
train_prompt_bsz=128

gsm8k_train_path=$HOME/data/gsm8k/train.parquet
math_train_path=$HOME/data/math/train.parquet
train_files="['$gsm8k_train_path', '$math_train_path']"

DATA=(
    data.train_files="$train_files"
    data.val_files="['$HOME/data/gsm8k/test.parquet']"
    data.max_prompt_length=$max_prompt_length
    data.max_response_length=$max_response_length
    data.train_batch_size=$train_prompt_bsz
    data.filter_overlong_prompts=True
    data.truncation='error'
    data.shuffle=False
)
MODEL=(
    actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct
    actor_rollout_ref.model.lora.rank=256
    actor_rollout_ref.model.lora.alpha=512
    actor_rollout_ref.model.lora.lora_A_init_method=kaiming
)
ACTOR=(
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.ppo_mini_batch_size=16
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=1
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4
    actor_rollout_ref.actor.use_kl_loss=True
    actor_rollout_ref.actor.kl_loss_coef=0.001
    actor_rollout_ref.actor.kl_loss_type=low_var_kl
    actor_rollout_ref.actor.entropy_coeff=0
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full
)
ROLLOUT=(
    actor_rollout_ref.rollout.tensor_model_parallel_size=2
    actor_rollout_ref.rollout.name=$rollout_name
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6
    actor_rollout_ref.rollout.n=4
)
TRAINER=(
    trainer.logger='["console","wandb"]'
    trainer.n_gpus_per_node=8
    trainer.nnodes=1
    trainer.save_freq=20
    trainer.test_freq=5
    trainer.total_epochs=15
)

python3 -m verl.trainer.main_ppo --config-path=config --config-name='ppo_megatron_trainer.yaml' \
    algorithm.adv_estimator=$adv_estimator algorithm.use_kl_in_reward=False \
    "${DATA[@]}" "${MODEL[@]}" "${ROLLOUT[@]}" "${ACTOR[@]}" "${TRAINER[@]}" "$@"
