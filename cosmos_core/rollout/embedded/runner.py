"""Forwards of an unmodified Hugging Face module: one step over slots, or whole sequences without a cache.

Shape legend: N packed tokens, R rows kept, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence

import attrs
import torch

from cosmos_core.protocols.vision import Conditioning, VisionInputs, VisionModel
from cosmos_core.rollout.embedded.attention import SlotStep
from cosmos_core.rollout.embedded.cache import SlotCache
from cosmos_core.rollout.embedded.compiled import CompiledForward, is_single
from cosmos_core.rollout.embedded.interface import Step, step_context
from cosmos_core.rollout.embedded.paged import PagedCache, step_over
from cosmos_core.rollout.embedded.plan import Chunk, Plan
from cosmos_core.rollout.embedded.sampler import SlotNumbers
from cosmos_core.rollout.serving.scoring import ScoringInput
from cosmos_core.rollout.serving.tokens import TokenRequestState, offset_of


@attrs.frozen(kw_only=True, eq=False)
class Span:
    """Units [start, stop) of a conditioned prompt, at `row` and after in a forward."""

    conditioning: Conditioning
    features: Mapping[str, torch.Tensor]
    row: int
    start: int
    stop: int


class Runner:
    """Calls a Hugging Face causal language model, compiled or as it is; `prompts` enters conditioned ones."""

    compiled: CompiledForward | None = None

    def __init__(self, module: torch.nn.Module, device: torch.device, prompts: EncoderCache | None = None) -> None:
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
        if self.compiled is not None:
            evaluate, is_doubled = self.compiled, is_single(tokens_N)
        with step_context(step, is_doubled=is_doubled):
            return evaluate(tokens_N, positions_N, kept_R).float()

    def _evaluate(self, tokens_N: torch.Tensor, positions_N: torch.Tensor, kept_R: torch.Tensor | None) -> torch.Tensor:
        keep = {"logits_to_keep": 0 if kept_R is None else kept_R} if self._keeps_logits else {}
        output = self._module(input_ids=tokens_N[None], position_ids=positions_N[None], use_cache=False, **keep)
        logits: torch.Tensor = output.logits[0]
        return logits if kept_R is None or self._keeps_logits else logits[kept_R]

    def compile(self, tokens_N: torch.Tensor, positions_N: torch.Tensor) -> None:
        """Compile the forward, with some tokens of a sequence at hand."""
        compiled = CompiledForward(self._evaluate, type(self._module).__name__)
        if not is_single(tokens_N):
            with step_context(SlotStep.alone(len(tokens_N), tokens_N.device)):
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
        with step_context(step):
            return self._prompts.evaluate(tokens_N, positions_N, spans, kept_R).float()

    def only_decodes(self, plan: Plan) -> bool:
        """True if a step feeds tokens of its slots' own and nothing else."""
        return not plan.chunks and not plan.forks and not (self._prompts is not None and self._prompts.spans(plan))

    def step(self, plan: Plan, cache: SlotCache | PagedCache, numbers: SlotNumbers) -> torch.Tensor:
        """float32 logits [R, V] for each sequence that draws in `plan`."""
        num = plan.num_decoding
        tokens_N, places_N, positions_N = numbers.feed(num)
        slots_N = numbers.places[:num]
        kept_R = None
        if plan.chunks:
            chunks = plan.chunks
            ranges = [self._range(chunk.start, chunk.last - chunk.first) for chunk in chunks]
            tokens_N = torch.cat([tokens_N, torch.tensor(plan.chunk_tokens, device=self._device)])
            places_N = torch.cat([places_N, *ranges])
            positions_N = torch.cat(
                [positions_N, *(part + more for part, more in zip(ranges, plan.offsets, strict=True))]
            )
            slots_N = torch.cat([slots_N, *(slots_N.new_full((p.last - p.first,), p.slot) for p in chunks)])
            kept_R = torch.tensor([*range(num), *plan.kept], dtype=torch.int64, device=self._device)
        step = step_over(cache, plan, slots_N, places_N)
        spans = [] if self._prompts is None else self._prompts.spans(plan)
        logits = self._enter(tokens_N, positions_N, step, kept_R, spans)
        return logits if plan.logit_rows is None else logits[plan.logit_rows]

    def score(self, sequences: Sequence[ScoringInput], *, temperature: float, budget: int) -> list[torch.Tensor]:
        """Log-probs, float32 [N] on the CPU, of units given all before them, in forwards of about `budget` units.

        A longer sequence has a forward of its own.
        """
        scored: list[torch.Tensor] = []
        for batch in _batches(sequences, budget):
            scored.extend(self._score(batch, temperature))
        return scored

    def _score(self, batch: list[ScoringInput], temperature: float) -> list[torch.Tensor]:
        chunks: list[Chunk] = []
        kept: list[int] = []
        targets: list[int] = []
        last = 0
        for given in batch:
            first, last = last, last + len(given.tokens)
            chunks.append(Chunk(first=first, last=last, start=0, slot=-1))
            kept.extend(first + given.num_given - 1 + place for place in given.decided_N)
            targets.extend(given.tokens[given.num_given + place] for place in given.decided_N)
        tokens_N = torch.tensor([token for given in batch for token in given.tokens], device=self._device)
        places_N = torch.cat([self._range(0, len(given.tokens)) for given in batch])
        positions_N = torch.cat([self._range(offset_of(given.conditioning), len(given.tokens)) for given in batch])
        step = SlotStep(None, slots_N=tokens_N, places_N=places_N, chunks=tuple(chunks))
        kept_R = torch.tensor(kept, dtype=torch.int64, device=self._device)
        logits_RV = self._enter(tokens_N, positions_N, step, kept_R, self._spans(batch, chunks)) / temperature
        targets_R1 = torch.tensor(targets, dtype=torch.int64, device=self._device)[:, None]
        logprobs_R = torch.log_softmax(logits_RV, -1).gather(1, targets_R1)[:, 0].cpu()
        return list(torch.split(logprobs_R, [len(given.decided_N) for given in batch]))

    def _spans(self, batch: Sequence[ScoringInput], chunks: Sequence[Chunk]) -> list[Span]:
        if self._prompts is None:
            return []
        return [
            Span(
                conditioning=given.conditioning,
                features=self._prompts.enter(given.conditioning),
                row=chunk.first,
                start=0,
                stop=given.conditioning.positions.shape[-1],
            )
            for given, chunk in zip(batch, chunks, strict=True)
            if given.conditioning is not None
        ]

    def _range(self, start: int, size: int) -> torch.Tensor:
        return torch.arange(start, start + size, device=self._device)


def _batches(sequences: Sequence[ScoringInput], budget: int) -> Iterator[list[ScoringInput]]:
    batch: list[ScoringInput] = []
    size = 0
    for sequence in sequences:
        if batch and size + len(sequence.tokens) > budget:
            yield batch
            batch, size = [], 0
        batch.append(sequence)
        size += len(sequence.tokens)
    if batch:
        yield batch


class EncoderCache:
    """The features that towers made of conditioned prompts in flight, for one module.

    Features of a prompt are computed once a request, when its first chunk is due, and kept while a sample may still
    need them: a vision tower never runs for a sample or a chunk. New weights make them anew.
    """

    def __init__(self, model: VisionModel, module: torch.nn.Module) -> None:
        self._model = model
        self._module = module
        self._features: dict[TokenRequestState, Mapping[str, torch.Tensor]] = {}

    def spans(self, plan: Plan) -> list[Span]:
        """The spans in which a step feeds units of conditioned prompts, in the order of its units."""
        fed = [
            # Of those that decode, some feed the last unit of their prompt: they share the rest with another sample.
            *(
                (slot, plan.sequences[slot], len(plan.sequences[slot].tokens) - 1, 1)
                for slot in range(plan.num_decoding)
            ),
            *(
                (chunk.first, plan.sequences[chunk.slot], chunk.start, chunk.last - chunk.first)
                for chunk in plan.chunks
            ),
        ]
        spans = []
        for row, sequence, start, size in fed:
            parent, shown = sequence.parent, sequence.parent.conditioning
            if shown is not None and start < parent.num_prompt:
                if parent not in self._features:
                    self._features[parent] = self.enter(shown)
                stop, features = min(start + size, parent.num_prompt), self._features[parent]
                spans.append(Span(conditioning=shown, features=features, row=row, start=start, stop=stop))
        return spans

    def enter(self, conditioning: Conditioning) -> Mapping[str, torch.Tensor]:
        """Features that the units of a prompt enter with, under the loaded weights."""
        return self._model.enter(self._module, conditioning)

    def evaluate(
        self, tokens_N: torch.Tensor, positions_N: torch.Tensor, spans: Sequence[Span], kept_R: torch.Tensor
    ) -> torch.Tensor:
        """Logits [R, V] of a step with units of conditioned prompts; the positions are as if each unit were text."""
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
            VisionInputs(
                tokens_N=tokens_N, positions=positions, places_K=torch.cat(places), features=features, kept_R=kept_R
            ),
        )

    def retain(self, plan: Plan) -> None:
        """After a step, forget what no sample will need: all of its request have the prompt in the cache."""
        unfinished = {sequence.parent for sequence in plan.sequences[len(plan.drawn) :]}
        for parent in list(self._features):
            is_awaited = any(sequence.slot < 0 and sequence.reason is None for sequence in parent.samples)
            if parent not in unfinished and not is_awaited:
                del self._features[parent]

    def forget(self) -> None:
        """The weights are others now."""
        self._features.clear()
