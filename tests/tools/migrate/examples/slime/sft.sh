# Arguments of THUDM/slime, scripts/run-qwen3-4B-base-sft.sh, at 624b824a898ab0ec1fcb4d373004c7f3852bf515
source "${SCRIPT_DIR}/models/qwen3-4B.sh"

CKPT_ARGS=(
   --hf-checkpoint /root/Qwen3-4B-Base/
   --ref-load /root/Qwen3-4B-Base_torch_dist
   --save /root/Qwen3-4B-Base_slime/
   --save-interval 1000
)
SFT_ARGS=(
   --rollout-function-path slime.rollout.sft_rollout.generate_rollout
   --prompt-data /root/openhermes2_5.parquet
   --input-key messages
   # --apply-chat-template
   --rollout-shuffle
   --num-epoch 3
   --rollout-batch-size 128
   --global-batch-size 128
   --loss-type sft_loss
   --calculate-per-token-loss
   --disable-compute-advantages-and-returns
   --debug-train-only
)
PERF_ARGS=(
   --tensor-model-parallel-size 1
   --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
   --use-dynamic-batch-size
   --max-tokens-per-gpu 9216
)
OPTIMIZER_ARGS=(
   --optimizer adam
   --lr 1e-5
   --lr-decay-style cosine
   --min-lr 1e-6
   --lr-warmup-fraction 0.1
   --weight-decay 0.1
   --adam-beta1 0.9
   --adam-beta2 0.95
)
ray job submit --address="http://127.0.0.1:8265" -- python3 train_async.py \
   --actor-num-nodes 1 --actor-num-gpus-per-node 8 \
   ${MODEL_ARGS[@]} ${CKPT_ARGS[@]} ${SFT_ARGS[@]} ${OPTIMIZER_ARGS[@]} ${PERF_ARGS[@]} ${EVAL_ARGS[@]}
