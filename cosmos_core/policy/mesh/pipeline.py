"""Micro-batches through the stages of a pipeline: forward alone, or forward and backward in a schedule."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs
import torch
import torch.distributed as dist
from torch import nn

from cosmos_core.models.parallel.channel import broadcasted
from cosmos_core.models.parallel.stages import stage_indices
from cosmos_core.policy.mesh.layout import STAGES_PER_RANK
from cosmos_core.policy.mesh.schedules import Line, Message, Schedule, StageWork, num_filled, run_schedule
from cosmos_core.protocols import Decided, MicroBatch
from cosmos_core.protocols.frozen import Comparison, KLTarget
from cosmos_core.protocols.layout import Mesh
from cosmos_core.protocols.model import PipelinedModel


@attrs.frozen(kw_only=True)
class Forward:
    """The settings of a forward (see `Model.decide`)."""

    temperature: float
    with_entropy: bool = False
    prediction_for: Comparison | None = None
    with_features: bool = False

    def arguments(self, kl_targets: Sequence[KLTarget] = ()) -> dict[str, Any]:
        """The keywords of `Model.decide`; models that cannot give more than log-probs and entropy get no others."""
        optional = {
            "prediction_for": self.prediction_for,
            "kl_target": kl_targets[0] if kl_targets else None,
            "with_features": self.with_features or None,
        }
        asked = {name: value for name, value in optional.items() if value is not None}
        return {"temperature": self.temperature, "with_entropy": self.with_entropy, **asked}


class Pipeline:
    """Runs the stages of this process (see `executor.Sequential`).

    Every process of the replica makes the same calls with the same number of micro-batches; those of one pipeline are
    given the same micro-batches, all of one size.

    Args:
        model: Evaluates stages.
        module: The stages of this process.
        mesh: The processes; those of the default process group.
        schedule: Order of micro-batches in training.
        splits_backward: Whether `zero-bubble` computes the gradients of weights apart from those of activations. A
            stage that recomputes activations would do so for each of its weights, and a compiled layer's backward pass
            runs once only; without the split both are computed at once, and the order of micro-batches stays.
        keeps_gradients: Whether stages keep whole gradients, and whole weights, until all micro-batches are through; if
            not, FSDP reduces and frees them in each backward pass, which must not be split then.
    """

    def __init__(
        self,
        model: PipelinedModel,
        module: nn.Module,
        mesh: Mesh,
        schedule: Schedule,
        *,
        splits_backward: bool = True,
        keeps_gradients: bool = True,
    ) -> None:
        assert keeps_gradients or not splits_backward, "FSDP reduces gradients before a split pass has computed them"
        self._model: Final = model
        self._group: Final = mesh.group("pp")
        self._schedule: Final[Schedule] = schedule
        self._splits_backward: Final = splits_backward
        self._keeps_gradients: Final = keeps_gradients
        self._size: Final = mesh.size("pp")
        self._num_stages: Final = self._size * STAGES_PER_RANK[schedule]
        held = [self._held(place) for place in range(self._size)]
        self._owners: Final = {index: place for place in range(self._size) for index in held[place]}
        self._place: Final = mesh.place("pp")
        self._stages: Final = dict(zip(held[self._place], model.stages(module), strict=True))
        self._device: Final = _device(mesh.axis("pp").device_type)
        self._messages: Final[dict[int, Message]] = {}
        # Copies within a process are listed by no one else (see `models.parallel.stages.Stages`).
        self._copies: Final[Sequence[tuple[nn.Parameter, nn.Parameter]]] = getattr(module, "copies", ())

    @property
    def concludes(self) -> bool:
        """True on the process with the last stage."""
        return self._num_stages - 1 in self._stages

    def evaluate(
        self, batches: Sequence[MicroBatch], forward: Forward, judge: Callable[[Decided], Decided] | None = None
    ) -> list[Decided] | None:
        """Evaluate without gradients; None on a process without the last stage."""
        decided: list[Decided] = []
        if not batches:
            return decided if self.concludes else None

        def conclude(stage: nn.Module, batch: MicroBatch, received: torch.Tensor) -> None:
            found = self._model.conclude(stage, batch, received, **forward.arguments())
            decided.append(found if judge is None else judge(found))

        with torch.no_grad():
            self._copy_weights()
            self._relay(batches, conclude)
        return decided if self.concludes else None

    def train(
        self,
        batches: Sequence[MicroBatch],
        forward: Forward,
        loss: Callable[[int, Decided], torch.Tensor],
        kl_targets: Sequence[KLTarget] = (),
    ) -> None:
        """Run forward and backward of each micro-batch; gradients are added to those there are.

        A schedule that needs more micro-batches is given some of them again, from which nothing is learned.
        """
        if not batches:
            return
        self._copy_weights()
        message = self._message(batches)

        def run(index: int, received: torch.Tensor, number: int) -> torch.Tensor:
            batch, stage = batches[number % len(batches)], self._stages[index]
            if number >= len(batches):
                # Without them, a stage neither counts the batch nor adds penalties of its own.
                batch = attrs.evolve(batch, weights_N=None)
            if index < self._num_stages - 1:
                return self._advance(index, batch, None if index == 0 else received, message)
            if number >= len(batches):
                return received.float().sum() * 0.0
            asked = forward.arguments(kl_targets[number : number + 1])
            decided = self._model.conclude(stage, batch, received, **asked)
            return loss(number, decided)

        works = [
            StageWork(
                index=index,
                # What is no FSDP module itself, torch leaves alone: FSDP's own hooks do their work in each pass.
                module=stage if self._keeps_gradients else nn.ModuleList([stage]),
                forward=functools.partial(run, index),
            )
            for index, stage in self._stages.items()
        ]
        line = Line(
            group=self._group,
            num_stages=self._num_stages,
            device=self._device,
            message=message,
            splits_backward=self._splits_backward,
        )
        run_schedule(self._schedule, works, line, num_filled(len(batches), self._size, self._schedule))
        self._collect_gradients()

    def _relay(
        self, batches: Sequence[MicroBatch], conclude: Callable[[nn.Module, MicroBatch, torch.Tensor], None]
    ) -> None:
        """All micro-batches through one stage of this process, then through the next."""
        message = self._message(batches)
        sends: list[tuple[dist.Work | None, torch.Tensor]] = []
        before: list[torch.Tensor] = []
        for index, stage in self._stages.items():
            outputs: list[torch.Tensor] = []
            for number, batch in enumerate(batches):
                is_local = index - 1 in self._stages
                received = before[number] if is_local else self._receive(index - 1, message)
                if index == self._num_stages - 1:
                    assert received is not None
                    conclude(stage, batch, received)
                    continue
                outputs.append(self._advance(index, batch, received, message))
                if not self._waits_to_send(index):
                    sends += self._send(index, outputs[-1:])
            if self._waits_to_send(index):
                sends += self._send(index, outputs)
            before = outputs
        for work, _ in sends:
            if work is not None:
                work.wait()

    def _waits_to_send(self, index: int) -> bool:
        """True if a stage receives from and sends to the same process, which would have to do both at a time."""
        before, after = self._owners.get(index - 1), self._owners.get(index + 1)
        return before == after and before != self._place

    def _send(self, index: int, outputs: Sequence[torch.Tensor]) -> list[tuple[dist.Work | None, torch.Tensor]]:
        """Begin to send to the stage after, unless it is here; the tensors must live until that is done."""
        if index + 1 in self._stages:
            return []
        peer = dist.get_global_rank(self._group, self._owners[index + 1])
        return [(dist.isend(output, peer, self._group), output) for output in outputs]

    def _receive(self, source: int, message: Message) -> torch.Tensor | None:
        """Receive from a stage of another process; None before the first stage."""
        if source < 0:
            return None
        received = torch.empty(message.shape, dtype=message.dtype, device=self._device)
        dist.recv(received, dist.get_global_rank(self._group, self._owners[source]), self._group)
        return received

    def _advance(self, index: int, batch: MicroBatch, received: torch.Tensor | None, message: Message) -> torch.Tensor:
        output = self._model.advance(self._stages[index], batch, received).contiguous()
        found = Message(shape=tuple(output.shape), dtype=output.dtype)
        assert found == message, f"stage {index} gave {found} for {batch.num_units} units, the first {message}"
        return output

    def _message(self, batches: Sequence[MicroBatch]) -> Message:
        """Shape and dtype of what stages pass on for micro-batches of this size, found by the first stage once."""
        sizes = {batch.num_units for batch in batches}
        assert len(sizes) == 1, f"micro-batches of one size each are needed in a pipeline, these have {sorted(sizes)}"
        (num_units,) = sizes
        # Weights are gathered over processes that may know the size already, so all look again if one must.
        is_new = torch.tensor([num_units not in self._messages], dtype=torch.int32, device=self._device)
        dist.all_reduce(is_new, dist.ReduceOp.MAX)
        if is_new.item():
            self._messages[num_units] = self._look(batches[0])
        return self._messages[num_units]

    @torch.no_grad()
    def _look(self, batch: MicroBatch) -> Message:
        """Shape and dtype of the first stage's output for a micro-batch, told to all."""
        told = b""
        if 0 in self._stages:
            output = self._model.advance(self._stages[0], batch, None)
            told = json.dumps([output.shape, str(output.dtype).removeprefix("torch.")]).encode()

        def broadcast(buffer: bytearray) -> bytes:
            tensor = torch.frombuffer(buffer, dtype=torch.uint8).to(self._device)
            dist.broadcast(tensor, dist.get_global_rank(self._group, self._owners[0]), self._group)
            return tensor.cpu().numpy().tobytes()

        shape, dtype = json.loads(broadcasted(told, broadcast))
        return Message(shape=tuple(shape), dtype=getattr(torch, dtype))

    @torch.no_grad()
    def _copy_weights(self) -> None:
        for parameter, twin in self._copies:
            twin.copy_(parameter)

    @torch.no_grad()
    def _collect_gradients(self) -> None:
        for parameter, twin in self._copies:
            if twin.grad is not None:
                parameter.grad = twin.grad if parameter.grad is None else parameter.grad.add_(twin.grad)
            twin.grad = None

    def _held(self, place: int) -> tuple[int, ...]:
        return stage_indices(
            size=self._size,
            place=place,
            per_process=STAGES_PER_RANK[self._schedule],
            is_v_shaped=self._schedule == "zero-bubble",
        )


def _device(kind: str) -> torch.device:
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())
