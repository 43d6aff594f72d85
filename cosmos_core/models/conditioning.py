"""Prompts that show something, for engines that run a module themselves (`cosmos_core.protocols.Conditioned`).

What enters is what training computes: `pack` lays the prompt out, `embed` runs the towers.

Shape legend: N units of a forward, K of them of conditioned prompts, P units of a prompt, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs
import torch

from cosmos_core.errors import DataError, PluginIncompatibleError
from cosmos_core.models.huggingface import HuggingFaceModel
from cosmos_core.models.packing import EMBEDDINGS
from cosmos_core.models.tokens import token_array
from cosmos_core.protocols import Conditioning, Entering
from cosmos_core.types import Payload

_NEXT: Final = (0, 0)
"""Of two generated units the first goes through the forward: its position is where generation starts."""


class ConditionedModel(HuggingFaceModel):
    """A model of transformers whose prompts may hold more than tokens.

    A family says which arrays of a prompt it reads (`is_media`); one whose `embed` gives its backbone more than
    `inputs_embeds` overrides `per_unit` and `keywords`.
    """

    def condition(self, prompt: Payload) -> Conditioning | None:
        """How a prompt enters (see `cosmos_core.protocols.Conditioned`).

        Raises:
            DataError: The arrays of the payload do not fit its prompt, or are not of the family.
        """
        more = prompt.arrays.keys() - {"prompt"}
        if foreign := sorted(name for name in more if not self.is_media(name)):
            raise DataError(f"{type(self).__name__} has no use for the prompt's {', '.join(foreign)}")
        if not more:
            return None
        payload = attrs.evolve(prompt, arrays={**prompt.arrays, "completion": token_array(_NEXT)})
        (batch,) = self.pack([payload], budget=prompt.arrays["prompt"].shape[0] + 1)
        positions = batch.inputs["positions"]
        return Conditioning(positions=positions[..., :-1], next_position=int(positions[..., -1].max()), batch=batch)

    def is_media(self, name: str) -> bool:  # noqa: ARG002 - what an override reads
        """Whether an array of this name is of what a prompt shows; none is by default."""
        return False

    def enter(self, module: torch.nn.Module, conditioning: Conditioning) -> Mapping[str, torch.Tensor]:
        """What each unit of a prompt enters with: [P, ...] each."""
        entry = self.embed(module, self._row(module, conditioning.batch))
        num_units = conditioning.positions.shape[-1]
        return {name: tensor[:num_units] for name, tensor in self.per_unit(entry).items()}

    def evaluate(self, module: torch.nn.Module, entering: Entering) -> torch.Tensor:
        """Logits [R, V], before the temperature."""
        embeddings_ND: torch.Tensor = module.get_input_embeddings()(entering.tokens_N)  # type: ignore[operator]
        entered_ND = embeddings_ND.index_copy(0, entering.places_K, entering.features[EMBEDDINGS])
        output = self.backbone(module)(
            inputs_embeds=entered_ND[None],
            position_ids=entering.positions.unsqueeze(-2),
            use_cache=False,
            **self.keywords(entering),
        )
        return self.logits(module, output.last_hidden_state[0, entering.kept_R])

    def per_unit(self, entry: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
        """What `embed` gave for a row of U units, as [U, ...] each.

        Raises:
            PluginIncompatibleError: The family gives its backbone what the base class does not know.
        """
        if foreign := entry.keys() - {EMBEDDINGS}:
            raise PluginIncompatibleError(
                f"{type(self).__name__} gives its backbone {', '.join(sorted(foreign))} besides embeddings: it must "
                "override per_unit and keywords for engines to generate from media"
            )
        return {EMBEDDINGS: entry[EMBEDDINGS][0]}

    def keywords(self, entering: Entering) -> Mapping[str, Any]:  # noqa: ARG002 - what an override reads
        """What the backbone is called with besides embeddings and positions; nothing by default."""
        return {}
