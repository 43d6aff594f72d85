"""The passes of a step: forward and backward of its micro-batches, after the forwards that must come before them.

Shape legend: N decisions of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs
import torch

from cosmos_core.policy.batches.batch import Counts, Share
from cosmos_core.policy.mesh.pipeline import Forward
from cosmos_core.policy.processes.group import GradientGroup
from cosmos_core.policy.processes.world import World
from cosmos_core.policy.training.average import AVERAGE, Average
from cosmos_core.policy.training.critic import Critic
from cosmos_core.policy.training.executor import Executor
from cosmos_core.policy.training.frozen import FrozenModel
from cosmos_core.policy.training.metrics import Measures
from cosmos_core.policy.training.microbatch import Packer, Prepared
from cosmos_core.policy.training.old_logprobs import Evaluated, comparison_of, with_estimates
from cosmos_core.policy.training.ratios import Ratios
from cosmos_core.protocols import Algorithm, Decided, Loss
from cosmos_core.protocols.algorithm import AdvantageEstimator
from cosmos_core.protocols.frozen import Comparison, FrozenRole, KLTarget


def is_measured(world: World) -> bool:
    """True if this process measures: of those that share sequences, and so their decisions, one does."""
    return world.mesh.place("cp") == 0 and world.mesh.place("tp") == 0


@attrs.frozen(kw_only=True, eq=False)
class Passes:
    """The passes of one step. All processes of a replica make the same ones.

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
        ratios: Takes the log-probs of rollouts.
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
    ratios: Ratios = attrs.field(factory=Ratios)

    def prepare(self, share: Share, totals: Counts) -> list[Prepared]:
        """Pack this process's sequences, apart for each temperature; `totals` are of all replicas."""
        assert {sequence.temperature for sequence in share.sequences} <= {*share.temperatures}, "one would be left out"
        return [
            self.packer.prepare(share, totals, self.algorithm, temperature=temperature, default=self.temperature)
            for temperature in share.temperatures
        ]

    def beside(self, share: Share, imitated: Counts | None) -> Prepared | None:
        """Pack demonstrations that are imitated beside rollouts; None, on every process, where there are none.

        Args:
            share: This process's sequences.
            imitated: Counts of all such demonstrations, all replicas.
        """
        if share.imitated is None or imitated is None or imitated.sequences == 0:
            return None
        return self.packer.prepare(share.imitated, imitated, self.algorithm, temperature=None, default=1.0)

    def evaluate(self, parts: Sequence[Prepared], group: GradientGroup, measures: Measures) -> list[Evaluated]:
        """Evaluate what must be known of the whole batch before the first backward changes anything.

        Args:
            parts: All micro-batches of rollouts.
            group: Those that train the same step.
            measures: Takes the metrics of estimates.

        Raises:
            GradientGroupError: The group broke.
            TrainingError: What the algorithm makes of a sequence does not fit it.
        """
        evaluated = [self._evaluated(prepared) for prepared in parts]
        if isinstance(self.algorithm, AdvantageEstimator):
            evaluated, estimates = with_estimates(self.algorithm, evaluated, self.world, group)
            if is_measured(self.world):
                measures.take_estimates(estimates)
        return evaluated

    def accumulate(self, part: Evaluated, measures: Measures) -> None:
        """Run forward and backward of micro-batches of rollouts; gradients are added to those there are."""
        prepared = part.prepared

        def price(index: int, decided: Decided) -> Loss:
            old_N, frozen = part.old_logprobs(self.algorithm, index), part.outputs(index, decided)
            return self.algorithm.loss(prepared.known[index].decisions(decided, old_N, frozen))

        self._train(prepared, price, measures, kl_targets=part.kl_targets(), critic=self.critic)

    def imitate(self, prepared: Prepared, measures: Measures) -> None:
        """The same of demonstrations beside rollouts, for which nothing is evaluated before."""
        known, imitation = prepared.known, self.algorithm.imitation
        self._train(prepared, lambda index, decided: imitation(known[index].decisions(decided)), measures)

    def _train(
        self,
        prepared: Prepared,
        price: Callable[[int, Decided], Loss],
        measures: Measures,
        *,
        kl_targets: Sequence[KLTarget] = (),
        critic: Critic | None = None,
    ) -> None:
        def loss(index: int, decided: Decided) -> torch.Tensor:
            if index >= prepared.num_real:
                return decided.logprobs_N.sum() * 0.0
            decided = decided if critic is None else critic.judge(decided)
            priced, known = price(index, decided), prepared.known[index]
            total = torch.dot(priced.loss_N, known.weights_N)
            if is_measured(self.world):
                measures.take(total.detach(), decided, priced, known, version=self.version)
                self.ratios.take(prepared, index, decided.logprobs_N)
            return total

        needs_entropy = self.algorithm.needs_entropy
        forward = Forward(
            temperature=prepared.temperature, with_entropy=needs_entropy, with_features=critic is not None
        )
        self.executor.train(prepared.weighed(), forward, loss, kl_targets)

    def _evaluated(self, prepared: Prepared) -> Evaluated:
        algorithm, critic = self.algorithm, self.critic
        compared = comparison_of(algorithm)
        frozen = {
            role: self._consult(role, prepared, compared[1] if compared is not None and compared[0] == role else None)
            for role in algorithm.consults
        }
        old: list[Decided] | None = []
        if algorithm.old_logprobs == "recompute" or critic is not None:
            forward = Forward(temperature=prepared.temperature, with_features=critic is not None)
            old = self.executor.evaluate(prepared.batches, forward, None if critic is None else critic.judge)
        if not self.executor.concludes:
            return Evaluated(prepared=prepared, is_here=False)
        assert old is not None, "the last stage is here"
        outputs = {role: each for role, each in frozen.items() if each is not None}
        return Evaluated(prepared=prepared, old=old, frozen=outputs, compared=compared)

    def _consult(self, role: FrozenRole, prepared: Prepared, comparison: Comparison | None) -> list[Decided] | None:
        """A frozen model's outputs for micro-batches; None on a process without the last stage."""
        forward = Forward(temperature=prepared.temperature, prediction_for=comparison)
        if role == AVERAGE:
            assert self.average is not None, "planning refuses a recipe that keeps none"
            with self.average.in_place():
                return self.executor.evaluate(prepared.batches, forward)
        payloads = [sequence.payload for sequence in prepared.sequences]
        return self.frozen[role].evaluate(prepared.batches, payloads, self.packer.packing, forward)
