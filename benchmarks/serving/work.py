"""What every engine gets to do: models of random weights, and requests that are new in every round.

Lengths are the same in each round, ids are not: nothing may be taken from what an earlier round left in a cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs
import numpy as np
import torch
from step import QWEN3, SHAPES
from transformers import AutoModelForCausalLM, Qwen3Config

from cosmos_core.protocols import ModelFacts

CONTEXT: Final = 512
SEATS: Final = 64
"""Sequences of ragged work, which all are in flight."""
MOST_SEATS: Final = 256
"""Sequences in flight at most."""

MODELS: Final[Mapping[str, Mapping[str, Any]]] = {
    "tiny": {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 768, "head_dim": 32},
    "small": {"num_hidden_layers": 8, "hidden_size": 512, "intermediate_size": 1536, "head_dim": 64},
    # As large as such models are, for GPUs.
    **{name: {**QWEN3, **SHAPES[name]} for name in ("0.6B", "4B")},
}
ON_CPU: Final = ("tiny", "small")
DTYPES: Final = {"bf16": torch.bfloat16, "fp32": torch.float32}
RAGGED, GROUP = WORKS = ("ragged", "group")
FLAT: Final = "flat-"
"""Before a number of sequences, of 64 units each after prompts of 64."""
GROUP_SIZE: Final = 16
GROUP_PROMPT: Final = 400


@attrs.frozen(kw_only=True)
class Work:
    """Requests that come at once.

    Attributes:
        prompts: Token ids.
        sizes: Units to generate after each prompt, exactly.
        num_samples: Samples of each.
    """

    prompts: list[list[int]]
    sizes: list[int]
    num_samples: int

    @property
    def num_units(self) -> int:
        """Units that are asked for."""
        return sum(self.sizes) * self.num_samples


@attrs.frozen(kw_only=True)
class Done:
    """What a round came to.

    Attributes:
        num_units: Units generated that were asked for, each with its log-prob.
        prompt_units: Units of prompts that went through the model.
    """

    num_units: int
    prompt_units: int


def config_of(model: str) -> Qwen3Config:
    """The Hugging Face config of a model of `MODELS`."""
    small = {
        "vocab_size": 8192,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2 * CONTEXT,
        "tie_word_embeddings": True,
    }
    return Qwen3Config(**{**small, **MODELS[model], "initializer_range": 0.06, "eos_token_id": None})


class RandomModel:
    """A model plugin's part that an engine needs: a Qwen3 of random weights that never stops by itself."""

    def __init__(self, model: str) -> None:
        self.config = config_of(model)

    def facts(self) -> ModelFacts:
        """What engines ask for."""
        config = self.config
        return ModelFacts(
            architecture="Qwen3ForCausalLM",
            num_parameters=0,
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            tokenizer_size=config.vocab_size,
            context_length=CONTEXT,
            stop_ids=frozenset(),
            pad_id=0,
            cache_size=2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim,
        )

    def build(self, *, seed: int, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
        """Random weights."""
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(self.config, dtype=dtype).to(device).eval()


def make_work(kind: str, round_number: int, vocabulary: int) -> Work:
    """The requests of a round: `ragged`, a `group` on one prompt, or `flat` ones, all alike in length."""
    ids = np.random.default_rng(round_number)
    if kind.startswith(FLAT):
        number = int(kind.removeprefix(FLAT))
        return Work(prompts=ids.integers(1, vocabulary, (number, 64)).tolist(), sizes=[64] * number, num_samples=1)
    if kind == GROUP:
        prompt = ids.integers(1, vocabulary, GROUP_PROMPT).tolist()
        return Work(prompts=[prompt], sizes=[64], num_samples=GROUP_SIZE)
    lengths = np.random.default_rng(0)
    prompts = [ids.integers(1, vocabulary, size).tolist() for size in lengths.integers(8, 65, SEATS)]
    return Work(prompts=prompts, sizes=lengths.integers(16, 129, SEATS).tolist(), num_samples=1)
