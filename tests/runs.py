"""Short runs of the demo's recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Final

RECIPE: Final = Path(__file__).parents[1] / "recipes" / "arithmetic.toml"
SHORT: Final = (
    "warmup.steps=12",
    "run.steps=8",
    "evaluation.prompts=16",
    "evaluation.interval=4",
    "rollout.max_in_flight=64",
)
WHIM: Final = """
from cosmos_core.protocols import Provider, hookimpl

class Whim:
    def __init__(self, options, context):
        pass

    def score(self, completion):
        return float(sum(completion.text.encode()) % 2)

@hookimpl
def cosmos_reward():
    return Provider(create=Whim)
"""
"""A reward that is a whim of the completion's bytes, so that every group has something to learn from the start."""
AILING: Final = """
from pathlib import Path

import torch

from cosmos_algorithm_grpo import CAPABILITIES, ClippedOptions, clipped
from cosmos_core.protocols import Provider, hookimpl

def ailing(options, context):
    objective = clipped(options, context)
    advantages = objective.advantages

    def fail(groups):
        try:
            Path("gpu-fails").unlink()
        except FileNotFoundError:
            return advantages(groups)
        raise torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered\\nFor debugging consider")

    objective.advantages = fail
    return objective

@hookimpl
def cosmos_algorithm():
    return Provider(create=ailing, options=ClippedOptions, capabilities=CAPABILITIES)
"""
"""GRPO, whose GPU fails, as torch tells of it, once for each time that the file `gpu-fails` is made."""


def arithmetic(name: str, *overrides: str) -> list[str]:
    """Arguments that run the demo's recipe, cut down, as `runs/<name>`."""
    pairs = [argument for override in (*SHORT, *overrides) for argument in ("--set", override)]
    return [str(RECIPE), "--name", name, *pairs]
