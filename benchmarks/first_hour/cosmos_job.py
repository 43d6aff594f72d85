from sums import right, sums

import cosmos_core as cosmos

recipe = {
    "run": {"name": "sums-py", "steps": 60},
    "model": {"path": "tiny"},
    "warmup": {"plugin": "sft", "steps": 35, "prompts_per_step": 16, "optimizer": {"lr": 3e-3}},
    "algorithm": {"plugin": "grpo"},
    "policy": {"prompts_per_step": 16, "precision": "fp32", "optimizer": {"lr": 1e-3}},
    "rollout": {"precision": "fp32", "group_size": 8, "sampling": {"max_units": 4}},
}
cosmos.train(recipe, dataset=sums, reward=right).wait()
