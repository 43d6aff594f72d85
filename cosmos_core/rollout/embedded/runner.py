"""Forwards of an unmodified Hugging Face module: one step over slots, or whole sequences without a cache.

Shape legend: N packed tokens, R rows kept, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence

import torch

from cosmos_core.rollout.embedded.attention import Piece, SlotStep, Step, meaning
from cosmos_core.rollout.embedded.cache import SlotCache
from cosmos_core.rollout.embedded.scheduler import Plan
from cosmos_core.rollout.embedded.slots import SlotNumbers


class Runner:
    """Calls the module."""

    def __init__(self, module: torch.nn.Module, device: torch.device) -> None:
        self._module = module
        self._device = device
        # The head itself may scale or cap its logits, so it is the module that is called, never its parts.
        self._keeps_logits = "logits_to_keep" in inspect.signature(module.forward).parameters

    def forward(
        self, tokens_N: torch.Tensor, positions_N: torch.Tensor, step: Step, kept_R: torch.Tensor | None
    ) -> torch.Tensor:
        """float32 logits [R, V] of the tokens at `kept_R` (of all if None)."""
        keep = {"logits_to_keep": 0 if kept_R is None else kept_R} if self._keeps_logits else {}
        with meaning(step):
            output = self._module(input_ids=tokens_N[None], position_ids=positions_N[None], use_cache=False, **keep)
        logits: torch.Tensor = output.logits[0]
        if kept_R is not None and not self._keeps_logits:
            logits = logits[kept_R]
        return logits.float()

    def step(self, plan: Plan, cache: SlotCache, numbers: SlotNumbers) -> torch.Tensor:
        """float32 logits [R, V] for each sequence that draws in `plan`."""
        num = plan.num_decoding
        tokens_N, positions_N = numbers.feed(num)
        slots_N = numbers.places[:num]
        kept_R = None
        if plan.pieces:
            pieces_N = torch.tensor(plan.piece_tokens, device=self._device)
            tokens_N = torch.cat([tokens_N, pieces_N])
            positions_N = torch.cat([positions_N, *(self._range(p.start, p.last - p.first) for p in plan.pieces)])
            slots_N = torch.cat([slots_N, *(slots_N.new_full((p.last - p.first,), p.slot) for p in plan.pieces)])
            kept_R = torch.tensor([*range(num), *plan.kept], dtype=torch.int64, device=self._device)
        step = SlotStep(
            cache,
            slots_N=slots_N,
            positions_N=positions_N,
            num_decoding=num,
            pieces=plan.pieces,
            forks=plan.forks,
        )
        logits = self.forward(tokens_N, positions_N, step, kept_R)
        return logits if plan.logit_rows is None else logits[plan.logit_rows]

    def score(
        self, sequences: Sequence[tuple[Sequence[int], int]], *, temperature: float, budget: int
    ) -> list[torch.Tensor]:
        """Log-probs of units given all before them, in forwards of about `budget` units.

        Args:
            sequences: (tokens, number of leading ones that are only conditioned on, at least 1).
            temperature: Divides the logits.
            budget: Units of one forward; a longer sequence has one of its own.

        Returns:
            float32 [N] of each sequence, on the CPU.
        """
        scored: list[torch.Tensor] = []
        for batch in _batches(sequences, budget):
            scored.extend(self._score(batch, temperature))
        return scored

    def _score(self, batch: list[tuple[Sequence[int], int]], temperature: float) -> list[torch.Tensor]:
        pieces: list[Piece] = []
        kept: list[int] = []
        tokens: list[int] = []
        targets: list[int] = []
        for units, num_given in batch:
            first = len(tokens)
            tokens.extend(units)
            pieces.append(Piece(first=first, last=len(tokens), start=0, slot=-1))
            kept.extend(range(first + num_given - 1, len(tokens) - 1))
            targets.extend(units[num_given:])
        tokens_N = torch.tensor(tokens, device=self._device)
        positions_N = torch.cat([self._range(0, len(units)) for units, _ in batch])
        step = SlotStep(None, slots_N=tokens_N, positions_N=positions_N, num_decoding=0, pieces=tuple(pieces))
        kept_R = torch.tensor(kept, dtype=torch.int64, device=self._device)
        logits_RV = self.forward(tokens_N, positions_N, step, kept_R) / temperature
        targets_R1 = torch.tensor(targets, dtype=torch.int64, device=self._device)[:, None]
        logprobs_R = torch.log_softmax(logits_RV, -1).gather(1, targets_R1)[:, 0].cpu()
        return list(torch.split(logprobs_R, [len(units) - num_given for units, num_given in batch]))

    def _range(self, start: int, size: int) -> torch.Tensor:
        return torch.arange(start, start + size, device=self._device)


def _batches(sequences: Sequence[tuple[Sequence[int], int]], budget: int) -> Iterator[list[tuple[Sequence[int], int]]]:
    batch: list[tuple[Sequence[int], int]] = []
    size = 0
    for sequence in sequences:
        if batch and size + len(sequence[0]) > budget:
            yield batch
            batch, size = [], 0
        batch.append(sequence)
        size += len(sequence[0])
    if batch:
        yield batch
