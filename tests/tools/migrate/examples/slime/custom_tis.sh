# Arguments of THUDM/slime, examples/train_infer_mismatch_helper/run-qwen3-4b-mis.sh, at 624b824a898ab0ec1fcb4d373004c7f3852bf515
source "/root/slime/scripts/models/qwen3-4B.sh"

CKPT_ARGS=(
   --hf-checkpoint /root/Qwen3-4B
   --ref-load /root/Qwen3-4B_torch_dist
   --save /root/Qwen3-4B_slime/
   --save-interval 200
)
ROLLOUT_ARGS=(
   --prompt-data /root/dapo-math-17k/dapo-math-17k.jsonl
   --input-key prompt --label-key label --apply-chat-template --rollout-shuffle
   --rm-type deepscaler
   --num-rollout 3000
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --rollout-max-response-len 8192
   --rollout-temperature 1
   --global-batch-size 256
)
PERF_ARGS=(
   --tensor-model-parallel-size 2
   --context-parallel-size 2
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
   --use-tis
)
OPTIMIZER_ARGS=(
   --optimizer adam
   --lr 1e-6
   --lr-decay-style constant
   --weight-decay 0.1
   --adam-beta1 0.9
   --adam-beta2 0.98
)
WANDB_ARGS=(--use-wandb --wandb-project slime-mis --wandb-group qwen3-4B-mis --wandb-key ${WANDB_KEY})
CUSTOM_ARGS=(
   --custom-config-path examples/train_infer_mismatch_helper/mis.yaml # codespell:ignore mis
   --custom-tis-function-path examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp # codespell:ignore mis
)
ray job submit --address="http://127.0.0.1:8265" \
   -- python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate \
   ${MODEL_ARGS[@]} ${CKPT_ARGS[@]} ${ROLLOUT_ARGS[@]} ${OPTIMIZER_ARGS[@]} ${GRPO_ARGS[@]} \
   ${WANDB_ARGS[@]} ${PERF_ARGS[@]} ${CUSTOM_ARGS[@]}
