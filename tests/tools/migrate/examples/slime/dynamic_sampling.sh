# Arguments of THUDM/slime, scripts/run-moonlight-16B-A3B.sh, at 624b824a898ab0ec1fcb4d373004c7f3852bf515
source "${SCRIPT_DIR}/models/moonlight.sh"

CKPT_ARGS=(
   --hf-checkpoint /root/Moonlight-16B-A3B
   --ref-load /root/Moonlight-16B-A3B_torch_dist
   --save /root/Moonlight-16B-A3B_slime/
   --save-interval 20
)
ROLLOUT_ARGS=(
   --prompt-data /root/dapo-math-17k/dapo-math-17k.jsonl
   --input-key prompt --label-key label --apply-chat-template --rollout-shuffle
   --rm-type math
   --num-rollout 3000
   --rollout-batch-size 128
   --n-samples-per-prompt 8
   --rollout-max-response-len 4096
   --rollout-temperature 1

   --over-sampling-batch-size 256
   --dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std
   --num-steps-per-rollout 4
   # --global-batch-size 256
   --balance-data
)
PERF_ARGS=(
   --tensor-model-parallel-size 4
   --expert-model-parallel-size 8
   --expert-tensor-parallel-size 1
   --use-dynamic-batch-size
   --max-tokens-per-gpu 8192
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
   --rollout-num-gpus-per-engine 8
   --sglang-mem-fraction-static 0.7
   --sglang-cuda-graph-bs 1 2 4 8 $(seq 16 8 256)
)
ray job submit --address="http://127.0.0.1:8265" \
   -- python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate \
   ${MODEL_ARGS[@]} ${CKPT_ARGS[@]} ${ROLLOUT_ARGS[@]} ${OPTIMIZER_ARGS[@]} ${GRPO_ARGS[@]} \
   ${PERF_ARGS[@]} ${SGLANG_ARGS[@]}
