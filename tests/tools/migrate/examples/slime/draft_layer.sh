# Arguments of THUDM/slime, scripts/run-mimo-7B-rl-eagle.sh, at 624b824a898ab0ec1fcb4d373004c7f3852bf515
source "${SCRIPT_DIR}/models/mimo-7B-rl.sh"

 CKPT_ARGS=(
   --hf-checkpoint /root/MiMo-7B-RL
   --ref-load /root/MiMo-7B-RL_torch_dist
   --load /root/MiMo-7B-RL-mtp_slime/
   --save /root/MiMo-7B-RL-mtp_slime/
   --save-interval 2000
)
ROLLOUT_ARGS=(
   --prompt-data /root/dapo-math-17k/dapo-math-17k.jsonl
   --input-key prompt --label-key label --apply-chat-template --rollout-shuffle
   --rm-type deepscaler
   --num-rollout 3000
   --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256
   --rollout-max-response-len 8192
   --rollout-temperature 1
)
EVAL_ARGS=(--eval-interval 20 --eval-prompt-data aime /root/aime-2024/aime-2024.jsonl --n-samples-per-eval-prompt 1)
PERF_ARGS=(
   --tensor-model-parallel-size 2
   --sequence-parallel
   --recompute-granularity full
   --recompute-method uniform
   --recompute-num-layers 1
   # --micro-batch-size 1
   --use-dynamic-batch-size
   --max-tokens-per-gpu 9216
)
GRPO_ARGS=(
   --advantage-estimator grpo
   --use-kl-loss
   --kl-loss-coef 0.00
   --kl-loss-type low_var_kl
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
   --sglang-speculative-algorithm EAGLE
   --sglang-speculative-num-steps 3
   --sglang-speculative-eagle-topk 1
   --sglang-speculative-num-draft-tokens 4
)
SPEC_ARGS=(--enable-mtp-training --mtp-loss-scaling-factor 0.2)
ray job submit --address="http://127.0.0.1:8265" \
   -- python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate \
   ${MODEL_ARGS[@]} ${CKPT_ARGS[@]} ${ROLLOUT_ARGS[@]} ${OPTIMIZER_ARGS[@]} ${GRPO_ARGS[@]} \
   ${PERF_ARGS[@]} ${EVAL_ARGS[@]} ${SGLANG_ARGS[@]} ${SPEC_ARGS[@]}
