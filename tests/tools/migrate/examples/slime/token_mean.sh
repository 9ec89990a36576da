# Arguments of THUDM/slime, scripts/run-qwen2.5-0.5B-reproducibility.sh, at 624b824a898ab0ec1fcb4d373004c7f3852bf515
source "${SCRIPT_DIR}/scripts/models/qwen2.5-0.5B.sh"

CKPT_ARGS=(
   --hf-checkpoint /root/Qwen2.5-0.5B-Instruct/
   --ref-load /root/Qwen2.5-0.5B-Instruct_torch_dist/
)
ROLLOUT_ARGS=(
   --prompt-data /root/gsm8k/train.parquet
   --input-key messages --label-key label --apply-chat-template --rollout-shuffle
   --rm-type math
   --num-rollout 100
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --rollout-max-response-len 1024
   --rollout-temperature 1
   --global-batch-size 256
)
EVAL_ARGS=(--eval-interval 20 --eval-prompt-data gsm8k /root/gsm8k/test.parquet --eval-top-k 1)
PERF_ARGS=(--tensor-model-parallel-size 1 --use-dynamic-batch-size --max-tokens-per-gpu 9216)
GRPO_ARGS=(
   --advantage-estimator grpo
   --use-kl-loss
   --kl-loss-coef 0.00
   --kl-loss-type low_var_kl
   --kl-coef 0.00
   --entropy-coef 0.00
   --eps-clip 0.2
   --eps-clip-high 0.28
)
OPTIMIZER_ARGS=(
   --optimizer adam
   --lr 1e-6
   --lr-decay-style constant
   --weight-decay 0.1
   --adam-beta1 0.9
   --adam-beta2 0.98
)
SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 1
   --sglang-enable-deterministic-inference
   --deterministic-mode
)
ray job submit --address="http://127.0.0.1:8265" \
   --runtime-env-json='{
     "env_vars": {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1"
     }
   }' \
   -- python3 train.py \
   --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate \
   --calculate-per-token-loss \
   ${MODEL_ARGS[@]} ${CKPT_ARGS[@]} ${ROLLOUT_ARGS[@]} ${OPTIMIZER_ARGS[@]} ${GRPO_ARGS[@]} \
   ${PERF_ARGS[@]} ${EVAL_ARGS[@]} ${SGLANG_ARGS[@]}
