from datasets import Dataset
from sums import right, sums
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

rows = Dataset.from_list(list(sums("train")))
common = {"use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no"}
sft = SFTConfig("sft", max_steps=35, per_device_train_batch_size=16, learning_rate=3e-3, **common)
trainer = SFTTrainer("tiny", args=sft, train_dataset=rows.remove_columns("reference"))
trainer.train()
trainer.save_model("sft")
common |= {"per_device_train_batch_size": 128, "num_generations": 8, "max_completion_length": 4}
grpo = GRPOConfig("grpo", max_steps=60, learning_rate=1e-3, **common)
reward = lambda completions, reference, **_: [right(*each) for each in zip(completions, reference, strict=True)]
trainer = GRPOTrainer("sft", reward_funcs=reward, args=grpo, train_dataset=rows)
trainer.train()
trainer.save_model("trained")
