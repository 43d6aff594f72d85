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


def arithmetic(name: str, *overrides: str) -> list[str]:
    """Arguments that run the demo's recipe, cut down, as `runs/<name>`."""
    pairs = [argument for override in (*SHORT, *overrides) for argument in ("--set", override)]
    return [str(RECIPE), "--name", name, *pairs]
