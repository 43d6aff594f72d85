"""A model that is asked and never trained, in the processes of the policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch

from cosmos_core.config.schema import PolicyConfig
from cosmos_core.errors import TrainingError
from cosmos_core.policy.adapters.beside import trained_tensors
from cosmos_core.policy.training.execution import Executor, make_executor
from cosmos_core.protocols import Decided, Divergence, FrozenRole, Mesh, MicroBatch, Model
from cosmos_core.types import Payload


class FrozenModel:
    """Evaluates the policy's micro-batches under other weights.

    Args:
        role: What it is to the algorithm, for people.
        model: Evaluates the module.
        module: Its weights, spread like the policy's.
        policy: The order of micro-batches in a pipeline.
        mesh: The processes of the replica.
        device: Where the policy is.
        is_offloaded: Whether a module of one process waits in the CPU's memory between uses. One that is spread over
            processes does so by its layout.
        follows: Whether its weights are those that each stage starts from.
    """

    def __init__(
        self,
        role: FrozenRole,
        model: Model,
        module: torch.nn.Module,
        *,
        policy: PolicyConfig,
        mesh: Mesh,
        device: torch.device,
        is_offloaded: bool,
        follows: bool,
    ) -> None:
        self.follows: Final = follows
        self._role: Final = role
        self._model: Final = model
        self._module: Final = module.requires_grad_(False)
        self._executor: Final[Executor] = make_executor(model, module, mesh, policy.parallel.schedule)
        self._device: Final = device
        self._moves: Final = is_offloaded and mesh.world_size == 1 and device.type != "cpu"
        if self._moves:
            module.to("cpu")

    def evaluate(
        self,
        batches: Sequence[MicroBatch],
        payloads: Sequence[Payload],
        *,
        budget: int,
        multiple: int,
        is_uniform: bool,
        temperature: float,
        outlook: Divergence | None,
    ) -> list[Decided] | None:
        """Evaluate the decisions of micro-batches.

        Args:
            batches: As the policy's model packed them; the last ones may be repeated, to keep step.
            payloads: What they were packed from.
            budget: They were packed with this budget,
            multiple: with this multiple,
            is_uniform: and with or without one size for all (see `Model.pack`).
            temperature: Divides the logits.
            outlook: The divergence for which the outlook is needed.

        Returns:
            What is decided in each; None on a process that has no last stage.

        Raises:
            TrainingError: This model packs the sequences otherwise.
        """
        own = self._model.pack(payloads, budget=budget, multiple=multiple, is_uniform=is_uniform)
        if len(batches) > len(own):
            own += [min(own, key=lambda batch: batch.num_units)] * (len(batches) - len(own))
        for batch, mine in zip(batches, own, strict=True):
            if (batch.sequences, batch.num_decisions) != (mine.sequences, mine.num_decisions):
                raise TrainingError(
                    f"[{self._role}]: its model packs sequences {mine.sequences} of {mine.num_decisions} decisions, "
                    f"the policy's {batch.sequences} of {batch.num_decisions}; it must count units as the policy's "
                    "does: take a model of the same family"
                )
        with self._here():
            return self._executor.evaluate(own, temperature=temperature, outlook=outlook)

    @torch.no_grad()
    def take_over(self, module: torch.nn.Module) -> None:
        """Have the weights that a module of the same make has now."""
        sources = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        for name, tensor in [*self._module.named_parameters(), *self._module.named_buffers()]:
            tensor.copy_(sources[name])

    def state(self) -> dict[str, torch.Tensor]:
        """Its weights by name, without those below adapters; no copies."""
        return trained_tensors(self._module)

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
