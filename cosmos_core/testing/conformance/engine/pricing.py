"""The other side of the comparison: the model as the trainer evaluates it, under several weights.

Shape legend: N decisions of a completion, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, final

import attrs
import torch

from cosmos_core.models.tokens import token_array
from cosmos_core.protocols import Format, Model
from cosmos_core.types import Payload
from cosmos_core.weights.quantization import dequantise, quantise
from cosmos_core.weights.shards import canonical_tensors

_BUDGET: Final = 1 << 14
_NOISE: Final = 0.3


@final
class Pricer:
    """Prices completions with `Model.decide`, in float32 on the CPU.

    Weights have numbers: 0 are those that `Model.build` gives, any other number is a random change of them. With a
    format, matrices are what their codes and scales stand for.
    """

    def __init__(self, model: Model, *, seed: int, form: Format | None = None) -> None:
        self._model: Final = model
        self._seed: Final = seed
        self._form: Final = form
        self._modules: Final[dict[int, torch.nn.Module]] = {}

    def tensors(self, weights: int) -> dict[str, torch.Tensor]:
        """The canonical tensors of these weights."""
        return canonical_tensors(self._module(weights))

    def logprobs(self, payloads: Sequence[Payload], *, temperature: float, weights: int = 0) -> list[torch.Tensor]:
        """float32 log-probs [N] of each payload's completion."""
        found: list[list[torch.Tensor]] = [[] for _ in payloads]
        for batch in self._model.pack(payloads, budget=_BUDGET):
            with torch.no_grad():
                decided = self._model.decide(self._module(weights), batch, temperature=temperature)
            parts = torch.split(decided.logprobs_N, list(batch.num_decisions))
            for index, part in zip(batch.sequences, parts, strict=True):
                found[index].append(part)
        return [torch.cat(parts) if parts else torch.zeros(0) for parts in found]

    def next_logprobs(self, prompt: Payload, tokens: Sequence[int], *, temperature: float) -> torch.Tensor:
        """float32 log-probs [V] of what may follow a prompt and the first tokens of a completion."""
        vocabulary = range(self._model.facts().vocab_size)
        payloads = [
            attrs.evolve(prompt, arrays={**prompt.arrays, "completion": token_array([*tokens, token])})
            for token in vocabulary
        ]
        return torch.stack([each[-1] for each in self.logprobs(payloads, temperature=temperature)])

    def recorded(
        self,
        payload: Payload,
        record: Callable[[torch.nn.Module], Callable[[], Mapping[str, torch.Tensor]]],
        *,
        weights: int = 0,
    ) -> Mapping[str, torch.Tensor]:
        """What one forward of a prompt and completion records of each unit but the last."""
        module = copy.deepcopy(self._module(weights))
        newest = record(module)
        (batch,) = self._model.pack([payload], budget=_BUDGET)
        with torch.no_grad():
            self._model.decide(module, batch, temperature=1.0)
        return newest()

    def _module(self, weights: int) -> torch.nn.Module:
        if weights not in self._modules:
            module = self._model.build(seed=self._seed, dtype=torch.float32, device=torch.device("cpu"))
            if weights:
                _disturb(module, weights)
            if self._form is not None:
                _round(module, self._form, self._model.facts().matrices)
            self._modules[weights] = module
        return self._modules[weights]


def stopping_at(model: Model, stop_ids: Collection[int]) -> Model:
    """The same model with other stop ids: with none of them, completions are as long as they may be."""
    facts = attrs.evolve(model.facts(), stop_ids=frozenset(stop_ids))
    return twin(model, facts=lambda _: facts)


def twin(model: Model, **methods: Callable[..., Any]) -> Model:
    """The same model with other methods."""
    # A subclass of the same layout, so that the twin passes as what it is, however its class was made.
    twin_class = type(type(model).__name__, (type(model),), {"__slots__": (), **methods})
    other = copy.copy(model)
    object.__setattr__(other, "__class__", twin_class)
    return other


def _disturb(module: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in canonical_tensors(module).values():
            tensor.mul_(1.0 + _NOISE * torch.randn(tensor.shape, generator=generator))


def _round(module: torch.nn.Module, form: Format, matrices: Mapping[str, tuple[int, ...]]) -> None:
    tensors = canonical_tensors(module)
    for name in matrices:
        columns = tensors[name].shape[-1]
        tensors[name].copy_(dequantise(form, name, quantise(form, name, tensors[name]), columns))
