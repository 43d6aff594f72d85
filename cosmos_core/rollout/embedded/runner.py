"""Forwards of an unmodified Hugging Face module: one step over slots, or whole sequences without a cache.

Shape legend: N packed tokens, R rows kept, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence

import torch

from cosmos_core.rollout.embedded.attention import Piece, SlotStep
from cosmos_core.rollout.embedded.cache import SlotCache
from cosmos_core.rollout.embedded.compiled import CompiledForward, is_single
from cosmos_core.rollout.embedded.interface import Step, meaning
from cosmos_core.rollout.embedded.prompts import Prompts, Span
from cosmos_core.rollout.embedded.scheduler import Plan
from cosmos_core.rollout.embedded.slots import SlotNumbers
from cosmos_core.rollout.serving.given import Given
from cosmos_core.rollout.serving.sequence import offset_of


class Runner:
    """Calls the module.

    Args:
        module: A Hugging Face causal language model.
        device: Where it is.
        prompts: Enters conditioned prompts; None for a model that has none.

    Attributes:
        compiled: The forward, compiled; None for the module as it is.
    """

    compiled: CompiledForward | None = None

    def __init__(self, module: torch.nn.Module, device: torch.device, prompts: Prompts | None = None) -> None:
        self._module = module
        self._device = device
        self._prompts = prompts
        # The head itself may scale or cap its logits, so it is the module that is called, never its parts.
        self._keeps_logits = "logits_to_keep" in inspect.signature(module.forward).parameters

    def forward(
        self, tokens_N: torch.Tensor, positions_N: torch.Tensor, step: Step, kept_R: torch.Tensor | None
    ) -> torch.Tensor:
        """float32 logits [R, V] of the tokens at `kept_R` (of all if None)."""
        evaluate, is_doubled = self._evaluate, False
        if self.compiled is not None and isinstance(step, SlotStep):
            evaluate, is_doubled = self.compiled, is_single(tokens_N)
        with meaning(step, is_doubled=is_doubled):
            return evaluate(tokens_N, positions_N, kept_R).float()

    def _evaluate(self, tokens_N: torch.Tensor, positions_N: torch.Tensor, kept_R: torch.Tensor | None) -> torch.Tensor:
        keep = {"logits_to_keep": 0 if kept_R is None else kept_R} if self._keeps_logits else {}
        output = self._module(input_ids=tokens_N[None], position_ids=positions_N[None], use_cache=False, **keep)
        logits: torch.Tensor = output.logits[0]
        return logits if kept_R is None or self._keeps_logits else logits[kept_R]

    def compile(self, tokens_N: torch.Tensor, positions_N: torch.Tensor) -> None:
        """Compile the forward, with some tokens of a sequence at hand.

        Raises:
            EngineError: It cannot be compiled; says why, and what to do.
        """
        compiled = CompiledForward(self._evaluate, type(self._module).__name__)
        if not is_single(tokens_N):
            with meaning(SlotStep.alone(len(tokens_N), tokens_N.device)):
                compiled.compile(tokens_N, positions_N)
        self.compiled = compiled

    def _enter(
        self,
        tokens_N: torch.Tensor,
        positions_N: torch.Tensor,
        step: Step,
        kept_R: torch.Tensor | None,
        spans: Sequence[Span],
    ) -> torch.Tensor:
        """The same, where spans are units of conditioned prompts."""
        if not spans:
            return self.forward(tokens_N, positions_N, step, kept_R)
        assert self._prompts is not None
        kept_R = torch.arange(len(tokens_N), device=self._device) if kept_R is None else kept_R
        with meaning(step):
            return self._prompts.evaluate(tokens_N, positions_N, spans, kept_R).float()

    def step(self, plan: Plan, cache: SlotCache, numbers: SlotNumbers) -> torch.Tensor:
        """float32 logits [R, V] for each sequence that draws in `plan`."""
        num = plan.num_decoding
        tokens_N, places_N, positions_N = numbers.feed(num)
        slots_N = numbers.places[:num]
        kept_R = None
        if plan.pieces:
            pieces = plan.pieces
            ranges = [self._range(piece.start, piece.last - piece.first) for piece in pieces]
            tokens_N = torch.cat([tokens_N, torch.tensor(plan.piece_tokens, device=self._device)])
            places_N = torch.cat([places_N, *ranges])
            positions_N = torch.cat(
                [positions_N, *(part + more for part, more in zip(ranges, plan.offsets, strict=True))]
            )
            slots_N = torch.cat([slots_N, *(slots_N.new_full((p.last - p.first,), p.slot) for p in pieces)])
            kept_R = torch.tensor([*range(num), *plan.kept], dtype=torch.int64, device=self._device)
        step = SlotStep(
            cache,
            slots_N=slots_N,
            places_N=places_N,
            num_decoding=num,
            pieces=plan.pieces,
            forks=plan.forks,
            shared=plan.shared,
        )
        spans = [] if self._prompts is None else self._prompts.spans(plan)
        logits = self._enter(tokens_N, positions_N, step, kept_R, spans)
        return logits if plan.logit_rows is None else logits[plan.logit_rows]

    def score(self, sequences: Sequence[Given], *, temperature: float, budget: int) -> list[torch.Tensor]:
        """Log-probs of units given all before them, in forwards of about `budget` units.

        Args:
            sequences: What to score.
            temperature: Divides the logits.
            budget: Units of one forward; a longer sequence has one of its own.

        Returns:
            float32 [N] of each sequence, on the CPU.
        """
        scored: list[torch.Tensor] = []
        for batch in _batches(sequences, budget):
            scored.extend(self._score(batch, temperature))
        return scored

    def _score(self, batch: list[Given], temperature: float) -> list[torch.Tensor]:
        pieces: list[Piece] = []
        kept: list[int] = []
        targets: list[int] = []
        last = 0
        for given in batch:
            first, last = last, last + len(given.tokens)
            pieces.append(Piece(first=first, last=last, start=0, slot=-1))
            kept.extend(first + given.num_given - 1 + place for place in given.decided_N)
            targets.extend(given.tokens[given.num_given + place] for place in given.decided_N)
        tokens_N = torch.tensor([token for given in batch for token in given.tokens], device=self._device)
        places_N = torch.cat([self._range(0, len(given.tokens)) for given in batch])
        positions_N = torch.cat([self._range(offset_of(given.conditioning), len(given.tokens)) for given in batch])
        step = SlotStep(None, slots_N=tokens_N, places_N=places_N, num_decoding=0, pieces=tuple(pieces))
        kept_R = torch.tensor(kept, dtype=torch.int64, device=self._device)
        logits_RV = self._enter(tokens_N, positions_N, step, kept_R, self._spans(batch, pieces)) / temperature
        targets_R1 = torch.tensor(targets, dtype=torch.int64, device=self._device)[:, None]
        logprobs_R = torch.log_softmax(logits_RV, -1).gather(1, targets_R1)[:, 0].cpu()
        return list(torch.split(logprobs_R, [len(given.decided_N) for given in batch]))

    def _spans(self, batch: Sequence[Given], pieces: Sequence[Piece]) -> list[Span]:
        if self._prompts is None:
            return []
        return [
            Span(
                conditioning=given.conditioning,
                features=self._prompts.enter(given.conditioning),
                row=piece.first,
                start=0,
                stop=given.num_given,
            )
            for given, piece in zip(batch, pieces, strict=True)
            if given.conditioning is not None
        ]

    def _range(self, start: int, size: int) -> torch.Tensor:
        return torch.arange(start, start + size, device=self._device)


def _batches(sequences: Sequence[Given], budget: int) -> Iterator[list[Given]]:
    batch: list[Given] = []
    size = 0
    for sequence in sequences:
        if batch and size + len(sequence.tokens) > budget:
            yield batch
            batch, size = [], 0
        batch.append(sequence)
        size += len(sequence.tokens)
    if batch:
        yield batch
