"""The families: whose checkpoints they take, where their turns end, and how their routers are read.

Shape legend: U units that this process holds of a row, S documents of the row, L layers, K experts of a unit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import attrs
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cosmos_core.errors import ConfigError
from cosmos_core.models import HuggingFaceModel
from cosmos_core.models.attention.documents import ContextSlice
from cosmos_core.models.packing import Row
from cosmos_core.protocols import Layout, MicroBatch, ModelContext
from cosmos_core.protocols.model import Record
from cosmos_core.types import Payload
from cosmos_model_moe import balance, choices, routing
from cosmos_model_moe.chats import CHATML, DEEPSEEK_CHAT, DEEPSEEK_END, MOONLIGHT_CHAT
from cosmos_model_moe.gating import SIGMOID, SOFTMAX, Gating
from cosmos_model_moe.options import MixtureOptions
from cosmos_model_moe.routing import Routing, Watch


class MixtureModel(HuggingFaceModel):
    """A model of which each token uses a few experts.

    Attributes:
        gating: How the family's routers weigh experts.
    """

    gating: ClassVar[Gating]
    options: MixtureOptions

    def __init__(self, options: MixtureOptions, context: ModelContext) -> None:
        super().__init__(options, context)
        self._watches: WeakKeyDictionary[torch.nn.Module, Mapping[str, Watch]] = WeakKeyDictionary()

    @property
    def is_watched(self) -> bool:
        """Tell whether an option asks for what the family's own forward does not do."""
        options = self.options
        return options.router_replay or max(options.auxiliary_loss, options.z_loss, options.bias_rate) > 0

    def build(
        self, *, seed: int, dtype: torch.dtype, device: torch.device, layout: Layout | None = None
    ) -> PreTrainedModel:
        """Make the module (see `HuggingFaceModel.build`), its routers hooked if an option needs it.

        Raises:
            ConfigError: `bias_rate` is given to a family whose routers have no bias.
        """
        module = super().build(seed=seed, dtype=dtype, device=device, layout=layout)
        if self.is_watched:
            self._watches[module] = routing.install(module, self.gating, self.options)
        if self.options.bias_rate > 0:
            for _, router in routing.routers(module):
                if not hasattr(router, "e_score_correction_bias"):
                    raise ConfigError(
                        f"model.options.bias_rate: {type(router).__name__} has no bias to move; "
                        "balance this family with model.options.auxiliary_loss"
                    )
        return module

    def pack(
        self, payloads: Sequence[Payload], *, budget: int, multiple: int = 1, is_uniform: bool = False
    ) -> list[MicroBatch]:
        """Pack payloads (see `HuggingFaceModel.pack`), the experts of the rollout with them if they are replayed.

        Raises:
            DataError: The rollout's experts are missing, or are not of this model.
        """
        batches = super().pack(payloads, budget=budget, multiple=multiple, is_uniform=is_uniform)
        if not self.options.router_replay:
            return batches
        L, K = self.config.num_hidden_layers, self.config.num_experts_per_tok
        return [
            attrs.evolve(
                batch,
                inputs={**batch.inputs, choices.ARRAY: choices.row_of(batch, payloads, num_layers=L, top_k=K)},
            )
            for batch in batches
        ]

    def records(self) -> tuple[Record, ...]:
        """The experts of each unit, where they are replayed (see `cosmos_core.protocols.model.MoEModel`)."""
        if not self.options.router_replay:
            return ()
        shape = (self.config.num_hidden_layers, self.config.num_experts_per_tok)
        return (Record(name=choices.ARRAY, dtype="int16", shape=shape, option="model.options.router_replay"),)

    def record(self, module: torch.nn.Module) -> Callable[[], Mapping[str, torch.Tensor]]:
        """Record the experts that the routers of a module choose."""
        newest = routing.record(module, self.config.num_hidden_layers)
        return lambda: {choices.ARRAY: newest()}

    def layer_keywords(self, row: Row) -> Mapping[str, Any]:
        """The routing of this forward, for the hooks."""
        return {routing.KEYWORD: _routing_of(row)} if self.is_watched else {}

    def counters(self, module: torch.nn.Module) -> list[torch.Tensor]:
        """Load of each expert of each layer that this process holds: float32 [E] each, counted since it was zeroed."""
        return [watch.load_E for watch in self._watches.get(module, {}).values()]

    def after_step(self, module: torch.nn.Module) -> dict[str, float]:
        """Move the biases by the counters, which the caller has summed over all processes that trained the step.

        Returns:
            `expert_imbalance`: by how much the busiest expert of any layer exceeds its share.
        """
        watches = self._watches.get(module, {})
        if self.options.bias_rate > 0:
            with torch.no_grad():
                for layer, watch in watches.items():
                    bias_E = module.get_submodule(f"{layer}.mlp.gate").e_score_correction_bias
                    balance.move_bias(bias_E, watch.load_E, self.options.bias_rate)  # type: ignore[arg-type]
        if not watches:
            return {}
        return {"expert_imbalance": max(balance.imbalance(watch.load_E) for watch in watches.values())}


def _routing_of(row: Row) -> Routing:
    device = row.packing.device
    lengths_S = row.batch.inputs["lengths"]
    start, stop = row.packing.bounds
    sequence_U = torch.repeat_interleave(torch.arange(len(lengths_S)), lengths_S)[start:stop]
    recorded_ULK = row.batch.inputs.get(choices.ARRAY)
    return Routing(
        sequence_U=sequence_U.to(device),
        weights_S=_sequence_weights(row.batch, device),
        choices_ULK=None if recorded_ULK is None else recorded_ULK[start:stop].to(device, torch.int64),
        total=_total_over(row.packing.context),
    )


def _sequence_weights(batch: MicroBatch, device: torch.device) -> torch.Tensor | None:
    """Each document's part of the batch's loss: that of its decisions together."""
    if batch.weights_N is None:
        return None
    parts = [part.sum() for part in torch.split(batch.weights_N, list(batch.num_decisions))]
    weights_S = torch.zeros(len(batch.inputs["lengths"]))
    weights_S[: len(parts)] = torch.stack(parts)
    return weights_S.to(device)


def _total_over(context: ContextSlice | None) -> Callable[[torch.Tensor], torch.Tensor]:
    def total(tensor: torch.Tensor) -> torch.Tensor:
        if context is None:
            return tensor
        summed = tensor.detach().clone()
        torch.distributed.all_reduce(summed, group=context.group)
        return summed

    return total


class QwenMoeModel(MixtureModel):
    """A Qwen3 mixture of experts."""

    model_types: ClassVar[frozenset[str] | None] = frozenset({"qwen3_moe"})
    turn_end: ClassVar[str | None] = "<|im_end|>"
    stop_tokens: ClassVar[tuple[str, ...]] = ("<|im_end|>", "<|endoftext|>")
    turn_template: ClassVar[str | None] = CHATML
    gating: ClassVar[Gating] = SOFTMAX


class DeepseekModel(MixtureModel):
    """DeepSeek-V3, and what was trained from it."""

    model_types: ClassVar[frozenset[str] | None] = frozenset({"deepseek_v3"})
    turn_end: ClassVar[str | None] = DEEPSEEK_END
    stop_tokens: ClassVar[tuple[str, ...]] = (DEEPSEEK_END,)
    turn_template: ClassVar[str | None] = DEEPSEEK_CHAT
    gating: ClassVar[Gating] = SIGMOID

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer (see `HuggingFaceModel.load_tokenizer`).

        Raises:
            ConfigError: It is Moonlight's, whose config looks the same and whose chats do not.
        """
        tokenizer = super().load_tokenizer()
        if "<|im_middle|>" in tokenizer.get_vocab():
            raise ConfigError("model.plugin: this checkpoint's chats are Moonlight's; use model.plugin = 'moonlight'")
        return tokenizer


class MoonlightModel(MixtureModel):
    """Moonlight: DeepSeek-V3's architecture with chats of its own."""

    model_types: ClassVar[frozenset[str] | None] = frozenset({"deepseek_v3"})
    turn_end: ClassVar[str | None] = "<|im_end|>"
    stop_tokens: ClassVar[tuple[str, ...]] = ("<|im_end|>", "[EOS]", "[EOT]")
    turn_template: ClassVar[str | None] = MOONLIGHT_CHAT
    gating: ClassVar[Gating] = SIGMOID
