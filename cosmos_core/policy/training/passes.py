"""The passes of a step: forward and backward of its micro-batches, after the forwards that must come before them.

Shape legend: N decisions of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import torch

from cosmos_core.policy.batches.batch import Counts, Share
from cosmos_core.policy.processes.group import GradientGroup
from cosmos_core.policy.processes.world import World
from cosmos_core.policy.training.average import AVERAGE, Average
from cosmos_core.policy.training.beforehand import Beforehand, comparison_of, settle, settled
from cosmos_core.policy.training.critic import Critic
from cosmos_core.policy.training.execution import Executor
from cosmos_core.policy.training.frozen import FrozenModel
from cosmos_core.policy.training.measures import Measures
from cosmos_core.policy.training.objective import Known, price, price_imitation
from cosmos_core.policy.training.preparing import Packer, Prepared
from cosmos_core.protocols import (
    Algorithm,
    Comparison,
    Consulting,
    Decided,
    Estimating,
    FrozenRole,
    Imitating,
    Loss,
)


def is_measured(world: World) -> bool:
    """Whether this process measures: of those that share sequences, and so their decisions, one does."""
    return world.mesh.place("cp") == 0 and world.mesh.place("tp") == 0


@attrs.frozen(kw_only=True, eq=False)
class Passes:
    """What the passes of one step are made with. All processes of a replica make the same ones.

    Attributes:
        algorithm: Prices decisions.
        executor: Runs the weights.
        packer: Packs micro-batches.
        world: The processes of the replica.
        frozen: Models that the algorithm may consult, by role.
        average: Of the weights, which it may consult too; None where none is kept.
        critic: Estimates returns; None where the algorithm needs none.
        temperature: At which decisions were taken, where a sequence does not say.
        version: Weight version that forwards have; None where rollout replicas have other weights at each version.
    """

    algorithm: Algorithm
    executor: Executor
    packer: Packer
    world: World
    frozen: Mapping[FrozenRole, FrozenModel]
    average: Average | None
    critic: Critic | None
    temperature: float
    version: int | None

    def prepare(self, share: Share, totals: Counts) -> list[Prepared]:
        """The micro-batches of a share, apart for each temperature.

        Args:
            share: This process's sequences.
            totals: Counts of the whole batch, all replicas.
        """
        assert {sequence.temperature for sequence in share.sequences} <= {*share.temperatures}, "one would be left out"
        return [
            self.packer.prepare(share, totals, self.algorithm, temperature=temperature, default=self.temperature)
            for temperature in share.temperatures
        ]

    def beside(self, share: Share, imitated: Counts | None) -> Prepared | None:
        """Demonstrations that are imitated beside rollouts, on every process; None where none are.

        Args:
            share: This process's sequences.
            imitated: Counts of all such demonstrations, all replicas.
        """
        if share.imitated is None or imitated is None or imitated.sequences == 0:
            return None
        return self.packer.prepare(share.imitated, imitated, self.algorithm, temperature=None, default=1.0)

    def know(
        self, parts: Sequence[Prepared], group: GradientGroup, measures: Measures
    ) -> list[tuple[Prepared, Beforehand]]:
        """Evaluate what must be known of the whole batch before the first backward changes anything.

        Args:
            parts: All micro-batches of rollouts.
            group: Those that train the same step.
            measures: Takes what is made of the sequences.

        Raises:
            GradientGroupError: The group broke.
            TrainingError: What the algorithm makes of a sequence does not fit it.
        """
        known = [(prepared, self._beforehand(prepared)) for prepared in parts]
        if not isinstance(self.algorithm, Estimating):
            return known
        settling = settled(self.algorithm, known, self.world, group)
        if is_measured(self.world):
            for estimates in settling:
                measures.take_estimates([*estimates.values()])
        return [
            (settle(prepared, estimates) if before.is_here else prepared, before)
            for (prepared, before), estimates in zip(known, settling, strict=True)
        ]

    def accumulate(self, prepared: Prepared, before: Beforehand, measures: Measures) -> None:
        """Run forward and backward of micro-batches of rollouts; gradients are added to those there are.

        Args:
            prepared: The micro-batches.
            before: What `know` gave of them.
            measures: Takes what is measured.
        """
        critic = self.critic

        def loss(index: int, decided: Decided) -> torch.Tensor:
            if index >= prepared.num_real:
                return decided.logprobs_N.sum() * 0.0
            known = prepared.known[index]
            decided = decided if critic is None else critic.judge(decided)
            old_N = before.old_logprobs(self.algorithm, known, index)
            priced = price(self.algorithm, decided, known, old_N, before.outputs(index, decided))
            return self._weighed(priced, decided, known, measures)

        self.executor.train(
            prepared.weighed(),
            temperature=prepared.temperature,
            with_entropy=self.algorithm.needs_entropy,
            loss=loss,
            kl_target=before.kl_targets(),
            with_features=critic is not None,
        )

    def imitate(self, prepared: Prepared, measures: Measures) -> None:
        """The same of demonstrations beside rollouts, which nothing is evaluated of beforehand."""
        algorithm = self.algorithm
        assert isinstance(algorithm, Imitating), "no other has demonstrations beside rollouts"

        def loss(index: int, decided: Decided) -> torch.Tensor:
            if index >= prepared.num_real:
                return decided.logprobs_N.sum() * 0.0
            known = prepared.known[index]
            return self._weighed(price_imitation(algorithm, decided, known), decided, known, measures)

        self.executor.train(
            prepared.weighed(), temperature=prepared.temperature, with_entropy=algorithm.needs_entropy, loss=loss
        )

    def _beforehand(self, prepared: Prepared) -> Beforehand:
        algorithm, asked = self.algorithm, comparison_of(self.algorithm)
        consulted = algorithm.consults if isinstance(algorithm, Consulting) else ()
        frozen = {
            role: self._consult(role, prepared, asked[1] if asked is not None and asked[0] == role else None)
            for role in consulted
        }
        old: list[Decided] | None = []
        critic = self.critic
        if algorithm.old_logprobs == "recompute" or critic is not None:
            old = self.executor.evaluate(
                prepared.batches,
                temperature=prepared.temperature,
                with_features=critic is not None,
                judge=None if critic is None else critic.judge,
            )
        if not self.executor.concludes:
            return Beforehand(is_here=False)
        assert old is not None, "the last stage is here"
        looks = {role: looks for role, looks in frozen.items() if looks is not None}
        return Beforehand(old=old, frozen=looks, asked=asked)

    def _consult(self, role: FrozenRole, prepared: Prepared, comparison: Comparison | None) -> list[Decided] | None:
        """What a frozen model says of micro-batches; None on a process without the last stage."""
        if role == AVERAGE:
            assert self.average is not None, "planning refuses a recipe that keeps none"
            with self.average.in_place():
                return self.executor.evaluate(
                    prepared.batches, temperature=prepared.temperature, prediction_for=comparison
                )
        return self.frozen[role].evaluate(
            prepared.batches,
            [sequence.payload for sequence in prepared.sequences],
            **self.packer.packing,
            temperature=prepared.temperature,
            prediction_for=comparison,
        )

    def _weighed(self, priced: Loss, decided: Decided, known: Known, measures: Measures) -> torch.Tensor:
        """A micro-batch's part of the step's loss, measured once of those that share it."""
        total = torch.dot(priced.loss_N, known.weights_N)
        if is_measured(self.world):
            measures.take(total.detach(), decided, priced, known, version=self.version)
        return total
