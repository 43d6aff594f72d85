"""What the first rank of an engine does besides what an engine of one process does: the others follow it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import torch
from torch import nn

from cosmos_core.errors import AttestationError, EngineError
from cosmos_core.protocols import EngineContext, Recording, TensorSlice
from cosmos_core.rollout.embedded.cache import LayerShape, SlotCache
from cosmos_core.rollout.embedded.options import EmbeddedOptions
from cosmos_core.rollout.embedded.ranks import messages
from cosmos_core.rollout.embedded.ranks.mesh import device_of
from cosmos_core.rollout.embedded.ranks.messages import Share
from cosmos_core.rollout.embedded.ranks.shares import Shares, build, joined, layout_of
from cosmos_core.rollout.embedded.ranks.staging import RanksUpdate
from cosmos_core.rollout.embedded.ranks.team import Team
from cosmos_core.rollout.embedded.ranks.vocabulary import Vocabulary
from cosmos_core.rollout.embedded.scheduler import Plan
from cosmos_core.rollout.serving.commands import LostProcessError
from cosmos_core.rollout.serving.given import Given
from cosmos_core.rollout.serving.ranks import RankCells


class Lead:
    """The first rank: its part of the model, and its word to the others.

    What it tells them and what it does itself are in one order, that of the engine's thread.

    Args:
        context: The engine's.
        options: The engine's.
        lost: Told once, on a thread of its own, when another rank ends.

    Attributes:
        module: This rank's part, once it is built.
        device: Where it is.
        shares: What it holds, once it is built.
        vocabulary: Makes its logits whole.
    """

    module: nn.Module
    device: torch.device
    shares: Shares
    vocabulary: Vocabulary

    def __init__(self, context: EngineContext, options: EmbeddedOptions, lost: Callable[[EngineError], None]) -> None:
        _check(context)
        self._context: Final = context
        self._team: Final = Team(context, options, lost)
        self._places: dict[int, Mapping[str, Share]] = {}
        self._cells: RankCells | None = None

    # -- life ---------------------------------------------------------------------------------------------------------

    def build(self) -> None:
        """Start the others, and build this rank's part while they build theirs.

        Raises:
            CosmosError: The model cannot be built or split, or this process cannot be a rank.
            LostProcessError: Another rank did not start.
        """
        context = self._context
        mesh, self.device = self._team.form(), device_of(context.device.type, 0)
        self.module, self.shares = build(
            context.model, seed=context.seed, dtype=context.dtype, device=self.device, mesh=mesh
        )
        num_tokens = int(self.module.get_input_embeddings().num_embeddings)  # type: ignore[operator]
        self.vocabulary = Vocabulary(num_tokens, mesh.group("tp"))

    def meet(self) -> None:
        """Wait until the others have built theirs: the time for that is longer than a collective's.

        Raises:
            EngineError: The parts do not make up the model.
            LostProcessError: Another rank ended, or takes too long.
        """
        self._places = {0: self.shares.places, **self._team.places()}
        self._cells = joined(self._places)

    def close(self) -> None:
        """End the others. Idempotent."""
        self._team.close()

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """What all ranks do at once: if it fails because one ended, that is what is told.

        Raises:
            LostProcessError: One ended.
        """
        try:
            yield
        except LostProcessError:
            raise
        except RuntimeError as error:  # what torch raises of every fault, a closed connection among them
            failure = self._team.failure()
            if failure is None:
                raise
            raise LostProcessError(failure) from error

    # -- steps --------------------------------------------------------------------------------------------------------

    def step(self, plan: Plan, num_kept: int) -> None:
        """Tell the others a step; `num_kept` slots hold what is needed of the cache."""
        decoding = plan.sequences[: plan.num_decoding]
        self._team.tell(
            messages.Step(
                num_units=plan.num_units,
                longest=plan.longest,
                num_kept=num_kept,
                tokens=[each.tokens[-1] for each in decoding],
                places=[len(each.tokens) - 1 for each in decoding],
                pieces=plan.pieces,
                piece_tokens=plan.piece_tokens,
                forks=plan.forks,
                shared=plan.shared,
                kept=plan.kept,
            )
        )

    def move(self, sources: Sequence[int], targets: Sequence[int], num_units: int) -> None:
        """Tell the others to copy slots."""
        self._team.tell(messages.Move(sources=list(sources), targets=list(targets), num_units=num_units))

    def score(self, sequences: Sequence[Given], *, temperature: float, budget: int) -> None:
        """Tell the others to score."""
        told = [
            messages.Sequence(tokens=list(each.tokens), num_given=each.num_given, decided=list(each.decided_N))
            for each in sequences
        ]
        self._team.tell(messages.Score(sequences=told, temperature=temperature, budget=budget))

    # -- weights ------------------------------------------------------------------------------------------------------

    def layout(self) -> dict[int, list[tuple[TensorSlice, str]]]:
        """The slices of each rank."""
        return {rank: layout_of(places) for rank, places in self._places.items()}

    def new_update(self, version: int) -> RanksUpdate:
        """An update of all ranks, to be written."""
        return RanksUpdate(version, self.shares.tensors, self._places)

    def load(self, update: RanksUpdate) -> None:
        """Load what was written, here and in the others.

        Raises:
            LostProcessError: Another rank has ended.
        """
        for rank, staging in update.stagings.items():
            self._team.tell_one(rank, messages.Load(), staging.memory.descriptor)
        update.apply()

    def attest(self, update: RanksUpdate) -> str:
        """The digest of what all ranks have loaded.

        Raises:
            AttestationError: A rank holds something else than was written for it; names it and the tensor.
            LostProcessError: Another rank has ended, or did not load in time.
        """
        assert self._cells is not None, "nothing is loaded before the ranks have met"
        mine = messages.Loaded(digests=self.shares.digests(), wrong=update.first_wrong())
        loaded = {0: mine, **self._team.loaded()}
        for rank, answer in loaded.items():
            if answer.wrong:
                raise AttestationError(
                    f"{answer.wrong}: rank {rank} of the engine holds something else than was written"
                )
        # A rank has one part of a tensor, which is a cell; nothing is asked of what it has no element of.
        digests = {
            rank: {name: [loaded[rank].digests[name]] if cells else [] for name, cells in self._cells.of(rank).items()}
            for rank in loaded
        }
        return self._cells.combine(digests, "the engine")


class LedCache(SlotCache):
    """The first rank's part of the cache: what is moved in it is moved in all."""

    def __init__(
        self,
        lead: Lead,
        shapes: Mapping[int, LayerShape],
        *,
        num_slots: int,
        step: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(shapes, num_slots=num_slots, step=step, dtype=dtype, device=device)
        self._lead: Final = lead

    def move(self, sources: Sequence[int], targets: Sequence[int], num_units: int) -> None:
        """Copy the first `num_units` units of some slots to others, on every rank."""
        self._lead.move(sources, targets, num_units)
        super().move(sources, targets, num_units)


def _check(context: EngineContext) -> None:
    """Raise EngineError for what the embedded engine only does in one process."""
    key = f"rollout.mesh.tp: {context.tensor_parallel}"
    if context.quantization != "none":
        raise EngineError(
            f"{key} with rollout.quantization = {context.quantization!r}: the embedded engine holds codes and scales "
            "in one process only; set one of them to its default"
        )
    if isinstance(context.model, Recording) and (records := context.model.records()):
        raise EngineError(
            f"{key}, and {records[0].option} asks for a record of what forwards do, which the embedded engine takes of "
            "one process only; set tp = 1, or leave that option out"
        )
