set -ex
NUM_GPUS=$(nvidia-smi -L | wc -l)
HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
source "${HERE}/slime_model.sh"

ROLLOUT_ARGS=(
   --prompt-data math/train.jsonl   # a file of this machine
   --input-key prompt --label-key label --apply-chat-template
   # --rollout-shuffle
   --rm-type deepscaler
   --num-rollout 300 --rollout-batch-size 32 --n-samples-per-prompt 8
   --rollout-max-response-len 8192 --rollout-temperature 0.8
   --global-batch-size 128
)
EVAL_ARGS=(--eval-interval 20 --eval-prompt-data aime aime.jsonl --n-samples-per-eval-prompt 16)
GRPO_ARGS=(
   --advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28
   --use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl
   --use-tis --tis-clip 2.0 --tis-clip-low 0.5
)

ray job submit --address=http://127.0.0.1:8265 -- python3 train.py \
   --actor-num-nodes 2 --actor-num-gpus-per-node ${NUM_GPUS} --colocate \
   ${MODEL_ARGS[@]} ${ROLLOUT_ARGS[@]} ${EVAL_ARGS[@]} ${GRPO_ARGS[@]} ${UNSET_ARGS[@]} \
   --hf-checkpoint Qwen/Qwen3-4B --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 \
   --adam-beta1 0.9 --adam-beta2 0.98 --tensor-model-parallel-size 2 --rollout-num-gpus-per-engine 2 \
   --use-dynamic-batch-size --max-tokens-per-gpu 9216
