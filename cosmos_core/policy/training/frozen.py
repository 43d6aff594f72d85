"""A model that is evaluated and never trained, in the processes of the policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import attrs
import torch

from cosmos_core.config.schema import PolicyConfig
from cosmos_core.errors import TrainingError
from cosmos_core.models.documents import pack_samples
from cosmos_core.models.parallel.lora import trained_tensors
from cosmos_core.policy.mesh.pipeline import Forward
from cosmos_core.policy.training.executor import Executor, make_executor, watch_layers
from cosmos_core.policy.training.microbatch import Packing, pieces
from cosmos_core.protocols import Decided, MicroBatch, Model
from cosmos_core.protocols.frozen import FrozenRole
from cosmos_core.protocols.layout import Mesh
from cosmos_core.protocols.model import MoEModel
from cosmos_core.replica.activity import Activity
from cosmos_core.types import Payload
from cosmos_core.weights.shards import canonical_tensors

_GENERATED: Final = frozenset({"logprobs", "versions"})
"""Arrays that an engine adds to whatever it generates."""


@attrs.define(eq=False, slots=False)
class FrozenModel:
    """Evaluates the policy's micro-batches under other weights.

    Attributes:
        role: What it is to the algorithm, for people.
        model: Evaluates the module.
        build: Makes its weights, spread like the policy's.
        policy: The order of micro-batches in a pipeline.
        mesh: The processes of the replica.
        device: Where the policy is.
        is_offloaded: Whether a module of one process waits in the CPU's memory between uses. One that is spread over
            processes does so by its layout.
        follows: Whether its weights are those that each stage starts from. One that has weights of its own decides by
            them alone: it does not repeat what the policy's forwards did while they generated (`MoEModel`).
    """

    _role: FrozenRole
    _model: Model
    _build: Callable[[], torch.nn.Module]
    _policy: PolicyConfig
    _mesh: Mesh
    _device: torch.device
    _is_offloaded: bool
    follows: bool

    def __attrs_post_init__(self) -> None:
        model, module = self._model, self._build()
        # By what is trained of the policy's: once frozen, nothing tells what lies below adapters.
        self._saved = frozenset(trained_tensors(module))
        self._module = module.requires_grad_(False)
        self._is_initial = True
        recorded = {record.name for record in model.records()} if isinstance(model, MoEModel) else set()
        self._unread = frozenset() if self.follows or not recorded else recorded | _GENERATED
        self._executor: Executor = make_executor(model, module, self._mesh, self._policy.parallel.schedule)
        self._moves = self._is_offloaded and self._mesh.world_size == 1 and self._device.type != "cpu"
        if self._moves:
            module.to("cpu")

    def evaluate(
        self, batches: Sequence[MicroBatch], payloads: Sequence[Payload], packing: Packing, forward: Forward
    ) -> list[Decided] | None:
        """Evaluate the decisions of micro-batches.

        Args:
            batches: As the policy's model packed them; the last ones may be repeated, to keep step.
            payloads: What they were packed from.
            packing: How they were packed.
            forward: What is wanted of each.

        Returns:
            The decisions of each; None on a process that has no last stage.

        Raises:
            TrainingError: This model packs the sequences otherwise.
        """
        own = pack_samples(self._model, [self._readable(each) for each in payloads], **packing)
        if len(batches) > len(own):
            own += [min(own, key=lambda batch: batch.num_units)] * (len(batches) - len(own))
        for batch, mine in zip(batches, own, strict=True):
            if [*pieces(batch)] != [*pieces(mine)]:
                raise TrainingError(
                    f"[{self._role}]: its model packs {_shown(mine)}, the policy's {_shown(batch)}; it must count "
                    "units as the policy's does: take a model of the same family"
                )
        with self._here():
            return self._executor.evaluate(own, forward)

    def take_over(self, module: torch.nn.Module) -> None:
        """Have the weights that a module of the same make has now."""
        self._is_initial = False
        self._copy(module)

    def begin_again(self) -> None:
        """Have the weights that it was built with; all processes of the replica call it."""
        if not self._is_initial:
            self._copy(self._build())
            self._is_initial = True

    def watch(self, activity: Activity) -> None:
        """Count its forwards as progress, too."""
        watch_layers(self._module, activity)

    @torch.no_grad()
    def _copy(self, module: torch.nn.Module) -> None:
        sources = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        for name, tensor in [*self._module.named_parameters(), *self._module.named_buffers()]:
            tensor.copy_(sources[name])

    def state(self) -> dict[str, torch.Tensor]:
        """The model's weights by name, without those below adapters; no copies."""
        return {name: each for name, each in canonical_tensors(self._module).items() if name in self._saved}

    def held(self) -> list[torch.Tensor]:
        """Every tensor of it."""
        return [*self._module.parameters(), *self._module.buffers()]

    def _readable(self, payload: Payload) -> Payload:
        """A payload without what the policy's forwards recorded: as if it were a demonstration."""
        if not self._unread & payload.arrays.keys():
            return payload
        arrays = {name: array for name, array in payload.arrays.items() if name not in self._unread}
        return attrs.evolve(payload, arrays=arrays)

    @contextmanager
    def _here(self) -> Iterator[None]:
        """With the weights on the device."""
        if not self._moves:
            yield
            return
        self._module.to(self._device)
        try:
            yield
        finally:
            self._module.to("cpu")


def _shown(batch: MicroBatch) -> str:
    found = f"sequences {batch.sequences} of {batch.num_decisions} decisions"
    firsts = tuple(span.first for span in batch.spans)
    return f"{found} from {firsts} on" if any(firsts) else found
