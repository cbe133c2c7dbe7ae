set -x
ROOT="$(cd -- "$(dirname -- "$0")" && pwd)"
COMMON="--actor.num_nodes 1 --actor.num_gpus_per_node 8 --train.colocate_all"

python3 -m openrlhf.cli.train_ppo_ray $COMMON \
   --vllm.num_engines 4 --vllm.tensor_parallel_size 2 \
   --actor.model_name_or_path Qwen/Qwen2.5-7B \
   --reward.remote_url ${ROOT}/reward.py \
   --algo.advantage.estimator group_norm \
   --algo.kl.init_coef 1e-3 --algo.kl.use_loss --algo.kl.estimator k3 \
   --algo.dynamic_filtering_enable --algo.dynamic_filtering_range 0 1 \
   --algo.advantage.is_correction_enable \
   --actor.eps_clip_low_high 0.2 0.27 \
   --train.batch_size 128 --rollout.batch_size 128 --rollout.n_samples_per_prompt 8 \
   --data.max_len 2048 --data.prompt_dataset data/math --data.input_key question --data.label_key answer \
   --data.apply_chat_template --actor.adam.lr 5e-7 \
   --ds.packing_samples --ds.zero_stage 3 --actor.gradient_checkpointing_enable
