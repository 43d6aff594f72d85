"""Samples that a run has kept, as its replicas write them."""

from types import SimpleNamespace

import numpy as np

from cosmos_core.policy.training import step as training
from cosmos_core.rollout.samples import rows_of, schema
from cosmos_core.storage.parts import FOLDER, PartWriter
from cosmos_core.transport.directives import Lease
from cosmos_core.types import Array, Payload, Prompt, Sample, SampleStatus

RECIPE = {
    "run": {"name": "demo", "steps": 6},
    "model": {"plugin": "hf", "config": {"model_type": "qwen3"}},
    "algorithm": {"plugin": "grpo"},
    "dataset": {"plugin": "numbers"},
    "reward": [{"plugin": "right"}],
    "policy": {"optimizer": {"lr": 1e-6}, "prompts_per_step": 2},
    "rollout": {"group_size": 4},
}
"""Of a run that exists on disk alone."""


def payload(decided=None, units=(5, 6)):
    """Two tokens with log-probs, or others; `decided` says which are the model's."""
    arrays = {
        "prompt": np.arange(3, dtype=np.int32),
        "completion": np.array(units, np.int32),
        "logprobs": np.array([-0.5] * (len(units) if decided is None else sum(decided)), np.float32),
    }
    if decided is not None:
        arrays["decided"] = np.array(decided)
    held = {name: Array(dtype=str(a.dtype), shape=a.shape, data=a.tobytes()) for name, a in arrays.items()}
    return Payload(kind="tokens", arrays=held)


def group(
    lease, *rewards, purpose="train", drop="", kept="", version=0, text="four \udce9\x1b[31m", held=None, **prompt
):
    """The rows of a group, with these rewards; None: it has none."""
    made = [
        Sample(
            index=index,
            status=SampleStatus.REWARD_FAILED if reward is None else SampleStatus.OK,
            reward=reward,
            rewards={} if reward is None else {"math": reward},
            oldest_version=version,
            newest_version=version,
            num_units=2,
            num_prompt_units=3,
            detail="math: boom" if reward is None else "",
        )
        for index, reward in enumerate(rewards)
    ]
    played = [
        SimpleNamespace(generated=SimpleNamespace(payload=held or payload()), status=SampleStatus.OK) for _ in made
    ]
    row = Prompt(**{"text": f"prompt of {lease}?", "reference": {"answer": lease}, **prompt})
    of = Lease(lease=lease, purpose=purpose, position=10 + lease, row=20 + lease, version=version)
    told = {"drop": drop, "media": kept, "replica": "rollout-0"}
    return rows_of(of, row, made, played, [text] * len(made), **told)[0]


def trained(generation, step, lease, *advantages, attempt=1, ratios=None):
    """The row of a group in a batch."""
    own = {"advantages": list(advantages), "trained": [bool(each) for each in advantages], "ratios": ratios}
    return {"generation": generation, "step": step, "attempt": attempt, "lease": lease, "position": 10 + lease, **own}


def keep(directory, kind, name, rows):
    """Write rows of `samples` or of `steps` into a run's folder, as a part of their own."""
    columns = {"samples": schema, "steps": training.schema}[kind]
    writer = PartWriter(directory / FOLDER, kind, name, columns, 1 << 30)
    writer.put(rows, 1)
    writer.close()
