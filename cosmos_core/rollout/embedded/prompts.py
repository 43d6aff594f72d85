"""Prompts that hold more than token ids: what their units enter a forward with (`protocols.Conditioned`).

What towers make of a prompt is computed once a request, when its first piece is due, and kept while a sample may still
need it: a tower never runs for a sample or a piece. New weights make it anew.

Shape legend: N units of a step, K of them of conditioned prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import torch

from cosmos_core.protocols import Conditioned, Conditioning, Entering
from cosmos_core.rollout.embedded.scheduler import Plan
from cosmos_core.rollout.serving.sequence import TokenFlight


@attrs.frozen(kw_only=True, eq=False)
class Span:
    """Units [start, stop) of a conditioned prompt, at `row` and after in a forward."""

    conditioning: Conditioning
    features: Mapping[str, torch.Tensor]
    row: int
    start: int
    stop: int


class Prompts:
    """The conditioned prompts in flight, for one module."""

    def __init__(self, model: Conditioned, module: torch.nn.Module) -> None:
        self._model = model
        self._module = module
        self._features: dict[TokenFlight, Mapping[str, torch.Tensor]] = {}

    def spans(self, plan: Plan) -> list[Span]:
        """Where a step feeds units of conditioned prompts, in the order of its units."""
        fed = [
            # Of those that decode, some feed the last unit of their prompt: they share the rest with another sample.
            *(
                (slot, plan.sequences[slot], len(plan.sequences[slot].tokens) - 1, 1)
                for slot in range(plan.num_decoding)
            ),
            *(
                (piece.first, plan.sequences[piece.slot], piece.start, piece.last - piece.first)
                for piece in plan.pieces
            ),
        ]
        spans = []
        for row, sequence, start, size in fed:
            flight = sequence.flight
            if flight.conditioning is not None and start < flight.num_prompt:
                spans.append(self._span(flight, flight.conditioning, row, start, min(start + size, flight.num_prompt)))
        return spans

    def _span(self, flight: TokenFlight, conditioning: Conditioning, row: int, start: int, stop: int) -> Span:
        if flight not in self._features:
            self._features[flight] = self.enter(conditioning)
        return Span(conditioning=conditioning, features=self._features[flight], row=row, start=start, stop=stop)

    def enter(self, conditioning: Conditioning) -> Mapping[str, torch.Tensor]:
        """What the units of a prompt enter with, under the loaded weights."""
        return self._model.enter(self._module, conditioning)

    def evaluate(
        self, tokens_N: torch.Tensor, positions_N: torch.Tensor, spans: Sequence[Span], kept_R: torch.Tensor
    ) -> torch.Tensor:
        """Logits [R, V] of a step with units of conditioned prompts.

        Args:
            tokens_N: Of all units.
            positions_N: Of all units, as if each were text.
            spans: One at least.
            kept_R: The units whose logits are asked for.
        """
        device, axes = tokens_N.device, spans[0].conditioning.positions.shape[:-1]
        positions = positions_N.expand(*axes, -1).clone()
        for span in spans:
            positions[..., span.row : span.row + span.stop - span.start] = span.conditioning.positions[
                ..., span.start : span.stop
            ].to(device)
        places = [torch.arange(span.row, span.row + span.stop - span.start, device=device) for span in spans]
        features = {
            name: torch.cat([span.features[name][span.start : span.stop] for span in spans])
            for name in spans[0].features
        }
        return self._model.evaluate(
            self._module,
            Entering(
                tokens_N=tokens_N, positions=positions, places_K=torch.cat(places), features=features, kept_R=kept_R
            ),
        )

    def retain(self, plan: Plan) -> None:
        """After a step, forget what no sample will need: all of its request have the prompt in the cache."""
        unfinished = {sequence.flight for sequence in plan.sequences[len(plan.drawn) :]}
        for flight in list(self._features):
            if flight not in unfinished and not _waits(flight):
                del self._features[flight]

    def forget(self) -> None:
        """The weights are others now."""
        self._features.clear()


def _waits(flight: TokenFlight) -> bool:
    return any(sequence.slot < 0 and sequence.reason is None for sequence in flight.samples)
