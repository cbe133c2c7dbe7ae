from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from my_rewards import correct, short

MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
dataset = load_dataset("trl-lib/DeepMath-103K", split="train")

args = GRPOConfig(
    output_dir="out",
    run_name="deepmath",
    num_generations=8,
    per_device_train_batch_size=16,
    gradient_accumulation_steps=4,
    steps_per_generation=8,
    beta=0.001,
    epsilon=0.2,
    epsilon_high=0.28,
    loss_type="dr_grpo",
    scale_rewards=False,
    max_completion_length=1024,
    learning_rate=2e-6,
    lr_scheduler_type="cosine",
    warmup_steps=10,
    num_train_epochs=1,
    logging_steps=1,
    save_steps=100,
    bf16=True,
    use_vllm=True,
    vllm_mode="colocate",
    reward_weights=[1.0, 0.2],
    report_to="wandb",
    max_grad_norm=0.2,
)
trainer = GRPOTrainer(
    model=MODEL,
    args=args,
    reward_funcs=[correct, short],
    train_dataset=dataset,
    peft_config=LoraConfig(r=16, target_modules=["q_proj", "v_proj"]),
)
trainer.train()
